"""What a model thinks before it answers: read apart from the answer in pieces of every size, counted, made room for."""

from __future__ import annotations

import asyncio
import copy
import itertools
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import AddedToken

from snapstream.grammar import GrammarCompiler
from snapstream.server.app import make_app
from snapstream.server.engine.api import SampleDelta
from snapstream.server.openai.answer_reader import (
    CLOSING,
    TAGS,
    THINK,
    AnswerReader,
    AnswerStart,
    CallPiece,
    CallStart,
    HarmonySplitter,
    Reasoning,
    ReasoningSplitter,
    Tags,
    ToolCallParser,
    allow_reasoning,
    choose_reasoning,
    effort_arguments,
    find_answer_start,
)
from snapstream.server.openai.tool_format import Function
from snapstream.server.openai.tool_formats import FORMATS, choose_format
from snapstream.server.openai.tools import calls_or_answer, forced_calls
from snapstream.server.options import ReasoningParser, ServerSettings
from snapstream.startup.build import tokenizer_json
from snapstream.types import FinishReason, Grammar
from tests.server.app_client import HI, client, error_of, frames
from tests.server.fake_engine import METADATA, FakeEngine, template_tokenizer, token_ids, tokenizer

INSIDE, LIKELY, OPEN, ANSWER = AnswerStart.INSIDE, AnswerStart.LIKELY, AnswerStart.OPEN, AnswerStart.ANSWER
TURNS = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
# As Qwen 3 does: the model opens the thought, unless the template closes it.
HYBRID = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENED = TURNS + "<think>\n"  # as DeepSeek R1 does
THOUGHT = "<think>\nLet me see < it </thin.\n\nYes 😀.\n</think>\n\nHello wörld."
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": "wörld"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"a": {}}}}}


def split(parser: ReasoningSplitter | HarmonySplitter, text: str, size: int) -> tuple[str, str]:
    """The reasoning and the answer of a text that comes in pieces of ``size``."""
    gains = [parser.push(text[place : place + size]) for place in range(0, len(text), size)] + [parser.finish()]
    return "".join(one for one, _ in gains), "".join(one for _, one in gains)


@pytest.mark.parametrize(
    ("beginning", "text", "thought", "answer"),
    [
        (OPEN, THOUGHT, "Let me see < it </thin.\n\nYes 😀.", "Hello wörld."),
        (INSIDE, THOUGHT, "Let me see < it </thin.\n\nYes 😀.", "Hello wörld."),
        (LIKELY, THOUGHT, "Let me see < it </thin.\n\nYes 😀.", "Hello wörld."),
        (ANSWER, THOUGHT, "", THOUGHT),
        (OPEN, " \n<think>a</think>b", "a", "b"),
        (OPEN, " no <think>a</think>b", "", " no <think>a</think>b"),
        (OPEN, "<think>\n\n</think>\n\nb ", "", "b "),
        (OPEN, "<thin", "", "<thin"),
        (OPEN, "<think>cut ", "cut", ""),
        (OPEN, "<think>cut </th", "cut </th", ""),
        (OPEN, "", "", ""),
        (INSIDE, "a \n</think> \n b </think> c", "a", "b </think> c"),
        (INSIDE, " never ends", "never ends", ""),
        (INSIDE, "</think>b", "", "b"),
        (LIKELY, "a</think>b", "a", "b"),
        (LIKELY, "<thi", "<thi", ""),
        (OPEN, "[THINK]a</think>[/THIN[/THINK]b", "a</think>[/THIN", "b"),
        (OPEN, "<mm:think>a</think>b</mm:think>\n\nc", "a</think>b", "c"),
        (OPEN, "<mm:thin>a", "", "<mm:thin>a"),
        (OPEN, "<|channel>thought\nLet me <see.\n<channel|>Hello.", "Let me <see.", "Hello."),
        (OPEN, "<|channel>thought\n<channel|>Hello.", "", "Hello."),
        (OPEN, "Hello. <channel|>", "", "Hello. <channel|>"),
        (OPEN, "<|START_THINKING|>a<|END_THINKING|>\n<|START_RESPONSE|>b <|END<|END_RESPONSE|>", "a", "b <|END"),
        (OPEN, "<|START_RESPONSE|>b<|END_RESPONSE|>", "", "b"),
        (ANSWER, "<|START_RESPONSE|>b<|END_RES", "", "b<|END_RES"),
    ],
)
def test_pieces_of_every_size_read_the_same(beginning: AnswerStart, text: str, thought: str, answer: str) -> None:
    names = {"channel": "gemma4", "mm:": "minimax_m3", "[THINK]": "mistral", "RESPONSE": "cohere"}
    tags = TAGS[next((parser for name, parser in names.items() if name in text), "qwen3")]
    for size in range(1, len(text) + 2):
        assert split(ReasoningSplitter(beginning, tags), text, size) == (thought, answer), size


