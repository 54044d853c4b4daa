"""/v1/completions: prompt forms, echo, log-probabilities, offsets."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from snapstream.server.openai.prompts import TokenText
from snapstream.server.openai.protocol import ChatBody
from snapstream.server.openai.tool_formats import FORMATS
from snapstream.server.openai.tools import plan_answer
from snapstream.types import NOT_FINITE, FinishReason
from tests.server.app_client import CHAT, HI, TEXT, TOOLS, call, client, error_of, frames, text_of
from tests.server.fake_engine import ANSWER, METADATA, FakeEngine, logprob_of, token_ids
from tests.server.openai.test_tools import accepts, tokens
from tests.server.tiny_server import tiny_server

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
    from snapstream.types import QueueFull

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
    assert engine.most == METADATA.engine.max_rows


def test_a_prompt_that_waits_asks_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapstream.server.openai import generation
    from snapstream.types import QueueFull

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
    from snapstream.server.openai import prompts, routes

    plain = complete(echo=True, logprobs=2, max_tokens=2)
    offload, num_offloaded = prompts.Prompts.offload, 0

    async def counted(self: Any, work: Any) -> Any:
        nonlocal num_offloaded
        num_offloaded += 1
        return await offload(self, work)

    monkeypatch.setattr(routes, "LARGE", 1)
    monkeypatch.setattr(prompts.Prompts, "offload", counted)
    elsewhere = complete(echo=True, logprobs=2, max_tokens=2)
    assert elsewhere["choices"] == plain["choices"] and elsewhere["usage"] == plain["usage"]
    assert num_offloaded == 2  # building and writing


# The form of an answer over HTTP: vLLM's structured_outputs and its older names, custom tools, allowed tools.

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMS: list[tuple[str, Any, str]] = [
    ("json", SCHEMA, r'\{"a":[12]\}'),
    ("json", json.dumps(SCHEMA), r'\{"a":[12]\}'),
    ("regex", "[ab]{3}/[0-9]", "[ab]{3}/[0-9]"),
    ("choice", ["yes", 'no "no"'], 'yes|no "no"'),
    ("grammar", 'start: "x" Y\nY: /[0-9]{2}/', "x[0-9]{2}"),
    ("grammar", 'root ::= "x" [0-9]{2}\n', "x[0-9]{2}"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_server(tool_parser="qwen3_coder") as server:
        yield f"{server.url}/v1"


@pytest.fixture
def api(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.mark.parametrize(("kind", "value", "pattern"), FORMS)
def test_forms_in_the_names_of_vllm(api: openai.OpenAI, kind: str, value: Any, pattern: str) -> None:
    form = {"structured_outputs": {kind: value}}
    chat = api.chat.completions.create(model="tiny", messages=HI, temperature=1, seed=3, extra_body=form)  # type: ignore[arg-type]
    text = api.completions.create(model="tiny", prompt="So", temperature=1, seed=4, max_tokens=60, extra_body=form)
    for choice, answer in (
        (chat.choices[0], chat.choices[0].message.content),
        (text.choices[0], text.choices[0].text),
    ):
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, answer or ""), answer


def test_any_object(api: openai.OpenAI) -> None:
    form = {"structured_outputs": {"json_object": True}}
    answer = api.completions.create(model="tiny", prompt="So", seed=4, max_tokens=20, extra_body=form)
    assert answer.choices[0].text.startswith("{")


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "it has none"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "it has none"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "not empty"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "list of strings"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs", "regular expression"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs", "JSON schema"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "plain JSON"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": "a"}, "structured_outputs", "dictionary"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", "GBNF"),
        ({"guided_regex": "a"}, "guided_regex", "not supported"),
    ],
)
def test_refusals_name_the_field(form: dict[str, Any], param: str, words: str) -> None:
    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
        error = error_of(call(path, {**body, **form}), 400)
        assert error["param"] == param and words in error["message"]


def test_structured_outputs_and_a_response_format_exclude_each_other() -> None:
    both = {"messages": HI, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert error_of(call(CHAT, both), 400)["param"] == "structured_outputs"
    whole = {**both, "response_format": {"type": "text"}}
    engine = FakeEngine()
    assert call(CHAT, whole, engine=engine).status_code == 200
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None and (grammar.kind, grammar.text) == ("regex", "a")
    options = {"structured_outputs": {"regex": "a", "disable_any_whitespace": True, "json": None, "json_object": False}}
    assert call(TEXT, {"prompt": "hi", **options}).status_code == 200


GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "print(" /[0-9]{1,3}/ ")"'}}
RUN: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Runs it.", "format": GRAMMAR}}
SAY: dict[str, Any] = {"type": "custom", "custom": {"name": "say"}}


def test_a_custom_tool_is_called_with_a_text(api: openai.OpenAI) -> None:
    """Whole and streamed, forced by its name and by required; its grammar holds."""
    for choice in ("required", {"type": "custom", "custom": {"name": "run"}}):
        sent: Any = {
            "model": "tiny", "messages": HI, "tools": [RUN], "tool_choice": choice, "seed": 5,
            "parallel_tool_calls": False,
        }  # fmt: skip
        answer = api.chat.completions.create(**sent).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
        called: Any = answer.message.tool_calls[0]
        assert called.type == "custom" and called.custom.name == "run"
        assert re.fullmatch(r"print\([0-9]{1,3}\)", called.custom.input)
        deltas = [one for chunk in api.chat.completions.create(**sent, stream=True)
                  for one in chunk.choices[0].delta.tool_calls or ()]  # fmt: skip
        assert deltas[0].type == "custom" and deltas[0].id
        assert "".join(one.custom["input"] for one in deltas) == called.custom.input  # type: ignore[attr-defined]


def test_a_conversation_with_a_custom_call_goes_on_and_the_model_is_told_of_the_tool() -> None:
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": "print(1)"}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [custom]},
                {"role": "tool", "tool_call_id": "call_1", "content": "1"}]  # fmt: skip
    body = {"messages": messages, "tools": [RUN, SAY], "chat_template_kwargs": {}}

    async def run() -> str:
        async with client(FakeEngine(), tool_parser="hermes") as http:
            tokenizer: Any = http.server.prompts.tokenizer
            before = tokenizer.chat_template
            tokenizer.chat_template = "{{ tools | tojson }} {{ messages | tojson }}"
            try:
                done = await http.post("/tokenize", json=body)
                prompt = await http.post("/detokenize", json={"tokens": done.json()["tokens"]})
            finally:
                tokenizer.chat_template = before
        return str(prompt.json()["prompt"])

    prompt = asyncio.run(run())
    tools, _, rest = prompt.partition("] [")
    run_told, say_told = json.loads(tools + "]")
    assert run_told["function"]["parameters"]["required"] == ["input"]
    assert (
        run_told["function"]["description"].startswith("Runs it.") and "print(" in run_told["function"]["description"]
    )
    assert say_told["function"]["name"] == "say" and say_told["type"] == "function"
    assert '"arguments": {"input": "print(1)"}' in rest


def ask(answer: str, **body: Any) -> tuple[str | None, list[str]]:
    got = call(CHAT, {"messages": HI, **body}, engine=FakeEngine(answer=answer), tool_parser="hermes")
    assert got.status_code == 200, got.text
    message = got.json()["choices"][0]["message"]
    return message["content"], [one[one["type"]]["name"] for one in message.get("tool_calls") or ()]


GET: dict[str, Any] = {"type": "function", "function": {"name": "get"}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_only_allowed_tools_are_called() -> None:
    called = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    tools = [*TOOLS, GET, SAY]
    assert ask(called, tools=tools) == (None, ["get"])
    assert ask(called, tools=tools, tool_choice=allowed("auto", GET)) == (None, ["get"])
    assert ask(called, tools=tools, tool_choice=allowed("auto", *TOOLS, SAY)) == (called, [])

    engine = FakeEngine()
    sent = {"messages": HI, "tools": tools, "tool_choice": allowed("required", GET, SAY)}
    assert call(CHAT, sent, engine=engine, tool_parser="hermes").status_code == 200
    grammar = engine.requests[0].sampling.grammar
    assert (
        grammar is not None and all(name in grammar.text for name in ("get", "say")) and '\\"f\\"' not in grammar.text
    )


@pytest.mark.parametrize(
    ("sent", "param", "words"),
    [
        ({"tools": [{"type": "custom"}]}, "tools", "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]}, "tools", "format"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": "text"}}]}, "tools", "format"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar", "grammar": {
            "syntax": "ebnf", "definition": "a"}}}}]}, "tools", "'lark' or 'regex'"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar", "grammar": {
            "syntax": "lark", "definition": ""}}}}]}, "tools", "definition"),
        ({"tools": [RUN], "tool_choice": "required"}, "tools", "Lark"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools", "strict"),
        ({"tools": [GET, {"type": "custom", "custom": {"name": "get"}}]}, "tools", "the same name"),
        ({"tools": [GET], "tool_choice": {"type": "custom", "custom": {"name": "get"}}}, "tool_choice", "'get'"),
        ({"tools": [GET], "tool_choice": allowed("auto")}, "tool_choice", "not empty"),
        ({"tools": [GET], "tool_choice": allowed("any", GET)}, "tool_choice", "mode"),
        ({"tools": [GET], "tool_choice": allowed("auto", SAY)}, "tool_choice", "'say'"),
        ({"tools": [GET], "tool_choice": allowed("auto", {"type": "mcp"})}, "tool_choice", "tools[0]"),
        ({"tools": [GET], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "mode"),
    ],
)  # fmt: skip
def test_malformed_tools_and_choices(sent: dict[str, Any], param: str, words: str) -> None:
    error = error_of(call(CHAT, {"messages": HI, **sent}, tool_parser="hermes"), 400)
    assert error["param"] == param and words in error["message"]


def test_a_grammar_that_cannot_be_followed_is_an_error() -> None:
    """Not ``length``: nothing was cut, and more tokens would not help."""

    class Stuck(FakeEngine):
        def _noise(self, request: Any) -> Any:
            delta = super()._noise(request)
            assert delta.samples[0].stop_reason == NOT_FINITE
            sample = replace(delta.samples[0], finish_reason=FinishReason.ERROR, stop_reason="grammar: no way on")
            return replace(delta, samples=(sample,))

    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
        error = error_of(call(path, body, engine=Stuck(noise_after=3)), 400)
        assert error["code"] == "grammar_failed" and "no way on" in error["message"]
        streamed = frames(call(path, {**body, "stream": True}, engine=Stuck(noise_after=3)).text)
        assert streamed[-1]["error"]["code"] == "grammar_failed"


def test_strict_tools_are_held_where_calls_begin_with_a_special_token() -> None:
    """The tiny model's own vocabulary has no such token, and its calls are free; one with it has a grammar."""
    strict = {"type": "function", "function": {"name": "get", "strict": True, "parameters": SCHEMA}}
    texts = TokenText(tokens("<tool_call>"))
    for tools, is_held in (([strict], True), ([GET], False), ([RUN], True)):
        body = ChatBody(messages=HI, tools=tools)
        assert plan_answer(body, FORMATS["hermes"], TokenText(tokens())).grammar is None
        plan = plan_answer(body, FORMATS["hermes"], texts)
        assert (plan.grammar is not None) == is_held and plan.make_parser is not None
    body = ChatBody(messages=HI, tools=[strict], parallel_tool_calls=False)
    grammar = plan_answer(body, FORMATS["hermes"], texts).grammar
    assert grammar is not None
    call = '<tool_call>\n{"name": "get", "arguments": {"a":1}}\n</tool_call>'
    assert accepts(grammar, f"So: {call}", "<tool_call>") and not accepts(grammar, f"{call}\n{call}", "<tool_call>")
    assert not accepts(grammar, call.replace("1", "3"), "<tool_call>")


def test_a_predicted_output_is_drafted_from(api: openai.OpenAI) -> None:
    """With the answer as its prediction, an answer is the same, comes from drafts, and usage says so."""
    sent: Any = {
        "model": "tiny",
        "messages": HI,
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    plain = api.chat.completions.create(**sent)
    text = plain.choices[0].message.content or ""
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        answer = api.chat.completions.create(**sent, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == text
        usage = answer.usage and answer.usage.completion_tokens_details
        assert usage and (usage.accepted_prediction_tokens or 0) > 0 and usage.rejected_prediction_tokens is not None


@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "content"),
        ({"type": "tokens", "content": "a"}, "type"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content"),
        ({"type": "content", "content": "a " * 200_000}, "a prediction of 400000 characters; the limit is 512 tokens"),
    ],
)
def test_wrong_predictions_are_refused(prediction: Any, words: str) -> None:
    error = error_of(call(CHAT, {"messages": HI, "prediction": prediction}), 400)
    assert words in f"{error['param']} {error['message']}"
