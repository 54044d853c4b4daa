"""The same ``AsyncEngine`` on a thread of this process: for tests, and to measure what the other process costs.

There is nothing to restart: an error in the engine ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from snapstream.async_llm import LoopChannel
from snapstream.engine.worker import without_gauges
from snapstream.llm import LLM
from snapstream.server.app import make_app
from snapstream.server.engine.api import EngineDead, EngineStats, ModelMetadata, RequestDelta
from snapstream.server.engine.process import read_deltas
from snapstream.server.options import ServerSettings
from snapstream.types import QueueFull, Request
from tests.server.app_client import AppClient


class LocalEngine:
    """Make it on the event loop that will use it; nothing else may use the ``llm`` until ``shutdown``."""

    def __init__(self, llm: LLM) -> None:
        self._channel = LoopChannel(asyncio.get_running_loop())
        self._llm, self._client = llm, llm.engine_thread.client
        self._is_closing = False

    @property
    def is_ready(self) -> bool:
        return self.unavailable is None

    @property
    def unavailable(self) -> EngineDead | None:
        if self._is_closing:
            return EngineDead("the engine is shutting down")
        try:
            self._client.check()
        except RuntimeError as error:
            return EngineDead(str(error), is_final=True)
        return None

    async def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        self._check_ready()
        try:
            async for delta in read_deltas(self._client, request, self._channel):
                yield delta
        except (EngineDead, QueueFull):
            raise
        except RuntimeError as error:
            raise EngineDead(str(error), is_final=True) from error

    def stats(self) -> EngineStats:
        return self._client.stats if self.is_ready else without_gauges(self._client.stats)

    async def check_prefill(self) -> None:
        pass

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """Tokens at the beginning of a prompt that lie in the prefix store; EngineDead if there is no engine."""
        self._check_ready()
        return await asyncio.wrap_future(self._client.num_stored(token_ids, namespace))

    def reset_prefixes(self, namespace: str | None) -> None:
        """Forget the stored prefixes of a namespace, or all; EngineDead if there is no engine."""
        self._check_ready()
        self._client.reset_prefixes(namespace)

    async def shutdown(self, drain_s: float) -> None:
        self._is_closing = True
        with suppress(TimeoutError, RuntimeError):  # RuntimeError: it failed
            await asyncio.wait_for(asyncio.wrap_future(self._client.when_idle()), drain_s)
        self._client.fail_all(lambda: EngineDead("the server was shut down before the answer was complete"))
        await asyncio.to_thread(self._llm.engine_thread.close)

    def _check_ready(self) -> None:
        if (unavailable := self.unavailable) is not None:
            raise unavailable


def metadata_of(llm: LLM, model: str = "tiny") -> ModelMetadata:
    return ModelMetadata(model=model, names=("tiny",), architecture=llm.model_config, engine=llm.config, pid=1)


@asynccontextmanager
async def local_client(llm: LLM, draft: Any = None, **settings: Any) -> AsyncIterator[AppClient]:
    """A client of an app on this engine, in this process."""
    engine, metadata = LocalEngine(llm), metadata_of(llm)
    app = make_app(engine, llm.tokenizer, ServerSettings(**settings), lambda: metadata, draft)
    async with AppClient(app) as http:
        yield http
        http.server.close()
    await engine.shutdown(0)
