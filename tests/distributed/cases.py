"""What ranks are told to do: functions that ``pool.py`` calls in every one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.stand_ins import Pretend, random_share
from snapstream import LLM
from snapstream.config import (
    Chunking,
    DType,
    EngineConfig,
    KVBudget,
    KVDType,
    ModelConfig,
    ParallelConfig,
    Selector,
    SplitAttention,
    SplitExperts,
    WeightFormats,
)
from snapstream.config.kv import HeadProfile
from snapstream.distributed.control import WorkerRanks
from snapstream.distributed.group import Group, ReduceOp
from snapstream.exec import speculation
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.exec.parallel import ParallelRunner, RankRunner
from snapstream.exec.runner import ModelRunner
from snapstream.exec.speculation import History, StepTimes
from snapstream.grammar import GrammarCompiler
from snapstream.kernels.cpu.looped.library import load, num_cores
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.models.checkpoint import load_weights
from snapstream.models.decoder import Decoder
from snapstream.models.matrix import make_matrix
from snapstream.models.panels import make_panels
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import Share
from snapstream.models.tokenizer import has_tokenizer, load_tokenizer
from snapstream.startup.build import build_rank, grammar_compiler, load_draft_model
from snapstream.step import JobSpec, PrefillEntry, PrefillResult, StepPlan, UnitRange
from snapstream.types import RequestOutput, SamplingParams
from snapstream.wire import pack, unpack


def reduced(group: Group, dtype: torch.dtype, op: ReduceOp) -> tuple[int, Tensor, Tensor]:
    """The rank, its numbers before and after."""
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
    return group.rank, x.clone(), group.all_reduce(x, op)


def reduced_view(group: Group) -> Tensor:
    """Of a tensor whose numbers do not lie one after the other."""
    return group.all_reduce((torch.arange(6.0).view(2, 3) + group.rank).t())


def gathered(group: Group, dim: int) -> Tensor:
    """Numbers that name rank and place."""
    return group.all_gather(100.0 * group.rank + torch.arange(6.0).view(2, 3), dim)


@torch.inference_mode()
def random_logits(group: Group, model: ModelConfig) -> tuple[Tensor, dict[str, Tensor], int]:
    """Logits of a token by random weights, what this rank stores, and the bytes of it."""
    share = Share.of(model, ParallelConfig(size=group.size), group.rank)
    weights = random_share(share, torch.float32, "cpu", seed=1)
    config = EngineConfig(budget=KVBudget.full(20), max_model_len=20, max_rows=1)
    runner = ModelRunner(Decoder(model, weights, group=group), config)
    runner.rows.last_token.fill_(7)
    return runner.decode.logits(torch.zeros(1, dtype=torch.int64)).clone(), weights.stored(), weights.num_bytes


def broadcast(group: Group, source: int) -> Tensor:
    """Of a tensor whose numbers do not lie one after the other."""
    return group.broadcast((torch.arange(6.0).view(2, 3) + 100 * group.rank).t(), source)


@torch.inference_mode()
def in_batches(group: Group, folder: Path) -> dict[int, list[bool]]:
    """By number of threads, whether each row has the logits that it has alone on one thread."""
    runner = _looped_runner(folder, ParallelConfig(size=group.size), group)
    runner.rows.last_token[:3] = torch.tensor([7, 150, 23])
    alone: list[Tensor] = []
    found = {}
    for num_threads in (1, min(2, num_cores())):
        decode = LoopedDecode(runner.step_parts, num_threads)
        alone = alone or [decode.logits(torch.tensor([row])).clone() for row in (0, 1)]
        together = decode.logits(torch.tensor([1, 2, 0])).clone()
        found[num_threads] = [torch.equal(together[2:], alone[0]), torch.equal(together[:1], alone[1])]
        decode.close()
    return found


def looped_under(folder: Path, parallel: ParallelConfig) -> None:
    """Rank 0 of a runner that loops, without the others."""
    _looped_runner(folder, parallel, Pretend(0, parallel.size))


def _looped_runner(folder: Path, parallel: ParallelConfig, group: Group) -> ModelRunner:
    model = read_model_config(folder)
    share = Share.of(model, replace(parallel, attention="tp"), group.rank)
    weights = load_weights(folder, model, torch.float32, "cpu", False, make=make_panels(load()), share=share)
    config = EngineConfig(budget=KVBudget.full(20), max_model_len=20, max_rows=3, executor="looped", parallel=parallel)
    return ModelRunner(Decoder(model, weights, group=group), config)


PROMPTS = (tuple((7 * i) % 190 + 3 for i in range(70)), tuple((11 * i) % 150 + 5 for i in range(23)))
STEPS = 6
# By layer and kv head. The first prompt is longer than any head, the second fits into some heads and not into others.
UNLIKE = HeadProfile(shares=((0.30, 0.02), (0.0, 0.28), (0.25, 0.15)), model="")


@dataclass(frozen=True)
class Asked:
    """An engine and what it is asked for."""

    folder: Path
    experts: SplitExperts = "tp"
    attention: SplitAttention = "tp"
    budget: int | None = None  # None: all tokens are kept
    executor: str = "eager"
    formats: WeightFormats | None = None
    heads: HeadProfile | None = None
    selector: Selector = field(default_factory=lambda: SnapKV(observation_len=8))


def runner_of(group: Group, asked: Asked, *, dtype: DType = "float32", **settings: Any) -> ModelRunner:
    """A runner of two rows over this rank's share."""
    model = read_model_config(asked.folder)
    parallel = ParallelConfig(size=group.size, attention=asked.attention, experts=asked.experts)
    share = Share.of(model, parallel, group.rank, asked.formats)
    make = make_panels(load()) if asked.executor == "looped" else make_matrix
    weights = load_weights(asked.folder, model, getattr(torch, dtype), "cpu", False, asked.formats, make, share)
    config = EngineConfig(
        max_rows=2,
        chunking=Chunking(chunk_len=16),
        executor=asked.executor,
        weights=asked.formats,
        dtype=dtype,
        parallel=parallel,
        **settings,
    )
    return ModelRunner(Decoder(model, weights, group=group), config)


