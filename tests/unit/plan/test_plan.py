"""Plan arithmetic against numbers worked out by hand from public configs, predicted times of steps and prompts over
ranks at the sizes of DeepSeek-R1, and what the engine allocates.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.predictor import HOST_S, LINKS, PRODUCT_SHARE, READ_SHARE, Link, Predictor
from benchmarks.published import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_30B
from snapstream.cli.__main__ import main
from snapstream.cli.plan import print_plan
from snapstream.config import EngineOptions, KVBudget, ModelConfig, WeightFormats, make_selector
from snapstream.config.weights import StoredWeights, WeightFormat
from snapstream.kernels.pytorch import CHUNK
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import KVSpec
from snapstream.models.registry import kv_spec_of, model_config_from_dict
from snapstream.models.sharding import decode_weight_bytes
from snapstream.models.views import StagingBuffers
from snapstream.plan.fit import engine_config
from snapstream.plan.memory import (
    FRAMEWORK_BYTES,
    SCORING_KEYS,
    DraftMemory,
    EngineMemory,
    draft_memory,
    engine_memory,
    prefill_memory,
)
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
LLAMA_8B = model_config_from_dict(LLAMA_31_8B)


def plan_8b(config: ModelConfig = LLAMA_8B, **changes: object) -> Plan:
    """For 80 GiB at 3.35 TB/s; ``changes`` are settings of the engine, or arguments of ``make_plan``."""
    said = {name: changes.pop(name) for name in list(changes) if name in EngineOptions.__dataclass_fields__}
    gpu = Device(memory_bytes=changes.pop("memory_bytes", 80 * GIB))  # type: ignore[arg-type]
    options = EngineOptions.of(EngineOptions(dtype="bfloat16"), said)
    return make_plan(config, options, gpu=gpu, **changes)  # type: ignore[arg-type]


def printed(plan: Plan) -> str:
    """What the command prints of it."""
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=100))
    return out.getvalue()


def test_rows_of_llama_8b() -> None:
    plan = plan_8b()
    assert plan.num_parameters == 8_030_261_248
    assert plan.weight_bytes == 16_060_522_496
    assert plan.token_bytes == 128 * 1024
    assert [row.name for row in plan.rows] == ["full", "65536", "32768", "16384", "8192"]
    assert [row.row_bytes for row in plan.rows] == [16 * GIB, 8 * GIB, 4 * GIB, 2 * GIB, 1 * GIB]
    assert [row.full_fraction for row in plan.rows] == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]


def test_rows_in_fp8_are_half_of_bf16_and_their_scales() -> None:
    wide, narrow = plan_8b(), plan_8b(kv_dtype="fp8")
    scales = 2 * 32 * 8 * 4
    assert narrow.kv_dtype == "fp8" and narrow.token_bytes == 64 * 1024
    assert [row.row_bytes - scales for row in narrow.rows] == [row.row_bytes // 2 for row in wide.rows]
    assert (narrow.weight_bytes, narrow.prefill) == (wide.weight_bytes, wide.prefill)  # stay in bf16
    assert [row.max_rows for row in wide.rows] == [2, 6, 14, 30, 61]
    assert [row.max_rows for row in narrow.rows] == [6, 14, 30, 61, 121]
    assert all(n.tokens_per_s_one > w.tokens_per_s_one for n, w in zip(narrow.rows, wide.rows, strict=True))
    assert "64 KiB per token in fp8" in printed(narrow)


def test_prefill_of_llama_8b() -> None:
    plan = plan_8b()
    assert plan.prefill.hidden_bytes == 1 * GIB
    assert plan.prefill.staging_bytes == 512 * MIB
    assert plan.prefill.transient_bytes == 512 * (4 * 4096 + 3 * 14336) * 2  # the MLP of one chunk: H E = D here
    assert plan.all_layers_staging_bytes == 16 * GIB


def test_scoring_sets_the_temporaries_of_short_chunks() -> None:
    memory = prefill_memory(LLAMA_8B, 131_072, chunk_len=64, dtype="bfloat16", selector=make_selector())
    block = 32 * 32 * 4096  # voting queries x heads x keys
    keys = 8 * 128 * 4096
    scores = 3 * 8 * 131_072  # as voted, pooled, one pass of carrying ahead
    assert memory.transient_bytes == 4 * (block + keys + scores)


def test_prefill_memory_does_not_grow_with_layers() -> None:
    deep = replace(LLAMA_8B, num_layers=3 * LLAMA_8B.num_layers)
    sizes = [
        prefill_memory(c, 32_768, chunk_len=512, dtype="bfloat16", selector=make_selector()) for c in (LLAMA_8B, deep)
    ]
    assert sizes[0] == sizes[1]


def test_rows_that_fit_and_speed_of_llama_8b() -> None:
    plan = plan_8b()
    pool = (131_072 + 4096) * (4096 + 2 * 8 * 128) * 2 + 4 * 60_817_408  # the pool and 2,048 tokens
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


def test_model_larger_than_memory_fits_no_row() -> None:
    for row in plan_8b(memory_bytes=8 * GIB).rows:
        assert row.max_rows == 0
        assert row.tokens_per_s_max == 0


def test_memory_for_padding_row_only_fits_no_row() -> None:
    fixed = 16_060_522_496 + plan_8b().prefill_pool_bytes + FRAMEWORK_BYTES + 32 * MIB  # for 2 decoding rows
    max_rows = [plan_8b(memory_bytes=fixed + rows * 4 * GIB, budgets=[32_768]).rows[1].max_rows for rows in (1, 2, 3)]
    assert max_rows == [0, 1, 2]


def test_short_prompt_reads_only_its_own_slots() -> None:
    plan = plan_8b(prompt_len=1000, max_model_len=8192, budgets=[4096])
    full, budgeted = plan.rows
    assert (full.capacity, full.visible_slots, budgeted.visible_slots) == (8192, 1000, 1000)
    assert full.tokens_per_s_one == budgeted.tokens_per_s_one


def test_tied_embedding_is_read_in_full() -> None:
    config = model_config_from_dict(LLAMA_32_1B)
    assert decode_weight_bytes(config, "bfloat16") == 1_235_814_400 * 2
    untied = replace(config, tie_word_embeddings=False)
    assert decode_weight_bytes(untied, "bfloat16") == 1_235_814_400 * 2


def test_default_budgets_stop_at_the_smallest_possible() -> None:
    assert default_budgets(131_072) == (65_536, 32_768, 16_384, 8192)
    assert default_budgets(200) == (100, 50)
    assert default_budgets(36) == ()


def test_default_prompt_is_the_context_up_to_a_limit() -> None:
    assert plan_8b(replace(LLAMA_8B, max_position=8192)).prompt_len == 8192
    long = plan_8b(replace(LLAMA_8B, max_position=10**6))
    assert (long.prompt_len, long.max_model_len) == (131_072, 131_072)
    limited = plan_8b(max_model_len=4096)
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
def test_wrong_values_name_value_and_limit(changes: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        plan_8b(**changes)
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


def test_report_prints_every_row() -> None:
    text = printed(plan_8b(budgets=[32_768, 65_536]))
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


def test_report_says_none_where_no_row_fits() -> None:
    assert printed(plan_8b(memory_bytes=8 * GIB, budgets=[4096])).count("none") == 2


def test_hops_and_a_draft_are_counted() -> None:
    plain = plan_8b(budgets=[32_768])
    hopped = plan_8b(budgets=[32_768], selector="hops")
    assert hopped.prefill.query_bytes == 131_072 * 4096 * 2
    assert hopped.prefill.total_bytes == plain.prefill.total_bytes + hopped.prefill.query_bytes
    assert hopped.prefill_pool_bytes == plain.prefill_pool_bytes + (131_072 + 4096) * 4096 * 2
    draft = DraftMemory(weight_bytes=4 * GIB, working_bytes=4 * GIB)
    assert plan_8b(budgets=[32_768], draft=draft).rows[1].max_rows == plain.rows[1].max_rows - 2
    text = printed(replace(hopped, draft=draft))
    assert "1 GiB queries of one layer, for hops" in text
    assert "4 GiB of weights, 4 GiB at peak while it scores a text" in text


def test_passages_that_look_ahead_together_are_held_together() -> None:
    """Qwen3-0.6B in bf16: 112 KiB of K and V per token in 28 layers, four passages of 8,192 on a GPU, one on a CPU."""
    model = model_config_from_dict({**LLAMA_32_1B, "num_hidden_layers": 28, "head_dim": 128, "hidden_size": 1024,
                                    "num_attention_heads": 16, "intermediate_size": 3072})  # fmt: skip
    settings = ScoringSettings(context_len=8192)
    held = 8192 * 112 * 1024
    gpu = draft_memory(model, settings, dtype="bfloat16", device="cuda:0")
    assert 4 * held < gpu.working_bytes < 4.3 * held
    assert held < draft_memory(model, settings, dtype="bfloat16", device="cpu").working_bytes < 1.2 * held


R1 = replace(model_config_from_dict(DEEPSEEK_V3), stored=StoredWeights(quantized=WeightFormat(dtype="fp8")))
FORMS = WeightFormats(layers=WeightFormat(dtype="fp8"), tables=WeightFormat(dtype="bfloat16"))
BANDWIDTH, FLOP = 4.8e12, 989e12


def predictor(size: int, model: ModelConfig = R1, formats: WeightFormats = FORMS, **ways: Any) -> Predictor:
    options = EngineOptions(dtype="bfloat16", tensor_parallel=size, **(ways if size > 1 else {}))
    return Predictor.of(model, options, formats, BANDWIDTH, FLOP)


def test_rows_of_latents_are_bound_by_products_where_a_rank_has_all_heads() -> None:
    """4 rows of 32k slots on each of 16 ranks: 2 x 128 x (576 + 512) operations for 1,152 bytes."""
    step = predictor(16, attention="dp").step(64, 32_768)
    slots = 4 * 32_768 * 61
    assert step.rows_s == pytest.approx(slots * 278_528 / (PRODUCT_SHARE * FLOP))
    assert step.rows_s > slots * 1152 / (READ_SHARE * BANDWIDTH)


def test_rows_are_read_by_every_rank_where_heads_are_split() -> None:
    """8 heads of a rank are few products for the bytes, and all 64 rows lie on each."""
    step = predictor(16).step(64, 32_768)
    assert step.rows_s == pytest.approx(64 * 32_768 * 70_272 / (READ_SHARE * BANDWIDTH))


def test_weights_of_a_step() -> None:
    """64 rows choose 222.5 of 256 experts: 653.9 billion numbers in FP8, a 16th of them on each rank; beside them
    attention whole (11.4) or split, shared experts, dense layers and the head.
    """
    chosen = 653.9e9 * 222.5 / 256 / 16
    distributed, split = (predictor(16, attention=way).step(64, 32_768) for way in ("dp", "tp"))
    read = [step.weights_s * READ_SHARE * BANDWIDTH - chosen for step in (distributed, split)]
    assert read[0] == pytest.approx(13.2e9, rel=0.03) and read[1] == pytest.approx(2.4e9, rel=0.1)
    whole_experts = predictor(16, attention="dp", experts="ep").step(64, 32_768)
    assert whole_experts.weights_s == pytest.approx(distributed.weights_s, rel=1e-3)


def test_collectives_are_two_per_layer_and_two() -> None:
    step = predictor(16, attention="dp").step(64, 32_768)
    assert step.num_collectives == 124
    hidden, logits = 64 * 7168 * 2, 64 * 129_280 * 2
    for link, seconds in zip(LINKS, step.collectives_s, strict=True):
        sent = (62 * 2 * hidden + 61 * hidden + logits) * 15 / 16
        assert seconds == pytest.approx(124 * link.latency_s + sent / link.bytes_per_s)
    assert step.seconds[0] == pytest.approx(step.weights_s + step.rows_s + HOST_S + step.collectives_s[0])
    assert step.tokens_per_s[0] == pytest.approx(64 / step.seconds[0])


def test_one_rank_has_nobody_to_talk_to() -> None:
    step = predictor(1).step(8, 8192)
    assert step.num_collectives == 0 and step.collectives_s == (0.0, 0.0)
    link = Link(name="any", latency_s=1.0, bytes_per_s=1.0)
    assert link.all_reduce_s(5, 1) == link.all_gather_s(5, 1) == 0.0
    assert (link.all_reduce_s(8, 4), link.all_gather_s(8, 4)) == (13.0, 7.0)


def test_a_prompt_reads_the_weights_once_per_chunk() -> None:
    """Attention does not depend on chunks; short chunks of a sparse model are bound by reading its experts."""
    short, long = (predictor(16).prompt(131_072, chunk) for chunk in (512, 4096))
    pairs = 131_072 * 131_073 / 2
    expanded = 61 * pairs * 4 * 8 * 192  # 8 heads; keys and values are expanded to 192 numbers both
    assert short.attention_s == long.attention_s == pytest.approx(expanded / (PRODUCT_SHARE * FLOP))
    assert long.layers_s < short.layers_s / 2
    products = 2 * 131_072 * 36.5e9 / 16
    assert long.layers_s == pytest.approx(products / (PRODUCT_SHARE * FLOP), rel=0.5)


def test_restored_tokens_are_attended_to_and_not_computed() -> None:
    whole, first = (predictor(16).prompt(tokens, 4096) for tokens in (131_072, 65_536))
    rest = predictor(16).prompt(131_072, 4096, 65_536)
    assert rest.attention_s == pytest.approx(whole.attention_s - first.attention_s)
    assert rest.layers_s == pytest.approx(whole.layers_s / 2)


def test_more_ranks_share_the_work() -> None:
    mixtral, bf16 = model_config_from_dict(MIXTRAL_8X7B), WeightFormats.of("bfloat16")
    one, four = (predictor(size, mixtral, bf16).step(32, 8192) for size in (1, 4))
    assert one.weights_s == pytest.approx(4 * four.weights_s, rel=0.01)
    assert one.rows_s == pytest.approx(4 * four.rows_s)


def test_the_plan_of_ranks() -> None:
    options = EngineOptions(dtype="bfloat16", tensor_parallel=8)
    plan = make_plan(model_config_from_dict(MIXTRAL_8X7B), options, budgets=[4096], prompt_len=32_768)
    assert plan.ranks is not None and plan.weight_bytes == sum(plan.ranks.tensor_bytes.values())
    one = make_plan(model_config_from_dict(MIXTRAL_8X7B), EngineOptions(dtype="bfloat16"), prompt_len=32_768)
    assert one.ranks is None and one.token_bytes == 8 * plan.token_bytes
    assert plan.rows[1].full_fraction == 4096 / 32_768


def test_the_command_plans_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    asked = ["plan", str(tmp_path), "--tensor-parallel", "16", "--attention", "dp", "--prompt-len", "131072",
             "--budget", "32768", "--memory", "141GB", "--bandwidth", "4.8TB/s"]  # fmt: skip
    assert main([*asked, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    ranks = plan["ranks"]
    assert ranks["parallel"]["size"] == 16 and ranks["parallel"]["attention"] == "dp"
    assert 400 < plan["rows"][1]["max_rows"] < 560
    assert main(asked) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rows distributed (dp)" in shown and "experts_gate_up" in shown
    assert main(["plan", str(tmp_path), "--tensor-parallel", "7"]) != 0
    assert "cannot be split over 7 ranks" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("published", "ways", "words"),
    [
        (DEEPSEEK_V3, [], "rows of latents, whole on each rank of its weights:"),
        (
            DEEPSEEK_V3,
            ["--attention", "dp", "--experts", "ep"],
            "rows distributed (dp), whole experts (ep) of its weights:",
        ),
        (QWEN3_30B, [], "rows split by heads of its weights:"),
    ],
)
def test_the_plan_says_where_rows_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], published: dict[str, Any], ways: list[str], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert main(["plan", str(tmp_path), "--tensor-parallel", "4", "--prompt-len", "4096", *ways]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


# What ``plan`` counts of engines on several ranks, at the sizes of published models.

QWEN = model_config_from_dict(QWEN3_30B)
LENGTH = 32_768


def memory(model: ModelConfig, size: int, max_rows: int = 1, slots: int = 8192, **ways: Any) -> EngineMemory:
    options = EngineOptions(dtype="bfloat16", tensor_parallel=size, **(ways if size > 1 else {}))
    config = engine_config(model, options, KVBudget.of(slots), LENGTH, device="cuda", max_rows=max_rows)
    return engine_memory(model, config)


@pytest.mark.parametrize("attention", ["tp", "dp"])
@pytest.mark.parametrize("size", [1, 8, 16])
def test_no_row_more_would_fit(size: int, attention: str) -> None:
    """Rows that are said to fit do, and one more does not, for all remainders of rows and ranks."""
    for more in range(6):
        room = (141 if size > 1 else 720) * 10**9 + more * 7 * 10**8
        fit = memory(R1, size, attention=attention).rows_that_fit(room)
        assert fit > 0
        assert memory(R1, size, fit, attention=attention).total_bytes <= room
        assert memory(R1, size, fit + 1, attention=attention).total_bytes > room


def test_rows_that_are_distributed_take_one_rank_each() -> None:
    """Latents lie whole on every rank where heads are split; distributed, 16 ranks hold about 16 times the rows."""
    split, distributed = (memory(R1, 16, attention=attention) for attention in ("tp", "dp"))
    assert split.row_bytes == distributed.row_bytes == kv_spec_of(R1, "bfloat16").row_bytes(8192)
    free = 20 * 10**9
    more_rows = distributed.rows_that_fit(distributed.fixed_bytes + free) / split.rows_that_fit(
        split.fixed_bytes + free
    )
    assert 11 < more_rows < 16  # less than 16: each rank draws the tokens of all rows
    rows = [memory(R1, 16, max_rows, attention="dp").total_bytes for max_rows in (16, 17, 32)]
    everywhere = distributed.state_bytes + distributed.batch_bytes
    assert rows[1] - rows[0] == distributed.row_bytes + everywhere
    assert rows[2] - rows[1] == 15 * everywhere


def test_heads_are_split() -> None:
    """A rank of 4 has a quarter of the keys and values; ranks more than kv heads share them."""
    row, staging = (kv_spec_of(QWEN, "bfloat16").row_bytes(8192), kv_spec_of(QWEN, "bfloat16").staging_bytes(1))
    one, four, eight = (memory(QWEN, size) for size in (1, 4, 8))
    assert [one.row_bytes, four.row_bytes, eight.row_bytes] == [row, row // 4, row // 4]
    pool = LENGTH + 4096
    assert one.staging_bytes - four.staging_bytes == pool * (staging - staging // 4)
    assert four.state_bytes == one.state_bytes


def test_staging_of_latents_expands_a_ranks_heads() -> None:
    """128 heads over 16 ranks: 8 are expanded on each, the latents and hidden states are whole."""
    pool = LENGTH + 4096
    for attention in ("tp", "dp"):
        found = memory(R1, 16, attention=attention).staging_bytes
        assert found == 2 * pool * (7168 + 576 + 2 * 8 * 192)


def test_a_ranks_chunks_may_be_longer() -> None:
    """Its temporaries are smaller, and weights are read once per chunk."""
    budget = KVBudget.of(8192)
    model = model_config_from_dict(MIXTRAL_8X7B)
    chunks = [
        engine_config(
            model, EngineOptions(dtype="bfloat16", tensor_parallel=size), budget, LENGTH, device="cuda"
        ).chunking
        for size in (1, 8)
    ]
    assert chunks[0].chunk_len < chunks[1].chunk_len


@pytest.mark.parametrize("size", [3, 256])
def test_sizes_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"split over {size} ranks"):
        memory(R1, size)
