"""Log lines for people (``text``) or for machines (``json``), on stderr, set up once at the start of a server.

A record may carry ``fields`` (``extra={"fields": {...}}``): text shows them as ``name=value``, JSON as members.
Invariant: every record is one line without any prompt or answer. ``http/admission.py`` writes the line of each request.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]


class TextFormatter(logging.Formatter):
    """``time=... level=... message name=value ...``; a traceback follows on its own lines."""

    def __init__(self) -> None:
        super().__init__("time=%(asctime)s level=%(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the name is logging's
        given = fields_of(record)
        shown = " ".join(f"{name}={_plain(value)}" for name, value in given.items())
        return f"{super().formatMessage(record)} {shown}" if shown else super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC, RFC 3339), level, logger, message, the record's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        whole_s = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole_s}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def set_up(kind: LogFormat, stream: TextIO | None = None) -> None:
    """Send everything from INFO on, warnings of Python too, to ``stream`` (stderr) in this form."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)  # a client chooses the path
