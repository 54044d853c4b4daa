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

from snapstream.config.addresses import is_loopback
from snapstream.proxy.app import Proxy, make_proxy
from snapstream.proxy.settings import ProxySettings
from snapstream.server.http.draining import LAST_FRAMES_S, DrainingServer, check_place
from snapstream.server.http.loading import Curtain
from snapstream.server.http.wire import Wire

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.text_trimmer import TextTrimmer

log = logging.getLogger(__name__)

# Reads the draft, and the tokenizer that counts the upstream's tokens if there is one.
Load = Callable[[], "tuple[TextTrimmer, PreTrainedTokenizerBase | None]"]


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
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    return socket.create_server((options.host, options.port), family=family, backlog=2048)


def load_target(folder: Path | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer that counts the upstream's tokens; ValueError where the folder has none."""
    if folder is None:
        return None
    from snapstream.models.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Wire().protocol(),
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
    curtain = Curtain(settings.retry_after_s, "proxy")
    server = DrainingServer(uvicorn_config(curtain), curtain, options.drain_timeout_s)
    host = f"[{options.host}]" if ":" in options.host else options.host
    place = f"http://{host}:{listener.getsockname()[1]}"
    log.info("loading the draft; %s answers 503 until then", place)
    loading = asyncio.create_task(_load(curtain, load, settings))

    def after_loading(task: asyncio.Task[Proxy]) -> None:
        if task.cancelled() or task.exception() is not None:
            server.should_exit = True
        else:
            log.info("proxy at %s/v1 for %s", place, settings.shown)

    loading.add_done_callback(after_loading)
    try:
        await server.serve(sockets=[listener])
        if loading.done() and not curtain.is_draining:
            loading.result()  # raises the error that ended it
    finally:
        loading.cancel()
        [proxy] = await asyncio.gather(loading, return_exceptions=True)
        if isinstance(proxy, Proxy):
            await proxy.close()


async def _load(curtain: Curtain, load: Load, settings: ProxySettings) -> Proxy:
    """Read the draft, and let the proxy answer."""
    trimmer, target = await asyncio.to_thread(load)
    app = make_proxy(trimmer, target, settings)
    proxy: Proxy = app.state.proxy
    curtain.rise(app, proxy)
    return proxy
