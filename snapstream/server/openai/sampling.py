"""Request fields to ``SamplingParams``, budget and grammar, within the server's limits.

The format of the answer is set at most once, by one of

    response_format            {"type": "text" | "json_object" | "json_schema", ...}
    structured_outputs         one of json, regex, choice, grammar, json_object
    guided_json and others     the same under older names

Invariant: every returned request can be served (``engine/validate.py`` has checked it); any other raises a 400 that
names the field. Defaults are those of the OpenAI API, except that a chat answer may fill max_model_len."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snapstream.config import InvalidValue, KVBudget, Selector, as_count, make_selector
from snapstream.engine.validate import check_request
from snapstream.server.engine.api import ModelMetadata
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.openai.protocol import ChatBody, CompletionBody, GenerationBody, too_long
from snapstream.server.options import ServerSettings
from snapstream.startup.resolve import resolve_budget
from snapstream.types import MAX_LOGPROBS, CompressionSummary, Grammar, Request, SamplingParams

COMPLETION_MAX_TOKENS = 16  # the OpenAI API's own default for /v1/completions

# Fields of ``SamplingParams`` with the same name in the API; null is the default.
_SAME_NAME = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
# Fields of ``Request`` and ``SamplingParams`` that have another name in the API.
_API_NAMES = {
    "budget": "kv_cache",
    "grammar": "response_format",
    "include_stop": "include_stop_str_in_output",
    "prompt_logprobs": "logprobs",
    "return_kept": "kv_cache",
    "selector": "kv_cache.selector",
}


@dataclass(frozen=True, slots=True)
class RequestedOptions:
    """The options of a body, before its prompts are tokenized. ``max_tokens`` None: the rest of max_model_len."""

    sampling: SamplingParams
    max_tokens: int | None
    budget: KVBudget | None
    selector: Selector | None = None
    priority: int = 0


def chat_options(
    body: ChatBody, metadata: ModelMetadata, grammar: Grammar | None, *, shows_special: bool
) -> RequestedOptions:
    """``shows_special``: special tokens belong to the answer's text unless the request says otherwise."""
    top = body.top_logprobs
    if top and not body.logprobs:
        raise bad_value("top_logprobs needs logprobs to be true", "top_logprobs")
    try:
        as_count("top_logprobs", top or 0, 0, MAX_LOGPROBS)  # ``SamplingParams`` would name logprobs
    except ValueError as error:
        raise _fault(error) from None
    if shows_special and body.skip_special_tokens is None:
        body = body.model_copy(update={"skip_special_tokens": False})
    logprobs = (top or 0) if body.logprobs else None
    return _options(body, metadata, body.output_limit, logprobs=logprobs, prompt_logprobs=None, grammar=grammar)


def completion_options(
    body: CompletionBody, metadata: ModelMetadata, grammar: Grammar | None = None
) -> RequestedOptions:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_value(f"best_of {body.best_of} differs from n; choosing among samples is not supported", "best_of")
    max_tokens = COMPLETION_MAX_TOKENS if body.output_limit is None else body.output_limit
    if max_tokens == 0 and body.echo:
        # The engine generates at least a token, which ``CompletionAnswer`` drops; only the length may end it.
        max_tokens = 1
        body = body.model_copy(update={"ignore_eos": True, "stop": None, "stop_token_ids": None, "min_tokens": None})
    prompt_logprobs = body.logprobs if body.echo else None
    return _options(
        body, metadata, max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar
    )


def make_request(
    request_id: str,
    ids: tuple[int, ...],
    options: RequestedOptions,
    metadata: ModelMetadata,
    *,
    prompt_param: str,
    has_tokenizer: bool,
    prompt_compression: CompressionSummary | None = None,
) -> Request:
    """One prompt as the engine takes it; 400 for what it would never serve."""
    rest = metadata.max_model_len - len(ids)
    if rest < (options.max_tokens or 1):
        raise too_long(len(ids), options.max_tokens, metadata.max_model_len, prompt_param)
    try:
        sampling = options.sampling if options.max_tokens is not None else replace(options.sampling, max_tokens=rest)
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling=sampling,
            budget=options.budget,
            selector=options.selector,
            prompt_compression=prompt_compression,
            priority=options.priority,
        )
        check_request(request, metadata.engine, vocab_size=metadata.vocab_size, has_tokenizer=has_tokenizer)
    except ValueError as error:
        raise _fault(error, prompt_param) from None
    return request


