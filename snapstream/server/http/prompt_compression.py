"""Prompt compression in the server and the proxy: the options of a request, and the thread that runs the draft.

The draft handles one prompt at a time: two would only compete. Invariant: the number of waiting prompts is bounded;
one more gets a 429. The prompt of a client that leaves while it waits is dropped; one that the draft is already reading
counts until that has ended. ``snapstream.spec_prefill`` decides what is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from snapstream.config import DType
from snapstream.server.http.errors import bad_value, queue_full
from snapstream.spec_prefill.request_compressor import StickyCompressor
from snapstream.spec_prefill.settings import PromptCompression

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor
    from snapstream.spec_prefill.report import CompressionReport
    from snapstream.spec_prefill.settings import ChunkSettings, ScoringSettings

FIELD = "prompt_compression"
T = TypeVar("T")


def parse_compression(
    value: Any, default: PromptCompression | None, *, takes_sticky: bool = False
) -> PromptCompression | None:
    """The ``prompt_compression`` of a body: ``{"keep": share}``, ``{"max_tokens": n}``, ``"off"``; null is the default.

    ``takes_sticky``: also with ``"sticky": true``. None leaves the prompt whole. Raises ApiError 400 with the field's
    name.
    """
    if value is None:
        return default
    if value == "off":
        return None
    fields = {"keep", "max_tokens", "sticky"} if takes_sticky else {"keep", "max_tokens"}
    if not isinstance(value, Mapping) or not value or set(value) - fields:
        raise bad_value(f'{FIELD} is {value!r}; it must be {{"keep": share}}, {{"max_tokens": n}} or "off"', FIELD)
    try:
        return PromptCompression(
            keep=value.get("keep"), max_tokens=value.get("max_tokens"), sticky=value.get("sticky", False)
        )
    except ValueError as error:
        raise bad_value(f"{FIELD}: {error}", FIELD) from None


def load_compressor(
    draft: Path,
    *,
    threshold: int | None = None,
    scoring: ScoringSettings | None = None,
    chunks: ChunkSettings | None = None,
    dtype: DType,
    device: str,
) -> PromptCompressor:
    """The draft, ready to score; None means the published setting. ValueError or OSError for what cannot be one."""
    from snapstream.spec_prefill.compressor import PromptCompressor
    from snapstream.spec_prefill.settings import Protection

    return PromptCompressor(
        draft,
        scoring=scoring,
        chunks=chunks,
        protection=Protection() if threshold is None else Protection(threshold=threshold),
        dtype=dtype,
        device=device,
    )


class DraftThread:
    """Compresses prompts on one thread. ``close`` it at the end."""

    def __init__(
        self,
        compressor: PromptCompressor,
        target: PreTrainedTokenizerBase | None,
        *,
        max_waiting: int,
        retry_after_s: int,
    ) -> None:
        """``target`` counts the tokens of the model that answers; None counts with the draft's."""
        self._compressor, self._target = compressor, target
        self._sticky = StickyCompressor(compressor)
        self._max_waiting, self._retry_after_s = max_waiting, retry_after_s
        self._num_waiting = 0
        self._turn = asyncio.Lock()  # not the thread's own queue: who leaves would stay in it, prompt and all
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft")

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for the draft, the one that it reads included."""
        return self._num_waiting

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: PromptCompression,
        tools: Sequence[Mapping[str, Any]] | None = None,
        scope: str = "",
    ) -> tuple[list[dict[str, Any]], CompressionReport]:
        """A conversation with its long parts compressed; roles, tools and the question stay as they are.

        ``tools`` count towards a ceiling, as the target's template writes them into the prompt. ``scope``: whose sticky
        cuts it may find.
        """

        def work() -> tuple[list[dict[str, Any]], CompressionReport]:
            if options.sticky:
                cut = self._sticky.compress(messages, options, self._target, tools=tools, scope=scope)
                assert cut.messages is not None
                return [dict(message) for message in cut.messages], cut.report
            result = self._compressor.compress(
                messages, target_tokenizer=self._target, keep=options.keep, max_tokens=options.max_tokens, tools=tools
            )
            assert result.messages is not None
            return list(result.messages), result.report

        return await self._run(work)

    async def text(self, text: str, options: PromptCompression) -> tuple[str, CompressionReport]:
        """A plain prompt, compressed."""

        def work() -> tuple[str, CompressionReport]:
            result = self._compressor.compress(
                text, target_tokenizer=self._target, keep=options.keep, max_tokens=options.max_tokens
            )
            assert result.text is not None
            return result.text, result.report

        return await self._run(work)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._num_waiting >= self._max_waiting:
            raise queue_full(f"{self._max_waiting} prompts wait for the draft, which is the limit", self._retry_after_s)
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self._num_waiting -= 1
            raise
        try:
            future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        except BaseException:
            self._end_turn()
            raise
        # Counted until the thread is done with it, also when its client has left: the bound is on the draft's work.
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def _end_turn(self) -> None:
        self._num_waiting -= 1
        self._turn.release()

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._end_turn()
        if not future.cancelled():
            future.exception()  # retrieved, even if the request has gone

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
