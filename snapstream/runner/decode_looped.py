"""The decode step as one native call: from row indices to logits, and for greedy rows to the next tokens.

The library (``kernels/cpu/looped``) gets the addresses of weights, rows and state once. A step hands it row indices;
where sampling needs more than the likeliest token, a second call draws from the logits (``looped_draw.py``). Ranks of
one machine call it together, each over its share, and meet within it in memory that all of them see. Invariant: a row's
logits are the same bits alone and in any batch and on every rank, and equal to eager's but for rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.distributed.group import Group
from snapstream.kernels.cpu.looped.library import (
    FORMATS,
    Library,
    Model,
    NativeEngine,
    Ranks,
    Rows,
    Step,
    Team,
    address,
    shared_bytes,
    workspace_floats,
)
from snapstream.layers.sampler import Sampled
from snapstream.layers.sampling_state import SamplingNeeds
from snapstream.models.looping import problem_of_looped_ranks, problem_of_looping
from snapstream.runner.decode_step import StepParts
from snapstream.runner.looped_draw import NativeDraw
from snapstream.runner.looped_model import model_of, panels_of

_GREEDY = SamplingNeeds()


class LoopedDecode:
    """A ``DecodeStep`` on a CPU. ValueError for a model or rows that the library cannot run.

    A step is a RuntimeError where another rank has gone.
    """

    def __init__(self, parts: StepParts, num_threads: int | None = None) -> None:
        """``num_threads`` is torch's unless given."""
        config = parts.config
        problem = problem_of_looping(parts.decoder.config, dtype=config.dtype, device=config.device)
        problem = problem or problem_of_looped_ranks(config.parallel)
        if problem is not None:
            raise ValueError(f"executor 'looped': {problem}")
        self._max_rows, vocab_size = parts.config.max_rows, parts.decoder.config.vocab_size
        library = panels_of(parts.decoder, "o").library
        self.team = Team(library, num_threads or torch.get_num_threads())
        model, rows = model_of(parts.decoder), _rows(parts)
        floats = workspace_floats(self.team, model, rows, self._max_rows)
        ranks, shared = None, None
        if parts.decoder.group.size > 1:
            ranks, shared = _meeting(parts.decoder.group, library, model, self._max_rows)
        self._engine = NativeEngine(self.team, model, rows, self._max_rows, torch.empty(floats), ranks)
        self.shared = shared  # where ranks meet (ranks.h); None for one
        self._kept = parts, model, rows  # whose addresses the library has
        # [max_rows, V]; of several ranks one for all: each writes the scores of its own tokens.
        num_logits = self._max_rows * vocab_size
        logits = torch.empty(num_logits) if shared is None else shared[-4 * num_logits :].view(torch.float32)
        self._logits = logits.view(self._max_rows, vocab_size)
        self._sampler = NativeDraw(self.team, parts.sampling, parts.rows, self._max_rows)
        self._fed: Tensor | None = None  # whose address the step has
        self._step = Step(logits=address(self._logits), first=0, last=self.num_stages)

    @property
    def num_stages(self) -> int:
        """Of a step: parts between two barriers."""
        return self._engine.num_stages

    @property
    def workspace_bytes(self) -> int:
        """What stages hand each other, and what draws need."""
        return self._engine.workspace_bytes + self._sampler.workspace_bytes

    def warm_up(self, progress: bool) -> None:
        """Nothing is left to be made."""

    def close(self) -> None:
        """End the threads."""
        self.team.close()

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``EagerDecode.step``; ``rows [B]`` int64, distinct, B at most ``max_rows``."""
        if needs != _GREEDY:
            return self._sampler.draw(self.logits(rows), rows, needs)
        tokens = torch.empty_like(rows)
        self._run(rows, tokens)
        return Sampled(tokens)

    def sample(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``OwnSampler``."""
        return self._sampler.sample(logits, rows.contiguous(), needs)

    def logits(self, rows: Tensor) -> Tensor:
        """See ``EagerDecode.logits``; overwritten by the next step."""
        self._run(rows, None)
        return self._logits[: len(rows)]

    def run_stages(self, rows: Tensor, first: int, last: int, touch_bytes: int) -> None:
        """Stages ``first .. last - 1`` of a step that draws nothing, for benchmarks.

        ``touch_bytes`` of the next stage's weights are asked for by each thread before it waits for the others.
        """
        step = Step(
            rows=address(rows), logits=address(self._logits), batch=len(rows), first=first, last=last,
            touch_bytes=touch_bytes,
        )  # fmt: skip
        self._engine.run(step)

    def _run(self, rows: Tensor, tokens: Tensor | None) -> None:
        step = self._step
        if rows is not self._fed:  # most steps feed the rows of the one before
            if len(rows) > self._max_rows:
                raise ValueError(f"{len(rows)} rows in a step; this engine has {self._max_rows}")
            step.rows, step.batch, self._fed = address(rows), len(rows), rows
        step.tokens = address(tokens)
        self._engine.run(step)


def _meeting(group: Group, library: Library, model: Model, max_rows: int) -> tuple[Ranks, Tensor]:
    """This rank among all, and the memory in which they meet; a collective."""
    num_bytes = shared_bytes(library, model, group.size, max_rows)
    shared = group.share_memory(num_bytes)
    waits = shared is not None
    if shared is None:
        shared = torch.zeros(num_bytes, dtype=torch.uint8)
    return Ranks(shared=address(shared), rank=group.rank, size=group.size, waits=waits), shared


def _rows(parts: StepParts) -> Rows:
    cache, state = parts.cache, parts.rows
    queries = None if parts.queries is None else parts.queries.buffer
    heads, slots = cache.heads, None if cache.heads is None else cache.heads.slots
    return Rows(
        last_token=address(state.last_token), num_tokens=address(state.num_tokens),
        next_position=address(state.next_position), ring_start=address(state.ring_start),
        capacity=address(state.capacity), num_sampled=address(parts.sampling.num_sampled), keys=address(cache.k),
        values=None if cache.spec.values_are_keys else address(cache.v),
        key_scales=address(cache.k_scale), value_scales=address(cache.v_scale),
        queries=address(queries), kept_queries=0 if queries is None else queries.shape[2],
        head_starts=address(None if heads is None else heads.starts),
        head_ends=address(None if heads is None else heads.ends),
        head_behind=address(None if heads is None else heads.behind),
        row_slots=0 if slots is None else slots.row_slots, ring=parts.config.budget.num_recent,
        num_rows=cache.num_rows + 1, slots=cache.capacity if slots is None else slots.widest.capacity,
        format=FORMATS[str(cache.k.dtype).removeprefix("torch.")],
    )  # fmt: skip
