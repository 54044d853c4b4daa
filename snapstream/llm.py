"""The composition root: resolves a checkpoint folder and settings into a running engine, and drives it.

``LLM.generate`` is the whole system in one call; ``LLM.stream`` yields an answer as it grows. What runs next is decided
in ``engine/``, what is computed in ``models/`` and ``runner/``; here everything is only put together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from snapstream.cache import layout
from snapstream.config import DTYPE_BYTES, DType, EngineConfig, Executor, KVBudget, ModelConfig, SnapKVConfig, as_count
from snapstream.engine.core import Engine
from snapstream.engine.detokenizer import Tokenizer
from snapstream.engine.validate import QueueFull
from snapstream.inputs import as_conversations, as_params, as_prompts
from snapstream.models.registry import read_model_config
from snapstream.models.shapes import num_parameters
from snapstream.request import Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Budget = KVBudget | int | str  # the only text is "full"
Prompt = str | Sequence[int]
Message = Mapping[str, Any]

DEFAULT_BUDGET = 8192  # slots; what the paper keeps of a 128k prompt


def resolve_budget(budget: Budget, max_model_len: int, window_len: int) -> KVBudget:
    """``"full"``, a number of slots, or a budget. Slots for a whole sequence or more mean full attention."""
    if isinstance(budget, KVBudget):
        return budget
    if budget == "full":
        return KVBudget.full(max_model_len)
    if isinstance(budget, str):
        raise ValueError(f"budget is {budget!r}; it must be a KVBudget, a number of slots or 'full'")
    if as_count("budget", budget, 1) >= max_model_len:
        return KVBudget.full(max_model_len)
    return KVBudget.of(budget, window_len=window_len)


class LLM:
    """A model behind fixed-size rows.

    ``model``: a Hugging Face checkpoint folder. ``budget``: slots per row, ``"full"``, or a ``KVBudget``.
    ``max_rows``: requests decoded together. ``max_model_len``: prompt + output, by default the model's window.
    ``dtype`` holds for weights and rows. ``max_waiting`` bounds the queue of an engine that serves; 0 means no bound.
    Raises ValueError for anything that cannot be supported, with the reason.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        budget: Budget = DEFAULT_BUDGET,
        snapkv: SnapKVConfig | None = None,
        dtype: DType = "float32",
        device: str = "cpu",
        executor: Executor = "eager",
        max_rows: int = 8,
        max_model_len: int | None = None,
        chunk_len: int = 512,
        prefill_quantum: int = 0,
        max_waiting: int = 0,
        progress: bool = True,
    ) -> None:
        self.model_config = read_model_config(model)
        window = self.model_config.max_position
        if max_model_len is not None and as_count("max_model_len", max_model_len, 1) > window:
            raise ValueError(f"max_model_len is {max_model_len}; the model's window is {window} tokens")
        snapkv = snapkv or SnapKVConfig()
        max_model_len = window if max_model_len is None else max_model_len
        self.config = EngineConfig(
            budget=resolve_budget(budget, max_model_len, snapkv.window_len),
            snapkv=snapkv,
            max_model_len=max_model_len,
            max_rows=max_rows,
            chunk_len=chunk_len,
            short_len=chunk_len,
            prefill_quantum=prefill_quantum,
            max_waiting=max_waiting,
            dtype=dtype,
            device=device,
            executor=executor,
        )
        _check_device(device)
        _check_memory(self.model_config, self.config)
        self._progress = progress
        self.tokenizer = load_tokenizer(Path(model))
        self._engine: Engine | None = Engine(
            _build_runner(Path(model), self.model_config, self.config, progress),
            self.config,
            vocab_size=self.model_config.vocab_size,
            num_layers=self.model_config.num_layers,
            eos_token_ids=self.model_config.eos_token_ids,
            tokenizer=cast("Tokenizer | None", self.tokenizer),
        )
        self._num_requests = 0
        self._changed: dict[str, bool] = {}  # by id of every open request: has it grown since its reader looked?
        self._is_broken = False

    @property
    def engine(self) -> Engine:
        """The engine behind this object; RuntimeError once it is closed or a step has failed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        if self._is_broken:
            raise RuntimeError("an earlier step of this LLM failed; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        budget: Budget | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt (text, or token ids); one ``SamplingParams`` for all or one each.

        ``budget`` gives these requests smaller rows than the engine's. Every prompt is checked before any is run: a
        ValueError names the prompt and the limit, and nothing was started.
        """
        batch = as_prompts(prompts)
        requests = [self._request(p, s, budget) for p, s in zip(batch, as_params(params, len(batch)), strict=True)]
        for index, request in enumerate(requests):
            try:
                self.engine.validate(request)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}" if len(requests) > 1 else str(error)) from None
        return self._run(requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        budget: Budget | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template."""
        ids = [self.chat_token_ids(conversation) for conversation in as_conversations(messages)]
        return self.generate(ids, params, budget=budget)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the same ``RequestOutput`` each time it has grown. Closing the iterator aborts the request.

        Wrong input is refused here, before the first ``next``. Several streams may be read in turn, and ``generate``
        called between two reads: all open requests share the steps.
        """
        batch = as_prompts(prompt)
        if len(batch) != 1:
            raise ValueError(f"stream takes one prompt; {len(batch)} were given")
        (sampling,) = as_params(params, 1)
        request = self._request(batch[0], sampling, budget)
        self.engine.validate(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        output = self._open(request)
        try:
            while True:
                while not self._changed[request.request_id]:
                    self._step()
                self._changed[request.request_id] = False
                is_finished = output.is_finished
                yield output
                if is_finished:
                    return
        finally:
            self._release([request])

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        from jinja2 import TemplateError

        tokenizer = self._need_tokenizer("chat")
        if tokenizer.chat_template is None:
            raise ValueError("this checkpoint has no chat template; pass a prompt to generate() instead")
        (conversation,) = as_conversations(messages)
        try:
            text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # roles that the template does not take, or their order
            raise ValueError(f"the model's chat template refuses this conversation: {error}") from None
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def close(self) -> None:
        """Drop weights and rows. The object cannot be used afterwards."""
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _need_tokenizer(self, purpose: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"this checkpoint has no tokenizer, which {purpose} needs; pass token ids")
        return self.tokenizer

    def _request(self, prompt: str | list[int], params: SamplingParams, budget: Budget | None) -> Request:
        text = prompt if isinstance(prompt, str) else None
        ids: Any = self._need_tokenizer("text")(text)["input_ids"] if text is not None else prompt
        resolved = None
        if budget is not None:
            resolved = resolve_budget(budget, self.config.max_model_len, self.config.snapkv.window_len)
        self._num_requests += 1
        return Request(
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=tuple(ids),
            sampling=params,
            budget=resolved,
            prompt=text,
        )

    def _run(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run checked requests to their end, feeding the queue as it takes them."""
        outputs: list[RequestOutput] = []
        num_finished = 0
        bar = _progress_bar(len(requests), self._progress)
        try:
            while num_finished < len(requests):
                while len(outputs) < len(requests):
                    try:
                        outputs.append(self._open(requests[len(outputs)]))
                    except QueueFull:
                        break
                self._step()
                num_now = sum(output.is_finished for output in outputs)
                bar.update(num_now - num_finished)
                num_finished = num_now
        finally:
            bar.close()
            self._release(requests)
        return outputs

    def _open(self, request: Request) -> RequestOutput:
        output = self.engine.add_request(request)
        self._changed[request.request_id] = False
        return output

    def _step(self) -> None:
        """One step for everybody; notes whose outputs have grown."""
        try:
            grown = self.engine.step()
        except Exception:  # not Ctrl-C: after that requests are aborted in order
            self._is_broken = True
            raise
        for output in grown:
            if output.request_id in self._changed:
                self._changed[output.request_id] = True

    def _release(self, requests: Sequence[Request]) -> None:
        """Forget requests, whatever their state: after their end, an error, Ctrl-C, a closed stream."""
        for request in requests:
            self._changed.pop(request.request_id, None)
        if self._engine is None or self._is_broken:
            return
        if any([self._engine.abort(request.request_id) for request in requests]):
            self._step()  # takes the rows back
        while not self._changed and self._engine.has_work:  # nobody is left: read what is in flight
            self._step()


def _progress_bar(total: int, wanted: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt", disable=not wanted or total < 2)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, or None where there is none (token ids in, token ids out)."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _build_runner(folder: Path, model: ModelConfig, config: EngineConfig, progress: bool) -> Any:
    import torch

    from snapstream.models.decoder import Decoder
    from snapstream.models.loader import load_weights
    from snapstream.runner.model_runner import ModelRunner

    dtype = getattr(torch, config.dtype)
    weights = load_weights(folder, model, dtype, config.device, progress)
    return ModelRunner(Decoder(model, weights), config)


def _check_device(device: str) -> None:
    """Refuse a device that this engine does not know or that this machine does not have."""
    import torch

    if not isinstance(device, str) or device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # which of the two depends on how torch was built
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _check_memory(model: ModelConfig, config: EngineConfig) -> None:
    """Refuse a configuration that this machine's memory cannot hold, before anything is loaded (CPU only)."""
    if config.device != "cpu":
        return
    size = DTYPE_BYTES[config.dtype]
    weights = num_parameters(model) * size
    row = layout.row_bytes(model, config.budget.capacity, size)
    staging = layout.staging_bytes(model, config.pool_tokens, size)
    needed = weights + row * (config.max_rows + 1) + staging
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        gib = 2**30
        raise ValueError(
            f"{weights / gib:.1f} GiB of weights, {config.max_rows} + 1 rows of {row / gib:.2f} GiB and "
            f"{staging / gib:.2f} GiB of staging need {needed / gib:.1f} GiB; this machine has {memory / gib:.1f} GiB. "
            f"Lower max_rows, the budget or max_model_len"
        )
