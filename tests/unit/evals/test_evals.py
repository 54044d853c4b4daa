"""Arms spend what they say, scores judge as described, stored cells are not run again."""

from __future__ import annotations

import csv
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from evals import cells as evals_cells
from evals import run as evals_run
from evals import second_question, store, sweep
from evals.arms import ARMS, make_arm
from evals.cells import Cell
from evals.chains import make_prompts, report
from evals.chat import Chat
from evals.score import found, found_after_first, mean_and_error
from evals.selectors import AS_KVPRESS, AS_PUBLISHED, Random, Variant, as_variant, random_scores, stored_settings
from evals.tasks import TASKS, make_items
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.config import KVBudget, Selector
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.types import SamplingParams


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("slots", [128, 512])
def test_an_arm_spends_the_slots_it_is_given(name: str, slots: int) -> None:
    arm = make_arm(name, slots, max_model_len=2080, max_tokens=32)
    assert arm.budget.capacity == (2080 if name == "full" else slots)
    prompt = arm.prompt(range(2000), 32)
    assert len(prompt) == (slots - 32 if name == "truncation" else 2000)
    assert prompt[0] == 0 and prompt[-1] == 1999
    assert isinstance(arm.selector, Random) == (name == "random")


def test_the_ring_of_snapkv_never_wraps() -> None:
    budget = make_arm("snapkv", 256, 2080, 32).budget
    assert budget.num_recent >= 32 + 32  # window and answer


def test_arms_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="60 slots leave nothing to select"):
        make_arm("snapkv", 60, 2080, 32)
    with pytest.raises(ValueError, match="128 slots leave no prompt"):
        make_arm("truncation", 128, 2240, 192)
    with pytest.raises(ValueError, match="unknown arm 'magic'"):
        make_arm("magic", 60, 2080, 32)


def test_scores() -> None:
    assert found("it is 4821907.", ["4821907"]) == [True] and found("Amber FALCON", ["amber falcon"]) == [True]
    assert found("one 482190, two 33", ["4821907", "33"]) == [False, True]
    with pytest.raises(ValueError, match="without references"):
        found("anything", [])
    assert mean_and_error([1.0] * 50 + [0.0] * 50) == (50.0, 5.0)
    assert mean_and_error([0.25, 0.75]) == (50.0, pytest.approx(25 / 2**0.5))


def test_scores_without_the_first_token() -> None:
    number = [" 48", "21", "907"]
    assert found_after_first([" 48", "21", "907"], [number]) == [True]
    assert found_after_first([" 11", "21", "907"], [number]) == [True]  # only the first token is wrong
    assert found_after_first([" 48", "21", "900"], [number]) == [False]
    assert found_after_first([" So", ":", " 48", "21", "907"], [number]) == [True]
    assert found_after_first([" So", ":", "21", "907"], [number]) == [False]
    assert found_after_first([" 48", "21", "907", ",", " 55", "66"], [number, [" 55", "66"]]) == [True, True]
    # Words of one token: the one that the answer begins with says nothing about the cache.
    assert found_after_first([" oak", ",", " elm"], [[" oak"], [" elm"], [" fir"]]) == [True, False]
    assert found_after_first([], [number]) == [False]


def test_stored_cells_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evals_cells, "RESULTS", tmp_path)
    args = evals_run.parse_args(
        ["--families", "single_number", "kv", "--arms", "full", "snapstream", "--budgets", "1/2", "--prompt-len", "256",
         "--prompts", "2"]
    )  # fmt: skip
    cells = evals_run.cells_of(args)
    assert [(cell.task, cell.arm.name, cell.arm.slots) for cell in cells] == [
        ("single_number", "full", 288), ("single_number", "snapstream", 128), ("kv", "full", 288),
        ("kv", "snapstream", 128),
    ]  # fmt: skip
    evals_cells.run_cells(cells)
    results = [cell.read() for cell in cells]
    full, small = results[0], results[1]
    assert full is not None and small is not None
    assert full["result"]["mean_evicted_tokens"] == 0 < small["result"]["mean_evicted_tokens"]
    assert full["settings"]["weights"] in str(cells[0].path.parent)
    torn = cells[3].path.read_text()[:-40]  # the last line of its file: as an interrupted run leaves it
    cells[3].path.write_text(torn)
    assert evals_cells.not_stored([*cells, *cells]) == [cells[3]]
    evals_cells.run_cells(cells)
    again = [cell.read() for cell in cells]
    assert again[:3] == results[:3] and again[3] is not None and results[3] is not None
    assert again[3]["result"]["accuracy"] == results[3]["result"]["accuracy"]
    monkeypatch.setattr(evals_cells, "run_group", lambda _: pytest.fail("a stored cell was run again"))
    evals_cells.run_cells(cells)
    assert evals_run.table_of([r for r in results if r], args.families).row_count == 2


