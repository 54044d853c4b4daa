"""Prompts on their way into the engine, shortened by a draft: as text that is tokenized anew, or as kept token ids.

Invariant: the result is the prompt that the same call without a draft would have fed the engine, less the parts left
out; ``Trim`` counts both. ``llm.py`` uses this; ``text_trimmer.py`` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from snapstream.request import Trim
from snapstream.spec_prefill.assemble import with_texts
from snapstream.spec_prefill.protection import Candidate, candidates
from snapstream.spec_prefill.report import TrimmedText, TrimReport
from snapstream.spec_prefill.settings import PromptCompression, reason_to_keep
from snapstream.spec_prefill.spans import Span
from snapstream.spec_prefill.sticky import StickyTrimmer
from snapstream.spec_prefill.text_trimmer import TextTrimmer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedPrompt:
    """Token ids for the engine, where they stood, and what was left out."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...] | None  # None: contiguous
    trim: Trim
    text: str | None = None


class PromptTrimmer:
    """A ``TextTrimmer`` and the tokenizer of the model that answers."""

    def __init__(
        self,
        text_trimmer: TextTrimmer,
        tokenizer: PreTrainedTokenizerBase,
        num_stored: Callable[[tuple[int, ...]], int] = lambda ids: 0,
    ) -> None:
        """``num_stored``: tokens of a prompt that the engine's prefix store would give back."""
        self._text_trimmer, self._tokenizer, self._num_stored = text_trimmer, tokenizer, num_stored
        self._sticky = StickyTrimmer(text_trimmer)

    @property
    def text_trimmer(self) -> TextTrimmer:
        """The one it was made with."""
        return self._text_trimmer

    def prompt(self, prompt: str | Sequence[int], how: PromptCompression) -> TrimmedPrompt:
        """A plain prompt, as text or as token ids."""
        if how.sticky:
            raise ValueError("sticky is for conversations; this prompt is none")
        if how.hand_over == "ids":
            ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            return self._ids(ids, None, how)
        if not isinstance(prompt, str):
            raise ValueError("the prompt is token ids; trimming it as text needs the text, or hand_over='ids'")
        if (whole := self._stored(self._tokenizer(prompt)["input_ids"], how, prompt)) is not None:
            return whole
        result = self._as_text(prompt, how)
        assert result.text is not None
        ids = self._tokenizer(result.text)["input_ids"]
        return TrimmedPrompt(token_ids=tuple(ids), positions=None, trim=_trim(result.report), text=result.text)

    def chat(self, messages: Messages, how: PromptCompression, render: Render) -> TrimmedPrompt:
        """A conversation; ``render`` applies the target's chat template."""
        text = render(messages)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if (whole := self._stored(ids, how)) is not None:
            return whole
        if how.hand_over == "ids":
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            found = candidates(messages, self._text_trimmer.protection, self._text_trimmer.draft.count_tokens)
            spans = body_places(text, messages, found, render)
            return self._ids(encoded["input_ids"], token_ranges(encoded["offset_mapping"], spans), how)
        result = self._sticky.trim(messages, how, self._tokenizer) if how.sticky else self._as_text(messages, how)
        assert result.messages is not None
        ids = self._tokenizer(render(result.messages), add_special_tokens=False)["input_ids"]
        return TrimmedPrompt(token_ids=tuple(ids), positions=None, trim=_trim(result.report))

    def _stored(self, ids: Sequence[int], how: PromptCompression, text: str | None = None) -> TrimmedPrompt | None:
        """A prompt as it is, where ``reason_to_keep`` says so."""
        if how.keep is None:
            return None
        num_stored, threshold = self._num_stored(tuple(ids)), self._text_trimmer.protection.threshold
        reason = reason_to_keep(len(ids), num_stored, how, threshold)
        if not reason:
            return None
        trim = Trim(prompt_tokens=len(ids), kept_tokens=len(ids), draft_ms=0.0, reason=reason, num_cached=0)
        return TrimmedPrompt(token_ids=tuple(ids), positions=None, trim=trim, text=text)

    def _as_text(self, prompt: str | Messages, how: PromptCompression) -> TrimmedText:
        return self._text_trimmer.trim(
            prompt,
            keep=how.keep,
            max_tokens=how.max_tokens,
            target_tokenizer=self._tokenizer,
            query=how.query,
            threshold=how.threshold,
        )

    def _ids(self, ids: Sequence[int], ranges: list[Span] | None, how: PromptCompression) -> TrimmedPrompt:
        if self._text_trimmer.draft.tokenizer.get_vocab() != self._tokenizer.get_vocab():
            raise ValueError("hand_over='ids' needs a draft with the target's tokenizer; theirs differ, use 'text'")
        result = self._text_trimmer.trim_ids(
            ids, keep=how.keep, max_tokens=how.max_tokens, candidates=ranges, threshold=how.threshold
        )
        return TrimmedPrompt(token_ids=result.token_ids, positions=result.positions, trim=_trim(result.report))


def _trim(report: TrimReport) -> Trim:
    return Trim(
        prompt_tokens=report.tokens_before,
        kept_tokens=report.tokens_after,
        draft_ms=report.draft_ms,
        reason=report.reason,
        num_cached=report.num_cached,
    )


def body_places(rendered: str, messages: Messages, found: Sequence[Candidate], render: Render) -> list[Span]:
    """Where the bodies stand in a rendered conversation, in order: where marks stand that are rendered instead of them.

    The same words elsewhere, in a system message say, are not theirs. A template that does more than put texts in their
    places, so that the marks do not tell, leaves all of it protected.
    """
    mark = sha256(rendered.encode(errors="surrogatepass")).hexdigest()  # a text cannot contain its own digest
    bodies = [candidate.body.strip() for candidate in found]
    marked = render(with_texts([dict(m) for m in messages], found, [_with_body(one, mark) for one in found]))
    around = marked.split(mark)
    if len(around) != len(bodies) + 1:
        return []
    places: list[Span] = []
    text = around[0]
    for body, after in zip(bodies, around[1:], strict=True):
        places.append((len(text), len(text) + len(body)))
        text += body + after
    return places if text == rendered else []


def _with_body(candidate: Candidate, body: str) -> str:
    """The candidate's text with another body between the same white space."""
    own, bare = candidate.body, candidate.body.strip()
    start = candidate.start + len(own) - len(own.lstrip())
    return candidate.text[:start] + body + candidate.text[start + len(bare) :]


def token_ranges(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[Span]:
    """Tokens that lie wholly inside each span of characters."""
    ranges: list[Span] = []
    for start, stop in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if start <= a < b <= stop]
        if inside:
            ranges.append((inside[0], inside[-1] + 1))
    return ranges
