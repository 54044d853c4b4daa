"""The state that all handlers share (``ServerState``), and that of one request (``AnswerContext``, ``Usage``).

``app.py`` makes one state per application; there is no global. Invariant: ``Usage`` counts the prompt as it was sent,
whatever a draft dropped or a row kept."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel

from snapstream.config import KVBudget, Selector
from snapstream.grammar import GrammarChecker
from snapstream.server.engine.api import AsyncEngine, EngineDead, ModelMetadata, RequestDelta, SampleDelta
from snapstream.server.engine.remote_prefill import PrefillFailed
from snapstream.server.http.connections import ConnectionGuard
from snapstream.server.http.errors import ApiError, bad_value, queue_full, unavailable
from snapstream.server.http.middleware import SALT, Namespaces
from snapstream.server.http.openapi import body_schema
from snapstream.server.http.prompt_compression import CompressionService
from snapstream.server.http.requests import Admission, RequestContext, run_until_disconnect
from snapstream.server.openai.answer_reader import choose_reasoning, has_special_tags
from snapstream.server.openai.prompts import Prompts, TokenText
from snapstream.server.openai.protocol import IgnoredFields
from snapstream.server.openai.tool_formats import choose_format
from snapstream.server.options import ServerSettings
from snapstream.server.telemetry import Metrics
from snapstream.startup.build import tokenizer_json
from snapstream.types import Grammar, KeptBitmap, PrefixUse, QueueFull, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor


@dataclass
class Usage:
    """Token counts of one answer as it grows, and what was applied to its prompts."""

    requests: Sequence[Request]
    budget: KVBudget  # the applied one
    selector: Selector
    prompt_compression: str | dict[str, Any] = "off"  # the options, as a request writes them
    completion_tokens: int = 0
    reasoning_tokens: int | None = None  # among those; None where no reasoning is parsed
    first_at: float | None = None  # monotonic, when the first token came
    num_listed: int = 0  # log-probabilities of generated tokens
    has_listed_kept: bool = False  # positions or bitmaps of what rows kept
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)  # by choice: finish_reason, stop_reason
    num_open: int = 0  # prompts
    _num_tokens: dict[int, int] = field(default_factory=dict)  # by choice, also tokens that usage does not count
    _prompts: list[dict[str, Any]] = field(default_factory=list)
    _prefixes: dict[int, PrefixUse] = field(default_factory=dict)  # by prompt: those that were looked up

    def __post_init__(self) -> None:
        self.num_open = len(self.requests)
        self._prompts = [
            {
                **(
                    {}
                    if request.prompt_compression is None
                    else {"prompt_compression": request.prompt_compression.as_json()}
                ),
                "compression": None,
                "timings": None,
            }
            for request in self.requests
        ]

    def take(self, prompt: int, delta: RequestDelta) -> None:
        """Add what a delta reports of its prompt; ``count`` adds its samples."""
        if self.first_at is None:
            self.first_at = monotonic()
        if delta.compression is not None:
            # Not asdict: it would copy every position.
            values = {field.name: getattr(delta.compression, field.name) for field in fields(delta.compression)}
            metadata = {name: value for name, value in values.items() if value is not None}
            if "kept_bitmap" in metadata:
                bitmap: KeptBitmap = metadata["kept_bitmap"]
                metadata["kept_bitmap"] = asdict(bitmap) | {"bits": b64encode(bitmap.bits).decode()}
            self.has_listed_kept = self.has_listed_kept or "kept_positions" in metadata or "kept_bitmap" in metadata
            self._prompts[prompt]["compression"] = metadata
        if delta.prefix is not None:
            self._prefixes[prompt] = delta.prefix
        if delta.timings is not None:
            self._prompts[prompt]["timings"] = asdict(delta.timings)
        self.num_open -= delta.is_finished

    def count(self, prompt: int, choice: int, sample: SampleDelta, *, is_answer: bool = True) -> None:
        """Add the tokens of a sample, and whether it outgrew its row's ring (``RequestOutput.has_outgrown_ring``).

        ``is_answer`` False: the tokens are not sent, and usage does not count them.
        """
        self.completion_tokens += len(sample.token_ids) * is_answer
        self._num_tokens[choice] = self._num_tokens.get(choice, 0) + len(sample.token_ids)
        metadata = self._prompts[prompt]["compression"]
        if metadata is not None:
            is_longer = self._num_tokens[choice] > metadata["ring_tokens"]
            metadata["has_outgrown_ring"] = metadata.get("has_outgrown_ring", False) or is_longer
        if sample.logprobs:
            self.num_listed += len(sample.logprobs) * (1 + len(sample.logprobs[0].top))

    @property
    def prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def as_openai(self) -> dict[str, Any]:
        """The ``usage`` object of chat and text completions."""
        details = {} if self.reasoning_tokens is None else {"reasoning_tokens": self.reasoning_tokens}
        timings = [own["timings"] for own in self._prompts if own["timings"] is not None]
        if drafted := sum(own["drafted_tokens"] for own in timings):  # by speculative decoding
            accepted = sum(own["accepted_tokens"] for own in timings)
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"completion_tokens_details": details} if details else {}),
        }

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came out of the prefix store, over all prompts."""
        return sum(use.cached_tokens for use in self._prefixes.values())

    @property
    def diverged_at(self) -> int | None:
        """Where the first prompt diverges from the stored ones (``PrefixUse.diverged_at``)."""
        return self._prefixes[0].diverged_at if 0 in self._prefixes else None

    @property
    def log_fields(self) -> dict[str, Any]:
        """Counts for the request's log line; ``kept_tokens`` are those that the rows hold, over all prompts."""
        shortened = (request.prompt_compression for request in self.requests)
        compressions, timings = (own["compression"] for own in self._prompts), self._prompts[0]["timings"]
        return {
            "prompt_tokens": self.prompt_tokens,
            "dropped_tokens": sum(one.dropped_tokens for one in shortened if one is not None),
            "cached_tokens": self.cached_tokens,
            "diverged_at": self.diverged_at,
            "kept_tokens": sum(one["kept_tokens"] for one in compressions if one is not None),
            "completion_tokens": self.completion_tokens,
            "queue_ms": None if timings is None else float(timings["queue_ms"]),  # of the first prompt
        }

    @property
    def metadata(self) -> dict[str, Any]:
        """The member ``snapstream`` of answers: what was applied, and its effect on each prompt."""
        return {
            "kv_cache": {"budget": self.budget.capacity, **asdict(self.budget), "selector": self.selector.name},
            "prompt_compression": self.prompt_compression,
            "prefix": {"cached": self.cached_tokens, "diverged_at": self.diverged_at},
            "prompts": self._prompts,
        }