@dataclass(frozen=True, kw_only=True)
class Latest(Selector):
    """A selector from outside: the last candidates."""

    name: ClassVar[str] = "latest"
    offset: int = 0

    def select(
        self, queries: Any, keys: Any, layer: int, candidates: range, num_topk: int, kernels: Any
    ) -> torch.Tensor:
        stop = candidates.stop - self.offset
        return torch.arange(stop - num_topk, stop).expand(keys.shape[0], -1)


def test_selectors_from_outside_and_files_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evals_cells, "RESULTS", tmp_path / "results")
    own, files = f"{__name__}:Latest", [tmp_path / name for name in ("run.csv", "run.svg", "answers.jsonl")]
    command = ["evals.run", "--families", "kv", "--arms", "full", "snapstream", "--selector", own, "diverse",
               "--budgets", "1/2", "--prompt-len", "256", "--prompts", "2", "--csv", str(files[0]), "--plot",
               str(files[1]), "--answers", str(files[2])]  # fmt: skip
    arms = ["full", "snapstream", own, "diverse"]
    cells = evals_run.cells_of(evals_run.parse_args(command[1:]))
    assert [cell.arm.name for cell in cells] == arms
    assert cells[2].settings["snapkv"] == {"selection": own, "offset": 0}
    evals_cells.run_cells(cells)  # stored, without answers: they run once more for these
    monkeypatch.setattr(sys, "argv", command)
    evals_run.main()
    with files[0].open() as file:
        lines = list(csv.DictReader(file))
    assert [line["arm"] for line in lines] == arms and all(0 <= float(line["accuracy"]) <= 100 for line in lines)
    drawn = files[1].read_text()
    assert "<svg" in drawn and own in drawn
    answers = store.read(files[2])
    for cell, line in zip(cells, lines, strict=True):
        found_answers = answers[store.key_of(cell.settings)]["answers"]
        assert len(found_answers) == 2 and all(one["references"] for one in found_answers)
        assert 50 * sum(one["score"] for one in found_answers) == float(line["accuracy"])
    assert evals_cells.not_stored(cells, files[2]) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no_such:Thing", "cannot be imported"),
        ("math:pi", "is a float; it must be a Selector"),
        ("best", "one of snapkv"),
    ],
)
def test_what_is_no_selector(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evals_run.parse_args(["--selector", text])
    assert words in " ".join(capsys.readouterr().err.split())


def test_arms_without_room_have_no_cell(capsys: pytest.CaptureFixture[str]) -> None:
    cells = evals_run.cells_of(evals_run.parse_args(["--families", "recite", "--budgets", "1/16"]))
    assert {cell.arm.name for cell in cells} == {"full", "streaming", "random", "snapstream", "hops"}
    assert "left out: recite, snapkv" in capsys.readouterr().err


def test_any_setting_gives_a_cell_its_own_record() -> None:
    rows = [row for name in sweep.SWEEPS for row in sweep.cells_of(name, sweep.TINY_MODEL, 256)]
    every = [cell for _, cells in rows for cell in cells]
    different = {store.key_of(cell.settings) for cell in every}
    assert len(different) == len(set(every)) < len(every)
    assert {cell.path.name for cell in every} == {
        "exact_retrieval.jsonl", "multi_hop.jsonl", "multi_hop_dense.jsonl", "question_answering.jsonl",
        "second_question_same_row.jsonl", "second_question_same_row_dense.jsonl",
    }  # fmt: skip
    assert all(cell.arm.budget.capacity == 256 for cell in every)
    for name in sweep.SWEEPS:
        assert sum(point.is_default for point, _ in sweep.cells_of(name, sweep.TINY_MODEL, 256)) == 1, name


def test_a_new_default_of_the_pooling_leaves_other_cells_valid() -> None:
    def names(**changed: int) -> list[str]:
        cells = []
        for name in ARMS:
            arm = make_arm(name, 512, 2080, 32)
            if not isinstance(arm.selector, Random):
                arm = replace(arm, selector=replace(as_variant(arm.selector), **changed))
            cells.append(Cell(model=sweep.TINY_MODEL, task="kv", arm=arm, prompt_len=2048, num_prompts=2))
        return [store.key_of(cell.settings) for cell in cells]

    same = [a == b for a, b in zip(names(), names(pool_width=29), strict=True)]
    assert dict(zip(ARMS, same, strict=True)) == {
        "full": True, "truncation": True, "streaming": True, "random": True, "snapkv": False, "snapstream": False,
        "hops": False,
    }  # fmt: skip
    published = make_arm("snapkv", 512, 2080, 32)
    assert "pool_half_life" not in published.selection  # cells from before the field keep their names
    assert make_arm("snapstream", 512, 2080, 32).selection["pool_half_life"] == SnapKV().pool_half_life > 0


def test_what_a_peer_measures_is_another_cell() -> None:
    arm = make_arm("snapstream", 256, 2080, 32)
    own, other = (
        Cell(model=sweep.TINY_MODEL, task="kv", arm=arm, prompt_len=2048, num_prompts=2, source=source)
        for source in ("snapstream", "kvpress")
    )
    assert store.key_of(own.settings) != store.key_of(other.settings) and own.path == other.path


def test_the_settings_of_a_peer_are_written_out() -> None:
    """Its arm must not move with our defaults, and is run beside the peer only."""
    arm = make_arm("as_kvpress", 128, 2080, 32)
    assert arm.budget == KVBudget(num_sink=0, num_topk=32, num_recent=96)
    rule = as_variant(arm.selector)
    assert (rule.observation_len, rule.pool_width, rule.pooling) == (64, 5, "avg")
    assert {cell.arm.name for cell in evals_run.cells_of(evals_run.parse_args(["--families", "kv"]))} == set(ARMS)
    with pytest.raises(ValueError, match="96 slots leave nothing to select"):
        make_arm("as_kvpress", 96, 2080, 32)


def test_a_failed_cell_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evals_cells, "RESULTS", tmp_path)
    arm = make_arm("snapstream", 256, 288, 32)
    cell = Cell(model=tmp_path, task="kv", arm=arm, prompt_len=256, num_prompts=1)
    with pytest.raises((OSError, ValueError)):
        evals_cells.run_cells([cell])
    assert not list(tmp_path.rglob("*.jsonl"))


