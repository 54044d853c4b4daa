"""The decode step as captured CUDA graphs, one per batch size.

A batch of n rows runs in the smallest bucket that holds it; unused entries point at the padding row. A step is two
programs, the halves of ``eager.py``: forward (rows to logits), and one of a few samplers (logits to tokens, state
advanced), which cover all that a request can ask for. A step with drafted tokens is a wider forward, captured for a few
depths, and a sampler per turn (``eager.DrawnTurns``); the host waits only for what was accepted.

Invariant: equal to eager, and after ``warm_up`` nothing is captured any more.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from time import perf_counter
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from snapstream.exec.eager import DecodeStep, DraftBatch, DraftTurns, DrawnTurns, EagerDecode, GoOn, StepParts
from snapstream.exec.executors import MAX_DRAFTED, draft_sizes
from snapstream.exec.row_state import LOGPROB_SIZES, SamplingNeeds
from snapstream.exec.sampling import Sampled
from snapstream.kernels.memory import upload

Out = TypeVar("Out")  # a tensor, or a named tuple of tensors
Program = Callable[..., Out]  # called with the tensors that it was captured with: same shapes, same addresses
_WARM_UPS = 2  # runs before a capture, for libraries and autotuners


class ProgramMaker(Protocol):
    def make(self, function: Callable[..., Out], *inputs: Tensor) -> Program[Out]: ...


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage, then keep the collector off until the end of the block.

    A collection during a capture may destroy another graph, or free device memory; either makes the capture invalid.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Capturer:
    """Programs as CUDA graphs in one memory pool. Make the largest first: the others then fit into its memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def make(self, function: Callable[..., Out], *inputs: Tensor) -> Program[Out]:
        """Warm up on a side stream, then capture there; the output of a replay is overwritten by the next."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph, is_inference = torch.cuda.CUDAGraph(), torch.is_inference_mode_enabled()
        # The first capture of a process makes tensors for torch's generator that later captures write: in inference
        # mode they would break captures outside of it.
        with (
            torch.inference_mode(False),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
            torch.inference_mode(is_inference),
        ):
            out = function(*inputs)

        def replay(*_: Tensor) -> Out:
            graph.replay()
            return out

        return replay


logger = logging.getLogger(__name__)

_FILTERS = SamplingNeeds(random=True, top_k=True, top_p=True, min_p=True)
_EDITS = replace(_FILTERS, bias=True, min_tokens=True, penalties=True, grammar=True)
# The first that covers a batch is taken: more than needed is never wrong (SamplingNeeds), only slower.
SAMPLERS = (
    SamplingNeeds(),
    SamplingNeeds(num_logprobs=LOGPROB_SIZES[-1]),
    SamplingNeeds(random=True),
    _FILTERS,
    _EDITS,
    replace(_EDITS, num_logprobs=LOGPROB_SIZES[-1]),
)


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes with their own programs, ascending; the last is ``max_rows``.

    Captures are cheaper than idle entries: 1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 32.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(max_rows, 256), 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def depths_of(num_speculative_tokens: int) -> tuple[int, ...]:
    """Lengths of drafts with their own programs, ascending."""
    most = min(num_speculative_tokens, MAX_DRAFTED)
    return (*(depth for depth in (1, 3) if depth < most), most) if most else ()


def covers(sampler: SamplingNeeds, needs: SamplingNeeds) -> bool:
    """Whether ``sampler`` does all that ``needs`` requires."""

    def amount(of: SamplingNeeds, name: str) -> int:
        asked: bool | int | None = getattr(of, name)
        return -1 if asked is None else int(asked)

    return all(amount(needs, field.name) <= amount(sampler, field.name) for field in fields(SamplingNeeds))


class GraphDecode:
    """A ``DecodeStep`` and ``Verifier`` whose programs are captured from eager decode and share its state."""

    most_draft_rows: int | None = MAX_DRAFTED
    keeps_latents = True

    def __init__(
        self,
        parts: StepParts,
        maker: ProgramMaker,
        buckets: tuple[int, ...],
        samplers: tuple[SamplingNeeds, ...] = SAMPLERS,
        depths: tuple[int, ...] = (),
    ) -> None:
        """``buckets``: batch sizes, ascending. ``samplers``: some of ``SAMPLERS``. ``depths`` of drafts, ascending."""
        device = parts.decoder.device
        self._eager, self._padding_row = EagerDecode(parts), parts.padding_row
        self._maker, self._buckets, self._needs, self._depths = maker, buckets, samplers, depths
        # Static inputs and outputs of the programs.
        most, vocab_size = buckets[-1], parts.decoder.config.vocab_size
        self._rows = torch.full((most,), self._padding_row, dtype=torch.int64, device=device)
        self._logits = torch.empty((most, vocab_size), dtype=torch.float32, device=device)
        draft_rows = max((own for own in self._buckets if own <= MAX_DRAFTED), default=0)
        self._shapes = {
            (bucket, depth): draft_sizes(bucket, depth)
            for bucket in self._buckets if bucket <= draft_rows for depth in depths
        }  # fmt: skip
        most_drafted = max(map(sum, self._shapes.values()), default=0)
        self._entries = torch.zeros((2, most_drafted), dtype=torch.int64, device=device)  # rows, tokens
        self._draft_logits = torch.empty((most_drafted, vocab_size), dtype=torch.float32, device=device)
        self._forward: dict[int, Program[Tensor]] = {}
        self._drafts: dict[tuple[int, int], Program[Tensor]] = {}
        self._samplers: dict[int, list[tuple[SamplingNeeds, Program[Sampled]]]] = {}

    @property
    def num_programs(self) -> int:
        return len(self._buckets) * (1 + len(self._needs)) + len(self._shapes)

    def warm_up(self, progress: bool) -> None:
        """Make every program, the largest bucket first; only the padding row is fed."""
        from tqdm import tqdm

        began, doing = perf_counter(), "Capturing decode"
        logger.info("%s: %d programs", doing, self.num_programs)
        bar = tqdm(total=self.num_programs, desc=doing, unit="program", disable=not progress, file=sys.stderr)
        with bar, no_collection():
            self._make(bar.update)
        logger.info("%d decode programs are ready after %.1f s", self.num_programs, perf_counter() - began)

    @torch.inference_mode()
    def _make(self, made: Callable[[], object]) -> None:
        self._entries[0].fill_(self._padding_row)
        for shape, sizes in sorted(self._shapes.items(), reverse=True):
            entries, logits = self._entries[:, : sum(sizes)], self._draft_logits[: sum(sizes)]
            self._drafts[shape] = self._maker.make(partial(self._run_drafts, sizes=sizes), *entries, logits)
            made()
        for bucket in reversed(self._buckets):
            rows, logits = self._rows[:bucket].fill_(self._padding_row), self._logits[:bucket]
            self._forward[bucket] = self._maker.make(self._run_forward, rows, logits)
            made()
            self._samplers[bucket] = []
            for needs in self._needs:
                program = self._maker.make(partial(self._eager.draw, needs=needs), logits, rows)
                self._samplers[bucket].append((needs, program))
                made()

    def release(self) -> None:
        """Free the programs; no step runs afterwards. NCCL cannot leave a group while a graph holds its collectives."""
        self._forward.clear()
        self._drafts.clear()
        self._samplers.clear()

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``EagerDecode.step``; ``rows [B]`` int64 on the device, B at most the largest bucket."""
        padded, logits = self._feed(rows)
        return self._sample(logits, padded, rows.shape[0], needs)

    def verify(self, batch: DraftBatch, needs: SamplingNeeds, go_on: GoOn | None = None) -> tuple[Sampled, list[int]]:
        """See ``EagerDecode.verify``; of at most ``most_draft_rows`` rows."""
        host = DraftTurns.of(batch)
        entries, logits, sizes = self._feed_turns(host)
        drawn, (turns, inputs) = DrawnTurns(self._padding_row), (column.split(sizes) for column in entries)
        used, draw = len(host.rows), partial(self._draw_copied, needs=needs)
        drawn.draw(turns[:used], inputs[:used], logits[: sum(sizes[:used])], draw, go_on)
        return drawn.accepted(host.order)

    def feed(self, batch: DraftBatch) -> Tensor:
        """See ``Verifier``; as ``verify``."""
        host = DraftTurns.of(batch)
        _, logits, sizes = self._feed_turns(host)
        return host.by_row(logits, sizes, batch)

    def _feed_turns(self, host: DraftTurns) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Rows and tokens of all turns, padded, the logits after each, and the sizes of the turns."""
        shape = self._bucket(len(host.order)), next(own for own in self._depths if own >= len(host.rows) - 1)
        sizes = self._shapes[shape]
        padded = torch.tensor([self._padding_row, 0])[:, None].repeat(1, sum(sizes))
        for own, *columns in zip(padded.split(sizes, dim=1), host.rows, host.inputs, strict=False):
            own[:, : len(columns[0])] = torch.stack(columns)
        entries, logits = self._entries[:, : sum(sizes)], self._draft_logits[: sum(sizes)]
        entries.copy_(upload(padded, torch.int64, entries.device))
        self._drafts[shape](*entries, logits)
        return entries, logits, sizes

    def logits(self, rows: Tensor) -> Tensor:
        """See ``EagerDecode.logits``; overwritten by the next step."""
        return self._feed(rows)[1][: rows.shape[0]]

    def _bucket(self, size: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= size)

    def _pad(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of a bucket, and room for their logits."""
        size, bucket = rows.shape[0], self._bucket(rows.shape[0])
        padded = self._rows[:bucket]
        padded[:size] = rows
        padded[size:].fill_(self._padding_row)
        return padded, self._logits[:bucket]

    def _feed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        padded, logits = self._pad(rows)
        self._forward[padded.shape[0]](padded, logits)
        return padded, logits

    def _sample(self, logits: Tensor, padded: Tensor, size: int, needs: SamplingNeeds) -> Sampled:
        """Of the first ``size`` rows of a bucket; overwritten by the next sample."""
        for sampler_needs, program in self._samplers[padded.shape[0]]:
            if covers(sampler_needs, needs):
                return program(logits, padded).each(lambda own: own[:size])
        return self._eager.draw(logits[:size], padded[:size], needs)

    def _draw_copied(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """``draw`` by a program, of logits that lie elsewhere; not overwritten."""
        padded, own = self._pad(rows)
        own[: rows.shape[0]] = logits
        return self._sample(own, padded, rows.shape[0], needs).each(Tensor.clone)

    def _run_forward(self, rows: Tensor, logits: Tensor) -> Tensor:
        return logits.copy_(self._eager.logits(rows))

    def _run_drafts(self, rows: Tensor, inputs: Tensor, logits: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return logits.copy_(self._eager.draft_logits(rows.split(sizes), inputs)[0])


def make_graph(
    parts: StepParts,
    maker: ProgramMaker | None = None,
    buckets: tuple[int, ...] | None = None,
    samplers: tuple[SamplingNeeds, ...] = SAMPLERS,
) -> DecodeStep:
    """CUDA graphs for every batch size; what no sampler covers is sampled eagerly. ``maker``: for tests on a CPU."""
    buckets = buckets or bucket_sizes(parts.config.max_rows)
    depths = depths_of(parts.config.num_speculative_tokens)
    samplers = samplers[:1] if parts.is_greedy else samplers
    return GraphDecode(parts, maker or Capturer(), buckets, samplers, depths)
