"""The workspace of looped decode is what ``plan`` says, in bytes of the tensor that an engine holds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from snapstream.config import EngineConfig, KVBudget, ModelConfig, WeightFormats
from snapstream.config.engine import Speculator
from snapstream.config.values import num_cores
from snapstream.exec.draft_model import DraftModel
from snapstream.exec.eager import EagerDecode
from snapstream.exec.executors import MAX_DRAFTED, NATIVE_SAMPLING_BYTES, executor_of, looped_workspace
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.runner import ModelRunner
from snapstream.exec.speculation import History
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.kernels.cpu.looped.library import load
from snapstream.models.decoder import Decoder
from snapstream.models.matrix import make_matrix
from snapstream.models.panels import make_panels
from snapstream.models.registry import model_config_from_dict
from snapstream.models.sharding import weight_bytes
from snapstream.models.weights import DecoderWeights
from snapstream.plan.memory import engine_memory, speculator_config, speculator_memory
from tests.live import LiveBytes

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 1024, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "experts": COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
    },
    "latents": COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": 128,
        "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 8,
        "n_routed_experts": None, "first_k_dense_replace": 1,
    },
}  # fmt: skip
# Norms of outputs, and angles of layers with windows.
MODELS["four norms"] = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "sliding_window": 512,
    "hidden_size": 1024,
}
# A gated DeltaNet in three of four layers, attention with a gate in the fourth, experts with shared ones.
MODELS["recurrent"] = COMMON | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 1000,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
# Layers of one part each without gates, and KDA beside latents.
MODELS["single parts"] = COMMON | {
    "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*-E", "mamba_num_heads": 16, "n_groups": 2,
    "n_routed_experts": 8, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512,
    "moe_latent_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
MODELS["kda"] = MODELS["latents"] | {
    "architectures": ["KimiLinearForCausalLM"], "num_hidden_layers": 5, "linear_num_heads": 8, "linear_head_dim": 64,
    "first_k_dense_replace": 5, "tie_word_embeddings": False,
}  # fmt: skip
# The same with gates of heads, and all the numbers of those of recurrent layers projected at once.
MODELS["gated latents"] = MODELS["latents"] | {
    "architectures": ["BailingHybridForCausalLM"], "num_hidden_layers": 3, "layer_group_size": 3, "q_lora_rank": None,
    "first_k_dense_replace": 3, "linear_head_dim": 64, "tie_word_embeddings": False, "num_attention_heads": 7,
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Gates of all numbers of a value, sinks, and hyper-connections; those that mix are in the second.
MODELS["hyper"] = MODELS["latents"] | {
    "architectures": ["HYV4ForCausalLM"], "q_lora_rank": 64, "first_k_dense_replace": 8,
    "hc_mult": 16, "tie_word_embeddings": False,
}  # fmt: skip
MODELS["mixed streams"] = MODELS["kda"] | {
    "architectures": ["Glm5NextForConditionalGeneration"], "q_lora_rank": 64, "qk_rope_head_dim": 0, "hc_mult": 8,
    "mlp_layer_types": ["dense"] * 5, "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2,
}  # fmt: skip
# Two sizes of heads, shared keys and values, wide MLPs, embeddings for each layer; experts beside every MLP.
MODELS["shared"] = COMMON | {
    "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 128, "use_double_wide_mlp": True,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 512,
}  # fmt: skip
# Query heads that differ by kind of layers, with a gate each.
MODELS["query heads"] = MODELS["experts"] | {
    "architectures": ["LagunaForCausalLM"], "num_attention_heads_per_layer": [4, 12], "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
}  # fmt: skip
# Residual streams, and a low rank that is the widest input of a product.
MODELS["streams"] = MODELS["shared"] | {
    "architectures": ["Gemma3nForCausalLM"], "laurel_rank": 2048, "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0],
}  # fmt: skip
MODELS["beside"] = MODELS["shared"] | {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 16,
    "top_k_experts": 4, "moe_intermediate_size": 256, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}  # fmt: skip
# Attention and Mamba-2 in one layer, whose projections lie side by side.
MODELS["side by side"] = COMMON | {
    "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 768, "mamba_n_heads": 12, "mamba_d_state": 64,
    "num_hidden_layers": 2,
}  # fmt: skip
# The values of all heads are the widest input of a product, wider than all queries in the space of the latents.
MODELS["wide values"] = MODELS["latents"] | {"kv_lora_rank": 64, "v_head_dim": 256}
ROWS = 32


@pytest.mark.parametrize("most_drafted", [0, 8])
@pytest.mark.parametrize(("name", "width"), [("dense", "float32"), ("dense", "int8"), ("four norms", "float32"),
                                             ("experts", "float32"), ("recurrent", "float32"),
                                             ("single parts", "float32"), ("kda", "float32"),
                                             ("gated latents", "float32"), ("hyper", "float32"), ("hyper", "int8"),
                                             ("mixed streams", "float32"),
                                             ("side by side", "float32"), ("side by side", "int8"),
                                             ("shared", "float32"), ("shared", "int8"), ("streams", "float32"),
                                             ("streams", "int8"), ("beside", "float32"), ("query heads", "float32"),
                                             ("latents", "float32"), ("wide values", "float32"),
                                             ("latents", "int8"), ("wide values", "int8")])  # fmt: skip
def test_plan_and_engine_agree(name: str, width: str, most_drafted: int) -> None:
    model, formats = model_config_from_dict(MODELS[name]), WeightFormats.of(width)
    if most_drafted and model.kv_sources is not None:
        pytest.skip("drafts are refused")
    if width == "int8":
        formats = formats.rounding_inputs()
    weights = DecoderWeights.empty(model, torch.float32, "cpu", formats, make_panels(load()))
    budget = KVBudget(num_sink=4, num_topk=0, num_recent=2044)
    config = EngineConfig(budget=budget, max_model_len=4096, max_rows=ROWS, weights=formats, executor="looped",
                          num_speculative_tokens=most_drafted)  # fmt: skip
    runner = ModelRunner(Decoder(model, weights), config)
    assert isinstance(runner.decode, LoopedDecode)
    held, num_threads = runner.decode.workspace_bytes, runner.decode.pool.num_threads
    runner.decode.close()
    planned = looped_workspace(model, config, num_threads)
    drafted = MAX_DRAFTED if most_drafted else 0
    total = (ROWS + drafted) * planned.entry_bytes + planned.scratch_bytes
    assert held <= total <= 1.03 * held
    memory, here = engine_memory(model, config), looped_workspace(model, config, num_cores())
    assert memory.batch_bytes == here.entry_bytes + model.vocab_size * NATIVE_SAMPLING_BYTES
    slots = drafted * runner.cache.spec.token_bytes()  # copies of those that drafted tokens overwrite
    assert memory.framework_bytes == here.scratch_bytes + drafted * memory.batch_bytes + slots


@pytest.mark.parametrize(
    ("name", "executor"),
    [*((name, "looped") for name in ("dense", "four norms", "latents")), ("dense", "eager"), ("latents", "eager")],
)
def test_a_draft_model_takes_what_the_plan_says(name: str, executor: str) -> None:
    """Rows, staging and workspace beside its weights, and then a draft for rows that are read and fed."""
    target, draft = (model_config_from_dict(MODELS[own]) for own in ("dense", name))
    formats = WeightFormats.of("float32")
    speculator = Speculator(folder="draft", model=draft, formats=formats, executor=executor)
    config = EngineConfig(budget=KVBudget.full(64), max_model_len=64, max_rows=ROWS, executor="looped",
                          num_speculative_tokens=8)  # fmt: skip
    runner, decoder = (
        ModelRunner(Decoder(target, weights_of(target)), config), Decoder(draft, weights_of(draft, executor)),
    )  # fmt: skip
    history = History(range(8))
    with LiveBytes("cpu") as live, torch.inference_mode():
        views = [decoder.weights.layer(index) for index in range(draft.num_layers)]  # count with the weights
        seen = live.now
        make = EagerDecode if executor == "eager" else partial(LoopedDecode, pool=runner.decode.pool)  # type: ignore[attr-defined]
        own = DraftModel(decoder, speculator_config(speculator, ROWS), make)
        held = live.now - seen
        own.draft([(row, history, 4) for row in range(ROWS)])
        peak = live.peak - seen
    del views
    runner.decode.close()  # type: ignore[attr-defined]
    planned = speculator_memory(speculator, ROWS)
    rows = (ROWS + 1) * (planned.row_bytes + planned.state_bytes) + ROWS * planned.batch_bytes
    total = planned.fixed_bytes - weight_bytes(draft, "float32", formats) + rows
    assert held <= peak <= total
    steps = speculator_config(speculator, ROWS)
    later = engine_memory(draft, steps).transient_bytes  # of a longer prefill
    if executor == "eager":  # allocates in a step what it needs there
        later += ROWS * planned.batch_bytes + executor_of(executor).scratch_bytes(draft, steps)
    assert held == pytest.approx(total - later, rel=0.03)


def weights_of(model: ModelConfig, executor: str = "looped") -> DecoderWeights:
    make = make_panels(load()) if executor == "looped" else make_matrix
    weights = DecoderWeights.empty(model, torch.float32, "cpu", None, make)
    weights.fill_randomly(1)
    return weights


def test_native_draws_take_what_the_plan_says() -> None:
    """First tokens of all rows, every option of the sampler on, beside the logits of a step."""
    model = model_config_from_dict(MODELS["dense"] | {"vocab_size": 20_000})
    weights = DecoderWeights.empty(model, torch.float32, "cpu", None, make_panels(load()))
    for _, tensor in weights.vectors.items():
        tensor.fill_(1.0)
    config = EngineConfig(budget=KVBudget.full(64), max_model_len=64, max_rows=ROWS, executor="looped")
    runner = ModelRunner(Decoder(model, weights), config)
    assert isinstance(runner.decode, LoopedDecode)
    needs = SamplingNeeds(bias=True, min_tokens=True, penalties=True, grammar=True, random=True, top_k=True, top_p=True,
                          min_p=True, num_logprobs=20)  # fmt: skip
    rows = torch.arange(ROWS)
    with LiveBytes("cpu") as live, torch.inference_mode():
        logits = runner.decoder.logits(torch.zeros(ROWS, model.hidden_size))[rows]
        runner.decode.sample(logits, rows, needs)
    runner.decode.close()
    of_a_step = 4
    peak = live.peak / logits.numel() + of_a_step
    assert 0.95 * NATIVE_SAMPLING_BYTES < peak < 1.05 * NATIVE_SAMPLING_BYTES
