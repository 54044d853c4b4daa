"""Masks of grammars in the sampler: only allowed tokens are drawn, and neighbours do not notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from snapstream.layers.sampler import adjusted, sample
from snapstream.layers.sampling_state import SamplingNeeds, SamplingState
from snapstream.request import Grammar, SamplingParams

VOCAB = 77  # not a multiple of 32
ANY = Grammar.json_object()


def words_of(*allowed: int) -> torch.Tensor:
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def state_of(*rows: SamplingParams) -> SamplingState:
    state = SamplingState(len(rows), VOCAB, "cpu")
    for row, sampling in enumerate(rows):
        state.set_row(row, sampling, seed=row, prompt_ids=(1,), stop_ids=(2,))
    return state


def test_needs() -> None:
    assert not SamplingNeeds.of([SamplingParams()]).grammar
    assert SamplingNeeds.of([SamplingParams(), SamplingParams(grammar=ANY)]).grammar


@pytest.mark.parametrize("allowed", [(0,), (31, 32), (76,), (3, 40, 64, 75)])
def test_allowed_tokens_only(allowed: tuple[int, ...]) -> None:
    sampling = SamplingParams(grammar=ANY, temperature=5.0, top_p=0.9, logit_bias={5: 100.0})
    state = state_of(sampling)
    rows, needs = torch.tensor([0]), SamplingNeeds.of([sampling])
    logits = torch.randn(1, VOCAB)
    state.allow([0], words_of(*allowed).unsqueeze(0))
    finite = adjusted(logits, state, rows, needs)[0].isfinite().nonzero().flatten().tolist()
    assert tuple(finite) == allowed
    drawn = {int(sample(torch.randn(1, VOCAB), state, rows, needs).token_ids) for _ in range(60)}
    assert drawn == set(allowed)


def test_a_stop_id_is_held_back_unless_the_grammar_allows_nothing_else() -> None:
    sampling, free = (SamplingParams(grammar=own, min_tokens=5, max_tokens=9, temperature=0.0) for own in (ANY, None))
    state = state_of(sampling, sampling, free)  # token 2 is their stop id
    state.allow([0, 1], torch.stack([words_of(2), words_of(2, 40)]))
    logits = torch.zeros(3, VOCAB).index_fill_(1, torch.tensor([2]), 9.0)
    logits[2, 3] = 1.0
    assert sample(logits, state, torch.arange(3), needs_of(sampling, free)).token_ids.tolist() == [2, 40, 3]


def test_greedy_takes_the_likeliest_that_is_allowed_and_logprobs_stay_raw() -> None:
    sampling = SamplingParams(grammar=ANY, temperature=0.0, logprobs=1)
    state = state_of(sampling)
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    state.allow([0], words_of(7, 33).unsqueeze(0))
    sampled = sample(logits, state, torch.tensor([0]), SamplingNeeds.of([sampling]))
    assert sampled.token_ids.tolist() == [33]
    assert sampled.logprobs is not None and sampled.top_ids is not None
    assert sampled.logprobs.item() == pytest.approx(logits.log_softmax(-1)[0, 33].item())
    assert sampled.top_ids[0, 0] == VOCAB - 1


def test_neighbours_and_later_owners_draw_as_without_grammars() -> None:
    plain, bound = SamplingParams(temperature=1.3, top_k=20), SamplingParams(grammar=ANY, temperature=1.0)
    logits = [torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(step)) for step in range(20)]
    alone, beside = state_of(plain, plain, plain), state_of(plain, bound, plain)
    beside.allow([1], words_of(4, 9).unsqueeze(0))
    needs = SamplingNeeds.of([plain, bound])
    rows = torch.arange(3)
    for step in logits:
        expected = sample(step, alone, rows, SamplingNeeds.of([plain])).token_ids
        drawn = sample(step, beside, rows, needs).token_ids
        assert drawn[[0, 2]].tolist() == expected[[0, 2]].tolist()
        assert drawn[1] in (4, 9)
    beside.set_row(1, plain, seed=1, prompt_ids=(1,), stop_ids=(2,))  # the row's next owner has no grammar
    alone.set_row(1, plain, seed=1, prompt_ids=(1,), stop_ids=(2,))
    for step in logits:
        assert sample(step, beside, rows, needs).token_ids[1] == sample(step, alone, rows, needs_of(plain)).token_ids[1]


def needs_of(*batch: SamplingParams) -> SamplingNeeds:
    return SamplingNeeds.of(batch)
