"""Equalities 2 and 5: how a prompt is cut, packed, interleaved, placed and accompanied never changes its answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.stand_ins import random_weights
from snapstream.config import Chunking, EngineConfig, KVBudget, ModelConfig
from snapstream.exec.cuda_graph import Capturer, GraphDecode, bucket_sizes
from snapstream.exec.eager import StepParts
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.runner import ModelRunner
from snapstream.exec.sampling import Sampled
from snapstream.kernels import reference
from snapstream.kernels.interface import bind
from snapstream.kernels.rows import PackedLens
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.decoder import Decoder
from snapstream.startup.build import build_runner
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange
from snapstream.types import SamplingParams
from tests.parity import tape
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.test_graph import LENGTHS, params

BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SELECTOR = SnapKV(observation_len=8)
INVARIANCE_LENGTHS = (70, 5, 120, 33, 18, 64, 1, 90, 40)


@pytest.fixture(scope="module", params=["llama-gqa-tied", "deepseek-v3-dense", "lfm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in INVARIANCE_LENGTHS]


def invariance_params() -> Iterator[SamplingParams]:
    """Greedy and sampled requests in one batch, each with its own seed."""
    for i in range(len(INVARIANCE_LENGTHS)):
        yield SamplingParams(max_tokens=8 + 3 * i, temperature=0.8 * (i % 2), seed=i, top_p=0.9, ignore_eos=True)


def run(folder: Path, prompts: list[list[int]], wanted: list[SamplingParams], **settings: int) -> list[list[int]]:
    with LLM(
        folder, budget=BUDGET, selector=SELECTOR, max_model_len=160, executor="eager", progress=False, **settings
    ) as llm:  # type: ignore[arg-type]
        return [output.token_ids for output in llm.generate(prompts, wanted)]


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt by itself, in one chunk."""
    wanted = list(invariance_params())
    return [run(folder, [p], [w], max_rows=1, chunk_len=160)[0] for p, w in zip(prompts, wanted, strict=True)]


@pytest.mark.parametrize(  # every pair of the last two, and of the first and the last but at its ends
    ("chunk_len", "max_rows", "prefill_quantum"),
    [
        (1, 3, 1),
        (7, 9, 1),
        (32, 3, 0),
        (50, 1, 1),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in ((7, 1, 0), (32, 9, 1), (50, 9, 0), (160, 3, 1))),
    ],
)
def test_batches_equal_single_runs(
    folder: Path,
    prompts: list[list[int]],
    alone: list[list[int]],
    chunk_len: int,
    max_rows: int,
    prefill_quantum: int,
) -> None:
    got = run(
        folder,
        prompts,
        list(invariance_params()),
        max_rows=max_rows,
        chunk_len=chunk_len,
        prefill_quantum=prefill_quantum,
    )
    assert got == alone


def test_order_of_arrival_and_row_do_not_matter(folder: Path, prompts: list[list[int]], alone: list[list[int]]) -> None:
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    wanted = list(invariance_params())
    got = run(folder, [prompts[i] for i in order], [wanted[i] for i in order], max_rows=4, chunk_len=32)
    assert got == [alone[i] for i in order]


