"""Shapes of the models that are measured, and engines over random weights of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.gpu_suite.suite import Bench
from benchmarks.published import DEEPSEEK_V2_LITE
from benchmarks.stand_ins import occupy
from snapstream.config import Chunking, EngineConfig, KVBudget, KVDType, ModelConfig
from snapstream.config.kv import HeadProfile
from snapstream.exec.cuda_graph import Capturer, GraphDecode, depths_of
from snapstream.exec.eager import EagerDecode
from snapstream.exec.runner import ModelRunner
from snapstream.models.decoder import Decoder
from snapstream.models.registry import model_config_from_dict
from snapstream.plan.fit import head_slots
from snapstream.step import StepPlan
from snapstream.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000_000, ignore_eos=True)

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "llama_8b": {
        **_LLAMA, "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14_336, "tie_word_embeddings": False,
    },
    "llama_1b": {
        **_LLAMA, "vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "qwen3_06b": {
        **_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936,
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True,
    },
}  # fmt: skip
FILES["deepseek_v2_lite"] = DEEPSEEK_V2_LITE
_SMALL_LATENT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
}
_SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}  # fmt: skip


def config_of(bench: Bench, name: str) -> ModelConfig:
    """The shape of that name; a tiny one of the same kind in a smoke run."""
    small = _SMALL_LATENT if "kv_lora_rank" in FILES[name] else _SMALL
    return model_config_from_dict(FILES[name] | (small if bench.is_smoke else {}))


def decoder_of(bench: Bench, name: str) -> Decoder:
    return bench.decoder(name, config_of(bench, name))


def engine_config(
    bench: Bench, slots: int, max_rows: int, max_len: int, chunk_len: int, kv_dtype: KVDType = "auto"
) -> EngineConfig:
    """Of rows of ``slots`` slots; all of ``max_len`` means full attention."""
    budget = KVBudget.full(slots) if slots >= max_len else KVBudget.of(slots)
    return EngineConfig(
        budget=budget, max_model_len=max_len, max_rows=max_rows,
        chunking=Chunking(chunk_len=chunk_len, short_len=chunk_len), short_reserve=chunk_len,
        dtype=bench.device.dtype_name, device=bench.device.name, executor="eager", kv_dtype=kv_dtype,
    )  # fmt: skip


def make_runner(
    bench: Bench,
    decoder: Decoder,
    slots: int,
    max_rows: int,
    max_len: int,
    chunk_len: int,
    kv_dtype: KVDType = "auto",
    has_heads: bool = False,
) -> ModelRunner:
    """A runner with rows of ``slots`` slots; ``has_heads``: divided unevenly among the kv heads."""
    config = engine_config(bench, slots, max_rows, max_len, chunk_len, kv_dtype)
    if has_heads:
        slots_of = head_slots(decoder.config, _profile(decoder.config), config.budget, max_len)
        config = replace(config, heads=slots_of)
    return ModelRunner(decoder, config)


def _profile(model: ModelConfig) -> HeadProfile:
    """One head in four has about ten times the slots of the others, as measured profiles have a few large heads."""
    weights = [[10.0 if (layer + head) % 4 == 0 else 1.0 for head in range(model.num_kv_heads)]
               for layer in range(model.num_layers)]  # fmt: skip
    total = sum(map(sum, weights))
    return HeadProfile(shares=tuple(tuple(own / total for own in layer) for layer in weights), model="")


class _AsItIs:
    """Makes programs of nothing but the function, so that a smoke run on a CPU compiles nothing."""

    def make(self, function: Any, *inputs: Any) -> Any:
        return function


def use_executor(bench: Bench, runner: ModelRunner, executor: str, batch: int) -> None:
    """Give a runner eager decode, or programs for this one batch size."""
    if executor == "eager":
        runner.use_decode(EagerDecode)
        return
    maker: Any = Capturer() if bench.device.is_cuda else _AsItIs()
    depths = depths_of(runner.config.num_speculative_tokens)
    runner.use_decode(lambda parts: GraphDecode(parts, maker, (batch,), depths=depths))


def decode_seconds(bench: Bench, runner: ModelRunner, batch: int, num_tokens: int, steps: int) -> float:
    """Seconds of a decode step through ``submit``, each result read one step late, as the engine does."""
    rows = tuple(range(batch))
    occupy(runner, rows, num_tokens, GREEDY)
    pending: list[Any] = []

    def step() -> None:
        pending.append(runner.submit(StepPlan(step_id=0, decode_rows=rows)))
        if len(pending) > 1:
            pending.pop(0).result()

    return bench.device.seconds(step, steps, warm_ups=3)