def test_forced_tokens_are_fed_in_place_of_drawn_ones() -> None:
    """Forcing what the model says anyway changes nothing; with room for all, a forced turn equals a prefilled one."""
    from evals.chat import Chat
    from evals.forced import generate
    from evals.tasks import make_items

    chat = Chat(sweep.TINY_MODEL)
    items = make_items(chat, "second_kept", 3, 400)
    whole = make_items(chat, "second_anew", 3, 400)
    prompts = [item.prompt_ids for item in items]
    with LLM(sweep.TINY_MODEL, budget="full", max_model_len=512, max_rows=2, progress=False) as llm:
        plain = generate(llm, prompts, [()] * 3, 24)
        same = generate(llm, prompts, [output.token_ids[:2] for output in plain], 24)
        kept = generate(llm, prompts, [item.forced_ids for item in items], 96)
        anew = generate(llm, [item.prompt_ids for item in whole], [()] * 3, 24)
    assert [output.token_ids for output in same] == [output.token_ids for output in plain]
    for item, other, later, fresh in zip(items, whole, kept, anew, strict=True):
        assert item.prompt_ids + list(item.forced_ids) == other.prompt_ids
        assert later.token_ids[len(item.forced_ids) :] == fresh.token_ids
        assert found(fresh.text, item.references) == [True]


def test_a_row_keeps_what_the_first_question_asked_for() -> None:
    from evals.chat import Chat
    from evals.forced import generate
    from evals.tasks import make_items

    chat = Chat(sweep.TINY_MODEL)
    items = make_items(chat, "second_kept", 4, 1000)
    with LLM(sweep.TINY_MODEL, budget=KVBudget.of(96), max_model_len=1100, progress=False) as llm:
        outputs = generate(llm, [i.prompt_ids for i in items], [i.forced_ids for i in items], 96)
    answers = ["".join(chat.token_texts(o.token_ids[len(i.forced_ids) :])) for i, o in zip(items, outputs, strict=True)]
    assert sum(found(answer, item.references)[0] for answer, item in zip(answers, items, strict=True)) < 4


