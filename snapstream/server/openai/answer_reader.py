"""Parses one sample's answer as it streams: reasoning, content and tool calls, as events that each API formats.

    text --> ReasoningSplitter --> Reasoning
                   |
                   +--> ToolCallParser --> Content, CallStart, CallPiece

    content ... | head with a name | arguments | tail | --> content or the next call
                  held back until    streamed    dropped
                  it is complete

Invariant: the events do not depend on how the text was split into pieces, and none is retracted. A call starts once its
head is complete and names a known tool; an error before that makes the text content, an error after it is repaired by
the reader of the arguments. White space around reasoning, and between calls, belongs to no event."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from snapstream.engine.request_state import overlap
from snapstream.server.openai.tool_format import (
    MAX_HEAD,
    ArgumentReader,
    CallFormat,
    CustomInput,
    Function,
    GrammarBuilder,
    Head,
    JsonArguments,
    NeedMoreText,
    NotACall,
    skip_space,
    skip_tail,
)
from snapstream.server.options import ReasoningParser
from snapstream.types import Grammar

if TYPE_CHECKING:  # the rest runs without the packages of a server: `snapstream chat` splits answers, too
    from snapstream.server.engine.api import SampleDelta
    from snapstream.server.openai.protocol import TemplateOptions

# Harmony, the format of gpt-oss: an answer is a list of messages, each with a channel in its header.
#     <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
#     <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
RECIPIENT = "functions."  # before the name of a tool
CALL_MARK = f"{CHANNEL}commentary to={RECIPIENT}"  # with which ``HarmonySplitter`` writes the header of every call


class Tags(NamedTuple):
    """What reasoning stands between."""

    opening: str
    closing: str
    of_answer: tuple[str, ...] = ()  # around the answer, which is given without them


THINK = Tags(OPENING := "<think>", CLOSING := "</think>")
TAGS: dict[ReasoningParser, Tags] = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "cohere": Tags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "gemma4": Tags("<|channel>thought", "<channel|>"),  # a token and a word
    "minimax_m3": Tags("<mm:think>", "</mm:think>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "harmony": Tags(CHANNEL, END),
    "none": Tags("", ""),
}


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str
    call_id: str
    is_custom: bool = False  # the pieces are text, not JSON


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a call's arguments."""

    index: int
    text: str


CallEvent = Content | CallStart | CallPiece