def test_reused_rows_remember_nothing(folder: Path, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """One engine, the same prompts twice in another order: rows, staging and counters are left dirty in between."""
    wanted = list(invariance_params())
    with LLM(
        folder,
        budget=BUDGET,
        selector=SELECTOR,
        max_model_len=160,
        executor="eager",
        max_rows=2,
        chunk_len=32,
        progress=False,
    ) as llm:
        first = llm.generate(prompts, wanted)
        second = llm.generate(prompts[::-1], wanted[::-1])
    assert [o.token_ids for o in first] == alone
    assert [o.token_ids for o in second[::-1]] == alone


def test_samples_of_one_prompt_equal_requests_of_their_own(folder: Path, prompts: list[list[int]]) -> None:
    """n > 1 prefills once and writes n rows: each sample is what a single request with its seed gives."""
    prompt = prompts[2]
    with LLM(
        folder,
        budget=BUDGET,
        selector=SELECTOR,
        max_model_len=160,
        executor="eager",
        max_rows=5,
        chunk_len=32,
        progress=False,
    ) as llm:
        both = llm.generate([prompt], SamplingParams(n=4, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True))[0]
        again = llm.generate([prompt], SamplingParams(n=2, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True))[0]
        greedy = llm.generate([prompt], SamplingParams(n=3, max_tokens=12, temperature=0.0, ignore_eos=True))[0]
    samples = [sample.token_ids for sample in both.samples]
    assert len({tuple(s) for s in samples}) == 4
    assert [s.token_ids for s in again.samples] == samples[:2]
    assert len({tuple(s.token_ids) for s in greedy.samples}) == 1


def test_requests_with_budgets_of_their_own_share_a_batch(folder: Path, prompts: list[list[int]]) -> None:
    """A smaller budget inside an engine with larger rows equals an engine with rows of that size."""
    want = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    small = KVBudget(num_sink=1, num_topk=6, num_recent=9)
    with LLM(folder, budget=small, selector=SELECTOR, max_model_len=160, executor="eager", progress=False) as llm:
        expected = [o.token_ids for o in llm.generate(prompts, want)]
    with LLM(
        folder, budget="full", selector=SELECTOR, max_model_len=160, executor="eager", max_rows=4, progress=False
    ) as llm:
        assert [o.token_ids for o in llm.generate(prompts, want, budget=small)] == expected


def test_requests_with_selectors_of_their_own_share_a_batch(folder: Path, prompts: list[list[int]]) -> None:
    """Each prompt is kept by its own request's method, whatever the engine's is and whoever shares its job."""
    want = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, return_kept=True)
    selectors = [SnapKV(observation_len=8), Hops(observation_len=8, num_hops=2), SnapKV(observation_len=3)]
    settings = {"budget": BUDGET, "max_model_len": 160, "max_rows": 4, "progress": False}
    alone = []
    for selector in selectors:
        with LLM(folder, selector=selector, **settings) as llm:  # type: ignore[arg-type]
            alone.append(llm.generate(prompts, want))
    with LLM(folder, selector=selectors[1], **settings) as llm:  # type: ignore[arg-type]
        streams = [llm.stream(p, want, selector=selectors[i % 3]) for i, p in enumerate(prompts)]
        together = [list(stream)[-1] for stream in streams]
    for i, output in enumerate(together):
        expected = alone[i % 3][i]
        assert output.compression is not None and expected.compression is not None
        assert output.compression.kept_positions == expected.compression.kept_positions, i
        assert output.token_ids == expected.token_ids, i
    kept = [outputs[2].compression for outputs in alone]
    assert len({some.kept_positions for some in kept if some is not None}) == 3, "the methods keep the same tokens"


# Several prompts of a chunk attended in one call are the prompts attended one by one, wherever chunks cut them.

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=90, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, intermediate_size=48, max_position=256, qk_norm=True, eos_token_ids=(2,),
)  # fmt: skip


class Packed:
    """A kernel for packed prompts, by the reference; remembers what it was given."""

    def __init__(self) -> None:
        self.lens: list[PackedLens] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, *, window: int | None = None,
        sinks: Tensor | None = None, cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        self.lens.append(lens)
        queries, keys = pairwise(lens.queries.tolist()), pairwise(lens.keys.tolist())
        assert lens.queries[-1] == len(q) and lens.keys[-1] == k.shape[1]
        parts = []
        for (a, b), (c, d) in zip(queries, keys, strict=True):
            assert b - a <= lens.max_queries and d - c <= lens.max_keys
            own = q[a:b], k[:, c:d], v[:, c:d]
            parts.append(reference.prefill_attention(*own, window=window, sinks=sinks, cap=cap))
        return torch.cat(parts)


def rows_after(
    lengths: tuple[int, ...], chunk_len: int, packed: Packed | None, own_chunk_len: int = 0
) -> tuple[Tensor, list[int]]:
    """Keys of all rows and the first tokens, after a job of prompts of these lengths."""
    config = EngineConfig(
        budget=BUDGET,
        max_model_len=256,
        max_rows=len(lengths),
        chunking=Chunking(chunk_len=chunk_len),
        selector=SnapKV(observation_len=8),
    )
    runner = ModelRunner(Decoder(MODEL, random_weights(MODEL, torch.float32, "cpu", seed=0)), config)
    runner.prefill_attention = replace(
        runner.prefill_attention, attend=reference.prefill_attention, attend_packed=packed
    )
    entries = tuple(
        PrefillEntry(
            request_id=f"r{i}", token_ids=tuple((7 * i + 3 * j) % 80 + 3 for j in range(n)), rows=(i,), seeds=(i,),
            sampling=SamplingParams(temperature=0.0), budget=BUDGET, selector=SELECTOR,
        )
        for i, n in enumerate(lengths)
    )  # fmt: skip
    job = JobSpec(job_id=0, staging_start=17, entries=entries, chunk_len=own_chunk_len or chunk_len)
    units = UnitRange(0, 0, job.num_units(MODEL.num_layers))
    result = runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(units,))).result()
    return runner.cache.k, [result.prefilled[entry.request_id].tokens[0].token_id for entry in entries]


