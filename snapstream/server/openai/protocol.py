"""Request bodies, which fields are refused, and what ``/openapi.json`` says about answers.

Bodies are strict: a quoted number, or a boolean for a count, is an error. An unknown field is ignored and logged once;
a known one that would change the result but is not implemented is refused by name. Values that depend on the model
(prompt, budget, sampling limits) are checked in ``prompts.py`` and ``generation.py``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema
from pydantic_core import from_json

from snapstream.config import as_count
from snapstream.server.http.errors import ApiError, ContextLengthError, bad_value
from snapstream.server.http.openapi import COUNT, STRING, STRING_OR_NULL, object_of

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {"anyOf": [_TEXT, *({"type": "array", "items": items, "minItems": 1} for items in (_TEXT, _IDS)), _IDS]}

Refused = dict[str, tuple[Any, ...]]  # field -> values besides null that change nothing
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# Fields, each of one API, that name a conversation stored on the server. Other APIs refuse them: if the field were
# ignored, the model would answer without the conversation.
STATE: Refused = {"previous_response_id": (), "conversation": (), "thread": ()}

REFUSED: Refused = {
    **STATE,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),  # vLLM's; here they come with echo
    "prompt_embeds": (),
    "logits_processors": ([],),
    # Old names of vLLM, which takes structured_outputs now.
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "chat_template": (),
    "documents": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}


class Body(BaseModel):
    refused: ClassVar[Refused] = {}  # fields of requests that are known and not implemented

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KVCacheOptions(Body):
    """Ours: the row of this request. Unknown members are refused: a misspelled one would seem to work."""

    model_config = ConfigDict(extra="forbid")

    budget: int | Literal["full"] | None = None  # slots; None means the server's
    selector: str | None = None  # how its slots are chosen; None means the server's
    return_kept: bool | Literal["bitmap"] = False  # report which prompt tokens each layer and head kept


class SamplingBody(Body):
    """What all APIs have in common: sampling, and the row."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Extras of vLLM that benchmark clients send.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None  # lower is sooner
    cache_salt: str | None = None  # prompts share cached prefixes only with those of the same salt
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's
    # Ours.
    kv_cache: KVCacheOptions | None = None
    prompt_compression: Any = None


class GenerationBody(SamplingBody):
    """What chat and text completions have in common."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # the newer name of max_tokens, which wins
    n: int | None = None
    stream_options: StreamOptions | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def compression_obstacle(self) -> str:
        """Why its prompts cannot be compressed, or nothing."""
        if self.kv_cache is not None and self.kv_cache.return_kept:
            return "return_kept, which reports positions of the prompt as it was sent"
        return ""

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class TemplateOptions(Body):
    """The fields that a rendered conversation depends on."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None  # "none": the prompt does not list the tools
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # templates write them, so the default is no
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None


class PredictionPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """A text that the answer may repeat (predicted outputs)."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(TemplateOptions, GenerationBody):
    """POST /v1/chat/completions"""

    refused = REFUSED | {"echo": (False,), "best_of": (1,)}

    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    refused = REFUSED | {
        "reasoning_effort": (),
        "top_logprobs": (0,),  # here logprobs is their number
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
    }

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @property
    def compression_obstacle(self) -> str:
        if self.echo:
            return "echo, which returns the prompt as it was sent"
        if isinstance(self.prompt, list) and not all(isinstance(item, str) for item in self.prompt):
            return super().compression_obstacle or "a prompt of token ids: the draft needs text"
        return super().compression_obstacle


class TokenizePromptBody(Body):
    """POST /tokenize with a text"""

    refused = CompletionBody.refused

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    return_token_texts: bool | None = None


class TokenizeChatBody(TemplateOptions):
    """POST /tokenize with a conversation"""

    refused = ChatBody.refused

    model: str | None = None
    return_token_strs: bool | None = None
    return_token_texts: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


def too_long(num_prompt: int, max_tokens: int | None, limit: int, param: str) -> ApiError:
    """400 with the code that clients look for to shorten a conversation."""
    output = f" and {max_tokens} tokens of output" if max_tokens else ""
    return ContextLengthError(
        f"This model's maximum context length is {limit} tokens; "
        f"the request has a prompt of {num_prompt} tokens{output}.",
        param,
        prompt_tokens=num_prompt,
        max_tokens=max_tokens,
        limit=limit,
    )


def too_many_chars(num_chars: int, longest: int, limit: int, param: str) -> ApiError:
    """As ``too_long``, for a text too long for any tokenization. ``longest``: characters of the longest token."""
    if param == "prediction":  # a shorter conversation would not help
        most = f"{limit} tokens, which encode at most {limit * longest} characters"
        return bad_value(f"a prediction of {num_chars} characters; the limit is {most}", param)
    return ContextLengthError(
        f"This model's maximum context length is {limit} tokens; "
        f"the prompt has {num_chars} characters, more than that many tokens can encode.",
        param,
        prompt_tokens=-(-num_chars // longest),  # at least
        max_tokens=None,
        limit=limit,
    )


log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
Tools = list[dict[str, Any]]

MAX_LOGGED_FIELDS = 256  # names come from clients: log and memory must be bounded


class IgnoredFields:
    """Logs each unknown field once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: set[str]) -> None:
        for name in sorted(names - self._seen):
            if len(self._seen) < MAX_LOGGED_FIELDS:
                self._seen.add(name)
                log.info("ignoring unknown request field %.64r (logged once)", name)

    def parse(self, kind: type[B], data: Mapping[str, Any], known: Iterable[str] = ()) -> B:
        """``data`` as a body of this kind; its other fields are ignored, and logged but for the ``known``."""
        body = parse(kind, data)
        inner = data.get("stream_options") if issubclass(kind, GenerationBody) else None
        inside = set(inner) - set(StreamOptions.model_fields) if isinstance(inner, Mapping) else set()
        self.note(
            set(data) - {*kind.model_fields, *kind.refused, *known} | {f"stream_options.{name}" for name in inside}
        )
        return body

    def own_tools(self, tools: Tools, is_dropped: Callable[[Mapping[str, Any]], bool]) -> Tools:
        """Without dropped ones, whose types are logged; all of them if none would be left."""
        kept = [tool for tool in tools if not is_dropped(tool)]
        if kept:
            self.note({f"tools[].type {tool.get('type')}" for tool in tools if is_dropped(tool)})
        return kept or tools