# The parts of gpt-oss's chat template that matter here.
HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}{% if message.tool_calls %}<|channel|>analysis<|message|>"
    "{{ message.thinking or message.content }}<|end|><|start|>assistant to=functions.{{ "
    "message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ "
    "message.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|message|>{{ message.content }}<|end|>"
    "{% endif %}{% endfor %}{% if tools %}tools{% endif %}<|start|>assistant"
)
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
NEXT = "<|end|><|start|>assistant"
MARK = "<|channel|>commentary to=functions.get<|message|>"


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<|channel|>analysis<|message|>Let me < see." + NEXT + "<|channel|>final<|message|>Hello <|you|>.<|return|>",
         "Let me < see.", "Hello <|you|>."),
        ("<|channel|>final<|message|>Hello.", "", "Hello."),
        ("<|channel|>analysis<|message|>cut <|en", "cut <|en", ""),
        ("<|channel|>analysis<|message|>a" + NEXT + "<|channel|>fin", "a", ""),
        ("<|channel|>analysis<|message|>a" + NEXT + "<|channel|>analysis<|message|>b" + NEXT
         + "<|channel|>commentary<|message|>I look." + NEXT + "<|channel|>final<|message|>c", "a\nb", "I look.\nc"),
        ("<|channel|>analysis<|message|>a" + NEXT
         + '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>',
         "a", MARK + '{"a": 1}'),
        (' to=functions.get<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", MARK + '{"a": 1}'),
        ('<|channel|>analysis to=functions.get<|message|>{}<|call|>', "", MARK + "{}"),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", "a", "b"),  # no end
        ("Hello without any header", "", "Hello without any header"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_channels(text: str, thought: str, answer: str) -> None:
    for size in range(1, len(text) + 2):
        assert split(HarmonySplitter(), text, size) == (thought, answer), size


def test_channels_stream_and_are_counted() -> None:
    """A token at a time, special tokens whole; headers count with the reasoning that they begin."""
    pieces = ["<|channel|>", "analysis", "<|message|>", "one", " two", "<|end|>", "<|start|>", "assistant",
              "<|channel|>", "commentary", " to=functions.get", " <|constrain|>", "json", "<|message|>", '{"a"', ": 1}",
              "<|call|>"]  # fmt: skip
    calls = ToolCallParser(FORMATS["harmony"], (Function(name="get", parameters={}),))
    reader, events = AnswerReader(AnswerStart.HARMONY, TAGS["harmony"], None, calls), []
    for index, piece in enumerate(pieces):
        reason = FinishReason.STOP if index == len(pieces) - 1 else None
        events.append(reader.take(SampleDelta(index=0, token_ids=(index,), text=piece, finish_reason=reason)))
    assert events[3:5] == [[Reasoning("one")], [Reasoning(" two")]]
    assert reader.num_reasoning_tokens == 5 and reader.has_calls
    start = events[14][0]
    assert isinstance(start, CallStart) and start.name == "get" and events[14][1:] == [CallPiece(0, '{"a"')]
    assert events[15] == [CallPiece(0, ": 1}")] and not any(events[5:14] + events[16:])


def test_a_thought_streams() -> None:
    parser = ReasoningSplitter(INSIDE)
    assert [parser.push(piece) for piece in ("one", " two", " ", "three</thi", "nk>", "four")] == [
        ("one", ""), (" two", ""), ("", ""), (" three", ""), ("", ""), ("", "four"),
    ]  # fmt: skip


def test_where_an_answer_begins() -> None:
    assert choose_reasoning("auto", HYBRID) == "qwen3"
    assert choose_reasoning("auto", TURNS) == "none"
    assert choose_reasoning("none", HYBRID) == "none"
    for parser in ("qwen3", "deepseek_r1"):
        assert find_answer_start(parser, "...<|assistant|><think>\n") is INSIDE
        assert find_answer_start(parser, "...<think>\n\n</think>\n\n") is ANSWER
        assert find_answer_start(parser, "...", "<think>so") is INSIDE
        assert find_answer_start(parser, "...<think>so</think>The", "<think>so</think>The") is ANSWER
    assert find_answer_start("qwen3", "...<|assistant|>") is OPEN
    assert find_answer_start("deepseek_r1", "...<|assistant|>") is LIKELY
    assert find_answer_start("none", "...<think>\n") is ANSWER


@pytest.mark.parametrize("parser", ["cohere", "gemma4", "minimax_m3", "mistral"])
def test_where_answers_with_other_tags_begin(parser: ReasoningParser) -> None:
    opening, closing, _ = TAGS[parser]
    assert choose_reasoning("auto", TURNS + f"{{{{ '{opening}\n{closing}' }}}}") == parser
    assert find_answer_start(parser, "...<think>") is OPEN
    assert find_answer_start(parser, f"...{opening}\n") is INSIDE
    assert find_answer_start(parser, f"...{opening}\n{closing}") is ANSWER
    assert find_answer_start(parser, f"...{closing}") is ANSWER
    assert find_answer_start(parser, "...", "so") is ANSWER
    assert find_answer_start(parser, "...", f"{opening}so") is INSIDE


def test_what_templates_hear_of_an_effort() -> None:
    assert effort_arguments(HYBRID, "none") == {"enable_thinking": False}
    assert effort_arguments(HYBRID, "low") == {"enable_thinking": True}
    assert effort_arguments(HYBRID, None) == {}
    assert effort_arguments("{{ reasoning_effort }}", "none") == {"reasoning_effort": "none"}
    assert effort_arguments("{% if not thinking is defined %}", "high") == {"thinking": True}
    assert effort_arguments("{% if thinking_mode == 'disabled' %}", "none") == {"thinking_mode": "disabled"}
    assert effort_arguments("{% if thinking_mode == 'disabled' %}", "low") == {"thinking_mode": "enabled"}
    assert effort_arguments("{% if thinking_mode == 'chat' %}", "none") == {}
    assert effort_arguments(TURNS, "high") == {}


def ask(template: str, body: dict[str, Any], answer: str = THOUGHT, **settings: Any) -> tuple[FakeEngine, Any]:
    """The engine, and the response of an application with a model of this template."""

    async def run() -> tuple[FakeEngine, Any]:
        engine = FakeEngine(answer=answer)
        async with client(engine, template=template, **settings) as http:
            return engine, await http.post("/v1/chat/completions", json={"messages": HI, **body})

    return asyncio.run(run())


def whole(template: str, body: dict[str, Any], answer: str = THOUGHT, **settings: Any) -> tuple[Any, Any]:
    response = ask(template, body, answer, **settings)[1]
    assert response.status_code == 200, response.text
    return response.json()["choices"][0], response.json()["usage"]


def streamed(template: str, body: dict[str, Any], answer: str = THOUGHT, **settings: Any) -> tuple[str, str, list[str]]:
    """Thought, content, and which of both each chunk had."""
    response: httpx.Response = ask(template, {**body, "stream": True}, answer, **settings)[1]
    deltas = [chunk["choices"][0]["delta"] for chunk in frames(response.text)]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)
    return thought, content, ["t" if "reasoning_content" in delta else "c" for delta in deltas]


def test_chat_whole_and_streamed() -> None:
    want = ("Let me see < it </thin.\n\nYes 😀.", "Hello wörld.")
    for template, answer in ((HYBRID, THOUGHT), (OPENED, THOUGHT.removeprefix("<think>\n"))):
        choice, usage = whole(template, {}, answer)
        message = choice["message"]
        assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (*want, "stop")
        num_thought = len(token_ids(answer[: answer.index(CLOSING) + len(CLOSING)]))
        details = usage["completion_tokens_details"]
        assert num_thought - 1 <= details["reasoning_tokens"] <= num_thought + 1 < usage["completion_tokens"]
        thought, content, order = streamed(template, {}, answer)
        assert (thought, content) == want
        assert "".join(order).strip("c").replace("t", "") == "" and order.count("t") > 3, "thoughts come first"


def test_a_thought_that_is_cut_is_no_answer() -> None:
    choice, usage = whole(OPENED, {"max_tokens": 4}, "It goes on and on and on")
    assert choice["message"]["content"] is None and choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"].startswith("It")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 4


def test_thinking_is_switched_by_effort_and_by_template_arguments() -> None:
    for body in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        engine, response = ask(HYBRID, body, "Hello.")
        prompt = tokenizer().decode(list(engine.requests[0].prompt_token_ids))
        assert prompt.endswith("<think>\n\n</think>\n\n")
        assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
        assert "completion_tokens_details" not in response.json()["usage"]
    engine, _ = ask(HYBRID, {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}})
    assert tokenizer().decode(list(engine.requests[0].prompt_token_ids)).endswith("</think>\n\n"), "kwargs win"
    engine, _ = ask(HYBRID, {"reasoning_effort": "low"})
    assert tokenizer().decode(list(engine.requests[0].prompt_token_ids)).endswith("<|assistant|>")


