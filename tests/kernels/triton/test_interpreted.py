"""Every Triton kernel equals its reference, on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.config import KVBudget, KVDType, WeightFormat
from snapstream.exec.cuda_graph import make_graph
from snapstream.exec.eager import EagerDecode
from snapstream.exec.executors import PREFERRED
from snapstream.exec.speculation import StepTimes
from snapstream.kernels.interface import Kernels, bind
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.checkpoint import load_weights
from snapstream.models.decoder import Decoder
from snapstream.models.matrix import FEW, make_matrix
from snapstream.models.registry import read_model_config
from snapstream.startup.build import MakeRunner, build_runner
from snapstream.types import SamplingParams
from tests.engine.test_speculation import model_alone
from tests.kernels.triton import (
    checks,
    checks_latent,
    checks_products,
    checks_recurrence,
    checks_rows,
    interpreter,
)
from tests.parity import tape
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.test_decoder_parity import full_attention, run
from tests.parity.test_graph import PlainMaker
from tests.parity.test_invariance import OnTapes

pytestmark = interpreter.interpreted()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

# The interpreter takes milliseconds per program: shapes and dtypes are paired here, tests/gpu crosses them.
GROUPS = list(zip([(3, 3), (6, 2), (10, 2), (14, 2), (8, 1), (20, 1)], DTYPES * 2, strict=True))
HEADS = [(4, 2, 64), (3, 3, 80), (7, 1, 96), (10, 2, 128), (9, 3, 192), (8, 1, 256)]
NORMS = [(heads, norm, DTYPES[(place + norm) % 3]) for place, heads in enumerate(HEADS) for norm in (False, True)]


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_decode_attention_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    checks.check_decode_attention(2, 1, head_dim, 150, [2, 0], [150, 1], dtype, "cpu")


@pytest.mark.parametrize(("heads", "dtype"), GROUPS)
def test_decode_attention_groups(heads: tuple[int, int], dtype: torch.dtype) -> None:
    checks.check_decode_attention(*heads, 64, 130, [1, 0], [129, 6], dtype, "cpu")


@pytest.mark.parametrize("capacity", [1, 7, 128, 129, 257, 700])
def test_decode_attention_capacities(capacity: int) -> None:
    lengths = sorted({1, capacity, max(capacity - 1, 1), capacity // 2 + 1})
    checks.check_decode_attention(4, 1, 64, capacity, [*range(len(lengths))], lengths, torch.float32, "cpu")


@pytest.mark.parametrize("batch", [33, 256])
def test_decode_attention_batches(batch: int) -> None:
    lengths = [1 + (i * 7) % 20 for i in range(batch)]
    checks.check_decode_attention(2, 1, 16, 20, [*range(batch)], lengths, torch.float32, "cpu")


@pytest.mark.parametrize("cap", [0.3, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention_of_capped_scores(cap: float, dtype: torch.dtype) -> None:
    checks.check_decode_attention(6, 2, 24, 300, [1, 0, 2], [300, 6, 1], dtype, "cpu", cap)


@pytest.mark.parametrize("capacity", [20, 300])  # one split, several
def test_decode_attention_of_a_padded_batch(capacity: int) -> None:
    """The padding row, one token long, stands in every unused entry of a batch."""
    rows, lengths = [2, 0, 3, 3, 3], [capacity, 7, 1, 1, 1]
    checks.check_decode_attention(4, 2, 16, capacity, rows, lengths, torch.float32, "cpu")


@pytest.mark.parametrize(("heads", "capacity", "dtype"), [((6, 2), 40, DTYPES[0]), ((5, 1), 300, DTYPES[1])])
def test_decode_attention_with_sinks(heads: tuple[int, int], capacity: int, dtype: torch.dtype) -> None:
    checks.check_sinks(*heads, capacity, dtype, "cpu")


def test_decode_attention_of_any_strides() -> None:
    """q as a slice of wider heads; rows whose slots, not heads, lie next to each other."""
    checks.check_decode_attention_strides(6, 2, 24, torch.float32, "cpu")


def test_a_head_dimension_in_pieces_is_refused() -> None:
    checks.check_refusals("cpu")


@pytest.mark.parametrize(("heads", "has_norm", "dtype"), NORMS)
def test_norm_rope_write(heads: tuple[int, int, int], has_norm: bool, dtype: torch.dtype) -> None:
    checks.check_norm_rope_write(*heads, 12, has_norm, dtype, "cpu")


@dtypes
@pytest.mark.parametrize("size", [64, 96, 1000, 4096])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    checks.check_rms_norm(3, size, dtype, "cpu")


@dtypes
@pytest.mark.parametrize("size", [64, 1000, 1024, 2100])
def test_swiglu(size: int, dtype: torch.dtype) -> None:
    checks.check_swiglu(3, size, dtype, "cpu")


@pytest.mark.parametrize("over_row", [False, True])
@pytest.mark.parametrize("group_max", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "window", "num_keys", "span"),
    [
        (4, 2, 8, 200, (4, 168)),
        (4, 2, 32, 120, (4, 115)),  # candidates inside the window: some queries see a part of them
        (6, 2, 20, 130, (120, 130)),  # some queries see none
        (4, 4, 1, 70, (0, 69)),
        (5, 1, 9, 90, (3, 80)),
        (14, 2, 9, 90, (3, 80)),
    ],
)
def test_snapkv_scores(
    num_heads: int,
    num_kv_heads: int,
    window: int,
    num_keys: int,
    span: tuple[int, int],
    over_row: bool,
    group_max: bool,
) -> None:
    checks.check_snapkv_scores(
        num_heads, num_kv_heads, 64, window, num_keys, span, over_row, group_max, torch.float32, "cpu"
    )


@pytest.mark.parametrize("group_max", [False, True])
def test_snapkv_scores_of_many_pairs(group_max: bool) -> None:
    """More pairs of query and head than one program holds, and a window longer than a block."""
    checks.check_snapkv_scores(8, 1, 64, 70, 150, (10, 140), group_max, group_max, torch.float32, "cpu")


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_snapkv_scores_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    checks.check_snapkv_scores(4, 2, head_dim, 16, 150, (4, 130), False, False, dtype, "cpu")


def test_snapkv_scores_over_several_splits() -> None:
    checks.check_snapkv_scores(2, 1, 16, 8, 4400, (4, 4300), False, False, torch.float32, "cpu")


@dtypes
@pytest.mark.parametrize(
    ("head_dim", "num_tokens", "num_kept"),
    [(64, 100, 70), (80, 60, 60), (96, 70, 33), (128, 40, 39), (192, 50, 1), (256, 40, 17)],
)
def test_gather_rows(head_dim: int, num_tokens: int, num_kept: int, dtype: torch.dtype) -> None:
    checks.check_gather_rows(2, head_dim, num_tokens, num_kept, dtype, "cpu")


# The Triton product with int8 and int4 weights equals its reference, under Triton's interpreter.


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("num_tokens", "group", "dtype"),
    [(1, 32, torch.float32), (16, 128, torch.bfloat16), (33, 32, torch.bfloat16), (17, 64, torch.float16)],
)
def test_tokens_and_groups(num_tokens: int, group: int, dtype: torch.dtype, bits: int) -> None:
    checks_products.check_code_linear(num_tokens, 45, 9 * group, bits, group, dtype, "cpu")


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "heads", "head_dim", "dtype"),
    [
        (70, 70, (3, 1), 16, torch.float32), (33, 90, (4, 2), 24, torch.float32), (1, 90, (2, 2), 32, torch.float32),
        (130, 131, (2, 1), 80, torch.bfloat16), (17, 300, (4, 1), 192, torch.bfloat16),
    ],
)  # fmt: skip
def test_prefill_attention(
    num_queries: int, num_keys: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    checks.check_prefill_attention(num_queries, num_keys, heads, head_dim, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in"), [(45, 300), (5, 4500), (130, 96)])
def test_one_token(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    checks_products.check_one_linear(num_out, num_in, dtype, "cpu")


@pytest.mark.parametrize(
    ("num_tokens", "num_out", "num_in", "dtype"),
    [(2, 45, 300, torch.bfloat16), (16, 130, 96, torch.bfloat16), (5, 70, 2200, torch.float16)],
)
def test_few_tokens(num_tokens: int, num_out: int, num_in: int, dtype: torch.dtype) -> None:
    checks_products.check_few_linear(num_tokens, num_out, num_in, dtype, "cpu")


def test_more_tokens_than_a_tile() -> None:
    checks_products.check_code_linear(70, 33, 64, 4, 32, torch.bfloat16, "cpu")


def test_refusals() -> None:
    checks_products.check_code_refusals("cpu")


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_a_weight_chooses_by_the_number_of_tokens(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to ``FEW`` tokens meet the codes, more of them widened rows; both are the same product."""
    from snapstream.kernels.triton import products

    calls: list[int] = []
    launch = products.code_linear
    monkeypatch.setattr(products, "code_linear", lambda x, *rest: (calls.append(len(x)), launch(x, *rest))[1])
    weight = make_matrix(WeightFormat(dtype=width, group=32), (3, 40, 64), torch.float32, "cpu")  # type: ignore[arg-type]
    weight.fill(torch.randn(3, 40, 64))
    own = weight[1]
    assert own.form.group == 32
    kernels: Kernels = bind("cpu", "triton")
    for count in (FEW, FEW + 1):
        x, bias = torch.randn(count, 64), torch.randn(40)
        torch.testing.assert_close(own.multiply(x, bias, kernels), x @ own.dense().T + bias, rtol=1e-4, atol=1e-4)
    assert calls == [FEW]


