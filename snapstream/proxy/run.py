"""From options to a running proxy: socket, draft, and an orderly end.

        socket bound -> loading (503) -> ready -> SIGTERM: draining (503, open answers go on) -> ended

Invariant: the socket is bound before the draft is loaded, so a taken port fails at once. Answers that are open at the
first signal go on for at most the drain timeout; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from snapstream.config.values import is_loopback
from snapstream.proxy.app import Proxy, ProxySettings, make_proxy
from snapstream.server.apis import APIS
from snapstream.server.http.connections import ConnectionGuard
from snapstream.server.http.lifecycle import LAST_FRAMES_S, DrainingServer, StartupApp, check_place, listen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor

log = logging.getLogger(__name__)

# Reads the draft, and the tokenizer that counts the upstream's tokens if there is one.
Load = Callable[[], "tuple[PromptCompressor, PreTrainedTokenizerBase | None]"]


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Where the proxy listens and how it ends."""

    host: str = "127.0.0.1"
    port: int = 8001  # 0 takes a free one
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_place(self.port, self.drain_timeout_s)


def run_proxy(load: Load, settings: ProxySettings, options: ProxyOptions, listener: socket.socket) -> None:
    """Serve on ``listener`` until a signal. What ``load`` raises ends the proxy, and is raised here."""
    asyncio.run(_run(load, settings, options, listener))


def bind(options: ProxyOptions) -> socket.socket:
    """OSError if the address is taken or is none of this machine's."""
    return listen(options.host, options.port)


def load_target(folder: Path | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer that counts the upstream's tokens; ValueError where the folder has none."""
    if folder is None:
        return None
    from snapstream.models.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=ConnectionGuard().protocol(),
        ws="none",
        lifespan="off",  # the application comes later; _run closes it
        log_config=None,
        access_log=False,  # app.py logs requests
        server_header=False,
        date_header=False,  # the upstream's own travels on
        timeout_graceful_shutdown=LAST_FRAMES_S,
    )


async def _run(load: Load, settings: ProxySettings, options: ProxyOptions, listener: socket.socket) -> None:
    if not settings.api_keys and not is_loopback(options.host):
        log.warning("no API key is set: everyone who can reach %s may use this proxy", options.host)
    startup = StartupApp(settings.retry_after_s, "proxy", apis=APIS)
    server = DrainingServer(uvicorn_config(startup), startup, options.drain_timeout_s)
    host = f"[{options.host}]" if ":" in options.host else options.host
    place = f"http://{host}:{listener.getsockname()[1]}"
    log.info("loading the draft; %s answers 503 until then", place)
    loading = asyncio.create_task(_load(startup, load, settings))

    def after_loading(task: asyncio.Task[Proxy]) -> None:
        if task.cancelled() or task.exception() is not None:
            server.should_exit = True
        else:
            log.info("proxy at %s/v1 for %s", place, settings.shown)

    loading.add_done_callback(after_loading)
    try:
        await server.serve(sockets=[listener])
        if loading.done() and not startup.is_draining:
            loading.result()  # raises the error that ended it
    finally:
        loading.cancel()
        [proxy] = await asyncio.gather(loading, return_exceptions=True)
        if isinstance(proxy, Proxy):
            await proxy.close()


async def _load(startup: StartupApp, load: Load, settings: ProxySettings) -> Proxy:
    """Read the draft, and let the proxy answer."""
    compressor, target = await asyncio.to_thread(load)
    app = make_proxy(compressor, target, settings)
    proxy: Proxy = app.state.proxy
    startup.start(app, proxy)
    return proxy
