"""Attention of prompts in fp32 by our kernel: as the reference, in any chunks and company, and chosen by a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2CLS

from snapstream.assets import TINY_LATENT_MODEL, TINY_MODEL
from snapstream.config import PrefixStoreConfig
from snapstream.config.weights import K_GROUPS, PrefillInputs, WeightDType, WeightFormat, WeightFormats
from snapstream.kernels import groups, pytorch, reference
from snapstream.kernels.backends import autotune
from snapstream.kernels.backends.autotune import choose
from snapstream.kernels.backends.prefill import VERSIONS, Case, Version
from snapstream.kernels.cpu.looped import library
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import load
from snapstream.kernels.cpu.looped.prompt import Products, attend, stage_heads
from snapstream.kernels.interface import HeadNorm, Pairs, SumNorm, Xielu, bind
from snapstream.kernels.rows import PackedLens
from snapstream.llm import LLM
from snapstream.models.matrix import Matrix
from snapstream.models.panels import make_panels
from snapstream.types import SamplingParams
from tests.kernels.layers import multiplies_bf16

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
STORE = PrefixStoreConfig(num_bytes=8 * 2**20, block_len=32, min_tokens=64)
needs_bf16 = pytest.mark.skipif(not multiplies_bf16(), reason="these instructions do not multiply bf16")
CASE = Case(torch.device("cpu"), torch.float32, 16, 2)


def sample(queries: int, heads: int, kv_heads: int, keys: int, size: int, value_size: int) -> list[Tensor]:
    """Ranges of larger buffers, as staging is: contiguous in the last dimension only."""
    generator = torch.Generator().manual_seed(queries + keys)
    q = torch.randn(queries, heads + 1, size, generator=generator)[:, :heads]
    k = torch.randn(kv_heads, keys + 3, size, generator=generator)[:, :keys]
    v = torch.randn(kv_heads, keys + 3, value_size, generator=generator)[:, :keys]
    return [q, k, v]


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The reference takes values as large as keys: those of other sizes in parts."""
    size, parts = k.shape[-1], []
    for start in range(0, v.shape[-1], size):
        part = v[..., start : start + size]
        wide = torch.zeros(*v.shape[:2], size)
        wide[..., : part.shape[-1]] = part
        parts.append(reference.prefill_attention(q.contiguous().float(), k, wide)[..., : part.shape[-1]])
    return torch.cat(parts, -1)