class ToolCallParser:
    """Finds the calls in one sample's text. ``push`` pieces in order, then ``finish`` once."""

    def __init__(self, call_format: CallFormat, functions: Sequence[Function], *, max_calls: int | None = None) -> None:
        """``functions``: known tools. ``max_calls``: text after so many calls is dropped."""
        self._format = call_format
        self._functions = {function.name: function for function in functions}
        self._max_calls = max_calls
        self._text = ""  # not consumed yet
        self._step = self._begin
        self._is_over = False  # there is no more text
        self._is_next = False  # a call ended just before
        self._arguments: ArgumentReader = JsonArguments()
        self._tail: tuple[str, ...] = ()
        self._events: list[CallEvent] = []
        self.num_calls = 0

    @property
    def is_open(self) -> bool:
        """Whether arguments are being read."""
        return self._step == self._stream

    def push(self, piece: str) -> list[CallEvent]:
        """The events that this piece completes."""
        self._text += piece
        return self._run()

    def finish(self) -> list[CallEvent]:
        """The last events: what was held back is content."""
        self._is_over = True
        return self._run()

    def _run(self) -> list[CallEvent]:
        self._events = []
        while self._step():
            pass
        return _joined(self._events)

    def _begin(self) -> bool:
        """The first visible character decides between reasoning, text, and (without marks) a call."""
        stripped = self._text.lstrip()
        if not stripped and not self._is_over:
            return False
        if not self._is_over and len(stripped) < len(OPENING) and OPENING.startswith(stripped):
            return False
        self._step = (
            self._reasoning if stripped.startswith(OPENING) else self._head if self._format.is_whole else self._seek
        )
        return True

    def _reasoning(self) -> bool:
        """Content up to the end of the reasoning."""
        place = self._text.find(CLOSING)
        if place < 0:
            self._release(overlap(self._text, (CLOSING,)))
            return False
        self._emit(place + len(CLOSING))
        self._step = self._head if self._format.is_whole else self._seek
        return True

    def _seek(self) -> bool:
        """Content up to the next mark."""
        places = [place for place in map(self._text.find, self._format.marks) if place >= 0]
        if not places:
            self._release(overlap(self._text, self._format.marks))
            return False
        self._emit(min(places))
        self._step = self._head
        return True

    def _head(self) -> bool:
        """A call, or content."""
        try:
            head = self._read_head()
        except NeedMoreText:
            return False
        except NotACall:
            mark = next((mark for mark in self._format.marks if self._text.startswith(mark)), "")
            if self._is_next and self._format.marks:
                self._text = self._text[skip_space(self._text, 0) :]
            elif not self._is_next:
                self._emit(len(mark))
            self._is_next = False
            self._step = self._seek if self._format.marks else self._rest
            return True
        self._start(head)
        return True

    def _read_head(self) -> Head:
        """NeedMoreText only while there may be more text, and the text may be a head."""
        try:
            return self._format.read_head(self._text[:MAX_HEAD], self._functions, is_next=self._is_next)
        except NeedMoreText:
            if self._is_over or len(self._text) > MAX_HEAD:
                raise NotACall from None
            raise

    def _start(self, head: Head) -> None:
        function = self._functions[head.name]
        self._text = self._text[head.end :]
        reader = self._format.arguments(function.parameters)
        self._arguments = CustomInput(reader) if function.is_custom else reader
        self._tail = head.tail
        call_id = head.call_id or self._format.new_id()
        self._events.append(CallStart(self.num_calls, head.name, call_id, function.is_custom))
        self.num_calls += 1
        self._step = self._stream

    def _stream(self) -> bool:
        """Arguments, to their end."""
        end, piece = self._arguments.read(self._text, is_over=self._is_over)
        if piece:
            self._events.append(CallPiece(self.num_calls - 1, piece))
        self._text = self._text[end:]
        if not self._arguments.is_closed:
            return False
        self._step = self._after_call
        return True

    def _after_call(self) -> bool:
        """The end of the call is dropped; closing tags may be missing."""
        try:
            place = skip_tail(self._text, self._tail)
        except NeedMoreText:
            if not self._is_over:
                return False
            place = len(self._text)
        self._text = self._text[place:]
        self._step = self._between
        return True

    def _between(self) -> bool:
        """White space between calls, and after the last, is dropped."""
        if skip_space(self._text, 0) == len(self._text):
            if self._is_over:
                self._text = ""
            return False
        self._is_next = True
        is_full = self._max_calls is not None and self.num_calls >= self._max_calls
        self._step = self._drop if is_full else self._head
        return True

    def _rest(self) -> bool:
        self._release(0)
        return False

    def _drop(self) -> bool:
        self._text = ""
        return False

    def _release(self, num_held: int) -> None:
        """Emit all but the last ``num_held`` characters, which may start a tag."""
        self._emit(len(self._text) - (0 if self._is_over else num_held))

    def _emit(self, count: int) -> None:
        if count:
            self._events.append(Content(self._text[:count]))
        self._text = self._text[count:]


def _joined(events: list[CallEvent]) -> list[CallEvent]:
    """Merge consecutive events of one kind."""
    out: list[CallEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, CallPiece) and isinstance(last, CallPiece) and event.index == last.index:
            out[-1] = CallPiece(event.index, last.text + event.text)
        else:
            out.append(event)
    return out


class AnswerStart(Enum):
    """Whether the generated text starts with reasoning."""

    INSIDE = "inside"  # yes: the prompt ends with <think>
    LIKELY = "likely"  # yes (``deepseek_r1``), with or without <think>
    OPEN = "open"  # if it starts with <think>
    HARMONY = "harmony"  # if its first message is of the channel analysis
    ANSWER = "answer"  # no: the prompt ends with </think>, or reasoning is not parsed


