"""The draw of a looped step: a token for each row from its logits, by the engine's own team (``looped/sample.h``).

``layers/sampler.py`` is its definition, and says what a token depends on; this is the same in C++, row by row, over the
same state; log-probabilities equal the definition's to rounding. Next: ``decode_looped.py``.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from snapstream.kernels.cpu.looped.library import Draw, Sampling, Team, address
from snapstream.layers.sampler import Sampled
from snapstream.layers.sampling_state import SamplingNeeds, SamplingState
from snapstream.runner.rows import Rows


class NativeDraw:
    """``sampler.sample``, and with it ``Rows.advance``, in one call. Rows of a call are distinct."""

    def __init__(self, team: Team, state: SamplingState, rows: Rows, max_batch: int) -> None:
        """``state`` and ``rows`` lie on the CPU and keep their addresses."""
        self._team, self._kept = team, (state, rows)
        self._places = min(team.num_threads, max_batch)
        self._workspace = torch.empty(self._places * team.library.sampling_bytes(state.vocab_size), dtype=torch.uint8)
        counters = {name: getattr(rows, name) for name in ("last_token", "num_tokens", "next_position")}
        addresses = {name: address(tensor) for name, tensor in (state.tensors() | counters).items()}
        self._sampling = Sampling(
            vocab=state.vocab_size, num_stop_ids=state.stop_ids.shape[1], num_bias=state.bias_ids.shape[1], **addresses
        )

    @property
    def workspace_bytes(self) -> int:
        """Of all members of the team that draw."""
        return self._workspace.nbytes

    def draw(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """A token for each of ``rows [B]`` int64 from ``logits [B, V]`` fp32, of which there may be any number; they
        are fed it and go on.
        """
        return self._call(logits, rows, needs, feeds=True)

    def sample(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``OwnSampler``: rows are not fed what they draw."""
        return self._call(logits, rows, needs, feeds=False)

    def _call(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds, *, feeds: bool) -> Sampled:
        tokens, reported = torch.empty_like(rows), self._room(len(rows), needs)
        logprobs, top_ids, top_logprobs = reported or (None, None, None)
        call = Draw(
            rows=address(rows), logits=address(logits), tokens=address(tokens), logprobs=address(logprobs),
            top_ids=address(top_ids), top_logprobs=address(top_logprobs), batch=len(rows),
            num_top=0 if top_ids is None else top_ids.shape[1], bias=needs.bias, min_tokens=needs.min_tokens,
            penalties=needs.penalties, grammar=needs.grammar, feeds=feeds,
        )  # fmt: skip
        team = self._team
        team.library.draw(team.handle, byref(self._sampling), byref(call), address(self._workspace), self._places)
        return Sampled(tokens, logprobs, top_ids, top_logprobs)

    def _room(self, batch: int, needs: SamplingNeeds) -> tuple[Tensor, Tensor, Tensor] | None:
        """For log-probabilities, where any are asked for."""
        if needs.num_logprobs is None:
            return None
        num_top = min(needs.num_logprobs, self._sampling.vocab)
        return torch.empty(batch), torch.empty(batch, num_top, dtype=torch.int64), torch.empty(batch, num_top)
