"""From options to a running server: engine process, app, socket, shutdown.

        socket bound -> loading (503) -> ready -> SIGTERM: draining (503, running streams go on) -> ended

Invariants: options that a role (``--role``) does not use are refused by name before anything is loaded. The socket is
bound before anything is loaded, so a taken port fails at once; whatever happens, the engine process is ended before
``serve`` returns. A second signal ends the server without waiting.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapstream.config import AutoCount, EngineOptions
from snapstream.config.values import is_loopback
from snapstream.disaggregation.protocol import TransferSettings, read_secret
from snapstream.kv.prefix_folder import folder_secret
from snapstream.models.chat_template import TemplateFault, check_template
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import find_tokenizer, read_template
from snapstream.plan.fit import MAX_AUTO_ROWS
from snapstream.plan.memory import DraftMemory, draft_memory
from snapstream.server.apis import APIS
from snapstream.server.app import make_app
from snapstream.server.engine.api import EngineSpec, ModelMetadata
from snapstream.server.engine.process import EngineProcess
from snapstream.server.engine.remote_prefill import PrefillFailed, PrefillServers, check_urls
from snapstream.server.http.connections import ConnectionGuard
from snapstream.server.http.lifecycle import (
    StartupApp,
    listen,
    serve_until_signal,
    url_of,
    uvicorn_config,
    warn_if_open,
)
from snapstream.server.openai.state import ServerState
from snapstream.server.options import ApiOptions, ServeOptions, ServerSettings, all_keys, answered_hosts
from snapstream.server.telemetry import Tracing, otlp_tracing
from snapstream.spec_prefill.settings import protection_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor

log = logging.getLogger(__name__)

SPARE_REQUESTS = 64  # read and tokenized while the engine's queue is full
UNBOUNDED_REQUESTS = 4096  # where the engine's queue has no bound, the server still needs one
KEEP_ALIVE_S = 75  # of an idle connection: longer than proxies and clients keep theirs, so that they close first


def most_requests(max_rows: AutoCount, max_waiting: int) -> int:
    """HTTP requests that may be open at once with an engine of this size; ``max_waiting`` 0 means no bound there."""
    rows = MAX_AUTO_ROWS if max_rows == "auto" else max_rows
    return rows + max_waiting + SPARE_REQUESTS if max_waiting else UNBOUNDED_REQUESTS


def transfer_settings(options: ServeOptions) -> TransferSettings | None:
    """ValueError for addresses where prompts or rows would be sent unencrypted to another machine."""
    if options.role == "both":
        return None
    check_urls(options.prefill)
    if options.role == "prefill" and not is_loopback(options.host) and options.tls_cert is None:
        raise ValueError(
            f"--host is {options.host}, which other machines reach, and prompts arrive there: --role prefill needs "
            "--tls-cert and --tls-key, or a loopback address"
        )
    is_receiver = options.role == "decode"
    return TransferSettings(
        secret=read_secret(options.transfer_secret_file),
        host=(options.transfer_host or "127.0.0.1") if is_receiver else None,
        port=options.transfer_port,
        cert=options.tls_cert if is_receiver else None,
        key=options.tls_key if is_receiver else None,
        ca=options.transfer_ca,
    )


def engine_options(options: ServeOptions, engine: EngineOptions) -> EngineOptions:
    """The engine's options, without those that the role does not use."""
    if engine.loras and options.role != "both":
        raise ValueError(f"--lora: engines that transfer KV have no adapters, and --role is {options.role}")
    if options.role == "prefill" and options.draft is not None:
        raise ValueError(
            "--draft compresses prompts where clients send them; give it to the servers with --role decode"
        )
    if options.role != "decode":
        return engine
    if engine.prefix_dir is not None or engine.prefix_store not in (None, "auto"):
        raise ValueError("--prefix-store and --prefix-dir are for prefill servers: --role prefill")
    return replace(engine, prefix_store=None)


def prepare(model: Path, engine: EngineOptions, options: ServeOptions) -> tuple[EngineSpec, ServerSettings]:
    """The engine's and the API's part of what a user gave. ValueError for what does not fit together."""
    engine = engine_options(options, engine)
    transfer = transfer_settings(options)
    if twice := [own for own in engine.lora_names if own in options.names_of(model)]:
        raise ValueError(f"--lora {twice[0]}: the model is served under that name; name the adapter NAME=PATH")
    settings = ServerSettings.of(
        options,
        api_keys=all_keys(options.api_keys, options.api_key_file),
        admin_key=options.admin_key,
        allowed_hosts=answered_hosts(options.host, options.allowed_hosts),
        max_requests=most_requests(engine.max_rows, 0 if options.role == "prefill" else engine.max_waiting),
        role=options.role,
        transfer_secret=b"" if transfer is None else transfer.secret,
        prompt_compression=options.prompt_compression,
    )
    spec = EngineSpec(
        model=str(model), options=engine, transfer=transfer, stream_interval_ms=options.stream_interval_ms
    )
    return spec, settings


class CannotLoad(ValueError):
    """The model, or the draft, cannot be served, with the reason; no option of the command line is wrong."""


def check_models(spec: EngineSpec, options: ServeOptions) -> None:
    """CannotLoad for a folder without a supported model: raised before anything is loaded."""
    for folder in (spec.model, options.draft):
        if folder is not None:
            try:
                read_model_config(folder)
            except (ValueError, OSError) as error:
                raise CannotLoad(str(error)) from None