def prefill(runner: ModelRunner, params: Sequence[SamplingParams]) -> dict[str, PrefillResult]:
    """Read ``PROMPTS`` in chunks, each into its row."""
    config = runner.config
    entries = tuple(
        PrefillEntry(request_id=str(row), token_ids=prompt, rows=(row,), seeds=(row,), sampling=params[row],
                     budget=config.budget, selector=config.selector)
        for row, prompt in enumerate(PROMPTS)
    )  # fmt: skip
    job = JobSpec(job_id=0, staging_start=0, entries=entries, chunk_len=16)
    units = UnitRange(0, 0, job.num_units(runner.decoder.config.num_layers))
    return runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(units,))).result().prefilled


@torch.inference_mode()
def forced_logits(
    group: Group, asked: Asked, dtype: DType, kv_dtype: KVDType, num_steps: int, tokens: Tensor | None = None
) -> Tensor:
    """Logits ``[steps, rows, V]`` of ``PROMPTS``, fed ``tokens [steps, rows]``, by default the likeliest."""
    runner = runner_of(group, asked, budget=KVBudget.full(200), max_model_len=200, dtype=dtype, kv_dtype=kv_dtype)
    prefill(runner, [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_steps)] * 2)
    found, rows = [], torch.tensor([0, 1])
    runner.rows.last_token[:2] = 7  # whatever was drawn
    for step in range(num_steps):
        found.append(runner.decode.logits(rows).float().clone())
        runner.submit(StepPlan(step_id=step + 1, decode_rows=(0, 1))).result()
        runner.rows.last_token[:2] = (found[-1].argmax(-1) if tokens is None else tokens[step]).to(torch.int64)
    return torch.stack(found)


@dataclass(frozen=True)
class Answered:
    """What one rank has of it."""

    tokens: list[list[int]]  # by row
    logits: Tensor  # [rows, V], of the step behind the last
    kept: list[Any]  # by prompt, as positions and as bits
    logprobs: list[float]  # of the second prompt
    row_bytes: list[int]
    own_bytes: tuple[int, int]  # of weights and rows on this rank


