"""openai-agents over /v1/responses: a run, a streamed run, tools, a handoff, structured output."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from benchmarks.server_process import ServerProcess
from tests.clients.scripted import QUESTIONS, ScriptedEngine, call, check_three_turns, scripted_server, three_turns

agents: Any = pytest.importorskip("agents", reason="the extra `clients` is not installed")


@pytest.fixture(autouse=True)
def no_tracing() -> None:
    agents.set_tracing_disabled(True)


def model_at(url: str) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return agents.OpenAIResponsesModel(model="tiny", openai_client=client)


def run(answers: Sequence[str], question: str, **options: Any) -> tuple[Any, ScriptedEngine]:
    """An agent of these options, run against a model that answers so."""

    async def main(url: str) -> Any:
        others = [agents.Agent(model=model_at(url), **one) for one in options.pop("others", ())]
        agent = agents.Agent(name="helper", model=model_at(url), handoffs=others, **options)
        return await agents.Runner.run(agent, question)

    with scripted_server(answers) as running:
        return asyncio.run(main(running.url)), running.engine


def test_a_run_against_the_real_model(server: ServerProcess) -> None:
    agent = agents.Agent(name="helper", model=model_at(server.url))
    agent.model_settings = agents.ModelSettings(temperature=0, max_tokens=16)
    result = agents.Runner.run_sync(agent, "hi")
    assert result.final_output and result.raw_responses[0].usage.output_tokens > 0


def test_a_tool() -> None:
    seen: list[int] = []

    @agents.function_tool
    def double(number: int) -> str:
        """Twice a number."""
        seen.append(number)
        return str(2 * number)

    result, engine = run(
        ["<think>\nI double.\n</think>\n\n" + call("double", '{"number": 21}'), "It is 42."],
        "Twice 21?", instructions="Use tools.", tools=[double],
    )  # fmt: skip
    assert (result.final_output, seen) == ("It is 42.", [21])
    first, second = engine.prompts
    assert first.startswith("tools: double ") and "system: Use tools." in first
    assert (
        'double({"number": 21})' in second and "tool: 42 for call_" in second and "<think>I double.</think>" in second
    )


def test_a_handoff() -> None:
    result, engine = run(
        [call("transfer_to_poet", "{}"), "Roses are red."],
        "A poem, please.", others=[{"name": "poet", "instructions": "You write poems."}],
    )  # fmt: skip
    assert result.final_output == "Roses are red." and result.last_agent.name == "poet"
    assert "transfer_to_poet" in engine.prompts[0] and "system: You write poems." in engine.prompts[1]


def test_structured_output() -> None:
    class Colour(BaseModel):
        name: str

    result, engine = run(['{"name":"blue"}'], "The sky?", output_type=Colour)
    assert result.final_output == Colour(name="blue")
    assert engine.requests[0].sampling.grammar is not None


def test_a_streamed_run() -> None:
    @agents.function_tool
    def now() -> str:
        """The time."""
        return "noon"

    async def main(url: str) -> tuple[list[str], str, Any]:
        agent = agents.Agent(name="helper", model=model_at(url), tools=[now])
        result = agents.Runner.run_streamed(agent, "What time is it?")
        kinds, text = [], ""
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                kinds.append(event.data.type)
                text += event.data.delta if event.data.type == "response.output_text.delta" else ""
            elif event.type == "run_item_stream_event":
                kinds.append(event.name)
        return kinds, text, result.final_output

    with scripted_server([call("now", "{}"), "It is noon."]) as running:
        kinds, text, final = asyncio.run(main(running.url))
    assert text == final == "It is noon."
    assert kinds.count("response.created") == kinds.count("response.completed") == 2
    assert kinds.index("tool_called") < kinds.index("tool_output") < kinds.index("message_output_created")


def test_three_turns_with_a_tool() -> None:
    @agents.function_tool
    def weather(city: str) -> str:
        """The weather."""
        return f"sun in {city}"

    async def main(url: str) -> list[str]:
        agent = agents.Agent(name="helper", model=model_at(url), tools=[weather])
        said, items = [], []
        for question in QUESTIONS:
            result = await agents.Runner.run(agent, [*items, {"role": "user", "content": question}])
            items = result.to_input_list()
            said.append(result.final_output)
        return said

    with scripted_server(three_turns("weather", '{"city": "Rome"}')) as running:
        assert asyncio.run(main(running.url)) == ["Done 1.", "Done 2.", "Done 3."]
        check_three_turns(running, "weather")
