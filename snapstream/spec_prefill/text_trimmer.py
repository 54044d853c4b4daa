"""The face of speculative prefill: a long text or conversation in, a shorter one and a report out.

    trimmer = TextTrimmer("Qwen3-0.6B/")
    result = trimmer.trim(messages, target_tokenizer="Llama-3.1-8B-Instruct/", max_tokens=8192)

Nothing here needs the engine: the result is text for any model behind any API. The order of work: what may be cut
(``protection.py``), scores (``draft.py``, remembered by ``scorer.py``), which chunks stay (``select.py``), which
characters (``spans.py``). Safe to call from several threads: one text is scored at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from snapstream.config import DType, as_count, as_kind, as_token_ids
from snapstream.models.tokenizer import load_tokenizer
from snapstream.request.conversation import as_text, check_texts, is_list, named
from snapstream.spec_prefill.amount import Amount
from snapstream.spec_prefill.assemble import (
    Spans,
    forced_in,
    kept_spans,
    kept_tokens,
    make_report,
    shorter_text,
    text_report,
    with_texts,
)
from snapstream.spec_prefill.counting import TokenCounter
from snapstream.spec_prefill.draft import Draft
from snapstream.spec_prefill.protection import Candidate, candidates
from snapstream.spec_prefill.report import (
    TrimmedIds,
    TrimmedText,
    TrimReport,
)
from snapstream.spec_prefill.scorer import Scorer
from snapstream.spec_prefill.select import Choice, keep_ceiling, keep_share
from snapstream.spec_prefill.settings import CHUNK_LEN, CutSettings, Protection, ScoringSettings, check_amount
from snapstream.spec_prefill.spans import Span, check_spans, merged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = TypeVar("P")


class TextTrimmer:
    """A draft that shortens prompts.

    ``draft``: a Hugging Face checkpoint folder, or a loaded ``Draft``. ``scoring``, ``cut`` and ``protection`` default
    to the published method. ``cache_size``: texts whose scores are remembered, by content.
    """

    def __init__(
        self,
        draft: Draft | str | Path,
        *,
        scoring: ScoringSettings | None = None,
        cut: CutSettings | None = None,
        protection: Protection | None = None,
        dtype: DType = "float32",
        device: str = "cpu",
        cache_size: int = 256,
    ) -> None:
        self.draft = draft if isinstance(draft, Draft) else Draft.load(draft, dtype=dtype, device=device)
        self.scoring = as_kind("scoring", ScoringSettings() if scoring is None else scoring, ScoringSettings)
        self.cut = as_kind("cut", CutSettings() if cut is None else cut, CutSettings)
        self.protection = as_kind("protection", Protection() if protection is None else protection, Protection)
        self.draft.context_of(self.scoring)  # refuses at once settings that would fail for every text
        self._scorer = Scorer(self.draft, self.scoring, self.cut, as_count("cache_size", cache_size, 0))
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}  # of targets that were given as folders
        self._lock = Lock()

    def trim(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        keep: float | None = None,
        max_tokens: int | None = None,
        target_tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        query: str | None = None,
        keep_spans: Spans = (),
        threshold: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> TrimmedText:
        """Shorten a text, or the contents of OpenAI messages.

        ``keep``: share of the chunks of each text that stays, in (0, 1]; or ``max_tokens``: a ceiling in target tokens
        for the whole prompt - delimiters, protected text, template and ``tools`` included - that the result never
        exceeds. Exactly one of them. ``target_tokenizer``: the target's, or its folder; without it the draft's own
        tokens are counted. ``query``: what will be asked about a plain text, or overrides what the conversation asks;
        the draft reads it, the result does not contain it. ``keep_spans``: character ranges that stay verbatim; for
        messages a mapping from their index. ``threshold`` overrides ``Protection.threshold``.

        Raises ValueError for wrong arguments, for a ceiling that the protected text alone exceeds, and for a text
        beyond the draft's context if such texts are refused.
        """
        check_amount(keep, max_tokens)
        if query is not None:
            as_text("query", query)
        least = self.protection.threshold if threshold is None else as_count("threshold", threshold, 0)
        amount = Amount(keep=keep, max_tokens=max_tokens, threshold=least)
        counter = TokenCounter(self._target(target_tokenizer))
        counted_with = "draft" if target_tokenizer is None else "target"
        _check_prompt(prompt)
        if isinstance(prompt, str):
            if isinstance(keep_spans, Mapping):
                raise ValueError("keep_spans is a mapping; a plain text takes a list of (start, end)")
            after = f"\n\n{query}" if query else ""
            whole = Candidate(text=prompt, start=0, end=len(prompt), after=after, as_chat=bool(query))
            forced = [check_spans(keep_spans, len(prompt))]
            text, report = self._shorten(
                prompt, [whole], forced, lambda texts: texts[0], counter.text, amount, counted_with
            )
            return TrimmedText(text=text, report=report)
        messages = [dict(message) for message in prompt]
        found = candidates(messages, self.protection, self.draft.count_tokens)
        if query:
            found = [replace(candidate, after=f"\n\n{query}") for candidate in found]
        shorter, report = self._shorten(
            messages,
            found,
            forced_in(messages, found, keep_spans),
            lambda texts: with_texts(messages, found, texts),
            lambda built: counter.messages(built, tools),
            amount,
            counted_with,
        )
        return TrimmedText(messages=tuple(shorter), report=report)

    def trim_later(
        self,
        messages: Sequence[Mapping[str, Any]],
        done: Sequence[Mapping[str, Any]],
        *,
        keep: float | None = None,
        max_tokens: int | None = None,
        target_tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        threshold: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> TrimmedText:
        """Shorten a conversation that goes on from one that was shortened before: ``done``, the first messages now.

        They stay as they are, but for tool outputs that were whole because they were recent. For the rest and what is
        raised, see ``trim``; a ceiling that ``done`` leaves no room for is a ValueError.
        """
        check_amount(keep, max_tokens)
        _check_prompt(messages)
        least = self.protection.threshold if threshold is None else as_count("threshold", threshold, 0)
        counter = TokenCounter(self._target(target_tokenizer))
        whole, begun = [dict(message) for message in messages], [dict(message) for message in done]
        built = begun + whole[len(begun) :]
        found = [
            one
            for one in candidates(whole, self.protection, self.draft.count_tokens)
            if (index := one.message or 0) >= len(begun)
            or (whole[index].get("role") == "tool" and begun[index] == whole[index])
        ]
        counted_with = "draft" if target_tokenizer is None else "target"
        before, num_now = counter.messages(whole, tools), counter.messages(built, tools)
        if not found and (max_tokens is None or num_now <= max_tokens):
            return TrimmedText(messages=tuple(built), report=make_report("", counted_with, before, num_now))
        shorter, report = self._shorten(
            whole,
            found,
            [[] for _ in found],
            lambda texts: with_texts(built, found, texts),
            lambda some: counter.messages(some, tools),
            Amount(keep=keep, max_tokens=max_tokens, threshold=least),
            counted_with,
        )
        return TrimmedText(messages=tuple(shorter), report=report)

    def trim_ids(
        self,
        token_ids: Sequence[int],
        *,
        keep: float | None = None,
        max_tokens: int | None = None,
        candidates: Sequence[Span] | None = None,
        threshold: int | None = None,
    ) -> TrimmedIds:
        """Leave tokens out of a prompt in the draft's own vocabulary; the others keep their positions.

        SpecPrefill's hand-over (arXiv 2502.02789), for a target of the draft's family. ``candidates``: ranges of
        tokens that may be left out, all by default; each is cut into chunks of its own. The last token always stays,
        because the answer begins with it. Amounts as in ``trim``.
        """
        check_amount(keep, max_tokens)
        ids = tuple(as_token_ids("token_ids", token_ids))
        if ids and max(ids) >= (limit := self.draft.decoder.config.vocab_size):
            raise ValueError(f"token id {max(ids)} is outside the draft's vocabulary (0 to {limit - 1})")
        size = self.cut.chunk_len or CHUNK_LEN["code" if self.cut.mode == "code" else "text"]
        ranges = merged(
            (max(a, 0), min(b, len(ids) - 1)) for a, b in ([(0, len(ids))] if candidates is None else candidates)
        )
        least = self.protection.threshold if threshold is None else as_count("threshold", threshold, 0)
        reason = Amount(keep=keep, max_tokens=max_tokens, threshold=least).why_not(len(ids), bool(ranges))
        if reason:
            report = make_report(reason, "target", len(ids), len(ids))
            return TrimmedIds(token_ids=ids, positions=tuple(range(len(ids))), report=report)
        scored = self._scorer.score_ids(ids, ranges, size)
        num_protected = len(ids) - sum(own.num_tokens for own in scored)
        scores = [own.scores for own in scored]
        if max_tokens is not None:
            choice = keep_ceiling(scores, max_tokens, lambda some: num_protected + sum(kept_tokens(scored, some)))
        else:
            assert keep is not None
            choice = keep_share(scores, keep)
        left_out = {
            token
            for own, chosen in zip(scored, choice, strict=True)
            for i, (a, b) in enumerate(own.chunks)
            if i not in chosen
            for token in range(a, b)
        }
        positions = tuple(i for i in range(len(ids)) if i not in left_out)
        return TrimmedIds(
            token_ids=tuple(ids[i] for i in positions),
            positions=positions,
            report=make_report("", "target", len(ids), len(positions), scored, choice),
        )

    def _shorten(
        self,
        prompt: P,
        found: list[Candidate],
        forced: list[list[Span]],
        build: Callable[[list[str]], P],
        count: Callable[[P], int],
        amount: Amount,
        counted_with: str,
    ) -> tuple[P, TrimReport]:
        """``build`` makes a prompt of new texts, one per candidate; ``count`` counts its tokens."""
        before = count(prompt)

        reason = amount.why_not(before, bool(found))
        if reason:
            return prompt, make_report(reason, counted_with, before, before)
        scored = [self._scorer.score(candidate) for candidate in found]

        def texts(choice: Choice) -> list[str]:
            return [
                shorter_text(candidate, kept_spans(candidate, own, kept, spans), own)
                for candidate, own, kept, spans in zip(found, scored, choice, forced, strict=True)
            ]

        scores = [own.scores for own in scored]
        if amount.max_tokens is not None:
            choice = keep_ceiling(scores, amount.max_tokens, lambda some: count(build(texts(some))))
        else:
            assert amount.keep is not None
            choice = keep_share(scores, amount.keep)
        shorter = build(texts(choice))
        after = count(shorter)
        if after >= before:
            reason = f"what would be kept takes {after:,} tokens, no fewer than the {before:,} of the prompt"
            return prompt, make_report(reason, counted_with, before, before)
        parts = tuple(
            text_report(candidate, own, kept, spans)
            for candidate, own, kept, spans in zip(found, scored, choice, forced, strict=True)
        )
        return shorter, make_report("", counted_with, before, after, scored, choice, parts)

    def _target(self, target: PreTrainedTokenizerBase | str | Path | None) -> PreTrainedTokenizerBase:
        if target is None:
            return self.draft.tokenizer
        if not isinstance(target, (str, Path)):
            if not callable(target):
                raise TypeError(f"target_tokenizer is {named(target)}; it must be a tokenizer, or a folder with one")
            return target
        with self._lock:
            if str(target) not in self._tokenizers:
                self._tokenizers[str(target)] = load_tokenizer(Path(target))
            return self._tokenizers[str(target)]


def _check_prompt(prompt: Any) -> None:
    """TypeError for what is neither a text nor a list of messages; ValueError for texts that are no Unicode."""
    if isinstance(prompt, str):
        as_text("prompt", prompt)
        return
    if not is_list(prompt) or not all(isinstance(message, Mapping) for message in prompt):
        raise TypeError(f"prompt is {named(prompt)}; it must be a text, or a list of messages with role and content")
    check_texts("messages", prompt)
