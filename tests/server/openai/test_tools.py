"""Tool calls that a model makes of its own accord, read out of scripted answers, whole and streamed."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest

from snapstream.grammar import GrammarCompiler, Matcher
from snapstream.server.openai.answer_reader import CallPiece, CallStart, Content, ToolCallParser
from snapstream.server.openai.prompts import TokenText
from snapstream.server.openai.tool_format import CUSTOM_INPUT, Function
from snapstream.server.openai.tool_formats import FORMATS, M3
from snapstream.server.openai.tools import calls_or_answer, forced_calls, offered_calls
from snapstream.startup.build import tokenizer_json
from snapstream.types import Grammar
from tests.server.app_client import HI, client, error_of, frames
from tests.server.fake_engine import FakeEngine, token_ids, tokenizer
from tests.server.openai.test_tool_formats import NAMES
from tests.server.templates import TELLING, prompt_of

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("get", "put")
]
GET = '<tool_call>\n{"name": "get", "arguments": {"a": "wörld 😀"}}\n</tool_call>'
PUT = '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "get", "arguments": oops}\n</tool_call>'


def ask(answer: str, stream: bool = False, **body: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client(FakeEngine(answer=answer), tool_parser="hermes") as http:
            sent = {"messages": HI, "tools": TOOLS, "stream": stream, **body}
            return await http.post("/v1/chat/completions", json=sent)

    response = asyncio.run(run())
    assert response.status_code == 200, response.text
    return response


def whole(answer: str, **body: Any) -> tuple[dict[str, Any], str]:
    choice = ask(answer, **body).json()["choices"][0]
    return choice["message"], choice["finish_reason"]


def streamed(answer: str, **body: Any) -> tuple[dict[str, Any], str]:
    """The deltas put together as the API says."""
    message: dict[str, Any] = {"content": None}
    ends = []
    for number, chunk in enumerate(frames(ask(answer, stream=True, **body).text)):
        choice = chunk["choices"][0]
        delta = choice["delta"]
        assert ("role" in delta) == (number == 0)
        assert delta.get("content") or delta.get("tool_calls") or choice["finish_reason"], "a chunk says something"
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"].startswith("call_") and call["type"] == "function" and call["function"]["name"]
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"]:
            ends.append(choice["finish_reason"])
    assert len(ends) == 1
    return message, ends[0]


def bare(message: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]]]:
    calls = message.get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    return message["content"], [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


A = '{"a": "wörld 😀"}'


@pytest.mark.parametrize(
    ("answer", "content", "calls", "reason"),
    [
        ("no call < here", "no call < here", [], "stop"),
        (GET, None, [("get", A)], "tool_calls"),
        ("I look. " + GET, "I look. ", [("get", A)], "tool_calls"),
        (GET + "\n" + PUT, None, [("get", A), ("put", "{}")], "tool_calls"),
        ("<think>\nso\n</think>\n\n" + PUT, "<think>\nso\n</think>\n\n", [("put", "{}")], "tool_calls"),
        (BROKEN, BROKEN, [], "stop"),
        (BROKEN.replace("get", "nobody"), BROKEN.replace("get", "nobody"), [], "stop"),
    ],
)
def test_calls_whole_and_streamed(answer: str, content: str | None, calls: list[tuple[str, str]], reason: str) -> None:
    for message, end in (whole(answer), streamed(answer)):
        assert (bare(message), end) == ((content, calls), reason)


def test_arguments_come_in_pieces() -> None:
    pieces = [
        call["function"]["arguments"]
        for chunk in frames(ask(GET, stream=True).text)
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert len(pieces) > 3 and json.loads("".join(pieces)) == {"a": "wörld 😀"}


def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    for message, end in (whole(GET + PUT, parallel_tool_calls=False), streamed(GET + PUT, parallel_tool_calls=False)):
        assert (bare(message), end) == ((None, [("get", A)]), "tool_calls")


@pytest.mark.parametrize(
    ("answer", "body", "reason"),
    [
        (GET, {"max_tokens": len(token_ids(GET)) - 8}, "length"),
        (GET, {"stop": ["wör"]}, "stop"),
        (GET[: GET.index("rld")], {}, "stop"),  # the model itself ends it
        (PUT + GET, {"stop": ["wör"]}, "stop"),
        (GET, {"stop": ["</tool_call>"]}, "tool_calls"),
    ],
)
def test_a_call_that_is_cut_is_no_whole_one(answer: str, body: dict[str, Any], reason: str) -> None:
    for message, end in (whole(answer, **body), streamed(answer, **body)):
        assert end == reason
        assert "get" in [name for name, _ in bare(message)[1]]


def test_a_call_that_was_cut_can_be_sent_back() -> None:
    """The model sees the arguments as far as they go. What is no beginning of JSON is refused."""

    async def run() -> None:
        engine = FakeEngine(answer=GET)
        async with client(engine, template=TELLING, tool_parser="hermes") as http:
            body = {"messages": HI, "tools": TOOLS, "stop": ["rld"]}
            message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
            call = message["tool_calls"][0]
            assert call["function"]["arguments"] == '{"a": "wö'
            output = {"role": "tool", "tool_call_id": call["id"], "content": "The call was cut."}
            again = await http.post("/v1/chat/completions", json={**body, "messages": [*HI, message, output]})
            assert again.status_code == 200, again.text
            assert f'get({{"a": "wö"}})\ntool: The call was cut. for {call["id"]}' in prompt_of(engine)
            for arguments in ('{"a": 1}{"a": 2}', "a", '{"a" 1', '"a', '{"a": "\\ud800"}'):
                call["function"]["arguments"] = arguments
                refused = await http.post("/v1/chat/completions", json={**body, "messages": [*HI, message, output]})
                error = error_of(refused, 400)
                assert error["message"].startswith("messages[1].tool_calls[0].function.arguments"), arguments

    asyncio.run(run())


def test_calls_are_text_where_they_were_not_asked_for() -> None:
    for body in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}):
        assert whole(GET, **body) == ({"role": "assistant", "content": GET, "refusal": None}, "stop")
        assert streamed(GET, **body) == ({"content": GET}, "stop")


def test_every_choice_has_calls_of_its_own() -> None:
    choices = ask(GET, n=3).json()["choices"]
    assert [bare(choice["message"])[1] for choice in choices] == [[("get", A)]] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_logprobs_of_a_call_are_all_there() -> None:
    listed = ask(GET, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    chunks = frames(ask(GET, stream=True, logprobs=True).text)
    streamed_ones = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed_ones == listed and len(listed) > 10


def test_the_grammar_reaches_the_engine() -> None:
    async def run(**body: Any) -> Any:
        engine = FakeEngine()
        async with client(engine, tool_parser="hermes") as http:
            assert (await http.post("/v1/chat/completions", json={"messages": HI, **body})).status_code == 200
        return engine.requests[0].sampling.grammar

    async def main() -> None:
        assert await run() is None
        assert await run(tools=TOOLS) is None
        assert await run(response_format={"type": "text"}) is None
        assert (await run(response_format={"type": "json_object"})).kind == "json_schema"
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
        assert (await run(response_format=schema)).strict is False
        forced = await run(tools=TOOLS, tool_choice="required")
        assert forced.kind == "lark" and "answer" not in forced.text
        assert "answer" in (await run(tools=TOOLS, response_format=schema)).text
        named = await run(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "put"}})
        assert "put" in named.text and "get" not in named.text

    asyncio.run(main())


# Grammars that force calls: what they let a model write is what the format's reader reads back, true to the schema.

VOCABULARY = 5000
TOOL_FORCING_GET = Function(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", 'a "b" <c']},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "exact": {"type": "boolean"},
            "where": {"$ref": "#/$defs/place"},
            "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
        },
        "required": ["city", "where"],
        "$defs": {"place": {"type": "object", "properties": {"lat": {"enum": [-1.5, 2]}}, "required": ["lat"]}},
    },
)
NOW = Function(name="now", parameters={"type": "object", "properties": {}})


@cache
def tokens(*special: str) -> Any:
    """The tiny model's tokenizer; with more special tokens."""
    own = copy.deepcopy(tokenizer())
    if special:
        own.add_special_tokens({"additional_special_tokens": list(special)})
    return own


