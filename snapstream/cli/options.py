"""Options that several commands share, and the values they take; a wrong one is named with what it could have been."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from snapstream.config import DType, Executor, KVDType, PrefillAttentionName, RescoringConfig

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


# Of an engine: generate, serve, plan.
EngineDType = Annotated[DType, typer.Option(help="Of weights and rows.")]
RowDType = Annotated[
    KVDType, typer.Option(help="Of rows: auto is that of --dtype, fp8 a byte per number (e4m3, with scales).")
]
Device = Annotated[str, typer.Option(help="Torch device.")]
MaxModelLen = Annotated[int | None, whole_option("Prompt and output tokens. Default: the model's window.")]
RescoreEvery = Annotated[
    int | None, whole_option("A full row chooses again what it keeps, every N tokens. Default: never.")
]
EngineExecutor = Annotated[
    Executor | None, typer.Option(help="Decode as plain calls, or compiled/captured. Default: graph on a GPU only.")
]
PrefillAttention = Annotated[
    PrefillAttentionName, typer.Option(help="Kernel that attends prompts. Default: by a table, said at the start.")
]

# Of a draft that shortens prompts: compress, proxy.
Draft = Annotated[Path | None, typer.Option(help="Checkpoint folder of the draft. Default: the shipped tiny one.")]
DraftDType = Annotated[DType, typer.Option(help="Of the draft's weights.")]
DraftDevice = Annotated[str, typer.Option(help="Torch device of the draft.")]
DraftChunkLen = Annotated[int | None, whole_option("Draft tokens that stay or go together. Default: 32, in code 128.")]
DraftWindowLen = Annotated[
    int | None,
    whole_option("Draft tokens read at once; longer texts in overlapping windows. Default: its own window."),
]
NoWindows = Annotated[bool, typer.Option("--no-windows", help="Refuse texts that are longer than the draft's window.")]


def decode_text(data: bytes, name: str) -> str:
    """The text of an input; ValueError with its name where it is binary."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text: byte {error.start} ({data[error.start]:#04x}) is not UTF-8") from None


def read_stdin(stdin: TextIO) -> str:
    """All of it as it is: a text stream would take bytes that are no text, and turn CR LF into LF."""
    return decode_text(stdin.buffer.read(), "stdin") if hasattr(stdin, "buffer") else stdin.read()


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
    if every is not None and every < 1:
        raise ValueError(f"rescore-every is {every}; it must be at least 1")
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
