"""The decoder's logits against transformers: every architecture and rope kind, from saved checkpoints.

Attention here is written out (one softmax over all past keys), so that this file judges the models alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from snapstream.config import WeightFormat
from snapstream.kernels.interface import CosSin, HeadNorm
from snapstream.kv.spec import KVSpec, Window
from snapstream.models.checkpoint import load_weights
from snapstream.models.decoder import Decoder
from snapstream.models.layers import Recurrence, RowsRecurrence
from snapstream.models.quantize import quantize_checkpoint
from snapstream.models.registry import read_model_config
from tests.parity.checkpoints import (
    ARCHITECTURES,
    DELTA,
    GEMMA4,
    LLAMA3,
    RECURRENT,
    SIZES,
    VOCAB,
    causal_lm,
    class_of_transformers,
    randomise_corrections,
    save,
)
from tests.parity.heads import queries, split, whole_layer

DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0,
                 "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.3,
                 "beta_fast": 8.0, "beta_slow": 2.0}  # fmt: skip
LOOSE_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
              "attention_factor": 1.25, "truncate": False}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **ARCHITECTURES,
    "llama-all-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 20, "rms_norm_eps": 0.1}),
    "llama-yarn-mscale": ("LlamaConfig", {"rope_parameters": DEEPSEEK_YARN}),
    "llama-yarn-attention-factor": ("LlamaConfig", {"rope_parameters": LOOSE_YARN}),
    "mistral-head-dim": ("MistralConfig", {"sliding_window": None, "head_dim": 8}),
    "qwen2-tied-llama3": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "smollm3-listed": ("SmolLM3Config", {"no_rope_layers": [0, 1, 0], "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3-windows": (
        "SmolLM3Config",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 40},
    ),
    "mixtral-window": ("MixtralConfig", {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": 50}),
    "qwen3-windows": (
        "Qwen3Config",
        {
            "use_sliding_window": True,
            "sliding_window": 1,
            "head_dim": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe-window": (
        "Qwen3MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 149,
        },
    ),
    "qwen3-tied-bias": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 8, "attention_bias": True}),
}
PROMPT, DECODED = 150, 6  # beyond every original window above (32 and 64), so that stretching acts
TOLERANCE = 1e-4  # on logits of order 1
# Rounding grows in gated DeltaNet: transformers' own prefill and decode of these differ by up to 2e-3.
OWN_CACHES = {
    *RECURRENT,
    "deepseek-v3.2",
    "glm-5",
    "hy-v4",
    "minimax-m3",
}  # caches of other kinds than keys and values alone
TOLERANCES = dict.fromkeys(("olmo-hybrid", "qwen3-next", "qwen3.5", "qwen3.5-moe", "Qwen3_5"), 5e-3)
TOLERANCES["gemma"] = 2e-3  # transformers' own logits in fp32 and fp64 differ by 7e-4
TOLERANCES["ling3"] = 5e-4  # the same by 2e-4
TOLERANCES["step3.7-panels"] = 5e-4  # the same by 2e-4
TOLERANCES["gpt-oss"] = 2e-4  # experts amplify rounding: 1.04e-4 with the products of some processors


class FullAttention:
    """A KV view of one sequence: keeps every key and attends with an explicit causal softmax in fp32."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.states: dict[int, dict[str, Tensor]] = {}

    def recur(
        self, layer: int, inputs: Tensor, recurrence: Recurrence, of_rows: RowsRecurrence | None = None
    ) -> Tensor:
        if layer not in self.states:
            self.states[layer] = {name: torch.zeros(1, *shape) for name, shape in self.spec.state_shapes(layer)}
        return recurrence(inputs[None], self.states[layer])[0]

    def outputs(self, x: Tensor) -> Tensor:
        return x

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        if (source := self.spec.source(layer)) != layer:  # whose keys and values are those of this call's tokens too
            q, k, v = queries(heads, norm, rope), self.keys[source], self.values[source]
        else:
            q, k, v = split(heads, norm, rope, self.spec.slots_of(layer))
        if source == layer in self.keys:
            k, v = torch.cat((self.keys[layer], k)), torch.cat((self.values[layer], v))
        if source == layer:
            self.keys[layer], self.values[layer] = k, v
        group = q.shape[1] // k.shape[1]
        k, v = k.float().repeat_interleave(group, dim=1), v.float().repeat_interleave(group, dim=1)
        scores = torch.einsum("the,she->hts", q.float(), k) / q.shape[-1] ** 0.5
        scores = scores if norm.cap is None else norm.cap * torch.tanh(scores / norm.cap)
        offset = k.shape[0] - q.shape[0]
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + offset)
        cache = self.spec.slots_of(layer)
        if isinstance(cache, Window) and cache.is_chunked:
            query, key = torch.arange(offset, len(k))[:, None], torch.arange(len(k))
            hidden |= key < query // cache.num_tokens * cache.num_tokens
        elif isinstance(cache, Window):
            hidden |= torch.ones_like(hidden).tril(offset - cache.num_tokens)
        scores = scores.masked_fill(hidden, -torch.inf)
        if norm.sinks is not None:
            scores = torch.cat([scores, norm.sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hts,she->the", weights, v).to(q.dtype)


def build(name: str) -> Any:
    """A transformers model with random weights, norms and biases too, so that ignoring one would show."""
    class_name, changes = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    model = causal_lm(class_name, {**SIZES, **changes}).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or key.endswith(("bias", "sinks", "A_log")):
                value.copy_(float("norm" in key) + 0.3 * torch.randn_like(value))
        randomise_corrections(model)
    return model


def test_a_class_that_transformers_lacks_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match=f"transformers {transformers.__version__} has no NoSuchConfig"):
        causal_lm("NoSuchConfig", {})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = read_model_config(folder)
    return Decoder(config, load_weights(folder, config, dtype, "cpu", progress=False))


@torch.inference_mode()
def run(decoder: Decoder, view: FullAttention, ids: Tensor, start: int) -> Tensor:
    """Logits of ``ids`` fed at positions ``start ..``, as one prompt or as one decoded token."""
    positions = torch.arange(start, start + len(ids))
    rope = decoder.rope(positions, torch.full_like(positions, start + len(ids)))
    hidden = decoder.embed(ids)
    for index in range(decoder.config.num_layers):
        hidden = whole_layer(decoder, index, hidden, rope, view, decoder.token_inputs(ids))
    return decoder.logits(hidden)


def full_attention(decoder: Decoder) -> FullAttention:
    return FullAttention(decoder.kv_spec())


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert theirs.std() > 0.1, "logits too small for the tolerance to mean anything"
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("name", list(MODELS))
def test_prefill_and_decode_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    decoder = load(save(model, tmp_path))
    ids = torch.randint(0, VOCAB, (PROMPT + DECODED,), generator=torch.Generator().manual_seed(1))
    view = full_attention(decoder)
    cache = transformers.DynamicCache(config=model.config) if name in OWN_CACHES else transformers.DynamicCache()
    pieces = [(0, PROMPT)] + [(n, n + 1) for n in range(PROMPT, PROMPT + DECODED)]
    for start, end in pieces:
        at = torch.arange(start, end)[None]  # Bamba's class counts from 0 in every call
        with torch.no_grad():
            theirs = model(ids[None, start:end], position_ids=at, past_key_values=cache, use_cache=True).logits[0]
        assert_close(run(decoder, view, ids[start:end], start), theirs, TOLERANCES.get(name, TOLERANCE))


GEMMA3_TEXT: dict[str, Any] = {
    "head_dim": 16, "sliding_window": 21, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
QWEN_VISION = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "patch_size": 14,
               "out_hidden_size": 48}  # fmt: skip
TINY_VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
GLM_VISION = {"hidden_size": 32, "intermediate_size": 40, "depth": 1, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": 48}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 3, 3]}
WITH_TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (GEMMA3_TEXT, {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "Qwen3_5": ({**DELTA, "head_dim": 16, "num_hidden_layers": 4}, {"vision_config": QWEN_VISION}),
    "Qwen2VL": (
        {"num_key_value_heads": 1, "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2]}},
        {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 4}},
    ),
    "Qwen2_5_VL": (
        {
            "num_key_value_heads": 1,
            "sliding_window": 33,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2]},
        },
        {"vision_config": {**QWEN_VISION, "fullatt_block_indexes": [0]}},
    ),
    "Qwen3VL": ({"head_dim": 20, "rope_parameters": MROPE}, {"vision_config": QWEN_VISION}),
    "Qwen3VL-tied": (  # as the outer config alone says
        {"head_dim": 20, "rope_parameters": MROPE},
        {"vision_config": QWEN_VISION, "tie_word_embeddings": True},
    ),
    "Qwen3VLMoe": (
        {
            "head_dim": 20,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "rope_parameters": MROPE,
        },
        {"vision_config": QWEN_VISION},
    ),
    "Lfm2Vl": (
        {"model_type": "lfm2", **ARCHITECTURES["lfm2"][1]},
        {
            "vision_config": {**VISION, "model_type": "siglip2_vision_model", "num_patches": 4},
            "tie_word_embeddings": False,
        },
    ),
    "Lfm3Vl": (
        {"model_type": "lfm3", **ARCHITECTURES["lfm3"][1]},
        {
            "vision_config": {**VISION, "model_type": "lfm3_vl_vision", "num_key_value_heads": 1},
            "tie_word_embeddings": False,
        },
    ),
    "Gemma4Unified": (
        {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 5.0},
        {"vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8}},
    ),
    "Llama4": (
        {**ARCHITECTURES["llama4"][1], "attention_bias": False, "moe_layers": [0, 3]},
        {
            "vision_config": {
                **TINY_VISION,
                "image_size": 8,
                "vision_output_dim": 48,
                "projector_output_dim": 48,
                "projector_input_dim": 48,
            }
        },
    ),
    "Glm4v": (
        {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}},
        {"vision_config": GLM_VISION},
    ),
    "Glm46V": (
        {"model_type": "glm4v_text", "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2]}},
        {"vision_config": {"model_type": "glm4v_vision", **GLM_VISION}},
    ),
    "Glm4vMoe": (
        {
            "head_dim": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "rope_parameters": {**MROPE, "partial_rotary_factor": 0.4, "mrope_section": [1, 1, 2]},
        },
        {"vision_config": GLM_VISION},
    ),
    "Kimi_K25": (
        {"model_type": "deepseek_v3", **ARCHITECTURES["kimi-k2"][1]},
        {
            "vision_config": TINY_VISION,
            "tie_word_embeddings": False,
        },
    ),
    "MuseGlimmer": (
        ARCHITECTURES["muse-glimmer"][1],
        {
            "vision_config": TINY_VISION,
            "out_hidden_size": 128,
            "projector_hidden_size": 24,
            "tie_word_embeddings": False,
        },
    ),
    "Exaone4_5_": (
        {"model_type": "exaone4", "sliding_window": 33, "sliding_window_pattern": 2, "head_dim": 20},
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_heads": 2,
                "num_key_value_heads": 1,
                "patch_size": 4,
                "out_hidden_size": 48,
            }
        },
    ),
    "Mistral3": (
        {"model_type": "mistral", "sliding_window": None, "head_dim": 20},
        {"vision_config": {**VISION, "model_type": "pixtral"}, "tie_word_embeddings": False},
    ),
    "Mistral3-ministral3": (
        {"model_type": "ministral3", "head_dim": 20, "rope_parameters": {**DEEPSEEK_YARN, "llama_4_scaling_beta": 0.5}},
        {"vision_config": {**VISION, "model_type": "pixtral"}, "tie_word_embeddings": False},
    ),
    "Mistral3-mistral4": (
        {"model_type": "mistral4", **ARCHITECTURES["mistral4"][1]},
        {"vision_config": {**VISION, "model_type": "pixtral"}, "tie_word_embeddings": False},
    ),
}


