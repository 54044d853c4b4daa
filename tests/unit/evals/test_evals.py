"""Arms spend what they say, scores judge as described, stored cells are not run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import run as evals_run
from evals.arms import ARMS, make_arm
from evals.score import is_right, is_right_after_first, share


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("slots", [128, 512])
def test_an_arm_spends_the_slots_it_is_given(name: str, slots: int) -> None:
    arm = make_arm(name, slots, max_model_len=2080, max_tokens=32)
    assert arm.budget.capacity == (2080 if name == "full" else slots)
    prompt = arm.prompt(range(2000), 32)
    assert len(prompt) == (slots - 32 if name == "truncation" else 2000)
    assert prompt[0] == 0 and prompt[-1] == 1999


def test_the_ring_of_snapkv_never_wraps() -> None:
    budget = make_arm("snapkv", 256, 2080, 32).budget
    assert budget.num_recent >= 32 + 32  # window and answer


def test_arms_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="60 slots leave no room"):
        make_arm("snapkv", 60, 2080, 32)
    with pytest.raises(ValueError, match="unknown arm 'magic'"):
        make_arm("magic", 60, 2080, 32)


def test_scores() -> None:
    assert is_right("it is 4821907.", "4821907") and is_right("Amber FALCON", "amber falcon")
    assert not is_right("482190", "4821907")
    assert is_right_after_first([" 48", "21", "907"], [" 48", "21", "907"])
    assert is_right_after_first([" 11", "21", "907"], [" 48", "21", "907"])  # only the first token is wrong
    assert not is_right_after_first([" 48", "21", "900"], [" 48", "21", "907"])
    with pytest.raises(ValueError, match="is one token"):
        is_right_after_first([" 48"], [" 48"])
    assert share([True] * 50 + [False] * 50) == (50.0, 5.0)


def test_stored_cells_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evals_run, "RESULTS", tmp_path)
    args = evals_run.parse_args(
        ["--families", "single_number", "kv", "--arms", "full", "snapstream", "--parts", "2", "--prompt-len", "256",
         "--num-prompts", "2"]
    )  # fmt: skip
    first = evals_run.run(args)
    assert [(c["settings"]["arm"], c["settings"]["family"]) for c in first] == [
        ("full", "single_number"), ("full", "kv"), ("snapstream", "single_number"), ("snapstream", "kv"),
    ]  # fmt: skip
    assert first[0]["result"]["mean_evicted_tokens"] == 0 < first[2]["result"]["mean_evicted_tokens"]
    monkeypatch.setattr(evals_run, "run_arm", lambda *_: pytest.fail("a stored cell was run again"))
    assert evals_run.run(args) == first
    assert evals_run.table_of(first, args.families).row_count == 2
