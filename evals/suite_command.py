"""The command line of the modules that point a public suite's task at a data file at hand."""

from __future__ import annotations

import argparse
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
