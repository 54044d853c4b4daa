"""The tokenizer as the server uses it: text to token ids off the event loop, and single tokens back to text and bytes.

A prompt of a million tokens must not stop other streams, so ``Prompts`` tokenizes on threads, each with its own copy of
the tokenizer, because fast tokenizers refuse to be used and reconfigured at once. Requests cannot bring templates;
``models/chat_template.py`` renders the model's, within limits."""

from __future__ import annotations

import asyncio
import codecs
import copy
import inspect
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from snapstream.models.chat_template import render_chat
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.openai.answer_reader import effort_arguments
from snapstream.server.openai.protocol import TemplateOptions, parse_arguments, too_long, too_many_chars
from snapstream.server.openai.tools import template_tools
from snapstream.spec_prefill.protection import Span, merged
from snapstream.types import as_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PASSED_TEXTS = ("name", "tool_call_id", "reasoning_content")  # besides role, content and tool_calls


UNTRUSTED = ("user", "tool")  # roles whose texts come from anywhere
_BEGIN, _END = "\ue000", "\ue001"  # around a random number, so that a mark cannot be forged

Message = dict[str, Any]


class SpelledSpecialTokens:
    """Keeps special tokens that users spell out (``<|im_end|>``) text, so that a message cannot close its own turn.

    A tokenizer cannot distinguish what a template wrote from what a user wrote. So spellings in messages of untrusted
    roles are marked before the template is rendered, and the marks are removed from the rendered text. Where the
    tokenizer then makes a special token within a marked span, its characters are tokenized in parts instead. Added
    tokens in angle brackets count as special: they steer a model as well. Invariant: all other tokens are those of a
    conversation without such spellings.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = {
            index: token for index, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }  # fmt: skip
        self._ids = frozenset(added)
        self._patterns = _patterns(token.content for token in added.values())
        # A normalized token also has other spellings, which only the tokenizer knows.
        self._has_others = any(token.normalized for token in added.values())

    def mark(self, tokenizer: Any, messages: Sequence[Message]) -> tuple[list[Message], Marks | None]:
        """The messages with marks; None if there is nothing to mark. 400 if this tokenizer has no offsets of tokens."""
        spans = [self._spans(tokenizer, one["content"]) if one["role"] in UNTRUSTED else [] for one in messages]
        if not any(spans):
            return list(messages), None
        if not tokenizer.is_fast:
            raise bad_value(
                "messages contain the text of special tokens, which this model's tokenizer cannot encode as text",
                "messages",
            )
        marks = Marks(self._ids)
        return [
            {**one, "content": marks.put(one["content"], own)} if own else one
            for one, own in zip(messages, spans, strict=True)
        ], marks

    def _spans(self, tokenizer: Any, text: str) -> list[Span]:
        if self._has_others and tokenizer.is_fast:
            return [span for token, span in _tokens(tokenizer, text) if token in self._ids]
        return merged(found.span() for one in self._patterns for found in one.finditer(text))


def _patterns(spellings: Iterable[str]) -> list[re.Pattern[str]]:
    """One pattern per first two characters: a search for a fixed prefix is a thousand times faster."""
    groups: dict[str, list[str]] = {}
    for one in sorted(filter(None, spellings), key=len, reverse=True):
        groups.setdefault(one[:2], []).append(one[2:])
    return [re.compile(f"{re.escape(start)}(?:{'|'.join(map(re.escape, rests))})") for start, rests in groups.items()]


class Marks:
    def __init__(self, special: frozenset[int]) -> None:
        self._special = special
        number = secrets.token_hex(8)
        self._begin, self._end = f"{_BEGIN}{number}{_BEGIN}", f"{_END}{number}{_END}"
        self._either = re.compile(f"{self._begin}|{self._end}")
        self._spans: list[Span] = []
        self._longest = 0  # characters of a marked span

    def put(self, text: str, spans: Sequence[Span]) -> str:
        """``text`` with these spans marked."""
        parts, place = [], 0
        for begin, end in spans:
            parts += [text[place:begin], self._begin, text[begin:end], self._end]
            place = end
            self._longest = max(self._longest, end - begin)
        return "".join([*parts, text[place:]])

    def take(self, text: str) -> str:
        """The text without the marks that a template left in it."""
        parts: list[str] = []
        place = size = begin = 0
        is_inside = False
        for found in self._either.finditer(text):
            parts.append(text[place : found.start()])
            size += found.start() - place
            place = found.end()
            if is_inside:  # also if the template truncated the other mark
                self._spans.append((begin, min(size, begin + self._longest)))
            is_inside, begin = found[0] == self._begin, size
        parts.append(text[place:])
        if is_inside:
            self._spans.append((begin, min(size + len(parts[-1]), begin + self._longest)))
        return "".join(parts)

    def encode(self, tokenizer: Any, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The tokens of what ``take`` returned, with no special ones from marked spans."""
        ids: list[int] = []
        spans = iter(self._spans)
        span = next(spans, None)
        for token, (begin, end) in _tokens(tokenizer, text, add_special_tokens=add_special_tokens):
            while span is not None and span[1] <= begin:
                span = next(spans, None)
            if token in self._special and begin < end and span is not None and span[0] < end:
                ids += self._as_text(tokenizer, text[begin:end])
            else:
                ids.append(token)
        return tuple(ids)

    def _as_text(self, tokenizer: Any, spelling: str) -> list[int]:
        """The coarsest split of a spelling whose parts are no special tokens."""
        middle = spelling.find("<") + 1 or 1
        ids: list[int] = []
        for parts in ([spelling[:middle], spelling[middle:]], list(spelling)):
            ids = [token for part in parts if part for token in _within(tokenizer, part)]
            if not self._special & set(ids):
                return ids
        raise bad_value(
            f"messages contain the text of the special token {spelling!r}, which no other tokens can encode", "messages"
        )