def check_samples(num_prompts: int, n: int, settings: ServerSettings) -> None:
    """400 for too many samples, before anything is tokenized."""
    if num_prompts * n > settings.max_samples:
        raise bad_value(
            f"{num_prompts} prompts and n {n} make {num_prompts * n} samples; the limit is {settings.max_samples}",
            "n" if n > 1 else "prompt",
        )


def check_answer_size(requests: Sequence[Request], metadata: ModelMetadata, settings: ServerSettings) -> None:
    """400 for an answer too large for memory: it is built before it is sent."""
    sampling = requests[0].sampling
    if sampling.prompt_logprobs is not None:
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        entries = num_tokens * (1 + sampling.prompt_logprobs) * sampling.n
        if entries > settings.max_prompt_logprobs:
            raise bad_value(
                f"echo with logprobs would list {entries} log-probabilities of {num_tokens} prompt tokens; "
                f"the limit is {settings.max_prompt_logprobs}",
                "logprobs",
            )
    if sampling.return_kept == "bitmap":
        bits = sum(_kept_bits(request, metadata) for request in requests)
        if bits > settings.max_kept_bits:
            raise bad_value(f"return_kept would send {bits} bits; the limit is {settings.max_kept_bits}", "kv_cache")
    elif sampling.return_kept:
        kept = sum(_kept_positions(request, metadata) for request in requests)
        if kept > settings.max_kept_positions:
            raise bad_value(
                f"return_kept would list {kept} positions; the limit is {settings.max_kept_positions}", "kv_cache"
            )


def _kept_positions(request: Request, metadata: ModelMetadata) -> int:
    """Positions that the answer would list of this prompt, at most."""
    budget = request.budget or metadata.engine.budget
    return metadata.num_heads * budget.num_topk if _is_compressed(request, metadata) else 0


def _kept_bits(request: Request, metadata: ModelMetadata) -> int:
    """Bits that the answer would have of this prompt."""
    return metadata.num_heads * len(request.prompt_token_ids) if _is_compressed(request, metadata) else 0


def _is_compressed(request: Request, metadata: ModelMetadata) -> bool:
    """Whether the row keeps less than the prompt."""
    return len(request.prompt_token_ids) > (request.budget or metadata.engine.budget).capacity


def _options(
    body: GenerationBody,
    metadata: ModelMetadata,
    max_tokens: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None = None,
) -> RequestedOptions:
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    try:
        if body.max_completion_tokens is not None and max_tokens is not None:  # an error names the field that was sent
            as_count("max_completion_tokens", max_tokens, 1)
        if body.include_stop_str_in_output is not None:
            given["include_stop"] = body.include_stop_str_in_output
        sampling = SamplingParams(
            # Without a limit the rest of max_model_len is set later; min_tokens must pass until then.
            max_tokens=metadata.max_model_len if max_tokens is None else max_tokens,
            logit_bias=_logit_bias(body.logit_bias),
            stop=() if body.stop is None else body.stop,
            stop_token_ids=body.stop_token_ids or (),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            return_kept=False if body.kv_cache is None else body.kv_cache.return_kept,
            **given,
        )
        selector = _selector(body)
    except ValueError as error:
        raise _fault(error) from None
    return RequestedOptions(sampling, max_tokens, _budget(body, metadata, selector), selector, body.priority or 0)


def _selector(body: GenerationBody) -> Selector | None:
    return None if body.kv_cache is None or body.kv_cache.selector is None else make_selector(body.kv_cache.selector)


def _budget(body: GenerationBody, metadata: ModelMetadata, selector: Selector | None) -> KVBudget | None:
    """The request's budget; the server's is the maximum."""
    if body.kv_cache is None or body.kv_cache.budget is None:
        return None
    given, most = body.kv_cache.budget, metadata.engine.budget.capacity
    # Else the error would name max_model_len, not the budget.
    if given != "full" and most < metadata.max_model_len <= given:
        raise bad_value(f"a budget of {given} slots is larger than a row of this engine ({most})", "kv_cache")
    try:
        observation_len = (selector or metadata.engine.selector).observation_len
        budget = resolve_budget(given, metadata.max_model_len, observation_len)
        metadata.engine.check_budget(budget, selector)
    except ValueError as error:
        raise bad_value(str(error), "kv_cache") from None
    return budget


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    try:
        return {int(token): bias for token, bias in given.items()} if given else None
    except ValueError:
        raise InvalidValue("logit_bias has a key that is not a token id", "logit_bias") from None


