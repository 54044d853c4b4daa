"""The same engine on one device and over several ranks, and what equal answers are."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from snapstream import LLM, SamplingParams
from snapstream.types import RequestOutput


@dataclass(frozen=True)
class Pair:
    """The same engine on one device, and over two ranks."""

    one: LLM
    two: LLM

    def same(self, prompts: list[Any], params: SamplingParams, **row: Any) -> list[RequestOutput]:
        """Answers of both, which must be equal but for times and the last bits of log-probabilities."""
        wanted, found = (llm.generate(prompts, params, **row) for llm in (self.one, self.two))
        for one, two in zip(wanted, found, strict=True):
            assert_same(one, two)
        return found

    def stored_tokens(self) -> tuple[int, ...]:
        """Tokens that came out of the prefix stores of both so far."""
        stats = [llm.engine.prefix_stats for llm in (self.one, self.two)]
        return tuple(own.hits for own in stats if own is not None)


def assert_same(one: RequestOutput, two: RequestOutput) -> None:
    for ours, theirs in zip(one.samples, two.samples, strict=True):
        assert theirs.token_ids == ours.token_ids
        assert (theirs.text, theirs.finish_reason) == (ours.text, ours.finish_reason)
        assert_close(ours.logprobs, theirs.logprobs)
    assert_close(one.prompt_logprobs, two.prompt_logprobs)
    assert one.compression is not None and two.compression is not None
    for name in ("prompt_tokens", "kept_tokens", "evicted_tokens", "row_bytes", "full_bytes", "ring_tokens",
                 "kept_positions", "kept_bitmap"):  # fmt: skip
        assert getattr(two.compression, name) == getattr(one.compression, name), name


def assert_close(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    for one, two in zip(ours or (), theirs or (), strict=True):
        if one is None:
            assert two is None
            continue
        assert two.token_id == one.token_id and [i for i, _ in two.top] == [i for i, _ in one.top]
        assert two.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert [p for _, p in two.top] == pytest.approx([p for _, p in one.top], abs=1e-4)


def ids(count: int, seed: int = 1, vocab: int = 259) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(count)]
