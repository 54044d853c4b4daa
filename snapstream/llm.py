"""The composition root: resolves a checkpoint folder and settings into a running engine, and drives it.

``engine/`` decides what runs next, ``models/`` and ``runner/`` compute it; this module only puts them together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from snapstream.config import Budget, EngineOptions, KVBudget, Selector, as_kind, make_selector
from snapstream.engine.core import Engine
from snapstream.engine.detokenizer import Tokenizer
from snapstream.engine.driver import Driver
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import find_tokenizer
from snapstream.plan.draft_memory import DraftMemory
from snapstream.request import Request, RequestOutput, SamplingParams, Trim
from snapstream.request.conversation import as_conversation
from snapstream.request.inputs import as_conversations, as_params, as_prompts, only
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.start.build import MakeRunner, grammar_compiler, load_trimmer, memory_of
from snapstream.start.measure import decide
from snapstream.start.notes import start_notes
from snapstream.start.ranks import build_ranks
from snapstream.start.resolve import resolve_budget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.prompt_trimmer import PromptTrimmer, TrimmedPrompt
    from snapstream.spec_prefill.text_trimmer import TextTrimmer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class _Row(NamedTuple):
    """What a call asks of its rows; None means the engine's own."""

    budget: KVBudget | None
    selector: Selector | None