@cache
def compiler(*special: str) -> GrammarCompiler:
    own = tokens(*special)
    return GrammarCompiler(lambda: tokenizer_json(own), VOCABULARY, (own.eos_token_id,))


def allowed(matcher: Matcher, words: Any) -> list[int]:
    matcher.fill(words)
    return [int(token) for token in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def written(grammar: Grammar, seed: int, *special: str, max_tokens: int = 400) -> str:
    """A text that the grammar allows, drawn at random, to its end; empty if there is none so soon."""
    own, draw = tokens(*special), random.Random(seed)
    matcher = compiler(*special).matcher(grammar)
    words = np.zeros(compiler(*special).num_words, dtype=np.int32)
    ids: list[int] = []
    while len(ids) < max_tokens and (choices := allowed(matcher, words)):
        if own.eos_token_id in choices and draw.random() < 0.5:
            break
        token = draw.choice([one for one in choices if one != own.eos_token_id] or choices)
        if token == own.eos_token_id:
            break
        ids.append(token)
        matcher.take(token)
        words[:] = 0
    if len(ids) == max_tokens:
        return ""
    return str(own.decode(ids, skip_special_tokens=False))


def accepts(grammar: Grammar, text: str, *special: str) -> bool:
    """Whether the text is one that the grammar allows, whole."""
    own, words = tokens(*special), np.zeros(compiler(*special).num_words, dtype=np.int32)
    matcher = compiler(*special).matcher(grammar)
    for token in own(text, add_special_tokens=False)["input_ids"]:
        words[:] = 0
        if token not in allowed(matcher, words):
            return False
        matcher.take(token)
    words[:] = 0
    return own.eos_token_id in allowed(matcher, words) or not matcher.fault


def calls_of(name: str, text: str, *functions: Function) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(FORMATS[name], functions)
    content, calls = "", []
    for event in parser.push(text) + parser.finish():
        match event:
            case Content(piece):
                content += piece
            case CallStart(_, called):
                calls.append((called, ""))
            case CallPiece(index, piece):
                calls[index] = (calls[index][0], calls[index][1] + piece)
    return content, calls


def check(arguments: dict[str, Any]) -> None:
    """By the schema of GET, by hand; no property that it does not name."""
    assert {"city", "where"} <= set(arguments) <= {"city", "days", "exact", "where", "unit"}
    assert arguments["city"] in ("Paris", 'a "b" <c') and arguments["where"]["lat"] in (-1.5, 2)
    assert set(arguments["where"]) == {"lat"}
    assert arguments.get("days", 0) in range(10) and arguments.get("exact", True) in (True, False)
    assert arguments.get("unit") in ("C", "F", None)


@pytest.mark.parametrize("has_symbols", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_forced_is_read_back(name: str, has_symbols: bool) -> None:
    """Also where the tags are special tokens of the vocabulary."""
    special = FORMATS[name].tags if has_symbols else ()
    if has_symbols and not special:
        pytest.skip("it has no tags")
    symbols = TokenText(tokens(*special)).symbols
    assert set(special) <= set(symbols)
    grammar = forced_calls(FORMATS[name], (TOOL_FORCING_GET, NOW), symbols, is_single=False)
    seen = set()
    for seed in range(12):
        text = written(grammar, seed, *special)
        content, calls = calls_of(name, text, TOOL_FORCING_GET, NOW)
        assert content == "" and bool(calls) == bool(text)
        for called, arguments in calls:
            seen.add(called)
            if called == "now":
                assert json.loads(arguments) == {}
            else:
                check(json.loads(arguments))
    assert seen == {"get_weather", "now"}


@pytest.mark.parametrize("name", NAMES)
def test_a_single_call_or_an_answer(name: str) -> None:
    answer = Grammar.json_schema({"enum": ["yes"]})
    grammar = calls_or_answer(FORMATS[name], (NOW,), {}, answer, is_single=True)
    texts = {written(grammar, seed) for seed in range(12)}
    yes = f'{FORMATS[name].answer_head}"yes"'
    assert yes in texts and len(texts) > 1
    assert all(calls_of(name, call, NOW) == ("", [("now", "{}")]) for call in texts - {yes})


TEXT = Function(
    name="say",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "say", "arguments": {"text":"Zoë\\n"}}\n</tool_call>'),
        ("llama3_json", '{"name": "say", "parameters": {"text":"Zoë\\n"}}'),
        ("llama4_pythonic", '[say(text="Zoë\\n")]'),
        ("qwen3_coder", "<tool_call>\n<function=say>\n<parameter=text>\nZoë\n"
         "\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>Zoë\n</arg_value>\n</tool_call>"),
        ("glm47", "<tool_call>say<arg_key>text</arg_key><arg_value>Zoë\n</arg_value></tool_call>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n```json\n"
         '{"text":"Zoë\\n"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>say<｜tool▁sep｜>"
         '{"text":"Zoë\\n"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.say:0<|tool_call_argument_begin|>"
         '{"text":"Zoë\\n"}<|tool_call_end|><|tool_calls_section_end|>'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="say">\n<parameter name="text">Zoë\n</parameter>\n</invoke>\n'
         "</minimax:tool_call>"),
        ("minimax_m3", f'{M3}<tool_call>\n{M3}<invoke name="say">{M3}<text>Zoë\n{M3}</text>{M3}</invoke>\n'
         f"{M3}</tool_call>"),
        ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "say", "parameters": {"text":"Zoë\\n"}}'
         "\n]<|END_ACTION|>"),
        ("nemotron", '<TOOLCALL>[{"name": "say", "arguments": {"text":"Zoë\\n"}}]</TOOLCALL>'),
        ("gemma4", '<|tool_call>call:say{"text":"Zoë\\n"}<tool_call|>'),
        ("mistral", '[TOOL_CALLS][{"name": "say", "arguments": {"text":"Zoë\\n"}}]'),
        ("harmony", '<|channel|>commentary to=functions.say <|constrain|>json<|message|>{"text":"Zoë\\n"}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_symbols", [False, True])
def test_the_form_of_a_forced_call(name: str, call: str, has_symbols: bool) -> None:
    special = tuple(tag for tag in FORMATS[name].tags if tag != "[ARGS]") if has_symbols else ()
    symbols = TokenText(tokens(*special)).symbols
    grammar = forced_calls(FORMATS[name], (TEXT,), symbols, is_single=True)
    assert accepts(grammar, call, *special)
    assert not accepts(grammar, "say", *special)
    content, ((called, arguments),) = calls_of(name, call, TEXT)
    assert (content, called, json.loads(arguments)) == ("", "say", {"text": "Zoë\n"})


def test_mistral_writes_the_newer_form_where_the_vocabulary_has_it() -> None:
    special = FORMATS["mistral"].tags
    grammar = forced_calls(FORMATS["mistral"], (TEXT,), TokenText(tokens(*special)).symbols, is_single=False)
    assert accepts(grammar, '[TOOL_CALLS]say[ARGS]{"text":"a"}[TOOL_CALLS]say[ARGS]{"text":"b"}', *special)


def custom(**grammar: str) -> Function:
    text = {"type": "string", **({"pattern": f"^(?:{grammar['regex']})$"} if "regex" in grammar else {})}
    schema = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    return Function(name="run", parameters=schema, is_custom=True, is_strict=True, **grammar)


@pytest.mark.parametrize("name", NAMES)
def test_a_custom_tool_with_a_grammar(name: str) -> None:
    function = custom(regex="[ab]{2}/\\d")
    for seed in range(4):
        grammar = forced_calls(FORMATS[name], (function,), {}, is_single=True)
        content, ((_, text),) = calls_of(name, written(grammar, seed), function)
        assert content == "" and len(text) == 4 and set(text[:2]) <= set("ab") and text[2] == "/" and text[3].isdigit()
    function = custom(lark='start: "a" inner "b"\ninner: "(" inner ")" | "x"')
    if name not in ("qwen3_coder", "glm45", "glm47", "minimax_m2", "minimax_m3"):
        with pytest.raises(ValueError, match="Lark"):
            forced_calls(FORMATS[name], (function,), {}, is_single=True)
        return
    grammar = forced_calls(FORMATS[name], (function,), {}, is_single=True)
    for seed in range(4):
        text = calls_of(name, written(grammar, seed), function)[1][0][1]
        assert text.strip("ab").strip("()") == "x" and text.count("(") == text.count(")")


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].marks and FORMATS[name].tags])
def test_calls_that_are_offered_follow_their_schemas(name: str) -> None:
    """Text is free; what begins like a call is one of a known function, with arguments by its schema."""
    special = FORMATS[name].tags
    symbols = TokenText(tokens(*special)).symbols
    grammar = offered_calls(FORMATS[name], (TOOL_FORCING_GET, NOW), symbols, is_single=False)
    assert offered_calls(FORMATS[name], (TOOL_FORCING_GET,), {}, is_single=False) is None
    # Calls of the first may begin without a tag; in harmony text has headers, too.
    assert (grammar is None) == (name in ("llama4_pythonic", "harmony"))
    if grammar is None:
        return
    forced = forced_calls(FORMATS[name], (TOOL_FORCING_GET, NOW), symbols, is_single=True)
    call = next(text for seed in range(20) if "now" in (text := written(forced, seed, *special)))
    for text in ("", 'Well, {"a": 1}.', call, f"I look.\n\n{call}"):
        assert accepts(grammar, text, *special), text
    assert not accepts(grammar, call.replace("now", "nor"), *special)
    first = next(tag for tag in special if call.startswith(tag))
    assert not accepts(grammar, f"So {first} it is.", *special)
    unheld = custom(lark='start: "x"')
    assert offered_calls(FORMATS[name], (unheld,), symbols, is_single=True) is not None