def test_what_no_template_hears_is_ignored_and_what_is_no_effort_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        body = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True}}
        assert ask(TURNS, body)[1].status_code == 200
    assert "chat_template_kwargs.enable_thinking" in caplog.text and "'reasoning_effort'" in caplog.text
    assert error_of(ask(HYBRID, {"reasoning_effort": "hard"})[1], 400)["param"] == "reasoning_effort"


def test_the_parser_can_be_named_or_switched_off() -> None:
    choice, _ = whole(HYBRID, {}, THOUGHT, reasoning_parser="none")
    assert choice["message"]["content"] == THOUGHT and "reasoning_content" not in choice["message"]
    choice, _ = whole(TURNS, {}, "a</think>b", reasoning_parser="deepseek_r1")
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("a", "b")
    choice, _ = whole(TURNS, {}, "a</think>b", reasoning_parser="qwen3")
    assert choice["message"]["content"] == "a</think>b"


def test_calls_follow_a_thought_and_a_call_in_it_is_a_thought() -> None:
    answer = f"<think>\nperhaps {CALL}\n</think>\n\n{CALL}"
    choice, _ = whole(HYBRID, {"tools": [TOOL]}, answer, tool_parser="hermes")
    message = choice["message"]
    assert message["reasoning_content"] == f"perhaps {CALL}" and message["content"] is None
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": "wörld"}']
    assert choice["finish_reason"] == "tool_calls"


