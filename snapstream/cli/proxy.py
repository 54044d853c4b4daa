"""``snapstream proxy``: options to a running proxy (``proxy/run.py``). Torch is imported only when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstream.cli.flags import DraftFlags, number_option, text_option, whole_option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor

UPSTREAM_KEY_VARIABLE = "SNAPSTREAM_UPSTREAM_KEY"
HELP = """Compress long prompts with a small draft model, in front of any OpenAI-compatible server.

Answers pass through untouched; the header x-snapstream-prompt-compression says what was done to the prompt.

\b
Examples:
  snapstream proxy --upstream http://localhost:8000 --keep 0.25
  snapstream proxy --upstream https://api.example.com/v1 --draft Qwen3-0.6B/ --max-tokens 16384 --target Llama-3.1-8B/
"""


@dataclass(frozen=True, kw_only=True)
class ProxyFlags:
    """What is cut, and where the proxy serves."""

    target: Annotated[
        Path | None,
        typer.Option(help="Folder with the upstream model's tokenizer, to count its tokens. Default: the draft's."),
    ] = None
    keep: Annotated[float | None, number_option("Share of a long prompt that stays, in (0, 1].")] = None
    max_tokens: Annotated[int | None, whole_option("Ceiling of a prompt in tokens, instead of --keep.")] = None
    threshold: Annotated[int | None, whole_option("Shorter prompts are left alone (tokens). Default: 1024.")] = None
    look_ahead: Annotated[
        int | None, whole_option("Queries of the draft that vote; 0: the prompt's own last ones. Default: 8.")
    ] = None
    host: Annotated[str, text_option("ADDRESS", "Address to listen at; 0.0.0.0 is every network.")] = "127.0.0.1"
    port: Annotated[int, whole_option("Port; 0 takes a free one.")] = 8001
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Bearer key for /v1/*, repeatable; SNAPSTREAM_API_KEY adds more. Default: open."
        ),
    ] = None
    api_key_file: Annotated[Path | None, typer.Option(help="File of further keys, one a line.")] = None
    upstream_key: Annotated[
        str | None,
        text_option("KEY", "Key sent upstream. Default: the client's own.", envvar=UPSTREAM_KEY_VARIABLE),
    ] = None
    allowed_host: Annotated[list[str] | None, text_option("HOST", "Host to answer to, beside localhost.")] = None
    strict: Annotated[bool, typer.Option("--strict", help="A failing draft is a 500, not a whole prompt.")] = False
    drain_timeout: Annotated[float, number_option("Seconds that open answers get after SIGTERM.")] = 30.0


def proxy(
    upstream: Annotated[str, typer.Option(help="Base URL of the server, with or without /v1.", show_default=False)],
    flags: ProxyFlags,
    draft: DraftFlags,
) -> None:
    try:
        from snapstream.proxy import run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; in a checkout run: pip install '.[serve]'") from None
    import logging

    from snapstream.proxy.app import ProxySettings
    from snapstream.server.http.prompt_compression import load_compressor
    from snapstream.server.logs import set_up
    from snapstream.server.options import all_keys, answered_hosts, refuse_blank
    from snapstream.spec_prefill.settings import PromptCompression, chunks_of, scoring_of

    keep = flags.keep
    if keep is None and flags.max_tokens is None:
        keep = 0.25  # where the published accuracy still holds (arXiv 2603.02631)
    refuse_blank(UPSTREAM_KEY_VARIABLE)
    settings = ProxySettings(
        upstream=upstream,
        compression=PromptCompression(keep=keep, max_tokens=flags.max_tokens),
        api_keys=all_keys(flags.api_key or (), flags.api_key_file),
        upstream_key=flags.upstream_key,
        allowed_hosts=answered_hosts(flags.host, flags.allowed_host or ()),
        is_strict=flags.strict,
    )
    options = run.ProxyOptions(host=flags.host, port=flags.port, drain_timeout_s=flags.drain_timeout)
    set_up("text")
    for name in ("httpx", "httpcore"):  # httpx tells whole URLs, and a query may hold a key
        logging.getLogger(name).setLevel(logging.WARNING)
    scoring = scoring_of(flags.look_ahead, draft.context_len, refuse_longer=draft.refuse_longer)
    chunks = chunks_of(draft.chunk_len)

    def load() -> tuple[PromptCompressor, PreTrainedTokenizerBase | None]:
        compressor = load_compressor(
            draft.folder,
            threshold=flags.threshold,
            scoring=scoring,
            chunks=chunks,
            dtype=draft.dtype,
            device=draft.device,
        )
        return compressor, run.load_target(flags.target)

    with run.bind(options) as listener:  # a taken port fails before anything is loaded
        run.run_proxy(load, settings, options, listener)