def test_the_engine_answers_the_same(tmp_path: Path) -> None:
    """Greedy tokens over int4 and int8 weights: plain PyTorch widens, the kernels read codes."""
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 2}
    folder = save(make_model("qwen3", **sizes), tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (40, 7)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

    def run(make_runner: MakeRunner) -> list[list[int]]:
        with LLM(folder, budget=32, selector=SnapKV(observation_len=8), max_rows=2, max_model_len=48, weights="int4",
                 activations="dtype", make_runner=make_runner, executor="eager", progress=False) as llm:  # fmt: skip
            return [output.token_ids for output in llm.generate(prompts, params)]

    assert run(partial(build_runner, kernels=bind("cpu", "triton"))) == run(build_runner)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("qwen3", {}), ("lfm2", {"layer_types": ["full_attention", "conv"]})],
)
def test_drafted_tokens_are_verified(
    name: str, layers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full rings, with and without states: drafts of the answer itself change nothing, and most are accepted."""
    monkeypatch.setattr(StepTimes, "cost", lambda self, entries: 0.0)
    folder, rng = save(make_model(name, num_hidden_layers=2, **layers), tmp_path), random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (40, 7)]
    made = partial(build_runner, kernels=bind("cpu", "triton"))
    if name == "qwen3":
        made = partial(made, make_decode=partial(make_graph, maker=PlainMaker()))
    params = [SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)] * 2
    budget = KVBudget(num_sink=2, num_topk=14, num_recent=8)
    with LLM(folder, budget=budget, selector=SnapKV(observation_len=8), max_rows=2, max_model_len=48, executor="eager",
             make_runner=made, num_speculative_tokens=3, progress=False) as llm:  # fmt: skip
        expected = llm.generate(prompts, params)
        predicted = [replace(own, prediction=said.token_ids) for own, said in zip(params, expected, strict=True)]
        got = llm.generate(prompts, predicted)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert sum(output.timings.accepted_tokens for output in got) > 4


def test_a_draft_model_reads_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model drafts for itself, and is right."""
    model_alone(monkeypatch)
    monkeypatch.setitem(PREFERRED, "cpu", "eager")  # of looped steps rows would be in int8, which is not for GPUs
    folder, rng = save(make_model("qwen3"), tmp_path), random.Random(6)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (20, 7)]
    made = partial(build_runner, kernels=bind("cpu", "triton"), make_decode=EagerDecode)
    params = [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)] * 2
    said = []
    for draft, make in ((None, build_runner), (folder, made)):
        with LLM(folder, budget="full", max_rows=2, max_model_len=32, executor="eager", make_runner=make,
                 speculative_model=draft, progress=False) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params)
            said.append([output.token_ids for output in outputs])
    assert said[0] == said[1]
    assert sum(output.timings.accepted_tokens for output in outputs) > 8