def test_forced_calls_and_schemas_leave_room_to_think() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for body in ({"response_format": schema}, {"tools": [TOOL], "tool_choice": "required"}):
        grammars = [
            ask(template, {**body, **extra}, tool_parser="hermes")[0].requests[0].sampling.grammar
            for template, extra in ((HYBRID, {}), (OPENED, {}), (HYBRID, {"reasoning_effort": "none"}), (TURNS, {}))
        ]
        assert [")?" in grammar.preface for grammar in grammars] == [True, False, False, False]
        assert [bool(grammar.preface) for grammar in grammars] == [True, True, False, False]


@pytest.mark.parametrize("parser", ["cohere", "gemma4", "minimax_m3", "mistral"])
def test_chat_with_other_tags(parser: ReasoningParser) -> None:
    """By the template alone, whole and streamed; a schema leaves room for the reasoning."""
    opening, closing, _ = TAGS[parser]
    template = TURNS + f"{{# {opening} {closing} #}}"
    answer = f"{opening}\nLet me see.{closing}\n{'Hello.'.join(TAGS[parser].of_answer) or 'Hello.'}"
    choice, usage = whole(template, {}, answer)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Let me see.", "Hello.")
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    assert streamed(template, {}, answer)[:2] == ("Let me see.", "Hello.")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    engine, _ = ask(template, {"response_format": schema})
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None and f'"{closing}"' in grammar.preface


def test_chat_by_channels() -> None:
    """By the template alone: reasoning, content and calls, whole and streamed."""
    thought, final = "<|channel|>analysis<|message|>Let me see.", "<|channel|>final<|message|>Hello wörld."
    choice, usage = whole(HARMONY, {}, thought + NEXT + final)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Hello wörld.")
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]  # this tokenizer skips <|end|>
    assert len(token_ids(thought)) - 1 <= num_reasoning <= len(token_ids(thought + NEXT))
    assert streamed(HARMONY, {}, thought + NEXT + final)[:2] == ("Let me see.", "Hello wörld.")
    call = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": "wörld"}<|call|>'
    choice, _ = whole(HARMONY, {"tools": [TOOL]}, thought + NEXT + call)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None
    assert message["reasoning_content"] == "Let me see."
    (found,) = message["tool_calls"]
    assert (found["function"]["name"], found["function"]["arguments"]) == ("get", '{"a": "wörld"}')
    # The reasoning before a call goes back to the template, by the name that it has there.
    history = [{**message, "role": "assistant"}, {"role": "tool", "tool_call_id": found["id"], "content": "7"}]
    engine, _ = ask(HARMONY, {"messages": [*HI, *history], "tools": [TOOL]}, final)
    prompt = tokenizer().decode(list(engine.requests[0].prompt_token_ids))
    assert "<|channel|>analysis<|message|>Let me see.<|end|>" in prompt


