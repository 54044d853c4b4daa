"""Numbers on the command line: options that say, with the value, what they would have taken."""

from __future__ import annotations

from typing import Any

import typer


def whole_number(text: str) -> int:
    """``text`` as a whole number, else one line of error."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """``text`` as a number, else one line of error."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def whole_option(help_text: str) -> Any:
    """An option that takes a whole number."""
    return typer.Option(help=help_text, parser=whole_number, metavar="N")


def number_option(help_text: str) -> Any:
    """An option that takes a number."""
    return typer.Option(help=help_text, parser=number, metavar="X")
