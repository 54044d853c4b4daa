"""``snapstream compress``: text in, shorter text and report out; ``snapstream proxy``: the same in front of a server.

Torch is imported only when they run.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from snapstream.cli.flags import DraftFlags, check_output, needs_extra, read_input
from snapstream.config.engine import setting
from snapstream.server.options import ProxyOptions, all_keys, answered_hosts
from snapstream.spec_prefill.settings import Mode, Snap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import CompressionReport, PromptCompressor


HELP = """Shorten a long text with a small draft model; the text goes to stdout, one summary line to stderr.

The draft reads the text (and what will be asked, with --query) and keeps the parts that it looks at: verbatim pieces,
in order, with a mark where something is missing. The result is text for any model behind any API.

\b
Examples:
  snapstream compress report.txt --query "What did it cost?" --keep 0.1
  snapstream compress --draft Qwen3-0.6B/ --target Llama-3.1-8B-Instruct/ --max-tokens 8192 < book.txt
  snapstream compress chat.json --messages --max-tokens 4096
"""


@dataclass(frozen=True, kw_only=True)
class CompressFlags:
    """How much stays of a text, and where the results go."""

    target: Path | None = setting(None, "Folder with the target's tokenizer; without it draft tokens are counted.")
    keep: float | None = setting(None, "Share to keep, in (0, 1]. Default: 0.25.")
    max_tokens: int | None = setting(None, "Keep at most so many target tokens instead.")
    query: str | None = setting(None, "What will be asked about the text.")
    mode: Mode = setting("auto", "Chunking and delimiters for prose or for code.")
    snap: Snap | None = setting(None, "Where pieces end. Default: at words, in code at lines.")
    delimiter: str | None = setting(None, "Between pieces. Default: a line [...], in code a comment.")
    look_ahead: int = setting(8, "Greedy draft tokens whose attention scores count; 0: those of the text's own end.")
    threshold: int = setting(0, "Texts of fewer tokens stay uncompressed.")
    is_messages: bool = setting(False, "The input is JSON: OpenAI messages, or an object with them.", flag="--messages")
    report: str | None = setting(None, "Write the report as JSON to this file; - is stderr.")


def compress(
    flags: CompressFlags,
    draft: DraftFlags,
    file: Annotated[
        str | None, typer.Argument(help="Text file; without it or as -: stdin.", show_default=False)
    ] = None,
) -> None:
    text = read_input(file, sys.stdin, "no text: give a file, or the text on stdin")
    shorten(text, flags, draft, out=sys.stdout, err=sys.stderr)


def summary(report: CompressionReport) -> str:
    """One line for stderr."""
    if not report.is_applied:
        return f"left as it is: {report.reason}"
    passages = sum(text.num_passages for text in report.texts)
    return (
        f"{report.tokens_before:,} to {report.tokens_after:,} {report.counted_with} tokens ({report.ratio:.1%}) | "
        f"{sum(len(text.spans) for text in report.texts):,} pieces | draft {report.draft_ms / 1e3:.2f} s"
        + (f" in {passages:,} passages" if passages > 1 else "")
    )


def shorten(source: str, flags: CompressFlags, draft: DraftFlags, *, out: TextIO, err: TextIO) -> None:
    """Shorten ``source`` and write everything that was asked for."""
    from snapstream.spec_prefill.compressor import PromptCompressor
    from snapstream.spec_prefill.settings import check_amount, chunks_of, scoring_of

    if flags.report is not None and flags.report != "-":
        check_output("--report", Path(flags.report))
    keep = 0.25 if flags.keep is None and flags.max_tokens is None else flags.keep
    check_amount(keep, flags.max_tokens)  # before a model is loaded
    compressor = PromptCompressor(
        draft.folder,
        scoring=scoring_of(flags.look_ahead, draft.context_len),
        chunks=chunks_of(draft.chunk_len, mode=flags.mode, snap=flags.snap, delimiter=flags.delimiter),
        dtype=draft.dtype,
        device=draft.device,
    )
    result = compressor.compress(
        _messages_of(source) if flags.is_messages else source,
        keep=keep,
        max_tokens=flags.max_tokens,
        target_tokenizer=flags.target,
        query=flags.query,
        threshold=flags.threshold,
    )
    if result.text is not None:
        out.write(result.text)
    else:
        out.write(json.dumps(result.messages, ensure_ascii=False, indent=1) + "\n")
    out.flush()
    data = json.dumps(result.report.as_dict(), indent=1) + "\n"
    if flags.report == "-":
        err.write(data)
    else:
        if flags.report is not None:
            Path(flags.report).write_text(data, encoding="utf-8")
        err.write(summary(result.report) + "\n")


def _messages_of(source: str) -> list[dict[str, Any]]:
    """OpenAI messages from JSON: a list, or an object that has them under ``messages``."""
    try:
        data = json.loads(source)
    except ValueError as error:
        raise ValueError(f"--messages needs JSON: {error}") from None
    except RecursionError:
        raise ValueError("--messages needs JSON that is not nested so deeply") from None
    if isinstance(data, dict):
        data = data.get("messages")
    if not isinstance(data, list) or not all(isinstance(message, dict) and "role" in message for message in data):
        raise ValueError("--messages needs a JSON list of messages, each with a role and a content")
    return data


PROXY_HELP = """Compress long prompts with a small draft model, in front of any OpenAI-compatible server.

Answers pass through untouched; the header x-snapstream-prompt-compression says what was done to the prompt.

\b
Examples:
  snapstream proxy --upstream http://localhost:8000 --keep 0.25
  snapstream proxy --upstream https://api.example.com/v1 --draft Qwen3-0.6B/ --max-tokens 16384 --target Llama-3.1-8B/
"""


def proxy(options: ProxyOptions, draft: DraftFlags) -> None:
    with needs_extra("serve"):
        from snapstream.proxy import run_proxy
    from snapstream.server.http.lifecycle import listen, set_up_log
    from snapstream.spec_prefill.settings import chunks_of, protection_of, scoring_of

    options = replace(
        options,
        api_keys=all_keys(options.api_keys, options.api_key_file),
        allowed_hosts=answered_hosts(options.host, options.allowed_hosts),
    )
    set_up_log("text")
    for name in ("httpx", "httpcore"):  # httpx logs whole URLs, and a query may hold a key
        logging.getLogger(name).setLevel(logging.WARNING)
    scoring = scoring_of(options.look_ahead, draft.context_len)
    chunks = chunks_of(draft.chunk_len)

    def load() -> tuple[PromptCompressor, PreTrainedTokenizerBase | None]:
        from snapstream.models.tokenizer import load_tokenizer
        from snapstream.spec_prefill.compressor import PromptCompressor

        compressor = PromptCompressor(
            draft.folder,
            scoring=scoring,
            chunks=chunks,
            protection=protection_of(options.threshold),
            dtype=draft.dtype,
            device=draft.device,
        )
        return compressor, None if options.target is None else load_tokenizer(options.target)

    with listen(options.host, options.port) as listener:  # a taken port fails before anything is loaded
        run_proxy(load, options, listener)