@pytest.mark.parametrize("chunk_len", [7, 32, 64, 200])
def test_one_call_equals_a_call_per_prompt(chunk_len: int) -> None:
    lengths = (70, 5, 1, 33, 18)
    packed = Packed()
    got_keys, got = rows_after(lengths, chunk_len, packed)
    keys, expected = rows_after(lengths, chunk_len, None)
    assert torch.equal(got_keys, keys) and got == expected
    assert packed.lens, "some chunk holds several prompts"
    per_chunk = {id(lens) for lens in packed.lens}
    assert len(packed.lens) == len(per_chunk) * (MODEL.num_layers - 1)  # lengths are uploaded once, not per layer


def test_a_prompt_alone_in_its_chunks_takes_the_plain_call() -> None:
    packed = Packed()
    rows_after((70,), 32, packed)
    assert not packed.lens


def test_a_job_may_have_a_chunk_len_of_its_own() -> None:
    """Long prompts on a GPU are cut shorter than the engine's units (engine/pace.py)."""
    keys, expected = rows_after((70, 40), 64, None)
    got_keys, got = rows_after((70, 40), 64, None, own_chunk_len=7)
    torch.testing.assert_close(got_keys, keys)
    assert got == expected


# Captured decode gives eager's tokens, on tapes of operators that stand in for CUDA graphs.

SETTINGS: dict[str, Any] = {
    "executor": "eager",
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8), "max_rows": 5,
    "max_model_len": 160, "progress": False,
}  # fmt: skip


@pytest.fixture
def capture_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


def sampling() -> list[SamplingParams]:
    """As in ``test_graph``, and one that asks for all that a captured sampler does."""
    everything = SamplingParams(
        max_tokens=15, temperature=0.9, top_p=0.9, top_k=30, min_p=0.02, min_tokens=6, stop_token_ids=list(range(30)),
        logit_bias={7: 3.0, 120: -2.0}, presence_penalty=0.4, repetition_penalty=1.2, logprobs=3, seed=9,
    )  # fmt: skip
    return [everything, *params()[1:]]


class OnTapes:
    """Decode of a GPU: its buckets and samplers, captured. A ``DecodeStep``."""

    def __init__(self, parts: StepParts, buckets: tuple[int, ...] = ()) -> None:
        buckets = buckets or bucket_sizes(parts.config.max_rows)
        self._captured = GraphDecode(parts, Capturer(), buckets)

    def warm_up(self, progress: bool) -> None:
        self._captured.warm_up(progress)

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Copies, as a GPU's tokens are on their way to the host before the next replay overwrites them."""
        ids, *others = self._captured.step(rows, needs)
        return Sampled(ids.clone(), *(None if field is None else field.clone() for field in others))


# A CPU's own kernels read lengths on the host, which no capture can.
CAPTURED = partial(build_runner, kernels=bind("cpu", "torch"), make_decode=OnTapes)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("llama-gqa-tied", {}, marks=pytest.mark.slow),
        ("llama-dynamic", {}), ("qwen3", {"kv_dtype": "fp8"}),
        ("lfm2", {}), ("qwen3.5", {}),
    ],
)  # fmt: skip
def test_tokens_equal_eager(
    name: str, more: dict[str, Any], capture_prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts than rows, of unlike lengths and sampling: every bucket is replayed, with rows in any order."""
    folder = save(make_model(name), tmp_path)
    with LLM(folder, **SETTINGS, **more) as llm:
        expected = [(output.token_ids, output.logprobs) for output in llm.generate(capture_prompts, sampling())]
    replayed: list[int] = []
    replay = tape.Tape.replay
    monkeypatch.setattr(tape.Tape, "replay", lambda self: (replayed.append(id(self)), replay(self))[1])
    tape.install(monkeypatch)
    with LLM(folder, make_runner=CAPTURED, **SETTINGS, **more) as llm:
        assert not replayed
        outputs = llm.generate(capture_prompts, sampling())
    assert [output.token_ids for output in outputs] == [tokens for tokens, _ in expected]
    for output, (_, logprobs) in zip(outputs, expected, strict=True):
        for own, other in zip(output.logprobs or (), logprobs or (), strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in own.top] == [token for token, _ in other.top]
    assert len(set(replayed)) >= 6  # forwards of several buckets, and samplers


def test_reading_a_number_is_refused_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape can fail: what a capture cannot hold is an error."""
    tape.install(monkeypatch)
    with pytest.raises(AssertionError, match="read while capturing"):
        Capturer().make(lambda x: x * float(x.sum()), torch.ones(2))
    with pytest.raises(AssertionError, match="sent while capturing"):
        Capturer().make(lambda x: x + torch.tensor([1.0, 2.0]), torch.ones(2))
