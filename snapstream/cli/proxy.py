"""``snapstream proxy``: options to a running proxy (``proxy/run.py``). Torch is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstream.cli.options import (
    Draft,
    DraftChunkLen,
    DraftDevice,
    DraftDType,
    DraftWindowLen,
    NoWindows,
    number_option,
    whole_option,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor

UPSTREAM_KEY_VARIABLE = "SNAPSTREAM_UPSTREAM_KEY"
HELP = """Trim long prompts with a small draft model, in front of any OpenAI-compatible server.

Answers pass through untouched; the header x-snapstream-prompt-compression says what was done to the prompt.

\b
Examples:
  snapstream proxy --upstream http://localhost:8000 --keep 0.25
  snapstream proxy --upstream https://api.example.com/v1 --draft Qwen3-0.6B/ --max-tokens 16384 --target Llama-3.1-8B/
"""


def proxy(
    upstream: Annotated[str, typer.Option(help="Base URL of the server, with or without /v1.", show_default=False)],
    draft: Draft = None,
    target: Annotated[
        Path | None,
        typer.Option(help="Folder with the upstream model's tokenizer, to count its tokens. Default: the draft's."),
    ] = None,
    keep: Annotated[float | None, number_option("Share of a long prompt that stays, in (0, 1].")] = None,
    max_tokens: Annotated[int | None, whole_option("Ceiling of a prompt in tokens, instead of --keep.")] = None,
    threshold: Annotated[int | None, whole_option("Shorter prompts are left alone (tokens). Default: 1024.")] = None,
    look_ahead: Annotated[
        int | None, whole_option("Queries of the draft that vote; 0: the prompt's own last ones. Default: 8.")
    ] = None,
    chunk_len: DraftChunkLen = None,
    window_len: DraftWindowLen = None,
    no_windows: NoWindows = False,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, whole_option("Port; 0 takes a free one.")] = 8001,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="SNAPSTREAM_API_KEY", help="Bearer key for /v1/*; repeatable. Default: none, open."),
    ] = None,
    upstream_key: Annotated[
        str | None,
        typer.Option(envvar=UPSTREAM_KEY_VARIABLE, help="Key sent upstream. Default: the client's own."),
    ] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Host to answer to, beside localhost.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A failing draft is a 500, not a whole prompt.")] = False,
    drain_timeout: Annotated[float, number_option("Seconds that open answers get after SIGTERM.")] = 30.0,
    dtype: DraftDType = "float32",
    device: DraftDevice = "cpu",
) -> None:
    try:
        from snapstream.proxy import run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; in a checkout run: pip install '.[serve]'") from None
    import logging

    from snapstream.assets import TINY_DRAFT_MODEL
    from snapstream.proxy.settings import ProxySettings
    from snapstream.server.http.auth import KEY_VARIABLE, refuse_blank
    from snapstream.server.http.hosts import answered_hosts
    from snapstream.server.http.trimming import load_compressor
    from snapstream.server.logs import set_up
    from snapstream.spec_prefill.settings import PromptCompression, cut_of, scoring_of

    if keep is None and max_tokens is None:
        keep = 0.25  # where the published accuracy still holds (arXiv 2603.02631)
    for variable in (KEY_VARIABLE, UPSTREAM_KEY_VARIABLE):
        refuse_blank(variable)
    settings = ProxySettings(
        upstream=upstream,
        wish=PromptCompression(keep=keep, max_tokens=max_tokens),
        api_keys=tuple(api_key or ()),
        upstream_key=upstream_key,
        allowed_hosts=answered_hosts(host, allowed_host or ()),
        is_strict=strict,
    )
    options = run.ProxyOptions(host=host, port=port, drain_timeout_s=drain_timeout)
    set_up("text")
    for name in ("httpx", "httpcore"):  # httpx tells whole URLs, and a query may hold a key
        logging.getLogger(name).setLevel(logging.WARNING)
    scoring, cut = scoring_of(look_ahead, window_len, no_windows=no_windows), cut_of(chunk_len)

    def load() -> tuple[PromptCompressor, PreTrainedTokenizerBase | None]:
        folder = draft or TINY_DRAFT_MODEL
        compressor = load_compressor(folder, threshold=threshold, scoring=scoring, cut=cut, dtype=dtype, device=device)
        return compressor, run.load_target(target)

    with run.bind(options) as listener:  # a taken port fails before anything is loaded
        run.run_proxy(load, settings, options, listener)