def choose_reasoning(wanted: ReasoningParser, chat_template: str) -> ReasoningParser:
    """Resolve ``auto``: templates of reasoning models name the tags."""
    if wanted != "auto":
        return wanted
    if CHANNEL in chat_template and MESSAGE in chat_template:
        return "harmony"
    known: tuple[ReasoningParser, ...] = ("cohere", "gemma4", "minimax_m3", "mistral")
    found = next((parser for parser in known if TAGS[parser].closing in chat_template), None)
    return found or ("qwen3" if OPENING in chat_template or CLOSING in chat_template else "none")


def has_special_tags(parser: ReasoningParser, special: Collection[str]) -> bool:
    """Whether a tag of reasoning is a special token, which the text of answers must keep."""
    tags = TAGS[parser]
    return any(tag in special for tag in (tags.opening, tags.closing, *tags.of_answer))


def find_answer_start(parser: ReasoningParser, prompt: str, prefix: str | None = None) -> AnswerStart:
    """``prompt``: the end of the rendered conversation. ``prefix``: of an answer that is continued."""
    if parser == "none":
        return AnswerStart.ANSWER
    if parser == "harmony":
        return AnswerStart.HARMONY if prefix is None else AnswerStart.ANSWER  # an answer that is continued is final
    opening, closing, _ = TAGS[parser]
    if prefix is not None:
        return AnswerStart.INSIDE if prefix.rfind(opening) > prefix.rfind(closing) else AnswerStart.ANSWER
    prompt = prompt.rstrip()
    if prompt.endswith(opening):
        return AnswerStart.INSIDE
    if prompt.endswith(closing):
        return AnswerStart.ANSWER
    return AnswerStart.LIKELY if parser == "deepseek_r1" else AnswerStart.OPEN


def effort_arguments(template: str, effort: str | None) -> dict[str, Any]:
    """Template variables for ``reasoning_effort``, by the names that the template uses."""
    if effort is None:
        return {}
    thinks = effort != "none"
    known = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    if "disabled" in template:  # others have other words for it
        known["thinking_mode"] = "enabled" if thinks else "disabled"
    return {name: value for name, value in known.items() if mentions(template, name)}


def unused_options(template: str, options: TemplateOptions) -> set[str]:
    """Fields of a request that have no effect because its template does not use them."""
    names = {name for name in options.chat_template_kwargs or {} if not mentions(template, name)}
    effort = options.reasoning_effort
    unused = {"reasoning_effort"} if effort is not None and not effort_arguments(template, effort) else set()
    return {f"chat_template_kwargs.{name}" for name in names} | unused


def mentions(template: str, name: str) -> bool:
    """Whether a template contains the variable ``name``."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def allow_reasoning(
    grammar: Grammar, beginning: AnswerStart, symbols: Mapping[str, int], *, tags: Tags = THINK, has_heads: bool = False
) -> Grammar:
    """The grammar with reasoning before it. ``symbols``: ``TokenText.symbols``. ``has_heads``: see ``AnswerPlan``."""
    if beginning is AnswerStart.ANSWER and not tags.of_answer:
        return grammar
    write = GrammarBuilder(symbols).text
    if beginning is AnswerStart.HARMONY:
        analysis = f"{write(f'{CHANNEL}analysis{MESSAGE}')} TEXT {write(f'{END}{START}assistant')}"
        final = "" if has_heads else " " + write(f"{CHANNEL}final{MESSAGE}")
        return replace(grammar, preface=f"preface: analysis?{final}\nanalysis: {analysis}\nTEXT: /(.|\\n)*/\n")
    opening, closing = write(tags.opening), write(tags.closing)
    head = f"({write(tags.of_answer[0])})?" if tags.of_answer else ""
    if beginning is AnswerStart.ANSWER:
        return replace(grammar, preface=f"preface: {head}\n")
    parts = {
        AnswerStart.INSIDE: "reasoning GAP",
        AnswerStart.LIKELY: f"({opening})? reasoning GAP",
        AnswerStart.OPEN: f"({opening} reasoning GAP)?",
    }
    reasoning = (
        f"reasoning: TEXT {closing}\nTEXT: /(.|\\n)*/"
        if tags.closing in symbols
        else f"reasoning[suffix={closing}]: /(.|\\n)*/"
    )
    return replace(grammar, preface=f"preface: {parts[beginning]} {head}\n{reasoning}\nGAP: /[ \\n]{{0,4}}/\n")


class _Splitter:
    """Splits one sample's text. ``push`` pieces in order, then ``finish`` once; each gives (reasoning, answer)."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step  # the state: consumes the start of the text, returns whether the next one can continue
        self._text = ""  # not consumed yet
        self._is_over = False  # there is no more text
        self._reasoning: list[str] = []
        self._answer: list[str] = []

    def push(self, piece: str) -> tuple[str, str]:
        """What this piece adds to the reasoning, and to the answer."""
        self._text += piece
        return self._run()

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        self._is_over = True
        return self._run()

    def _run(self) -> tuple[str, str]:
        self._reasoning, self._answer = [], []
        while self._step():
            pass
        return "".join(self._reasoning), "".join(self._answer)


