"""Thresholds and top-n over integers, and log-probabilities, against sorted lists."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.layers.logit_order import falling_keys, threshold_key, top_tokens
from snapstream.layers.logprobs import prompt_logprobs, token_logprobs

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=True)
ROWS = st.lists(FLOATS | st.sampled_from([0.0, -0.0, 1.0, -math.inf]), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_keys_fall_as_logits_rise(row: list[float]) -> None:
    keys = falling_keys(torch.tensor([row]))[0].tolist()
    for i, left in enumerate(row):
        for j, right in enumerate(row):
            assert (keys[i] < keys[j]) == (left > right)
            assert (keys[i] == keys[j]) == (left == right)


@settings(max_examples=300, deadline=None)
@given(row=ROWS, data=st.data())
def test_threshold_key_equals_a_walk_over_the_sorted_row(row: list[float], data: st.DataObject) -> None:
    masses = st.lists(st.integers(0, 2**42), min_size=len(row), max_size=len(row))
    mass = data.draw(st.just([1] * len(row)) | masses)
    limit = data.draw(st.integers(1, sum(mass) + 1))
    keys = falling_keys(torch.tensor([row]))
    bound = int(threshold_key(keys, torch.tensor([mass]), torch.tensor([[limit]])))
    reached, expected = 0, -math.inf
    for index in sorted(range(len(row)), key=lambda i: -row[i]):
        reached += mass[index]
        if reached >= limit:
            expected = row[index]
            break
    assert [key <= bound for key in keys[0].tolist()] == [value >= expected for value in row]


@settings(max_examples=200, deadline=None)
@given(row=ROWS, num_top=st.integers(1, 35))
def test_top_tokens_are_stable(row: list[float], num_top: int) -> None:
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num_top]
    assert top_tokens(torch.tensor([row]), num_top)[0].tolist() == expected


def test_logprobs_are_the_log_softmax_of_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, -math.inf, 0.0, 5.0]])
    found = token_logprobs(logits, torch.tensor([3, 0]), 3)
    assert found.top_ids.tolist() == [[1, 2, 0], [3, 0, 2]]
    for i, (row, token) in enumerate(zip(logits.tolist(), (3, 0), strict=True)):
        normaliser = math.log(math.fsum(math.exp(value) for value in row))
        assert found.logprobs[i].item() == pytest.approx(row[token] - normaliser, abs=1e-6)
        tops = [row[token] - normaliser for token in found.top_ids[i].tolist()]
        assert found.top_logprobs[i].tolist() == pytest.approx(tops, abs=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 130])
@pytest.mark.parametrize("num_top", [0, 4, 99])
def test_prompt_logprobs_do_not_notice_their_slices(num_tokens: int, num_top: int) -> None:
    logits = torch.randn(num_tokens, 17, generator=torch.Generator().manual_seed(num_tokens))
    next_ids = torch.arange(num_tokens) % 17
    found = prompt_logprobs(logits, next_ids, num_top)
    assert found.top_ids.shape == found.top_logprobs.shape == (num_tokens, min(num_top, 17))
    expected = logits.log_softmax(-1)
    assert torch.allclose(found.logprobs, expected[torch.arange(num_tokens), next_ids])
    ranked = expected.sort(dim=-1, descending=True)
    assert torch.equal(found.top_ids, ranked.indices[:, :num_top])
    assert torch.allclose(found.top_logprobs, ranked.values[:, :num_top])
