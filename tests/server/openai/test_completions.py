"""/v1/completions: prompt forms, echo, log-probabilities, offsets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.server.fake_engine import ANSWER, FACTS, FakeEngine, logprob_of, token_ids
from tests.server.front_client import client, frames, text_of

PROMPT = "A tëst."


def complete(engine: FakeEngine | None = None, **body: Any) -> Any:
    async def run() -> Any:
        async with client(engine or FakeEngine()) as http:
            response = await http.post("/v1/completions", json={"prompt": PROMPT, **body})
            return frames(response.text) if body.get("stream") else response.json()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT, [PROMPT]),
        ([PROMPT, "two"], [PROMPT, "two"]),
        (token_ids(PROMPT), [PROMPT]),
        ([token_ids("two"), token_ids(PROMPT)], ["two", PROMPT]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_prompt_forms(prompt: Any, expected: list[str]) -> None:
    engine = FakeEngine()
    body = complete(engine, prompt=prompt, max_tokens=50)
    assert [list(request.prompt_token_ids) for request in engine.requests] == [token_ids(text) for text in expected]
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (index, ANSWER) for index in range(len(expected))
    ]
    assert body["usage"]["prompt_tokens"] == sum(len(token_ids(text)) for text in expected)
    assert len(body["snapstream"]["prompts"]) == len(expected)


def test_default_max_tokens() -> None:
    engine = FakeEngine()
    body = complete(engine)
    assert engine.requests[0].sampling.max_tokens == 16
    assert body["choices"][0]["finish_reason"] == "length"


def test_several_prompts_and_samples_in_a_stream() -> None:
    chunks = complete(prompt=[PROMPT, "two"], n=2, stream=True, max_tokens=50, stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(4)] == [ANSWER] * 4
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] == "stop"]
    assert sorted(ends) == [0, 1, 2, 3]
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * (len(token_ids(ANSWER)) + 1)


def test_logprobs_lists_are_aligned_and_offsets_point_into_the_text() -> None:
    choice = complete(logprobs=1, max_tokens=50)["choices"][0]
    lists = choice["logprobs"]
    ids = [*token_ids(ANSWER), 2]
    assert len(lists["tokens"]) == len(lists["text_offset"]) == len(lists["top_logprobs"]) == len(ids)
    assert lists["token_logprobs"] == [logprob_of(token, 0).logprob for token in ids]
    for token, offset in zip(lists["tokens"][:-1], lists["text_offset"], strict=False):
        if token.startswith("bytes:"):
            assert choice["text"][offset] in "ö😀"
        else:
            assert choice["text"].startswith(token, offset)
    assert lists["text_offset"][-1] == len(ANSWER)  # the end token shows nothing
    # OpenAI's completions list the chosen token beside the likeliest.
    assert lists["top_logprobs"][0]["H"] == lists["token_logprobs"][0] and len(lists["top_logprobs"][0]) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, token_ids(PROMPT)], ids=["text", "ids"])
def test_echo_with_logprobs_lists_every_prompt_token(stream: bool, prompt: Any) -> None:
    answer = complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1, stream=stream)
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in [chunk["choices"][0] for chunk in answer] if stream else answer["choices"]:
        for name, values in lists.items():
            values += choice["logprobs"][name]
    prompt_ids, first = token_ids(PROMPT), token_ids(ANSWER)[0]
    expected = [logprob_of(token, 0).logprob for token in [*prompt_ids[1:], first]]
    assert lists["token_logprobs"] == [None, *expected]
    assert lists["top_logprobs"][0] is None and all(lists["top_logprobs"][1:])
    assert lists["text_offset"][0] == 0 and lists["text_offset"][-1] == len(PROMPT)
    assert (text_of(answer) if stream else answer["choices"][0]["text"]) == PROMPT + "H"


def test_echo_of_the_prompt_alone() -> None:
    body = complete(echo=True, logprobs=0, max_tokens=0)
    choice = body["choices"][0]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(token_ids(PROMPT))
    assert body["usage"]["completion_tokens"] == 0


def test_a_full_queue_only_delays_later_prompts() -> None:
    """The first prompt decides about 429; a batch larger than the queue is served piece by piece."""
    from snapstream.engine.validate import QueueFull

    class OneAtATime(FakeEngine):
        async def generate(self, request: Any) -> Any:
            if self.num_running:
                raise QueueFull("full")
            async for delta in super().generate(request):
                yield delta

    body = complete(OneAtATime(), prompt=["one", "two", "three"], max_tokens=50)
    assert [choice["text"] for choice in body["choices"]] == [ANSWER] * 3


def test_no_more_prompts_are_submitted_than_there_are_rows() -> None:
    class Counting(FakeEngine):
        now = most = 0

        async def generate(self, request: Any) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                async for delta in super().generate(request):
                    yield delta
            finally:
                self.now -= 1

    engine = Counting()
    body = complete(engine, prompt=[f"{number}" for number in range(11)], max_tokens=50)
    assert [choice["text"] for choice in body["choices"]] == [ANSWER] * 11
    assert engine.most == FACTS.engine.max_rows


def test_a_prompt_that_waits_asks_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapstream.engine.validate import QueueFull
    from snapstream.server.openai import generation

    monkeypatch.setattr(generation, "RETRY_S", 0.02)
    monkeypatch.setattr(generation, "MAX_RETRY_S", 0.08)
    times: list[float] = []

    class Busy(FakeEngine):
        async def generate(self, request: Any) -> Any:
            if request.request_id.endswith("-1"):
                times.append(time.monotonic())
                if len(times) < 6:
                    raise QueueFull("full")
            async for delta in super().generate(request):
                yield delta

    complete(Busy(), prompt=["one", "two"])
    waits = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert all(wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.08, 0.08, 0.08), strict=True)), waits


def test_max_completion_tokens_is_the_newer_name() -> None:
    engine = FakeEngine()
    complete(engine, max_completion_tokens=3, max_tokens=9)
    assert engine.requests[0].sampling.max_tokens == 3
    assert complete(echo=True, max_completion_tokens=0)["choices"][0]["text"] == PROMPT


def test_large_echoes_are_the_same_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapstream.server.openai import answers, prompts

    plain = complete(echo=True, logprobs=2, max_tokens=2)
    offload, num_offloaded = prompts.Prompts.offload, 0

    async def counted(self: Any, work: Any) -> Any:
        nonlocal num_offloaded
        num_offloaded += 1
        return await offload(self, work)

    monkeypatch.setattr(answers, "LARGE", 1)
    monkeypatch.setattr(prompts.Prompts, "offload", counted)
    elsewhere = complete(echo=True, logprobs=2, max_tokens=2)
    assert elsewhere["choices"] == plain["choices"] and elsewhere["usage"] == plain["usage"]
    assert num_offloaded == 2  # building and writing
