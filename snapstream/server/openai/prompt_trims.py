"""Decides which prompts of a request the server's draft trims, and what happens where it cannot.

A wish of the request's own is granted or refused, with its field's name. Invariant: the server's default never makes a
request fail (but for a full queue): a prompt that the draft cannot trim stays whole, and the answer says why.
``http/trimming.py`` has the draft's thread, ``routes.py`` calls this between checks and tokenizer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from snapstream.request import Trim
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.trimming import FIELD, DraftThread, parse_wish
from snapstream.server.openai.protocol import CompletionBody, GenerationBody
from snapstream.server.settings import ServerSettings
from snapstream.spec_prefill.settings import PromptCompression, reason_to_keep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.report import TrimReport
    from snapstream.spec_prefill.text_trimmer import TextTrimmer

log = logging.getLogger(__name__)

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class TrimWish:
    """What a request gets. ``how`` None: its prompts stay whole."""

    how: PromptCompression | None = None
    is_own: bool = False  # the request asked for it; else the server's default


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimFacts:
    """What the draft did to one prompt. ``reason``: why it stayed whole."""

    num_trimmed: int = 0  # tokens of the model that answers
    draft_ms: float = 0.0
    num_cached: int = 0
    reason: str = ""

    def of(self, num_left: int) -> Trim:
        """The same for a prompt that turned out to have ``num_left`` tokens left."""
        return Trim(
            prompt_tokens=num_left + self.num_trimmed,
            kept_tokens=num_left,
            draft_ms=self.draft_ms,
            reason=self.reason,
            num_cached=self.num_cached,
        )


class PromptTrims:
    """The draft as the routes use it; without a trimmer every wish but "off" is refused."""

    def __init__(
        self,
        trimmer: TextTrimmer | None,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: ServerSettings,
        count: Callable[[int], None],
    ) -> None:
        """``count`` gets the number of tokens taken out. ValueError for a default that nobody can grant."""
        self._settings, self._count = settings, count
        self._draft: DraftThread | None = None
        self._threshold = 0 if trimmer is None else trimmer.protection.threshold
        if trimmer is not None:
            own = copy.deepcopy(tokenizer)  # fast tokenizers refuse to be used and reconfigured by two threads at once
            self._draft = DraftThread(
                trimmer, own, max_waiting=settings.max_draft_waiting, retry_after_s=settings.retry_after_s
            )
        elif settings.prompt_compression is not None:
            raise ValueError(f"{FIELD} is {told(settings.prompt_compression)} by default, and there is no draft")

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

    def wish(self, body: GenerationBody, prompts: Sequence[Any] = ()) -> TrimWish:
        """What ``body`` gets for its ``prompts`` (of ``as_prompts``); 400 for what it cannot get."""
        value = body.prompt_compression
        if self._draft is None and value not in (None, "off"):
            reason = f"{FIELD} {value!r} needs a draft, and this server has none (--draft)"
            raise bad_value(reason, FIELD, "unsupported_parameter")
        how = parse_wish(value, self._settings.prompt_compression, takes_sticky=True)
        if how is not None and how.sticky and isinstance(body, CompletionBody):
            raise bad_value(f"{FIELD}: sticky is for conversations; a completion has none", FIELD)
        obstacle = _obstacle(body, prompts)
        if how is None or not obstacle:
            return TrimWish(how, value is not None)
        if value is not None:
            raise bad_value(f"{FIELD} cannot be had with {obstacle}", FIELD)
        return TrimWish()

    def kept_whole(self, num_tokens: int, num_stored: int, wish: TrimWish) -> TrimFacts | None:
        """Looked up first: what is told of a prompt that stays whole because so much of it is stored; else None."""
        if wish.how is None:
            return None
        reason = reason_to_keep(num_tokens, num_stored, wish.how, self._threshold)
        return TrimFacts(reason=reason) if reason else None

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        wish: TrimWish,
        scope: str,
    ) -> tuple[list[dict[str, Any]], TrimFacts]:
        """A conversation as the template takes it, with its long parts trimmed. ``wish.how`` is not None.

        ``scope``: whose sticky cuts it may find.
        """
        draft, how = self._draft, wish.how
        assert draft is not None and how is not None
        num_chars = sum(len(message["content"]) for message in messages)
        return await self._granted(
            messages, num_chars, "messages", wish, partial(draft.chat, messages, how, tools, scope)
        )

    async def texts(self, prompts: Sequence[Any], wish: TrimWish) -> tuple[list[Any], list[TrimFacts | None]]:
        """The prompts of a completion, each with what was done to it (None: the request has no wish)."""
        draft, how = self._draft, wish.how
        if draft is None or how is None:
            return list(prompts), [None] * len(prompts)
        left: list[Any] = []
        trims: list[TrimFacts | None] = []
        for text in prompts:
            short, facts = await self._granted(text, len(text), "prompt", wish, partial(draft.text, text, how))
            left.append(short)
            trims.append(facts)
        return left, trims

    async def _granted(
        self,
        prompt: P,
        num_chars: int,
        param: str,
        wish: TrimWish,
        trim: Callable[[], Awaitable[tuple[P, TrimReport]]],
    ) -> tuple[P, TrimFacts]:
        limit = self._settings.max_draft_chars
        if num_chars > limit:
            reason = f"the prompt has {num_chars} characters, and the draft reads at most {limit}"
            if wish.is_own:
                raise bad_value(reason, param, "context_length_exceeded")
            return prompt, TrimFacts(reason=reason)
        try:
            short, report = await trim()
        except ApiError:
            raise
        except ValueError as error:  # e.g. a ceiling below what is protected
            if wish.is_own:
                raise bad_value(f"{FIELD}: {error}", FIELD) from None
            return prompt, TrimFacts(reason=str(error))
        except Exception:
            if wish.is_own:
                raise
            log.exception("the draft failed; the prompt stays whole")
            return prompt, TrimFacts(reason="the draft failed")
        num_trimmed = report.tokens_before - report.tokens_after
        self._count(num_trimmed)
        return short, TrimFacts(
            num_trimmed=num_trimmed, draft_ms=report.draft_ms, num_cached=report.num_cached, reason=report.reason
        )


def told(how: PromptCompression | None) -> str | dict[str, Any]:
    """A wish as a request would write it."""
    if how is None:
        return "off"
    amount: dict[str, Any] = {"keep": how.keep} if how.keep is not None else {"max_tokens": how.max_tokens}
    return amount | ({"sticky": True} if how.sticky else {})


def _obstacle(body: GenerationBody, prompts: Sequence[Any]) -> str:
    """Why the prompts of a request stay whole, or nothing."""
    if isinstance(body, CompletionBody) and body.echo:
        return "echo, which returns the prompt as it was sent"
    if body.kv_cache is not None and body.kv_cache.return_kept:
        return "return_kept, which tells positions in the prompt as it was sent"
    if any(not isinstance(prompt, str) for prompt in prompts):
        return "a prompt of token ids, of which the draft knows no text"
    return ""
