"""Prompt compression in the server and the proxy: the field of a request, the thread that runs the draft, and what
happens to a prompt that the draft cannot compress.

Invariants: the number of prompts that wait for the draft is bounded; one more gets a 429. Compression that a request
asks for is done or refused with the field's name. The server's default never fails a request (except for a full queue):
a prompt that the draft cannot compress stays uncompressed, and the answer reports why. ``snapstream.spec_prefill``
decides what is kept.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from snapstream.server.http.errors import ApiError, bad_value, queue_full
from snapstream.server.options import ServerSettings
from snapstream.spec_prefill.compressor import StickyCompressor
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.types import CompressionSummary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import CompressionReport, PromptCompressor

log = logging.getLogger(__name__)

FIELD = "prompt_compression"
P = TypeVar("P", str, list[dict[str, Any]])  # a plain prompt, or the messages of a conversation


def parse_compression(
    value: Any, default: PromptCompression | None, *, takes_sticky: bool = False
) -> PromptCompression | None:
    """The ``prompt_compression`` of a body: ``{"keep": share}``, ``{"max_tokens": n}``, ``"off"``; null is the default.

    ``takes_sticky``: also with ``"sticky": true``. None: no compression. Raises ApiError 400 with the field's name.
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


def compression_field(options: PromptCompression | None) -> str | dict[str, Any]:
    """Options as a request would write them."""
    if options is None:
        return "off"
    amount = {"max_tokens": options.max_tokens} if options.keep is None else {"keep": options.keep}
    return amount | ({"sticky": True} if options.sticky else {})


class DraftThread:
    """Compresses prompts on one thread, one at a time: two would only compete. ``close`` it at the end.

    The prompt of a client that leaves while it waits is dropped; one that the draft is reading counts until that ends.
    """

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
        self.num_waiting = 0  # prompts, the one that the draft reads included
        self._turn = asyncio.Lock()  # not the executor's queue: a client that leaves would stay in it with its prompt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft")

    async def compress(
        self,
        prompt: P,
        options: PromptCompression,
        tools: Sequence[Mapping[str, Any]] | None = None,
        scope: str = "",
    ) -> tuple[P, CompressionReport]:
        """A text, or a conversation with its long parts compressed: roles, tools and the question stay as they are.

        ``tools`` count towards a ceiling, as the target's template writes them into the prompt. ``scope``: the callers
        who share what sticky compression remembers.
        """

        given: str | list[dict[str, Any]] = prompt

        def work() -> tuple[Any, CompressionReport]:
            if options.sticky and not isinstance(given, str):
                result = self._sticky.compress(given, options, self._target, tools=tools, scope=scope)
            else:
                result = self._compressor.compress(
                    given, target_tokenizer=self._target, tools=tools, **options.arguments()
                )
            short = result.text if result.messages is None else [dict(message) for message in result.messages]
            return short, result.report

        if self.num_waiting >= self._max_waiting:
            raise queue_full(f"{self._max_waiting} prompts wait for the draft, which is the limit", self._retry_after_s)
        self.num_waiting += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self.num_waiting -= 1
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
        self.num_waiting -= 1
        self._turn.release()

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._end_turn()
        if not future.cancelled():
            future.exception()  # retrieved, even if the request has gone

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class CompressionService:
    """The server's draft; without a compressor every request but "off" is refused."""

    def __init__(
        self,
        compressor: PromptCompressor | None,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: ServerSettings,
        count: Callable[[int], None],
    ) -> None:
        """``count`` gets the number of dropped tokens. ValueError for a default without a draft."""
        self._settings, self._count = settings, count
        self.draft: DraftThread | None = None
        self.threshold = 0 if compressor is None else compressor.protection.threshold
        if compressor is not None:
            own = copy.deepcopy(tokenizer)  # fast tokenizers refuse to be used and reconfigured by two threads at once
            self.draft = DraftThread(
                compressor, own, max_waiting=settings.max_draft_waiting, retry_after_s=settings.retry_after_s
            )
        elif settings.prompt_compression is not None:
            raise ValueError(
                f"{FIELD} is {compression_field(settings.prompt_compression)} by default, and there is no draft"
            )

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()

    def requested(self, value: Any, obstacle: str, *, is_conversation: bool) -> PromptCompression | None:
        """What a request with the field ``value`` gets; 400 for what it cannot get.

        ``obstacle``: why its prompts cannot be compressed, or "".
        """
        if self.draft is None and value not in (None, "off"):
            reason = f"{FIELD} {value!r} needs a draft, and this server has none (--draft)"
            raise bad_value(reason, FIELD, "unsupported_parameter")
        options = parse_compression(value, self._settings.prompt_compression, takes_sticky=True)
        if options is not None and options.sticky and not is_conversation:
            raise bad_value(f"{FIELD}: sticky is for conversations; a completion has none", FIELD)
        if options is None or not obstacle:
            return options
        if value is not None:
            raise bad_value(f"{FIELD} is not supported together with {obstacle}", FIELD)
        return None

    async def compress(
        self,
        prompt: P,
        options: PromptCompression,
        tools: Sequence[Mapping[str, Any]] | None = None,
        scope: str = "",
        *,
        is_requested: bool,
    ) -> tuple[P, CompressionSummary]:
        """As ``DraftThread.compress``. ``is_requested``: the request asked for it; else it is the server's default."""
        assert self.draft is not None
        num_chars = len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
        limit = self._settings.max_draft_chars
        if num_chars > limit:
            reason = f"the prompt has {num_chars} characters, and the draft reads at most {limit}"
            if is_requested:
                param = "prompt" if isinstance(prompt, str) else "messages"
                raise bad_value(reason, param, "context_length_exceeded")
            return prompt, uncompressed(reason)
        try:
            short, report = await self.draft.compress(prompt, options, tools, scope)
        except ApiError:
            raise
        except ValueError as error:  # e.g. a ceiling below what is protected
            if is_requested:
                raise bad_value(f"{FIELD}: {error}", FIELD) from None
            return prompt, uncompressed(str(error))
        except Exception:
            if is_requested:
                raise
            log.exception("the draft failed; the prompt stays uncompressed")
            return prompt, uncompressed("the draft failed")
        self._count(report.dropped_tokens)
        return short, report


def uncompressed(reason: str) -> CompressionSummary:
    return CompressionSummary(tokens_before=0, tokens_after=0, reason=reason)
