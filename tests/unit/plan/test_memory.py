"""What ``plan`` counts of models with experts, at the sizes of published ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from benchmarks.published import DEEPSEEK_V2_LITE, DEEPSEEK_V3, KIMI_K2, MIXTRAL_8X7B, QWEN3_30B
from snapstream.cli.__main__ import main
from snapstream.config import EngineOptions, ModelConfig, PrefixStoreConfig, as_prefix_store
from snapstream.config.engine import BLOCK_LEN
from snapstream.models.registry import kv_spec_of, model_config_from_dict
from snapstream.models.sharding import (
    active_parameters,
    decode_weight_bytes,
    layer_parameters,
    num_parameters,
    weight_bytes,
)
from snapstream.models.weights import DecoderWeights
from snapstream.plan.fit import resolve_chunking
from snapstream.plan.memory import engine_memory
from snapstream.plan.plan import Device, make_plan
from snapstream.startup.measure import HostMemory, host_memory
from snapstream.startup.notes import describe_store
from snapstream.startup.resolve import Machine, resolve
from tests.unit.plan.test_plan import GIB, LLAMA_8B, printed

GLM_45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
PUBLISHED = {"qwen": QWEN3_30B, "mixtral": MIXTRAL_8X7B, "glm": GLM_45_AIR}
LATENTS_PUBLISHED = {"v3": DEEPSEEK_V3, "lite": DEEPSEEK_V2_LITE, "kimi": KIMI_K2}


def test_numbers_of_published_models() -> None:
    """Qwen3-30B-A3B holds 30,532,122,624 and activates 3.3B, Mixtral-8x7B 46,702,792,704 and 12.9B, GLM-4.5-Air 106B
    and 12B.
    """
    qwen, mixtral, glm = (model_config_from_dict(settings) for settings in PUBLISHED.values())
    assert num_parameters(qwen) == 30_532_122_624
    assert num_parameters(mixtral) == 46_702_792_704
    assert num_parameters(glm) == pytest.approx(106e9, rel=0.01)
    active = [active_parameters(model) for model in (qwen, mixtral, glm)]
    assert active == pytest.approx([3.3e9, 12.9e9, 12e9], rel=0.1)


@pytest.mark.parametrize("name", PUBLISHED | LATENTS_PUBLISHED)
def test_storage_has_the_counted_bytes(name: str) -> None:
    model = model_config_from_dict((PUBLISHED | LATENTS_PUBLISHED)[name])
    assert DecoderWeights.empty(model, torch.bfloat16, "meta").num_bytes == weight_bytes(model, "bfloat16")


def test_a_step_reads_the_experts_that_its_rows_chose() -> None:
    """One row reads what is always read and 8 of 128 experts a layer; ever more rows, in the end all of them."""
    model = model_config_from_dict(QWEN3_30B)
    table, expert = 2 * 151_936 * 2048, 2 * 3 * 2048 * 768  # bytes
    always = weight_bytes(model, "bfloat16") - table - 48 * 128 * expert
    assert decode_weight_bytes(model, "bfloat16") == pytest.approx(always + 48 * 8 * expert)
    eight = 128 * (1 - (120 / 128) ** 8)
    assert decode_weight_bytes(model, "bfloat16", None, 8) == pytest.approx(always + 48 * eight * expert)
    assert decode_weight_bytes(model, "bfloat16", None, 5000) == pytest.approx(always + 48 * 128 * expert)


def test_a_plan_goes_by_the_rows_of_each_line() -> None:
    options = EngineOptions(dtype="bfloat16")
    sparse = make_plan(model_config_from_dict(QWEN3_30B), options, budgets=[4096], prompt_len=32_768)
    for line in sparse.rows:
        assert line.max_rows > 1
        for rows, tokens_per_s in ((1, line.tokens_per_s_one), (line.max_rows, line.tokens_per_s_max)):
            weights = decode_weight_bytes(model_config_from_dict(QWEN3_30B), "bfloat16", None, rows)
            assert tokens_per_s < rows * sparse.bandwidth_bytes_per_s / weights


def test_chunks_weigh_what_a_token_passes() -> None:
    """A unit of a sparse model is as much work as one of a dense model of the activated size."""
    model = model_config_from_dict(QWEN3_30B)
    cut = resolve_chunking(model, dtype="bfloat16", device="cuda")
    per_layer = 2048 * (32 + 8) * 128 + 2048 * 4096 + 8 * 3 * 2048 * 768
    assert layer_parameters(model) == per_layer
    assert cut.token_keys == 2 * per_layer // (4 * 32 * 128)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (QWEN3_30B | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only models whose every layer has experts"),
        (QWEN3_30B | {"mlp_only_layers": [0, 3]}, r"mlp_only_layers is \[0, 3\]; only models"),
        (GLM_45_AIR | {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be a number"),
        (GLM_45_AIR | {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 rotates 51 of the 128 numbers"),
        (GLM_45_AIR | {"num_experts_per_tok": 200}, "top_k is 200; it must be <= 128"),
        (GLM_45_AIR | {"n_routed_experts": None}, "n_routed_experts is None; it must be a whole number"),
        (QWEN3_30B | {"architectures": ["LlamaForCausalLM"]}, r"mixture-of-experts layers .* \(num_experts is 128\)"),
    ],
)
def test_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        model_config_from_dict(settings)


def test_first_layers_may_be_dense() -> None:
    model: ModelConfig = model_config_from_dict(GLM_45_AIR)
    weights = DecoderWeights.empty(model, torch.bfloat16, "meta")
    first, second = weights.layer(0), weights.layer(1)
    assert "gate_up" in first.matrices and "experts_down" not in first.matrices
    assert "gate_up" not in second.matrices and second.matrix("experts_down").shape == (128, 4096, 1408)
    assert weights.matrices["experts_gate_up"].shape == (45, 128, 2816, 4096)
    assert second.matrix("shared_down").shape == (4096, 1408)


# What ``plan`` counts of models that keep latents, at the sizes of published ones.


def test_numbers_of_published_models_of_latents() -> None:
    """DeepSeek-V3 has 671B parameters without its MTP layer, Kimi K2 1.03T, V2-Lite 15.7B; a token of V3 takes 70,272
    bytes.
    """
    v3, lite, kimi = (model_config_from_dict(settings) for settings in LATENTS_PUBLISHED.values())
    assert num_parameters(v3) == 671_026_419_200
    assert num_parameters(kimi) == pytest.approx(1.03e12, rel=0.01)
    assert num_parameters(lite) == 15_706_484_224
    assert [kv_spec_of(model, "bfloat16").token_bytes() for model in (v3, lite, kimi)] == [70_272, 31_104, 70_272]
    assert v3.latent is not None and v3.latent.softmax_scale == pytest.approx(0.13523, abs=1e-5)  # plain: 0.07217


def test_the_papers_rows() -> None:
    """64 rows of 32k slots of R1 are 147 GB, and so are 16 of 128k and 256 of 8k: latents, not keys per head."""
    spec = kv_spec_of(model_config_from_dict(DEEPSEEK_V3), "bfloat16")
    assert 64 * spec.row_bytes(32_768) == 16 * spec.row_bytes(131_072) == 256 * spec.row_bytes(8192)
    assert 64 * spec.row_bytes(32_768) == pytest.approx(147.4e9, rel=1e-3)


def test_staging_counts_what_is_expanded() -> None:
    model = model_config_from_dict(DEEPSEEK_V2_LITE)
    plan = make_plan(model, EngineOptions(dtype="bfloat16"), budgets=[8192], prompt_len=32_768)
    assert plan.prefill.staging_bytes == 32_768 * 2 * (576 + 2 * 16 * 192)
    assert plan.token_bytes == 31_104 and plan.rows[1].row_bytes == 8192 * 31_104


def test_the_command_plans_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    assert main(["plan", str(tmp_path), "--json", "--prompt-len", "131072"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["token_bytes"] == 70_272 and plan["rows"][0]["row_bytes"] == 131_072 * 70_272
    assert plan["all_layers_staging_bytes"] == 61 * 131_072 * 1152
    assert main(["plan", str(tmp_path), "--json", "--prompt-len", "131072", "--kv-dtype", "fp8"]) == 0
    plan = json.loads(capsys.readouterr().out)  # a scale per layer, for both parts of a latent
    assert plan["token_bytes"] == 70_272 // 2 and plan["rows"][0]["row_bytes"] == 131_072 * 70_272 // 2 + 61 * 4


# A prefix store in a plan, by hand for Llama-3.1-8B; what ``auto`` gives; what the start refuses.

MODEL = LLAMA_8B
TOKEN = 2 * 32 * 8 * 128 * 2  # bytes: K and V, layers, kv heads, size of a head, bf16


def test_what_a_prefix_store_holds() -> None:
    options = EngineOptions(dtype="bfloat16", prefix_store="64GiB")
    plan = make_plan(MODEL, options, prompt_len=32_768)
    assert plan.prefix is not None
    assert TOKEN == 131_072 and plan.prefix.num_tokens == 524_288 and plan.prefix.num_prompts == 16
    assert plan.prefix.prompt_bytes == 32_768 * TOKEN
    assert "64 GiB on the host hold 524,288 tokens, 16 such prompts" in printed(plan)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_prefix_store_is_planned_in_blocks_of_the_device(kind: Literal["cpu", "cuda"]) -> None:
    block_len = BLOCK_LEN[kind]
    options = EngineOptions(dtype="bfloat16", prefix_store="1GiB", max_model_len=4096)
    plan = make_plan(MODEL, options, prompt_len=4095, gpu=Device(kind=kind))
    assert plan.prefix is not None and plan.prefix.prompt_bytes == 4095 // block_len * block_len * TOKEN


def test_a_plan_without_one_says_nothing_of_it() -> None:
    plan = make_plan(MODEL, EngineOptions(dtype="bfloat16"))
    assert plan.prefix is None and plan.as_dict()["prefix"] is None
    with pytest.raises(ValueError, match="prefix_store is 'auto'; a plan needs a size"):
        make_plan(MODEL, EngineOptions(prefix_store="auto"))


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [("8GiB", 8 * GIB), (10**9, 10**9), (0, None), ("0", None), (None, None), ("512MiB", 512 * 2**20)],
)
def test_sizes(given: object, num_bytes: int | None) -> None:
    store = as_prefix_store(given)
    assert store == (None if num_bytes is None else PrefixStoreConfig(num_bytes=num_bytes))


@pytest.mark.parametrize("wrong", ["8", "lots", "-1GiB", -1, 1.5, True, "auto 8GiB"])
def test_wrong_sizes(wrong: object) -> None:
    with pytest.raises(ValueError, match="prefix_store"):
        EngineOptions(prefix_store=wrong)  # type: ignore[arg-type]


def machine(free: int, **given: object) -> Machine:
    return replace(Machine(device="cpu", free_bytes=free, total_bytes=100 * GIB), **given)  # type: ignore[arg-type]


OPTIONS = EngineOptions(dtype="bfloat16", budget=4096, max_model_len=8192, prefix_store="auto")


def test_auto_takes_an_eighth_of_what_a_cpu_engine_leaves() -> None:
    without = resolve(MODEL, replace(OPTIONS, prefix_store=None), machine(60 * GIB))
    free = 60 * GIB - engine_memory(MODEL, without).total_bytes
    config = resolve(MODEL, OPTIONS, machine(60 * GIB))
    assert config.prefix_store == PrefixStoreConfig(num_bytes=free // 8, block_len=64)
    assert config.prefix_blocks == free // 8 // (64 * TOKEN)
    assert "GiB (auto)," in describe_store(MODEL, OPTIONS, config)
    rows = resolve(MODEL, replace(OPTIONS, max_rows="auto"), machine(60 * GIB))
    assert rows.prefix_store is not None and rows.max_rows > 20, "rows take what the store leaves"
    assert engine_memory(MODEL, rows).total_bytes <= 60 * GIB


def test_auto_takes_a_quarter_of_the_hosts_memory_beside_a_gpu() -> None:
    gpu = {"device": "cuda", "free_bytes": 79 * GIB, "total_bytes": 80 * GIB, "host_free_bytes": 40 * GIB}
    options = replace(OPTIONS, device="cuda")
    config = resolve(MODEL, options, machine(0, **gpu))
    assert config.prefix_store == PrefixStoreConfig(num_bytes=10 * GIB, block_len=256)
    assert engine_memory(MODEL, config).store_bytes == 0, "it is not the GPU's memory"


def test_auto_is_none_where_it_cannot_be() -> None:
    tight = resolve(MODEL, OPTIONS, machine(20 * GIB))
    assert tight.prefix_store is None
    assert describe_store(MODEL, OPTIONS, tight) == "prefix store: none (auto), because too little memory is free"
    with pytest.raises(ValueError, match="prefix_dir is 'd', and prefix_store 'auto' found no memory"):
        resolve(MODEL, replace(OPTIONS, prefix_dir="d"), machine(20 * GIB))


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prefix_store takes 64 GiB of host memory; 60 GiB are free"):
        resolve(MODEL, replace(OPTIONS, prefix_store="64GiB"), machine(60 * GIB))
    with pytest.raises(ValueError, match=r"for the prefix store .*Lower max_rows, the budget, prefix_store or"):
        resolve(MODEL, replace(OPTIONS, prefix_store="99GiB"), machine(60 * GIB))


# Memory of the machine, or of the container around the process.

MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


def host_machine(root: Path, **files: str) -> Path:
    """A folder with the given files of /proc and /sys; ``__`` stands for a slash."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_counts_what_the_page_cache_would_give_back(tmp_path: Path) -> None:
    assert host_memory(host_machine(tmp_path)) == HostMemory(total=16 * GIB, available=8 * GIB)
    total, available = host_memory()
    assert 0 < available <= total


