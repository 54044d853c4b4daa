"""Tables of rows over real text: each arm at each part of the slots in its place, runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import prose, store
from evals.prose_table import perplexity_table, retrieval_table


def stored(continuation: int, result: dict[str, dict[str, float]]) -> store.Record:
    settings = {"prompt_len": 8192, "num_prompts": 3, "continuation": continuation}
    return {"settings": settings, "device": "a device", "torch": "2", "commit": "abc", "result": result}


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_tables_hold_every_cell_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "FILE", tmp_path / "prose.jsonl")
    with pytest.raises(ValueError, match="not measured"):
        retrieval_table()
    cells = {"full/1": 90.0, "snapstream/2": 80.0, "snapstream/4": 60.0, "truncation/4": 10.0}
    more = cells | {"full/1": 70.0}
    text = {"full/1": 3.0, "snapstream/2": 4.0}
    store.append(prose.FILE, stored(1025, {"perplexity, code": text}))
    store.append(prose.FILE, stored(129, {"variable": cells, "paraphrase": more, "perplexity, prose": text}))
    assert lines(retrieval_table()) == [
        "| slots | cache | variable | paraphrase | mean |",
        "| all | full attention | 90.0 | 70.0 | 80.0 |",
        "| 1/2 | SnapStream | 80.0 | 80.0 | 80.0 |",
        "| 1/4 | SnapStream | 60.0 | 60.0 | 60.0 |",
        "| 1/4 | both ends of the prompt | 10.0 | 10.0 | 10.0 |",
    ]
    assert lines(perplexity_table()) == [
        "| slots | cache | prose, 128 tokens | code, 1,024 tokens |",
        "| all | full attention | 3.00 | 3.00 |",
        "| 1/2 | SnapStream | 4.00 | 4.00 |",
    ]
