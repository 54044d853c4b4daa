"""Records survive interruption, replace each other by their settings, and may be written by several processes."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from evals import store


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