def test_a_strict_function_is_enforced_whole_or_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}, "required": ["a"]}
    strict = Function(name="f", parameters=schema, is_strict=True)
    assert accepts(forced_calls(FORMATS["hermes"], (strict,), {}, is_single=True),
                   '<tool_call>\n{"name": "f", "arguments": {"a":"xx"}}\n</tool_call>')  # fmt: skip
    with pytest.raises(ValueError, match="'f' is strict, and pattern"):
        forced_calls(FORMATS["glm45"], (strict,), {}, is_single=True)
    with pytest.raises(ValueError, match="minProperties"):
        whole = Function(name="f", parameters={"type": "object", "minProperties": 1}, is_strict=True)
        forced_calls(FORMATS["llama4_pythonic"], (whole,), {}, is_single=True)


@pytest.mark.parametrize("name", NAMES)
def test_schemas_that_refer_to_themselves_end(name: str) -> None:
    """Whatever is made of them: references that double with every line would take for ever."""
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    both = {f"e{i}": {"allOf": [{"$ref": f"#/$defs/e{i + 1}"}] * 2} for i in range(60)}
    schema = {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"],
        "allOf": [{"$ref": "#/$defs/e0"}] * 2,
        "$defs": {**doubling, **both, "d60": {"enum": [1, 2]}, "e60": {"type": "object"}},
    }  # fmt: skip
    function = Function(name="f", parameters=schema)
    forced_calls(FORMATS[name], (function,), {}, is_single=True)
    assert ToolCallParser(FORMATS[name], (function,)).push("x" * 3 + " ")


def test_schemas_too_large_to_enforce() -> None:
    properties = {f"p{i}": {"type": "string", "description": "x" * 1000} for i in range(300)}
    function = Function(name="f", parameters={"type": "object", "properties": properties})
    for write in (forced_calls, offered_calls):
        with pytest.raises(ValueError, match="262144"):
            write(FORMATS["hermes"], (function,), {"<tool_call>": 5}, is_single=True)