def _fault(error: ValueError, prompt_param: str | None = None) -> ApiError:
    """An error of ``SamplingParams`` or ``check_request``, with the API's name of the field at fault."""
    field = error.field if isinstance(error, InvalidValue) else None
    if field in ("prompt_token_ids", "positions"):
        return bad_value(str(error), prompt_param)
    return bad_value(str(error), None if field is None else _API_NAMES.get(field, field))


_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Other members of structured_outputs -> values that change nothing here.
_MEMBERS: Mapping[str, tuple[Any, ...]] = {
    "disable_fallback": (False, True),
    "disable_any_whitespace": (False, True),  # JSON is compact anyhow
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
}


def read_structured_output(
    body: GenerationBody, response_format: Mapping[str, Any] | None = None
) -> tuple[Grammar | None, str]:
    """The grammar of the answer (None: any text), and the field that set it, for errors."""
    found: list[tuple[Grammar | None, str]] = []
    if (grammar := read_response_format(response_format)) is not None:
        found.append((grammar, "response_format"))
    if body.structured_outputs is not None:
        found.append((_structured(body.structured_outputs), "structured_outputs"))
    for kind in ("json", "regex", "choice", "grammar"):
        param = f"guided_{kind}"
        value = getattr(body, param)
        if value is not None:
            found.append((_one(kind, value, param, param), param))
    if len(found) > 1:
        raise bad_value(
            f"{found[0][1]} and {found[1][1]} both set the format of the answer; send one of them", found[1][1]
        )
    return found[0] if found else (None, "response_format")


def read_response_format(given: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of a ``response_format``; None for text."""
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    if kind != "json_schema":
        raise _bad_format(f"type is {kind!r}; it must be 'text', 'json_object' or 'json_schema'")
    inner = given.get("json_schema")
    if not isinstance(inner, Mapping):
        raise _bad_format("json_schema is missing")
    name = inner.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise _bad_format(f"json_schema.name is {name!r}; it must have 1 to 64 letters, digits, _ and -")
    schema, strict = inner.get("schema"), inner.get("strict")
    if not isinstance(schema, Mapping):
        raise _bad_format("json_schema.schema must be an object")
    if strict is not None and not isinstance(strict, bool):
        raise _bad_format(f"json_schema.strict is {strict!r}; it must be true or false")
    try:
        return Grammar.json_schema(schema, strict=bool(strict))
    except ValueError as error:
        raise _bad_format(str(error)) from None


def _structured(given: Mapping[str, Any]) -> Grammar | None:

    field = "structured_outputs"
    for name, value in given.items():
        if name in _MAKERS or value is None:
            continue
        if not any(value is harmless for harmless in _MEMBERS.get(name, ())):
            raise bad_value(f"{field}.{name} {value!r} is not supported by this server", field, "unsupported_parameter")
    wanted = {
        name: value for name, value in given.items()
        if name in _MAKERS and value is not None and not (name == "json_object" and value is False)
    }  # fmt: skip
    if len(wanted) != 1:
        have = " and ".join(wanted) or "none"
        raise bad_value(f"{field} must have one of {', '.join(_MAKERS)}; it has {have}", field)
    ((kind, value),) = wanted.items()
    return _one(kind, value, f"{field}.{kind}", field)


def _one(kind: str, value: Any, place: str, param: str) -> Grammar:
    make, is_fit, wanted = _MAKERS[kind]
    if not is_fit(value):
        raise bad_value(f"{place} is {value!r:.200}; it must be {wanted}", param)
    try:
        return make(value)
    except ValueError as error:
        raise bad_value(f"{place}: {error}", param) from None


def _is_schema(value: Any) -> bool:
    return isinstance(value, (str, Mapping))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


# As in vLLM, a schema may also be a JSON text, and is enforced as far as possible.
_MAKERS: Mapping[str, tuple[Callable[[Any], Grammar], Callable[[Any], bool], str]] = {
    "json": (lambda value: Grammar.json_schema(value, strict=False), _is_schema, "a JSON schema"),
    "regex": (Grammar.regex, _is_text, "a regular expression"),
    "choice": (Grammar.choice, _is_texts, "a list of strings, and not empty"),
    "grammar": (Grammar.lark, _is_text, "a grammar (Lark or GBNF)"),
    "json_object": (lambda _: Grammar.json_object(), lambda value: value is True, "true or false"),
}


def _bad_format(message: str) -> ApiError:
    return bad_value(f"response_format.{message}", "response_format")