def test_a_cgroup_bounds_the_memory(tmp_path: Path) -> None:
    outer, inner = "sys__fs__cgroup__pod__", "sys__fs__cgroup__pod__own__"
    root = host_machine(tmp_path, **{
        "proc__self__cgroup": "0::/pod/own\n",
        outer + "memory.max": f"{6 * GIB}\n", outer + "memory.current": f"{5 * GIB}\n",
        outer + "memory.stat": f"anon 1\ninactive_file {GIB}\n",
        inner + "memory.max": "max\n", inner + "memory.current": f"{GIB}\n", inner + "memory.stat": "",
    })  # fmt: skip
    assert host_memory(root) == HostMemory(total=6 * GIB, available=2 * GIB)


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    files = {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}", "memory.stat": "inactive_file 0"}
    own = {"sys__fs__cgroup__" + name: text for name, text in files.items()}
    root = host_machine(tmp_path, proc__self__cgroup="0::/system.slice/elsewhere\n", **own)
    assert host_memory(root) == HostMemory(total=4 * GIB, available=3 * GIB)


def test_the_older_cgroup(tmp_path: Path) -> None:
    own = "sys__fs__cgroup__memory__box__memory."
    root = host_machine(tmp_path, **{
        "proc__self__cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n",
        own + "limit_in_bytes": f"{3 * GIB}", own + "usage_in_bytes": f"{2 * GIB}",
        own + "stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
    })  # fmt: skip
    assert host_memory(root) == HostMemory(total=3 * GIB, available=2 * GIB)