# The Triton product with a matrix per expert equals its reference, under Triton's interpreter.

COUNTS = {"one": [0, 0, 1], "some": [3, 0, 40, 0, 0, 17, 33], "full tiles": [32, 64, 16]}


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(
    ("counts", "dtype"), list(zip(COUNTS, [torch.float32, torch.bfloat16, torch.float16], strict=True))
)
def test_experts_with_any_number_of_rows(counts: str, is_fp8: bool, dtype: torch.dtype) -> None:
    checks_products.check_grouped_linear(COUNTS[counts], 80, 72, is_fp8, dtype, "cpu")


def test_sizes_beyond_a_block_of_scales() -> None:
    checks_products.check_grouped_linear([1, 2, 0, 35], 200, 304, True, torch.bfloat16, "cpu")


def test_more_experts_than_a_power_of_two() -> None:
    checks_products.check_grouped_linear([i % 3 for i in range(21)], 32, 32, False, torch.float32, "cpu")


def test_refusals_of_interpreted_experts() -> None:
    checks_products.check_expert_refusals("cpu")


@torch.inference_mode()
def test_a_model_with_experts(tmp_path: Path) -> None:
    """Router, both products, shared experts: the logits of plain PyTorch."""
    folder = save(make_model("glm4-moe"), tmp_path)
    config = read_model_config(folder)
    decoder = Decoder(config, load_weights(folder, config, torch.float32, "cpu", progress=False))
    rng = random.Random(1)
    ids = torch.tensor([rng.randrange(VOCAB) for _ in range(9)])
    plain, triton = (
        run(Decoder(config, decoder.weights, bind("cpu", version)), full_attention(decoder), ids, 0)
        for version in ("torch", "triton")
    )
    torch.testing.assert_close(triton, plain, rtol=1e-4, atol=1e-4)


