"""An application on uvicorn, in a thread, on a free loopback port; and the server's, with a fake engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import uvicorn
from starlette.types import ASGIApp

from snapstream.server.app import make_app
from snapstream.server.engine.api import ModelMetadata
from snapstream.server.http.connections import ConnectionGuard
from snapstream.server.options import ServerSettings
from tests.server.fake_engine import METADATA, FakeEngine, tokenizer
from tests.waiting import HANG_S, until


@contextmanager
def on_socket(app: ASGIApp, **config: Any) -> Iterator[str]:
    """The base URL of ``app``."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1, **config))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(HANG_S)
    assert not thread.is_alive()


@dataclass
class Running:
    engine: FakeEngine
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="key", **{"max_retries": 0, "timeout": HANG_S, **options})


@contextmanager
def running_server(
    *api_keys: str,
    engine: FakeEngine | None = None,
    guard: ConnectionGuard | None = None,
    tls: tuple[Path, Path] | None = None,
    metadata: ModelMetadata = METADATA,
    **settings: Any,
) -> Iterator[Running]:
    """``tls``: certificate and key."""
    engine, guard = engine or FakeEngine(), guard or ConnectionGuard()
    app = make_app(engine, tokenizer(), ServerSettings(api_keys=api_keys, **settings), lambda: metadata, guard=guard)
    files = {} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
    with on_socket(app, http=guard.protocol(), ws="none", **files) as url:  # as the server, whatever is installed
        yield Running(engine, f"{url}/v1")
