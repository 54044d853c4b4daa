"""What the engine allocates is what ``plan`` says, in bytes of real tensors: at the start, and at the peak of a prompt.

Llama-3.1-8B on torch's meta device, with the Triton operators' shapes: what a GPU would hold, but for the framework and
for what a kernel takes inside.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.published import DEEPSEEK_V2_LITE, DEEPSEEK_V3, QWEN3_30B
from benchmarks.stand_ins import Pretend, random_weights
from snapstream.cli.__main__ import main
from snapstream.config import (
    Chunking,
    EngineConfig,
    KVBudget,
    ModelConfig,
    ParallelConfig,
    WeightFormats,
)
from snapstream.config.engine import SPECULATIVE_TOKENS
from snapstream.config.kv import HeadProfile
from snapstream.config.weights import StoredWeights, WeightFormat
from snapstream.exec import runner
from snapstream.exec.sampling import prompt_logprobs
from snapstream.kernels.backends.autotune import choose
from snapstream.kernels.backends.prefill import Case
from snapstream.kernels.cpu.looped.library import library_problem, load
from snapstream.kernels.interface import has_triton
from snapstream.kv.selectors.hops import Hops
from snapstream.models.decoder import Decoder
from snapstream.models.panels import make_panels
from snapstream.models.registry import model_config_from_dict, read_model_config
from snapstream.models.weights import DecoderWeights
from snapstream.plan import memory
from snapstream.plan.memory import FRAMEWORK_BYTES, EngineMemory, draft_memory, engine_memory
from snapstream.spec_prefill import draft
from snapstream.spec_prefill.draft import scores_of_passages
from snapstream.spec_prefill.settings import ScoringSettings
from tests.live import LiveBytes
from tests.unit.exec.allocated import measured

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "bos_token_id": 1, "eos_token_id": 2,
    "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14_336, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2,
}  # fmt: skip
STATES = {
    "architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
DELTA = {
    "architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 3, "linear_num_value_heads": 32,
}  # fmt: skip
SMALL_DELTA = {**DELTA, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8}
MAMBA = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "mamba", "attention", *["mamba"] * 3],
    "num_local_experts": 0, "shared_intermediate_size": 8192, "mamba_n_heads": 128, "mamba_d_state": 128,
}  # fmt: skip
KDA = {
    "architectures": ["KimiLinearForCausalLM"], "hidden_size": 2304, "intermediate_size": 9216, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": 32,
    "linear_num_heads": 32, "linear_head_dim": 128, "n_routed_experts": None, "first_k_dense_replace": 6,
}  # fmt: skip
STATES_OF = {
    "states of DeltaNet": DELTA, "states of DeltaNet, small MLP": SMALL_DELTA, "states of Mamba-2": MAMBA,
    "states of KDA": KDA,
}  # fmt: skip
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 512, "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size_per_layer_input": 128_256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "hidden_size": 2048, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
}  # fmt: skip
GEMMA3N = {
    **GEMMA4, "architectures": ["Gemma3nForCausalLM"], "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
}  # fmt: skip
HYPER = {  # streams that weigh more than attention and MLP
    "architectures": ["Glm5NextForConditionalGeneration"], "hidden_size": 4096, "intermediate_size": 2048,
    "layer_types": ["linear_attention", "full_attention"] * 3, "num_attention_heads": 8, "num_key_value_heads": 8,
    "kv_lora_rank": 512, "q_lora_rank": 1024, "qk_nope_head_dim": 128, "v_head_dim": 128, "linear_num_heads": 8,
    "mlp_layer_types": ["dense"] * 6, "head_dim": None,
}  # fmt: skip
CHUNK, ROWS, SLOTS, LENGTH = 2048, 12, 16_384, 32_768
_EVEN = (1 / 64,) * 8
PROFILE = HeadProfile(
    shares=((1 / 8, 1 / 8, *_EVEN[2:]), *(_EVEN,) * 4, (1 / 32, 1 / 32, *_EVEN[2:])), model="", made_by="hand"
)
HEADS = PROFILE.slots(KVBudget.of(SLOTS), LENGTH)
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "float32"},
    "fp8": {"kv_dtype": "fp8"},
    "hops": {"selector": Hops()},
    "heads": {"heads": HEADS},
    "heads, fp8": {"heads": HEADS, "kv_dtype": "fp8"},
    "windows": {},
    "windows, fp8": {"kv_dtype": "fp8"},
    "states": {},
    "states, fp8": {"kv_dtype": "fp8"},
    **dict.fromkeys(STATES_OF, {}),
    "gemma4": {},
    "gemma4, fp8": {"kv_dtype": "fp8"},
    "gemma4, int4": {"weights": WeightFormats.of("int4")},
    "gemma3n": {},
    "gemma3n, int8": {"weights": WeightFormats.of("int8")},
    "hyper": {},
    "hyper, fp32": {"dtype": "float32"},
    "latents": {},
    "latents, hops": {"selector": Hops()},
    "latents, fp8": {"kv_dtype": "fp8"},
    "bf16 under fp32": {"dtype": "float32", "weights": WeightFormats.of("bfloat16")},
    "int8": {"weights": WeightFormats.of("int8")},
    "int4": {"weights": WeightFormats.of("int4")},
}


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    """Llama, or six layers of DeepSeek-V2-Lite, of which the first has no experts, or four of six with windows or
    with one layer of attention.
    """
    case = request.node.callspec.params["case"]
    settings = DEEPSEEK_V2_LITE | {"num_hidden_layers": 6} if case.startswith("latents") else LLAMA_8B
    if case.startswith("windows"):
        settings = LLAMA_8B | WINDOWS
    elif case.startswith("gemma4"):
        settings = LLAMA_8B | GEMMA4
    elif case.startswith("gemma3n"):
        settings = LLAMA_8B | GEMMA3N
    elif case.startswith("hyper"):
        settings = LLAMA_8B | HYPER
    elif case.startswith("states"):
        settings = LLAMA_8B | STATES_OF.get(case, STATES)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return read_model_config(tmp_path)


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed, and its operators know their shapes")
@pytest.mark.parametrize("case", CASES)
def test_plan_and_engine_agree(
    model: ModelConfig, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_drafts = not any(own in case for own in ("states", "gemma", "hyper"))
    config = EngineConfig(
        budget=KVBudget.of(SLOTS), max_model_len=LENGTH, max_rows=ROWS,
        chunking=Chunking(chunk_len=CHUNK, short_len=CHUNK),
        num_speculative_tokens=SPECULATIVE_TOKENS if has_drafts else 0,
        **{"dtype": "bfloat16", **CASES[case]},
    )  # fmt: skip
    static, peak = measured(model, config, monkeypatch)
    planned = engine_memory(model, replace(config, device="cuda"))
    weights = planned.weight_bytes + planned.dequantized_bytes
    at_start = weights + planned.staging_bytes + (ROWS + 1) * (planned.row_bytes + planned.state_bytes)
    assert at_start == pytest.approx(static, rel=1e-3)
    # Rows with states, and those of several streams, are small, so temporaries, of which the plan counts the largest,
    # weigh more. In Gemma 4 it counts those of a chunk in the wide MLPs of layers that share, which only prompts with
    # log-probabilities have.
    most = 0.09 if "gemma4" in case else 0.04 if any(own in case for own in ("states", "gemma3n", "hyper")) else 0.03
    assert planned.total_bytes - FRAMEWORK_BYTES == pytest.approx(peak, rel=most)
    assert planned.total_bytes - FRAMEWORK_BYTES >= peak  # what is refused at the start never runs out later
    told = plan_of(planned, case, tmp_path, capsys)
    assert told["rows"][1]["max_rows"] == ROWS and told["rows"][1]["row_bytes"] == planned.row_bytes


def plan_of(planned: EngineMemory, case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """``snapstream plan`` for a device that holds just what the engine needs."""
    PROFILE.write(folder / "heads.json")
    heads = str(folder / "heads.json")
    options = {"fp32": ["--dtype", "float32"], "hyper, fp32": ["--dtype", "float32"], "fp8": ["--kv-dtype", "fp8"],
               "hops": ["--selector", "hops"],
               "latents, hops": ["--selector", "hops"], "latents, fp8": ["--kv-dtype", "fp8"],
               "windows, fp8": ["--kv-dtype", "fp8"], "states, fp8": ["--kv-dtype", "fp8"],
               "gemma4, fp8": ["--kv-dtype", "fp8"], "gemma4, int4": ["--weights", "int4"],
               "gemma3n, int8": ["--weights", "int8"],
               "heads": ["--heads", heads], "heads, fp8": ["--heads", heads, "--kv-dtype", "fp8"],
               "int8": ["--weights", "int8"], "int4": ["--weights", "int4"],
               "bf16 under fp32": ["--dtype", "float32", "--weights", "bfloat16"]}  # fmt: skip
    arguments = ["plan", str(folder), "--json", "--budget", str(SLOTS), "--max-model-len", str(LENGTH)]
    arguments += ["--chunk-len", str(CHUNK), "--memory", f"{planned.total_bytes}B", *options.get(case, [])]
    assert main(arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_logits_of_a_prompt_stay_within_what_a_prefill_takes() -> None:
    vocab = 128_256
    num_tokens = runner.logits_tokens(vocab)
    with LiveBytes("meta") as live:
        logits = torch.empty(num_tokens, vocab, dtype=torch.bfloat16, device="meta").to(torch.float32)
        prompt_logprobs(logits, torch.empty(num_tokens, dtype=torch.int64, device="meta"), 5)
    assert 2**25 < live.peak <= 2**26 + 2**20
    assert runner.logits_tokens(4608) == 256


@pytest.mark.parametrize(
    "settings",
    [
        ScoringSettings(context_len=1024, ignore_eos=True),
        ScoringSettings(context_len=2048, look_ahead=0),
    ],
    ids=["look-ahead", "no look-ahead"],
)
@pytest.mark.parametrize("executor", ["eager", "looped"])
def test_a_draft_takes_what_the_plan_says(
    executor: str, settings: ScoringSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if executor == "looped" and (problem := library_problem()):
        pytest.skip(problem)
    for module in (draft, memory):
        monkeypatch.setattr(module, "num_passages", lambda kind: 3 if settings.look_ahead else 1)
    # Of the kernels that a trial chooses from the plan counts the one that takes more memory.
    case = Case(torch.device("cpu"), torch.float32, 32)
    monkeypatch.setattr(draft, "automatic", lambda *size: choose("cpu", case))
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 99,
             "intermediate_size": 64, "num_hidden_layers": 12}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | small))
    model = read_model_config(tmp_path)
    passage_len = settings.context_len - settings.look_ahead
    with LiveBytes("cpu") as live, torch.inference_mode():
        weights = random_weights(model, torch.float32, "cpu", seed=0)
        if executor == "looped":
            wide, weights = weights, DecoderWeights.empty(model, torch.float32, "cpu", make=make_panels(load()))
            for role, numbers in wide.stored().items():
                weights.fill(role, (), numbers)
            del wide, numbers
        decoder = Decoder(model, weights)
        before = live.peak = live.now
        for _ in scores_of_passages(decoder, [[5] * passage_len] * 3, settings):
            pass
    planned = draft_memory(model, settings, dtype="float32", device="cpu")
    assert planned.weight_bytes == pytest.approx(before, rel=0.01 if executor == "eager" else 0.1)  # whole panels
    assert live.peak - before <= planned.working_bytes <= 1.5 * (live.peak - before)


# What one rank of several allocates is what ``plan`` says: at the start, and at the peak of a prompt and of a step.
# One process holds the share of a rank whose neighbours are only pretended, on torch's meta device, with the Triton
# operators' shapes: published widths, few layers.

RANK_MEMORY_CHUNK, RANK_MEMORY_ROWS, RANK_MEMORY_SLOTS, RANK_MEMORY_LENGTH = 512, 10, 4096, 8192
FP8 = WeightFormat(dtype="fp8")
R1 = replace(
    model_config_from_dict(DEEPSEEK_V3 | {"num_hidden_layers": 4, "vocab_size": 32_000}),
    stored=StoredWeights(quantized=FP8),
)
LITE = model_config_from_dict(DEEPSEEK_V2_LITE | {"num_hidden_layers": 6})
QWEN = model_config_from_dict(QWEN3_30B | {"num_hidden_layers": 10})
BLOCKS = WeightFormats(layers=FP8, tables=WeightFormat(dtype="bfloat16"))
RANK_MEMORY_CASES: dict[str, tuple[ModelConfig, dict[str, Any], WeightFormats | None]] = {
    "kv heads are split": (QWEN, {"size": 4}, None),
    "kv heads are repeated, experts dealt out": (QWEN, {"size": 8, "experts": "ep"}, None),
    "latents": (LITE, {"size": 4}, None),
    "latents, rows dealt out": (LITE, {"size": 4, "attention": "dp"}, None),
    "fp8, rows dealt out": (R1, {"size": 16, "attention": "dp"}, BLOCKS),
}


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed, and its operators know their shapes")
@pytest.mark.parametrize("case", RANK_MEMORY_CASES)
def test_plan_and_rank_agree(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ways, formats = RANK_MEMORY_CASES[case]
    config = EngineConfig(
        budget=KVBudget.of(RANK_MEMORY_SLOTS),
        max_model_len=RANK_MEMORY_LENGTH,
        max_rows=RANK_MEMORY_ROWS,
        dtype="bfloat16",
        weights=formats,
        chunking=Chunking(chunk_len=RANK_MEMORY_CHUNK, short_len=RANK_MEMORY_CHUNK),
        parallel=ParallelConfig(**ways),
    )
    static, peak = measured(model, config, monkeypatch, Pretend(3, config.parallel.size))
    planned = engine_memory(model, replace(config, device="meta"))  # plain calls: no copy for captured steps
    own_rows = -(-RANK_MEMORY_ROWS // planned.dp_size) + 1
    at_start = planned.weight_bytes + planned.dequantized_bytes + planned.staging_bytes
    at_start += own_rows * planned.row_bytes + (RANK_MEMORY_ROWS + 1) * planned.state_bytes
    assert at_start == pytest.approx(static, rel=1e-3)
    assert planned.total_bytes == pytest.approx(peak, rel=0.03)
    # What is refused at the start never runs out later; but of FP8 experts, whose block is widened while the pairs of a
    # chunk are there, the larger of both is counted.
    assert planned.total_bytes >= (peak if formats is None else 0.99 * peak)
