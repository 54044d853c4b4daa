"""Decides which prompts of a request the server's draft compresses, and what happens where it cannot.

Options that a request states are granted or refused, with its field's name. Invariant: the server's default never makes
a request fail (but for a full queue): a prompt that the draft cannot compress stays uncompressed, and the answer says
why. ``http/prompt_compression.py`` has the draft's thread, ``routes.py`` calls this between checks and tokenizer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.prompt_compression import FIELD, DraftThread, parse_compression
from snapstream.server.openai.protocol import CompletionBody, GenerationBody
from snapstream.server.options import ServerSettings
from snapstream.spec_prefill.settings import PromptCompression, why_uncompressed
from snapstream.types import CompressionSummary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor
    from snapstream.spec_prefill.report import CompressionReport

log = logging.getLogger(__name__)

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class RequestedCompression:
    """What a request gets. ``how`` None: its prompts stay uncompressed."""

    how: PromptCompression | None = None
    is_own: bool = False  # the request asked for it; else the server's default


class CompressionService:
    """The draft as the routes use it; without a compressor every request but "off" is refused."""

    def __init__(
        self,
        compressor: PromptCompressor | None,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: ServerSettings,
        count: Callable[[int], None],
    ) -> None:
        """``count`` gets the number of tokens taken out. ValueError for a default without a draft."""
        self._settings, self._count = settings, count
        self._draft: DraftThread | None = None
        self._threshold = 0 if compressor is None else compressor.protection.threshold
        if compressor is not None:
            own = copy.deepcopy(tokenizer)  # fast tokenizers refuse to be used and reconfigured by two threads at once
            self._draft = DraftThread(
                compressor, own, max_waiting=settings.max_draft_waiting, retry_after_s=settings.retry_after_s
            )
        elif settings.prompt_compression is not None:
            raise ValueError(
                f"{FIELD} is {compression_field(settings.prompt_compression)} by default, and there is no draft"
            )

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for the draft, the one that it reads included."""
        return 0 if self._draft is None else self._draft.num_waiting

    def close(self) -> None:
        if self._draft is not None:
            self._draft.close()

    def requested(self, body: GenerationBody, prompts: Sequence[Any] = ()) -> RequestedCompression:
        """What ``body`` gets for its ``prompts`` (of ``as_prompts``); 400 for what it cannot get."""
        value = body.prompt_compression
        if self._draft is None and value not in (None, "off"):
            reason = f"{FIELD} {value!r} needs a draft, and this server has none (--draft)"
            raise bad_value(reason, FIELD, "unsupported_parameter")
        how = parse_compression(value, self._settings.prompt_compression, takes_sticky=True)
        if how is not None and how.sticky and isinstance(body, CompletionBody):
            raise bad_value(f"{FIELD}: sticky is for conversations; a completion has none", FIELD)
        obstacle = _obstacle(body, prompts)
        if how is None or not obstacle:
            return RequestedCompression(how, value is not None)
        if value is not None:
            raise bad_value(f"{FIELD} is not supported together with {obstacle}", FIELD)
        return RequestedCompression()

    def left_uncompressed(
        self, num_tokens: int, num_stored: int, requested: RequestedCompression
    ) -> CompressionSummary | None:
        """Why a prompt stays uncompressed: so much of it is in the prefix cache; None where it does not."""
        if requested.how is None:
            return None
        reason = why_uncompressed(num_tokens, num_stored, requested.how, self._threshold)
        return CompressionSummary(tokens_before=0, tokens_after=0, reason=reason) if reason else None

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        requested: RequestedCompression,
        scope: str,
    ) -> tuple[list[dict[str, Any]], CompressionSummary]:
        """A conversation as the template takes it, with its long parts compressed. ``requested.how`` is not None.

        ``scope``: whose sticky cuts it may find.
        """
        draft, how = self._draft, requested.how
        assert draft is not None and how is not None
        num_chars = sum(len(message["content"]) for message in messages)
        return await self._granted(
            messages, num_chars, "messages", requested, partial(draft.chat, messages, how, tools, scope)
        )

    async def texts(
        self, prompts: Sequence[Any], requested: RequestedCompression
    ) -> tuple[list[Any], list[CompressionSummary | None]]:
        """The prompts of a completion, each with what was done to it (None: none was requested)."""
        draft, how = self._draft, requested.how
        if draft is None or how is None:
            return list(prompts), [None] * len(prompts)
        left: list[Any] = []
        reports: list[CompressionSummary | None] = []
        for text in prompts:
            short, report = await self._granted(text, len(text), "prompt", requested, partial(draft.text, text, how))
            left.append(short)
            reports.append(report)
        return left, reports

    async def _granted(
        self,
        prompt: P,
        num_chars: int,
        param: str,
        requested: RequestedCompression,
        compress: Callable[[], Awaitable[tuple[P, CompressionReport]]],
    ) -> tuple[P, CompressionSummary]:
        limit = self._settings.max_draft_chars
        if num_chars > limit:
            reason = f"the prompt has {num_chars} characters, and the draft reads at most {limit}"
            if requested.is_own:
                raise bad_value(reason, param, "context_length_exceeded")
            return prompt, CompressionSummary(tokens_before=0, tokens_after=0, reason=reason)
        try:
            short, report = await compress()
        except ApiError:
            raise
        except ValueError as error:  # e.g. a ceiling below what is protected
            if requested.is_own:
                raise bad_value(f"{FIELD}: {error}", FIELD) from None
            return prompt, CompressionSummary(tokens_before=0, tokens_after=0, reason=str(error))
        except Exception:
            if requested.is_own:
                raise
            log.exception("the draft failed; the prompt stays uncompressed")
            return prompt, CompressionSummary(tokens_before=0, tokens_after=0, reason="the draft failed")
        self._count(report.dropped_tokens)
        return short, report


def compression_field(how: PromptCompression | None) -> str | dict[str, Any]:
    """Options as a request would write them."""
    if how is None:
        return "off"
    amount: dict[str, Any] = {"keep": how.keep} if how.keep is not None else {"max_tokens": how.max_tokens}
    return amount | ({"sticky": True} if how.sticky else {})


def _obstacle(body: GenerationBody, prompts: Sequence[Any]) -> str:
    """Why the prompts of a request stay uncompressed, or nothing."""
    if isinstance(body, CompletionBody) and body.echo:
        return "echo, which returns the prompt as it was sent"
    if body.kv_cache is not None and body.kv_cache.return_kept:
        return "return_kept, which reports positions of the prompt as it was sent"
    if any(not isinstance(prompt, str) for prompt in prompts):
        return "a prompt of token ids: the draft needs text"
    return ""
