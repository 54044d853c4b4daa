"""Rows are isolated, reused without a trace and sampled without the host; corner cases of single options."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from snapstream.exec.executors import SAMPLING_BYTES
from snapstream.exec.row_state import NewRow, SamplingNeeds, row_state_bytes
from snapstream.exec.sampling import NO_TOKEN, process_logits, sample
from snapstream.exec.sampling_state import SamplingState
from snapstream.types import NUM_STOP_IDS, SamplingParams

NUM_ROWS = 7
VOCAB = 1003  # a multiple of nothing that a kernel likes
PADDING = NUM_ROWS
EVERYTHING = SamplingParams(
    temperature=1.3,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    repetition_penalty=1.2,
    logit_bias={5: 3.0, 0: -1.0},
    min_tokens=6,
    logprobs=3,
)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "flat": SamplingParams(temperature=50.0),  # nearly every token equally likely: the total is near its bound
    "top_k": SamplingParams(top_k=9),
    "top_p": SamplingParams(top_p=0.9),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "everything": EVERYTHING,
}


def logits_at(step: int, seed: int = 0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * seed + step)) * 2  # [V]


def run(
    params: SamplingParams,
    row: int,
    others: dict[int, SamplingParams],
    num_padding: int = 0,
    num_steps: int = 12,
) -> list[int]:
    """Tokens of a request in ``row`` with seed 42, beside others and behind padding."""
    state = SamplingState(NUM_ROWS, VOCAB, "cpu")
    for other_row, other in others.items():
        state.set_rows([NewRow(other_row, other, other_row, [1, 2], [9])])
    state.set_rows([NewRow(row, params, 42, [3, 4, 4], [7])])
    rows = torch.tensor([PADDING] * num_padding + [*others, row])
    needs = SamplingNeeds.of([*others.values(), params])
    tokens = []
    for step in range(num_steps):
        beside = [logits_at(step, seed=other + 1) for other in [*range(num_padding), *others]]
        logits = torch.stack([*beside, logits_at(step)])  # [B, V]
        tokens.append(int(sample(logits, state, rows, needs).token_ids[-1]))
    return tokens


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
def test_a_row_never_notices_row_batch_or_neighbours(params: SamplingParams) -> None:
    alone = run(params, 0, {})
    assert run(params, 6, {}) == alone
    assert run(params, 2, {0: KINDS["plain"], 6: KINDS["greedy"]}) == alone
    assert run(params, 3, {row: EVERYTHING for row in (0, 1, 2, 4, 5, 6)}) == alone
    assert run(params, 1, {5: KINDS["top_p"]}, num_padding=5) == alone


def test_another_seed_gives_another_text() -> None:
    state = SamplingState(NUM_ROWS, VOCAB, "cpu")
    for row in range(NUM_ROWS):
        state.set_rows([NewRow(row, SamplingParams(), row, [], [])])
    tokens = sample(logits_at(0).expand(NUM_ROWS, -1), state, torch.arange(NUM_ROWS), SamplingNeeds(random=True))
    assert len(set(tokens.token_ids.tolist())) > NUM_ROWS // 2


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
def test_padding_leaves_other_rows_and_logits_alone(params: SamplingParams) -> None:
    state = SamplingState(NUM_ROWS, VOCAB, "cpu")
    for row in range(NUM_ROWS):
        state.set_rows([NewRow(row, params, row, [1, row], [2])])
    before = {name: value.clone() for name, value in state.tensors().items()}
    logits = torch.stack([logits_at(step) for step in range(5)])
    untouched = logits.clone()
    sampled = sample(logits, state, torch.tensor([PADDING, 4, PADDING, PADDING, 2]), SamplingNeeds.of([params]))
    assert torch.equal(logits, untouched)
    assert sampled.token_ids[0] == logits[0].argmax()  # the padding row is greedy and neutral
    idle = [0, 1, 3, 5, 6]
    for name, value in state.tensors().items():
        assert torch.equal(value[idle], before[name][idle]), name
    assert state.num_sampled[[2, 4]].tolist() == [1, 1]


@pytest.mark.parametrize("later", KINDS.values(), ids=KINDS.keys())
def test_a_reused_row_keeps_nothing_of_the_earlier_request(later: SamplingParams) -> None:
    fresh, used = SamplingState(2, VOCAB, "cpu"), SamplingState(2, VOCAB, "cpu")
    needs, rows = SamplingNeeds.of([EVERYTHING]), torch.tensor([1])
    for state in (fresh, used):  # row 0 makes both hold every tensor
        state.set_rows([NewRow(0, EVERYTHING, 0, [0], [0])])
    used.set_rows([NewRow(1, EVERYTHING, 5, list(range(100)), [1, 2, 3])])
    for step in range(8):
        sample(logits_at(step)[None], used, rows, needs)
    for state in (fresh, used):
        state.set_rows([NewRow(1, later, 9, [8], [4])])
    for step in range(8):
        logits = logits_at(step)[None]
        assert torch.equal(process_logits(logits, fresh, rows, needs), process_logits(logits, used, rows, needs))
        tokens = [sample(logits, state, rows, needs).token_ids for state in (fresh, used)]
        assert torch.equal(tokens[0], tokens[1])


def test_tensors_keep_their_address() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    state.set_rows([NewRow(0, EVERYTHING, 1, [1], [2])])
    addresses = {name: value.data_ptr() for name, value in state.tensors().items()}
    assert "output_counts" in addresses and "bias_ids" in addresses
    for row in (1, 0):
        state.set_rows([NewRow(row, EVERYTHING, 1, [1], [2])])
        sample(logits_at(0)[None], state, torch.tensor([row]), SamplingNeeds.of([EVERYTHING]))
    assert {name: value.data_ptr() for name, value in state.tensors().items()} == addresses


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
def test_sampling_never_asks_the_device(params: SamplingParams) -> None:
    """Tensors on the meta device have no values: whatever reads one on the host raises."""
    state = SamplingState(NUM_ROWS, VOCAB, "meta")
    state.set_rows([NewRow(1, params, 0, [1], [2])])
    rows = torch.zeros(3, dtype=torch.int64, device="meta")
    sampled = sample(torch.zeros(3, VOCAB, device="meta"), state, rows, SamplingNeeds.of([params]))
    assert sampled.token_ids.shape == (3,) and sampled.token_ids.dtype == torch.int64
    if params.logprobs is not None:
        assert sampled.top_ids is not None and sampled.top_ids.shape == (3, 5)  # 3 is rounded up


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
def test_a_single_possible_token_is_drawn(params: SamplingParams) -> None:
    state = SamplingState(1, VOCAB, "cpu")
    state.set_rows([NewRow(0, params, 3, [1], [2])])
    needs, logits = SamplingNeeds.of([params]), torch.full((1, VOCAB), -math.inf)
    logits[0, -1] = -7.0
    for _ in range(5):
        assert int(sample(logits, state, torch.tensor([0]), needs).token_ids) == VOCAB - 1


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), EVERYTHING])
@pytest.mark.parametrize("spoilt", [1, 6])
@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
def test_logits_that_are_not_finite_draw_nothing_and_leave_neighbours_alone(
    bad: float, spoilt: int, params: SamplingParams
) -> None:
    state = SamplingState(2, 12, "cpu")
    needs, good = SamplingNeeds.of([params]), torch.arange(12.0)
    for row in (0, 1):
        state.set_rows([NewRow(row, params, 1, [], [])])
    expected = sample(good[None], state, torch.tensor([1]), needs)
    for row in (0, 1):
        state.set_rows([NewRow(row, params, 1, [], [])])
    broken = good.clone()
    broken[2 : 2 + 2 * spoilt : 2] = bad
    if bad == -math.inf:  # one token that cannot be is no fault
        broken[:] = bad
    drawn = sample(torch.stack([broken, good]), state, torch.tensor([0, 1]), needs)
    assert drawn.token_ids.tolist() == [NO_TOKEN, int(expected.token_ids)]
    if drawn.logprobs is not None and expected.logprobs is not None:
        assert drawn.logprobs[1] == expected.logprobs[0]


def test_tokens_that_cannot_be_are_no_fault() -> None:
    state = SamplingState(1, 6, "cpu")
    state.set_rows([NewRow(0, SamplingParams(temperature=0.0), 1, [], [])])
    logits = torch.tensor([[-math.inf, -math.inf, -3.0, -math.inf, -5.0, -math.inf]])
    assert sample(logits, state, torch.tensor([0]), SamplingNeeds()).token_ids.tolist() == [2]


def test_needs_are_read_off_the_parameters() -> None:
    assert SamplingNeeds.of([]) == SamplingNeeds()
    assert SamplingNeeds.of([SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)]) == SamplingNeeds()
    assert SamplingNeeds.of([SamplingParams(temperature=0.0), SamplingParams()]) == SamplingNeeds(random=True)
    assert SamplingNeeds.of([SamplingParams(temperature=0.0, logprobs=n) for n in (0, 6)]).num_logprobs == 20
    everything = dict.fromkeys(("bias", "min_tokens", "penalties", "random", "top_k", "top_p", "min_p"), True)
    assert SamplingNeeds.of([EVERYTHING]) == SamplingNeeds(**everything, num_logprobs=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "params", "prompt", "stops", "message"),
    [
        (2, SamplingParams(), [], [], "row is 2; it must be from 0 to 1"),
        (-1, SamplingParams(), [], [], "row is -1"),
        (
            0,
            SamplingParams(logit_bias={10: 1.0}),
            [],
            [],
            "logit_bias token id is 10; it must be from 0 to 9",
        ),
        (0, SamplingParams(presence_penalty=1.0), [3, 11], [], "prompt token id is 11"),
        (0, SamplingParams(), [], [10], "stop id is 10"),
        (0, SamplingParams(), [], range(NUM_STOP_IDS + 1), f"{NUM_STOP_IDS + 1} stop ids given"),
    ],
)
def test_wrong_rows_are_refused_before_anything_is_written(
    row: int, params: SamplingParams, prompt: list[int], stops: list[int], message: str
) -> None:
    state = SamplingState(2, 10, "cpu")
    before = {name: value.clone() for name, value in state.tensors().items()}
    with pytest.raises(ValueError, match=message):
        state.set_rows([NewRow(row, params, 5, prompt, stops)])
    after = state.tensors()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_an_oversized_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 1048577"):
        SamplingState(1, 2**20 + 1, "cpu")


@pytest.mark.parametrize("vocab_size", [VOCAB, 32_000])
def test_the_state_is_as_large_as_the_plan_says(vocab_size: int) -> None:
    state = SamplingState(NUM_ROWS, vocab_size, "cpu")
    assert state.num_bytes == (NUM_ROWS + 1) * row_state_bytes(vocab_size)
    before = state.num_bytes
    state.set_rows([NewRow(1, EVERYTHING, 0, [1, 2], [7])])
    state.allow([1], torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32))
    assert state.num_bytes == before  # nothing is made for the first request that needs it


def test_a_step_allocates_what_the_plan_says_and_no_more() -> None:
    """Peak of all that sampling with every option allocates, beside the logits, per row and token."""
    vocab_size, rows = 20_000, torch.arange(NUM_ROWS)
    state = SamplingState(NUM_ROWS, vocab_size, "cpu")
    logits = torch.randn(NUM_ROWS, vocab_size)
    needs = SamplingNeeds(
        bias=True, min_tokens=True, penalties=True, grammar=True, random=True, top_k=True, top_p=True, min_p=True,
        num_logprobs=20,
    )  # fmt: skip
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        sample(logits, state, rows, needs)
    steps = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    sizes = itertools.accumulate(event.nbytes() for event in sorted(steps, key=lambda event: event.start_ns()))
    peak = logits.element_size() + max(sizes) / logits.numel()
    assert 0.9 * SAMPLING_BYTES < peak <= SAMPLING_BYTES
