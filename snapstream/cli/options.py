"""Values on the command line that several commands take; each says, with the value, what it would have taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import typer

from snapstream.config import RescoringConfig

KV_DTYPE_HELP = "Of rows: auto is that of --dtype, fp8 a byte per number (e4m3, with scales)."

RESCORE_HELP = "A full row chooses again what it keeps, every N tokens. Default: never."

if TYPE_CHECKING:
    from snapstream.startup import Budget, MaxRows


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


def parse_budget(text: str | None) -> Budget:
    """``"full"`` or a number of slots; whether a row can be that small is the engine's to say."""
    from snapstream.startup import DEFAULT_BUDGET

    if text is None:
        return DEFAULT_BUDGET
    if text == "full":
        return "full"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"budget is {text!r}; it must be a number of slots or 'full'") from None


def parse_rescoring(every: int | None) -> RescoringConfig | None:
    """Rescoring every so many tokens, or none."""
    return None if every is None else RescoringConfig(every=every)


def parse_rows(text: str) -> MaxRows:
    """``"auto"`` or a number of rows; whether they fit is for the start to say."""
    return "auto" if text == "auto" else _count("max-rows", text)


def parse_chunk_len(text: str) -> int | Literal["auto"]:
    """``"auto"`` or a number of tokens."""
    return "auto" if text == "auto" else _count("chunk-len", text)


def _count(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be a whole number or 'auto'") from None
