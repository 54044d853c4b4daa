"""The rows that follow a grammar: their matchers, and the masks that the sampler reads.

        step t draws --> tokens read --> matchers go on --> masks --> step t + 1 draws

Invariant: before a row draws, its mask reflects every token that it drew before. A step therefore waits for the tokens
of the one before it, but only if a row with a grammar drew in that; a batch without grammars pays nothing.
``grammar.py`` compiles and matches; ``layers/sampling_state.py`` holds the masks on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from snapstream.grammar import GrammarCompiler, Matcher
from snapstream.layers.sampler import NO_TOKEN
from snapstream.layers.sampling_state import SamplingState
from snapstream.runner.results import HostCopy, SubmittedStep
from snapstream.step import PrefillEntry


@dataclass(slots=True, eq=False)
class _Drawn:
    """Tokens on their way to the matchers."""

    tokens: HostCopy
    places: list[tuple[int, int]]  # index in the batch, row
    ends: dict[int, str] = field(default_factory=dict)


class RowGrammars:
    """Matchers by row. Without a compiler, entries with a grammar must not come."""

    def __init__(self, compiler: GrammarCompiler | None, state: SamplingState) -> None:
        self._compiler = compiler
        self._state = state
        self._matchers: dict[int, Matcher] = {}
        self._faults: dict[int, str] = {}  # rows that have a grammar and no matcher
        self._drawn: list[_Drawn] = []

    def prepare(self, entry: PrefillEntry) -> None:
        """Compile while the prompt is prefilled."""
        if entry.sampling.grammar is not None and self._compiler is not None:
            self._compiler.prepare(entry.sampling.grammar)

    def admit(self, entry: PrefillEntry) -> None:
        """Give the entry's rows, whose sampling state was just reset, to their new owner."""
        for row in entry.rows:
            self._matchers.pop(row, None)
            self._faults.pop(row, None)
        if entry.sampling.grammar is None:
            return
        if self._compiler is None:
            raise RuntimeError(f"request {entry.request_id} has a grammar, and this runner has no compiler")
        for row in entry.rows:
            try:
                self._matchers[row] = self._compiler.matcher(entry.sampling.grammar)
            except ValueError as error:  # it compiled when it was submitted
                self._faults[row] = str(error)
        self._allow([row for row in entry.rows if row in self._matchers])
        self._allow_all([row for row in entry.rows if row in self._faults])

    def follow(self, rows: Sequence[int], tokens: HostCopy, step: SubmittedStep) -> None:
        """Tokens were drawn for ``rows``; ``step`` will tell whose grammar ends with them."""
        if not self._matchers and not self._faults:
            return
        followed = self._matchers.keys() | self._faults.keys()
        places = [(index, row) for index, row in enumerate(rows) if row in followed]
        if places:
            drawn = _Drawn(tokens, places)
            self._drawn.append(drawn)
            step.add_grammar_ends(lambda: self._ends(drawn))

    def catch_up(self) -> None:
        """Read what was drawn, let the matchers go on, and set the masks of the next draw."""
        if self._drawn:
            self._catch_up()

    @torch.inference_mode()
    def _catch_up(self) -> None:
        waiting, self._drawn = self._drawn, []
        for drawn in waiting:
            ids = drawn.tokens.token_ids()
            drawn.ends.update((row, self._faults.pop(row)) for _, row in drawn.places if row in self._faults)
            for index, row in drawn.places:
                if ids[index] == NO_TOKEN:  # the request ends, whatever its grammar says
                    self._matchers.pop(row, None)
            places = [(index, row) for index, row in drawn.places if row in self._matchers]
            for index, row in places:
                self._matchers[row].take(ids[index])
            drawn.ends.update(self._allow([row for _, row in places]))

    def _ends(self, drawn: _Drawn) -> dict[int, str]:
        if drawn in self._drawn:
            self.catch_up()
        return drawn.ends

    def _allow(self, rows: list[int]) -> dict[int, str]:
        """Set the masks of rows; those that nothing can follow lose their matcher, and are returned with the reason."""
        if not rows:
            return {}
        assert self._compiler is not None
        words = np.empty((len(rows), self._compiler.num_words), dtype=np.int32)
        ends: dict[int, str] = {}
        for row, own in zip(rows, words, strict=True):
            if not self._matchers[row].fill(own):
                ends[row] = self._matchers.pop(row).fault
                own.fill(-1)  # what it still draws is thrown away
        num_words = -(-self._state.vocab_size // 32)
        self._state.allow(rows, torch.from_numpy(words)[:, :num_words])
        return ends

    def _allow_all(self, rows: list[int]) -> None:
        if rows:
            self._state.allow(rows, torch.full((len(rows), 1), -1, dtype=torch.int32))
