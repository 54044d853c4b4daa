"""Tasks of lm-eval over data files at hand: the harness's own prompts and scoring, without its downloads.

    python -m evals.public_suites --task infinitebench_passkey --data passkey.jsonl --out tasks/
    python -m snapstream.integrations.lm_eval run --model snapstream --device cpu \\
        --model_args pretrained=DIR,budget=8192 --tasks infinitebench_passkey_local --include_path tasks/

The invariant: the file written here includes the harness's own definition of the task and changes its name and where
its rows come from, nothing else. ``docs/research/public-suites.md`` has the commands for every suite.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path


def run_command(suite: str, example: str, out_help: str, write: Callable[[str, Path, Path], str]) -> None:
    """Parse ``--task --data --out`` and print what ``write(task, data, out)`` returns; its ValueError is one line."""
    parser = argparse.ArgumentParser(description=f"Define a task of {suite} over a data file at hand.")
    parser.add_argument("--task", required=True, help=f"name in {suite}, e.g. {example}")
    parser.add_argument("--data", required=True, type=Path, help="rows with the suite's own columns")
    parser.add_argument("--out", required=True, type=Path, help=out_help)
    args = parser.parse_args()
    try:
        print(write(args.task, args.data, args.out))
    except ValueError as error:
        parser.error(str(error))


def definition_of(task: str) -> Path:
    """The file in the installed harness that defines ``task``; ValueError where there is none."""
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent
    for file in sorted(folder.rglob("*.yaml")):
        lines = file.read_text(encoding="utf-8").splitlines()
        if any(line.split("#")[0].replace('"', "").strip() == f"task: {task}" for line in lines):
            return file
    raise ValueError(f"this lm-eval has no file that defines the task {task!r}")


def write_local_task(task: str, data: Path, folder: Path) -> str:
    """Define ``task`` over ``data`` (.json, .jsonl or .parquet, the suite's own columns) in ``folder``.

    Returns the new task's name. ValueError where the task or the data is not there.
    """
    kinds = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    if data.suffix not in kinds or not data.is_file():
        raise ValueError(f"{data} is not a .json, .jsonl or .parquet file")
    name = f"{task}_local"
    settings = {
        "include": str(definition_of(task)),
        "task": name,
        "tag": [],
        "dataset_path": kinds[data.suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": "test",
    }
    folder.mkdir(parents=True, exist_ok=True)
    # JSON is YAML, and quotes whatever a path may hold.
    (folder / f"{name}.yaml").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return name


def main() -> None:
    run_command("lm-eval", "longbench2_graph", "folder for --include_path", write_local_task)


if __name__ == "__main__":
    main()
