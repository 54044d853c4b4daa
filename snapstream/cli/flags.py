"""Flags of a command, read off the fields of settings classes, and what commands share to read text.

A parameter of a command whose type is a dataclass stands for a flag per field made by ``config.engine.setting``, whose
metadata are its help and names; other fields have no flag.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_origin, get_type_hints

import typer

from snapstream.assets import TINY_DRAFT_MODEL
from snapstream.config import DType
from snapstream.config.engine import setting


def decode_text(data: bytes, name: str) -> str:
    """The text of an input; ValueError with its name where it is binary."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text: byte {error.start} ({data[error.start]:#04x}) is not UTF-8") from None


def read_stdin(stdin: TextIO) -> str:
    """All of it, unchanged: a text stream would accept bytes that are no text, and turn CR LF into LF."""
    return decode_text(stdin.buffer.read(), "stdin") if hasattr(stdin, "buffer") else stdin.read()


Command = Callable[..., None]


def whole_number(text: str) -> int:
    """``text`` as a whole number, else an error of the command."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """``text`` as a number, else an error of the command."""
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


@dataclass(frozen=True, kw_only=True)
class Flags:
    """How one command shows a settings class, by the names of its fields."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # other than the class's
    words: Mapping[str, str] = field(default_factory=dict)  # help, other than the class's
    without: tuple[str, ...] = ()  # fields that have no flag here


def as_command(function: Command) -> Command:
    """``function`` with one parameter per flag instead of its settings classes, as typer needs it."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name, own in inspect.signature(function).parameters.items():
        kind = get_args(hints[name])[0] if get_origin(hints[name]) is Annotated else hints[name]
        if not is_dataclass(kind):
            parameters.append(own.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        shown = next((extra for extra in get_args(hints[name]) if isinstance(extra, Flags)), Flags())
        flags = _flags_of(kind, shown)
        parameters += flags
        groups[name] = (kind, [flag.name for flag in flags])

    def command(**values: Any) -> None:
        made = {
            name: kind(**{each: _as_given(values.pop(each), kind, each) for each in names})
            for name, (kind, names) in groups.items()
        }
        function(**values, **made)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _as_given(value: Any, kind: Any, name: str) -> Any:
    """The field's value: a repeated flag is a list, and a flag that turns something off is inverted."""
    if isinstance(value, list):
        return tuple(value)
    return not value if _turns_off(next(own for own in fields(kind) if own.name == name)) else value


def _turns_off(own: Field[Any]) -> bool:
    return own.default is True and bool(own.metadata.get("flag"))


def _flags_of(settings: Any, shown: Flags) -> list[inspect.Parameter]:
    hints = get_type_hints(settings)
    flags = []
    own_first = sorted(fields(settings), key=lambda own: own.name not in settings.__annotations__)  # then the inherited
    for own in own_first:
        if own.name in shown.without or "help" not in own.metadata:
            continue
        default = False if _turns_off(own) else shown.defaults.get(own.name, own.default)
        flags.append(
            inspect.Parameter(
                own.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=_annotation(own, hints[own.name], shown),
            )
        )
    return flags


def _annotation(own: Field[Any], hint: Any, shown: Flags) -> Any:
    """The typer annotation of a field made by ``setting``: of its type, or of what its ``parse`` reads."""
    option: dict[str, Any] = {"help": shown.words.get(own.name, own.metadata["help"]), "envvar": own.metadata["envvar"]}
    flag, parse, metavar = own.metadata["flag"], own.metadata["parse"], own.metadata["metavar"]
    names = [flag] if flag else []
    if parse is not None:
        hint, option["parser"] = Any, _read_with(parse)
    elif get_origin(hint) is tuple and int in get_args(hint):
        hint, option["parser"], metavar = list[int], whole_number, metavar or "N"
    elif get_origin(hint) is tuple:
        hint = list[str]
    elif float in (hint, *get_args(hint)):
        hint, option["parser"], metavar = Any, number, metavar or "X"
    elif int in (hint, *get_args(hint)):
        hint, option["parser"], metavar = Any, whole_number, metavar or "N"
    elif str in get_args(hint):  # a text, or a type without a textual form
        hint = str | None if own.default is None else str
    if metavar:
        option["metavar"] = metavar
    return Annotated[hint, typer.Option(*names, **option)]


def _read_with(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value  # defaults come through here too
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    """Which draft, and how it reads."""

    draft: Path | None = setting(None, "Checkpoint folder of the draft. Default: the shipped tiny one.")
    chunk_len: int | None = setting(None, "Draft tokens that are kept or dropped together. Default: 32, in code 128.")
    context_len: int | None = setting(
        None, "Draft tokens read at once; longer texts in overlapping passages. Default: the model's limit."
    )
    refuse_longer: bool = setting(
        False, "Refuse texts that are longer than the draft's context.", flag="--refuse-longer"
    )
    dtype: DType = setting("float32", "Of the draft's weights.")
    device: str = setting("cpu", "Torch device of the draft.")

    @property
    def folder(self) -> Path:
        return self.draft or TINY_DRAFT_MODEL