def is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    return value is None or any(type(value) is type(one) and value == one for one in harmless)


def parse(kind: type[B], data: Mapping[str, Any]) -> B:
    """400 for the first field that would change the result and is not implemented, or has a wrong type."""
    for name in kind.refused.keys() & data.keys():
        if not is_harmless(data[name], kind.refused[name]):
            raise bad_value(f"{name} {data[name]!r} is not supported by this server", name, "unsupported_parameter")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        raise bad_value(f"{'.'.join(place)}: {first['msg']}", place[0] if place else None) from None


def check_count(name: str, value: int, least: int, most: int | None = None) -> None:
    """400 for a number out of range."""
    try:
        as_count(name, value, least, most)
    except ValueError as error:
        raise bad_value(str(error), name) from None


def bad_part(place: str, message: str) -> ApiError:
    """400 for a part of a body; the field at fault is what ``place`` begins with."""
    return bad_value(f"{place} {message}", re.split(r"\W", place, maxsplit=1)[0])


def parse_arguments(text: str) -> Any:
    """Arguments of a call. Those of one that was cut, as far as they go."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # nothing is missing
            raise
        return from_json(text, allow_partial="trailing-strings")


def string_of(item: Mapping[str, Any], name: str, place: str) -> str:
    """A member of the item at ``place``; 400 unless it is a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_part(f"{place}.{name}", "must be a string")
    return value


def flag_of(item: Mapping[str, Any], name: str, place: str) -> bool:
    """A member of the item at ``place``, false if it has none; 400 unless it is true or false."""
    value = item.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_part(f"{place}.{name}", f"is {value!r}; it must be true or false")
    return value is True


MODEL: Mapping[str, Any] = {
    "id": STRING,
    "object": {"const": "model"},
    "created": COUNT,
    "owned_by": STRING,
    "type": {"const": "model"},
    "display_name": STRING,
    "created_at": STRING,
}
_USAGE = object_of(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    prompt_tokens_details=object_of({"cached_tokens": COUNT}),
)


def completion(kind: str, **choice: Any) -> dict[str, Any]:
    """Members of an answer of that ``object``, whose choices have at least the members ``choice``."""
    members = {"index": COUNT, "finish_reason": STRING, "logprobs": {"type": ["object", "null"]}, **choice}
    return {
        "id": STRING,
        "object": {"const": kind},
        "created": COUNT,
        "model": STRING,
        "system_fingerprint": STRING,
        "choices": {"type": "array", "items": object_of(members)},
        "usage": _USAGE,
        "snapstream": {"type": "object"},
    }


CHAT = completion("chat.completion", message={"type": "object"})
COMPLETION = completion("text_completion", text=STRING)
MODELS = {"object": {"const": "list"}, "data": {"type": "array", "items": {"type": "object", "properties": MODEL}}}
IDS = {"type": "array", "items": COUNT}
TOKENIZED = {"count": COUNT, "max_model_len": COUNT, "tokens": IDS}
DETOKENIZED = {"prompt": STRING}
TOKENIZER = {"tokenizer_class": STRING, "vocab_size": COUNT, "eos_token": STRING_OR_NULL, "chat_template": {}}
