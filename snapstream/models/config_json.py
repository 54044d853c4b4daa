"""Reads a checkpoint's JSON files: bounded and validated, single fields, RoPE settings, fingerprint. No torch.

Invariant: whatever a file holds, reading it raises ValueError with its path or returns plain data; none of it is
executed. ``plan`` reads a checkpoint's settings through this module too.

Context length after RoPE scaling: for llama3 ``max_position_embeddings`` already is it; linear and dynamic multiply it
by the factor; yarn multiplies the original context (Qwen2.5 states 32,768 and a factor of 4 and means 131,072). Serving
engines read checkpoints this way; ``transformers`` itself never enforces a limit.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from snapstream.config import RopeConfig, RopeKind
from snapstream.config.values import MAX_DIM
from snapstream.types import named

Settings = Mapping[str, Any]  # a parsed config.json

MAX_DIGITS = 40  # of a whole number; longer ones become floats, which every whole-number setting refuses
# Files in which transformers looks for ``auto_map``: Python files of the checkpoint that it should load.
CODE_FILES = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
CODE_FIELD = "auto_map"

# Limits per kind, by the end of a file's name; weights have none, since they are mapped and compared with config.json.
MAX_SETTINGS_BYTES = 2**24  # of CODE_FILES
MAX_TABLE_BYTES = 2**28  # of vocabularies and of the index of the shards
MAX_TEMPLATE_BYTES = 2**20
_MAX_BYTES = {
    ".safetensors": None,
    ".gguf": None,
    ".jinja": MAX_TEMPLATE_BYTES,
    **dict.fromkeys((".json", ".model", ".txt", ".tiktoken", ".bpe", ".spm", ".vocab"), MAX_TABLE_BYTES),
    **dict.fromkeys(CODE_FILES, MAX_SETTINGS_BYTES),
}
TEMPLATE_FOLDER = "additional_chat_templates"


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. ValueError with the path where there is none, or it cannot be read."""
    check_file(file)
    try:
        content = json.loads(file.read_bytes().decode("utf-8"), parse_int=_whole)
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text; expected JSON in UTF-8") from None
    except RecursionError:
        raise ValueError(f"{file} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; expected an object of settings")
    return content


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def check_folder(folder: Path) -> None:
    """ValueError for a checkpoint file that would block or exhaust memory when read, or that names code."""
    for place in (folder, folder / TEMPLATE_FOLDER):
        with suppress(OSError):  # if it cannot be listed, check_file still checks files opened by name
            for file in sorted(place.iterdir()):
                check_file(file)
    refuse_code(folder)


def check_file(file: Path) -> None:
    """ValueError for a FIFO, a device or a socket that is named like a file of a checkpoint, and for one too large."""
    suffix = file.name if file.name in _MAX_BYTES else file.suffix
    if suffix not in _MAX_BYTES:
        return
    try:
        found = file.stat()
    except OSError:  # absent, or a dangling link: its reader reports it
        return
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{file} is not a regular file; a FIFO, a device or a socket is not read")
    most = _MAX_BYTES[suffix]
    if most is not None and stat.S_ISREG(found.st_mode) and found.st_size > most:
        raise ValueError(f"{file} has {found.st_size:,} bytes; the limit is {most:,}")


def refuse_code(folder: Path) -> None:
    """ValueError, with file and field, if a settings file names Python code of the checkpoint.

    Such code is never run, and a model that needs it is not the one that its architecture names. If stock code reads
    the checkpoint too, its owner can delete the field; ``is_stock_by_name`` does without.
    """
    for name in CODE_FILES:
        file = folder / name
        settings = read_object(file) if file.is_file() else {}
        if (code := settings.get(CODE_FIELD)) and not (name == "config.json" and is_stock_by_name(settings)):
            raise ValueError(
                f"{file}: {CODE_FIELD} names Python code of the checkpoint ({named(code)}), which is never run. "
                f"If stock code reads this checkpoint, delete {CODE_FIELD}"
            )


