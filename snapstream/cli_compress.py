"""What ``snapstream compress`` does between options and compressor: text in, shorter text and report out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from snapstream.config import DType
from snapstream.spec_prefill.report import CompressionReport


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """The options of the command."""

    draft: Path
    target: Path | None
    keep: float | None
    max_tokens: int | None
    query: str | None
    mode: Any
    snap: Any
    delimiter: str | None
    look_ahead: int
    threshold: int
    is_messages: bool
    report: str | None  # where the report goes as JSON; - is stderr
    html: Path | None
    dtype: DType
    device: str


def read_text(file: str | None, stdin: TextIO) -> str:
    """The whole text, unchanged, from a file (``-`` is stdin) or stdin."""
    if file is None and stdin.isatty():
        raise ValueError("no text: give a file, or the text on stdin")
    if file not in (None, "-"):
        return Path(str(file)).read_bytes().decode("utf-8")
    # The bytes, because a text stream would turn CR LF into LF.
    return stdin.buffer.read().decode("utf-8") if hasattr(stdin, "buffer") else stdin.read()


def summary(report: CompressionReport) -> str:
    """One line for stderr."""
    if not report.is_applied:
        return f"left as it is: {report.reason}"
    windows = sum(text.num_windows for text in report.texts)
    return (
        f"{report.tokens_before:,} to {report.tokens_after:,} {report.counted_with} tokens ({report.ratio:.1%}) | "
        f"{sum(len(text.spans) for text in report.texts):,} pieces | draft {report.draft_ms / 1e3:.2f} s"
        + (f" in {windows:,} windows" if windows > 1 else "")
    )


def compress(source: str, options: CompressOptions, *, out: TextIO, err: TextIO) -> None:
    """Shorten ``source`` and write everything that was asked for."""
    from snapstream.spec_prefill.compressor import PromptCompressor
    from snapstream.spec_prefill.page import report_page
    from snapstream.spec_prefill.settings import CutSettings, ScoringSettings, check_amount

    keep = 0.25 if options.keep is None and options.max_tokens is None else options.keep
    check_amount(keep, options.max_tokens)  # before a model is loaded
    compressor = PromptCompressor(
        options.draft,
        scoring=ScoringSettings(look_ahead=options.look_ahead),
        cut=CutSettings(mode=options.mode, snap=options.snap, delimiter=options.delimiter),
        dtype=options.dtype,
        device=options.device,
    )
    result = compressor.compress(
        _messages_of(source) if options.is_messages else source,
        keep=keep,
        max_tokens=options.max_tokens,
        target_tokenizer=options.target,
        query=options.query,
        threshold=options.threshold,
    )
    if result.text is not None:
        out.write(result.text)
    else:
        out.write(json.dumps(result.messages, ensure_ascii=False, indent=1) + "\n")
    out.flush()
    if options.html is not None:
        options.html.write_text(report_page(result.report), encoding="utf-8")
    data = json.dumps(result.report.as_dict(), indent=1) + "\n"
    if options.report == "-":
        err.write(data)
    else:
        if options.report is not None:
            Path(options.report).write_text(data, encoding="utf-8")
        err.write(summary(result.report) + "\n")


def _messages_of(source: str) -> list[dict[str, Any]]:
    """OpenAI messages from JSON: a list, or an object that has them under ``messages``."""
    try:
        data = json.loads(source)
    except json.JSONDecodeError as error:
        raise ValueError(f"--messages needs JSON: {error}") from None
    if isinstance(data, dict):
        data = data.get("messages")
    if not isinstance(data, list) or not all(isinstance(message, dict) and "role" in message for message in data):
        raise ValueError("--messages needs a JSON list of messages, each with a role and a content")
    return data