class ReasoningSplitter(_Splitter):
    """Reasoning between tags, then the answer."""

    def __init__(self, beginning: AnswerStart, tags: Tags = THINK) -> None:
        super().__init__(self._after if beginning is AnswerStart.ANSWER else self._begin)
        self._beginning = beginning
        self._opening, self._closing, self._of_answer = tags
        self._has_reasoning = False

    @property
    def is_undecided(self) -> bool:
        """Whether it is unknown if there is reasoning."""
        return self._step == self._begin

    @property
    def is_inside(self) -> bool:
        return self._step == self._inside

    def _begin(self) -> bool:
        """The first visible characters decide whether the model writes the opening tag."""
        stripped = self._text.lstrip()
        if not self._is_over and len(stripped) < len(self._opening) and self._opening.startswith(stripped):
            return False
        if stripped.startswith(self._opening):
            self._text = stripped[len(self._opening) :]
            self._step = self._inside
        else:
            self._step = self._after if self._beginning is AnswerStart.OPEN else self._inside
        return True

    def _inside(self) -> bool:
        """The reasoning, up to the closing tag; white space at its end is held back."""
        if not self._has_reasoning:
            self._text = self._text.lstrip()
        place = self._text.find(self._closing)
        end = place if place >= 0 else len(self._text) - (0 if self._is_over else overlap(self._text, (self._closing,)))
        shown = self._text[:end].rstrip()
        if shown:
            self._reasoning.append(shown)
            self._has_reasoning = True
        if place < 0:
            self._text = "" if self._is_over else self._text[len(shown) :]
            return False
        self._text = self._text[place + len(self._closing) :]
        self._step = self._gap
        return True

    def _gap(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._step = self._after
        return True

    def _after(self) -> bool:
        for tag in self._of_answer:
            self._text = self._text.replace(tag, "")
        num_held = 0 if self._is_over else overlap(self._text, self._of_answer)  # may start a tag
        end = len(self._text) - num_held
        if end:
            self._answer.append(self._text[:end])
        self._text = self._text[end:]
        return False


class HarmonySplitter(_Splitter):
    """Messages with channels, before the tokens that end them are dropped.

    The channel analysis is reasoning, all others are the answer. A message to a tool begins with ``CALL_MARK``, however
    its header was spelled. An answer without any header is the answer.
    """

    def __init__(self) -> None:
        super().__init__(self._header)
        self._is_analysis = False  # the message that is read, or the last one
        self._begun = {"reasoning": False, "answer": False}

    @property
    def is_undecided(self) -> bool:
        """Whether a header is being read."""
        return self._step == self._header

    @property
    def is_inside(self) -> bool:
        return self._step == self._body and self._is_analysis

    def _header(self) -> bool:
        place = self._text.find(MESSAGE)
        if place < 0:
            if self._is_over and not any(tag in self._text for tag in (CHANNEL, START)):
                self._answer.append(self._text)
            self._text = "" if self._is_over else self._text
            return False
        header, self._text = self._text[:place], self._text[place + len(MESSAGE) :]
        channel, tool = _CHANNEL.search(header), _TOOL.search(header)
        self._is_analysis = tool is None and channel is not None and channel[1] == "analysis"
        if tool is not None:
            self._answer.append(f"{CALL_MARK}{tool[1]}{MESSAGE}")
        else:
            kind, parts = ("reasoning", self._reasoning) if self._is_analysis else ("answer", self._answer)
            if self._begun[kind]:
                parts.append("\n")  # between two messages
            self._begun[kind] = True
        self._step = self._body
        return True

    def _body(self) -> bool:
        """Up to the end of the message, or to the next where the end is missing."""
        ends = (END, RETURN, CALL, START)
        found = min(((place, tag) for tag in ends if (place := self._text.find(tag)) >= 0), default=None)
        stop = len(self._text) - (0 if self._is_over else overlap(self._text, ends)) if found is None else found[0]
        if stop:
            (self._reasoning if self._is_analysis else self._answer).append(self._text[:stop])
        if found is None:
            self._text = self._text[stop:]
            return False
        self._text = self._text[stop + (0 if found[1] == START else len(found[1])) :]
        self._step = self._header
        return True


def splitter_of(beginning: AnswerStart, tags: Tags) -> ReasoningSplitter | HarmonySplitter:
    """What separates the reasoning of an answer that begins like this."""
    return HarmonySplitter() if beginning is AnswerStart.HARMONY else ReasoningSplitter(beginning, tags)


_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_TOOL = re.compile(rf"to={re.escape(RECIPIENT)}([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


Event = Reasoning | CallEvent


class AnswerReader:
    """One sample's answer."""

    def __init__(
        self, beginning: AnswerStart, tags: Tags, closing_id: int | None, calls: ToolCallParser | None
    ) -> None:
        """``closing_id``: the token ``tags.closing``, if it is one. ``calls`` None: calls are text."""
        self._splitter = splitter_of(beginning, tags)
        self._closing_id = closing_id
        self._calls = calls
        self._num_undecided = 0  # tokens that count as reasoning if there turns out to be some
        self.num_reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0 and not self.is_call_open

    @property
    def is_call_open(self) -> bool:
        """Whether the arguments of a call have not ended: a stop string, a limit or the model may cut them."""
        return self._calls is not None and self._calls.is_open

    def take(self, delta: SampleDelta) -> list[Event]:
        """The events that this delta completes; with the last one also what was held back."""
        was_over = not (self._splitter.is_undecided or self._splitter.is_inside)
        reasoning, answer = self._splitter.push(delta.text)
        if not was_over:
            self._count(delta.token_ids, bool(reasoning))
        is_last = delta.finish_reason is not None
        if is_last:
            last_reasoning, last_answer = self._splitter.finish()
            reasoning, answer = reasoning + last_reasoning, answer + last_answer
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        if self._calls is None:
            return [*events, Content(answer)] if answer else events
        events += self._calls.push(answer)
        return [*events, *self._calls.finish()] if is_last else events

    def _count(self, ids: Sequence[int], has_reasoning: bool) -> None:
        """Count tokens of the reasoning, tags included; the one that ends it may be among others."""
        if self._splitter.is_undecided:
            self._num_undecided += len(ids)
        elif self._splitter.is_inside:
            self.num_reasoning_tokens += self._num_undecided + len(ids)
            self._num_undecided = 0
        elif isinstance(self._splitter, HarmonySplitter):
            self._num_undecided = 0  # the header of a message of another channel
        elif self._closing_id is not None and self._closing_id in ids:
            self.num_reasoning_tokens += self._num_undecided + list(ids).index(self._closing_id) + 1
        elif has_reasoning or self.num_reasoning_tokens:
            self.num_reasoning_tokens += self._num_undecided + len(ids)
