"""Settings files of a checkpoint, read with suspicion: broken ones are refused by name, and so is code.

Invariant: whatever a file holds, reading it raises ValueError with its path or returns plain data; nothing of it is
run. No torch, no transformers: ``plan`` reads a checkpoint's settings through this too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from snapstream.request.conversation import named

MAX_DIGITS = 40  # of a whole number; longer ones become floats, which every whole-number setting refuses
# The files in which transformers looks for ``auto_map``: Python files of the checkpoint that it should load.
CODE_FILES = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
CODE_FIELD = "auto_map"


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. ValueError with the path where there is none, or it cannot be read."""
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


def refuse_code(folder: Path) -> None:
    """ValueError if a settings file names Python code of the checkpoint's own, with file and field.

    Such code is never run, and a model that needs it is not the one that its architecture names. Where stock code
    reads the checkpoint just as well, its owner can delete the field.
    """
    for name in CODE_FILES:
        file = folder / name
        if file.is_file() and (code := read_object(file).get(CODE_FIELD)):
            raise ValueError(
                f"{file}: {CODE_FIELD} names Python code of the checkpoint ({named(code)}), which is never run. "
                f"If stock code reads this checkpoint, delete {CODE_FIELD}"
            )
