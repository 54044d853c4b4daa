"""From options to a running proxy: socket, draft, and an orderly end.

Invariant: the socket is bound before the draft is loaded, so a taken port fails at once. The first signal drains: open
answers go on for at most the drain timeout, new ones get a 503; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from snapstream.proxy.app import make_proxy
from snapstream.proxy.settings import ProxySettings
from snapstream.server.hosts import is_loopback
from snapstream.server.run import LAST_FRAMES_S, DrainingServer, check_place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Where the proxy listens and how it ends."""

    host: str = "127.0.0.1"
    port: int = 8001  # 0 takes a free one
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_place(self.port, self.drain_timeout_s)


def run_proxy(
    compressor: PromptCompressor,
    target: PreTrainedTokenizerBase | None,
    settings: ProxySettings,
    options: ProxyOptions,
    listener: socket.socket,
) -> None:
    """Serve on ``listener`` until a signal."""
    asyncio.run(_run(compressor, target, settings, options, listener))


def bind(options: ProxyOptions) -> socket.socket:
    """OSError if the address is taken or is none of this machine's."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    return socket.create_server((options.host, options.port), family=family, backlog=2048)


def load_target(folder: Path | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer that counts the upstream's tokens; ValueError where the folder has none."""
    if folder is None:
        return None
    from snapstream.assembly import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer")
    return tokenizer


def uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # app.py logs requests
        server_header=False,
        date_header=False,  # the upstream's own travels on
        timeout_graceful_shutdown=LAST_FRAMES_S,
    )


async def _run(
    compressor: PromptCompressor,
    target: PreTrainedTokenizerBase | None,
    settings: ProxySettings,
    options: ProxyOptions,
    listener: socket.socket,
) -> None:
    if not settings.api_keys and not is_loopback(options.host):
        log.warning("no API key is set: everyone who can reach %s may use this proxy", options.host)
    app = make_proxy(compressor, target, settings)
    host = f"[{options.host}]" if ":" in options.host else options.host
    log.info("proxy at http://%s:%d/v1 for %s", host, listener.getsockname()[1], settings.shown)
    await DrainingServer(uvicorn_config(app), app.state.proxy, options.drain_timeout_s).serve(sockets=[listener])