@pytest.mark.parametrize("name", list(WITH_TOWERS))
def test_the_text_part_of_a_checkpoint_with_a_vision_tower(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, around = WITH_TOWERS[name]
    torch.manual_seed(5)
    name = name.partition("-")[0]
    config = class_of_transformers(f"{name}Config")(text_config={**SIZES, **text}, **around)
    model = class_of_transformers(f"{name}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.copy_((0.0 if name in ("Gemma3", "Qwen3_5") else 1.0) + 0.3 * torch.randn_like(value))
    folder = save(model, tmp_path)
    if name == "Kimi_K25":  # transformers 5.23 saves layers of the text part by the name of those of the tower
        tensors = load_file(file := folder / "model.safetensors")
        renamed = {key.replace("model.blocks.", "model.layers."): own for key, own in tensors.items()}
        save_file(renamed, file, {"format": "pt"})
    with caplog.at_level("INFO"):
        decoder = load(folder)
    assert "tensors of towers for images or sound are not loaded" in caplog.text
    ids = torch.randint(0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
    assert_close(run(decoder, full_attention(decoder), ids, 0), theirs, TOLERANCES.get(name, TOLERANCE))
    with pytest.raises(ValueError, match="also has a vision tower"):
        quantize_checkpoint(folder, tmp_path / "int8", WeightFormat(dtype="int8", group=32))


def test_the_text_part_of_gemma_3n(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As published: with towers, and with keys and values in layers that share those of others, which are not read."""
    model = build("gemma3n")
    folder = save(model, tmp_path)
    file, settings = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = {name.replace("model.", "model.language_model."): own for name, own in load_file(file).items()}
    layer = "model.language_model.layers.{}.self_attn.{}_proj.weight"
    tensors |= {layer.format(5, kind): tensors[layer.format(3, kind)] + 1.0 for kind in ("k", "v")}
    tensors |= {
        f"model.{name}.weight": torch.ones(3) for name in ("vision_tower.stem", "audio_tower.stem", "embed_vision.e")
    }
    save_file(tensors, file, {"format": "pt"})
    around = {"architectures": ["Gemma3nForConditionalGeneration"], "vision_config": {}, "audio_config": {}}
    (folder / "config.json").write_text(json.dumps({**around, "text_config": settings}))
    with caplog.at_level("INFO"):
        decoder = load(folder)
    assert "3 tensors of towers for images or sound are not loaded: text only" in caplog.text
    ids = torch.randint(0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(run(decoder, full_attention(decoder), ids, 0), model(ids[None]).logits[0])


def test_norms_after_the_rotation_of_unlike_signs_are_refused(tmp_path: Path) -> None:
    model = build("hunyuan-moe")
    with torch.no_grad():
        model.model.layers[1].self_attn.query_layernorm.weight[3] = -0.5
    with pytest.raises(ValueError, match="differ in their sign, which is not supported after the rotation"):
        load(save(model, tmp_path))


def test_a_checkpoint_without_corrections(tmp_path: Path) -> None:
    """Experts are chosen by plain scores; the norm of experts that an MLP has in published files is left out."""
    model = build("axk1")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    file = save(model, tmp_path) / "model.safetensors"
    tensors = {name: own for name, own in load_file(file).items() if "e_score_correction_bias" not in name}
    tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.randn(SIZES["hidden_size"])
    save_file(tensors, file, {"format": "pt"})
    decoder = load(tmp_path)
    assert decoder.config.moe is not None and not decoder.config.moe.has_bias
    ids = torch.randint(0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(run(decoder, full_attention(decoder), ids, 0), model(ids[None]).logits[0])


def test_experts_in_transposed_matrices(tmp_path: Path) -> None:
    """As Qwen3-VL is published; transformers writes either."""
    text, around = WITH_TOWERS["Qwen3VLMoe"]
    config = transformers.Qwen3VLMoeConfig(text_config={**SIZES, **text}, **around)
    folder = save(transformers.Qwen3VLMoeForConditionalGeneration(config).float(), tmp_path)
    plain, file = load(folder).weights.stored(), folder / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)
    turned = load(folder)
    assert turned.config.has_transposed_experts
    for name, tensor in turned.weights.stored().items():
        assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn"])
def test_stretching_acts(kind: str, tmp_path: Path) -> None:
    """The lengths above reach the stretched range: without it the logits are others."""
    model = build(f"llama-{kind}")
    stretched = load(save(model, tmp_path))
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    plain = load(save(model, tmp_path / "plain"))
    ids = torch.randint(0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(2))
    difference = run(stretched, full_attention(stretched), ids, 0) - run(plain, full_attention(plain), ids, 0)
    assert difference.abs().max() > 100 * TOLERANCE


def test_dynamic_stretching_depends_on_the_sequence_of_each_token(tmp_path: Path) -> None:
    """Packed tokens of a short and a long sequence keep their own bases, as if each ran alone."""
    decoder = load(save(build("llama-dynamic"), tmp_path))
    positions = torch.tensor([5, 5, 90])
    cos, sin = decoder.rope(positions, torch.tensor([6, 150, 150]))
    for index, (position, length) in enumerate([(5, 6), (5, 150), (90, 150)]):
        alone_cos, alone_sin = decoder.rope(torch.tensor([position]), torch.tensor([length]))
        assert torch.equal(cos[index], alone_cos[0])
        assert torch.equal(sin[index], alone_sin[0])
    assert not torch.allclose(cos[0], cos[1])


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    model = build("qwen3")
    whole = load(save(model, tmp_path / "whole"))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    sharded = load(tmp_path / "sharded")
    for role, tensor in whole.weights.stored().items():
        assert torch.equal(tensor, sharded.weights.stored()[role]), role


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    """Stored halves computed in fp32 equal transformers; computed as halves they err no more than it does."""
    model = build("llama-all-biases")
    ids = torch.randint(0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
        exact = model(ids[None]).logits[0]
        for parameter in model.parameters():  # not model.to(dtype), which would round the frequencies as well
            parameter.data = parameter.data.to(dtype)
        theirs = model(ids[None]).logits[0].float()
    folder = save(model, tmp_path)
    whole = load(folder)
    assert_close(run(whole, full_attention(whole), ids, 0), exact)
    half = load(folder, dtype)
    assert {tensor.dtype for tensor in half.weights.stored().values()} == {dtype}
    ours = run(half, full_attention(half), ids, 0)
    assert ours.dtype == torch.float32
    assert (ours - exact).pow(2).mean() <= (theirs - exact).pow(2).mean()


@pytest.mark.parametrize("num_tokens", [1, 3, 64])
def test_tokens_of_a_layer_do_not_mix(num_tokens: int, tmp_path: Path) -> None:
    """Without attention a layer is a function of each token alone, whatever is packed beside it."""

    class ValuesOnly:
        def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin) -> Tensor:
            q, k, _ = split(heads, norm, rope, decoder.kv_spec().slots_of(layer))
            return q + k.repeat_interleave(q.shape[1] // k.shape[1], 1)

    decoder = load(save(build("qwen2"), tmp_path))
    ids = torch.arange(num_tokens) % VOCAB
    positions = torch.arange(num_tokens)
    with torch.inference_mode():
        rope = decoder.rope(positions, positions + 1)
        packed = whole_layer(decoder, 1, decoder.embed(ids), rope, ValuesOnly())
        for index in (0, num_tokens - 1):
            one = slice(index, index + 1)
            alone = whole_layer(decoder, 1, decoder.embed(ids[one]), (rope[0][one], rope[1][one]), ValuesOnly())
            torch.testing.assert_close(packed[one], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_stored_head_beside_tied_embeddings(is_equal: bool, shard_size: str, tmp_path: Path) -> None:
    """transformers ties only what is equal: a stored lm_head of other values stays, whatever config.json says."""
    torch.manual_seed(5)
    made = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    if is_equal:
        with torch.no_grad():
            made.lm_head.weight.copy_(made.model.embed_tokens.weight)
    made.save_pretrained(tmp_path, max_shard_size=shard_size)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) == is_equal
    decoder = load(tmp_path)
    assert (decoder.weights.lm_head is decoder.weights.embed) == is_equal
    ids = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert_close(run(decoder, full_attention(decoder), ids, 0), model(ids[None]).logits[0])


def test_a_stored_head_of_another_dtype_is_kept(tmp_path: Path) -> None:
    model = build("llama-gqa-tied")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.bfloat16)
    save(model, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    decoder = load(tmp_path)
    assert torch.equal(decoder.weights.lm_head.dense(), tensors["lm_head.weight"].float())