_NO_COUNTS: dict[str, Any] = {
    "prompt_tokens": 0, "dropped_tokens": 0, "cached_tokens": 0, "diverged_at": None, "kept_tokens": 0,
    "completion_tokens": 0, "queue_ms": None,
}  # fmt: skip


@dataclass
class AnswerContext(RequestContext):
    """``usage`` is set once its prompts are known."""

    usage: Usage | None = None
    caller: bytes = b""
    namespace: str = ""  # of the prefix store: the callers that share prefixes
    model: Any = None  # as the body names it; not checked yet

    def fields(self, status: int, reason: str) -> dict[str, Any]:
        usage, end, ttft_ms = self.usage, reason, None
        if usage is not None:
            if status == 200:
                end = reason or ",".join(sorted({one["finish_reason"] for one in usage.ends.values()})) or "-"
            if usage.first_at is not None:
                ttft_ms = 1e3 * (usage.first_at - self.arrived_at)
        return {
            "request": self.request_id,
            "answer": self.answer_id,
            "path": self.path,
            "status": status,
            "end": end or None,
            **(_NO_COUNTS if usage is None else usage.log_fields),
            "ttft_ms": ttft_ms,
            "ms": 1e3 * (monotonic() - self.arrived_at),
        }


log = logging.getLogger(__name__)

Work = Callable[[dict[str, Any], AnswerContext], Coroutine[Any, Any, Response]]  # takes the body
Handler = Callable[["ServerState", dict[str, Any], AnswerContext], Coroutine[Any, Any, Response]]


def caller_of(request: HttpRequest) -> bytes:
    """The digest of the request's key; b"" if the server requires none."""
    caller: bytes = getattr(request.state, "caller", b"")
    return caller