@torch.inference_mode()
def answered(group: Group, asked: Asked) -> Answered:
    """Two prompts, prefilled in chunks and decoded by a runner over this rank's share."""
    budget = KVBudget.full(100) if asked.budget is None else KVBudget.of(asked.budget, observation_len=8)
    heads = None if asked.heads is None else asked.heads.slots(budget, 100)
    runner = runner_of(group, asked, budget=budget, max_model_len=100, selector=asked.selector, heads=heads)
    params = [SamplingParams(temperature=0.0, ignore_eos=True, return_kept=kept, prompt_logprobs=logprobs, max_tokens=9)
              for kept, logprobs in ((True, None), ("bitmap", 2))]  # fmt: skip
    prefilled = prefill(runner, params)
    rows = (0, 1)
    tokens = [[prefilled[str(row)].tokens[0].token_id] for row in rows]
    for step in range(STEPS):
        for row, one in enumerate(runner.submit(StepPlan(step_id=step + 1, decode_rows=rows)).result().decoded):
            tokens[row].append(one.token_id)
    compressions = [prefilled[str(row)].compression for row in rows]
    return Answered(
        tokens=tokens,
        logits=runner.decode.logits(torch.tensor(rows)).clone(),
        kept=[(c.kept_positions, c.kept_bitmap) for c in compressions],
        logprobs=[one.logprob for one in (prefilled["1"].prompt_logprobs or []) if one is not None],
        row_bytes=[c.row_bytes for c in compressions],
        own_bytes=(runner.decoder.weights.num_bytes, runner.cache.num_bytes),
    )


class BroadcastRanks:
    """In place of ``WorkerRanks``: the other ranks of a pool get messages by a broadcast."""

    def __init__(self, group: Group) -> None:
        self._count = group.size - 1

    def __len__(self) -> int:
        return self._count

    def send(self, message: object) -> None:
        dist.broadcast_object_list([message if message is None else pack(message)], src=0)

    def close(self) -> None:
        self.send(None)

    def check_lost(self) -> None:
        pass

    step = staticmethod(nullcontext)


def heard(kind: type) -> Iterator[Any]:
    """On another rank: what rank 0 sends."""
    while True:
        own: list[Any] = [None]
        dist.broadcast_object_list(own, src=0)
        if own[0] is None:
            return
        yield unpack(own[0], {kind.__name__: kind})


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """An engine and what it is asked for. Drafts come from ``texts``, prompts with their answers, some tokens wrong;
    None: of a draft model alone.
    """

    folder: Path
    settings: dict[str, Any]  # of an LLM
    prompts: list[list[int]]
    params: list[SamplingParams]
    texts: list[list[int]] | None = None

    @contextmanager
    def drafts(self, *, is_known: bool) -> Iterator[None]:
        """Drafts pay whatever a step takes; ``is_known``: this rank may look for them."""
        random = Random(1)

        def draft(history: History, most: int) -> list[int]:
            assert is_known, "only rank 0 looks for drafts"
            if self.texts is None:
                return []
            known, most = history.token_ids, max(most, 0)
            texts = [text for text in self.texts if text[: len(known)] == known]
            following = random.choice(texts)[len(known) :][:most] if texts else [5, 6, 7][:most]
            return [3 if random.random() < 0.2 else token for token in following]

        def cost(times: StepTimes, entries: int) -> float:
            return 0.0

        with (
            patch.multiple(speculation, MAX_PAUSE=0, MOST_WAIT=1), patch.object(History, "draft", draft),
            patch.multiple(StepTimes, cost=cost, steps=lambda times, seconds, entries: 0.0),
        ):  # fmt: skip
            yield

    def answers(self, **settings: Any) -> list[RequestOutput]:
        with LLM(self.folder, **self.settings | settings) as llm:
            return llm.generate(self.prompts, self.params)


def drafting(group: Group, asked: Drafted, settings: dict[str, Any]) -> list[RequestOutput]:
    """Answers of a whole engine over the ranks of a pool, on rank 0; on the others none."""

    def make(
        folder: Path, model: ModelConfig, config: EngineConfig, grammars: GrammarCompiler | None, progress: bool
    ) -> ParallelRunner:
        workers = BroadcastRanks(group)
        workers.send(replace(config, speculator=None))
        runner = build_rank(folder, model, config, grammars, False, group)
        load_draft_model(runner, False)
        rank_0 = RankRunner(runner, group, checks=True)
        return ParallelRunner(rank_0, cast(WorkerRanks, workers), lambda: None)

    with asked.drafts(is_known=group.rank == 0):
        if group.rank == 0:
            return asked.answers(tensor_parallel=group.size, make_runner=make, **settings)
        config = next(heard(EngineConfig))
        model = read_model_config(asked.folder)
        grammars = grammar_compiler(load_tokenizer(asked.folder) if has_tokenizer(asked.folder) else None, model)
        rank = RankRunner(build_rank(asked.folder, model, config, grammars, False, group), group, checks=True)
        for plan in heard(StepPlan):
            rank.submit(plan)
        return []


def counted(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """Drafted and accepted tokens."""
    timings = [output.timings for output in outputs]
    return sum(own.drafted_tokens for own in timings), sum(own.accepted_tokens for own in timings)
