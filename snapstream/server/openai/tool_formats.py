r"""How families of models write tool calls: a ``CallFormat`` for each. To add one: a class here, and a line at the end.

With arguments in a JSON object:

    hermes         <tool_call>{"name": "f", "arguments": {...}}</tool_call>               Qwen 2.5 and 3, Nous Hermes
    llama3_json    {"name": "f", "parameters": {...}}; {...}                              Llama 3.1 to 4, whole answer
    mistral        [TOOL_CALLS] [{"name": "f", "arguments": {...}}, {...}]                tokenizers v2 to v7
                   [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}                                   v11 on
    nemotron       <TOOLCALL>[{"name": "f", "arguments": {...}}, {...}]</TOOLCALL>        Nemotron Nano 2
    cohere         <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}, ...]<|END_ACTION|>
    deepseek_v3    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{...}\n```<｜tool▁call▁end｜>    V3, R1
    deepseek_v31   <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                            V3.1
    kimi_k2        <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    gemma4         <|tool_call>call:f{city:<|"|>Paris<|"|>,days:2}<tool_call|>           keys and words without quotes
    harmony        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>          gpt-oss

As in Python, as the whole answer or between two special tokens:

    llama4_pythonic   [f(city="Paris", days=2), g()]                                      Llama 3.2 and 4

Between tags, so that code needs no escapes:

    qwen3_coder   <tool_call>\n<function=f>\n<parameter=k>\nvalue\n</parameter>\n</function>\n</tool_call>
    glm45         <tool_call>f\n<arg_key>k</arg_key>\n<arg_value>value</arg_value>\n</tool_call>       GLM-4.5, 4.6
    glm47         the same without line breaks                                                         GLM-4.7
    minimax_m2    <minimax:tool_call>\n<invoke name="f">\n<parameter name="k">value</parameter>\n</invoke>\n...
    minimax_m3    <tool_call>\n<invoke name="f"><k>value</k><l><item>1</item></l></invoke>...   tags after ]<]minimax[>[
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from snapstream.engine.request_state import overlap
from snapstream.server.openai.answer_reader import CALL, CALL_MARK, CHANNEL, CONSTRAIN, END, MESSAGE, START
from snapstream.server.openai.tool_format import (
    ID_MEMBER,
    MAX_HEAD,
    ArgumentReader,
    CallFormat,
    Function,
    GrammarBuilder,
    Head,
    JsonArguments,
    NotACall,
    bare_name,
    bare_word,
    expect,
    next_is,
    option,
    quoted_name,
    skip_space,
)
from snapstream.server.openai.tool_values import (
    as_json,
    dumps,
    each_property,
    keyword_arguments,
    kinds_of,
    literal_as_json,
    tags_as_json,
)

PYTHON_TAG = "<|python_tag|>"  # Llama 3


def object_head(text: str, place: int, names: Collection[str]) -> tuple[str, int]:
    """Name of a call that is an object, and where its arguments start (with their brace)."""
    place = expect(text, place, "{")
    if next_is(text, place, '"type"'):  # Llama 3.1 sometimes writes it
        place = expect(text, place, '"type"', ":", '"function"', ",")
    place = expect(text, place, '"name"', ":")
    name, place = quoted_name(text, place, names)
    place = expect(text, place, ",")
    key = '"arguments"' if next_is(text, place, '"arguments"') else '"parameters"'
    return name, expect(text, place, key, ":", "{") - 1


OBJECT_HEAD, OBJECT_TAIL = '{"name": "%s", "arguments": ', "}"  # of a call that is an object, as a grammar writes it


class Hermes(CallFormat):
    name = "hermes"
    marks = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>")
    call_head, call_tail = f"<tool_call>\n{OBJECT_HEAD}", f"{OBJECT_TAIL}\n</tool_call>"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        name, end = object_head(text, expect(text, 0, "<tool_call>"), names)
        return Head(name, end, ("}", "</tool_call>"))


class Llama3(CallFormat):
    name = "llama3_json"
    is_whole = True
    tags: ClassVar[tuple[str, ...]] = ()  # the tags above are optional around calls
    between = "; "
    call_head, call_tail = '{"name": "%s", "parameters": ', OBJECT_TAIL

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        if is_next:
            return Head(*object_head(text, expect(text, 0, ";"), names), ("}", PYTHON_END))
        place = option(text, option(text, 0, PYTHON_TAG), PYTHON_START)
        return Head(*object_head(text, place, names), ("}", PYTHON_END))


MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NUM_ID_CHARS = 9


class Mistral(CallFormat):
    """Reads both forms; writes the older one if the vocabulary has no ``[ARGS]``. Ids have nine letters and digits."""

    name = "mistral"
    marks = (MISTRAL_CALLS,)
    tags = (MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS)
    between = ""
    call_head = f"{MISTRAL_CALLS}%s{MISTRAL_ARGUMENTS}"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        if is_next and next_is(text, 0, ","):
            return Head(*object_head(text, expect(text, 0, ","), names), (ID_MEMBER, "}", "]"))
        place = expect(text, 0, MISTRAL_CALLS)
        if next_is(text, place, "[") or next_is(text, place, "{"):
            return Head(*object_head(text, option(text, place, "["), names), (ID_MEMBER, "}", "]"))
        name, place = bare_name(text, place, names)
        call_id = ""
        if next_is(text, place, MISTRAL_ID):
            call_id, place = bare_word(text, expect(text, place, MISTRAL_ID))
        return Head(name, expect(text, option(text, place, MISTRAL_ARGUMENTS), "{") - 1, (), call_id)

    def in_vocabulary(self, special: Collection[str]) -> CallFormat:
        return self if MISTRAL_ARGUMENTS in special else MistralList()

    def new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(NUM_ID_CHARS))


class MistralList(Mistral):
    """The older form, as a grammar writes it."""

    before, between, after = f"{MISTRAL_CALLS}[", ", ", "]"
    call_head, call_tail = OBJECT_HEAD, OBJECT_TAIL


NEMOTRON_CALLS, NEMOTRON_CALLS_END = "<TOOLCALL>", "</TOOLCALL>"


class Nemotron(CallFormat):
    name = "nemotron"
    marks = (NEMOTRON_CALLS,)
    tags = (NEMOTRON_CALLS, NEMOTRON_CALLS_END)
    before, between, after = f"{NEMOTRON_CALLS}[", ", ", f"]{NEMOTRON_CALLS_END}"
    call_head, call_tail = OBJECT_HEAD, OBJECT_TAIL

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, 0, ",") if is_next else option(text, expect(text, 0, NEMOTRON_CALLS), "[")
        return Head(*object_head(text, place, names), ("}", "]", NEMOTRON_CALLS_END))


ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"


class Cohere(CallFormat):
    """Command R7B and Command A. The model's ids count from 0 in each turn, so calls get others."""

    name = "cohere"
    marks = (ACTION,)
    tags = (ACTION, ACTION_END)
    before, between, after = f"{ACTION}[\n    ", ",\n    ", f"\n]{ACTION_END}"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, 0, ",") if is_next else option(text, expect(text, 0, ACTION), "[")
        place = expect(text, place, "{")
        if next_is(text, place, '"tool_call_id"'):
            _, place = bare_word(text, expect(text, place, '"tool_call_id"', ":", '"'))
            place = expect(text, place, '"', ",")
        name, place = quoted_name(text, expect(text, place, '"tool_name"', ":"), names)
        return Head(name, expect(text, place, ",", '"parameters"', ":", "{") - 1, ("}", "]", ACTION_END))

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        begin = rules.text('{"tool_call_id": "')
        head = rules.text(f'", "tool_name": {json.dumps(function.name)}, "parameters": ')
        end = rules.text("}")
        return f"{begin} /[0-9]|[1-9][0-9]{{1,3}}/ {head} {rules.arguments(function)} {end}"


