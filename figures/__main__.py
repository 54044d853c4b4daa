"""Writes README.md and docs from stored results; ``--check`` changes nothing and fails if a file is out of date.

python -m figures
"""

from __future__ import annotations

import argparse

from figures.documents import ROOT, rendered


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    args = parser.parse_args()
    for path, new in rendered().items():
        if path.exists() and path.read_text() == new:
            continue
        if args.check:
            raise SystemExit(f"{path.relative_to(ROOT)} is out of date; run python -m figures")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new)


if __name__ == "__main__":
    main()