# The Triton kernels over rows in FP8 equal their references, under Triton's interpreter.

# Paired, not crossed: see test_interpreted.py.
DIMS = list(zip([64, 80, 96, 128, 192, 256], DTYPES * 2, strict=True))
INTERPRETED_FP8_NORMS = [((4, 2, 64), True), ((4, 2, 64), False), ((9, 3, 80), True)]


@pytest.mark.parametrize(("head_dim", "dtype"), [*DIMS, (128, torch.bfloat16)])
def test_decode_attention(head_dim: int, dtype: torch.dtype) -> None:
    checks_rows.check_decode_attention(6, 2, head_dim, 150, [150, 1], dtype, "cpu")


def test_decode_attention_over_several_splits() -> None:
    checks_rows.check_decode_attention(4, 1, 64, 700, [700, 130, 5], torch.float32, "cpu")


@dtypes
@pytest.mark.parametrize(("heads", "has_norm"), INTERPRETED_FP8_NORMS)
def test_norm_rope_write_of_interpreted_fp8(heads: tuple[int, int, int], has_norm: bool, dtype: torch.dtype) -> None:
    checks_rows.check_norm_rope_write(*heads, has_norm, dtype, "cpu")


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_gather_rows_of_interpreted_fp8(head_dim: int, dtype: torch.dtype) -> None:
    checks_rows.check_gather_rows(2, head_dim, 90, dtype, "cpu")


CODES = ["int8", "int4", "int8/int4"]