_KEYWORD = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=(?!=)")


class PythonArguments:
    """Reads ``city="Paris", days=[1, 2])``, closing parenthesis included, as JSON, an argument at a time."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._names = list(properties) if isinstance(properties, Mapping) else []
        self._seen = 0  # scanned characters of the current argument
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._count = 0
        self.is_closed = False

    def read(self, text: str, *, is_over: bool) -> tuple[int, str]:
        start, json = 0, ""
        for place in range(self._seen, len(text)):
            if not self._ends_at(text[place]):
                continue
            json += self._argument(text[start:place])
            start = place + 1
            if text[place] == ")":
                self.is_closed = True
                json += "}" if self._count else "{}"
                break
        self._seen = len(text) - start
        if is_over and not self.is_closed:
            return len(text), json
        return start, json

    def _ends_at(self, char: str) -> bool:
        """Whether an argument ends before this character."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "'\"":
            self._quote = char
        elif self._depth == 0 and char in ",)":
            return True
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        return False

    def _argument(self, text: str) -> str:
        if not text.strip():
            return ""
        found = _KEYWORD.match(text)
        if found is not None:
            name, value = found[1], text[found.end() :]
        else:  # positional
            name, value = self._names[self._count] if self._count < len(self._names) else str(self._count), text
        json = ("{" if self._count == 0 else ", ") + f"{dumps(name)}: {literal_as_json(value)}"
        self._count += 1
        return json


PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


class Llama4Pythonic(CallFormat):
    name = "llama4_pythonic"
    marks = (PYTHON_START,)
    is_whole = True
    tags = (PYTHON_START, PYTHON_END)
    before, between, after = "[", ", ", "]"
    call_head, call_tail = "%s(", ")"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, 0, ",") if is_next else expect(text, option(text, 0, PYTHON_START), "[")
        name, place = bare_name(text, place, names)
        return Head(name, expect(text, place, "("), ("]", PYTHON_END))

    def arguments(self, schema: Mapping[str, Any]) -> ArgumentReader:
        return PythonArguments(schema)

    def write_arguments(self, rules: GrammarBuilder, function: Function) -> str:
        return keyword_arguments(rules, function)


DEEPSEEK_SECTION, DEEPSEEK_SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR, FENCE = "<｜tool▁sep｜>", "```"


class DeepSeekV31(CallFormat):
    name = "deepseek_v31"
    marks = (DEEPSEEK_SECTION, DEEPSEEK_CALL)
    tags = (DEEPSEEK_SECTION, DEEPSEEK_SECTION_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR)
    before, between, after = DEEPSEEK_SECTION, "", DEEPSEEK_SECTION_END
    call_head, call_tail = f"{DEEPSEEK_CALL}%s{DEEPSEEK_SEPARATOR}", DEEPSEEK_CALL_END

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, option(text, 0, DEEPSEEK_SECTION), DEEPSEEK_CALL)
        if not _is_older(text, place):
            name, place = bare_name(text, place, names)
            return Head(
                name, expect(text, place, DEEPSEEK_SEPARATOR, "{") - 1, (DEEPSEEK_CALL_END, DEEPSEEK_SECTION_END)
            )
        name, place = bare_name(text, expect(text, place, "function", DEEPSEEK_SEPARATOR), names)
        place = option(text, option(text, place, FENCE), "json")
        return Head(name, expect(text, place, "{") - 1, (FENCE, DEEPSEEK_CALL_END, DEEPSEEK_SECTION_END))


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"
    between = "\n"
    call_head = f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}%s\n{FENCE}json\n"
    call_tail = f"\n{FENCE}{DEEPSEEK_CALL_END}"


def _is_older(text: str, place: int) -> bool:
    """Whether the kind of tool stands before the name; a tool of V3.1 may itself be called ``function``."""
    if not next_is(text, place, "function"):
        return False
    place = expect(text, place, "function")
    if not next_is(text, place, DEEPSEEK_SEPARATOR):
        return False
    return not next_is(text, expect(text, place, DEEPSEEK_SEPARATOR), "{")


KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS, KIMI_PREFIX = "<|tool_call_argument_begin|>", "functions."


