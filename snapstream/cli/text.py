"""Text that a command reads from a file or from stdin; binary input is an error that names it."""

from __future__ import annotations

from typing import TextIO


def decode_text(data: bytes, name: str) -> str:
    """The text of an input; ValueError with its name where it is binary."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text: byte {error.start} ({data[error.start]:#04x}) is not UTF-8") from None


def read_stdin(stdin: TextIO) -> str:
    """All of it as it is: a text stream would take bytes that are no text, and turn CR LF into LF."""
    return decode_text(stdin.buffer.read(), "stdin") if hasattr(stdin, "buffer") else stdin.read()
