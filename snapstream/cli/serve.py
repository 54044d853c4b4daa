"""``snapstream serve``: options to a running server (``server/run.py``)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from snapstream.cli.flags import Flags, number_option, text_option, whole_option
from snapstream.config import EngineOptions

HELP = """Serve a model over HTTP, as the OpenAI API; SIGTERM drains. Needs the extra: snapstream-llm[serve].

MODEL is a checkpoint folder; without it the tiny model that ships with the package is served.

\b
Examples:
  snapstream serve
  snapstream serve Qwen3-0.6B/ --budget 4096 --max-rows 16
  snapstream serve Llama-3.1-8B-Instruct/ --draft Qwen3-0.6B/ --prompt-keep 0.25
  SNAPSTREAM_API_KEY=secret snapstream serve Llama-3.2-1B-Instruct/ --host 0.0.0.0
  snapstream serve Qwen3-0.6B/ --role decode --prefill http://127.0.0.1:8001 --transfer-secret-file secret
"""


ADMIN_VARIABLE = "SNAPSTREAM_ADMIN_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """Where it serves, whom, and under which names."""

    host: Annotated[str, text_option("ADDRESS", "Address to listen at; 0.0.0.0 is every network.")] = "127.0.0.1"
    port: Annotated[int, whole_option("Port; 0 takes a free one.")] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Bearer key for /v1/*, repeatable; SNAPSTREAM_API_KEY adds more. Default: open."
        ),
    ] = None
    api_key_file: Annotated[Path | None, typer.Option(help="File of further keys, one a line.")] = None
    admin_key: Annotated[
        str, text_option("KEY", "Key that resets the prefix store of all callers. Default: none.", ADMIN_VARIABLE)
    ] = ""
    served_model_name: Annotated[
        list[str] | None,
        text_option("NAME", "Name(s) that clients use; repeatable. Default: the folder's."),
    ] = None
    allowed_host: Annotated[list[str] | None, text_option("HOST", "Host to answer to, beside localhost.")] = None
    cors_origin: Annotated[
        list[str] | None, text_option("ORIGIN", "Origin whose pages may call this server; repeatable.")
    ] = None
    root_path: Annotated[str, text_option("PATH", "Prefix of a proxy in front, like /llm. Default: none.")] = ""
    tool_parser: Annotated[
        str,
        text_option("NAME", "How the model writes tool calls; auto goes by its chat template."),
    ] = "auto"
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to render conversations with. Default: the checkpoint's.")
    ] = None
    trust_users: Annotated[
        bool, typer.Option("--trust-users", help="Special tokens spelled in messages of users and tools become such.")
    ] = False
    reasoning_parser: Annotated[
        Literal["auto", "deepseek_r1", "qwen3", "none"],
        typer.Option(help="How the model thinks aloud; auto goes by its chat template."),
    ] = "auto"
    responses_store: Annotated[
        int, whole_option("Responses kept in memory for previous_response_id; 0 keeps none.")
    ] = 0
    drain_timeout: Annotated[float, number_option("Seconds that running requests get after SIGTERM.")] = 30.0
    no_page: Annotated[bool, typer.Option("--no-page", help="Do not serve the chat page at /.")] = False
    no_vllm_names: Annotated[
        bool, typer.Option("--no-vllm-names", help="Metrics under snapstream: only, not also under vllm:.")
    ] = False
    stall_timeout: Annotated[
        float, number_option("Seconds without a sign of progress after which the engine is ended. 0: never.")
    ] = 60.0
    no_restart: Annotated[bool, typer.Option("--no-restart", help="Do not restart an engine that died.")] = False
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of the log on stderr: a line for each request, never its text.")
    ] = "text"
    otlp_traces_endpoint: Annotated[
        str | None, text_option("URL", "Send OpenTelemetry traces there. Needs the extra: snapstream-llm[otel].")
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate file (PEM).")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Key file (PEM).")] = None


@dataclass(frozen=True, kw_only=True)
class ApartFlags:
    """Prompts are read by other servers than those that answer."""

    role: Annotated[
        Literal["both", "prefill", "decode"],
        typer.Option(help="Read prompts for other servers (prefill), or have them read by such (decode)."),
    ] = "both"
    prefill: Annotated[
        list[str] | None, text_option("URL", "With --role decode: server with --role prefill; repeatable.")
    ] = None
    transfer_host: Annotated[
        str | None,
        text_option(
            "ADDRESS", "With --role decode: where rows arrive, as prefill servers reach it. Default: 127.0.0.1."
        ),
    ] = None
    transfer_port: Annotated[int, whole_option("With --role decode: its port; 0 takes a free one.")] = 0
    transfer_ca: Annotated[
        Path | None, typer.Option(help="Authorities of the other side's certificate (PEM). Default: the system's.")
    ] = None
    transfer_secret_file: Annotated[
        Path | None, typer.Option(help="Secret that both sides know, mode 0600; or SNAPSTREAM_TRANSFER_SECRET.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrimFlags:
    """A draft, and how it trims the prompts of requests that bring no wish of their own."""

    draft: Annotated[
        Path | None,
        typer.Option(help="Draft's checkpoint folder: requests may have it shorten their prompts. Default: none."),
    ] = None
    prompt_keep: Annotated[
        float | None, number_option("With --draft: share that stays of long prompts whose request does not say.")
    ] = None
    prompt_max_tokens: Annotated[
        int | None, whole_option("With --draft: ceiling of a prompt in tokens, instead of --prompt-keep.")
    ] = None
    prompt_threshold: Annotated[
        int | None, whole_option("With --draft: leave prompts of fewer tokens alone. Default: 1024.")
    ] = None
    draft_context_len: Annotated[
        int | None, whole_option("With --draft: tokens it reads at once. Default: the model's limit.")
    ] = None


ENGINE = Flags(
    defaults={"max_waiting": 128, "prefix_store": "auto"},
    words={
        "max_waiting": "Requests that may wait; more get 429. 0: no bound.",
        "prefix_store": "Host memory for the beginnings of prompts, so that each is computed once; auto: a part of "
        "what is free, 0: none.",
    },
)


def serve(
    engine: Annotated[EngineOptions, ENGINE],
    trim: TrimFlags,
    apart: ApartFlags,
    flags: ServeFlags,
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder. Default: the shipped tiny one.", show_default=False)
    ] = None,
) -> None:
    try:
        from snapstream.server import run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; in a checkout run: pip install '.[serve]'") from None
    from snapstream.assets import TINY_MODEL
    from snapstream.server import logs
    from snapstream.server.apart import ApartOptions
    from snapstream.server.engine.api import EngineDead
    from snapstream.server.engine.messages import EngineSpec
    from snapstream.server.http.auth import all_keys, refuse_blank
    from snapstream.server.http.hosts import answered_hosts
    from snapstream.server.settings import ServerSettings

    refuse_blank(ADMIN_VARIABLE)
    logs.set_up(flags.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every prompt that is read elsewhere
    halves = ApartOptions(
        duty=apart.role,
        prefill=tuple(url for given in apart.prefill or () for url in given.split(",")),
        transfer_host=apart.transfer_host,
        transfer_port=apart.transfer_port,
        transfer_ca=apart.transfer_ca,
        secret_file=apart.transfer_secret_file,
    )
    engine = halves.engine_options(engine, trim.draft)
    transfer = halves.settings(flags.host, flags.tls_cert, flags.tls_key)
    settings = ServerSettings(
        api_keys=all_keys(flags.api_key or (), flags.api_key_file),
        admin_key=flags.admin_key,
        cors_origins=tuple(flags.cors_origin or ()),
        allowed_hosts=answered_hosts(flags.host, flags.allowed_host or ()),
        max_requests=run.most_requests(engine.max_rows, 0 if apart.role == "prefill" else engine.max_waiting),
        duty=apart.role,
        transfer_secret=b"" if transfer is None else transfer.secret,
        root_path=flags.root_path,
        has_page=not flags.no_page,
        has_vllm_names=not flags.no_vllm_names,
        tool_parser=flags.tool_parser,
        trusts_users=flags.trust_users,
        reasoning_parser=flags.reasoning_parser,
        responses_store=flags.responses_store,
        prompt_compression=run.default_compression(
            trim.draft, trim.prompt_keep, trim.prompt_max_tokens, trim.prompt_threshold
        ),
    )
    spec = EngineSpec(model=str(model or TINY_MODEL), options=engine, transfer=transfer)
    options = run.ServeOptions(
        host=flags.host,
        port=flags.port,
        names=tuple(flags.served_model_name or ()),
        drain_timeout_s=flags.drain_timeout,
        restart=not flags.no_restart,
        stall_timeout_s=flags.stall_timeout,
        otlp_endpoint=flags.otlp_traces_endpoint,
        tls_cert=flags.tls_cert,
        tls_key=flags.tls_key,
        chat_template=flags.chat_template,
        draft=trim.draft,
        draft_threshold=trim.prompt_threshold,
        draft_context_len=trim.draft_context_len,
        apart=halves,
    )
    try:
        run.check_models(spec, options)
        run.serve(spec, settings, options)
    except (EngineDead, run.CannotLoad) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
