"""What is written for lighteval, without lighteval; ``tests/clients/test_lighteval.py`` runs it through the harness."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from evals.lighteval_suites import write_local_task


@dataclass
class Config:
    """The fields of lighteval's task configuration that say where rows come from, and one that does not."""

    name: str = "lcb:codegeneration"
    hf_repo: str = "somewhere/else"
    hf_subset: str = "v4_v5"
    hf_revision: str | None = "main"
    hf_avail_splits: list[str] = field(default_factory=list)
    evaluation_splits: list[str] = field(default_factory=lambda: ["validation"])
    few_shots_split: str | None = None
    generation_size: int = 32768


def test_only_name_and_source_of_the_rows_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "rows of me.jsonl"
    data.write_text('{"question_content": "?"}\n')
    name = write_local_task("lcb:codegeneration", data, tmp_path / "it's here")
    assert name == "lcb_codegeneration_local"
    registry: Any = ModuleType("lighteval.tasks.registry")
    registry.Registry = SimpleNamespace(load_all_task_configs=lambda: {"lcb:codegeneration": Config()})
    for module in ("lighteval", "lighteval.tasks"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, "lighteval.tasks.registry", registry)
    scope: dict[str, Any] = {}
    exec((tmp_path / "it's here" / f"{name}.py").read_text(), scope)
    [config] = scope["TASKS_TABLE"]
    rows = Path(config.hf_repo)
    assert (rows / "test.jsonl").read_text() == data.read_text()
    assert config == Config(name, str(rows), "default", None, ["test"], ["test"])


def test_rows_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows.txt"):
        write_local_task("aime24", tmp_path / "rows.txt", tmp_path)
