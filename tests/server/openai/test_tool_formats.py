"""Every format of calls: read whole and in any pieces, typed by the schema, cut anywhere; and told by its template.

The fixtures are written after the chat templates and documentation of the models that write so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from snapstream.server.openai.answer_reader import CallEvent, CallPiece, CallStart, Content, ToolCallParser
from snapstream.server.openai.tool_format import CUSTOM_INPUT, CallFormat, Function, JsonArguments
from snapstream.server.openai.tool_formats import FORMATS, M3, choose_format
from snapstream.server.options import TOOL_PARSERS, ServerSettings

# Reading tool calls: what is a call and what is content, and that pieces put together are the whole.

HERMES, LLAMA3 = FORMATS["hermes"], FORMATS["llama3_json"]
FUNCTIONS = tuple(Function(name=name, parameters={"type": "object"}) for name in ("get", "put_all"))
Whole = tuple[str, list[tuple[str, str]]]  # content, calls as (name, arguments)


def read(
    form: CallFormat, pieces: Sequence[str], max_calls: int | None = None, functions: Sequence[Function] = FUNCTIONS
) -> list[CallEvent]:
    parser = ToolCallParser(form, functions, max_calls=max_calls)
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish()


def put_together(events: Sequence[CallEvent]) -> Whole:
    content, calls = "", []
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallStart(index, name, call_id, is_custom):
                assert index == len(calls) and call_id and is_custom == (name == "run")
                calls.append((name, ""))
            case CallPiece(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


GET = '{"name": "get", "arguments": {"a": [1, {"b": "}\\"]"}]}}'
GET_ARGUMENTS = '{"a": [1, {"b": "}\\"]"}]}'
PUT = '{"name":"put_all","arguments":{}}'

HERMES_CASES: list[tuple[str, Whole]] = [
    ("just text", ("just text", [])),
    ("", ("", [])),
    (hermes(GET), ("", [("get", GET_ARGUMENTS)])),
    (hermes(GET) + "\n" + hermes(PUT), ("", [("get", GET_ARGUMENTS), ("put_all", "{}")])),
    (hermes(GET) + hermes(PUT) + "\n", ("", [("get", GET_ARGUMENTS), ("put_all", "{}")])),
    ("Let me see. " + hermes(GET), ("Let me see. ", [("get", GET_ARGUMENTS)])),
    (hermes(GET) + "\nDone.", ("Done.", [("get", GET_ARGUMENTS)])),
    ("<think>\nI could <tool_call> now\n</think>\n\n" + hermes(PUT),
     ("<think>\nI could <tool_call> now\n</think>\n\n", [("put_all", "{}")])),
    ("<think> cut " + hermes(PUT), ("<think> cut " + hermes(PUT), [])),
    ("<tool_call>" + GET, ("", [("get", GET_ARGUMENTS)])),  # the closing tag was forgotten
    ("<tool_call>" + GET + "<tool_call>" + PUT, ("", [("get", GET_ARGUMENTS), ("put_all", "{}")])),
    ("<tool_call>" + GET + " and more", ("and more", [("get", GET_ARGUMENTS)])),
    (hermes('{"name": "unknown", "arguments": {}}'), (hermes('{"name": "unknown", "arguments": {}}'), [])),
    (hermes('{"name": "get", "arguments": "x"}'), (hermes('{"name": "get", "arguments": "x"}'), [])),
    (hermes("not json") + hermes(PUT), (hermes("not json"), [("put_all", "{}")])),
    ('<tool_call>{"name": "get", "argum', ('<tool_call>{"name": "get", "argum', [])),  # cut before the call stands
    ('<tool_call>{"name": "get", "arguments": {"a": "x', ("", [("get", '{"a": "x')])),  # and after
    ("a < b <tool <tool_cal", ("a < b <tool <tool_cal", [])),
    (hermes(" " * 2000 + PUT), (hermes(" " * 2000 + PUT), [])),
]  # fmt: skip

LLAMA_GET = '{"name": "get", "parameters": {"a": "x;{"}}'
LLAMA_PUT = '{"type": "function", "name": "put_all", "parameters": {}}'
LLAMA_CASES: list[tuple[str, Whole]] = [
    (LLAMA_GET, ("", [("get", '{"a": "x;{"}')])),
    ("<|python_tag|>" + LLAMA_GET, ("", [("get", '{"a": "x;{"}')])),
    (" \n" + LLAMA_PUT, ("", [("put_all", "{}")])),
    (LLAMA_GET + "; " + LLAMA_PUT + "\n", ("", [("get", '{"a": "x;{"}'), ("put_all", "{}")])),
    (LLAMA_GET + ";" + LLAMA_GET, ("", [("get", '{"a": "x;{"}'), ("get", '{"a": "x;{"}')])),
    (LLAMA_GET + " as you wish", (" as you wish", [("get", '{"a": "x;{"}')])),
    (LLAMA_GET + '; {"a": 1}', ('; {"a": 1}', [("get", '{"a": "x;{"}')])),
    ("Call " + LLAMA_GET, ("Call " + LLAMA_GET, [])),  # calls are the whole answer
    ('{"name": "Ada", "parameters": {}}', ('{"name": "Ada", "parameters": {}}', [])),
    ('{"answer": 42}', ('{"answer": 42}', [])),
    ("", ("", [])),
    ("  ", ("  ", [])),
]  # fmt: skip
CASES = [(HERMES, text, whole) for text, whole in HERMES_CASES] + [(LLAMA3, t, w) for t, w in LLAMA_CASES]


@pytest.mark.parametrize(("form", "text", "whole"), CASES)
def test_calls_and_content(form: CallFormat, text: str, whole: Whole) -> None:
    assert put_together(read(form, [text])) == whole
    assert put_together(read(form, list(text))) == whole  # character by character


@pytest.mark.parametrize(("form", "text", "whole"), [case for case in CASES if len(case[1]) < 200])
def test_every_cut_gives_the_same(form: CallFormat, text: str, whole: Whole) -> None:
    for place in range(len(text) + 1):
        assert put_together(read(form, [text[:place], text[place:]])) == whole


def test_content_and_arguments_come_as_soon_as_they_can() -> None:
    parser = ToolCallParser(HERMES, FUNCTIONS)
    assert parser.push("Hello <to") == [Content("Hello ")]
    assert parser.push('ol_call>{"name": "get", ') == []
    start, piece = parser.push('"arguments": {"a"')
    assert isinstance(start, CallStart) and (start.index, start.name) == (0, "get")
    assert piece == CallPiece(0, '{"a"')
    assert parser.push(': "x') == [CallPiece(0, ': "x')]
    assert parser.push('y", "b": 1') == [CallPiece(0, 'y", "b": ')]  # a number may go on
    assert parser.push("}}</tool_call>") == [CallPiece(0, "1}")]
    assert parser.finish() == []
    assert parser.num_calls == 1


def test_only_so_many_calls() -> None:
    assert put_together(read(HERMES, [hermes(GET) * 3 + "text"], 1)) == ("", [("get", GET_ARGUMENTS)])
    assert put_together(read(LLAMA3, [f"{LLAMA_GET};{LLAMA_GET}"], 1)) == ("", [("get", '{"a": "x;{"}')])


def arguments(pieces: Sequence[str]) -> tuple[str, bool]:
    """JSON of these arguments, and whether they ended."""
    reader, text, out = JsonArguments(), "", ""
    for piece in [*pieces, ""]:
        text += piece
        end, more = reader.read(text, is_over=piece == "")
        text, out = text[end:], out + more
    return out, reader.is_closed


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{"a": "x\n\ty\0"}', {"a": "x\n\ty\0"}),
        ('{"a": "C:\\q \\u12 \\" \\u00e9"}', {"a": 'C:\\q \\u12 " é'}),
        ('{"a": "\\ud83d\\ude00 \\ud83d \\ude00x"}', {"a": "😀 \ufffd \ufffdx"}),
        ("{'a': 'it\\'s \"x\"', 'b': None}", {"a": 'it\'s "x"', "b": "None"}),
        ('{path: a.py, n: 3, "b": true}', {"path": "a.py", "n": 3, "b": True}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        ('{"a": [1 2] "b": 01}', {"a": [1, 2], "b": "01"}),
        ('{"a", "b":, "c": }', {"a": None, "b": None, "c": None}),
        ('{"a": [1, {"b": 2}', None),
        ('{"a": [1, {"b": 2}}', {"a": [1, {"b": 2}]}),
        ('{"a": 1]}', {"a": 1}),
        ('{{"a": 1}}', {"arguments": {"a": 1}}),
        ('{"a": NaN, "b": 1e5, "c": -}', {"a": "NaN", "b": 1e5, "c": "-"}),
    ],
)
def test_arguments_that_are_no_json_are_made_so(written: str, value: object) -> None:
    done, is_closed = arguments([written])
    assert (json.loads(done) if is_closed else None) == value
    assert arguments(list(written)) == (done, is_closed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(st.text(), JSON),
    st.sampled_from([{"indent": 2}, {"separators": (" ,", " : ")}, {"ensure_ascii": False}]),
)
def test_arguments_that_are_json_stay_as_they_are(value: object, form: dict[str, object]) -> None:
    text = json.dumps(value, **form)  # type: ignore[arg-type]
    assert arguments([text]) == arguments(list(text)) == (text, True)


@settings(deadline=None, max_examples=500)
@given(st.text("{}[]\"':,\\ \n\x01tu0d8-1.eé", max_size=40), st.integers(0, 40))
def test_arguments_of_any_text_can_be_parsed(rest: str, cut: int) -> None:
    text = "{" + rest
    done, is_closed = arguments([text[:cut], text[cut:]] if 0 < cut < len(text) else [text])
    assert arguments([text]) == (done, is_closed)
    if is_closed:
        json.loads(done)
    from_json(done, allow_partial="trailing-strings")  # as clients parse a stream
    from_json(done, allow_partial=True)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/place"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
}
TOOL_FORMATS_FUNCTIONS = (
    Function(name="get_weather", parameters=SCHEMA),
    Function(name="now", parameters={"type": "object", "properties": {}}),
    Function(
        name="run",
        parameters={"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]},
        is_custom=True,
    ),
)

CITY = 'Zürich "West" 😀 \\ {]}'
ARGUMENTS: dict[str, Any] = {
    "city": CITY, "days": 3, "exact": True, "tags": ["a,b", "it's"], "where": {"lat": -1.5}, "unit": None
}  # fmt: skip
A = json.dumps(ARGUMENTS, ensure_ascii=False)
CODE = "if a < b:\n    print(\"ö\", '\\n')\n"

# One call of get_weather with ARGUMENTS, one of now, one of run with CODE; as several calls in one answer.
ONE: dict[str, str] = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {A}}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {A}}}',
    "llama4_pythonic": '[get_weather(city="Zürich \\"West\\" 😀 \\\\ {]}", days=3, exact=True, '
    "tags=['a,b', \"it's\"], where={'lat': -1.5}, unit=None)]",
    "qwen3_coder": f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
    '<parameter=tags>\n["a,b", "it\'s"]\n</parameter>\n<parameter=where>\n{"lat": -1.5}\n</parameter>\n'
    "<parameter=unit>\nnull\n</parameter>\n</function>\n</tool_call>",
    "glm45": f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n"
    '<arg_key>tags</arg_key>\n<arg_value>["a,b", "it\'s"]</arg_value>\n'
    '<arg_key>where</arg_key>\n<arg_value>{"lat": -1.5}</arg_value>\n'
    "<arg_key>unit</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{A}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{A}<|tool_call_end|><|tool_calls_section_end|>",
    "mistral": f"[TOOL_CALLS]get_weather{A}",
    "harmony": f"<|channel|>commentary to=functions.get_weather<|message|>{A}<|call|>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">{CITY}</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="exact">true</parameter>\n'
    '<parameter name="tags">["a,b", "it\'s"]</parameter>\n<parameter name="where">{"lat": -1.5}</parameter>\n'
    '<parameter name="unit">null</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": f'{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>{CITY}{M3}</city>'
    f"{M3}<days>3{M3}</days>{M3}<exact>true{M3}</exact>{M3}<tags>\n{M3}<item>a,b{M3}</item>{M3}<item>it's{M3}</item>\n"
    f"{M3}</tags>{M3}<where>{M3}<lat>-1.5{M3}</lat>{M3}</where>{M3}<unit>null{M3}</unit>{M3}</invoke>\n{M3}</tool_call>",
    "cohere": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {A}}}\n]'
    "<|END_ACTION|>",
    "nemotron": f'<TOOLCALL>[{{"name": "get_weather", "arguments": {A}}}]</TOOLCALL>',
    "gemma4": f'<|tool_call>call:get_weather{{city:<|"|>{CITY}<|"|>,days:3,exact:true,'
    'tags:[<|"|>a,b<|"|>,<|"|>it\'s<|"|>],where:{lat:-1.5},unit:null}<tool_call|>',
}
ONE["glm47"] = ONE["glm45"].replace("\n", "")
SEVERAL: dict[str, str] = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "run", "arguments": '
    f'{{"input": {json.dumps(CODE)}}}}}\n</tool_call>',
    "llama3_json": f'{{"name": "now", "parameters": {{}}}}; {{"name": "run", "parameters": '
    f'{{"input": {json.dumps(CODE)}}}}}',
    "llama4_pythonic": f"<|python_start|>[now(), run(input={CODE!r})]<|python_end|>",
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=run>\n"
    f"<parameter=input>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>now\n</tool_call>\n<tool_call>run\n<arg_key>input</arg_key>\n"
    f"<arg_value>{CODE}</arg_value>\n</tool_call>",
    "glm47": "<tool_call>now</tool_call><tool_call>run<arg_key>input</arg_key>"
    f"<arg_value>{CODE}</arg_value></tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n"
    f'{{"input": {json.dumps(CODE)}}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    f'<｜tool▁call▁begin｜>run<｜tool▁sep｜>{{"input": {json.dumps(CODE)}}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_call_begin|>functions.run:5<|tool_call_argument_begin|>"
    f'{{"input": {json.dumps(CODE)}}}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": f'[TOOL_CALLS] [{{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}, {{"name": "run", "arguments": '
    f'{{"input": {json.dumps(CODE)}}}}}]',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="run">\n'
    f'<parameter name="input">{CODE}</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": f'{M3}<tool_call>\n{M3}<invoke name="now">{M3}</invoke>\n{M3}<invoke name="run">'
    f"{M3}<input>{CODE}{M3}</input>{M3}</invoke>\n{M3}</tool_call>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}},\n    '
    f'{{"tool_call_id": "1", "tool_name": "run", "parameters": {{"input": {json.dumps(CODE)}}}}}\n]<|END_ACTION|>',
    "nemotron": '<TOOLCALL>[{"name": "now", "arguments": {}}, {"name": "run", "arguments": '
    f'{{"input": {json.dumps(CODE)}}}}}]</TOOLCALL>',
    "gemma4": f'<|tool_call>call:now{{}}<tool_call|><|tool_call>call:run{{input:<|"|>{CODE}<|"|>}}<tool_call|>',
    "harmony": "<|channel|>commentary to=functions.now<|message|>{}<|channel|>commentary to=functions.run<|message|>"
    f'{{"input": {json.dumps(CODE)}}}<|call|>',
}
NAMES = sorted(FORMATS)


def tool_formats_read(name: str, pieces: Sequence[str], max_calls: int | None = None) -> Whole:
    return put_together(read(FORMATS[name], pieces, max_calls, TOOL_FORMATS_FUNCTIONS))


def test_every_format_has_fixtures_and_a_name_for_users() -> None:
    assert set(ONE) == set(SEVERAL) == set(FORMATS) == set(TOOL_PARSERS) - {"auto", "none"}
    with pytest.raises(ValueError, match="must be one of auto, none, hermes, .*mistral"):
        ServerSettings(tool_parser="gpt")


@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_arguments_of_all_types(name: str) -> None:
    for pieces in ([ONE[name]], list(ONE[name])):
        content, ((called, arguments),) = tool_formats_read(name, pieces)
        assert (content, called, json.loads(arguments)) == ("", "get_weather", ARGUMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_several_calls_one_of_a_custom_tool(name: str) -> None:
    for pieces in ([SEVERAL[name]], list(SEVERAL[name])):
        assert tool_formats_read(name, pieces) == ("", [("now", "{}"), ("run", CODE)])
    assert tool_formats_read(name, [SEVERAL[name]], max_calls=1) == ("", [("now", "{}")])


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].marks])
def test_text_before_and_after(name: str) -> None:
    if name == "llama4_pythonic":
        answer = "Let me see. " + SEVERAL[name] + "\nDone."
    else:
        answer = "Let me see. " + SEVERAL[name] + "\n\nDone."
    assert (
        tool_formats_read(name, [answer])
        == tool_formats_read(name, list(answer))
        == ("Let me see. Done.", [("now", "{}"), ("run", CODE)])
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_tool_is_content(name: str) -> None:
    answer = ONE[name].replace("get_weather", "nobody")
    assert tool_formats_read(name, [answer]) == tool_formats_read(name, list(answer)) == (answer, [])


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_cut_anywhere(name: str) -> None:
    """It raises nothing, arguments are a beginning of the whole ones, and pieces do not matter."""
    for answer in (ONE[name], SEVERAL[name]):
        whole = tool_formats_read(name, [answer])[1]
        for end in range(len(answer)):
            content, calls = tool_formats_read(name, [answer[:end]])
            assert (content, calls) == tool_formats_read(name, list(answer[:end]))
            assert all(
                called == known and all_of.startswith(arguments)
                for (called, arguments), (known, all_of) in zip(calls, whole, strict=False)
            ), (answer[:end], calls)
            assert not calls or answer[:end].endswith(content)  # the head of a call that does not stand yet


SCRAPS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<", "{", "}", '"', ":", ",", ";", "\n", " ", "\\", "x", "é",
    '{"name": "get_weather", "arguments": ', '{"name":"now","parameters":{', '"type": "function",', "<|python_tag|>",
    "[", "]", "(", ")", "'", "=", '"name"', '"now"', '"arguments"', "</tool_", "tool_call>", "<function=now>",
    "<parameter=city>", "</parameter>", "</function>", "<arg_key>", "days", "</arg_key>", "<arg_value>", "</arg_value>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", "functions.now:0", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "```", "json", "<｜tool▁call▁end｜>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", '{"input": "a', "\\u00e9", "\\ud83d", "\\ude00", "[now()", "get_weather(", "city=", "[1,",
]  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(NAMES), st.data())
def test_pieces_put_together_are_the_whole(name: str, data: st.DataObject) -> None:
    scraps = st.sampled_from([*SCRAPS, ONE[name], SEVERAL[name], ONE[name][:40], SEVERAL[name][:60]])
    text = "".join(data.draw(st.lists(scraps, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for max_calls in (None, 1):
        whole = tool_formats_read(name, [text], max_calls)
        assert tool_formats_read(name, pieces, max_calls) == whole
        assert tool_formats_read(name, list(text), max_calls) == whole
        assert max_calls is None or len(whole[1]) <= max_calls


def test_ids_are_those_that_templates_expect() -> None:
    def ids(name: str, text: str) -> list[str]:
        return [
            event.call_id
            for event in ToolCallParser(FORMATS[name], TOOL_FORMATS_FUNCTIONS).push(text)
            if hasattr(event, "call_id")
        ]

    assert ids("kimi_k2", SEVERAL["kimi_k2"]) == ["functions.now:4", "functions.run:5"]
    first, second = ids("mistral", SEVERAL["mistral"])
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in (first, second)) and first != second
    assert ids("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}") == ["a1B2c3D4e"]
    assert ids("hermes", SEVERAL["hermes"])[0].startswith("call_")


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("qwen3_coder", "<function=now>\n</function>", [("now", "{}")]),  # without the tag around it
        ("qwen3_coder", "<tool_call><function=now></tool_call>", [("now", "{}")]),
        ("qwen3_coder", "<tool_call><function=run><parameter=input>\n\n</parameter></function>", [("run", "")]),
        ("glm45", "<tool_call>now</tool_call>", [("now", "{}")]),
        ("deepseek_v31", SEVERAL["deepseek_v3"], [("now", "{}"), ("run", CODE)]),
        ("deepseek_v3", SEVERAL["deepseek_v31"], [("now", "{}"), ("run", CODE)]),
        ("minimax_m2", '<minimax:tool_call><invoke name="now"></minimax:tool_call>', [("now", "{}")]),
        ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="now">\n{M3}</tool_call>', [("now", "{}")]),
        ("cohere", '<|START_ACTION|>{"tool_name": "now", "parameters": {}}<|END_ACTION|>', [("now", "{}")]),
        ("nemotron", '<TOOLCALL>{"name": "now", "arguments": {}}</TOOLCALL>', [("now", "{}")]),
        ("gemma4", '<|tool_call>call:get_weather{"city": "Rome"}', [("get_weather", '{"city": "Rome"}')]),
        ("kimi_k2", "<|tool_call_begin|>now:0<|tool_call_argument_begin|>{}<|tool_call_end|>", [("now", "{}")]),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now{}", [("now", "{}"), ("now", "{}")]),
        ("llama3_json", '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>', [("now", "{}")]),
        ("llama4_pythonic", '[get_weather("Rome", 2)]', [("get_weather", '{"city": "Rome", "days": 2}')]),
        ("llama4_pythonic", "[get_weather(city=Rome)]", [("get_weather", '{"city": "Rome"}')]),
    ],
)  # fmt: skip
def test_forms_that_models_write_now_and_then(name: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert tool_formats_read(name, [text]) == tool_formats_read(name, list(text)) == ("", calls)


def test_arguments_between_tags_have_the_types_of_the_schema() -> None:
    def value(text: str, **schema: Any) -> Any:
        function = Function(name="f", parameters={"type": "object", "properties": {"a": schema} if schema else {}})
        parser = ToolCallParser(FORMATS["glm45"], (function,))
        answer = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        return json.loads("".join(e.text for e in parser.push(answer) if isinstance(e, CallPiece)))["a"]

    assert value("12", type="string") == "12"
    assert value("12", type="integer") == value(" 12\n", type="number") == 12
    assert value("12", type=["string", "null"]) == "12"
    assert value("null", type=["string", "null"]) is None
    assert value("12") == 12 and value("x y") == "x y" and value("None") == "None"  # nothing is said of it
    assert value("True", type="boolean") is True and value("maybe", type="boolean") == "maybe"
    assert value("{'a': (1, 'b')}", type="object") == {"a": [1, "b"]}
    assert value("1e999", type="number") == "1e999" and value("NaN", type="number") == "NaN"
    assert value("[" * 5000, type="array") == "[" * 5000
    assert value("2", enum=[1, 2]) == 2 and value("2", enum=["1", "2"]) == "2"
    assert value("x", **{"$ref": "#/properties/a"}) == "x"  # a schema that leads to itself
    assert value("3", anyOf=[{"$ref": "#/properties/a"}, {"type": "string"}]) == "3"
    assert value("3", allOf=[{"description": "how many"}, {"type": "integer"}]) == 3
    assert value("3", oneOf=[{"type": "integer"}, {"type": "null"}]) == 3


def test_tags_inside_of_values() -> None:
    """Objects and lists of MiniMax M3; types of the schema hold inside, and what has no tags is read as elsewhere."""

    def value(text: str, **schema: Any) -> Any:
        function = Function(name="f", parameters={"type": "object", "properties": {"a": schema} if schema else {}})
        answer = f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<a>{text}{M3}</a>{M3}</invoke>\n{M3}</tool_call>'
        found = []
        for pieces in ([answer], list(answer)):
            parser = ToolCallParser(FORMATS["minimax_m3"], (function,))
            events = [event for piece in pieces for event in parser.push(piece)]
            found.append("".join(event.text for event in events if isinstance(event, CallPiece)))
        assert found[0] == found[1]
        return json.loads(found[0])["a"]

    def tag(name: str, *inner: str) -> str:
        return f"{M3}<{name}>{''.join(inner)}{M3}</{name}>"

    orders = {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}, "n": {}}}}
    text = "\n" + tag("item", tag("sku", "007"), tag("n", "2")) + "\n" + tag("item", tag("sku", "x<y")) + "\n"
    assert value(text, **orders) == [{"sku": "007", "n": 2}, {"sku": "x<y"}]
    assert value(text) == [{"sku": "007", "n": 2}, {"sku": "x<y"}]  # JSON has no such number
    assert value(tag("item", "1"), type="object") == {"item": 1}
    assert value(tag("a", tag("a", "1"))) == {"a": {"a": 1}}  # a tag in one of its name
    assert value(tag("b", "1"), type="string") == tag("b", "1")
    assert value('{"b": [1]}', type="object") == {"b": [1]} and value("") == ""
    assert value("1", **{"$ref": "#/properties/a"}) == 1
    for _ in range(50):
        text = tag("b", text)
    assert isinstance(value(text), dict)


# What the templates of these models hold, shortened to the parts that tell them apart.
TEMPLATES = {
    "hermes": "{{ tools }} return a json object within <tool_call></tool_call> XML tags",
    "llama3_json": 'Environment: ipython {"name": function name, "parameters": dictionary}',
    "llama4_pythonic": "<|header_start|>system ... [func_name1(params_name1=params_value1), ...] ipython",
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n' + '```json' }}",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}",
    "kimi_k2": "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}",
    "mistral": '{{- "[TOOL_CALLS][" }}',
    "minimax_m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
    "minimax_m3": "{%- set ns_token = ']<]minimax[>[' -%}{%- set toolcall_begin_token = ns_token ~ '<tool_call>' -%}",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "cohere": "You will write tool calls as <|START_ACTION|>[{ ... }]<|END_ACTION|>",
    "nemotron": "{{- '<TOOLCALL>[' -}}{%- for call in message.tool_calls -%}",
    "harmony": '{{- "functions." + tool_call.name + "<|channel|>commentary " }}{{- content_type + "<|message|>" }}',
}


def test_auto_goes_by_the_chat_template() -> None:
    assert set(TEMPLATES) == set(FORMATS)
    for name, template in TEMPLATES.items():
        assert choose_format("auto", template) is FORMATS[name], name
    assert choose_format("auto", "{{ messages }}") is None
    four = TEMPLATES["llama3_json"] + " <|header_start|> <|python_start|> <|python_end|>"  # Llama 4's own
    assert choose_format("auto", four) is FORMATS["llama3_json"]
    assert choose_format("none", TEMPLATES["hermes"]) is None
    assert choose_format("mistral", TEMPLATES["hermes"]) is FORMATS["mistral"]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "a\\"b\\\\"}', 'a"b\\'),
        ('{ "input" : "\\u00e9\\ud83d\\ude00x"}', "é😀x"),
        ('{"input": "\\ud83d\\u00e9"}', "\ufffdé"),  # half a pair
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\u12\\q"}', "\\u12\\q"),  # no escapes at all
        ('{"other": 1, "input": "x"}', "x"),
        ('{"input": 3}', '{"input": 3}'),
        ("{}", "{}"),
    ],
)
def test_the_text_of_a_custom_tool(written: str, text: str) -> None:
    answer = f'<tool_call>\n{{"name": "run", "arguments": {written}}}\n</tool_call>'
    for pieces in ([answer], list(answer), [answer[:48], answer[48:]]):
        assert tool_formats_read("hermes", pieces) == ("", [("run", text)])
