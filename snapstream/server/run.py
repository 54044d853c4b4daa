"""From options to a running server: engine process, app, socket, and an orderly end.

        socket bound -> loading (503) -> ready -> SIGTERM: draining (503, running streams go on) -> ended

Invariant: the socket is bound before anything is loaded, so a taken port fails at once; whatever happens, the engine
process is ended before ``serve`` returns. A second signal ends the server without waiting.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from snapstream.assets import TINY_MODEL
from snapstream.cache.prefix_folder import folder_secret
from snapstream.config import AutoCount, as_number
from snapstream.config.addresses import is_loopback
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import find_tokenizer, read_template
from snapstream.plan.draft_memory import DraftMemory, draft_memory
from snapstream.plan.fit import MAX_AUTO_ROWS
from snapstream.server.apart import ApartOptions
from snapstream.server.app import make_app
from snapstream.server.engine.messages import EngineSpec
from snapstream.server.engine.process import STALL_TIMEOUT_S, EngineProcess
from snapstream.server.http.draining import LAST_FRAMES_S, DrainingServer, check_place
from snapstream.server.http.loading import Curtain
from snapstream.server.http.trimming import load_trimmer
from snapstream.server.http.wire import Wire
from snapstream.server.openai.front import Front
from snapstream.server.settings import ModelFacts, ServerSettings
from snapstream.server.tracing import Tracing, otlp_tracing
from snapstream.spec_prefill.settings import PromptCompression, ScoringSettings, scoring_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.text_trimmer import TextTrimmer

log = logging.getLogger(__name__)

SPARE_REQUESTS = 64  # read and tokenized while the engine's queue is full
UNBOUNDED_REQUESTS = 4096  # where the engine's queue has no bound, the front still needs one
KEEP_ALIVE_S = 75  # of an idle connection: longer than proxies and clients keep theirs, so that they close first


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where and how long; ``ServerSettings`` has what requests may do."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    names: tuple[str, ...] = ()  # served model names; default: the folder's
    drain_timeout_s: float = 30.0
    restart: bool = True
    stall_timeout_s: float = STALL_TIMEOUT_S
    otlp_endpoint: str | None = None  # where traces go; None: nobody makes any
    tls_cert: Path | None = None
    tls_key: Path | None = None
    chat_template: Path | None = None  # a file; None: the checkpoint's
    draft: Path | None = None  # checkpoint folder
    draft_threshold: int | None = None  # prompts of fewer tokens are left alone; None: the published number
    draft_context_len: int | None = None  # tokens that it reads at once; None: the model's limit
    apart: ApartOptions = field(default_factory=ApartOptions)

    def __post_init__(self) -> None:
        check_place(self.port, self.drain_timeout_s)
        if not all(self.names):
            raise ValueError("a served model name is empty")
        if self.stall_timeout_s:  # 0: never
            as_number("--stall-timeout", self.stall_timeout_s, 1.0, 86400.0)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS needs both a certificate and a key")
        if self.draft is None and self.draft_context_len is not None:
            raise ValueError(
                f"--draft-context-len is {self.draft_context_len}, and there is no draft; give one with --draft"
            )
        for file in (self.tls_cert, self.tls_key, self.chat_template):
            if file is not None and not file.is_file():
                raise ValueError(f"{file} is not a file")


def most_requests(max_rows: AutoCount, max_waiting: int) -> int:
    """HTTP requests that may be open at once beside an engine of this size; ``max_waiting`` 0 means no bound there."""
    rows = MAX_AUTO_ROWS if max_rows == "auto" else max_rows
    return rows + max_waiting + SPARE_REQUESTS if max_waiting else UNBOUNDED_REQUESTS


def default_compression(
    draft: Path | None, keep: float | None, max_tokens: int | None, threshold: int | None
) -> PromptCompression | None:
    """The trimming of requests that bring no wish of their own. ValueError for a wish without a draft."""
    given = {"--prompt-keep": keep, "--prompt-max-tokens": max_tokens, "--prompt-threshold": threshold}
    if draft is None and any(value is not None for value in given.values()):
        name = next(name for name, value in given.items() if value is not None)
        raise ValueError(f"{name} is {given[name]}, and there is no draft to shorten prompts; give one with --draft")
    return None if keep is None and max_tokens is None else PromptCompression(keep=keep, max_tokens=max_tokens)


class CannotLoad(ValueError):
    """The model, or the draft, cannot be served, with the reason; no option of the command line is wrong."""


def check_models(spec: EngineSpec, options: ServeOptions) -> None:
    """CannotLoad for a folder that holds no model of ours: told before anything of a server is there."""
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
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    tracing = None if options.otlp_endpoint is None else otlp_tracing(options.otlp_endpoint)
    with socket.create_server((options.host, options.port), family=family, backlog=2048) as listener:
        if not settings.api_keys and not is_loopback(options.host):
            log.warning("no API key is set: everyone who can reach %s may use this server", options.host)
        log.info("loading %s", spec.model)
        engine = EngineProcess(
            replace(spec, beside=memory_beside(spec, options)),
            restart=options.restart,
            stall_timeout_s=options.stall_timeout_s,
            make_readers=options.apart.make_readers(spec.transfer),
        )
        curtain = Curtain(settings.retry_after_s)
        wire = Wire()
        server = DrainingServer(_uvicorn_config(curtain, options, wire), curtain, options.drain_timeout_s)
        names = options.names or (Path(spec.model).resolve().name,)
        # Both at once: they read their files side by side, and the first that fails ends the server.
        starting = asyncio.create_task(engine.start())
        making = asyncio.create_task(_load_front(curtain, engine, spec, settings, options, names, wire, tracing))
        loading = asyncio.gather(starting, making)
        loading.add_done_callback(
            lambda future: _after_loading(
                future, server, listener, options, names, settings.has_page and settings.duty != "prefill"
            )
        )
        try:
            await server.serve(sockets=[listener])
            if loading.done() and not curtain.is_draining:
                try:
                    loading.result()  # raises the error that ended it
                except (ValueError, OSError) as error:
                    raise CannotLoad(str(error)) from error
        finally:
            await engine.shutdown(0)
            for task in (starting, making):
                task.cancel()
            _, front = await asyncio.gather(starting, making, return_exceptions=True)
            if isinstance(front, Front):
                front.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


async def _load_front(
    curtain: Curtain,
    engine: EngineProcess,
    spec: EngineSpec,
    settings: ServerSettings,
    options: ServeOptions,
    names: tuple[str, ...],
    wire: Wire,
    tracing: Tracing | None,
) -> Front:
    """Read what the front needs, and let it answer."""
    tokenizer = await asyncio.to_thread(_load_tokenizer, spec, options)
    created = int(time.time())
    trimmer = None if options.draft is None else await asyncio.to_thread(_load_draft, spec, options)
    if trimmer is not None and tokenizer is None:
        raise ValueError(f"{spec.model} has no tokenizer; a draft hands over text")

    def facts() -> ModelFacts:
        known = engine.facts
        return ModelFacts(
            names=names,
            vocab_size=known.vocab_size,
            engine=known.engine,
            created=created,
            num_layers=known.architecture.num_layers,
            num_kv_heads=known.architecture.num_kv_heads,
            has_examples=Path(spec.model).resolve() == TINY_MODEL.resolve(),
        )

    if spec.options.prefix_dir is not None:  # stored prompts outlive this process, so their namespaces must, too
        secret = await asyncio.to_thread(folder_secret, Path(spec.options.prefix_dir))
        settings = replace(settings, namespace_secret=secret)
    app = make_app(engine, tokenizer, settings, facts, trimmer, wire, tracing)
    front: Front = app.state.front
    curtain.rise(app, front)
    return front


def _load_tokenizer(spec: EngineSpec, options: ServeOptions) -> PreTrainedTokenizerBase | None:
    tokenizer = find_tokenizer(Path(spec.model))
    if options.chat_template is not None:
        if tokenizer is None:
            raise ValueError(f"{spec.model} has no tokenizer; --chat-template needs one")
        tokenizer.chat_template = read_template(options.chat_template)
    return tokenizer


def memory_beside(spec: EngineSpec, options: ServeOptions) -> DraftMemory | None:
    """What the engine must leave to the draft. Weights too: they may or may not be there when it measures."""
    if options.draft is None:
        return None
    settings = scoring_of(None, options.draft_context_len) or ScoringSettings()
    memory = draft_memory(
        read_model_config(options.draft), settings, dtype=spec.options.dtype, device=spec.options.device
    )
    return DraftMemory(weight_bytes=0, working_bytes=memory.total_bytes)


def _load_draft(spec: EngineSpec, options: ServeOptions) -> TextTrimmer:
    assert options.draft is not None
    log.info("loading the draft %s", options.draft)
    return load_trimmer(
        options.draft,
        threshold=options.draft_threshold,
        scoring=scoring_of(None, options.draft_context_len),
        dtype=spec.options.dtype,
        device=spec.options.device,
    )


def _uvicorn_config(app: Curtain, options: ServeOptions, wire: Wire) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=wire.protocol(),
        ws="none",
        lifespan="off",  # the application comes later; _serve closes it
        log_config=None,
        access_log=False,  # visits log themselves, with their ids
        server_header=False,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        timeout_graceful_shutdown=LAST_FRAMES_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def _after_loading(
    loading: asyncio.Future[Any],
    server: DrainingServer,
    listener: socket.socket,
    options: ServeOptions,
    names: tuple[str, ...],
    has_page: bool,
) -> None:
    if loading.cancelled() or loading.exception() is not None:
        server.should_exit = True
        return
    scheme = "https" if options.tls_cert else "http"
    port = listener.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    log.info("serving %s at %s://%s:%d/v1", ", ".join(names), scheme, host, port)
    if has_page:
        log.info("chat page: %s://%s:%d/", scheme, host, port)
