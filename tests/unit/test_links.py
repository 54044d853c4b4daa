"""Links between documents lead to a file, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])


def headings(text: str) -> set[str]:
    """As they are linked to: small letters, hyphens for spaces, nothing else."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in found)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_a_file_and_its_heading(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not heading or target.suffix != ".md" or heading in headings(target.read_text()), link
