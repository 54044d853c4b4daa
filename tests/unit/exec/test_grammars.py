"""Rows and their grammars: whom a mask reaches, what is said of an end, and faults of single rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget, make_selector
from snapstream.exec.results import Finished, RowGrammars, SampledCopy, SubmittedStep, Verified, last_entries
from snapstream.exec.row_state import NewRow
from snapstream.exec.sampling import Sampled
from snapstream.exec.sampling_state import SamplingState
from snapstream.grammar import GrammarCompiler
from snapstream.step import PrefillEntry
from snapstream.types import Grammar, SamplingParams

VOCAB, END = 4608, 2
ALL = -1


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: (TINY_MODEL / "tokenizer.json").read_text(encoding="utf-8"), VOCAB, (END,))


def entry_of(rows: tuple[int, ...], pattern: str | None) -> PrefillEntry:
    sampling = SamplingParams(grammar=Grammar.regex(pattern) if pattern else None, n=len(rows))
    return PrefillEntry(
        request_id=f"r{rows}", token_ids=(9,), rows=rows, seeds=(0,) * len(rows), sampling=sampling,
        budget=KVBudget.full(8), selector=make_selector(),
    )  # fmt: skip


def draw(grammars: RowGrammars, rows: list[int], tokens: list[int], step_id: int = 0) -> SubmittedStep:
    step = SubmittedStep(step_id)
    grammars.follow(rows, SampledCopy(Sampled(torch.tensor(tokens))), step)
    return step


def num_allowed(state: SamplingState, row: int) -> int:
    assert state.allowed is not None
    return sum(int(word & 0xFFFFFFFF).bit_count() for word in state.allowed[row].tolist())


def id_of(compiler: GrammarCompiler, text: str) -> int:
    (token,) = compiler.load().tokenize_str(text)
    return token


def test_masks_follow_the_tokens_of_their_own_row(compiler: GrammarCompiler) -> None:
    state = SamplingState(4, VOCAB, "cpu")
    grammars = RowGrammars(compiler, state)
    a, b = id_of(compiler, "a"), id_of(compiler, "b")
    grammars.admit(entry_of((1, 3), "a[bc]|b[ac]"))
    grammars.admit(entry_of((0,), None))
    begin = num_allowed(state, 1)
    assert begin == num_allowed(state, 3) >= 2
    assert state.allowed is not None and (state.allowed[[0, 2, 4]] == ALL).all()
    step = draw(grammars, [0, 1, 3], [7, a, b])
    grammars.catch_up()
    assert num_allowed(state, 1) == num_allowed(state, 3) == 2
    assert not torch.equal(state.allowed[1], state.allowed[3]) and (state.allowed[0] == ALL).all()
    assert step.result().grammar_ends == {}
    last = draw(grammars, [1, 3], [b, a], 1)
    assert last.result().grammar_ends == {1: "", 3: ""}  # read before another step came: it catches up itself
    assert (state.allowed == ALL).all()
    assert draw(grammars, [1, 3], [5, 5], 2).result().grammar_ends == {}  # surplus tokens


def test_masks_follow_accepted_drafts_within_a_step(compiler: GrammarCompiler) -> None:
    """Rows advance between turns by all tokens but their last, which the next step takes; ends are of the last."""
    state = SamplingState(4, VOCAB, "cpu")
    grammars = RowGrammars(compiler, state)
    a, b, c = (id_of(compiler, letter) for letter in "abc")
    for row, pattern in ((0, "[ab]cb"), (1, None), (2, "[ab]c"), (3, "[ab]{3}")):
        grammars.admit(entry_of((row,), pattern))
    assert [grammars.holds(row) for row in range(4)] == [True, False, True, True]
    assert all(grammars.forced(row, 8) == [] for row in range(4))  # a choice, or no grammar
    assert grammars.possible(0, [a, c, a]) == [a, c] and grammars.possible(1, [a, c, a]) == [a, c, a]
    assert grammars.possible(2, [c]) == [] and grammars.possible(3, []) == []
    assert grammars.go_on([0, 1, 2], [a, 7, b]) == [True, True, True]
    assert grammars.forced(0, 8) == [c, b] and grammars.forced(0, 1) == [c] and grammars.forced(0, 0) == []
    assert num_allowed(state, 0) == num_allowed(state, 2) == 1 and num_allowed(state, 3) > 1
    assert state.allowed is not None and (state.allowed[1] == ALL).all()
    assert grammars.go_on([0, 2], [c, c]) == [True, False]
    assert not grammars.holds(2) and (state.allowed[2] == ALL).all()
    verified = [Verified(3, 3), Verified(2, 1), Verified(2, 2), Verified(1, 0)]
    rows = last_entries((0, 1, 2, 3), verified)
    assert rows == [-1, -1, 0, -1, 1, -1, 2, 3]
    step = draw(grammars, rows, [a, c, b, 7, 7, b, c, a])
    assert step.result().grammar_ends == {0: "", 2: ""}
    assert num_allowed(state, 3) >= 2 and grammars.holds(3) and not grammars.holds(0)


def test_forced_tokens_are_those_of_the_model(compiler: GrammarCompiler) -> None:
    """A tokenizer may have more tokens than the model."""
    token = id_of(compiler, "z")
    for size in (token, VOCAB):
        grammars = RowGrammars(compiler, SamplingState(1, size, "cpu"))
        grammars.admit(entry_of((0,), "zz[ab]"))
        assert grammars.forced(0, 8)[:1] == ([token] if size > token else [])


def test_a_row_given_away_forgets_its_grammar(compiler: GrammarCompiler) -> None:
    state = SamplingState(1, VOCAB, "cpu")
    grammars = RowGrammars(compiler, state)
    grammars.admit(entry_of((0,), "abc"))
    state.set_rows([NewRow(0, SamplingParams(), seed=0, prompt_ids=(), stop_ids=())])
    grammars.admit(entry_of((0,), None))
    assert state.allowed is not None and (state.allowed == ALL).all()
    assert draw(grammars, [0], [5]).result().grammar_ends == {}


def test_a_token_against_the_grammar_ends_its_row_alone(compiler: GrammarCompiler) -> None:
    grammars = RowGrammars(compiler, SamplingState(2, VOCAB, "cpu"))
    grammars.admit(entry_of((0, 1), "[ab]{9}"))
    ends = draw(grammars, [0, 1], [id_of(compiler, "x"), id_of(compiler, "a")]).result().grammar_ends
    assert set(ends) == {0} and ends[0].startswith("grammar: ")


def test_a_grammar_that_does_not_compile_any_more() -> None:
    def matcher(_: Any) -> None:
        raise ValueError("grammar: gone")

    broken: Any = SimpleNamespace(matcher=matcher, prepare=lambda grammar: None)
    grammars = RowGrammars(broken, SamplingState(2, VOCAB, "cpu"))
    grammars.admit(entry_of((0,), "a"))
    assert draw(grammars, [0, 1], [5, 5]).result().grammar_ends == {0: "grammar: gone"}
    assert draw(grammars, [0, 1], [5, 5]).result().grammar_ends == {}


def test_without_a_compiler_grammars_must_not_come() -> None:
    grammars = RowGrammars(None, SamplingState(1, VOCAB, "cpu"))
    grammars.admit(entry_of((0,), None))
    with pytest.raises(RuntimeError, match="no compiler"):
        grammars.admit(entry_of((0,), "a"))


def test_sent_prompts_are_read_behind_their_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """They sample no token, whose copy would be waited for, and their figures need the device to be done."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    def read(tokens: Any) -> Any:
        calls.append("read")
        return "result"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    step = SubmittedStep(3)
    step.add_sent(Finished(entry_of((1,), None), read), torch.device("cuda"))
    assert calls == ["record"]
    assert step.result().prefilled == {"r(1,)": "result"}
    assert calls == ["record", "synchronize", "read"]
