"""The state that every handler shares: the engine, the tokenizer, the limits, and whether work is taken at all.

``app.py`` makes one per application; handlers reach it as an argument, there is no global.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response

from snapstream.request import Grammar
from snapstream.server.engine.api import AsyncEngine, EngineDead
from snapstream.server.engine.grammar_gate import GrammarGate
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.gate import Gate
from snapstream.server.http.namespaces import SALT, Namespaces
from snapstream.server.http.sse import EventStream, until_gone
from snapstream.server.http.wire import Wire
from snapstream.server.metrics import Metrics
from snapstream.server.openai.errors import engine_error
from snapstream.server.openai.parsing import IgnoredFields
from snapstream.server.openai.prompt_trims import PromptTrims
from snapstream.server.openai.prompts import Prompts
from snapstream.server.openai.thoughts import CLOSING, OPENING, choose_reasoning
from snapstream.server.openai.token_text import TokenText
from snapstream.server.openai.tools.formats import choose_format
from snapstream.server.openai.visit import AnswerVisit
from snapstream.server.settings import ModelFacts, ServerSettings
from snapstream.start.build import tokenizer_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.text_trimmer import TextTrimmer

Work = Callable[[dict[str, Any], AnswerVisit], Coroutine[Any, Any, Response]]  # takes the body
T = TypeVar("T")


class Front(Gate):
    """The state of one application."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: ServerSettings,
        facts: Callable[[], ModelFacts],
        trimmer: TextTrimmer | None = None,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(settings, "server", EventStream)
        self.engine = engine
        self.settings = settings
        self.prompts = Prompts(tokenizer, threads=settings.tokenizer_threads, trusts_users=settings.trusts_users)
        self.texts = TokenText(tokenizer)
        template = str(getattr(tokenizer, "chat_template", ""))
        self.call_format = choose_format(settings.tool_parser, template)
        self.reasoning = choose_reasoning(settings.reasoning_parser, template)
        # Whether the answers must be shown with their special tokens, because the tags of thoughts are some.
        self.shows_special = self.reasoning != "none" and bool(self.texts.special & {OPENING, CLOSING})
        self.template = template
        self.tells_tools = "tools" in template  # the variable that templates find them in
        self._grammars: GrammarGate | None = None
        if tokenizer is not None:
            end_ids = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
            self._grammars = GrammarGate(lambda: tokenizer_json(tokenizer), end_ids)
        self.ignored = IgnoredFields()
        self._facts = facts
        self._served_name = ""
        self._namespaces = Namespaces(settings.namespace_secret)
        self.metrics = Metrics(
            self._model_name,
            engine.stats,
            has_vllm_names=settings.has_vllm_names,
            has_transfers=settings.duty != "both",
            wire=wire,
        )
        self.trims = PromptTrims(trimmer, tokenizer, settings, self.metrics.count_trimmed)

    @property
    def facts(self) -> ModelFacts:
        """503 until the engine has reported them."""
        try:
            return self._facts()
        except EngineDead as error:
            raise self.error(error) from None

    @property
    def is_ready(self) -> bool:
        return self.engine.is_ready and not self.is_draining

    @property
    def example_len(self) -> int:
        """Tokens of the longest document that the page may make up here; 0 where the model knows none of them."""
        return self.facts.max_model_len if self.facts.has_examples else 0

    async def with_tokenizer(self, work: Callable[[Any], T]) -> T:
        """Run something long, that needs a tokenizer, off the event loop; 400 where there is none."""
        return await self.prompts.with_tokenizer(work)

    def error(self, error: Exception) -> ApiError:
        return engine_error(error, self.settings.retry_after_s) or super().error(error)

    def need_ready(self) -> None:
        """503 unless new work is taken."""
        self.need_open()
        self.need_engine()

    def need_engine(self) -> None:
        """503 unless the engine takes requests. Unlike ``need_ready`` it lets in what came before a drain."""
        absence = self.engine.absence
        if absence is not None:
            raise self.error(absence)

    def need_model(self, name: str | None) -> str:
        """The served name that a request means."""
        if name is None:
            return self.facts.name
        if name not in self.facts.names:
            raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")
        return name

    async def need_grammar(self, grammar: Grammar, param: str) -> None:
        """400 unless it compiles, 429 if too many wait; tried elsewhere, for at most some seconds each."""
        if self._grammars is not None:
            try:
                await self._grammars.check(grammar, self.facts.vocab_size)
            except ValueError as error:
                raise bad_value(str(error), param) from None

    async def answer(self, request: HttpRequest, work: Work) -> Response:
        """Run a handler that computes: watched for the client's leave, with errors in their shape, and logged."""
        visit = AnswerVisit(self.visits, request.state.own_id, request.state.request_id, request.url.path)

        async def watched() -> Response:
            data = {} if request.method == "GET" else await self.read_object(request, visit)
            visit.namespace = self.namespace(request, data.get(SALT))
            return await until_gone(request.receive, work(data, visit))

        return await self.pass_through(visit, watched)

    def namespace(self, request: HttpRequest, salt: Any = None) -> str:
        """Of the prefix store, for a request of this caller."""
        return self._namespaces.of(getattr(request.state, "caller", b""), salt)

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, let the open ones end for at most ``timeout_s``, and end the engine.

        The engine is told last: prompts that wait here for their turn still have to reach it.
        """
        self.is_draining = True
        start = monotonic()
        await self.visits.wait_idle(timeout_s)
        await self.engine.shutdown(max(0.0, timeout_s - (monotonic() - start)))

    def close(self) -> None:
        self.prompts.close()
        self.trims.close()
        if self._grammars is not None:
            self._grammars.close()

    def _model_name(self) -> str:
        """Asked for with every token; once known, it stays."""
        if not self._served_name:
            with suppress(EngineDead):
                self._served_name = self._facts().name
        return self._served_name
