"""A hook of mkdocs: links that leave docs/ (code, stored results) become plain paths on the site."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:]+)\)")


def inside(text: str, page: str) -> str:
    """Markdown of ``page``, a path below docs/, whose links stay within docs/."""

    def written(match: re.Match[str]) -> str:
        label, target = match[1], match[2].partition("#")[0]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target)) if target else "docs/"
        if path.startswith("docs/") and (not target or posixpath.splitext(path)[1]):
            return match[0]
        return label if label.startswith("`") else f"{label} (`{path}`)"

    return LINK.sub(written, text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return inside(markdown, page.file.src_uri)
