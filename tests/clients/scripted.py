"""A server whose model says what a test wrote down, turn by turn, behind a template that tells the model everything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from snapstream.config import EngineConfig, KVBudget
from snapstream.server.app import make_app
from snapstream.server.engine.api import RequestDelta
from snapstream.server.options import ServerSettings
from snapstream.types import Request
from tests.server.app_server import on_socket
from tests.server.fake_engine import METADATA, FakeEngine, template_tokenizer
from tests.server.templates import TELLING, prompt_of

LONG = replace(METADATA, engine=EngineConfig(budget=KVBudget.of(128), max_model_len=65_536, max_rows=4))


@dataclass
class ScriptedEngine(FakeEngine):
    """Each request gets the next answer; the last one stays."""

    answers: list[str] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncIterator[RequestDelta]:
        if self.answers:
            self.answer = self.answers.pop(0)
        async for delta in super().generate(request):
            yield delta

    @property
    def prompts(self) -> list[str]:
        """What the model was fed, request by request."""
        return [prompt_of(self, index) for index in range(len(self.requests))]


@dataclass
class Scripted:
    engine: ScriptedEngine
    url: str


@contextmanager
def scripted_server(answers: Sequence[str], **settings: Any) -> Iterator[Scripted]:
    engine = ScriptedEngine(answers=list(answers))
    app = make_app(
        engine, template_tokenizer(TELLING), ServerSettings(**{"tool_parser": "hermes", **settings}), lambda: LONG
    )
    with on_socket(app) as url:
        yield Scripted(engine, url)


def call(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


QUESTIONS = ("What about one?", "What about two?", "What about three?")


def three_turns(name: str, arguments: str) -> list[str]:
    """Answers to ``QUESTIONS``: a call of the tool, then a text, for each."""
    return [answer for number in (1, 2, 3) for answer in (call(name, arguments), f"Done {number}.")]


def check_three_turns(running: Scripted, name: str) -> None:
    """Six requests; the model was fed all questions, calls, results and answers before each, in their order."""
    prompts = running.engine.prompts
    assert len(prompts) == 6
    said = [
        words
        for number, question in enumerate(QUESTIONS, 1)
        for words in (question, f"{name}(", "tool: ", f"assistant: Done {number}.")
    ]
    for index, prompt in enumerate(prompts):
        place = 0
        for words in said[: 4 * (index // 2) + (3 if index % 2 else 1)]:
            place = prompt.find(words, place) + len(words)
            assert place >= len(words), (index, words)