@pytest.mark.parametrize("kv_dtype", CODES)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((6, 2, 64), torch.float32), ((3, 3, 96), torch.bfloat16), ((8, 1, 128), torch.float16),
     ((2, 1, 32), torch.float32)],
    ids=str,
)  # fmt: skip
def test_rows_of_codes(kv_dtype: KVDType, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    checks_rows.check_rows_of_codes(kv_dtype, *heads, [40, 1, 17], 40, dtype, "cpu")


@pytest.mark.parametrize("kv_dtype", CODES)
def test_rows_of_codes_over_several_splits(kv_dtype: KVDType) -> None:
    checks_rows.check_rows_of_codes(kv_dtype, 4, 1, 64, [700, 130, 5], 700, torch.float32, "cpu")


@pytest.mark.parametrize("kv_dtype", CODES)
def test_codes_of_no_number(kv_dtype: KVDType) -> None:
    checks_rows.check_codes_of_no_number(kv_dtype, "cpu")


# The Triton kernels over rows of latents equal their reference, under Triton's interpreter.


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    list(zip([(4, 24, 8), (20, 64, 16), (128, 32, 64), (17, 48, 0)], (*DTYPES, torch.float32), strict=True)),
    ids=lambda value: str(value),
)
def test_latent_attention_sizes(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Fewer heads than a program holds, more than one holds, many; sizes that are no powers of two."""
    checks_latent.check_latent_attention(*sizes, 150, [2, 0, 3], [150, 1, 77], dtype, "cpu")


@pytest.mark.parametrize("capacity", [1, 128, 129, 700])
def test_latent_attention_capacities(capacity: int) -> None:
    lengths = sorted({1, capacity, capacity // 2 + 1})
    checks_latent.check_latent_attention(3, 32, 16, capacity, [*range(len(lengths))], lengths, torch.float32, "cpu")


def test_latent_attention_in_the_sizes_of_deepseek() -> None:
    checks_latent.check_latent_attention(16, 512, 64, 200, [1, 0], [200, 33], torch.bfloat16, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents_in_fp8(dtype: torch.dtype) -> None:
    checks_latent.check_latents_in_fp8(5, 24, 8, dtype, "cpu")


@pytest.mark.parametrize(("num_tokens", "num_kept", "size"), [(50, 17, 40), (9, 9, 576)])
def test_gather(num_tokens: int, num_kept: int, size: int) -> None:
    checks_latent.check_gather_latents(num_tokens, num_kept, size, torch.float32, "cpu")


def test_refusals_of_interpreted_latent() -> None:
    checks_latent.check_latent_refusals("cpu")


# Decode steps of recurrent layers equal their references, under Triton's interpreter.


@pytest.mark.parametrize(
    ("channels", "taps", "batch", "silu", "dtype"),
    [
        (40, 3, 1, False, torch.float32), (300, 4, 16, True, torch.bfloat16), (256, 5, 17, True, torch.float16),
        (7, 2, 3, True, torch.float32),
    ],
)  # fmt: skip
def test_conv_step(channels: int, taps: int, batch: int, silu: bool, dtype: torch.dtype) -> None:
    checks_recurrence.check_conv_step(channels, taps, batch, silu=silu, dtype=dtype, device="cpu")


@pytest.mark.parametrize("kind", ["delta", "kda", "mamba"])
@pytest.mark.parametrize(
    ("heads", "sizes", "batch", "dtype"),
    [
        ((2, 4), (16, 8), 1, torch.float32), ((3, 3), (12, 40), 16, torch.bfloat16),
        ((1, 6), (24, 20), 17, torch.float16), ((2, 2), (128, 128), 2, torch.bfloat16),
        ((1, 2), (300, 9), 2, torch.float32),
    ],
)  # fmt: skip
def test_memory_step(kind: str, heads: tuple[int, int], sizes: tuple[int, int], batch: int, dtype: torch.dtype) -> None:
    """Value heads of few keys, odd sizes, values wider than keys and narrower; more than one program a head."""
    checks_recurrence.check_memory_step(kind, heads, sizes, batch, dtype, "cpu")


def test_refusals_of_interpreted_recurrences() -> None:
    checks_recurrence.check_refusals("cpu")


# A recurrent layer behind one of attention, whose states have another number than the layer.
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    **dict.fromkeys(("qwen3.5", "granite-hybrid", "kimi-linear", "olmo-hybrid"), TWO_LAYERS),
    "hy-v4": {"num_hidden_layers": 2},
    "glm-5.3-flash": {},
}


@pytest.mark.parametrize("name", FEW_LAYERS)
def test_captured_steps_with_states_answer_as_eager(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts on two rows, or one and the padding row: plain PyTorch copies states, replays write in place."""
    folder = save(make_model(name, **FEW_LAYERS[name]), tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (18, 1, 7)]
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (4, 2, 3)]

    def run(make_runner: MakeRunner) -> list[list[int]]:
        with LLM(folder, budget=16, selector=SnapKV(observation_len=4), max_rows=2, max_model_len=24,
                 make_runner=make_runner, executor="eager", progress=False) as llm:  # fmt: skip
            return [output.token_ids for output in llm.generate(prompts, params)]

    expected, captured = run(build_runner), partial(OnTapes, buckets=(2,))
    tape.install(monkeypatch)
    assert run(partial(build_runner, kernels=tape.launched(bind("cpu", "triton")), make_decode=captured)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "gemma3n",
        "gemma4",
        "gemma4-shared",
        "gpt-oss",
        "olmo2",
        "afmoe",
        "deepseek-v3",
        "falcon-h1",
        "nemotron-3",
        "hy-v4",
        "glm-5.3-flash",
    ],
)
def test_layers_of_other_kinds_answer_the_same(name: str, tmp_path: Path) -> None:
    """Norms of values, of whole projections and of outputs, streams, gates, latents, and both mixers in a layer: every
    kernel takes what the model hands it.
    """
    folder, rng = save(make_model(name), tmp_path), random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (18, 3)]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    def run(make_runner: MakeRunner) -> list[list[int]]:
        with LLM(folder, budget=16, selector=SnapKV(observation_len=4), max_rows=2, max_model_len=24,
                 make_runner=make_runner, executor="eager", progress=False) as llm:  # fmt: skip
            return [output.token_ids for output in llm.generate(prompts, params)]

    assert run(partial(build_runner, kernels=bind("cpu", "triton"))) == run(build_runner)