def _within(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Tokens of a text within another one: some tokenizers add a space before their input."""
    before, both = (_encode(tokenizer, one, False) for one in ("\n", "\n" + text))
    return both[len(before) :] if both[: len(before)] == before else _encode(tokenizer, text, False)


def _tokens(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[tuple[int, Span]]:
    """Each token with its span of characters."""
    found = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    return list(zip(found["input_ids"], found["offset_mapping"], strict=True))


T = TypeVar("T")

ENDING_CHARS = 64
PROMPT_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    ids: tuple[int, ...]
    ending: str  # the last characters of its text, where templates may open or close reasoning
    prefix: str | None = None  # of the answer, where it is continued


class Prompts:
    """The tokenizer as the server uses it. ``tokenizer`` may be None: then only token ids are taken."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, threads: int, trusts_users: bool = False) -> None:
        """``trusts_users``: special tokens that they spell out become special tokens."""
        self.tokenizer = tokenizer
        self._spelled = None if tokenizer is None or trusts_users else SpelledSpecialTokens(tokenizer)
        # A text with more characters per token of max_model_len cannot fit, so it need not be tokenized.
        self._longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def offload(self, work: Callable[[], T]) -> T:
        """Run slow work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def encode(
        self, text: str, max_len: int, *, add_special_tokens: bool, param: str = "prompt"
    ) -> tuple[int, ...]:
        """400 for a text that certainly has more than ``max_len`` tokens."""
        self._need()
        self._check_chars(text, max_len, param)
        return await self.with_tokenizer(lambda tok: _encode(tok, text, add_special_tokens))

    def _check_chars(self, text: str, max_len: int, param: str) -> None:
        if len(text) > max_len * self._longest:
            raise too_many_chars(len(text), self._longest, max_len, param)

    async def decode(self, ids: Sequence[int]) -> str:
        size = len(self._need())
        for token in ids:
            if not 0 <= token < size:
                raise bad_value(f"token id {token} is outside the vocabulary (0 to {size - 1})", "tokens")
        return await self.with_tokenizer(lambda tok: str(tok.decode(list(ids), skip_special_tokens=False)))

    async def echo(self, text: str | None, ids: tuple[int, ...]) -> str:
        """The prompt's text, as echoed before the answer."""
        return text if text is not None else await self.with_tokenizer(lambda tok: str(tok.decode(list(ids))))

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        return await self.with_tokenizer(lambda tok: [str(piece) for piece in tok.convert_ids_to_tokens(list(ids))])

    async def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template takes them; 400 for malformed ones."""
        return await self.with_tokenizer(lambda tok: _normalized(tok, messages))

    async def chat(self, options: TemplateOptions, max_len: int, *, has_tools: bool = True) -> ChatPrompt:
        """A conversation as token ids, ready for the answer."""
        text, prefix, marks = await self.with_tokenizer(lambda tok: _render(tok, options, has_tools, self._spelled))
        has_special = options.add_special_tokens is True
        if marks is None:
            ids = await self.encode(text, max_len, add_special_tokens=has_special, param="messages")
        else:
            self._check_chars(text, max_len, "messages")
            ids = await self.with_tokenizer(lambda tok: marks.encode(tok, text, add_special_tokens=has_special))
        return ChatPrompt(ids, text[-ENDING_CHARS:], prefix)

    async def completion(
        self, prompts: Sequence[Any], max_len: int, *, add_special_tokens: bool
    ) -> list[tuple[str | None, tuple[int, ...]]]:
        """(text if there was one, ids) of every prompt of ``as_prompts``."""
        return [
            (item, await self.encode(item, max_len, add_special_tokens=add_special_tokens))
            if isinstance(item, str)
            else (None, tuple(item))
            for item in prompts
        ]

    def _need(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise bad_value("this checkpoint has no tokenizer; send token ids", "prompt")
        return self.tokenizer

    async def with_tokenizer(self, work: Callable[[Any], T]) -> T:
        """Run slow work with a tokenizer off the event loop; 400 if there is none."""
        self._need()
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(self._own()))

    def _own(self) -> PreTrainedTokenizerBase:
        if not hasattr(self._local, "tokenizer"):
            self._local.tokenizer = copy.deepcopy(self.tokenizer)
        own: PreTrainedTokenizerBase = self._local.tokenizer
        return own


def _encode(tokenizer: Any, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    # verbose=False: no warning about the length, which is checked against our own limit.
    return tuple(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def _render(
    tokenizer: Any, options: TemplateOptions, has_tools: bool, spelled: SpelledSpecialTokens | None
) -> tuple[str, str | None, Marks | None]:
    """The text of a conversation, the prefix of an answer that is continued, and the marks in the text."""
    if tokenizer.chat_template is None:
        raise bad_value("this checkpoint has no chat template; use /v1/completions", "messages")
    is_continued = bool(options.continue_final_message)
    if is_continued and options.add_generation_prompt:
        raise bad_value(
            "continue_final_message and add_generation_prompt are mutually exclusive", "continue_final_message"
        )
    effort = effort_arguments(str(tokenizer.chat_template), options.reasoning_effort)
    extra = {**effort, **_template_arguments(tokenizer, options.chat_template_kwargs or {})}
    messages = _normalized(tokenizer, options.messages)
    prefix = messages[-1]["content"] if is_continued else None
    marks = None
    if spelled is not None:
        messages, marks = spelled.mark(tokenizer, messages)
    try:
        text = render_chat(
            tokenizer,
            messages,
            tools=template_tools(options.tools) if has_tools else None,
            add_generation_prompt=not is_continued and options.add_generation_prompt is not False,
            continue_final_message=is_continued,
            **extra,
        )
    except Exception as error:  # a template may fail in any way on what a client sent
        lines = str(error).splitlines() or [type(error).__name__]
        raise bad_value(f"the chat template cannot render these messages: {lines[0]}", "messages") from None
    return text if marks is None else marks.take(text), prefix, marks


def _normalized(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them, by the rules of ``LLM.chat``; 400 for a malformed one."""
    if not messages:
        raise bad_value("messages is empty; it needs at least one message", "messages")
    template = str(tokenizer.chat_template)
    try:
        conversation = as_conversation(messages, has_developer="developer" in template, parse=parse_arguments)
    except ValueError as error:
        raise bad_value(str(error), "messages") from None
    for index, message in enumerate(messages):
        if message.get("audio") is not None:
            raise bad_value(
                f"messages[{index}].audio refers to a stored answer; this server stores no audio", "messages"
            )
    found = [
        {
            name: value
            for name, value in message.items()
            if name in ("role", "content", "tool_calls") or (name in PASSED_TEXTS and isinstance(value, str))
        }
        for message in conversation
    ]
    if "reasoning_content" in template or ".thinking" not in template:
        return found
    for message in found:  # gpt-oss refuses it next to content, which is then the reasoning
        reasoning = message.pop("reasoning_content", None)
        if reasoning and not message.get("content"):
            message["thinking"] = reasoning
    return found


def _template_arguments(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Variables for the template; 400 for parameters of transformers itself, above all chat_template."""
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages", "add_special_tokens"}
    taken = sorted(own & given.keys())
    if taken:
        raise bad_value(f"chat_template_kwargs may not set {', '.join(taken)}", "chat_template_kwargs")
    return given


def as_prompts(prompt: object, limit: int, max_len: int) -> list[Any]:
    """The four forms of ``prompt`` as a list of prompts; lengths are checked before lists are iterated."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt()
    if type(prompt[0]) is int:
        return [_ids(prompt, max_len)]
    if len(prompt) > limit:
        raise bad_value(f"{len(prompt)} prompts given; the limit is {limit}", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    return [_ids(item, max_len) for item in prompt]


def _ids(item: object, max_len: int) -> list[int]:
    if not isinstance(item, list) or not item:
        raise _bad_prompt()
    if len(item) > max_len:
        raise too_long(len(item), None, max_len, "prompt")
    if not all(type(token) is int for token in item):
        raise _bad_prompt()
    return item


def _bad_prompt() -> ApiError:
    return bad_value(f"prompt must be {PROMPT_FORMS}, and not empty", "prompt")


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte fallback of SentencePiece vocabularies


class TokenText:
    """Text and bytes of single tokens; safe to use from the event loop (it only looks up)."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {}
        self._special: frozenset[int] = frozenset()
        self._bytes: dict[str, int] = {}  # by their characters, of byte-level BPE
        if tokenizer is not None:
            self._added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
            self._special = frozenset(tokenizer.all_special_ids)
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if backend is not None and "ByteLevel" in str(backend.decoder):
                from transformers.convert_slow_tokenizer import bytes_to_unicode

                self._bytes = {char: byte for byte, char in bytes_to_unicode().items()}

    @property
    def special(self) -> frozenset[str]:
        return frozenset(self._added[token] for token in self._special if token in self._added)

    @property
    def symbols(self) -> dict[str, int]:
        """Ids of added tokens, by their text, that a grammar must name by id: llguidance does not match their text."""
        return {
            text: token
            for token, text in self._added.items()
            if token in self._special or (text.startswith("<") and text.endswith(">"))
        }

    def id_of(self, text: str) -> int | None:
        """The added token with this text; None if there is none."""
        return next((token for token, added in self._added.items() if added == text), None)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def raw(self, token: int) -> bytes:
        """The bytes that this token stands for."""
        if self._tokenizer is None:
            return b""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # an id of the padded part of the vocabulary
            return b""
        if self._bytes:
            if all(char in self._bytes for char in piece):
                return bytes(self._bytes[char] for char in piece)
        elif match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("\u2581", " ").encode()  # SentencePiece's space

    def text(self, token: int) -> str:
        """The token's text; distinct tokens of half characters stay distinct."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """What each token adds to the text: a character of several tokens comes with the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self.raw(token)) for token in tokens]


class Offsets:
    """Where each token starts in its text, in characters; parts of a character count as that character."""

    def __init__(self, start: int = 0) -> None:
        self.num_chars = start

    def push(self, raw: bytes) -> int:
        is_inside = bool(raw) and raw[0] & 0xC0 == 0x80  # UTF-8 continuation byte
        offset = self.num_chars - is_inside
        self.num_chars += sum(byte & 0xC0 != 0x80 for byte in raw)
        return offset
