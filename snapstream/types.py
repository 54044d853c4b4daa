"""Requests, sampling parameters and outputs: plain data, no torch. Also checks of what callers pass in.

Prompts, parameters and conversations are normalized by the same functions for ``LLM``, the server and code that counts
a prompt's tokens. Nothing is guessed: wrong input is a ValueError that quotes it. Limits that depend on the model are
in ``engine/validate.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self, get_args

from snapstream.config import InvalidValue, KVBudget, Selector, as_count, as_number, as_token_ids, plain
from snapstream.config.values import check_choice

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 32
MAX_END_TOKEN_IDS = 16  # of a checkpoint
NUM_STOP_IDS = MAX_STOP_TOKEN_IDS + MAX_END_TOKEN_IDS
MAX_LOGPROBS = 20
SEEDS = (-(2**63), 2**63 - 1)
MAX_SAMPLES = 128
MAX_LOGIT_BIAS = 1024  # tokens
MAX_BIAS = 100.0  # of one token
MAX_GRAMMAR_CHARS = 2**18

GrammarKind = Literal["json_schema", "regex", "lark"]

# Ranges of the numeric sampling parameters; top_p excludes 0.
COUNTS: tuple[tuple[str, int, int | None], ...] = (
    ("n", 1, MAX_SAMPLES), ("max_tokens", 1, None), ("min_tokens", 0, None), ("top_k", -1, None),
)  # fmt: skip
NUMBERS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0), ("repetition_penalty", 0.01, 100.0),
)  # fmt: skip


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    values = plain(values)
    if values is not None and not is_list(values):
        raise InvalidValue(f"{name} is {values!r}; it must be a list", name)
    return tuple(values or ())


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A constraint on the text of an answer, made by one of the class methods; ``grammar.py`` compiles it.

    The sample ends when its text is complete and nothing can follow; end tokens are sampled only where the text is
    complete. ValueError for a text of more than ``MAX_GRAMMAR_CHARS``.
    """

    kind: GrammarKind
    text: str  # a JSON schema as JSON, a regular expression, or a Lark grammar in llguidance's dialect
    # Of a schema: refuse what cannot be enforced. Otherwise unknown keywords are ignored, and oneOf means anyOf.
    strict: bool = True
    # Lark rules of a text that precedes the answer, such as reasoning; its rule is ``preface``. Empty: none.
    preface: str = ""

    def __post_init__(self) -> None:
        check_choice("grammar kind", self.kind, get_args(GrammarKind))
        if not isinstance(self.text, str) or not self.text or len(self.text) > MAX_GRAMMAR_CHARS:
            what = f"has {len(self.text)} characters" if isinstance(self.text, str) else f"is {self.text!r}"
            raise ValueError(f"grammar text {what}; it must be a string of 1 to {MAX_GRAMMAR_CHARS} characters")

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls(kind="json_schema", text='{"type": "object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, strict: bool = True) -> Self:
        """JSON that matches a schema (a mapping, or JSON); properties are in the schema's order."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"grammar: the schema is not plain JSON: {error}") from None
        return cls(kind="json_schema", text=text, strict=strict)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that a regular expression matches as a whole (no look-around, no backreferences)."""
        return cls(kind="regex", text=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """One of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"choice is {texts!r}; it must be a list of texts, and not empty")
        return cls(kind="lark", text="start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts)))

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """A context-free grammar with the start rule ``start``; or GBNF, with ``root``."""
        return cls(kind="lark", text=grammar)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled and when a sample ends. Names and ranges follow the OpenAI API and vLLM."""

    n: int = 1  # samples of one prompt: one prefill, n rows
    max_tokens: int = 256
    min_tokens: int = 0  # no end token or stop id before this many output tokens
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 (or -1) means off
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest
    presence_penalty: float = 0.0  # subtracted once from every token of the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    repetition_penalty: float = 1.0  # divides (multiplies) positive (negative) logits of prompt and output tokens
    logit_bias: Mapping[int, float] | None = None  # token id -> value added to its logit
    seed: int | None = None  # same seed, same output, in any batch
    stop: Sequence[str] = ()  # a str is one stop string
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    logprobs: int | None = None  # per output token: its log-probability and those of this many top tokens
    prompt_logprobs: int | None = None  # the same for every prompt token, from the uncompressed prefill
    grammar: Grammar | None = None  # takes precedence over min_tokens and ignore_eos
    # Report the prompt tokens that each row kept: True as Compression.kept_positions, "bitmap" as kept_bitmap.
    return_kept: bool | Literal["bitmap"] = False
    prediction: Sequence[int] = ()  # token ids that the answer may repeat: drafts come from them, too

    def __post_init__(self) -> None:
        for name, low, high in COUNTS:
            self._set(name, as_count(name, getattr(self, name), low, high))
        as_count("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, least, most in NUMBERS:
            self._set(name, as_number(name, getattr(self, name), least, most))
        if self.top_p == 0.0:
            raise InvalidValue("top_p is 0; it must be a number in (0, 1]", "top_p")
        self._set("top_k", max(self.top_k, 0))
        for name, lowest, highest in (("seed", *SEEDS), ("logprobs", 0, MAX_LOGPROBS),
                                      ("prompt_logprobs", 0, MAX_LOGPROBS)):  # fmt: skip
            if getattr(self, name) is not None:
                self._set(name, as_count(name, getattr(self, name), lowest, highest))
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValue(f"{name} is {getattr(self, name)!r}; it must be True or False", name)
        if not isinstance(self.return_kept, bool) and self.return_kept != "bitmap":
            raise InvalidValue(
                f"return_kept is {self.return_kept!r}; it must be True, False or 'bitmap'", "return_kept"
            )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidValue(
                f"grammar is {self.grammar!r}; it must be a Grammar, e.g. Grammar.json_schema({{...}})", "grammar"
            )
        self._check_stops()
        self._check_bias()
        predicted = _as_tuple("prediction", self.prediction)
        self._set("prediction", tuple(as_count("prediction token id", own, 0, field="prediction") for own in predicted))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidValue(f"{len(stop)} stop strings given; the limit is {MAX_STOP_STRINGS}", "stop")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidValue(f"stop string {text!r} is not a non-empty string", "stop")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            message = f"{len(ids)} stop token ids given; the limit is {MAX_STOP_TOKEN_IDS}"
            raise InvalidValue(message, "stop_token_ids")
        self._set("stop", stop)
        checked = tuple(as_count("stop token id", token, 0, field="stop_token_ids") for token in ids)
        self._set("stop_token_ids", checked)

    def _check_bias(self) -> None:
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise InvalidValue(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers", "logit_bias")
        if not self.logit_bias:
            self._set("logit_bias", None)
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            message = f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}"
            raise InvalidValue(message, "logit_bias")
        bias = {
            as_count("logit_bias token id", token, 0, field="logit_bias"): as_number(
                f"logit_bias of token {token}", value, -MAX_BIAS, MAX_BIAS, field="logit_bias"
            )
            for token, value in self.logit_bias.items()
        }
        self._set("logit_bias", bias)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class QueueFull(RuntimeError):
    """Too many requests are queued; the caller may try again later."""


class FinishReason(StrEnum):
    """Values are those of the OpenAI API, if it has one."""

    STOP = "stop"  # end token, stop id or stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # logits not finite, or the grammar cannot be completed; see ``stop_reason``


NOT_FINITE = "logits are not finite"  # stop_reason of an ERROR: the model computed NaN or infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionSummary:
    """Prompt compression of a prompt. Tokens are the target's, if its tokenizer is known."""

    tokens_before: int
    tokens_after: int
    draft_ms: float = 0.0  # prefill and scoring; 0 if everything was cached
    reason: str = ""  # why the prompt was not compressed; empty if it was
    num_cached: int = 0  # texts whose scores came from the draft's cache

    @property
    def is_applied(self) -> bool:
        return not self.reason

    @property
    def dropped_tokens(self) -> int:
        return self.tokens_before - self.tokens_after

    @property
    def ratio(self) -> float:
        """Tokens after over tokens before."""
        return self.tokens_after / self.tokens_before if self.tokens_before else 1.0

    def summary(self, num_tokens: int | None = None) -> CompressionSummary:
        """A copy of the counts; with ``num_tokens`` tokens left, if given."""
        left = self.tokens_after if num_tokens is None else num_tokens
        return CompressionSummary(
            tokens_before=left + self.dropped_tokens,
            tokens_after=left,
            draft_ms=self.draft_ms,
            reason=self.reason,
            num_cached=self.num_cached,
        )

    @classmethod
    def total(cls, parts: Sequence[CompressionSummary]) -> CompressionSummary:
        """Of several prompts; applied if one was compressed."""
        return CompressionSummary(
            tokens_before=sum(part.tokens_before for part in parts),
            tokens_after=sum(part.tokens_after for part in parts),
            draft_ms=sum(part.draft_ms for part in parts),
            reason="" if any(part.is_applied for part in parts) else parts[0].reason,
            num_cached=sum(part.num_cached for part in parts),
        )

    def as_json(self) -> dict[str, Any]:
        """As in HTTP responses and headers."""
        data: dict[str, Any] = {
            "applied": self.is_applied,
            "tokens_before": self.tokens_before,
            "tokens_after": self.tokens_after,
            "draft_ms": round(self.draft_ms, 3),
            "num_cached": self.num_cached,
        }
        return data if self.is_applied else {**data, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token under the model, before temperature, penalties and bias."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBitmap:
    """One bit per layer, kv head and prompt token: 1 if the row kept it.

    Token t of a head is bit t % 8, least significant first, of its byte t // 8. Heads follow each other, those of layer
    0 first, each at a byte boundary: ``bits`` has L x G x ceil(N / 8) bytes.
    """

    num_layers: int
    num_kv_heads: int
    num_tokens: int
    bits: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """What the row kept of a prompt; counts are per layer and kv head."""

    prompt_tokens: int
    kept_tokens: int
    evicted_tokens: int
    row_bytes: int  # K and V of one row, all layers, at the request's capacity
    full_bytes: int  # of a full cache of this prompt
    compress_ms: float  # scoring, selection and writing of the row, all layers
    ring_tokens: int  # slots of the ring after prefill, which the end of the prompt and the answer share
    # Selected prompt positions by layer and kv head, ascending; None unless requested and something was evicted. With
    # per-head budgets lengths differ; a head that holds the whole prompt lists all but sinks and the num_recent last.
    kept_positions: tuple[tuple[tuple[int, ...], ...], ...] | None = None  # [L][G][K]
    kept_bitmap: KeptBitmap | None = None  # all kept tokens; under the same conditions


@dataclass(slots=True)
class Timings:
    """Wall-clock milliseconds of a request, so far, and its drafted tokens."""

    queue_ms: float = 0.0  # arrival to first prefill unit
    prefill_ms: float = 0.0  # first unit to first token
    first_token_ms: float = 0.0  # arrival to first token (queue + prefill)
    decode_ms: float = 0.0  # first token to last
    total_ms: float = 0.0
    per_token_ms: float = 0.0  # decode_ms per output token after the first, of the longest sample
    drafted_tokens: int = 0  # by speculative decoding, of all samples
    accepted_tokens: int = 0  # of those, tokens of the answer


@dataclass(slots=True)
class _SampleFields:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string, or the reason of an error


class SampleOutput(_SampleFields):
    """One of the ``n`` samples of a request. ``text`` and ``token_ids`` only grow.

    Text is stored in pieces, so that a token does not copy the whole answer; reading ``text`` joins the new ones.
    """

    __slots__ = ("_joined", "_pieces")
    _pieces: list[str]
    _joined: tuple[int, str]  # number of joined pieces, and their text

    @property
    def text(self) -> str:
        count, text = self._joined
        num_pieces = len(self._pieces)  # another thread may append meanwhile
        if count < num_pieces:
            text += "".join(self._pieces[count:num_pieces])
            self._joined = (num_pieces, text)
        return text

    @text.setter
    def text(self, text: str) -> None:
        self._pieces = [text] if text else []
        self._joined = (len(self._pieces), text)

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def add_text(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)

    def text_since(self, num_pieces: int) -> str:
        """The text after the first ``num_pieces`` pieces."""
        return "".join(self._pieces[num_pieces:])


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """Prefix store use of a prompt."""

    cached_tokens: int = 0  # at its beginning
    # Tokens that it shares with the nearest stored prompt before the two differ; None if they do not.
    diverged_at: int | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer so far; the same object is updated until ``is_finished``."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: list[SampleOutput]
    prompt: str | None = None
    prompt_logprobs: list[Logprob | None] | None = None  # entry 0 is None
    compression: Compression | None = None  # set with the first token
    prompt_compression: CompressionSummary | None = None  # if requested
    prefix: PrefixUse | None = None  # set when prefill starts, if the prompt was looked up in a prefix store
    timings: Timings = field(default_factory=Timings)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the uncompressed prompt."""
        own = self.prompt_compression
        return len(self.prompt_token_ids) if own is None else own.tokens_before

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the prefix store."""
        return 0 if self.prefix is None else self.prefix.cached_tokens

    @property
    def is_finished(self) -> bool:
        return all([sample.finish_reason is not None for sample in self.samples])

    @property
    def has_outgrown_ring(self) -> bool:
        """Whether a sample is longer than its ring: the end of the prompt, usually the question, was then evicted,
        except for tokens that a window region keeps.
        """
        ring = None if self.compression is None else self.compression.ring_tokens
        return ring is not None and any(len(sample.token_ids) > ring for sample in self.samples)

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        """Output token ids of the first sample."""
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> list[Logprob] | None:
        """Log-probabilities of the first sample's tokens, if requested."""
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended; None while it runs."""
        return self.samples[0].finish_reason


KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTicket:
    """A reserved row of an engine, and the address that receives it. Plain data, also as JSON."""

    host: str
    port: int
    key: str = field(repr=False)  # 16 random bytes as hex; a secret, so not logged
    uses_tls: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not 1 <= len(self.host) <= 255:
            raise ValueError(f"the host of a ticket is {self.host!r}; it must be a name or an address")
        if not isinstance(self.port, int) or not 1 <= self.port <= 65535:
            raise ValueError(f"the port of a ticket is {self.port!r}; it must be a number from 1 to 65535")
        if not isinstance(self.key, str) or not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", self.key):
            raise ValueError(f"the key of a ticket must be {KEY_BYTES} bytes in hexadecimal")
        if not isinstance(self.uses_tls, bool):
            raise ValueError(f"uses_tls of a ticket is {self.uses_tls!r}; it must be true or false")


MAX_PRIORITY = 100


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and its options."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    budget: KVBudget | None = None  # None means the engine's own
    selector: Selector | None = None  # None means the engine's own
    prompt: str | None = None  # source text, if there was one; only echoed
    prompt_compression: CompressionSummary | None = None  # only echoed
    priority: int = 0  # lower is sooner; see ``engine/admission.py``
    namespace: str = ""  # prompts of different namespaces never share a block of the prefix store
    lora: str = ""  # name of the engine's adapter that answers; "": the model alone
    is_prefilled_remotely: bool = False  # another engine prefills the prompt and sends its row
    ticket: RowTicket | None = None  # prefill only: where to send the row; the request ends when it is sent

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the uncompressed prompt."""
        own = self.prompt_compression
        return len(self.prompt_token_ids) if own is None else own.tokens_before

    def new_output(self) -> RequestOutput:
        """The answer before its first token."""
        has_logprobs = self.sampling.logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            samples=[SampleOutput(index, logprobs=[] if has_logprobs else None) for index in range(self.sampling.n)],
            prompt=self.prompt,
            prompt_compression=self.prompt_compression,
        )


ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def as_conversation(
    messages: Sequence[Any], *, has_developer: bool = True, parse: Callable[[str], Any] = json.loads
) -> list[dict[str, Any]]:
    """OpenAI messages as chat templates expect them: known roles, content as one text (parts are joined by newlines),
    arguments of tool calls as objects. Other members are unchanged.

    ``has_developer``: the template supports that role; otherwise it becomes ``system``. ``parse`` reads arguments.
    """
    if not is_list(messages):
        raise ValueError(f"messages is {named(messages)}; it must be a list of messages, each with role and content")
    check_texts("messages", messages)
    return [_as_message(message, f"messages[{index}]", has_developer, parse) for index, message in enumerate(messages)]


def _as_message(message: Any, place: str, has_developer: bool, parse: Callable[[str], Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} is {named(message)}; it must have role and content")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        raise ValueError(f"{place} has the role {role!r}; known roles: {', '.join(ROLES)}")
    if calls and role != "assistant":
        raise ValueError(f"{place}.tool_calls belongs to the assistant, not to {role!r}")
    result = {name: value for name, value in message.items() if name != "tool_calls"}
    result["role"] = "system" if role == "developer" and not has_developer else role
    if content is None and role == "assistant":
        content = message.get("refusal") or ""
    result["content"] = _as_text(content, f"{place}.content", role)
    if calls:
        result["tool_calls"] = _as_tool_calls(calls, f"{place}.tool_calls", parse)
    return result


def _as_text(content: Any, place: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if not is_list(content):
        raise ValueError(f"{place}: the content of a {role} message is {named(content)}; it must be text")
    return "\n".join(_as_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _as_part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in TEXT_PARTS:
        raise ValueError(f"{place} has the type {kind!r}; only text is taken")
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(name), str):
        raise ValueError(f"{place}.{name} is {named(part.get(name))}; it must be text")
    return str(part[name])


def _as_tool_calls(calls: Any, place: str, parse: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Templates expect arguments as an object; the API has JSON text."""
    if not is_list(calls):
        raise ValueError(f"{place} is {named(calls)}; it must be a list")
    return [_as_tool_call(call, f"{place}[{index}]", parse) for index, call in enumerate(calls)]


def _as_tool_call(call: Any, place: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    if isinstance(call, Mapping) and call.get("type") == "custom":
        call = _custom_as_function(call, place)
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place}.function.name is missing")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"{place}.function.arguments is not valid JSON") from None
        check_texts(f"{place}.function.arguments", arguments)  # an escape may have made one
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{place}.function.arguments is {named(arguments)}; it must be a JSON object")
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _custom_as_function(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A call of a custom tool as a function call with the text ``input``, which templates support."""
    custom = call.get("custom")
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        raise ValueError(f"{place}.custom must have a name and an input, both text")
    return {"id": call.get("id", ""), "function": {"name": custom.get("name"), "arguments": {"input": custom["input"]}}}


def as_text(name: str, value: Any) -> str:
    """``value``; TypeError or ValueError unless a tokenizer accepts it."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {named(value)}; it must be text")
    check_texts(name, value)
    return value


def check_texts(name: str, value: Any) -> None:
    """ValueError if a text, at any depth of lists and mappings, has a lone surrogate, which is not Unicode."""
    waiting = [(name, value)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, str):
            _check_text(place, item)
        elif isinstance(item, Mapping):
            waiting += [(f"{place}.{key}", inner) for key, inner in item.items()]
        elif is_list(item):
            waiting += [(f"{place}[{index}]", inner) for index, inner in enumerate(item)]


def _check_text(place: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} holds the lone surrogate {text[error.start]!r} at character {error.start}; it is no valid text"
        ) from None


def is_list(value: Any) -> bool:
    """Whether it is a sequence other than text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def named(value: Any) -> str:
    """Type and the beginning of the value, for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """One prompt or several, as a list: texts, or lists of token ids."""
    prompts = plain(prompts)
    if isinstance(prompts, str):
        return [as_text("prompt", prompts)]
    if is_list(prompts):
        items = [plain(item) for item in prompts]
        if items and not any(isinstance(item, str) or is_list(item) for item in items):
            return [_as_ids(items, "prompt")]
        return [
            as_text(f"prompt {i}", item) if isinstance(item, str) else _as_ids(item, f"prompt {i}")
            for i, item in enumerate(items)
        ]
    raise ValueError(f"prompts is {named(prompts)}; it must be a string, a list of token ids, or a list of these")


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One ``SamplingParams`` for each of ``count`` prompts; None means the defaults."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not is_list(params) or not all(isinstance(item, SamplingParams) for item in params):
        raise ValueError(f"params is {named(params)}; it must be a SamplingParams, or a list with one per prompt")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)


def only(requests: Sequence[Request]) -> Request:
    if len(requests) != 1:
        raise ValueError(f"stream takes one prompt; {len(requests)} were given")
    return requests[0]


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list of lists of messages whose content is text."""
    messages = plain(messages)
    if not is_list(messages) or not messages:
        raise ValueError(f"messages is {named(messages)}; it must be a list of messages, each with role and content")
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    for index, conversation in enumerate(conversations):
        if not is_list(conversation) or not conversation:
            raise ValueError(f"messages[{index}] is {named(conversation)}; it must be a message with role and content")
    return [as_conversation(conversation) for conversation in conversations]


def _as_ids(value: Any, name: str) -> list[int]:
    if not is_list(value):
        raise ValueError(f"{name} is {named(value)}; it must be a string or a list of token ids")
    return as_token_ids(name, value)