class ServerState(Admission):
    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: ServerSettings,
        metadata: Callable[[], ModelMetadata],
        compressor: PromptCompressor | None = None,
        guard: ConnectionGuard | None = None,
    ) -> None:
        super().__init__(settings, "server")
        self.engine = engine
        self.settings = settings
        self._prefill_problem = ""
        self.prompts = Prompts(tokenizer, threads=settings.tokenizer_threads, trusts_users=settings.trusts_users)
        self.texts = TokenText(tokenizer)
        template = str(getattr(tokenizer, "chat_template", ""))
        self.call_format = choose_format(settings.tool_parser, template)
        self.reasoning = choose_reasoning(settings.reasoning_parser, template)
        # Answers keep special tokens if the tags of reasoning are special tokens.
        self.shows_special = has_special_tags(self.reasoning, self.texts.special)
        self.template = template
        self.template_has_tools = "tools" in template  # templates render tools from this variable
        self._grammars: GrammarChecker | None = None
        if tokenizer is not None:
            end_ids = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
            self._grammars = GrammarChecker(lambda: tokenizer_json(tokenizer), end_ids)
        self.ignored = IgnoredFields()
        self._metadata = metadata
        self._served_name = ""
        self._namespaces = Namespaces(settings.namespace_secret)
        self.metrics = Metrics(
            self._model_name,
            engine.stats,
            has_vllm_names=settings.has_vllm_names,
            has_transfers=settings.role != "both",
            guard=guard,
        )
        self.compression = CompressionService(compressor, tokenizer, settings, self.metrics.count_dropped)

    @property
    def metadata(self) -> ModelMetadata:
        """503 until the engine has reported them."""
        try:
            return self._metadata()
        except EngineDead as error:
            raise self.error(error) from None

    def error(self, error: Exception) -> ApiError:
        """As of ``Admission``, and what an exception of the engine (``engine/api.py``) means to a client."""
        retry_after_s = self.settings.retry_after_s
        if isinstance(error, QueueFull):
            return queue_full(str(error), retry_after_s)
        if isinstance(error, EngineDead):
            return unavailable(str(error) or "the engine is not running", None if error.is_final else retry_after_s)
        return super().error(error)

    def require_ready(self) -> None:
        """503 unless new work is taken."""
        self.require_open()
        self.require_engine()

    def require_live(self) -> None:
        """503 if the engine has ended for good: the process has to be restarted."""
        unavailable = self.engine.unavailable
        if unavailable is not None and unavailable.is_final:
            raise self.error(unavailable)

    async def check_ready(self) -> None:
        """503 unless new work is taken, and a prefill server can be used."""
        self.require_ready()
        problem = ""
        try:
            await self.engine.check_prefill()
        except (PrefillFailed, ValueError) as error:
            problem = str(error)
        if problem and problem != self._prefill_problem:  # with addresses, which clients must not see
            log.warning("no prefill server can be used: %s", problem)
        self._prefill_problem = problem
        if problem:
            raise unavailable("no prefill server can be used; the log has the reason", self.settings.retry_after_s)

    def require_engine(self) -> None:
        """503 unless the engine takes requests. Unlike ``require_ready`` it admits what came before a drain."""
        unavailable = self.engine.unavailable
        if unavailable is not None:
            raise self.error(unavailable)

    def require_model(self, name: str | None) -> str:
        """The served name that a request means."""
        if name is None:
            return self.metadata.name
        if name not in (*self.metadata.names, *self.metadata.loras):
            raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")
        return name

    def lora_of(self, context: AnswerContext) -> str:
        """The adapter that a request names as its model; "" if none."""
        return next((name for name in self.metadata.loras if name == context.model), "")

    async def require_grammar(self, grammar: Grammar, param: str) -> None:
        """400 unless it compiles within the limits of ``GrammarChecker``, 429 if too many wait."""
        if self._grammars is not None:
            try:
                await self._grammars.check(grammar, self.metadata.architecture.vocab_size)
            except ValueError as error:
                raise bad_value(str(error), param) from None

    def add_post(
        self, router: APIRouter, path: str, handler: Handler, *kinds: type[BaseModel], responses: dict[int | str, Any]
    ) -> None:
        """A route for bodies of these ``kinds``; ``/openapi.json`` lists it by the name of its handler."""

        async def route(request: HttpRequest) -> Response:
            return await self.answer(request, partial(handler, self))

        router.add_api_route(
            path, route, methods=["POST"], name=handler.__name__, openapi_extra=body_schema(*kinds), responses=responses
        )

    async def answer(self, request: HttpRequest, work: Work) -> Response:
        """Run a handler: cancelled if the client disconnects, errors in the API's form, logged."""
        context = AnswerContext.of(self.open_requests, request, caller=caller_of(request))

        async def watched() -> Response:
            data = {} if request.method == "GET" else await self.read_object(request, context)
            context.namespace, context.model = self.namespace(request, data.get(SALT)), data.get("model")
            return await run_until_disconnect(request.receive, work(data, context))

        return await self.handle(context, watched)

    def namespace(self, request: HttpRequest, salt: Any = None) -> str:
        """The caller's namespace in the prefix store."""
        return self._namespaces.of(caller_of(request), salt)

    async def drain(self, timeout_s: float) -> None:
        """Refuse requests, let the open ones end for at most ``timeout_s``, then end the engine: prompts that wait here
        still have to reach it."""
        self.is_draining = True
        start = monotonic()
        await self.open_requests.wait_idle(timeout_s)
        await self.engine.shutdown(max(0.0, timeout_s - (monotonic() - start)))

    def close(self) -> None:
        self.prompts.close()
        self.compression.close()
        if self._grammars is not None:
            self._grammars.close()

    def _model_name(self) -> str:
        """Cached: it is read with every token."""
        if not self._served_name:
            with suppress(EngineDead):
                self._served_name = self._metadata().name
        return self._served_name
