"""A prefill job: packed prompts through the model layer by layer, each layer chunk by chunk.

The invariant: how a job is cut into chunks, packed, or interleaved with decode steps never changes its result, because
a layer is compressed only when its last chunk has passed, from exact keys and exact queries. In the last
layer only the last token of each prompt goes on to the MLP: nothing reads the other outputs. ``model_runner.py`` owns
the jobs; ``cache/compress.py`` writes the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from snapstream.cache import layout
from snapstream.cache.compress import write_rows
from snapstream.cache.kv_cache import KVCache
from snapstream.kernels.prefill.choice import PrefillAttention
from snapstream.kernels.prefill.packages import PackedLens
from snapstream.layers.rope import CosSin
from snapstream.layers.upload import upload
from snapstream.models.decoder import Decoder
from snapstream.runner.rescoring import Rescorer
from snapstream.runner.staging import StagingPool
from snapstream.runner.stopwatch import Stopwatch
from snapstream.runner.views import Segment, StagingView
from snapstream.step import JobSpec, PrefillEntry


class PromptProgress:
    """What a job remembers of one prompt from unit to unit."""

    def __init__(self, entry: PrefillEntry, job_start: int, staging_start: int, device: torch.device) -> None:
        self.entry = entry
        self.prompt_len = len(entry.token_ids)
        self.job_start = job_start  # first token, counted in the job
        self.staging_start = staging_start  # first token, counted in the pool
        self.queries: Tensor | None = None  # [w, H, E] of the current layer; only if the prompt will be compressed
        self.compress_time = Stopwatch(device)
        self.kept: list[Tensor] = []  # per layer [G, C], if asked for

    def wants_queries(self) -> bool:
        """True when top-k slots will be filled by selection."""
        return len(layout.candidates(self.entry.budget, self.prompt_len)) > 0


class PrefillJob:
    """One ``JobSpec`` on the device. ``run_unit`` must be called for units 0, 1, 2, ... in order."""

    def __init__(
        self,
        spec: JobSpec,
        decoder: Decoder,
        cache: KVCache,
        staging: StagingPool,
        chunk_len: int,
        attention: PrefillAttention,
        rescorer: Rescorer | None = None,
    ) -> None:
        self.spec = spec
        self._attention = attention
        self._lens: dict[int, PackedLens] = {}  # by chunk; the same in every layer
        self._decoder, self._cache, self._staging = decoder, cache, staging
        self._chunk_len, self._rescorer = spec.chunk_len or chunk_len, rescorer
        self._num_chunks = spec.num_chunks(chunk_len)
        self._num_layers = decoder.config.num_layers
        self._next_unit = 0
        device = staging.hidden.device
        self.prompts: list[PromptProgress] = []
        ids: list[int] = []
        for entry in spec.entries:
            self.prompts.append(PromptProgress(entry, len(ids), spec.staging_start + len(ids), device))
            ids.extend(entry.token_ids)
        self.token_ids = upload(ids, torch.int64, device)  # [N]
        self._positions = torch.cat([_positions(entry, device) for entry in spec.entries])  # [N]
        self._seq_lens = torch.cat(
            [torch.full((len(entry.token_ids),), entry.next_position, device=device) for entry in spec.entries]
        )  # [N]; dynamic RoPE
        shape = (decoder.config.num_heads, decoder.config.head_dim)
        for prompt in self.prompts:
            if prompt.wants_queries():
                w = prompt.entry.selector.num_queries(prompt.prompt_len)
                prompt.queries = torch.empty((w, *shape), dtype=staging.k.dtype, device=device)
        self._needs_all_outputs = any(e.sampling.prompt_logprobs is not None for e in spec.entries)

    @property
    def hidden(self) -> Tensor:
        """Hidden states ``[N, D]`` of the packed prompts (the job's range of the pool)."""
        start = self.spec.staging_start
        return self._staging.hidden[start : start + self.spec.num_tokens]

    @property
    def is_done(self) -> bool:
        return self._next_unit == self._num_chunks * self._num_layers

    def last_hidden(self) -> Tensor:
        """Hidden states ``[prompts, D]`` after the last layer, of the last token of each prompt."""
        last = [prompt.job_start + prompt.prompt_len - 1 for prompt in self.prompts]
        return torch.cat([self.hidden[i : i + 1] for i in last])

    def run_unit(self, unit: int) -> None:
        """One chunk through one layer; after a layer's last chunk, compress it into the rows."""
        if unit != self._next_unit:
            raise RuntimeError(f"job {self.spec.job_id}: unit {unit} was planned, unit {self._next_unit} is next")
        layer, chunk = divmod(unit, self._num_chunks)
        start = chunk * self._chunk_len
        stop = min(start + self._chunk_len, self.spec.num_tokens)
        own = slice(start, stop)
        hidden = self._decoder.embed(self.token_ids[own]) if layer == 0 else self.hidden[own]  # [T, D]
        rope = self._decoder.rope(self._positions[own], self._seq_lens[own])
        segments = list(self._segments(start, stop))
        view = StagingView(
            self._staging.k, self._staging.v, segments, self._attention, self._packed_lens(chunk, segments)
        )
        if layer < self._num_layers - 1 or self._needs_all_outputs:
            attended = self._attend(layer, hidden, rope, segments, view)  # q, k and v are gone before the MLP runs
            self.hidden[own] = self._decoder.finish(layer, hidden, attended)
        else:
            self._finish_last_tokens(layer, start, hidden, rope, segments, view)
        if chunk == self._num_chunks - 1:
            self._compress(layer)
        self._next_unit += 1

    def _segments(self, start: int, stop: int) -> Iterable[Segment]:
        """Parts of the prompts that lie in tokens ``start .. stop - 1`` of the job."""
        for index, prompt in enumerate(self.prompts):
            low, high = max(start, prompt.job_start), min(stop, prompt.job_start + prompt.prompt_len)
            if low < high:
                yield Segment(index, low - start, high - low, low - prompt.job_start, prompt.staging_start)

    def _packed_lens(self, chunk: int, segments: list[Segment]) -> PackedLens | None:
        """Lengths of the prompts of a chunk, on the device; None where each is attended by a call of its own."""
        if len(segments) == 1 or self._attention.attend_packed is None:
            return None
        if chunk not in self._lens:
            queries, keys = [part.length for part in segments], [part.num_keys for part in segments]
            ends = upload(
                [list(accumulate(queries, initial=0)), list(accumulate(keys, initial=0))],
                torch.int32,
                self.hidden.device,
            )
            self._lens[chunk] = PackedLens(ends[0], ends[1], max(queries), max(keys))
        return self._lens[chunk]

    def _keep_queries(self, segments: list[Segment], q: Tensor) -> None:
        """Copy the last queries of prompts that lie in this chunk (those that vote may span chunks)."""
        for segment in segments:
            prompt = self.prompts[segment.entry]
            if prompt.queries is None:
                continue
            num_queries = prompt.queries.shape[0]
            offset = segment.prompt_start - (prompt.prompt_len - num_queries)  # of the segment's first among them
            skip = max(0, -offset)
            if skip < segment.length:
                own = q[segment.chunk_slice][skip:]
                prompt.queries[offset + skip : offset + segment.length] = own

    def _attend(self, layer: int, hidden: Tensor, rope: CosSin, segments: list[Segment], view: StagingView) -> Tensor:
        """First half of a layer for a chunk: ``hidden [T, D]`` to attended heads ``[T, H, E]``."""
        q, k, v = self._decoder.project(layer, hidden, rope)
        self._keep_queries(segments, q)
        return view.attend(layer, q, k, v)

    def _finish_last_tokens(
        self, layer: int, start: int, hidden: Tensor, rope: CosSin, segments: list[Segment], view: StagingView
    ) -> None:
        """Last layer: every token leaves its K and V, only the last of each prompt needs an output."""
        q, k, v = self._decoder.project(layer, hidden, rope)
        self._keep_queries(segments, q)
        view.stage(k, v)
        for segment in segments:
            prompt = self.prompts[segment.entry]
            if segment.prompt_start + segment.length == prompt.prompt_len:
                last = segment.chunk_start + segment.length - 1
                attended = view.attend_last(segment, q[last : last + 1])
                self.hidden[start + last] = self._decoder.finish(layer, hidden[last : last + 1], attended)[0]

    def _compress(self, layer: int) -> None:
        for prompt in self.prompts:
            prompt.compress_time.start()
            place = slice(prompt.staging_start, prompt.staging_start + prompt.prompt_len)
            keys, values = self._staging.k[:, place], self._staging.v[:, place]
            kept = write_rows(
                self._cache,
                layer,
                prompt.entry.rows,
                keys,
                values,
                prompt.queries,
                prompt.entry.budget,
                prompt.entry.selector,
            )
            if self._rescorer is not None:
                self._rescorer.keep_votes(layer, prompt.entry, prompt.queries, keys, kept)
            if kept is not None and prompt.entry.sampling.return_kept:
                prompt.kept.append(kept)
            prompt.compress_time.stop()


def _positions(entry: PrefillEntry, device: torch.device) -> Tensor:
    """Positions ``[n]`` of a prompt's tokens in their text."""
    if entry.positions is None:
        return torch.arange(len(entry.token_ids), device=device)
    return upload(entry.positions, torch.int64, device)
