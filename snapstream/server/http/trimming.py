"""Trimming of prompts in front of an engine or an upstream server: a request's wish, and the draft that grants it.

The draft runs in one thread of its own, one prompt at a time: it would only compete with itself. Invariant: callers
that wait for it are bounded in number; one more gets a 429, nothing piles up. One that leaves while it waits is never
read; one that leaves while the draft reads is counted until that has ended. ``snapstream.spec_prefill`` decides what is
kept. The server's API and the proxy call this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from snapstream.config import DType
from snapstream.server.http.errors import bad_value, queue_full
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.spec_prefill.sticky import StickyTrimmer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.report import TrimReport
    from snapstream.spec_prefill.settings import CutSettings, ScoringSettings
    from snapstream.spec_prefill.text_trimmer import TextTrimmer

FIELD = "prompt_compression"
T = TypeVar("T")


def parse_wish(
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


def load_trimmer(
    draft: Path,
    *,
    threshold: int | None = None,
    scoring: ScoringSettings | None = None,
    cut: CutSettings | None = None,
    dtype: DType,
    device: str,
) -> TextTrimmer:
    """The draft, ready to score; None means the published setting. ValueError or OSError for what cannot be one."""
    from snapstream.spec_prefill.settings import Protection
    from snapstream.spec_prefill.text_trimmer import TextTrimmer

    return TextTrimmer(
        draft,
        scoring=scoring,
        cut=cut,
        protection=Protection() if threshold is None else Protection(threshold=threshold),
        dtype=dtype,
        device=device,
    )


class DraftThread:
    """Trims prompts on one thread. ``close`` it at the end."""

    def __init__(
        self,
        trimmer: TextTrimmer,
        target: PreTrainedTokenizerBase | None,
        *,
        max_waiting: int,
        retry_after_s: int,
    ) -> None:
        """``target`` counts the tokens of the model that answers; None counts with the draft's."""
        self._trimmer, self._target = trimmer, target
        self._sticky = StickyTrimmer(trimmer)
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
        wish: PromptCompression,
        tools: Sequence[Mapping[str, Any]] | None = None,
        scope: str = "",
    ) -> tuple[list[dict[str, Any]], TrimReport]:
        """A conversation with its long parts trimmed; roles, tools and the question stay as they are.

        ``tools`` count towards a ceiling, as the target's template writes them into the prompt. ``scope``: whose sticky
        cuts it may find.
        """

        def work() -> tuple[list[dict[str, Any]], TrimReport]:
            if wish.sticky:
                cut = self._sticky.trim(messages, wish, self._target, tools=tools, scope=scope)
                assert cut.messages is not None
                return [dict(message) for message in cut.messages], cut.report
            result = self._trimmer.trim(
                messages, target_tokenizer=self._target, keep=wish.keep, max_tokens=wish.max_tokens, tools=tools
            )
            assert result.messages is not None
            return list(result.messages), result.report

        return await self._run(work)

    async def text(self, text: str, wish: PromptCompression) -> tuple[str, TrimReport]:
        """A plain prompt, trimmed."""

        def work() -> tuple[str, TrimReport]:
            result = self._trimmer.trim(text, target_tokenizer=self._target, keep=wish.keep, max_tokens=wish.max_tokens)
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
            future.exception()  # seen, also when nobody waits for it any more

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
