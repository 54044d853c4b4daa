"""The composition root: resolves a checkpoint folder and settings into a running engine, and drives it.

``LLM.generate`` is the whole system in one call; ``LLM.stream`` yields an answer as it grows. What runs next is decided
in ``engine/``, what is computed in ``models/`` and ``runner/``; here everything is only put together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from snapstream.assembly import build_runner, grammar_compiler, memory_of
from snapstream.chunking import ChunkLen
from snapstream.config import (
    DType,
    EngineConfig,
    Executor,
    KVDType,
    PrefillAttentionName,
    RescoringConfig,
    SnapKVConfig,
    as_count,
    as_kind,
)
from snapstream.conversation import as_conversation
from snapstream.draft_memory import DraftMemory
from snapstream.driver import Driver
from snapstream.engine.core import Engine
from snapstream.engine.detokenizer import Tokenizer
from snapstream.inputs import as_conversations, as_params, as_prompts
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import find_tokenizer
from snapstream.request import Request, RequestOutput, SamplingParams, Trim
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.startup import (
    DEFAULT_BUDGET,
    Budget,
    MaxRows,
    check_device,
    check_executor,
    check_kv_dtype,
    check_prefill_attention,
    cut_prefill,
    fit_rows,
    resolve_budget,
    resolve_executor,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor
    from snapstream.spec_prefill.trimmer import PromptTrimmer, TrimmedPrompt

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model behind fixed-size rows.

    ``model``: a Hugging Face checkpoint folder. ``budget``: slots per row, ``"full"``, or a ``KVBudget``; ``snapkv``:
    how the prompt tokens for them are chosen; ``rescoring``: how a full row chooses again, by default never.
    ``max_rows``: requests decoded together, or ``"auto"`` for as many as the free memory holds (at most 256).
    ``executor``: ``"eager"``, or ``"graph"``: decode compiled on a CPU, captured on a GPU; by default graph on a GPU
    and eager on a CPU. ``max_model_len``: prompt + output, by default the model's window.
    ``dtype`` holds for weights and rows; with ``kv_dtype="fp8"`` rows are FP8 (e4m3), a byte per number.
    ``max_waiting`` bounds the queue of an engine that serves; 0 means no bound.
    ``chunk_len``: tokens of a prefill unit, ``"auto"`` for what suits model and device; ``prefill_quantum``: units per
    step while rows decode, 0 for the device's default. ``prefill_attention``: name of the kernel that attends prompts,
    or ``"auto"``; ``notes`` say which one it is and why.
    ``draft``: a small model (a folder, or a ``PromptCompressor``) that shortens the prompts of calls that ask for it.
    ``beside``: a draft that another process has loaded on this device; what it will work with is kept free.
    Threads may share it: their calls take turns (``driver.py``).
    Raises ValueError for anything that cannot be supported, with the reason, and TypeError for wrong Python types.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        budget: Budget = DEFAULT_BUDGET,
        snapkv: SnapKVConfig | None = None,
        rescoring: RescoringConfig | None = None,
        dtype: DType = "float32",
        kv_dtype: KVDType = "auto",
        device: str = "cpu",
        executor: Executor | None = None,
        max_rows: MaxRows = 8,
        max_model_len: int | None = None,
        chunk_len: ChunkLen = "auto",
        prefill_quantum: int = 0,
        prefill_attention: PrefillAttentionName = "auto",
        max_waiting: int = 0,
        progress: bool = True,
        draft: PromptCompressor | str | Path | None = None,
        beside: DraftMemory | None = None,
    ) -> None:
        self.model_config = read_model_config(model)
        window = self.model_config.max_position
        if max_model_len is not None and as_count("max_model_len", max_model_len, 1) > window:
            raise ValueError(f"max_model_len is {max_model_len}; the model's window is {window} tokens")
        snapkv = as_kind("snapkv", SnapKVConfig() if snapkv is None else snapkv, SnapKVConfig)
        if beside is not None:
            as_kind("beside", beside, DraftMemory)
        max_model_len = window if max_model_len is None else max_model_len
        check_device(device)
        config = EngineConfig(
            budget=resolve_budget(budget, max_model_len, snapkv.window_len),
            snapkv=snapkv,
            rescoring=rescoring,
            max_model_len=max_model_len,
            max_rows=1 if max_rows == "auto" else max_rows,
            prefill_quantum=prefill_quantum,
            max_waiting=max_waiting,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            executor=resolve_executor(executor, device),
            prefill_attention=prefill_attention,
        )
        check_executor(config)
        check_kv_dtype(config)
        self.notes = (check_prefill_attention(self.model_config, config),)
        config = cut_prefill(self.model_config, config, chunk_len)
        if progress:
            print(*self.notes, sep="\n", file=sys.stderr)
        self.tokenizer = find_tokenizer(Path(model))
        self._trimmer = self._make_trimmer(draft, config)
        if self._trimmer is not None and self._trimmer.compressor.draft.decoder.device.type == device.split(":")[0]:
            beside = memory_of(self._trimmer.compressor)
        self.config = fit_rows(self.model_config, config, max_rows, beside)  # measures what the draft has left
        self._grammars = grammar_compiler(self.tokenizer, self.model_config)
        engine = Engine(
            build_runner(Path(model), self.model_config, self.config, self._grammars, progress),
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
        prompt_compression: PromptCompression | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt (text, or token ids); one ``SamplingParams`` for all or one each.

        ``budget`` gives these requests smaller rows than the engine's. ``prompt_compression`` lets the draft shorten
        the prompts first; ``RequestOutput.trim`` says what it did. Every prompt is checked before any is run: a
        ValueError names the prompt and the limit, and nothing was started.
        """
        batch = as_prompts(prompts)
        requests = [
            self._request(p, s, budget, prompt_compression)
            for p, s in zip(batch, as_params(params, len(batch)), strict=True)
        ]
        return self._answer(requests)

    def _answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Check every request, then run them all."""
        for index, request in enumerate(requests):
            try:
                self._validate(request)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}" if len(requests) > 1 else str(error)) from None
        return self._driver.run(requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        budget: Budget | None = None,
        prompt_compression: PromptCompression | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template."""
        conversations = as_conversations(messages)
        if prompt_compression is None:
            return self.generate([self.chat_token_ids(some) for some in conversations], params, budget=budget)
        trimmer = self._need_trimmer(prompt_compression)
        return self._answer(
            [
                self._trimmed_request(trimmer.chat(some, prompt_compression, self._render_chat), own, budget)
                for some, own in zip(conversations, as_params(params, len(conversations)), strict=True)
            ]
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
        prompt_compression: PromptCompression | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the same ``RequestOutput`` each time it has grown. Closing the iterator aborts the request.

        Wrong input is refused here, before the first ``next``. Several streams may be read in turn, and ``generate``
        called between two reads: all open requests share the steps.
        """
        batch = as_prompts(prompt)
        if len(batch) != 1:
            raise ValueError(f"stream takes one prompt; {len(batch)} were given")
        (sampling,) = as_params(params, 1)
        request = self._request(batch[0], sampling, budget, prompt_compression)
        self._validate(request)
        return self._driver.stream(request)

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

    def _make_trimmer(self, draft: PromptCompressor | str | Path | None, config: EngineConfig) -> PromptTrimmer | None:
        if draft is None:
            return None
        from snapstream.spec_prefill.compressor import PromptCompressor
        from snapstream.spec_prefill.trimmer import PromptTrimmer

        if not isinstance(draft, PromptCompressor):
            draft = PromptCompressor(draft, dtype=config.dtype, device=config.device)
        return PromptTrimmer(draft, self._need_tokenizer("prompt compression"))

    def _need_trimmer(self, how: PromptCompression) -> PromptTrimmer:
        as_kind("prompt_compression", how, PromptCompression)
        if self._trimmer is None:
            raise ValueError("prompt_compression needs a draft model; make the LLM with draft=...")
        return self._trimmer

    def _trimmed_request(self, trimmed: TrimmedPrompt, params: SamplingParams, budget: Budget | None) -> Request:
        return self._make_request(
            trimmed.token_ids, params, budget, text=trimmed.text, positions=trimmed.positions, trim=trimmed.trim
        )

    def _request(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        budget: Budget | None,
        compression: PromptCompression | None = None,
    ) -> Request:
        if compression is not None:
            return self._trimmed_request(self._need_trimmer(compression).prompt(prompt, compression), params, budget)
        text = prompt if isinstance(prompt, str) else None
        ids: Any = self._need_tokenizer("text")(text)["input_ids"] if text is not None else prompt
        return self._make_request(ids, params, budget, text=text)

    def _make_request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        budget: Budget | None,
        *,
        text: str | None = None,
        positions: tuple[int, ...] | None = None,
        trim: Trim | None = None,
    ) -> Request:
        resolved = None
        if budget is not None:
            resolved = resolve_budget(budget, self.config.max_model_len, self.config.snapkv.window_len)
        return Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=tuple(ids),
            sampling=params,
            budget=resolved,
            prompt=text,
            positions=positions,
            trim=trim,
        )

    def _validate(self, request: Request) -> None:
        """ValueError if the request could never be served, or its grammar does not compile."""
        self.engine.validate(request)
        if request.sampling.grammar is not None and self._grammars is not None:
            self._grammars.matcher(request.sampling.grammar)
