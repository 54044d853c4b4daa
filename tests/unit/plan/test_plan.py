"""Plan arithmetic against numbers worked out by hand from public configs, and what the engine allocates."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
import torch
from rich.console import Console

from snapstream.cli.plan import print_plan
from snapstream.config import EngineOptions, ModelConfig, ReselectionConfig, make_selector
from snapstream.kernels.pytorch import CHUNK
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import KVSpec
from snapstream.models.registry import model_config_from_dict
from snapstream.models.sharding import decode_weight_bytes
from snapstream.models.views import StagingBuffers
from snapstream.plan.memory import FRAMEWORK_BYTES, SCORING_KEYS, DraftMemory, draft_memory, prefill_memory
from snapstream.plan.plan import Device, Plan, default_budgets, make_plan
from snapstream.spec_prefill.settings import ScoringSettings

GIB = 2**30
MIB = 2**20

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_32_1B = {
    **LLAMA_31_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}


@pytest.fixture
def llama_8b() -> ModelConfig:
    return model_config_from_dict(LLAMA_31_8B)


def plan_8b(config: ModelConfig, **changes: object) -> Plan:
    """For 80 GiB at 3.35 TB/s; ``changes`` are settings of the engine, or arguments of ``make_plan``."""
    said = {name: changes.pop(name) for name in list(changes) if name in EngineOptions.__dataclass_fields__}
    gpu = Device(memory_bytes=changes.pop("memory_bytes", 80 * GIB))  # type: ignore[arg-type]
    options = EngineOptions.of(EngineOptions(dtype="bfloat16"), said)
    return make_plan(config, options, gpu=gpu, **changes)  # type: ignore[arg-type]


def test_rows_of_llama_8b(llama_8b: ModelConfig) -> None:
    plan = plan_8b(llama_8b)
    assert plan.num_parameters == 8_030_261_248
    assert plan.weight_bytes == 16_060_522_496
    assert plan.token_bytes == 128 * 1024
    assert [row.name for row in plan.rows] == ["full", "65536", "32768", "16384", "8192"]
    assert [row.row_bytes for row in plan.rows] == [16 * GIB, 8 * GIB, 4 * GIB, 2 * GIB, 1 * GIB]
    assert [row.full_fraction for row in plan.rows] == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]


def test_rows_in_fp8_are_half_of_bf16_and_their_scales(llama_8b: ModelConfig) -> None:
    wide, narrow = plan_8b(llama_8b), plan_8b(llama_8b, kv_dtype="fp8")
    scales = 2 * 32 * 8 * 4
    assert narrow.kv_dtype == "fp8" and narrow.token_bytes == 64 * 1024
    assert [row.row_bytes - scales for row in narrow.rows] == [row.row_bytes // 2 for row in wide.rows]
    assert (narrow.weight_bytes, narrow.prefill) == (wide.weight_bytes, wide.prefill)  # stay in bf16
    assert [row.max_rows for row in wide.rows] == [2, 6, 14, 30, 61]
    assert [row.max_rows for row in narrow.rows] == [6, 14, 30, 61, 121]
    assert all(n.tokens_per_s_one > w.tokens_per_s_one for n, w in zip(narrow.rows, wide.rows, strict=True))
    out = io.StringIO()
    print_plan(narrow, Console(file=out, width=100))
    assert "64 KiB per token in fp8" in out.getvalue()


def test_prefill_of_llama_8b(llama_8b: ModelConfig) -> None:
    plan = plan_8b(llama_8b)
    assert plan.prefill.hidden_bytes == 1 * GIB
    assert plan.prefill.staging_bytes == 512 * MIB
    assert plan.prefill.transient_bytes == 512 * (5 * 4096 + 3 * 14336) * 2  # the MLP of one chunk: H E = D here
    assert plan.all_layers_staging_bytes == 16 * GIB


def test_scoring_sets_the_temporaries_of_short_chunks(llama_8b: ModelConfig) -> None:
    memory = prefill_memory(llama_8b, 131_072, chunk_len=64, dtype="bfloat16", selector=make_selector())
    block = 32 * 32 * 4096  # voting queries x heads x keys
    keys = 8 * 128 * 4096
    scores = 3 * 8 * 131_072  # as voted, pooled, one pass of carrying ahead
    assert memory.transient_bytes == 4 * (block + keys + scores)


def test_prefill_memory_does_not_grow_with_layers(llama_8b: ModelConfig) -> None:
    deep = dataclasses.replace(llama_8b, num_layers=3 * llama_8b.num_layers)
    sizes = [
        prefill_memory(c, 32_768, chunk_len=512, dtype="bfloat16", selector=make_selector()) for c in (llama_8b, deep)
    ]
    assert sizes[0] == sizes[1]


def test_rows_that_fit_and_speed_of_llama_8b(llama_8b: ModelConfig) -> None:
    plan = plan_8b(llama_8b)
    pool = (131_072 + 4096) * (4096 + 2 * 8 * 128) * 2 + 4 * 65_011_712  # the pool and 2,048 tokens
    assert plan.prefill_pool_bytes == pool
    left = 80 * GIB - 16_060_522_496 - pool - FRAMEWORK_BYTES  # 63.0 GiB: 15 rows of 4 GiB, one of them the padding row
    batch = 2 * (128_256 * 40 + (4 * 4096 + 3 * 48 * 128 + 3 * 14_336) * 2)  # decode of a row, 10.1 MiB
    assert left // (4 * GIB) == 15 and (left - 4 * GIB) // (4 * GIB + batch) == 14
    row = plan.rows[2]
    assert row.max_rows == 14
    step_weights = 16_060_522_496 - 128_256 * 4096 * 2
    assert row.tokens_per_s_one == pytest.approx(3.35e12 / (step_weights + 4 * GIB))
    assert row.tokens_per_s_max == pytest.approx(14 * 3.35e12 / (step_weights + 14 * 4 * GIB))
    assert row.tokens_per_s_max == pytest.approx(624.2, abs=0.1)


def test_model_larger_than_memory_fits_no_row(llama_8b: ModelConfig) -> None:
    for row in plan_8b(llama_8b, memory_bytes=8 * GIB).rows:
        assert row.max_rows == 0
        assert row.tokens_per_s_max == 0


def test_memory_for_padding_row_only_fits_no_row(llama_8b: ModelConfig) -> None:
    fixed = 16_060_522_496 + plan_8b(llama_8b).prefill_pool_bytes + FRAMEWORK_BYTES + 32 * MIB  # for 2 decoding rows
    max_rows = [
        plan_8b(llama_8b, memory_bytes=fixed + rows * 4 * GIB, budgets=[32_768]).rows[1].max_rows for rows in (1, 2, 3)
    ]
    assert max_rows == [0, 1, 2]


def test_short_prompt_reads_only_its_own_slots(llama_8b: ModelConfig) -> None:
    plan = plan_8b(llama_8b, prompt_len=1000, max_model_len=8192, budgets=[4096])
    full, budgeted = plan.rows
    assert (full.capacity, full.visible_slots, budgeted.visible_slots) == (8192, 1000, 1000)
    assert full.tokens_per_s_one == budgeted.tokens_per_s_one


def test_tied_embedding_is_read_in_full() -> None:
    config = model_config_from_dict(LLAMA_32_1B)
    assert decode_weight_bytes(config, "bfloat16") == 1_235_814_400 * 2
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    assert decode_weight_bytes(untied, "bfloat16") == 1_235_814_400 * 2


def test_default_budgets_stop_at_the_smallest_possible() -> None:
    assert default_budgets(131_072) == (65_536, 32_768, 16_384, 8192)
    assert default_budgets(200) == (100, 50)
    assert default_budgets(36) == ()


def test_default_prompt_is_the_context_up_to_a_limit(llama_8b: ModelConfig) -> None:
    assert plan_8b(dataclasses.replace(llama_8b, max_position=8192)).prompt_len == 8192
    long = plan_8b(dataclasses.replace(llama_8b, max_position=10**6))
    assert (long.prompt_len, long.max_model_len) == (131_072, 131_072)
    limited = plan_8b(llama_8b, max_model_len=4096)
    assert (limited.prompt_len, limited.max_model_len) == (4096, 4096)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_len": 131_073}, ("prompt_len is 131073", "131072", "context")),
        ({"prompt_len": 0}, ("prompt_len is 0", "from 1")),
        ({"max_model_len": 200_000}, ("max_model_len is 200000", "131072")),
        ({"prompt_len": 4097, "max_model_len": 4096}, ("prompt_len is 4097", "4096")),
        ({"max_model_len": 0}, ("max_model_len is 0", ">= 1")),
        ({"chunk_len": -1}, ("chunk_len is -1", ">= 1")),
        ({"chunk_len": 131_073}, ("chunk_len is 131073", "from 1 to 131072")),
        ({"dtype": "int8"}, ("dtype is 'int8'", "bfloat16")),
        ({"budgets": [35]}, ("budget of 35", "36")),
    ],
)
def test_wrong_values_name_value_and_limit(
    llama_8b: ModelConfig, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:
        plan_8b(llama_8b, **changes)
    for word in words:
        assert word in str(caught.value)


def test_plan_agrees_with_what_the_engine_allocates() -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=96,
        max_position=512,
    )
    plan = make_plan(config, EngineOptions(), budgets=[64])
    spec = KVSpec.of(config, "float32")
    buffers = StagingBuffers(spec, config.hidden_size, plan.prompt_len, torch.float32, "cpu")
    assert plan.prefill.hidden_bytes + plan.prefill.staging_bytes == buffers.num_bytes
    assert KVCache(spec, 5, 64, "cpu").num_bytes == 6 * plan.rows[1].row_bytes
    assert SCORING_KEYS == CHUNK


def test_report_prints_every_row(llama_8b: ModelConfig) -> None:
    out = io.StringIO()
    print_plan(plan_8b(llama_8b, budgets=[32_768, 65_536]), Console(file=out, width=100))
    text = out.getvalue()
    for words in (
        "8,030.3M",
        "128 KiB per token",
        "1 GiB hidden states",
        "512 MiB staging",
        "80 GiB, 3,350 GB/s",
    ):
        assert words in text
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.split("─\n")[1].splitlines()]
    assert lines[:2] == [
        ["full", "16 GiB", "100 %", "2", "104", "136"],
        ["32,768", "4 GiB", "25 %", "14", "174", "624"],
    ]
    assert lines[2][0] == "65,536"


def test_report_says_none_where_no_row_fits(llama_8b: ModelConfig) -> None:
    out = io.StringIO()
    print_plan(plan_8b(llama_8b, memory_bytes=8 * GIB, budgets=[4096]), Console(file=out, width=100))
    assert out.getvalue().count("none") == 2


def test_reselection_hops_and_a_draft_are_counted(llama_8b: ModelConfig) -> None:
    plain = plan_8b(llama_8b, budgets=[32_768])
    rescored = plan_8b(llama_8b, budgets=[32_768], reselection=ReselectionConfig(num_queries=64))
    own = 32 * (64 * 4096 * 2 + 4 * 8 * 32_768)  # layers; queries in bf16, a vote per slot and kv head in fp32
    assert rescored.rows[1].row_bytes == plain.rows[1].row_bytes + own
    assert rescored.rows[0] == plain.rows[0]  # a full row has nothing to choose
    hopped = plan_8b(llama_8b, budgets=[32_768], selector="hops")
    assert hopped.prefill.query_bytes == 131_072 * 4096 * 2
    assert hopped.prefill.total_bytes == plain.prefill.total_bytes + hopped.prefill.query_bytes
    assert hopped.prefill_pool_bytes == plain.prefill_pool_bytes + (131_072 + 4096) * 4096 * 2
    draft = DraftMemory(weight_bytes=4 * GIB, working_bytes=4 * GIB)
    assert plan_8b(llama_8b, budgets=[32_768], draft=draft).rows[1].max_rows == plain.rows[1].max_rows - 2
    out = io.StringIO()
    print_plan(dataclasses.replace(hopped, draft=draft), Console(file=out, width=100))
    assert "1 GiB queries of one layer, for hops" in out.getvalue()
    assert "4 GiB of weights, 4 GiB at peak while it scores a text" in out.getvalue()
    with pytest.raises(ValueError, match="a ring of 32 slots is too small for KV re-selection"):
        plan_8b(llama_8b, budgets=[64], reselection=ReselectionConfig())


def test_passages_that_look_ahead_together_are_held_together() -> None:
    """Qwen3-0.6B in bf16: 112 KiB of K and V per token in 28 layers, four passages of 8,192 on a GPU, one on a CPU."""
    model = model_config_from_dict({**LLAMA_32_1B, "num_hidden_layers": 28, "head_dim": 128, "hidden_size": 1024,
                                    "num_attention_heads": 16, "intermediate_size": 3072})  # fmt: skip
    settings = ScoringSettings(context_len=8192)
    held = 8192 * 112 * 1024
    gpu = draft_memory(model, settings, dtype="bfloat16", device="cuda:0")
    assert 4 * held < gpu.working_bytes < 4.3 * held
    assert held < draft_memory(model, settings, dtype="bfloat16", device="cpu").working_bytes < 1.2 * held
    whole = draft_memory(model, ScoringSettings(long_texts="refuse"), dtype="bfloat16", device="cuda")
    assert (16 + 16 / 28) * held < whole.working_bytes < 17.2 * held  # one text of 131,072, and a layer of it staged
