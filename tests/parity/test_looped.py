"""Equality 4 for looped steps: eager's tokens, its logits to rounding, and for a row the same bits in any batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.stand_ins import random_weights
from snapstream.assets import TINY_LATENT_MODEL, TINY_MODEL
from snapstream.config import (
    KV_DTYPES,
    EngineConfig,
    EngineOptions,
    KVBudget,
    ModelConfig,
    WeightFormats,
)
from snapstream.config.model import LayerNorms, LengthScale, Multipliers
from snapstream.exec import eager as decode_eager
from snapstream.exec import prefill
from snapstream.exec.eager import EagerDecode
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.rows import RecentQueries
from snapstream.exec.runner import ModelRunner
from snapstream.exec.sampling import NO_TOKEN, Sampled
from snapstream.kernels.cpu.looped.build import find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import load, num_cores
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.decoder import Decoder
from snapstream.models.lora import Adapters
from snapstream.models.matrix import MakeMatrix, make_matrix
from snapstream.models.panels import make_panels
from snapstream.models.registry import model_config_from_dict, tensor_specs
from snapstream.models.tensors import base_name
from snapstream.models.weights import DecoderWeights
from snapstream.startup.measure import gains
from snapstream.types import SamplingParams
from tests.kernels.layers import step_of
from tests.parity.checkpoints import ARCHITECTURES, VOCAB, make_model, save

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

SMALL = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SETTINGS: dict[str, Any] = {
    "budget": SMALL, "selector": SnapKV(observation_len=8), "max_model_len": 160, "max_rows": 3, "progress": False,
}  # fmt: skip
LENGTHS = (70, 5, 120, 33, 18, 1, 90)


def params() -> list[SamplingParams]:
    """Greedy, sampled and edited, ending at different steps."""
    return [
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=17, temperature=0.9, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=11, temperature=0.8, top_p=0.8, top_k=20, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.7, frequency_penalty=1.0, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


def answers(folder: Path, prompts: list[list[int]], executor: str, **changes: Any) -> list[list[int]]:
    with LLM(folder, executor=executor, **SETTINGS | changes) as llm:
        return [list(output.token_ids) for output in llm.generate(prompts, params())]


OTHERS = (
    "Mo",
    "Mixtral",
    "GptOss",
    "MiniMaxM",
    "Dots1",
    "Olmoe",
    "Youtu",
    "Mistral4",
    "HYV3",
    "Mellum",
    "Kolibri",
    "SolarOpen",
    "Flint",
    "AXK1",
    "HunYuanMoE",
    "Afmoe",
    "Laguna",
    "Step3",
    "Phimoe",
    "Llama4",
    "Deepseek",
    "Lfm",
    "Qwen3Next",
    "Qwen3_5",
    "OlmoHybrid",
    "Bamba",
)  # mixtures and latents: tests/parity/test_looped_rows.py
DENSE = [name for name, (config, _) in ARCHITECTURES.items() if not any(kind in config for kind in OTHERS)]


@pytest.mark.parametrize("name", DENSE)
def test_tokens_equal_eager(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model(name), tmp_path)
    assert answers(folder, prompts, "looped") == answers(folder, prompts, "eager")


@pytest.mark.parametrize("name", ["phi-panels", "phimoe-panels"])
def test_biases_of_norms_are_not_rounded(name: str, tmp_path: Path) -> None:
    """Whatever products round, what they make of the biases of norms is the same."""
    folder, found = save(make_model(name), tmp_path), []
    for executor in ("eager", "looped"):
        for activations in ("dtype", "int8"):
            changes = {"weights": "int8", "activations": activations}
            with LLM(folder, executor=executor, **SETTINGS | changes) as llm:
                vectors = llm.engine.runner.decoder.weights.vectors  # type: ignore[attr-defined]
                found.append({own: vectors[own].clone() for own in vectors if own.endswith("_bias")})
    assert {"qkv_bias", "lm_head_bias"} < found[0].keys()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        # Inputs as the machine rounds them in prefill have a test of their own: a difference in the last place grows.
        {"weights": "bfloat16", "activations": "dtype"},
        {"weights": "float16", "activations": "dtype"},
        {"weights": "int8", "activations": "int8"},
        {"weights": "int4", "activations": "int8"},
        *({"kv_dtype": name} for name in KV_DTYPES if name not in ("auto", "float32")),
        {"max_rows": 7, "budget": "full"},
    ],
    ids=str,
)
def test_tokens_equal_eager_in_other_engines(changes: dict[str, Any], prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model("qwen3", hidden_size=64, intermediate_size=96, head_dim=32), tmp_path)
    assert answers(folder, prompts, "looped", **changes) == answers(folder, prompts, "eager", **changes)


@pytest.mark.parametrize(
    "kv_dtype",
    ["auto", "fp8", "int8/int4", *(pytest.param(own, marks=pytest.mark.slow) for own in ("bfloat16", "int8", "int4"))],
)
def test_rows_with_windows_equal_eager(kv_dtype: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """Rings of 33 slots in two layers, a row of 32 slots in the first; requests with fewer slots of their own."""
    folder = save(make_model("qwen2-windows", hidden_size=128 if "int4" in kv_dtype else 48), tmp_path)
    found = []
    for executor in ("looped", "eager"):
        with LLM(folder, executor=executor, **SETTINGS | {"kv_dtype": kv_dtype}) as llm:
            answered = [
                llm.generate(prompts, params(), budget=own)
                for own in (None, KVBudget(num_sink=2, num_topk=9, num_recent=5), KVBudget.streaming(9))
            ]
            found.append([list(output.token_ids) for outputs in answered for output in outputs])
    assert found[0] == found[1]


def test_sampled_answers_of_the_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that no two parameters share, in one batch; both executors draw the same tokens of the same seeds, each by
    its own means from the first one on.
    """
    options: list[dict[str, Any]] = [
        {"temperature": 1.0}, {"temperature": 2.0, "top_k": 20, "top_p": 0.95}, {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 1.6, "min_p": 0.02, "logprobs": 2}, {"temperature": 1.5, "repetition_penalty": 1.3},
        {"temperature": 1.5, "presence_penalty": 1.0, "logit_bias": {65: 4.0}, "min_tokens": 9}, {"temperature": 0.0},
    ]  # fmt: skip
    asked = [SamplingParams(max_tokens=24, seed=seed, ignore_eos=True, **own) for seed, own in enumerate(options)]
    found, calls, counts = [], [], []
    for room in (prefill, decode_eager):

        def counted(*given: Any, own: Any = room.sample) -> Sampled:
            calls.append(own)
            return own(*given)

        monkeypatch.setattr(room, "sample", counted)
    for executor in ("looped", "eager"):
        with LLM(TINY_MODEL, executor=executor, budget="full", max_model_len=256, max_rows=7, progress=False) as llm:
            found.append([list(output.token_ids) for output in llm.generate(["The code for amber"] * 7, asked)])
            counts.append(len(calls))
    assert found[0] == found[1]
    assert counts[0] == 0 < counts[1]
    assert len({tuple(tokens) for tokens in found[0]}) == len(options)


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("folder", [TINY_MODEL, TINY_LATENT_MODEL], ids=["heads", "latents and experts"])
def test_prefill_that_rounds_its_inputs(folder: Path, weights: str) -> None:
    """Both executors round the same things, and what that changes is small beside what a model is sure of."""
    gain = gains()
    rounds_much = gain["gains_by_bf16"] or (weights != "bfloat16" and gain["gains_by_int8"] and folder == TINY_MODEL)
    if not rounds_much and not (weights == "bfloat16" and gain["gains_by_int16"]):
        pytest.skip("this processor gains nothing by such inputs")
    asked = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
    prompts = [
        [{"role": "user", "content": f"The code for {name} is 4821907. The code for velvet otter is 1130254.\n\n"
                                     f"What is the code for {name}?"}]
        for name in ("amber falcon", "silent river", "brass lantern", "copper fox", "green harbor")
    ]  # fmt: skip

    def first(executor: str, activations: str) -> tuple[str, list[float]]:
        """An answer, and log-probabilities of each second likeliest first token, which moves more than the first."""
        options = EngineOptions(executor=executor, activations=activations, weights=weights, max_model_len=256)
        with LLM(folder, options, progress=False) as llm:
            outputs = [llm.chat(prompt, asked)[0] for prompt in prompts]
            seconds = [output.logprobs[0].top[1][1] for output in outputs if output.logprobs is not None]
            return outputs[0].text.strip(), seconds

    looped, plain = first("looped", "auto"), first("eager", "auto")
    exact = first("looped", "dtype" if weights == "bfloat16" or folder == TINY_LATENT_MODEL else "int8")
    assert looped[0] == plain[0] == exact[0] == "4821907"
    if rounds_much:  # sums in another order turn single roundings, which moves less than all roundings together
        assert 2 * math.dist(looped[1], plain[1]) < math.dist(looped[1], exact[1])
    else:
        assert max(math.dist(looped[1], plain[1]), math.dist(looped[1], exact[1])) < 0.1


ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 64},
]


