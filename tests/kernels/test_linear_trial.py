"""The choice between ways to multiply: by time, with a margin for F.linear, once per process. Times are injected."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels.bound import bind
from snapstream.kernels.cpu import native, trial
from snapstream.kernels.cpu.linear import BUCKETS, ChosenLinear, ways_for
from snapstream.kernels.cpu.trial import Known, agreed, choose, pieces_of

LAYERS = [torch.ones(128, 64) for _ in range(3)]


class Times:
    """A timer that reads seconds from a table and counts its calls."""

    def __init__(self, table: Mapping[str, float], fails: str | None = None) -> None:
        self.table, self.fails = table, fails
        self.calls: list[tuple[str, int]] = []

    def __call__(self, way: str, x: Tensor, weight: Tensor) -> float:
        if way == self.fails:
            raise ValueError("the compiler failed")
        self.calls.append((way, x.shape[0]))
        return self.table.get(way, 1.0)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_compiler", lambda: "c++")


@pytest.mark.parametrize(
    ("table", "way"),
    [
        ({"torch": 1.0, "left": 0.5, "blocks": 0.7, "native": 0.6}, "left"),
        ({"torch": 1.0, "left": 1.5, "blocks": 0.85, "native": 0.8}, "native"),
        ({"torch": 1.0, "left": 0.95, "blocks": 0.92, "native": 0.91}, "torch"),  # not by a tenth
    ],
)
def test_the_fastest_by_a_tenth_is_chosen(compiler: None, table: Mapping[str, float], way: str) -> None:
    choice = choose(LAYERS, 4, Times(table), {})
    assert choice == {(128, 64, tokens): way for tokens in (1, 2, 4)}


def test_the_best_turn_counts(compiler: None) -> None:
    """A way that was disturbed in all turns but one is judged by that one."""
    turns = iter(range(10**6))

    def disturbed(way: str, x: Tensor, weight: Tensor) -> float:
        turn = next(turns)
        return 1.0 if way != "left" else 0.1 if turn == 13 else 100.0  # 4 ways warm up, then "left" is every fourth

    assert set(choose(LAYERS, 1, disturbed, {}).values()) == {"left"}


def test_a_choice_that_takes_long_ends_early(compiler: None) -> None:
    quick, slow = Times({}), Times(dict.fromkeys(("torch", "left", "blocks", "native"), 10.0))
    for timer in (quick, slow):
        choose(LAYERS, 1, timer, {})
    assert len(slow.calls) == len(quick.calls)  # a table of whole seconds is long already
    tiny = Times(dict.fromkeys(("torch", "left", "blocks", "native"), 1e-5))
    choose(LAYERS, 1, tiny, {})
    assert len(tiny.calls) > 2 * len(slow.calls)


def test_what_was_measured_is_not_measured_again(compiler: None) -> None:
    known: Known = {}
    first = choose(LAYERS, 2, Times({"left": 0.1}), known)
    again = Times({"blocks": 0.1})
    assert choose([torch.zeros(128, 64)], 2, again, known) == first and not again.calls
    more = choose(LAYERS, 8, again, known)
    assert {tokens for _, tokens in again.calls} == {4, 8}
    assert more == first | {(128, 64, 4): "blocks", (128, 64, 8): "blocks"}


def test_a_way_that_fails_is_left_out(compiler: None) -> None:
    assert set(choose(LAYERS, 1, Times({"native": 0.0}, fails="native"), {}).values()) == {"torch"}


def test_without_a_compiler_our_own_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    assert "native" not in ways_for(128, 64, 1)
    timer = Times({"native": 0.0})
    assert set(choose(LAYERS, 1, timer, {}).values()) == {"torch"}
    assert {way for way, _ in timer.calls} == {"torch", "left", "blocks"}


def test_only_what_a_way_takes_is_tried(compiler: None) -> None:
    assert ways_for(130, 64, 1) == ("torch", "left")
    assert "native" in ways_for(128, 64, 32) and "native" not in ways_for(128, 64, 64)
    assert "native" not in ways_for(128, 20, 1)


def test_other_weights_are_left_alone() -> None:
    timer = Times({})
    assert choose([torch.ones(64, 64).bfloat16(), torch.ones(64, 128).t()], 64, timer, {}) == {}
    assert not timer.calls


def test_tokens_have_a_limit(compiler: None) -> None:
    choice = choose(LAYERS, 10**6, Times({"left": 0.1}), {})
    assert {tokens for _, _, tokens in choice} == set(BUCKETS)


def test_pieces_are_of_all_layers_in_turn_and_never_all_of_a_vocabulary() -> None:
    layers = [torch.full((256, 8192), float(i)) for i in range(3)]  # 8 MiB each
    pieces = pieces_of(layers)
    assert [piece[0, 0].item() for piece in pieces[:4]] == [0.0, 1.0, 2.0, 0.0]
    assert len(pieces) == 12 and all(piece.nbytes == 2 * 2**20 for piece in pieces)
    vocabulary = torch.empty(2**17, 2**13, device="meta")  # 4 GiB
    assert sum(piece.nbytes for piece in pieces_of([vocabulary])) < 2**29
    assert [piece.shape for piece in pieces_of([torch.ones(10, 7)])] == [(10, 7)]


def test_tuned_kernels_multiply_as_before() -> None:
    """The real trial, whatever it finds here."""
    torch.manual_seed(0)
    weight = torch.randn(128, 64)
    kernels = bind("cpu").tuned([weight], 4)
    assert isinstance(kernels.linear, ChosenLinear) and set(kernels.linear.choice) == {(128, 64, n) for n in (1, 2, 4)}
    assert set(trial.known()) >= {(shape, torch.get_num_threads()) for shape in kernels.linear.choice}
    for tokens in (1, 3, 4, 70):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(kernels.linear(x, weight, None), F.linear(x, weight), atol=1e-4, rtol=1e-5)
    for version in ("torch", "compiled_cpu"):
        other = bind("cpu", version)
        assert other.tuned([weight], 4) is other


def test_ranks_agree_on_the_way_that_most_chose() -> None:
    """Votes of three ranks are summed; of equal ones the first in the order of the ways counts, on every rank."""
    shapes = [(128, 64, 1), (128, 64, 2), (128, 64, 4)]
    chosen = ("native", "left", "torch"), ("native", "blocks", "torch"), ("torch", "native", "left")
    ranks = [dict(zip(shapes, ways, strict=True)) for ways in chosen]
    asked: list[Tensor] = []

    def alone(votes: Tensor) -> Tensor:
        asked.append(votes.clone())
        return votes

    for choice in ranks:
        assert agreed(choice, alone) == choice
    for choice in ranks:
        found = agreed(choice, lambda _: torch.stack(asked).sum(0))
        assert found == dict(zip(shapes, ("native", "blocks", "torch"), strict=True))
    assert agreed({}, lambda _: pytest.fail("nothing to agree on")) == {}
