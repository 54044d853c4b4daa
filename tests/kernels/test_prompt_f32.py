"""Attention of prompts in fp32 by our kernel: as the reference, in any chunks and company, and chosen by a trial."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snapstream.assets import TINY_LATENT_MODEL, TINY_MODEL
from snapstream.config import PrefixStoreConfig
from snapstream.kernels import reference
from snapstream.kernels.cpu.looped import library
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.prompt_f32 import attend
from snapstream.kernels.prefill import race
from snapstream.kernels.prefill.choice import choose
from snapstream.kernels.prefill.versions import VERSIONS, Case, Version
from snapstream.llm import LLM
from snapstream.request import SamplingParams

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
STORE = PrefixStoreConfig(num_bytes=8 * 2**20, block_len=32, min_tokens=64)
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


@settings(max_examples=50)
@given(
    queries=st.integers(1, 70), kv_heads=st.integers(1, 3), shared=st.integers(1, 5), before=st.integers(0, 400),
    size=st.integers(1, 70), value_size=st.integers(1, 70), scale=st.sampled_from([1.0, 30.0]),
    threads=st.integers(1, 2), instructions=st.sampled_from(instruction_sets()),
)  # fmt: skip
def test_as_the_reference(
    queries: int, kv_heads: int, shared: int, before: int, size: int, value_size: int, scale: float, threads: int,
    instructions: InstructionSet,
) -> None:  # fmt: skip
    q, k, v = sample(queries, kv_heads * shared, kv_heads, before + queries, size, value_size)
    q = q * scale
    count = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = attend(library.load(instructions), q, k, v, [(queries, before + queries)])
    finally:
        torch.set_num_threads(count)
    torch.testing.assert_close(got, expected(q, k, v), rtol=2e-5 * scale, atol=3e-6 * scale)


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize(("size", "value_size"), [(32, 32), (48, 32), (64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(("queries", "heads", "kv_heads", "before"), [(1, 3, 1, 0), (97, 4, 2, 95), (64, 2, 2, 33)])
def test_sizes_of_real_heads(
    instructions: InstructionSet, size: int, value_size: int, queries: int, heads: int, kv_heads: int, before: int
) -> None:
    q, k, v = sample(queries, heads, kv_heads, before + queries, size, value_size)
    got = attend(library.load(instructions), q, k, v, [(queries, before + queries)])
    torch.testing.assert_close(got, expected(q, k, v), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("instructions", instruction_sets())
def test_the_same_bits_in_any_chunks_and_company(instructions: InstructionSet) -> None:
    def own(q: Tensor, k: Tensor, v: Tensor, *ends: tuple[int, int]) -> Tensor:
        return attend(library.load(instructions), q, k, v, list(ends) or [(len(q), k.shape[1])])

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
@pytest.mark.parametrize("instructions", instruction_sets())
def test_what_is_not_finite_stays_seen(instructions: InstructionSet, wrong: float) -> None:
    q, k, v = sample(20, 2, 1, 30, 16, 16)
    q[4, 1, 3] = wrong
    got = attend(library.load(instructions), q, k, v, [(20, 30)])
    assert not got[4, 1].isfinite().any()
    got[4, 1] = 0.0
    assert got.isfinite().all()


def test_the_faster_one_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"cpu": 1.0, "cpu_fp32": 0.95}
    monkeypatch.setattr(race, "seconds_on_a_cpu", lambda version, case: times[version.name])
    monkeypatch.setattr(race, "known", dict)
    kept = choose("auto", CASE)
    assert (kept.name, kept.packed_name) == ("cpu", "loop")
    times["cpu_fp32"] = 0.5
    chosen = choose("auto", CASE)
    assert (chosen.name, chosen.packed_name) == ("cpu_fp32", "cpu_fp32")
    assert "faster one of a trial at this start: cpu 1000.00 ms, cpu_fp32 500.00 ms" in chosen.describe()
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
        return race.seconds_on_a_cpu(version, case)

    measured: race.Known = {}
    for _ in range(2):
        times = race.race([VERSIONS["cpu"], VERSIONS["cpu_fp32"]], CASE, counted, measured)
        assert all(0.0 < time < float("inf") for time in times.values())
    assert calls == ["cpu", "cpu_fp32"]


@pytest.mark.parametrize("model", [TINY_MODEL, TINY_LATENT_MODEL])
def test_tokens_are_those_of_the_reference(model: Path) -> None:
    """Prompts of one chunk, of several, packed, and begun in the prefix store."""
    texts = ["The code of the vault is 4821907. " * n for n in (1, 3, 40)]
    answers = []
    for name in ("reference", "cpu_fp32"):
        with LLM(model, prefill_attention=name, max_model_len=1024, chunk_len=128, max_rows=3, weights="float32",
                 activations="dtype", prefix_store=STORE, progress=False) as llm:  # fmt: skip
            assert any(f"prefill attention: {name}" in note for note in llm.notes)
            params = SamplingParams(max_tokens=12, temperature=0.0)
            outs = [*llm.generate(texts, params), *llm.generate([texts[2] + "What is it?"], params)]
            answers.append([out.token_ids for out in outs])
    assert answers[0] == answers[1]
