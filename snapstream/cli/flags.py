"""Flags of a command, read off the fields of settings classes, and what commands share to read text.

A parameter of a command whose type is a dataclass stands for a flag per field made by ``config.engine.setting``, whose
metadata are its help and names; other fields have no flag.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from snapstream.assets import TINY_DRAFT_MODEL
from snapstream.config import DType
from snapstream.config.engine import setting
from snapstream.config.values import decode_text, read_text


def read_input(file: str | None, stdin: TextIO, missing: str) -> str:
    """All of a file (None and ``-`` are stdin), unchanged. ValueError, ``missing``, without a file at a terminal."""
    if file is None and stdin.isatty():
        raise ValueError(missing)
    if file not in (None, "-"):
        return read_text(Path(str(file)))
    # A text stream would accept bytes that are not UTF-8, and turn CR LF into LF.
    return decode_text(stdin.buffer.read(), "stdin") if hasattr(stdin, "buffer") else stdin.read()


def check_output(option: str, file: Path) -> None:
    """ValueError, before any work, for what cannot be a file to write."""
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"{option} is {file}; it must be a file in a folder that exists")


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """ValueError, with the command that installs them, where packages of an extra are missing for an import."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; run: pip install 'snapstream-llm[{name}]'") from None


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
    return typer.Option(help=help_text, parser=whole_number, metavar="N")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """How one command shows a settings class, by the names of its fields."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # other than the class's
    words: Mapping[str, str] = field(default_factory=dict)  # help, other than the class's
    without: tuple[str, ...] = ()  # fields that have no flag here
    # Other names of a flag: those of vLLM and llama.cpp, where they mean the same.
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


ENGINE_ALIASES = {
    "kv_dtype": ("--kv-cache-dtype",),
    "max_rows": ("--max-num-seqs", "--parallel", "-np"),
    "speculative_model": ("--model-draft", "-md"),
    "tensor_parallel": ("--tensor-parallel-size", "-tp"),
}
ONE_SEQUENCE_ALIASES = ENGINE_ALIASES | {"max_model_len": ("--ctx-size", "-c")}  # llama.cpp divides it among slots
SAMPLING_ALIASES = {"max_tokens": ("--n-predict", "-n"), "temperature": ("--temp",), "seed": ("-s",)}
_MODEL = "Checkpoint folder, GGUF file or hub id."
Model = Annotated[Path, typer.Argument(help=_MODEL, show_default=False)]
ModelOrTiny = Annotated[
    Path | None, typer.Argument(help=f"{_MODEL} Default: the shipped tiny one.", show_default=False)
]
MODEL_FLAGS = ("--model", "-m")  # of commands whose first argument is MODEL
# Flags of vLLM and llama.cpp that have no equal here, and what to use.
OTHER_FLAGS = {
    "--model": "give the model as the argument MODEL",
    "-m": "give the model as the argument MODEL",
    "--revision": "write it behind the hub id: ID@REVISION",
    "--hf-repo": "give the hub id as the argument MODEL",
    "-hf": "give the hub id as the argument MODEL",
    "--gpu-memory-utilization": "use --max-rows auto, which fills the free memory",
    "--enable-prefix-caching": "use --prefix-store auto",
    "--no-enable-prefix-caching": "use --prefix-store 0",
    "--quantization": "use --weights int8 or int4; quantized checkpoints are recognized",
    "-q": "use --weights int8 or int4; quantized checkpoints are recognized",
    "--max-num-batched-tokens": "use --chunk-len N",
    "--enable-chunked-prefill": "prompts are always prefilled in chunks, see --chunk-len",
    "--stream-interval": "use --stream-interval-ms, a time in place of a number of tokens",
    "--enable-lora": "use --lora NAME=PATH, once for each adapter",
    "--lora-modules": "use --lora NAME=PATH, once for each adapter",
    "--block-size": "rows are not paged; --budget N is the size of a row",
    "--enforce-eager": "use --executor eager",
    "--pipeline-parallel-size": "use --tensor-parallel N",
    "--trust-remote-code": "no code of a checkpoint is run",
    "--ctx-size": "use --max-model-len N, tokens of one request; llama.cpp divides its own among the slots",
    "-c": "use --max-model-len N, tokens of one request; llama.cpp divides its own among the slots",
    "--threads": "set OMP_NUM_THREADS=N in the environment",
    "-t": "set OMP_NUM_THREADS=N in the environment",
    "--n-gpu-layers": "use --device cuda; all layers are on one device",
    "-ngl": "use --device cuda; all layers are on one device",
    "--batch-size": "use --chunk-len N, tokens of one prefill unit",
    "--ubatch-size": "use --chunk-len N, tokens of one prefill unit",
    "-b": "use --chunk-len N, tokens of one prefill unit",
    "-ub": "use --chunk-len N, tokens of one prefill unit",
    "--cache-type-k": "use --kv-dtype",
    "--cache-type-v": "use --kv-dtype",
    "-ctk": "use --kv-dtype",
    "-ctv": "use --kv-dtype",
}


class AliasedCommand(TyperCommand):
    """A command that also takes its first argument MODEL as ``--model``, and names ours for flags of other servers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """ValueError for a flag of ``OTHER_FLAGS`` that this command lacks."""
        takes_value = {
            name: not parameter.is_flag
            for parameter in self.params
            if isinstance(parameter, TyperOption)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        arguments = [one.name for one in self.params if one.param_type_name == "argument"]
        has_model = arguments[:1] == ["model"]
        model: list[str] = []
        rest: list[str] = []
        left = iter(args)
        for word in left:
            name, equals, value = word.partition("=")
            if name in takes_value or not name.startswith("-"):
                rest.append(word)
                if takes_value.get(word):
                    rest += [given for given in (next(left, None),) if given is not None]
            elif word == "--":
                rest += [word, *left]
            elif name in MODEL_FLAGS and has_model:
                if model:
                    raise ValueError(f"{name}: one model is served; two are given")
                model = [value if equals else next(left, "")]
                if not model[0]:
                    raise ValueError(f"{name} needs a model")
            elif name in OTHER_FLAGS:
                raise ValueError(f"No such option: {name}; {OTHER_FLAGS[name]}")
            else:
                rest.append(word)
        return super().parse_args(ctx, [*model, *rest])


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
    aliases = shown.aliases.get(own.name, ())
    names = [flag or f"--{own.name.replace('_', '-')}", *aliases] if flag or aliases else []
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

    draft: Path | None = setting(None, "Checkpoint folder or hub id of the draft. Default: the shipped tiny one.")
    chunk_len: int | None = setting(None, "Draft tokens that are kept or dropped together. Default: 32, in code 128.")
    context_len: int | None = setting(
        None, "Draft tokens read at once; longer texts in overlapping passages. Default: the model's limit."
    )
    dtype: DType = setting("float32", "Dtype of the draft's weights.")
    device: str = setting("cpu", "Torch device of the draft.")

    @property
    def folder(self) -> Path:
        return self.draft or TINY_DRAFT_MODEL