def test_channels_are_chosen_by_the_template() -> None:
    assert choose_reasoning("auto", HARMONY) == "harmony" and choose_format("auto", HARMONY) is FORMATS["harmony"]
    assert find_answer_start("harmony", "...<|start|>assistant") is AnswerStart.HARMONY
    assert find_answer_start("harmony", "...<|message|>So", "So") is ANSWER
    own = template_tokenizer(HARMONY)
    own.add_special_tokens({"additional_special_tokens": list(HARMONY_TAGS)})
    app = make_app(FakeEngine(), own, ServerSettings(), lambda: METADATA)
    assert app.state.server.shows_special  # or the reader would not see the headers
    app.state.server.close()


@pytest.mark.parametrize("has_symbols", [True, False])
def test_grammars_leave_room_for_channels(has_symbols: bool) -> None:
    """A schema has the header of the channel final before it, a forced call its own; both after an analysis or none."""
    own = copy.deepcopy(tokenizer())
    if has_symbols:
        own.add_special_tokens({"additional_special_tokens": list(HARMONY_TAGS)})
    app = make_app(FakeEngine(), own, ServerSettings(), lambda: METADATA)
    texts = app.state.server.texts
    app.state.server.close()
    compiler = GrammarCompiler(lambda: tokenizer_json(own), len(own), [2])
    functions = (Function(name="get", parameters={"type": "object", "properties": {}}),)
    form, answer = FORMATS["harmony"], Grammar.regex("b+")
    either = calls_or_answer(form, functions, texts.symbols, answer, is_single=True)
    forced = forced_calls(form, functions, texts.symbols, is_single=True)
    final = "<|channel|>final<|message|>bb"
    call = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}"
    for grammar, has_heads, right, wrong in (
        (answer, False, (final,), ("bb", call)), (forced, True, (call,), (final,)),
        (either, True, (final, call), ("bb",)),
    ):  # fmt: skip
        whole_grammar = allow_reasoning(grammar, AnswerStart.HARMONY, texts.symbols, has_heads=has_heads)
        for text in (*right, *wrong):
            for before in ("", "<|channel|>analysis<|message|>so" + NEXT):
                matcher = compiler.matcher(whole_grammar)
                for token in own(before + text, add_special_tokens=False)["input_ids"]:
                    matcher.take(token)
                assert (matcher.fault == "") == (text in right), (text, before)


@pytest.mark.parametrize("tags", [THINK, TAGS["mistral"], TAGS["minimax_m3"]])
def test_room_for_names_added_tokens_as_symbols(tags: Tags) -> None:
    own = copy.deepcopy(tokenizer())
    opening, closing, of_answer = tags
    added = [opening, closing, *of_answer]
    if opening.startswith("["):  # a special token needs no angle brackets
        own.add_special_tokens({"additional_special_tokens": added})
    else:
        own.add_tokens([AddedToken(tag, special=False) for tag in added])
    app = make_app(FakeEngine(), own, ServerSettings(), lambda: METADATA)
    symbols = app.state.server.texts.symbols
    app.state.server.close()
    assert set(added) <= set(symbols)
    compiler = GrammarCompiler(lambda: tokenizer_json(own), len(own), [2])
    starts = ((INSIDE, ""), (LIKELY, opening), (LIKELY, ""), (OPEN, opening), (OPEN, None), (ANSWER, None))
    for (beginning, begun), head in itertools.product(starts, ("", *of_answer[:1])):
        matcher = compiler.matcher(allow_reasoning(Grammar.regex("a"), beginning, symbols, tags=tags))
        text = f"{head}a" if begun is None else f"{begun}so\n{closing}\n\n{head}a"
        for token in own(text, add_special_tokens=False)["input_ids"]:
            matcher.take(token)
        assert not matcher.fill(np.zeros(compiler.num_words, dtype=np.int32)) and matcher.fault == "", beginning
    assert f'"{closing}"' not in allow_reasoning(Grammar.regex("a"), OPEN, symbols, tags=tags).preface
    assert f'"{closing}"' in allow_reasoning(Grammar.regex("a"), OPEN, {}, tags=tags).preface
    assert allow_reasoning(Grammar.regex("a"), ANSWER, {}) == Grammar.regex("a")