def test_the_storage_of_rows_is_a_setting_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 has cells and prefills of its own; cells from before the option stay valid."""
    monkeypatch.setattr(evals_cells, "RESULTS", tmp_path)
    common = ["--families", "single_number", "--arms", "snapstream", "--budgets", "1/2", "--prompt-len", "256"]
    wide, narrow = (
        evals_run.cells_of(evals_run.parse_args([*common, "--prompts", "2", *more]))[0]
        for more in ([], ["--kv-dtype", "fp8"])
    )
    assert "kv_dtype" not in wide.settings and narrow.settings == wide.settings | {"kv_dtype": "fp8"}
    assert len(evals_cells.group([wide, narrow])) == 2
    evals_cells.run_cells([wide, narrow])
    results = [cell.read() for cell in (wide, narrow)]
    sizes = [result["result"]["row_bytes"] for result in results if result]
    assert sizes[0] / 4 < sizes[1] < sizes[0] / 3.9
    table = evals_run.table_of([result for result in results if result], ["single_number"])
    assert list(table.columns[0].cells) == ["snapstream", "snapstream fp8"]


# Records survive interruption, replace each other by their settings, and may be written by several processes.


def record(task: str, accuracy: float) -> store.Record:
    return {"settings": {"task": task, "slots": 4}, "result": {"accuracy": accuracy}}


def accuracies(path: Path) -> list[float]:
    return [found["result"]["accuracy"] for found in store.read(path).values()]


def test_a_record_is_found_by_its_settings_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kv.jsonl"
    assert store.read(path) == {}
    for task, accuracy in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        store.append(path, record(task, accuracy))
    assert store.read(path)[store.key_of({"slots": 4, "task": "a"})] == record("a", 3.0)
    assert accuracies(path) == [3.0, 2.0]


def test_half_a_line_at_the_end_is_ignored_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    store.append(path, record("a", 1.0))
    whole = path.read_bytes()
    line = json.dumps(record("b", 2.0)).encode()
    for cut in (1, len(line) // 2, len(line) - 1):
        path.write_bytes(whole + line[:cut])
        assert accuracies(path) == [1.0]
        store.append(path, record("c", 3.0))
        assert accuracies(path) == [1.0, 3.0] and path.read_text().count("\n") == 2


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    path.write_text(json.dumps(record("a", 1.0)))
    store.append(path, record("b", 2.0))
    assert accuracies(path) == [1.0, 2.0]


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    path.write_text('{"settings": \n' + json.dumps(record("a", 1.0)) + "\n")
    with pytest.raises(ValueError, match="kv.jsonl, line 1: not a record"):
        store.read(path)


def put(path: Path, number: int) -> None:
    store.append(path, record(f"task {number}", number))


def test_processes_do_not_lose_each_others_records(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        list(pool.map(put, [path] * 60, range(60)))
    assert sorted(accuracies(path)) == list(range(60))


# Every task makes prompts of the length it was asked for, the same each time, for both models that ship.

CHATS = {model.name: Chat(model) for model in (TINY_MODEL, TINY_DRAFT_MODEL)}


@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize("model", list(CHATS))
def test_prompts_fit_and_are_the_same_each_time(name: str, model: str) -> None:
    chat, task = CHATS[model], TASKS[name]
    items = make_items(chat, name, 3, 600)
    assert items == make_items(chat, name, 3, 600) and items != make_items(chat, name, 3, 600, seed=1)
    for item in items:
        assert 400 < len(item.prompt_ids) <= 600
        answer = sum(len(chat.token_ids(" " + reference)) + 1 for reference in item.references)
        assert len(item.forced_ids) + answer < task.max_tokens


def test_the_question_stands_where_the_task_says() -> None:
    chat = CHATS["tiny"]
    for name, begins in (("question_first", True), ("multi_number", False)):
        text = "".join(chat.token_texts(make_items(chat, name, 1, 600)[0].prompt_ids))
        where = text.index("?") if "?" in text else text.index("Give") if "Give" in text else text.index("Tell")
        assert (where < 100) == begins, text


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown task 'magic'"):
        make_items(CHATS["tiny"], "magic", 1, 600)


# The report on chains finds the tokens of a link, and says what of them a row kept.


def test_links_are_found_and_their_share_is_counted() -> None:
    chat = Chat(TINY_MODEL)
    prompts = make_prompts(chat, 6, 400)
    for question, ids, links in prompts:
        texts = ["".join(chat.token_texts([ids[t] for t in link])) for link in links]
        assert all(text.strip().startswith("Let ") and text.endswith(".") for text in texts)
        assert question.answers[-1] in texts[-1]
    budget = KVBudget.of(96)
    with LLM(TINY_MODEL, budget=budget, max_model_len=432, heads="none", progress=False) as llm:
        params = SamplingParams(max_tokens=1, return_kept=True)
        found = report(prompts, llm.generate([ids for _, ids, _ in prompts], params), budget)
    assert sum(found["prompts_by_links"].values()) == 6
    shares = [share for layers in found["kept_by_link"].values() for heads in layers for share in heads]
    assert len(found["kept_by_link"][0]) == 4 and all(0 <= share <= 100 for share in shares)
    assert max(found["kept_by_link"][0][1]) > 90  # the layer that looks things up has the link that is asked for


# The eval of second questions: what it runs hits the store and equals a cold prefill, and its table shows it.


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(second_question, "FAMILIES", {"sparse": None})
    monkeypatch.setattr(second_question, "PARTS", (1, 8))
    found = second_question.run(TINY_MODEL, 1, 1536)
    assert list(found["sparse"]) == [1, 8]
    for line in found["sparse"].values():
        assert line["num_unlike_cold"] == 0 and line["cached_share"] > 0.7
        assert 0 <= line["accuracy"] <= 100
    monkeypatch.setattr(second_question, "FILE", tmp_path / "file.jsonl")
    with pytest.raises(ValueError, match="not measured"):
        second_question.second_question_table()
    said = {"device": "cpu", "torch": "2", "commit": "abc", "command": "python"}
    settings = {"num_prompts": 1, "prompt_len": 1536}
    store.append(tmp_path / "file.jsonl", {"settings": settings, **said, "result": found})
    shown = second_question.second_question_table()
    assert "| all | " in shown and "| 1/8 | " in shown


# Selectors of experiments, and how stored results spell them.


def test_random_selection_differs_by_layer_and_head_and_spreads_over_the_prompt() -> None:
    scores = torch.stack([random_scores(layer, 2, 4, 4004, "cpu") for layer in range(3)])  # [L, G, n]
    assert torch.equal(scores[1], random_scores(1, 2, 0, 5000, "cpu")[:, 4:4004])  # by position alone
    assert ((scores >= 0) & (scores < 1)).all()
    hits = torch.zeros_like(scores).scatter_(-1, scores.topk(1000).indices, 1.0)
    by_fifth = hits.unflatten(-1, (5, -1)).sum(-1)  # [L, G, 5]; 200 expected, standard deviation 12
    assert (by_fifth - 200).abs().max() < 50
    flat = hits.flatten(0, 1)
    shared = flat @ flat.T - 1000 * torch.eye(6)  # 250 expected of two independent choices
    assert (shared + 250 * torch.eye(6) - 250).abs().max() < 60
    assert (flat[:, 1:] * flat[:, :-1]).sum(-1).sub(250).abs().max() < 60  # neighbours are independent too


def test_stored_results_keep_their_spelling() -> None:
    """The keys of stored results were made from these words; renaming a field here must not change them."""
    common = {"selection": "snapkv", "group_reduce": "sum"}
    today = {"pool_kernel": 7, "pooling": "max", "pool_half_life": 8, "softmax_over": "candidates"}
    assert stored_settings(SnapKV()) == stored_settings(Variant()) == common | today | {"window_len": 32, "num_hops": 0}
    assert stored_settings(Hops(num_hops=4)) == stored_settings(SnapKV()) | {"num_hops": 4}
    assert stored_settings(Random()) == {"selection": "random"}
    published = {"pool_kernel": 7, "pooling": "max", "softmax_over": "row", "window_len": 32, "num_hops": 0}
    assert stored_settings(AS_PUBLISHED) == common | published  # nothing is carried ahead: the word is left out
    peer = {"pool_kernel": 5, "pooling": "avg", "softmax_over": "row", "window_len": 64, "num_hops": 0}
    assert stored_settings(AS_KVPRESS) == common | peer
    with pytest.raises(TypeError, match="'random' is no variant"):
        as_variant(Random())


@pytest.mark.parametrize(
    ("field", "value"),
    [("observation_len", 0), ("num_hops", -1), ("pool_width", 4), ("pool_width", 0), ("pool_half_life", -1),
     ("pool_half_life", 0.5), ("pooling", "mean"), ("softmax_over", "all"), ("group_reduce", "mean")],
)  # fmt: skip
def test_wrong_settings_are_refused_with_their_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        Variant(**{field: value})  # type: ignore[arg-type]