class LLM:
    """A model behind fixed-size rows.

    ``model``: a Hugging Face checkpoint folder. ``options``: settings of the engine; ``fields``: single settings by
    their names in ``EngineOptions``, in place of those of ``options``. ``notes`` say what was chosen automatically.
    ``draft``: a small model (a folder, or a ``TextTrimmer``) that shortens the prompts of calls that ask for it.
    ``beside``: a draft that another process has loaded on this device; its working memory is kept free.
    ``make_runner`` loads the weights and runs them, for callers that bring kernels, weights or a decode step. Threads
    may share it (``engine/driver.py``). ValueError for what cannot be supported; TypeError for wrong kinds.
    """

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions | None = None,
        *,
        draft: TextTrimmer | str | Path | None = None,
        beside: DraftMemory | None = None,
        make_runner: MakeRunner = build_ranks,
        progress: bool = True,
        **fields: Any,
    ) -> None:
        self.options = options = EngineOptions.of(options, fields)
        if beside is not None:
            as_kind("beside", beside, DraftMemory)
        self.model_config = read_model_config(model)
        # Decided before anything is loaded, so that impossible settings are refused at once.
        self.config = decide(self.model_config, options, beside)
        self.notes = start_notes(self.model_config, options, self.config)
        if progress:
            print(*self.notes, sep="\n", file=sys.stderr)
        self.tokenizer = find_tokenizer(Path(model))
        self._trimmer: PromptTrimmer | None = None
        if draft is not None:
            self._trimmer = self._make_trimmer(draft)
            beside = memory_of(self._trimmer.text_trimmer, options.device) or beside
            self.config = decide(self.model_config, options, beside)  # less is free
        self._grammars = grammar_compiler(self.tokenizer, self.model_config)
        engine = Engine(
            make_runner(Path(model), self.model_config, self.config, self._grammars, progress),
            self.config,
            vocab_size=self.model_config.vocab_size,
            num_layers=self.model_config.num_layers,
            eos_token_ids=self.model_config.eos_token_ids,
            tokenizer=cast("Tokenizer | None", self.tokenizer),
        )
        self._driver = Driver(engine, shows_progress=progress)
        self._numbers = count(1)  # of requests; safe in several threads

    @property
    def engine(self) -> Engine:
        """The engine behind this object; RuntimeError once it is closed or a step has failed."""
        return self._driver.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        budget: Budget | None = None,
        selector: str | Selector | None = None,
        prompt_compression: PromptCompression | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt (text, or token ids); one ``SamplingParams`` for all or one each.

        ``budget`` gives these requests smaller rows than the engine's, ``selector`` another way to fill them (one that
        needs no more memory than the engine's own). ``prompt_compression`` lets the draft shorten
        the prompts first; ``RequestOutput.trim`` says what it did. Every prompt is checked before any is run: a
        ValueError names the prompt and the limit, and nothing was started.
        """
        return self._driver.run(self.requests(prompts, params, budget, selector, prompt_compression))

    def answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Answer requests that are ready-made, for instance with positions of their own, in their order.

        Their ids must differ from each other and from those of running requests; the ids that ``generate`` gives are
        ``request-1``, ``request-2`` ... Every request is checked before any is run, as in ``generate``.
        """
        return self._driver.run(self._checked(requests))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        budget: Budget | None = None,
        selector: str | Selector | None = None,
        prompt_compression: PromptCompression | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template."""
        return self._driver.run(self.chat_requests(messages, params, budget, selector, prompt_compression))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
        selector: str | Selector | None = None,
        prompt_compression: PromptCompression | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the same ``RequestOutput`` each time it has grown. Closing the iterator aborts the request.

        Wrong input is refused here, before the first ``next``. Several streams may be read in turn, and ``generate``
        called between two reads: all open requests share the steps.
        """
        return self._driver.stream(only(self.requests(prompt, params, budget, selector, prompt_compression)))

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        budget: Budget | None = None,
        selector: str | Selector | None = None,
        prompt_compression: PromptCompression | None = None,
    ) -> list[Request]:
        """The checked requests that ``generate`` would run: for whoever runs them in another way."""
        batch, row = as_prompts(prompts), self._row(budget, selector)
        return self._checked(
            [
                self._request(prompt, own, row, prompt_compression)
                for prompt, own in zip(batch, as_params(params, len(batch)), strict=True)
            ]
        )

    def chat_requests(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        budget: Budget | None = None,
        selector: str | Selector | None = None,
        prompt_compression: PromptCompression | None = None,
    ) -> list[Request]:
        """The checked requests that ``chat`` would run."""
        conversations = as_conversations(messages)
        if prompt_compression is None:
            prompts = [self.chat_token_ids(some) for some in conversations]
            return self.requests(prompts, params, budget, selector)
        trimmer, row = self._need_trimmer(prompt_compression), self._row(budget, selector)
        return self._checked(
            [
                self._trimmed_request(trimmer.chat(some, prompt_compression, self._render_chat), own, row)
                for some, own in zip(conversations, as_params(params, len(conversations)), strict=True)
            ]
        )

    def reset_prefix_store(self, namespace: str | None = None) -> int:
        """Forget the stored beginnings of prompts, of one ``Request.namespace`` or of all; the number of blocks."""
        return self._driver.reset_prefix_store(namespace)

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        text = self._render_chat(messages)
        return list(self._need_tokenizer("chat")(text, add_special_tokens=False)["input_ids"])

    def _render_chat(self, messages: Sequence[Message]) -> str:
        """A conversation in the model's chat template."""
        tokenizer = self._need_tokenizer("chat")
        if tokenizer.chat_template is None:
            raise ValueError("this checkpoint has no chat template; pass a prompt to generate() instead")
        given, *others = as_conversations(messages)
        if others:
            raise ValueError(f"{len(others) + 1} conversations were given; this takes one, as a list of messages")
        conversation = as_conversation(given, has_developer="developer" in str(tokenizer.chat_template))
        try:
            return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # roles that it does not take, or their order; or it is broken, whichever way
            raise ValueError(f"the model's chat template refuses this conversation: {error}") from None

    def close(self) -> None:
        """Drop weights and rows. The object cannot be used afterwards."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _need_tokenizer(self, purpose: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"this checkpoint has no tokenizer, which {purpose} needs; pass token ids")
        return self.tokenizer

    def _make_trimmer(self, draft: TextTrimmer | str | Path) -> PromptTrimmer:
        from snapstream.spec_prefill.prompt_trimmer import PromptTrimmer

        trimmer, tokenizer = load_trimmer(draft, self.options), self._need_tokenizer("prompt compression")
        return PromptTrimmer(trimmer, tokenizer, lambda ids: self.engine.num_stored(ids))

    def _need_trimmer(self, how: PromptCompression) -> PromptTrimmer:
        as_kind("prompt_compression", how, PromptCompression)
        if self._trimmer is None:
            raise ValueError("prompt_compression needs a draft model; make the LLM with draft=...")
        return self._trimmer

    def _row(self, budget: Budget | None, selector: str | Selector | None) -> _Row:
        own = None if selector is None else make_selector(selector)
        if budget is None:
            return _Row(None, own)
        observation_len = (own or self.config.selector).observation_len
        return _Row(resolve_budget(budget, self.config.max_model_len, observation_len), own)

    def _trimmed_request(self, trimmed: TrimmedPrompt, params: SamplingParams, row: _Row) -> Request:
        return self._make_request(
            trimmed.token_ids, params, row, text=trimmed.text, positions=trimmed.positions, trim=trimmed.trim
        )

    def _request(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        row: _Row,
        compression: PromptCompression | None = None,
    ) -> Request:
        if compression is not None:
            return self._trimmed_request(self._need_trimmer(compression).prompt(prompt, compression), params, row)
        text = prompt if isinstance(prompt, str) else None
        ids: Any = self._need_tokenizer("text")(text)["input_ids"] if text is not None else prompt
        return self._make_request(ids, params, row, text=text)

    def _make_request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        row: _Row,
        *,
        text: str | None = None,
        positions: tuple[int, ...] | None = None,
        trim: Trim | None = None,
    ) -> Request:
        return Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=tuple(ids),
            sampling=params,
            budget=row.budget,
            selector=row.selector,
            prompt=text,
            positions=positions,
            trim=trim,
        )

    def _checked(self, requests: Sequence[Request]) -> list[Request]:
        """ValueError if one could never be served, or its grammar does not compile; it names the prompt."""
        for index, request in enumerate(requests):
            as_kind(f"request {index}", request, Request)
            try:
                self.engine.validate(request)
                if request.sampling.grammar is not None and self._grammars is not None:
                    self._grammars.matcher(request.sampling.grammar)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}" if len(requests) > 1 else str(error)) from None
        return list(requests)
