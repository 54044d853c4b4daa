"""``snapstream serve``: options to a running server (``server/run.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from snapstream.cli.options import (
    Device,
    EngineDType,
    EngineExecutor,
    MaxModelLen,
    PrefillAttention,
    RescoreEvery,
    RowDType,
    number_option,
    parse_budget,
    parse_rescoring,
    parse_rows,
    whole_option,
)

HELP = """Serve a model over HTTP, as the OpenAI API; SIGTERM drains. Needs the extra: snapstream-llm[serve].

MODEL is a checkpoint folder; without it the tiny model that ships with the package is served.

\b
Examples:
  snapstream serve
  snapstream serve Qwen3-0.6B/ --budget 4096 --max-rows 16
  snapstream serve Llama-3.1-8B-Instruct/ --draft Qwen3-0.6B/ --prompt-keep 0.25
  SNAPSTREAM_API_KEY=secret snapstream serve Llama-3.2-1B-Instruct/ --host 0.0.0.0
"""


def serve(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder. Default: the shipped tiny one.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, whole_option("Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="SNAPSTREAM_API_KEY", help="Bearer key for /v1/*; repeatable. Default: none, open."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name(s) that clients use; repeatable. Default: the folder's.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Slots of a row, or 'full'; a request may ask for less. Default: 8192, at most the window."),
    ] = None,
    rescore_every: RescoreEvery = None,
    max_rows: Annotated[
        str, typer.Option(help="Rows: samples decoded together; auto: as many as fit.", metavar="N|auto")
    ] = "8",
    max_model_len: MaxModelLen = None,
    dtype: EngineDType = "float32",
    kv_dtype: RowDType = "auto",
    device: Device = "cpu",
    executor: EngineExecutor = None,
    prefill_attention: PrefillAttention = "auto",
    max_waiting: Annotated[int, whole_option("Requests that may wait; more get 429. 0: no bound.")] = 128,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Host to answer to, beside localhost.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call this server; repeatable.")
    ] = None,
    tool_parser: Annotated[
        Literal["auto", "llama3_json", "hermes", "none"],
        typer.Option(help="How the model writes tool calls; auto goes by its chat template."),
    ] = "auto",
    draft: Annotated[
        Path | None,
        typer.Option(help="Draft's checkpoint folder: requests may have it shorten their prompts. Default: none."),
    ] = None,
    prompt_keep: Annotated[
        float | None, number_option("With --draft: share that stays of long prompts whose request does not say.")
    ] = None,
    prompt_max_tokens: Annotated[
        int | None, whole_option("With --draft: ceiling of a prompt in tokens, instead of --prompt-keep.")
    ] = None,
    prompt_threshold: Annotated[
        int | None, whole_option("With --draft: leave prompts of fewer tokens alone. Default: 1024.")
    ] = None,
    draft_window_len: Annotated[
        int | None, whole_option("With --draft: tokens it reads at once. Default: its own window.")
    ] = None,
    drain_timeout: Annotated[float, number_option("Seconds that running requests get after SIGTERM.")] = 30.0,
    no_page: Annotated[bool, typer.Option("--no-page", help="Do not serve the chat page at /.")] = False,
    no_vllm_names: Annotated[
        bool, typer.Option("--no-vllm-names", help="Metrics under snapstream: only, not also under vllm:.")
    ] = False,
    no_restart: Annotated[bool, typer.Option("--no-restart", help="Do not restart an engine that died.")] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of the log on stderr: a line for each request, never its text.")
    ] = "text",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate file (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key file (PEM).")] = None,
) -> None:
    try:
        from snapstream.server import run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; in a checkout run: pip install '.[serve]'") from None
    from snapstream.assets import TINY_MODEL
    from snapstream.server import logs
    from snapstream.server.engine.api import EngineDead
    from snapstream.server.engine.messages import EngineSpec
    from snapstream.server.http.auth import KEY_VARIABLE, refuse_blank
    from snapstream.server.http.hosts import answered_hosts
    from snapstream.server.settings import ServerSettings

    logs.set_up(log_format)
    spec = EngineSpec(
        model=str(model or TINY_MODEL),
        budget=parse_budget(budget),
        dtype=dtype,
        rescoring=parse_rescoring(rescore_every),
        kv_dtype=kv_dtype,
        device=device,
        executor=executor,
        prefill_attention=prefill_attention,
        max_rows=parse_rows(max_rows),
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )
    refuse_blank(KEY_VARIABLE)
    settings = ServerSettings(
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=answered_hosts(host, allowed_host or ()),
        max_requests=run.most_requests(spec.max_rows, spec.max_waiting),
        has_page=not no_page,
        has_vllm_names=not no_vllm_names,
        tool_parser=tool_parser,
        prompt_compression=run.default_compression(draft, prompt_keep, prompt_max_tokens, prompt_threshold),
    )
    options = run.ServeOptions(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        drain_timeout_s=drain_timeout,
        restart=not no_restart,
        tls_cert=tls_cert,
        tls_key=tls_key,
        draft=draft,
        draft_threshold=prompt_threshold,
        draft_window_len=draft_window_len,
    )
    try:
        run.serve(spec, settings, options)
    except EngineDead as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
