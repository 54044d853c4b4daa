"""The command ``snapstream``: one module per command, assembled in ``app.py``."""

from snapstream.cli.app import main

__all__ = ["main"]
