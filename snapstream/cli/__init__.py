"""The command ``snapstream``: a file per command, put together in ``app.py``."""

from snapstream.cli.app import main

__all__ = ["main"]