def is_stock_by_name(settings: Settings) -> bool:
    """Whether the code that a config.json names is called as transformers' own: ``own.Phi3ForCausalLM``, its one
    architecture ``Phi3ForCausalLM``, and its ``model_type`` ``phi3``.

    Folders that were published before transformers had their architecture often name the code of then.
    """
    code, kind = settings.get(CODE_FIELD), settings.get("model_type")
    own = code.get("AutoModelForCausalLM") if isinstance(code, dict) else None
    if not isinstance(own, str) or not isinstance(kind, str):
        return False
    name = own.rpartition(".")[2]
    return settings.get("architectures") == [name] and name.lower() == kind.replace("_", "") + "forcausallm"


# Single fields: ValueError with the field's name and its value.

MAX_WHOLE = 2**40  # of a size or a token id; larger ones are no model's
MAX_NUMBER = 1e12  # of a base frequency, the largest number in any config


def whole_number(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number; ``default`` where the field is absent or null."""
    value = settings.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_WHOLE:
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    return value


def number(
    settings: Mapping[str, Any], name: str, default: float | None = None, *, above: float = -math.inf,
    most: float = MAX_NUMBER,
) -> float:  # fmt: skip
    """A finite number greater than ``above`` and up to ``most``; ``default`` where the field is absent or null."""
    value = settings.get(name)
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not above < value <= most:  # type: ignore[arg-type, operator]
        limits = f" over {above:g} and" if above > -math.inf else ""
        raise ValueError(f"{name} is {value!r}; it must be a number{limits} up to {most:g}")
    return float(value)  # type: ignore[arg-type]


def flag(settings: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """True or false; ``default`` where the field is absent or null."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return value


def token_ids(settings: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One token id, a list of them, or none where the field is absent or null."""
    value = settings.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_WHOLE:
            raise ValueError(f"{name} is {value!r}; it must be a token id (a whole number >= 0) or a list of them")
    return tuple(ids)


# RoPE settings.

KINDS: tuple[str, ...] = get_args(RopeKind)
MAX_FACTOR = 1e6  # by which a context may be stretched; published models stay below 1000


def parse_rope(settings: Mapping[str, Any], max_position: int, *, is_partial: bool = False) -> RopeConfig:
    """Read the RoPE settings; ``max_position`` is max_position_embeddings. ValueError if not supported.

    ``is_partial``: partial_rotary_factor applies to the architecture.
    """
    values = rope_settings(settings)
    kind = values["rope_type"]
    _refuse_unsupported(values, kind, is_partial)
    rope = _parse_kind(settings, values, max_position, kind)
    if not is_partial or kind == "proportional":
        return rope
    share = number(values, "partial_rotary_factor", 1.0, above=0.0, most=1.0)
    return replace(rope, partial_rotary_factor=share)


def _parse_kind(settings: Mapping[str, Any], values: Mapping[str, Any], max_position: int, kind: str) -> RopeConfig:
    theta = number(values, "rope_theta", above=1.0)  # with 1 all frequencies would be equal
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "proportional":
        share = number(values, "partial_rotary_factor", 1.0, above=0.0, most=1.0)
        factor = number(values, "factor", 1.0, above=0.0, most=MAX_FACTOR)
        return RopeConfig(kind="proportional", theta=theta, share=share, factor=factor)
    original = _original_max_position(settings, values, max_position, kind)
    if kind == "yarn" and "factor" not in values:  # transformers takes null for the ratio of the contexts, not this
        raise ValueError("rope yarn: factor is missing")
    ratio = max_position / original if kind in ("yarn", "longrope") else None
    factor = number(values, "factor", ratio, most=MAX_FACTOR)
    if factor < 1.0:
        raise ValueError(f"rope {kind}: factor is {factor}; it must be >= 1")
    if kind == "llama3":
        low, high = number(values, "low_freq_factor", above=0.0), number(values, "high_freq_factor", above=0.0)
        if high < low:
            raise ValueError(f"rope llama3: high_freq_factor ({high}) is below low_freq_factor ({low})")
        return RopeConfig(kind="llama3", theta=theta, factor=factor, original_max_position=original,
                          low_freq_factor=low, high_freq_factor=high)  # fmt: skip
    if kind == "yarn":
        return _yarn(values, theta, factor, original)
    if kind == "longrope":
        return RopeConfig(
            kind="longrope", theta=theta, factor=factor, original_max_position=original,
            attention_factor=None if values.get("attention_factor") is None else number(
                values, "attention_factor", above=0.0
            ),
            short_factors=_factors(values, "short_factor"), long_factors=_factors(values, "long_factor"),
        )  # fmt: skip
    return RopeConfig(kind=cast(RopeKind, kind), theta=theta, factor=factor, original_max_position=original)


def stretched_max_position(rope: RopeConfig, max_position: int) -> int:
    """Context length after RoPE scaling, see above."""
    match rope.kind:
        case "linear" | "dynamic" | "yarn":
            return int(rope.original_max_position * rope.factor)
        case _:
            return max_position


def rope_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings in either spelling as one flat dict with a ``rope_type``; the rope dict overrides the top level."""
    inner = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(inner, dict) or any(isinstance(value, dict) for value in inner.values()):
        raise ValueError(f"rope settings that differ by layer type are not supported: {inner!r}")
    outer = {name: settings[name] for name in ("rope_theta", "partial_rotary_factor") if name in settings}
    return {**outer, **inner, "rope_type": str(inner.get("rope_type") or inner.get("type") or "default")}


def _refuse_unsupported(values: Mapping[str, Any], kind: str, is_partial: bool) -> None:
    if values.get("mrope_section") is not None:
        raise ValueError("rope with mrope_section (several positions per token) is not supported")
    if kind not in KINDS:
        raise ValueError(f"rope type {kind!r} is not supported (known: {', '.join(KINDS)})")
    share = values.get("partial_rotary_factor")
    if not is_partial and kind != "proportional" and share is not None and share != 1:
        raise ValueError(f"partial_rotary_factor is {share}; only heads rotated as a whole (1.0) are supported")


def _original_max_position(settings: Mapping[str, Any], values: Mapping[str, Any], max_position: int, kind: str) -> int:
    """max_position before stretching; a value outside the rope dict wins, as in transformers."""
    if kind in ("linear", "dynamic"):
        return max_position
    name = "original_max_position_embeddings"
    source = settings if settings.get(name) is not None else values
    original = whole_number(source, name, max_position)
    if original < 1:
        raise ValueError(f"rope {kind}: {name} is {original}; it must be >= 1")
    return original


def _factors(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """Divisors of longrope, one per rotated pair; ``Rope`` needs as many as there are pairs."""
    given = values.get(name)
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_DIM:
        raise ValueError(f"rope longrope: {name} is {given!r}; it must be a list of numbers, one per rotated pair")
    return tuple(number({name: factor}, name, above=0.0) for factor in given)


def _yarn(values: Mapping[str, Any], theta: float, factor: float, original: int) -> RopeConfig:
    def optional(name: str) -> float | None:
        return None if values.get(name) in (None, 0) else number(values, name, above=0.0)

    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        attention_factor=optional("attention_factor"),
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=flag(values, "truncate", default=True),
    )


_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of weights, evenly spaced
_MAX_HEADER = 2**26


def weight_files(folder: Path) -> list[Path]:
    """Files of a checkpoint's weights: those of a folder, or a GGUF file with the others of its model."""
    if folder.suffix != ".gguf":
        return sorted(folder.glob("*.safetensors"))
    stem = re.escape(re.sub(r"-\d{5}-of-\d{5}$", "", folder.stem))
    own = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.gguf")
    return sorted(path for path in folder.parent.glob("*.gguf") if own.fullmatch(path.name))


def fingerprint(folder: Path | str, *, with_mtime: bool = False) -> str:
    """Identifies a checkpoint by its config.json and samples of its weights: 32 hexadecimal digits.

    ``with_mtime`` includes modification times: this detects weights that differ between the samples, but a copy of the
    folder gets another fingerprint. OSError or ValueError for a folder that is not a checkpoint.
    """
    folder, found = Path(folder), hashlib.sha256()
    if folder.suffix != ".gguf":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found.update(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(folder):
        size, mtime = path.stat().st_size, f" {path.stat().st_mtime_ns}" if with_mtime else ""
        found.update(f"{path.name} {size}{mtime}".encode())
        with path.open("rb") as file:
            found.update(file.read(8 + min(int.from_bytes(file.read(8), "little"), _MAX_HEADER)))
            for index in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * index // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()[:32]