def serve(spec: EngineSpec, settings: ServerSettings, options: ServeOptions) -> None:
    """Serve until a signal. OSError: not at this address. CannotLoad or EngineDead: loading it failed."""
    asyncio.run(_serve(spec, settings, options))


async def _serve(spec: EngineSpec, settings: ServerSettings, options: ServeOptions) -> None:
    tracing = None if options.otlp_traces_endpoint is None else otlp_tracing(options.otlp_traces_endpoint)
    with listen(options.host, options.port) as listener:
        warn_if_open(options.host, settings.api_keys, "server")
        log.info("loading %s", spec.model)
        prefill = None
        if options.role == "decode" and spec.transfer is not None:
            prefill = PrefillServers(options.prefill, spec.transfer, lambda: engine.metadata)
        engine = EngineProcess(
            replace(spec, draft_memory=draft_memory_of(spec, options)),
            restart=options.restart,
            stall_timeout_s=options.stall_timeout,
            prefill=prefill,
        )
        startup = StartupApp(settings.retry_after_s, apis=APIS)
        guard = ConnectionGuard()
        names = options.names_of(spec.model)
        config = uvicorn_config(
            startup,
            guard,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        try:
            config.load()
        except OSError as error:
            given = f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key}"
            raise ValueError(f"{given} are not a certificate and its key (PEM): {error}") from None
        # Both at once: they read their files side by side, and the first that fails ends the server.
        starting = asyncio.create_task(_start(engine))
        making = asyncio.create_task(_load_server(startup, engine, spec, settings, options, names, guard, tracing))
        loading = asyncio.gather(starting, making)
        loading.add_done_callback(lambda done: _log_address(done, listener, options, settings, names))
        try:
            await serve_until_signal(config, startup, listener, loading, options.drain_timeout)
        except (ValueError, OSError) as error:
            raise CannotLoad(str(error)) from error
        finally:
            await engine.shutdown(0)
            for task in (starting, making):
                task.cancel()
            _, state = await asyncio.gather(starting, making, return_exceptions=True)
            if isinstance(state, ServerState):
                state.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


async def _start(engine: EngineProcess) -> None:
    """Load the engine. ValueError, too, if every prefill server differs from it, or has another secret."""
    await engine.start()
    try:
        await engine.check_prefill()
    except PrefillFailed as error:  # they may start later
        log.warning("no prefill server can be used yet, and /health/ready is 503 until one can: %s", error)
    except ValueError as error:
        raise ValueError(f"no prefill server can be used: {error}") from None


async def _load_server(
    startup: StartupApp,
    engine: EngineProcess,
    spec: EngineSpec,
    settings: ServerSettings,
    options: ServeOptions,
    names: tuple[str, ...],
    guard: ConnectionGuard,
    tracing: Tracing | None,
) -> ServerState:
    """Load the tokenizer and the draft, then let the application answer."""
    tokenizer = await asyncio.to_thread(load_tokenizer, spec.model, options)
    created = int(time.time())
    compressor = None if options.draft is None else await asyncio.to_thread(_load_draft, spec, options)
    if compressor is not None and tokenizer is None:
        raise ValueError(f"{spec.model} has no tokenizer; a draft hands over text")

    def metadata() -> ModelMetadata:
        return ModelMetadata.of(engine.metadata, names, created)

    if spec.options.prefix_dir is not None:  # stored prompts outlive this process, so their namespaces must, too
        secret = await asyncio.to_thread(folder_secret, Path(spec.options.prefix_dir))
        settings = replace(settings, namespace_secret=secret)
    app = make_app(engine, tokenizer, settings, metadata, compressor, guard, tracing)
    state: ServerState = app.state.server
    startup.start(app, state)
    return state


def load_tokenizer(model: str, options: ApiOptions) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint folder, with the template that conversations are rendered with."""
    tokenizer = find_tokenizer(Path(model))
    if options.chat_template is not None:
        if tokenizer is None:
            raise ValueError(f"{model} has no tokenizer; a chat template needs one")
        tokenizer.chat_template = read_template(options.chat_template)
    elif tokenizer is not None and isinstance(tokenizer.chat_template, str):
        try:
            check_template(tokenizer.chat_template)
        except TemplateFault as fault:
            log.warning("%s: chat template: %s; requests with messages will be refused", model, fault)
    return tokenizer


def draft_memory_of(spec: EngineSpec, options: ServeOptions) -> DraftMemory | None:
    """What the engine must leave to the draft. Weights too: they may or may not be there when it measures."""
    if options.draft is None:
        return None
    settings = options.scoring
    memory = draft_memory(
        read_model_config(options.draft), settings, dtype=spec.options.dtype, device=spec.options.device
    )
    return DraftMemory(weight_bytes=0, working_bytes=memory.total_bytes)


def _load_draft(spec: EngineSpec, options: ServeOptions) -> PromptCompressor:
    assert options.draft is not None
    from snapstream.spec_prefill.compressor import PromptCompressor

    log.info("loading the draft %s", options.draft)
    return PromptCompressor(
        options.draft,
        scoring=options.scoring,
        protection=protection_of(options.prompt_threshold),
        dtype=spec.options.dtype,
        device=spec.options.device,
    )


def _log_address(
    loading: asyncio.Future[Any],
    listener: socket.socket,
    options: ServeOptions,
    settings: ServerSettings,
    names: tuple[str, ...],
) -> None:
    if loading.cancelled() or loading.exception() is not None:
        return
    url = url_of(options.host, listener, "https" if options.tls_cert else "http")
    log.info("serving %s at %s/v1", ", ".join(names), url)
    if settings.has_page and settings.role != "prefill":
        log.info("chat page: %s/", url)
