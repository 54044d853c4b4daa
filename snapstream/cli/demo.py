"""``snapstream demo``; the work is in ``snapstream/demo.py``."""

from __future__ import annotations


def demo() -> None:
    """Answer questions about a document longer than the cache, on the model that ships with the package."""
    from snapstream.demo import run_demo

    run_demo()
