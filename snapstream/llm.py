"""``LLM``: an engine on its own thread, made from a checkpoint folder and settings, and calls that submit requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack, cast

from snapstream.config import Budget, EngineOptions, Selector, as_kind, as_number, make_selector
from snapstream.config.engine import STALL_TIMEOUT_S
from snapstream.engine.client import EngineThread
from snapstream.engine.core import Engine
from snapstream.engine.request_state import Tokenizer
from snapstream.models.adapters import with_loras
from snapstream.models.chat_template import render_chat
from snapstream.models.hub import local_folder
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import find_tokenizer
from snapstream.plan.fit import with_speculator
from snapstream.plan.memory import DraftMemory
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.startup.build import MakeRunner, build_ranks, grammar_compiler, memory_of, release_openmp_threads
from snapstream.startup.measure import decide
from snapstream.startup.notes import start_notes
from snapstream.startup.resolve import resolve_budget
from snapstream.types import (
    Request,
    RequestOutput,
    SamplingParams,
    as_conversation,
    as_conversations,
    as_params,
    as_prompts,
    only,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import CompressedPrompt, PromptCompressor, RequestCompressor

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
T = TypeVar("T")


class RequestOptions(TypedDict, total=False):
    """Keywords of every call of ``LLM`` and ``AsyncLLM`` that makes requests.

    ``budget``: smaller rows than the engine's. ``selector``: another way to fill them, one that needs no more memory
    than the engine's own. ``prompt_compression``: shorten the prompts with the draft first;
    ``RequestOutput.prompt_compression`` reports what it did. ``lora``: name of the adapter that answers.
    """

    budget: Budget | None
    selector: str | Selector | None
    prompt_compression: PromptCompression | None
    lora: str


class LLM:
    """A model behind fixed-size rows.

    ``model``: a Hugging Face checkpoint folder, a GGUF file, or a hub id (``models/hub.py``). ``options``: settings of
    the engine; ``fields``: single settings by their names in ``EngineOptions``, which override those of ``options``.
    ``notes`` report what was chosen automatically. ``draft``: a small model (a folder, or a ``PromptCompressor``) that
    shortens prompts on request. ``draft_memory``: what a draft in another process takes of this device; kept free.
    ``stall_timeout``: seconds that a step of several ranks may take before the call raises RankLost; 0: no limit.
    ``make_runner`` loads the weights and runs them, for callers with their own kernels, weights or decode step.

    The engine thread ends with ``close`` or when this object is dropped. Threads may share an LLM; their requests share
    the steps. Ctrl-C ends the call that waits, and its requests. ValueError for unsupported settings; TypeError for
    arguments of the wrong type.
    """

    name = "LLM"  # in error messages

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions | None = None,
        *,
        draft: PromptCompressor | str | Path | None = None,
        draft_memory: DraftMemory | None = None,
        make_runner: MakeRunner = build_ranks,
        progress: bool = True,
        stall_timeout: float = STALL_TIMEOUT_S,
        **fields: Any,
    ) -> None:
        self.options = options = EngineOptions.of(options, fields)
        if draft_memory is not None:
            as_kind("draft_memory", draft_memory, DraftMemory)
        if stall_timeout != 0:
            as_number("stall_timeout", stall_timeout, 1.0, 86400.0)
        model = local_folder(model, progress=progress)
        self.model_config = read_model_config(model)
        options = with_speculator(options, (Path(model), self.model_config))
        self.options = options = with_loras(self.model_config, options)
        about_heads = ""
        if options.has_automatic_heads:
            from snapstream.calibration import automatic_heads  # loads torch

            options, about_heads = automatic_heads(Path(model), self.model_config, options, progress=progress)
            self.options = options
        # Decided before anything is loaded, so that impossible settings are refused at once.
        self.config = decide(self.model_config, options, draft_memory)
        self.notes = (*((about_heads,) if about_heads else ()), *start_notes(self.model_config, options, self.config))
        if progress:
            print(*self.notes, sep="\n", file=sys.stderr)
        self.tokenizer = find_tokenizer(Path(model))
        self._compressor: RequestCompressor | None = None
        if draft is not None:
            self._compressor = self._make_compressor(draft)
            draft_memory = memory_of(self._compressor.compressor, options.device) or draft_memory
            self.config = decide(self.model_config, options, draft_memory)  # less is free
        if make_runner is build_ranks:
            make_runner = partial(build_ranks, stall_timeout_s=stall_timeout)
        self._grammars = grammar_compiler(self.tokenizer, self.model_config)
        runner = make_runner(Path(model), self.model_config, self.config, self._grammars, progress)
        release_openmp_threads()
        engine = Engine(
            runner,
            self.config,
            vocab_size=self.model_config.vocab_size,
            num_layers=self.model_config.num_layers,
            eos_token_ids=self.model_config.eos_token_ids,
            tokenizer=cast("Tokenizer | None", self.tokenizer),
        )
        self._shows_progress = progress
        self.engine_thread = EngineThread(
            engine, self.config.max_rows, name=self.name, prepare=_same_device(options.device)
        )
        self._numbers = count(1)  # of requests; safe in several threads

    @property
    def engine(self) -> Engine:
        """The engine, to step or read it by hand while this object has no open requests.

        RuntimeError once it is closed or a step has failed.
        """
        return self.engine_thread.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Answer every prompt (text, or token ids); one ``SamplingParams`` for all or one each.

        Every prompt is checked before any is run: a ValueError names the prompt and the limit, and nothing was started.
        """
        return self._run(self.requests(prompts, params, **options))

    def answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Answer ready-made requests, in their order.

        Their ids must differ from each other and from those of running requests; the ids that ``generate`` gives are
        ``request-1``, ``request-2`` ... Every request is checked before any is run.
        """
        return self._run(self._checked(requests))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template."""
        return self._run(self.chat_requests(messages, params, **options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Iterator[RequestOutput]:
        """Yield the same ``RequestOutput`` each time it has grown. Closing the iterator aborts the request.

        Wrong input is refused here; the request starts with the first ``next`` and then runs on, however slowly it is
        read. QueueFull if ``max_waiting`` requests are already queued.
        """
        return self.engine_thread.stream(only(self.requests(prompt, params, **options)))

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """The checked requests that ``generate`` would run."""
        return self._requests(as_prompts(prompts), params, self._encode, **options)

    def chat_requests(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """The checked requests that ``chat`` would run."""
        return self._requests(as_conversations(messages), params, self._encode_chat, **options)

    def reset_prefix_store(self, namespace: str | None = None) -> int:
        """Clear the prefix store, of one ``Request.namespace`` or all; the number of blocks removed."""
        return self.engine_thread.client.reset_prefixes(namespace).result()

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        return list(self._need_tokenizer("chat")(self._render_chat(messages), add_special_tokens=False)["input_ids"])

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
            return render_chat(tokenizer, conversation)
        except Exception as error:  # unsupported roles or their order, or a broken template
            raise ValueError(f"the model's chat template refuses this conversation: {error}") from None

    def close(self) -> None:
        """Drop weights and rows; calls in progress raise RuntimeError. The object cannot be used afterwards."""
        self.engine_thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, requests: Sequence[Request]) -> list[RequestOutput]:
        return self.engine_thread.run(requests, shows_progress=self._shows_progress)

    def _need_tokenizer(self, purpose: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"this checkpoint has no tokenizer, which {purpose} needs; pass token ids")
        return self.tokenizer

    def _make_compressor(self, draft: PromptCompressor | str | Path) -> RequestCompressor:
        from snapstream.spec_prefill.compressor import PromptCompressor, RequestCompressor

        tokenizer = self._need_tokenizer("prompt compression")
        if isinstance(draft, PromptCompressor):
            compressor = draft
        else:
            compressor = PromptCompressor(draft, dtype=self.options.dtype, device=self.options.device)

        def num_stored(ids: tuple[int, ...], lora: str) -> int:
            namespace = self.config.prefix_namespace("", lora)
            return self.engine_thread.client.num_stored(ids, namespace).result()

        return RequestCompressor(compressor, tokenizer, num_stored)

    def _need_compressor(self, compression: PromptCompression) -> RequestCompressor:
        as_kind("prompt_compression", compression, PromptCompression)
        if self._compressor is None:
            raise ValueError("prompt_compression needs a draft model; make the LLM with draft=...")
        return self._compressor

    def _encode(self, prompt: str | list[int], compression: PromptCompression | None, lora: str) -> dict[str, Any]:
        """Fields of a ``Request``."""
        if compression is not None:
            return _fields(self._need_compressor(compression).prompt(prompt, compression, lora))
        if not isinstance(prompt, str):
            return {"prompt_token_ids": tuple(prompt)}
        return {"prompt_token_ids": tuple(self._need_tokenizer("text")(prompt)["input_ids"]), "prompt": prompt}

    def _encode_chat(
        self, messages: Sequence[Message], compression: PromptCompression | None, lora: str
    ) -> dict[str, Any]:
        if compression is not None:
            return _fields(self._need_compressor(compression).chat(messages, compression, self._render_chat, lora))
        return {"prompt_token_ids": tuple(self.chat_token_ids(messages))}

    def _requests(
        self,
        prompts: Sequence[T],
        params: SamplingParams | Sequence[SamplingParams] | None,
        encode: Callable[[T, PromptCompression | None, str], dict[str, Any]],
        *,
        budget: Budget | None = None,
        selector: str | Selector | None = None,
        prompt_compression: PromptCompression | None = None,
        lora: str = "",
    ) -> list[Request]:
        own = None if selector is None else make_selector(selector)
        self.config.adapter(lora)
        row = None
        if budget is not None:
            row = resolve_budget(budget, self.config.max_model_len, (own or self.config.selector).observation_len)
        each = zip(prompts, as_params(params, len(prompts)), strict=True)
        return self._checked(
            [
                Request(
                    request_id=f"request-{next(self._numbers)}",
                    sampling=sampling,
                    budget=row,
                    selector=own,
                    lora=lora,
                    **encode(prompt, prompt_compression, lora),
                )
                for prompt, sampling in each
            ]
        )

    def _checked(self, requests: Sequence[Request]) -> list[Request]:
        """ValueError, naming the prompt, if one could never be served or its grammar does not compile."""
        validate = self.engine_thread.validate
        for index, request in enumerate(requests):
            as_kind(f"request {index}", request, Request)
            try:
                validate(request)
                if request.sampling.grammar is not None and self._grammars is not None:
                    self._grammars.matcher(request.sampling.grammar)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}" if len(requests) > 1 else str(error)) from None
        return list(requests)


def _fields(prompt: CompressedPrompt) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt.token_ids,
        "prompt": prompt.text,
        "prompt_compression": prompt.report,
    }


def _same_device(device: str) -> Callable[[], None]:
    """A function that gives the calling thread the current CUDA device of this thread."""
    if not device.startswith("cuda"):
        return lambda: None
    import torch

    return partial(torch.cuda.set_device, torch.cuda.current_device())
