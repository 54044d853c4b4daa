"""Tasks of lighteval over data files at hand: the harness's own prompts and scoring, without its downloads.

    python -m evals.lighteval_suites --task aime24 --data rows.jsonl --out tasks/
    lighteval endpoint litellm "model_name=openai/NAME,base_url=http://127.0.0.1:8000/v1,api_key=none" \\
        aime24_local --custom-tasks tasks/aime24_local.py

Written without lighteval, which may live in an environment of its own. The invariant: the file written here takes the
harness's own definition of the task and changes its name and where its rows come from, nothing else. The other harness:
``public_suites.py``.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from evals.public_suites import run_command

KINDS = (".json", ".jsonl", ".parquet")
DEFINITION = '''"""{task} of lighteval over rows at hand; written by evals.lighteval_suites."""

from dataclasses import replace

from lighteval.tasks.registry import Registry

own = Registry.load_all_task_configs()[{task!r}]
splits = ["test"]
TASKS_TABLE = [
    replace(own, name={name!r}, hf_repo={folder!r}, hf_subset="default", hf_revision=None,
            hf_avail_splits=splits, evaluation_splits=splits, few_shots_split=None),
]
'''


def write_local_task(task: str, data: Path, folder: Path) -> str:
    """Define lighteval's ``task`` over a copy of ``data`` (.json, .jsonl, .parquet, the suite's own columns).

    Writes ``folder/NAME.py`` for ``--custom-tasks`` and ``folder/NAME/test.*``; returns NAME. ValueError where the data
    is not there.
    """
    if data.suffix not in KINDS or not data.is_file():
        raise ValueError(f"{data} is not a {', '.join(KINDS)} file")
    name = re.sub(r"\W", "_", task) + "_local"
    rows = folder / name
    rows.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data, rows / f"test{data.suffix}")
    text = DEFINITION.format(task=task, name=name, folder=str(rows.resolve()))
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return name


def main() -> None:
    out_help = "folder for the definition and a copy of the rows"
    run_command("lighteval", "aime24 or lcb:codegeneration", out_help, write_local_task)


if __name__ == "__main__":
    main()