def native_of(name: str, instructions: InstructionSet) -> Callable[..., Tensor]:
    """The kernel of that name; skips the test of instructions that lack it."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sinks: Tensor | None = None,
        cap: float | None = None, ends: Sequence[tuple[int, int]] = (),
    ) -> Tensor:  # fmt: skip
        options: Any = {"window": window, "sinks": sinks, "cap": cap, "ends": ends}
        return attend(own, q, k, v, products=PRODUCTS[name], **options)

    own = library.load(instructions)
    if name == "cpu_bf16" and not own.multiplies_bf16():
        pytest.skip(f"{instructions} does not multiply bf16")
    return call


def rounded(name: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """What the kernel of that name multiplies."""
    if name == "cpu_bf16":
        return [x.bfloat16().float() for x in (q, k, v)]
    if name == "cpu_fp32":
        return [q, k, v]
    most = min(int((INT32_MAX / q.shape[-1]) ** 0.5), 8191)
    scales = [x.abs().amax(-1, keepdim=True) / most for x in (q, k)]
    values = 2.0 ** (v.abs().amax(-1, keepdim=True) / (INT32_MAX // (4095 * 96))).log2().ceil()
    return [(x / scale).round() * scale for x, scale in zip((q, k, v), (*scales, values), strict=True)]


def allowed(name: str, v: Tensor) -> float:
    """Shares are rounded: to 8 bits, or to 12 relative to the largest of a block."""
    return {"cpu_fp32": 3e-6, "cpu_bf16": float(v.abs().max()) / 256, "cpu_int16": float(v.abs().max()) / 1000}[name]


INT32_MAX = 2**31 - 1
PRODUCTS: dict[str, Products] = {"cpu_fp32": "float32", "cpu_int16": "int16", "cpu_bf16": "bfloat16"}
NATIVE = pytest.mark.parametrize("name", ["cpu_fp32", "cpu_int16", pytest.param("cpu_bf16", marks=needs_bf16)])
OF_EACH_SET = pytest.mark.parametrize("instructions", instruction_sets())


@pytest.mark.parametrize("name", ["cpu_fp32", "cpu_int16"])
@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=25)
@given(
    queries=st.integers(1, 70), kv_heads=st.integers(1, 3), shared=st.integers(1, 5), before=st.integers(0, 400),
    size=st.integers(1, 70), value_size=st.integers(1, 70), scale=st.sampled_from([1.0, 30.0]),
    threads=st.integers(1, 2),
)  # fmt: skip
def test_as_the_reference(
    queries: int, kv_heads: int, shared: int, before: int, size: int, value_size: int, scale: float, threads: int,
    instructions: InstructionSet, name: str,
) -> None:  # fmt: skip
    native = native_of(name, instructions)
    q, k, v = sample(queries, kv_heads * shared, kv_heads, before + queries, size, value_size)
    q, k, v = rounded(name, q * scale, k, v)
    count = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = native(q, k, v)
    finally:
        torch.set_num_threads(count)
    torch.testing.assert_close(got, expected(q, k, v), rtol=2e-5 * scale, atol=allowed(name, v) * scale)


@pytest.mark.parametrize("name", ["cpu_fp32", "cpu_int16"])
@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize(("size", "value_size"), [(32, 32), (48, 32), (64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(("queries", "heads", "kv_heads", "before"), [(1, 3, 1, 0), (97, 4, 2, 95), (64, 2, 2, 33)])
def test_sizes_of_real_heads(
    instructions: InstructionSet, size: int, value_size: int, queries: int, heads: int, kv_heads: int, before: int,
    name: str,
) -> None:  # fmt: skip
    q, k, v = rounded(name, *sample(queries, heads, kv_heads, before + queries, size, value_size))
    got = native_of(name, instructions)(q, k, v)
    torch.testing.assert_close(got, expected(q, k, v), rtol=1e-5, atol=allowed(name, v))


@OF_EACH_SET
@pytest.mark.parametrize("size", [64, 129, 256])
def test_int16_does_not_overflow(instructions: InstructionSet, size: int) -> None:
    """Every number is the largest that there is, and every share; of values of other sizes each has a scale."""
    native = native_of("cpu_int16", instructions)
    ones = torch.ones(2, 200, size)
    for sign in (1.0, -1.0):
        got = native(sign * torch.ones(200, 2, size), ones, ones)
        torch.testing.assert_close(got, torch.ones(200, 2, size), rtol=1e-5, atol=0)
    q, k, v = sample(100, 2, 2, 200, size, size)
    v *= torch.logspace(-3, 3, 200)[:, None]
    want = reference.prefill_attention(q.contiguous(), k, v)
    torch.testing.assert_close(native(q, k, v), want, rtol=0, atol=float(v.abs().max()) / 2000)
    v[:, 10:] = 0.0  # most shares belong to nothing
    want = reference.prefill_attention(q.contiguous(), k, v)
    torch.testing.assert_close(native(q, k, v), want, rtol=0, atol=float(want.abs().max()) / 200)


@NATIVE
@OF_EACH_SET
def test_the_same_bits_in_any_chunks_and_company(instructions: InstructionSet, name: str) -> None:
    native = native_of(name, instructions)

    def own(q: Tensor, k: Tensor, v: Tensor, *ends: tuple[int, int]) -> Tensor:
        return native(q, k, v, ends=ends)

    q, k, v = sample(500, 6, 2, 500, 40, 24)
    whole = own(q, k, v)
    for cut in (1, 95, 96, 97, 300):
        assert torch.equal(own(q[:cut], k[:, :cut], v[:, :cut]), whole[:cut])
        assert torch.equal(own(q[cut:], k, v), whole[cut:])
    # Three prompts of 120, 1 and 379 tokens, of the last of which 30 are in no chunk.
    packed = own(torch.cat([q[:121], q[151:]]), k, v, (120, 120), (121, 121), (470, 500))
    assert torch.equal(packed[:120], whole[:120])
    assert torch.equal(packed[120:121], own(q[120:121], k[:, 120:121], v[:, 120:121]))
    assert torch.equal(packed[121:], own(q[151:], k[:, 121:], v[:, 121:]))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cpu_fp32", "cpu_int16"])
@OF_EACH_SET
def test_what_is_not_finite_stays_seen(instructions: InstructionSet, name: str, wrong: float) -> None:
    native = native_of(name, instructions)
    q, k, v = sample(20, 2, 1, 30, 16, 16)
    q[4, 1, 3] = wrong
    got = native(q, k, v)
    assert not got[4, 1].isfinite().any()
    got[4, 1] = 0.0
    assert got.isfinite().all()
    q, k, v = sample(20, 2, 1, 30, 16, 16)
    k[0, 25, 3] = wrong
    got = native(q, k, v)
    assert got[:15].isfinite().all()  # these do not see it
    assert wrong == float("inf") or got[15:].isnan().all()
    q, k, v = sample(20, 2, 1, 30, 16, 16)
    v[0, 3, 3] = wrong
    assert not native(q, k, v)[..., 3].isfinite().any()


@NATIVE
@OF_EACH_SET
@pytest.mark.parametrize("window", [1, 2, 31, 64, 96, 100, 257, 700, 1000, 2000])
@pytest.mark.parametrize(
    ("queries", "before", "heads", "kv_heads", "size"),
    [(1, 0, 2, 1, 64), (1, 999, 3, 3, 80), (33, 5, 4, 2, 48), (150, 700, 8, 1, 64), (301, 400, 6, 2, 128)],
)
def test_a_sliding_window(
    name: str,
    instructions: InstructionSet,
    window: int,
    queries: int,
    before: int,
    heads: int,
    kv_heads: int,
    size: int,
) -> None:
    q, k, v = sample(queries, heads, kv_heads, before + queries, size, size)
    q, k, v = rounded(name, q, k, v)
    want = reference.prefill_attention(q, k, v, window=window)
    atol = allowed(name, v)
    native = native_of(name, instructions)
    got = native(q, k, v, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=atol)
    assert window < before + queries or torch.equal(got, native(q, k, v))


@NATIVE
@OF_EACH_SET
@pytest.mark.parametrize(("queries", "before", "heads", "kv_heads", "window"),
                         [(1, 0, 2, 1, 0), (33, 5, 6, 2, 0), (150, 700, 8, 1, 128), (301, 400, 6, 3, 0)])  # fmt: skip
def test_learned_sinks(
    name: str, instructions: InstructionSet, queries: int, before: int, heads: int, kv_heads: int, window: int
) -> None:
    """Sinks above and below all scores; the same bits in any chunks."""
    q, k, v = sample(queries, heads, kv_heads, before + queries, 48, 48)
    q, k, v = rounded(name, q, k, v)
    atol = allowed(name, v)
    for shift in (-30.0, 0.0, 30.0):
        sinks = torch.randn(heads) + shift
        want = reference.prefill_attention(q, k, v, window=window or None, sinks=sinks)
        native = native_of(name, instructions)
        got = native(q, k, v, window or None, sinks)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=atol)
        for cut in {queries // 3, queries - 1} - {0}:
            assert torch.equal(native(q[cut:], k, v, window or None, sinks), got[cut:])


@NATIVE
@OF_EACH_SET
@pytest.mark.parametrize("cap", [0.05, 1.5, 8.0])
@pytest.mark.parametrize(("queries", "before", "heads", "kv_heads", "window"),
                         [(1, 0, 2, 1, 0), (33, 5, 6, 2, 0), (150, 700, 8, 1, 128), (301, 400, 6, 3, 0)])  # fmt: skip
def test_capped_scores(
    name: str,
    instructions: InstructionSet,
    queries: int,
    before: int,
    heads: int,
    kv_heads: int,
    window: int,
    cap: float,
) -> None:
    """Scores from near 0 to far above the cap; the same bits in any chunks."""
    q, k, v = sample(queries, heads, kv_heads, before + queries, 48, 48)
    q *= torch.logspace(-3, 0.5, heads)[:, None]
    q, k, v = rounded(name, q, k, v)
    atol = allowed(name, v)
    for sinks in (None, torch.randn(heads)):
        want = reference.prefill_attention(q, k, v, window=window or None, sinks=sinks, cap=cap)
        native = native_of(name, instructions)
        got = native(q, k, v, window or None, sinks, cap)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=atol)
        for cut in {queries // 3, queries - 1} - {0}:
            assert torch.equal(native(q[cut:], k, v, window or None, sinks, cap), got[cut:])


@NATIVE
@OF_EACH_SET
def test_a_sliding_window_has_the_same_bits_in_any_chunks(name: str, instructions: InstructionSet) -> None:
    q, k, v = sample(700, 6, 2, 700, 40, 40)
    native = native_of(name, instructions)
    for window in (1, 50, 96, 300):
        whole = native(q, k, v, window)
        for cut in (1, 95, 96, 256, 300, 611):
            assert torch.equal(native(q[:cut], k[:, :cut], v[:, :cut], window), whole[:cut])
            assert torch.equal(native(q[cut:], k, v, window), whole[cut:])


@NATIVE
@OF_EACH_SET
def test_keys_before_a_sliding_window_are_not_multiplied(name: str, instructions: InstructionSet) -> None:
    """Zero times NaN would be NaN: a share of zero is not how they are left out."""
    q, k, v = sample(1500, 4, 2, 1600, 16, 16)
    k[:, :600] = v[:, :600] = float("nan")
    native = native_of(name, instructions)
    got = native(q, k, v, 70)
    assert got[: 600 - 100].isnan().all()
    later = 600 - 100 + 70 + 320  # behind the last block and the last queries that are computed together with one
    want = reference.prefill_attention(q[later:], k[:, 600:], v[:, 600:], window=70)
    torch.testing.assert_close(got[later:], want, rtol=0, atol=3e-6 if name == "cpu_fp32" else 0.03)


@NATIVE
def test_packed_prompts_with_a_sliding_window(name: str) -> None:
    q, k, v = sample(46, 6, 2, 352, 20, 20)
    version, queries, keys = VERSIONS[name], [0, 5, 6, 46], [0, 5, 305, 352]
    assert version.attend_packed is not None
    lens = PackedLens(torch.tensor(queries, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32), 40, 300)
    parts = [
        version.attend(q[a:b], k[:, c:d], v[:, c:d], window=7)
        for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False)
    ]
    assert torch.equal(version.attend_packed(q, k, v, lens, window=7), torch.cat(parts))


def test_the_faster_one_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"cpu": 1.0, "cpu_fp32": 0.95}
    monkeypatch.setattr(autotune, "seconds_on_a_cpu", lambda version, case: times[version.name])
    monkeypatch.setattr(autotune, "known", dict)
    kept = choose("auto", CASE)
    assert (kept.name, kept.packed_name) == ("cpu", "loop")
    times["cpu_fp32"] = 0.5
    chosen = choose("auto", CASE)
    assert (chosen.name, chosen.packed_name) == ("cpu_fp32", "cpu_fp32")
    assert "timed at this start: cpu 1000.00 ms, cpu_fp32 500.00 ms" in chosen.describe()
    assert choose("auto", Case(torch.device("cpu"), torch.bfloat16, 16, 2)).name == "cpu"
    with pytest.raises(ValueError, match="'cpu_fp32' cannot be used: computes in float32, not bfloat16"):
        choose("cpu_fp32", Case(torch.device("cpu"), torch.bfloat16, 16, 2))

    def fails() -> None:
        raise ValueError("no C++ compiler")

    monkeypatch.setattr(library, "load", fails)
    assert choose("auto", CASE).why == "cpu_fp32 cannot serve: no C++ compiler"


def test_the_trial_runs_and_is_remembered() -> None:
    calls = list[str]()

    def counted(version: Version, case: Case) -> float:
        calls.append(version.name)
        return autotune.seconds_on_a_cpu(version, case)

    measured: autotune.Known = {}
    for _ in range(2):
        times = autotune.race([VERSIONS["cpu"], VERSIONS["cpu_fp32"]], CASE, counted, measured)
        assert all(0.0 < time < float("inf") for time in times.values())
    assert calls == ["cpu", "cpu_fp32"]


@pytest.mark.parametrize("model", [TINY_MODEL, TINY_LATENT_MODEL])
def test_tokens_are_those_of_the_reference(model: Path) -> None:
    """Prompts of one chunk, of several, packed, and begun in the prefix store."""
    texts = ["The code of the vault is 4821907. " * n for n in (1, 3, 40)]
    answers = []
    for name in ("reference", "cpu_fp32", "cpu_int16"):
        with LLM(model, prefill_attention=name, max_model_len=1024, chunk_len=128, max_rows=3, weights="float32",
                 activations="dtype", prefix_store=STORE, progress=False) as llm:  # fmt: skip
            assert any(f"prefill attention: {name}" in note for note in llm.notes)
            params = SamplingParams(max_tokens=12, temperature=0.0)
            outs = [*llm.generate(texts, params), *llm.generate([texts[2] + "What is it?"], params)]
            answers.append([out.token_ids for out in outs])
    assert all(tokens == answers[0] for tokens in answers)


# Native calls around the attention of prompts: near the plain ones they replace, and the same bits for a token
# whatever is beside it.

FORMS = [
    *(WeightFormats.of(width).layers for width in ("float32", "bfloat16", "int8", "int4", "uint4", "mxfp4")),
    *(WeightFormat(dtype=dtype, group=group) for dtype, group in K_GROUPS.items()),  # type: ignore[arg-type]
]
Inputs = PrefillInputs | None
LIMITS = {
    None: 1e-4,
    "bfloat16": 0.05,
    "int8": 0.05,
    "int16": 2e-3,
}  # an input that rounds to the other side is off by its 256th


def matrix_of(form: WeightFormat, rows: int, cols: int, inputs: Inputs, instructions: InstructionSet | None) -> Matrix:
    make = make_panels(load(instructions), prefill_inputs=inputs)
    stack = make(form, (1, rows, cols), torch.float32, "cpu")
    stack.fill(torch.randn(1, rows, cols) / cols**0.5)
    return stack[0]


def given_of(tokens: int, size: int, adds: bool) -> SumNorm:
    return SumNorm(torch.randn(tokens, size), torch.randn(tokens, size) if adds else None, torch.rand(size) + 0.5, 1e-5)


def copy_of(given: SumNorm, own: slice = slice(None)) -> SumNorm:
    return given._replace(residual=given.residual[own].clone(), x=None if given.x is None else given.x[own].clone())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.dtype))
@pytest.mark.parametrize("inputs", [None, pytest.param("bfloat16", marks=needs_bf16), "int8", "int16"])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 96), (31, 96), (31, 88)])
def test_norm_and_mlp_are_those_of_plain_calls(form: WeightFormat, inputs: Inputs, tokens: int, inner: int) -> None:
    torch.manual_seed(tokens)
    kernels, size = bind("cpu"), 256 if form.is_k_quant else 64
    inner = 256 if form.is_k_quant else 96 if form.is_quantized else inner
    gate_up = matrix_of(form, 2 * inner, size, inputs, None)
    down = matrix_of(form, 64, inner, inputs, None)
    given = given_of(tokens, size, adds=tokens > 1)
    biases = torch.randn(2 * inner), torch.randn(64)
    plain, native = copy_of(given), copy_of(given)
    want = Matrix.multiply_normed(gate_up, plain, biases[0], kernels)
    got = gate_up.multiply_normed(native, biases[0], kernels)
    assert torch.equal(native.residual, plain.residual)  # the sum is made
    limit = LIMITS[inputs]
    torch.testing.assert_close(got, want, rtol=0, atol=limit)
    want = Matrix.swiglu(gate_up, down, copy_of(given), biases, kernels)
    got = gate_up.swiglu(down, copy_of(given), biases, kernels)
    torch.testing.assert_close(got, want, rtol=0, atol=limit)
    for token in range(0, tokens, 7):  # alone
        own = slice(token, token + 1)
        assert torch.equal(gate_up.swiglu(down, copy_of(given, own), biases, kernels)[0], got[token])


@needs_bf16
def test_tokens_that_go_in_ranges_have_the_same_bits() -> None:
    torch.manual_seed(0)
    form, kernels = WeightFormats.of("bfloat16").layers, bind("cpu")
    gate_up, down = matrix_of(form, 2048, 1024, "bfloat16", None), matrix_of(form, 64, 1024, "bfloat16", None)
    given = given_of(500, 1024, adds=True)  # a near cache holds 384
    got = gate_up.swiglu(down, copy_of(given), (None, None), kernels)
    for own in (slice(0, 1), slice(370, 397), slice(499, 500)):
        assert torch.equal(gate_up.swiglu(down, copy_of(given, own), (None, None), kernels), got[own])


@pytest.mark.parametrize("instructions", instruction_sets())
def test_every_instruction_set_passes_tokens(instructions: InstructionSet) -> None:
    torch.manual_seed(1)
    gate_up = matrix_of(WeightFormats.of("float32").layers, 64, 20, None, instructions)
    down = matrix_of(WeightFormats.of("float32").layers, 20, 32, None, instructions)
    given = given_of(5, 20, adds=True)
    want = Matrix.swiglu(gate_up, down, copy_of(given), (None, None), bind("cpu"))
    got = gate_up.swiglu(down, copy_of(given), (None, None), bind("cpu"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize(("width", "inputs"), [("float32", None), ("int4", "int8")])
@pytest.mark.parametrize("tokens", [1, 17])
def test_an_mlp_with_xielu(instructions: InstructionSet, width: str, inputs: Inputs, tokens: int) -> None:
    """Numbers from both sides of 0, of the eps and of where the exponential takes over, also very small ones."""
    torch.manual_seed(tokens)
    form, kernels = WeightFormats.of(width).layers, bind("cpu")
    up, down = matrix_of(form, 160, 64, inputs, instructions), matrix_of(form, 40, 160, inputs, instructions)
    x = torch.randn(tokens, 64) * torch.logspace(-4, 1, tokens)[:, None]
    for stored in ([0.3, -0.8, 0.5, -1e-6], [-0.2, 0.4, 0.7, -0.5]):
        xielu = Xielu.of(torch.tensor(stored))
        want = Matrix.swiglu(up, down, x, (None, None), kernels, xielu)
        got = up.swiglu(down, x, (None, None), kernels, xielu)
        limit = 2e-5 if inputs is None else 0.01  # of rounded inputs a few lie between two codes
        assert torch.all((got - want).norm(dim=1) <= limit * want.norm(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xielu_is_that_of_transformers(dtype: torch.dtype) -> None:
    stored = torch.tensor([0.3, -0.8, 0.5, -1e-6])
    theirs = ACT2CLS["xielu"]().double()
    for name, number in zip(("alpha_p", "alpha_n", "beta", "eps"), stored, strict=True):
        getattr(theirs, name).data.fill_(number)
    x = torch.cat((torch.linspace(-60, 60, 20001), torch.linspace(-1e-5, 1e-5, 301))).to(dtype)
    with torch.no_grad():
        want = theirs(x.double())
    got = pytorch.xielu(x.clone().expand(1100, -1).contiguous(), Xielu.of(stored).numbers)
    assert torch.equal(got[0], got[-1])  # of another part
    rounded = 0.0 if dtype == torch.float32 else 2**-8 * want.abs()
    assert torch.all((got[0] - want).abs() <= rounded + 4e-7 * (x.abs() + x.square()) + 1e-12)  # of the terms


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize(
    ("width", "group"),
    [
        ("int8", 32),
        ("int4", 32),
        ("uint4", 32),
        ("int8", 128),
        ("int4", 64),
        ("int4", 128),
        ("uint4", 64),
        *K_GROUPS.items(),
    ],
)
def test_prefill_in_whole_numbers(instructions: InstructionSet, width: str, group: int) -> None:
    """Inputs rounded to int8 per token and group of the weights, and the same bits for a token in any batch and by any
    instructions. 1,300 tokens are more than one range.
    """
    torch.manual_seed(group)
    form, kernels, library = WeightFormat(dtype=width, group=group), bind("cpu"), load(instructions)  # type: ignore[arg-type]
    size = 768 if form.is_k_quant else 640
    gate_up, down = matrix_of(form, 1024, size, "int8", instructions), matrix_of(form, 72, 512, "int8", instructions)
    given = given_of(1300, size, adds=True)
    rounded = groups.round_inputs(kernels.normed(copy_of(given)), group)
    want = gate_up.dense() @ rounded.T
    was, found = library.way(-1), []
    try:
        for way in range(2):
            library.way(way)
            got = gate_up.multiply_normed(copy_of(given), None, kernels)
            torch.testing.assert_close(got, want.T, rtol=0, atol=0.05)
            assert (got - want.T).abs().mean() < 1e-4  # few inputs lie between two codes
            found += [got, gate_up.swiglu(down, copy_of(given), (None, None), kernels)]
            plain = Matrix.swiglu(gate_up, down, copy_of(given), (None, None), kernels)
            torch.testing.assert_close(found[-1], plain, rtol=0, atol=0.05)
            for own in (slice(0, 1), slice(640, 657), slice(1299, 1300)):
                assert torch.equal(gate_up.swiglu(down, copy_of(given, own), (None, None), kernels), found[-1][own])
    finally:
        library.way(was)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8"])
def test_prefill_in_int16(instructions: InstructionSet, dtype: WeightDType) -> None:
    """Weights and inputs rounded per 32 columns, some of them 0, the same bits for a token in any batch and by any
    instructions. 2,300 tokens are more than one range; 32 and 416 columns end within a block of 128.
    """
    torch.manual_seed(0)
    form, kernels, library = WeightFormat(dtype=dtype), bind("cpu"), load(instructions)
    gate_up, down = matrix_of(form, 832, 672, "int16", instructions), matrix_of(form, 72, 416, "int16", instructions)
    given = given_of(2300, 672, adds=True)
    given.residual[:, 40] *= 300.0  # a column of outliers
    given.residual[5, :] = given.x[5, :] = 0.0
    x, weight = kernels.normed(copy_of(given)), gate_up.dense()
    want = groups.round_inputs(x, 32, groups.MOST_INT16) @ groups.round_inputs(weight, 32, 4095).T
    exact, in_bf16 = x.double() @ weight.double().T, x.bfloat16().double() @ weight.double().T
    was, found = library.way(-1), []
    try:
        for way in range(2):
            library.way(way)
            found.append(gate_up.multiply_normed(copy_of(given), None, kernels))
            torch.testing.assert_close(found[-1], want, rtol=0, atol=2e-3 * float(exact.std()))
            assert (found[-1] - exact).norm() < (in_bf16 - exact).norm() / 2
            found.append(gate_up.swiglu(down, copy_of(given), (None, None), kernels))
            plain = Matrix.swiglu(gate_up, down, copy_of(given), (None, None), kernels)
            torch.testing.assert_close(found[-1], plain, rtol=0, atol=2e-3 * float(plain.std()))
            for own in (slice(0, 1), slice(1100, 1117), slice(2299, 2300)):
                assert torch.equal(gate_up.swiglu(down, copy_of(given, own), (None, None), kernels), found[-1][own])
    finally:
        library.way(was)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_sizes_that_are_not_whole_groups_are_multiplied_in_fp32() -> None:
    torch.manual_seed(0)
    form, x = WeightFormats.of("bfloat16").layers, torch.randn(40, 40)
    matrix, plain = matrix_of(form, 64, 40, "int16", None), matrix_of(form, 64, 40, None, None)
    plain.fill(matrix.dense())
    assert torch.equal(matrix.multiply(x, None, bind("cpu")), plain.multiply(x, None, bind("cpu")))
    stored = Matrix(matrix.dense())
    rounding = stored.with_rounded_inputs("int16", 0)
    assert torch.equal(rounding.multiply(x, None, bind("cpu")), stored.multiply(x, None, bind("cpu")))


@pytest.mark.parametrize(("size", "has_norm"), [(64, True), (20, True), (32, False), (2, True)])
def test_heads_are_staged_as_by_plain_calls(size: int, has_norm: bool) -> None:
    torch.manual_seed(size)
    heads = torch.randn(9, 4 + 2 * 2, size)
    angle = torch.rand(9, 1, size // 2)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    norm = HeadNorm(torch.rand(6, size) + 0.5 if has_norm else None, 1e-6)
    keys, values = torch.zeros(2, 30, size), torch.zeros(2, 30, size)
    queries = stage_heads(heads, norm, (cos, sin), keys, values, [(0, 4, 20), (4, 5, 3)])
    rotated = bind("cpu", "torch").norm_rope(heads, norm, (cos, sin), 2)  # [T, H+G, E]
    want_keys, want_values = torch.zeros_like(keys), torch.zeros_like(values)
    for tokens, places in ((slice(0, 4), slice(20, 24)), (slice(4, 9), slice(3, 8))):
        want_keys[:, places] = rotated[tokens, 4:].transpose(0, 1)
        want_values[:, places] = heads[tokens, 6:].transpose(0, 1)
    torch.testing.assert_close(queries, rotated[:, :4])
    torch.testing.assert_close(keys, want_keys)
    assert torch.equal(values, want_values)


def pairs_of(tokens: int, top_k: int, stored: int, elsewhere: int) -> Pairs:
    """Random choices of ``stored + elsewhere`` experts; the first ones are stored, and nobody chooses expert 1."""
    choices = torch.rand(tokens, stored + elsewhere)
    choices[:, 1] = -1.0
    flat = choices.topk(top_k).indices.flatten().clamp(max=stored)
    order = flat.argsort(stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(stored), right=True, out_int32=True)
    return Pairs(order, ends, torch.rand(tokens, top_k), flat == stored if elsewhere else None)


def of_tokens(pairs: Pairs, tokens: slice) -> Pairs:
    """The choices of some tokens alone."""
    top_k = pairs.weights.shape[1]
    flat = torch.empty_like(pairs.order)
    flat[pairs.order] = torch.searchsorted(pairs.ends, torch.arange(len(flat)), right=True)  # X' for others' experts
    own = flat.view(-1, top_k)[tokens].flatten()
    order, stored = own.argsort(stable=True), len(pairs.ends)
    ends = torch.searchsorted(own[order], torch.arange(stored), right=True, out_int32=True)
    return Pairs(order, ends, pairs.weights[tokens], own == stored if pairs.are_elsewhere is not None else None)


def experts_of(form: WeightFormat, rows: int, cols: int, inputs: Inputs, instructions: InstructionSet | None) -> Matrix:
    stack = make_panels(load(instructions), prefill_inputs=inputs)(form, (1, 5, rows, cols), torch.float32, "cpu")
    stack.fill(torch.randn(1, 5, rows, cols) / cols**0.5)
    return stack[0]


@pytest.mark.parametrize("form", [*FORMS, WeightFormat(dtype="fp8")], ids=WeightFormat.describe)
@pytest.mark.parametrize("inputs", [None, pytest.param("bfloat16", marks=needs_bf16), "int8", "int16"])
@pytest.mark.parametrize(("tokens", "inner", "elsewhere"), [(1, 64, 0), (50, 96, 0), (31, 64, 3), (9, 48, 0)])
def test_experts_are_those_of_plain_calls(
    form: WeightFormat, inputs: Inputs, tokens: int, inner: int, elsewhere: int
) -> None:
    torch.manual_seed(tokens)
    kernels, size = bind("cpu"), 256 if form.is_k_quant else 64
    inner = 256 if form.is_k_quant else inner if not form.is_quantized or inner % 32 == 0 else 64
    gate_up, down = experts_of(form, 2 * inner, size, inputs, None), experts_of(form, 64, inner, inputs, None)
    x, pairs = torch.randn(tokens, size), pairs_of(tokens, 3, 5, elsewhere)
    want = Matrix.swiglu_grouped(gate_up, down, x, pairs, kernels)
    got = gate_up.swiglu_grouped(down, x, pairs, kernels)
    torch.testing.assert_close(got, want, rtol=0, atol=LIMITS[inputs])
    for token in range(0, tokens, 7):  # alone
        own = slice(token, token + 1)
        assert torch.equal(gate_up.swiglu_grouped(down, x[own], of_tokens(pairs, own), kernels)[0], got[token])


@needs_bf16
def test_tokens_of_an_expert_that_go_in_ranges_have_the_same_bits() -> None:
    torch.manual_seed(0)
    form, kernels = WeightFormats.of("bfloat16").layers, bind("cpu")
    gate_up, down = experts_of(form, 128, 1024, "bfloat16", None), experts_of(form, 32, 64, "bfloat16", None)
    x, pairs = torch.randn(1000, 1024), pairs_of(1000, 3, 5, 0)  # a near cache holds 384 tokens
    assert int(pairs.ends[0]) > 384
    got = gate_up.swiglu_grouped(down, x, pairs, kernels)
    for own in (slice(0, 1), slice(500, 533), slice(999, 1000)):
        assert torch.equal(gate_up.swiglu_grouped(down, x[own], of_tokens(pairs, own), kernels), got[own])


@pytest.mark.parametrize("instructions", instruction_sets())
def test_every_instruction_set_passes_experts(instructions: InstructionSet) -> None:
    torch.manual_seed(1)
    form = WeightFormats.of("float32").layers
    gate_up, down = experts_of(form, 64, 20, None, instructions), experts_of(form, 20, 32, None, instructions)
    x, pairs = torch.randn(9, 20), pairs_of(9, 2, 5, 2)
    want = Matrix.swiglu_grouped(gate_up, down, x, pairs, bind("cpu"))
    torch.testing.assert_close(gate_up.swiglu_grouped(down, x, pairs, bind("cpu")), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cpu_fp32", pytest.param("cpu_bf16", marks=needs_bf16)])
def test_values_without_the_zeros_behind_them_are_attended_alike(name: str) -> None:
    """Of expanded latents, whose values are shorter than their keys."""
    torch.manual_seed(0)
    version = VERSIONS[name]
    assert version.takes_narrow_values and version.attend_packed is not None
    q, k, v = torch.randn(46, 3, 24), torch.randn(3, 352, 24), torch.randn(3, 352, 24)
    v[..., 20:] = 0.0
    assert torch.equal(version.attend(q, k, v[..., :20]), version.attend(q, k, v)[..., :20])
    ends = [torch.tensor([0, *part]).cumsum(0).int() for part in ([5, 1, 40], [5, 300, 47])]
    lens = PackedLens(ends[0], ends[1], 40, 300)
    assert torch.equal(version.attend_packed(q, k, v[..., :20], lens), version.attend_packed(q, k, v, lens)[..., :20])