class KimiK2(CallFormat):
    """Each call has an id with its name and number, which results repeat."""

    name = "kimi_k2"
    marks = (KIMI_SECTION, KIMI_CALL)
    tags = (KIMI_SECTION, KIMI_SECTION_END, KIMI_CALL, KIMI_CALL_END, KIMI_ARGUMENTS)
    before, between, after = KIMI_SECTION, "", KIMI_SECTION_END

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = skip_space(text, expect(text, option(text, 0, KIMI_SECTION), KIMI_CALL))
        call_id, place = bare_word(text, place)
        name, _, number = call_id.removeprefix(KIMI_PREFIX).rpartition(":")
        if name not in names or not number.isascii() or not number.isdigit():
            raise NotACall
        return Head(name, expect(text, place, KIMI_ARGUMENTS, "{") - 1, (KIMI_CALL_END, KIMI_SECTION_END), call_id)

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        arguments = rules.arguments(function)
        start = rules.text(f"{KIMI_CALL}{KIMI_PREFIX}{function.name}:")
        head = f"{start} /[0-9]|[1-9][0-9]{{1,3}}/ {rules.text(KIMI_ARGUMENTS)}"
        return f"{head} {arguments} {rules.text(KIMI_CALL_END)}"


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The text around keys and values."""

    key_start: str
    key_end: str
    value_start: str  # after the key, and white space; empty: the value begins at once
    value_end: str  # in which {key} stands for the key
    end: str  # of the arguments; consumed
    other_end: str = ""  # also ends them; not consumed
    has_lines: bool = False  # a line break before and after a value is not part of it
    inner: re.Pattern[str] | None = None  # of tags in values, see ``tags_as_json``


class TaggedArguments:
    """Reads the arguments of one call, a pair of tags for each parameter, as JSON.

    Parameters that the schema types as strings are streamed; other values come whole. Text between parameters that is
    no tag is dropped.
    """

    def __init__(self, tags: Tags, schema: Mapping[str, Any]) -> None:
        self._tags, self._schema = tags, schema
        self._properties = schema.get("properties")
        self._text = ""  # not consumed yet
        self._json = ""  # not returned yet
        self._kinds: frozenset[str] = frozenset()
        self._key_schema: Any = None
        self._value_end = tags.value_end
        self._step = self._between
        self._is_first, self._is_over = True, False
        self.is_closed = False

    def read(self, text: str, *, is_over: bool) -> tuple[int, str]:
        self._text, self._json, self._is_over = text, "", is_over
        while not self.is_closed and self._step():
            pass
        return len(text) - len(self._text), self._json

    def _between(self) -> bool:
        """The next key, or the end."""
        tags = self._tags
        self._text = self._text[skip_space(self._text, 0) :]
        for end in filter(None, (tags.end, tags.other_end)):
            if self._text.startswith(end):
                self._text = self._text[len(end) if end == tags.end else 0 :]
                self._json += "{}" if self._is_first else "}"
                self.is_closed = True
                return False
        starts = filter(None, (tags.key_start, tags.end, tags.other_end))
        if not self._text or any(start.startswith(self._text) for start in starts):
            self._text = "" if self._is_over else self._text
            return False
        if self._text.startswith(tags.key_start):
            return self._key()
        place = self._text.find(tags.key_start[0], 1)
        self._text = "" if place < 0 else self._text[place:]
        return bool(self._text)

    def _key(self) -> bool:
        """A key, up to the start of its value."""
        tags, text = self._tags, self._text
        end = text.find(tags.key_end, len(tags.key_start))
        if end < 0 and len(text) <= MAX_HEAD:
            return self._wait()
        key, place = text[len(tags.key_start) : end].strip(), end + len(tags.key_end)
        if end >= 0 and tags.value_start:
            place = skip_space(text, place)
            if not text.startswith(tags.value_start, place):
                if tags.value_start.startswith(text[place:]):
                    return self._wait()
                end = -1
            place += len(tags.value_start)
        if end >= 0 and tags.has_lines:
            if place == len(text) and not self._is_over:
                return False
            place += text.startswith("\n", place)
        if end < 0:  # no key after all
            self._text = text[len(tags.key_start) :]
            return True
        schemas = self._properties if isinstance(self._properties, Mapping) else {}
        self._key_schema, self._value_end = schemas.get(key), tags.value_end.replace("{key}", key)
        self._kinds = kinds_of(self._key_schema, self._schema)
        self._json += ("{" if self._is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._json += '"' if self._is_text else ""
        self._is_first = False
        self._text = text[place:]
        self._step = self._value
        return True

    def _wait(self) -> bool:
        self._text = "" if self._is_over else self._text
        return False

    @property
    def _is_text(self) -> bool:
        return self._kinds == {"string"}

    def _value(self) -> bool:
        tags, end = self._tags, self._value_end
        place = self._text.find(end)
        if place >= 0 and tags.inner is not None and not self._is_text:  # a tag inside may have the same name
            level = 0
            for one in tags.inner.finditer(self._text):
                level += -1 if one[1] else 1
                if level < 0:
                    break
            place, end = (one.start(), one[0]) if level < 0 else (-1, "")
        if place >= 0:
            value = self._text[:place]
            value = value.removesuffix("\n") if tags.has_lines else value
            if self._is_text:
                self._json += _escaped(value) + '"'
            elif tags.inner is None:
                self._json += as_json(value, self._kinds)
            else:
                self._json += tags_as_json(value, tags.inner, self._key_schema, self._schema)
            self._text = self._text[place + len(end) :]
            self._step = self._between
            return True
        if self._is_text:
            ends = (end, "\n" + end) if tags.has_lines else (end,)
            place = len(self._text) - overlap(self._text, ends)  # this may be the start of the closing tag
            self._json += _escaped(self._text[:place])
            self._text = self._text[place:]
        return self._wait()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class TaggedFormat(CallFormat):
    """Arguments between ``text_tags``; ``around``: these as a grammar writes them."""

    text_tags: ClassVar[Tags]
    around: ClassVar[tuple[str, str]]

    def arguments(self, schema: Mapping[str, Any]) -> ArgumentReader:
        return TaggedArguments(self.text_tags, schema)

    def write_arguments(self, rules: GrammarBuilder, function: Function) -> str:
        return each_property(rules, function, self.around)


TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


class Qwen3Coder(TaggedFormat):
    name = "qwen3_coder"
    marks = (TOOL_CALL, "<function=")  # it sometimes omits the first
    tags = (TOOL_CALL, TOOL_CALL_END)
    text_tags = Tags(
        key_start="<parameter=", key_end=">", value_start="", value_end="</parameter>", end="</function>",
        other_end=TOOL_CALL_END, has_lines=True,
    )  # fmt: skip
    around = ("<parameter={key}>\n", "\n</parameter>\n")
    call_head, call_tail = f"{TOOL_CALL}\n<function=%s>\n", f"</function>\n{TOOL_CALL_END}"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, 0, TOOL_CALL) if next_is(text, 0, TOOL_CALL) else 0
        name, place = bare_name(text, expect(text, place, "<function="), names)
        return Head(name, expect(text, place, ">"), (TOOL_CALL_END,))


class Glm45(TaggedFormat):
    name = "glm45"
    marks = (TOOL_CALL,)
    tags = (TOOL_CALL, TOOL_CALL_END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    text_tags = Tags(
        key_start="<arg_key>",
        key_end="</arg_key>",
        value_start="<arg_value>",
        value_end="</arg_value>",
        end=TOOL_CALL_END,
    )
    around = ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n")
    call_head, call_tail = f"{TOOL_CALL}%s\n", TOOL_CALL_END

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        name, place = bare_name(text, expect(text, 0, TOOL_CALL), names)
        if not next_is(text, place, "<arg_key>"):
            expect(text, place, TOOL_CALL_END)
        return Head(name, place)


class Glm47(Glm45):
    name = "glm47"
    between = ""
    around = ("<arg_key>{key}</arg_key><arg_value>", "</arg_value>")
    call_head = f"{TOOL_CALL}%s"


MINIMAX_SECTION, MINIMAX_SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"


class MiniMaxM2(TaggedFormat):
    """One section may have several calls."""

    name = "minimax_m2"
    marks = (MINIMAX_SECTION,)
    tags = (MINIMAX_SECTION, MINIMAX_SECTION_END)
    before, after = f"{MINIMAX_SECTION}\n", f"\n{MINIMAX_SECTION_END}"
    text_tags = Tags(
        key_start='<parameter name="', key_end='">', value_start="", value_end="</parameter>", end="</invoke>",
        other_end=MINIMAX_SECTION_END,
    )  # fmt: skip
    around = ('<parameter name="{key}">', "</parameter>\n")
    call_head, call_tail = '<invoke name="%s">\n', "</invoke>"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = option(text, 0, MINIMAX_SECTION)
        name, place = bare_name(text, expect(text, place, "<invoke", 'name="'), names)
        return Head(name, expect(text, place, '"', ">"), (MINIMAX_SECTION_END,))


M3 = "]<]minimax[>["  # before every tag


class MiniMaxM3(TaggedFormat):
    """Parameters are named by their tags, and objects and lists may be tags again; a grammar writes those as JSON."""

    name = "minimax_m3"
    marks = (M3,)
    tags = (M3, TOOL_CALL, TOOL_CALL_END)
    before, after = f"{M3}{TOOL_CALL}\n", f"\n{M3}{TOOL_CALL_END}"
    text_tags = Tags(
        key_start=f"{M3}<", key_end=">", value_start="", value_end=f"{M3}</{{key}}>", end=f"{M3}</invoke>",
        other_end=f"{M3}{TOOL_CALL_END}", inner=re.compile(re.escape(M3) + "<(/?)([^<>]*)>"),
    )  # fmt: skip
    around = (f"{M3}<{{key}}>", f"{M3}</{{key}}>")
    call_head, call_tail = f'{M3}<invoke name="%s">', f"{M3}</invoke>"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = option(text, 0, f"{M3}{TOOL_CALL}")
        name, place = bare_name(text, expect(text, place, f"{M3}<invoke", 'name="'), names)
        return Head(name, expect(text, place, '"', ">"), (f"{M3}{TOOL_CALL_END}",))


# A grammar makes a model write the arguments as JSON, which is read too.
GEMMA_CALL, GEMMA_CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


class QuotedArguments:
    """An object whose texts are between ``QUOTE`` tokens and have no escapes; the rest is read as ``JsonArguments``."""

    def __init__(self) -> None:
        self._inner = JsonArguments()
        self._json = ""  # not consumed by it yet
        self._is_text = False
        self.is_closed = False

    def read(self, text: str, *, is_over: bool) -> tuple[int, str]:
        place, pieces = 0, []
        while place < len(text) and not self.is_closed:
            if text.startswith(QUOTE, place):
                end, piece = place + len(QUOTE), '"'
                self._is_text = not self._is_text
            elif QUOTE.startswith(text[place:]):
                place = len(text) if is_over else place  # a token that is cut
                break
            elif self._is_text:
                found = text.find(QUOTE[0], place + 1)
                end = len(text) if found < 0 else found
                piece = json.dumps(text[place:end], ensure_ascii=False)[1:-1]
            else:
                end, piece = place + 1, text[place]
            place = end
            self._json += piece
            consumed, made = self._inner.read(self._json, is_over=False)
            self._json = self._json[consumed:]
            pieces.append(made)
            self.is_closed = self._inner.is_closed
        return place, "".join(pieces)


class Gemma4(CallFormat):
    name = "gemma4"
    marks = (GEMMA_CALL,)
    tags = (GEMMA_CALL, GEMMA_CALL_END, QUOTE)
    between = ""
    call_head, call_tail = f"{GEMMA_CALL}call:%s", GEMMA_CALL_END

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        name, end = bare_name(text, expect(text, 0, GEMMA_CALL, "call:"), names)
        return Head(name, expect(text, end, "{") - 1, (GEMMA_CALL_END,))

    def arguments(self, schema: Mapping[str, Any]) -> ArgumentReader:
        return QuotedArguments()


class Harmony(CallFormat):
    name = "harmony"
    marks = (CALL_MARK,)
    tags = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)
    between = ""
    answer_head = f"{CHANNEL}final{MESSAGE}"
    call_head = f"{CALL_MARK}%s {CONSTRAIN}json{MESSAGE}"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        name, end = bare_name(text, expect(text, 0, CALL_MARK), names)
        end = option(text, option(text, end, CONSTRAIN), "json")
        return Head(name, expect(text, end, MESSAGE, "{") - 1, (CALL,))


FORMATS: dict[str, CallFormat] = {
    call_format.name: call_format
    for call_format in (
        Hermes(), Llama3(), Llama4Pythonic(), Qwen3Coder(), Glm45(), Glm47(), DeepSeekV3(), DeepSeekV31(), KimiK2(),
        Mistral(), Harmony(), MiniMaxM2(), MiniMaxM3(), Cohere(), Nemotron(), Gemma4(),
    )
}  # fmt: skip

# Texts by which a chat template is recognized: the first format whose texts it all contains.
_TEMPLATE_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("minimax_m3", (M3,)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("gemma4", ("<|tool_call>", "call:")),
    ("glm45", ("<arg_key>", "<arg_value>", "</arg_key>\\n<arg_value>")),
    ("glm45", ("<arg_key>", "<arg_value>", "</arg_key>\n<arg_value>")),
    ("glm47", ("<arg_key>", "<arg_value>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("llama4_pythonic", ("func_name1(",)),  # as Meta's prompts for this format have it, for 3.2 and 4
    ("llama3_json", ('"parameters"', "ipython")),  # Llama's role of tool results; Llama 4's own template, too
    ("llama4_pythonic", ("<|python_start|>",)),
)


def choose_format(wanted: str, chat_template: str) -> CallFormat | None:
    """The format to read; ``auto`` goes by the chat template, ``none`` parses none.

    ``wanted`` is one of ``TOOL_PARSERS`` (``server/options.py``), which holds these names, ``auto`` and ``none``.
    """
    if wanted != "auto":
        return FORMATS.get(wanted)
    found = (name for name, texts in _TEMPLATE_TEXTS if all(text in chat_template for text in texts))
    return FORMATS.get(next(found, ""))
