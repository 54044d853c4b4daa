"""Real text that is on every machine that has this project's environment: the Python library, packages, licences.

    python -m recipes.corpus --output build/prose/corpus

Nothing is fetched. Pieces are whole files: sources of the standard library and of installed packages (`code`), and
their documents, descriptions and licences (`prose`). Every thirtieth piece, by the hash of its text,
is held out: no training sequence is made of it. `provenance.json` lists what was read: package, version, licence, files
and characters; texts of the corpus belong to their authors, so neither it nor parts of it are part of this project.

Invariant: the same environment gives the same corpus, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Literal

Kind = Literal["code", "prose"]
Split = Literal["train", "heldout"]

PROSE = 6  # times as often as by its length prose is drawn: there is much less of it than of code
HELD_OUT = 30  # one piece of so many
MIN_CHARS, MAX_CHARS = 400, 200_000  # of a file; longer ones are tables
PACKAGE_CHARS = 3_000_000  # at most of one package, so that none is most of the corpus
SUFFIXES: dict[str, Kind] = {".py": "code", ".pyi": "code", ".md": "prose", ".rst": "prose", ".txt": "prose"}
_LEFT_OUT = ("test", "tests", "__pycache__", "site-packages", "idlelib", "snapstream")
_LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "METADATA", "AUTHORS")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One file."""

    package: str
    kind: Kind
    text: str

    @property
    def split(self) -> Split:
        return "heldout" if int(sha256(self.text.encode()).hexdigest()[:8], 16) % HELD_OUT == 0 else "train"


class Corpus:
    """Pieces of one split, from which windows are drawn by their length, those of prose more often."""

    def __init__(self, pieces: Iterable[Piece], split: Split) -> None:
        """ValueError where nothing is left."""
        self.pieces = [piece for piece in pieces if piece.split == split]
        if not self.pieces:
            raise ValueError(f"the corpus has no pieces of the split {split!r}")
        self._weights = [len(piece.text) * (PROSE if piece.kind == "prose" else 1) for piece in self.pieces]

    @classmethod
    def load(cls, folder: Path, split: Split) -> Corpus:
        """From what `main` wrote."""
        with (folder / "pieces.jsonl").open() as file:
            return cls((Piece(**json.loads(line)) for line in file), split)

    def window(self, rng: Random, num_chars: int) -> tuple[str, Kind]:
        """About so many characters of one piece, whole lines; fewer where the piece has fewer."""
        piece = rng.choices(self.pieces, self._weights)[0]
        start = rng.randrange(max(len(piece.text) - num_chars, 0) + 1)
        start = piece.text.rfind("\n", 0, start) + 1
        stop = piece.text.find("\n", start + num_chars)
        return piece.text[start : stop if stop >= 0 else len(piece.text)], piece.kind


def collect(files: Iterable[tuple[str, Path]]) -> Iterator[Piece]:
    """Pieces of files, each with its package; what is no UTF-8, a table, too short or there already is left out."""
    seen: set[bytes] = set()
    taken: Counter[str] = Counter()
    for package, path in files:
        kind = "prose" if path.name.split(".")[0].upper() in _LICENCES else SUFFIXES.get(path.suffix)
        if kind is None or not path.is_file() or path.stat().st_size > 4 * MAX_CHARS:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        digest = sha256(text.encode()).digest()
        if not MIN_CHARS <= len(text) <= MAX_CHARS or digest in seen or taken[package] + len(text) > PACKAGE_CHARS:
            continue
        seen.add(digest)
        taken[package] += len(text)
        yield Piece(package=package, kind=kind, text=text)


def installed_files() -> Iterator[tuple[str, Path]]:
    """Files of the standard library, then of installed packages, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*")):
        if not _is_left_out(path.relative_to(library)):
            yield "python", path
    for package in sorted(metadata.distributions(), key=lambda own: own.metadata["Name"].lower()):
        if package.metadata["Name"].lower().startswith("snapstream"):
            continue
        for file in sorted(package.files or (), key=str):
            if not _is_left_out(Path(str(file)).parent):
                yield package.metadata["Name"], Path(str(package.locate_file(file)))


def _is_left_out(path: Path) -> bool:
    return any(part in _LEFT_OUT for part in path.parts)


def provenance(pieces: Iterable[Piece]) -> list[dict[str, object]]:
    """By package: version, licence as it calls it, files and characters."""
    files: Counter[str] = Counter()
    chars: Counter[str] = Counter()
    for piece in pieces:
        files[piece.package] += 1
        chars[piece.package] += len(piece.text)
    own = {package.metadata["Name"]: package.metadata for package in metadata.distributions()}
    found: list[dict[str, object]] = []
    for package in files:
        about = own.get(package)
        version, licence = ".".join(map(str, sys.version_info[:3])), "PSF-2.0"
        if about is not None:
            names = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or () if "License" in line]
            stated = about.get("License-Expression") or ", ".join(names) or (about.get("License") or "not stated")
            version, licence = about["Version"], stated.splitlines()[0][:80]
        found.append({"package": package, "version": version, "licence": licence, "files": files[package],
                      "characters": chars[package]})  # fmt: skip
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    pieces = list(collect(installed_files()))
    with (args.output / "pieces.jsonl").open("w") as file:
        for piece in pieces:
            file.write(json.dumps({"package": piece.package, "kind": piece.kind, "text": piece.text}) + "\n")
    (args.output / "provenance.json").write_text(json.dumps(provenance(pieces), indent=1) + "\n")
    sizes = Counter(
        {kind: sum(len(piece.text) for piece in pieces if piece.kind == kind) for kind in ("code", "prose")}
    )
    print(f"{len(pieces):,} pieces, {sizes['code']:,} characters of code and {sizes['prose']:,} of prose")


if __name__ == "__main__":
    main()