WIDTHS = ("float32", "bfloat16", "float16", "int8", "int4")


@st.composite
def models(draw: st.DrawFn, *, multiple: int = 1) -> ModelConfig:
    """Of any family, of sizes that are multiples of ``multiple``."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    family = draw(st.sampled_from(["Llama", "Qwen2", "Qwen3"]))
    head_dims = [2, 12, 20, 32, 64, 80, 128] if multiple == 1 else [32, 64, 128]
    found: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "vocab_size": draw(st.integers(40, 150)),
        "hidden_size": multiple * draw(st.integers(1, 90 // multiple)), "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from(head_dims)),
        "intermediate_size": multiple * draw(st.integers(1, 150 // multiple)), "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    if family == "Llama":
        found |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    rope = draw(st.sampled_from(ROPES))
    if rope is not None and rope["rope_type"] == "longrope":
        pairs = found["head_dim"] // 2
        rope = rope | {"short_factor": [1.5] * pairs, "long_factor": [2.0 + i for i in range(pairs)]}
    if rope is not None and found["head_dim"] > 2:
        found |= {"rope_scaling": rope, "max_position_embeddings": 64 if rope["rope_type"] == "dynamic" else 4096}
    model = model_config_from_dict(found)
    share = draw(st.sampled_from([1.0, 0.5])) if model.head_dim % 8 == 0 and model.rope.kind != "longrope" else 1.0
    model = replace(model, rope=replace(model.rope, partial_rotary_factor=share))
    return with_parts(draw, model) if draw(st.booleans()) else model


def with_parts(draw: st.DrawFn, model: ModelConfig) -> ModelConfig:
    """The model with other parts of the recipe, which no one family has together."""
    norms = draw(st.sampled_from([LayerNorms(), LayerNorms("a", "b", "c", "d"), LayerNorms(None, "b", None, "d")]))
    is_whole_norm, draws_length = draw(st.booleans()), draw(st.booleans())
    is_parallel = is_centered = False
    if norms == LayerNorms() and not is_whole_norm:
        is_parallel, is_centered = draw(st.booleans()), draw(st.booleans())
        norms = LayerNorms("a", None, None, None) if is_parallel else norms
    factors = st.sampled_from([0.5, 1.0, 3.0])
    is_whole = model.rope.partial_rotary_factor == 1.0
    window = draw(st.sampled_from([None, 1, 5, 16]))
    return replace(
        model,
        norms=norms,
        norm_offset=draw(st.sampled_from([0.0, 1.0])),
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
        qk_norm=False,
        has_whole_qk_norm=is_whole_norm,
        is_parallel=is_parallel,
        is_centered=is_centered,
        multipliers=Multipliers(
            embedding=draw(factors), logits=draw(factors), residual=1.0 if norms.has_outputs else draw(factors),
            attention=draw(factors) if is_whole else 1.0,
        ),
        length_scale=LengthScale(0.5, 9) if draws_length and not is_whole_norm and window is None else None,
        windows=None if window is None else (window, None)[: model.num_layers],
        window_rope=None if window is None else replace(
            model.rope, kind="default", theta=500.0, short_factors=(), long_factors=()
        ),
    )  # fmt: skip


def runner_of(
    model: ModelConfig, width: str, kv_dtype: str, instructions: Any, capacity: int, seed: int
) -> ModelRunner:
    """As ``random_runner`` over panels of that width."""
    return random_runner(model, WeightFormats.of(width), kv_dtype, make_panels(load(instructions)), capacity, seed)


def random_runner(
    model: ModelConfig, formats: WeightFormats, kv_dtype: str, make: MakeMatrix, capacity: int, seed: int,
    num_rows: int = 5, num_queries: int = 0, adapters: Adapters | None = None,
) -> ModelRunner:  # fmt: skip
    """Random weights, rows full of random numbers, and counters as after prompts shorter and longer than a row.

    ``num_queries``: of each row, which steps keep as those of a draft; 0: none.
    """
    torch.manual_seed(seed)
    weights = DecoderWeights.empty(model, torch.float32, "cpu", formats, make)
    for matrix in weights.matrices.values():
        matrix.fill(torch.randn(matrix.shape) / matrix.shape[-1] ** 0.5)
    for name, vector in weights.vectors.items():
        vector.normal_().mul_(0.3).add_(1.0 * base_name(name).endswith(("norm", "scalar", "scale")))
        if model.norms_after_rope and name in ("q_norm", "k_norm"):
            vector.abs_()
        if (missing := tensor_specs(model)[name].missing) is not None:
            others = set(range(model.num_layers)) - set(tensor_specs(model)[name].layers_of(model.num_layers))
            vector[list(others)] = missing
    config = EngineConfig(
        budget=KVBudget(num_sink=capacity // 4, num_topk=0, num_recent=capacity - capacity // 4),
        max_model_len=4096, max_rows=num_rows, kv_dtype=kv_dtype, weights=formats,  # type: ignore[arg-type]
        num_speculative_tokens=0 if num_queries or model.has_uneven_layers else 3,
    )  # fmt: skip
    runner = ModelRunner(Decoder(model, weights, adapters=adapters), config)
    cache = runner.cache
    spec = cache.spec
    if num_queries:
        queries = RecentQueries(spec, num_rows, num_queries, torch.float32, "cpu")
        runner.step_parts = replace(runner.step_parts, queries=queries)
    sides = [(cache.k, cache.k_scale, spec.key_dim), (cache.v, cache.v_scale, spec.value_dim)]
    if spec.is_uneven:
        layers = [(spec.slots_of(index), cache.layer(index)) for index in spec.slot_layer_indices]
        sides = [
            side
            for own, rows in layers
            for side in ((rows.k, rows.scales[0], own.key_dim), (rows.v, rows.scales[1], own.value_dim))
        ]
    for (stored, scale, size), encoding in zip(sides, cycle(cache.encodings), strict=False):
        numbers = torch.randn(*stored.shape[:-1], size)
        if encoding.format.scales == "slot" and scale is not None:
            numbers *= 2.0 ** torch.randint(-3, 2, (*scale.shape, 1))
            scale.copy_(encoding.scale_of(numbers))
            stored.copy_(encoding.encode(numbers, scale))
        else:
            stored.copy_(encoding.encode(numbers, None))
            if scale is not None:
                scale.copy_(2.0 ** torch.randint(-3, 2, scale.shape))
    counts = torch.tensor([0, 1, capacity - 1, capacity, 3 * capacity + 1])[torch.arange(num_rows) % 5]
    runner.rows.num_tokens[:num_rows] = counts
    runner.rows.ring_start[:num_rows] = capacity // 4
    runner.rows.capacity[:num_rows] = capacity
    runner.rows.last_token[:num_rows] = torch.randint(0, model.vocab_size, (num_rows,))
    return runner


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=15)
@given(
    data=st.data(), width=st.sampled_from(WIDTHS),
    kv_dtype=st.sampled_from([name for name in KV_DTYPES if name != "float32"]),
    capacity=st.sampled_from([1, 2, 17, 40, 1100]),
    threads=st.integers(1, min(2, num_cores())), batch=st.permutations(range(5)), size=st.integers(1, 5),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_logits_equal_eager_and_do_not_depend_on_neighbours(
    data: st.DataObject, width: str, kv_dtype: str, instructions: Any, capacity: int, threads: int, batch: list[int],
    size: int, seed: int,
) -> None:  # fmt: skip
    model = data.draw(models(multiple=32 if width == "int4" or "int4" in kv_dtype or width == "int8" else 1))
    runner = runner_of(model, width, kv_dtype, instructions, capacity, seed)
    looped, eager = LoopedDecode(runner.step_parts, threads), EagerDecode(runner.step_parts)
    stored = [tensor for tensor in vars(runner.cache).values() if isinstance(tensor, Tensor)]
    before = [tensor.clone() for tensor in stored]
    rows = torch.tensor(batch[:size])
    with torch.inference_mode():
        got = looped.logits(rows).clone()
        written = numbers_of(runner)
        alone = torch.cat([looped.logits(rows[i : i + 1]).clone() for i in range(size)])
        assert torch.equal(alone, got)
        for tensor, own in zip(stored, before, strict=True):
            tensor.copy_(own)
        want = eager.logits(rows)
    scale = float(want.abs().max())
    # A number of quantized rows may round to the next one: in FP8 an eighth of itself, of slots with scales a step.
    near = {"bfloat16": 2.0**-7, "fp8": 0.13}.get(kv_dtype, 1e-4)
    now = numbers_of(runner)
    for encoding, own, number in zip(runner.cache.encodings, written, now, strict=True):
        step = step_of(encoding.format.name, number)
        assert ((own - number).abs() <= near * number.abs() + 1e-3 + 1.01 * step).all()
    is_same = all(torch.equal(own, number) for own, number in zip(written, now, strict=True))
    limit = 2e-5 if is_same or kv_dtype == "auto" else 0.3 if "int4" in kv_dtype else 2e-2
    torch.testing.assert_close(got, want, rtol=0, atol=limit * scale)
    looped.close()


def numbers_of(runner: ModelRunner) -> tuple[Tensor, Tensor]:
    """What rows hold, copied; of FP8 without its scales, which do not change; of int4 rotated."""
    cache = runner.cache
    keys, values = cache.encodings
    if keys.format.scales != "slot" and values.format.group == 1:
        return cache.k.float().clone(), cache.v.float().clone()
    return keys.rotated(cache.k, cache.k_scale), values.rotated(cache.v, cache.v_scale)


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    model = model_config_from_dict({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 40, "max_position_embeddings": 4096,
    })  # fmt: skip
    yield runner_of(model, "float32", "auto", None, 24, 0)


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=10)
@given(
    model=models(multiple=32), width=st.sampled_from(["int8", "int4", "bfloat16"]),
    threads=st.integers(1, min(2, num_cores())),
    batch=st.permutations(range(5)), size=st.integers(1, 5), seed=st.integers(0, 999),
)  # fmt: skip
def test_steps_that_round_their_inputs(
    model: ModelConfig, width: str, instructions: Any, threads: int, batch: list[int], size: int, seed: int
) -> None:
    """As plain calls that round them; where the two differ by a bit, a number may round to the next code."""
    assume(width != "bfloat16" or load(instructions).multiplies_bf16())
    formats, rows = rounding(width), torch.tensor(batch[:size])
    runner = random_runner(model, formats, "auto", make_panels(load(instructions)), 17, seed)
    looped = LoopedDecode(runner.step_parts, threads)
    eager, unrounded = (
        EagerDecode(random_runner(model, own, "auto", make_matrix, 17, seed).step_parts)
        for own in (formats, WeightFormats.of(width))
    )
    with torch.inference_mode():
        got = looped.logits(rows).clone()
        assert torch.equal(torch.cat([looped.logits(rows[i : i + 1]).clone() for i in range(size)]), got)
        want, wide = eager.logits(rows), unrounded.logits(rows)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2 * float(want.abs().max()))
    assert (got - want).norm() < (got - wide).norm() * 0.75, "inputs were rounded"
    looped.close()


def rounding(width: str) -> WeightFormats:
    """Whose inputs decode rounds."""
    return WeightFormats.of(width).rounding_to_bf16().rounding_inputs()


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize(
    "formats", [*map(WeightFormats.of, WIDTHS), *map(rounding, ["bfloat16", "int8", "int4", "mxfp4"])]
)
def test_many_rows_get_the_bits_of_one(formats: WeightFormats, instructions: Any) -> None:
    """More than a product takes at a time, in groups of unequal size."""
    library = load(instructions)
    if formats == rounding("bfloat16") and not library.multiplies_bf16():
        pytest.skip(f"{instructions} has no products of bfloat16")
    model = model_config_from_dict({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "vocab_size": 99, "hidden_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 544, "max_position_embeddings": 4096,
    })  # fmt: skip
    runner = random_runner(model, formats, "auto", make_panels(library), 24, 0, num_rows=29)
    looped, rows = LoopedDecode(runner.step_parts), torch.randperm(29)
    with torch.inference_mode():
        together = looped.logits(rows).clone()
        for size in (1, 2, 11, 13):
            parts = [looped.logits(part.contiguous()).clone() for part in rows.split(size)]
            assert torch.equal(torch.cat(parts), together)
    looped.close()


def test_a_greedy_step_leaves_the_state_that_eager_leaves(runner: ModelRunner) -> None:
    parts, rows = runner.step_parts, torch.tensor([4, 1, 2])
    names = ("last_token", "num_tokens")
    before = {name: getattr(parts.rows, name).clone() for name in names}
    cache = parts.cache.k.clone(), parts.cache.v.clone()
    found = []
    for decode in (LoopedDecode(parts), EagerDecode(parts)):
        for name, value in before.items():
            getattr(parts.rows, name).copy_(value)
        parts.cache.k.copy_(cache[0])
        parts.cache.v.copy_(cache[1])
        parts.sampling.num_sampled.zero_()
        with torch.inference_mode():
            tokens = [decode.step(rows, SamplingNeeds()).token_ids.tolist() for _ in range(6)]
        found.append((tokens, *(getattr(parts.rows, n).tolist() for n in names), parts.sampling.num_sampled.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_draw_no_token(runner: ModelRunner, wrong: float) -> None:
    parts = runner.step_parts
    parts.decoder.weights.vectors["final_norm"][3] = wrong
    found = []
    for decode in (LoopedDecode(parts), EagerDecode(parts)):
        with torch.inference_mode():
            found.append(decode.step(torch.tensor([2, 0]), SamplingNeeds()).token_ids.tolist())
    assert found == [[NO_TOKEN, NO_TOKEN]] * 2
    assert parts.rows.last_token[[2, 0]].tolist() == [0, 0]


def test_slots_past_the_length_are_never_read(runner: ModelRunner) -> None:
    looped, row = LoopedDecode(runner.step_parts), torch.tensor([1])  # which sees two slots after the step
    first = looped.logits(row).clone()
    runner.cache.k[:, 1, :, 2:] = float("nan")
    runner.cache.v[:, 1, :, 2:] = float("nan")
    assert torch.equal(looped.logits(row), first)


def test_what_it_cannot_run_is_refused(runner: ModelRunner, tmp_path: Path) -> None:
    folder = save(make_model("qwen3"), tmp_path)
    message = "executor 'looped': dtype is 'bfloat16'; the native library computes in float32.*use 'eager'"
    with pytest.raises(ValueError, match=message):
        LLM(folder, executor="looped", **SETTINGS | {"dtype": "bfloat16"})
    plain = Decoder(runner.decoder.config, random_weights(runner.decoder.config, torch.float32, "cpu", 0))
    with pytest.raises(ValueError, match="reads weights in panels, and lm_head is stored row by row"):
        LoopedDecode(replace(runner.step_parts, decoder=plain))
    with pytest.raises(ValueError, match="22 entries in a step; this engine has 21"):
        LoopedDecode(runner.step_parts).logits(torch.arange(22))
