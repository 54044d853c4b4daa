"""The app with a fake engine on uvicorn, in a thread, on a free loopback port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import uvicorn

from snapstream.server.app import make_app
from snapstream.server.engine.api import ModelMetadata
from snapstream.server.http.connections import ConnectionGuard
from snapstream.server.options import ServerSettings
from tests.server.fake_engine import FACTS, FakeEngine, tokenizer
from tests.waiting import HANG_S, until


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
    facts: ModelMetadata = FACTS,
    **settings: Any,
) -> Iterator[Running]:
    """``tls``: certificate and key."""
    engine, guard = engine or FakeEngine(), guard or ConnectionGuard()
    app = make_app(engine, tokenizer(), ServerSettings(api_keys=api_keys, **settings), lambda: facts, guard=guard)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=guard.protocol(),
            ws="none",  # as the server, whatever is installed
            log_config=None,
            timeout_graceful_shutdown=1,
            ssl_certfile=None if tls is None else tls[0],
            ssl_keyfile=None if tls is None else tls[1],
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(engine, f"http://127.0.0.1:{port}/v1")
    server.should_exit = True
    thread.join(HANG_S)
    assert not thread.is_alive()
