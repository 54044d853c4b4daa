"""Loads the tokenizer of a checkpoint folder.

Invariant: no code of the folder is run. ``check_folder`` refuses folders that name code before transformers sees them;
``trust_remote_code=False`` keeps transformers from prompting on stdin. transformers is imported on first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from snapstream.models.chat_template import TemplateFault, check_template
from snapstream.models.config_json import MAX_TEMPLATE_BYTES, check_folder, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a file that a tokenizer can be read from."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. ValueError if there is none, it needs code, or one of its files is broken."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; a tokenizer is read from a checkpoint folder")
    if not has_tokenizer(folder):
        raise ValueError(f"{folder} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    check_folder(folder)
    for name in JSON_FILES[:-1]:  # the last is large, and parsed here only if transformers fails
        if (folder / name).is_file():
            read_object(folder / name)
    _refuse_places(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare exceptions, and panics that are no Exception
        raise ValueError(_reason(folder, error)) from error
    _check_settings(folder, tokenizer)
    return tokenizer


def find_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """As ``load_tokenizer``, but None if the folder has no tokenizer (token ids in, token ids out)."""
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def read_template(file: Path) -> str:
    """The chat template in a file; ValueError, with the line, for one that is broken."""
    try:
        size = file.stat().st_size
        text = file.read_text(encoding="utf-8") if size <= MAX_TEMPLATE_BYTES else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    if size > MAX_TEMPLATE_BYTES:
        raise ValueError(f"{file} has {size} bytes; a chat template may have {MAX_TEMPLATE_BYTES}")
    if not text.strip():
        raise ValueError(f"{file} is empty; it must be a chat template")
    try:
        check_template(text)
    except TemplateFault as fault:
        place = "" if fault.line is None else f", line {fault.line}"
        raise ValueError(f"{file}{place}: {fault}") from None
    return text


def _refuse_places(folder: Path) -> None:
    """ValueError if ``fast_tokenizer_files`` names a file outside the folder."""
    file = folder / "tokenizer_config.json"
    names = read_object(file).get("fast_tokenizer_files") if file.is_file() else None
    for name in names if isinstance(names, list) else ():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{file}: fast_tokenizer_files names {name!r}; it may name files of its own folder only")


def _check_settings(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError for settings that transformers accepts and fails on with the first prompt."""
    file, template, longest = folder / "tokenizer_config.json", tokenizer.chat_template, tokenizer.model_max_length
    if template is not None and not isinstance(template, (str, dict)):
        raise ValueError(f"{file}: chat_template is {template!r}; it must be a text, or several by name")
    if not isinstance(longest, (int, float)):
        raise ValueError(f"{file}: model_max_length is {longest!r}; it must be a number")


def _reason(folder: Path, error: BaseException) -> str:
    """The reason for the error, with the broken file where it can be found."""
    file = folder / JSON_FILES[-1]
    if not file.is_file():
        return f"{folder}: its tokenizer cannot be read: {_first_line(error)}"
    try:
        read_object(file)
    except ValueError as broken:
        return str(broken)
    return f"{file} and tokenizer_config.json make no tokenizer: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no reason given'}"
