"""Request fields to ``SamplingParams`` and budget, with the server's limits.

Invariant: every request that comes out can be served (``engine/validate.py`` has checked it); any other raises a 400
that names the field. Defaults are those of the OpenAI API, except that a chat answer may fill max_model_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from snapstream.config import InvalidValue, KVBudget, Selector, as_count, make_selector
from snapstream.engine.validate import check_request
from snapstream.request import MAX_LOGPROBS, Grammar, Request, SamplingParams, Trim
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.openai.errors import too_long
from snapstream.server.openai.protocol import ChatBody, CompletionBody, GenerationBody
from snapstream.server.openai.tools.plan import AnswerPlan
from snapstream.server.settings import ModelFacts, ServerSettings
from snapstream.start.resolve import resolve_budget

T = TypeVar("T")

COMPLETION_MAX_TOKENS = 16  # the OpenAI API's own default for /v1/completions

# Fields of ``Request`` and ``SamplingParams`` that the API knows by another name.
_API_NAMES = {
    "budget": "kv_cache",
    "grammar": "response_format",
    "include_stop": "include_stop_str_in_output",
    "prompt_logprobs": "logprobs",
    "return_kept": "kv_cache",
    "selector": "kv_cache.selector",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a body asks for, before its prompts are known. ``max_tokens`` None: the rest of max_model_len."""

    sampling: SamplingParams
    max_tokens: int | None
    budget: KVBudget | None
    selector: Selector | None = None
    priority: int = 0


def chat_wish(body: ChatBody, facts: ModelFacts, plan: AnswerPlan) -> Wish:
    top = body.top_logprobs
    if top and not body.logprobs:
        raise bad_value("top_logprobs needs logprobs to be true", "top_logprobs")
    try:
        as_count("top_logprobs", top or 0, 0, MAX_LOGPROBS)  # ``SamplingParams`` would speak of logprobs
    except ValueError as error:
        raise _fault(error) from None
    if plan.shows_special and body.skip_special_tokens is None:
        body = body.model_copy(update={"skip_special_tokens": False})
    logprobs = (top or 0) if body.logprobs else None
    return _wish(body, facts, body.output_limit, logprobs=logprobs, prompt_logprobs=None, grammar=plan.grammar)


def completion_wish(body: CompletionBody, facts: ModelFacts, grammar: Grammar | None = None) -> Wish:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_value(f"best_of {body.best_of} differs from n; choosing among samples is not supported", "best_of")
    max_tokens = COMPLETION_MAX_TOKENS if body.output_limit is None else body.output_limit
    if max_tokens == 0 and body.echo:
        # The engine always takes a token, which ``completions.py`` drops; nothing but the length may end it.
        max_tokens = 1
        body = body.model_copy(update={"ignore_eos": True, "stop": None, "stop_token_ids": None, "min_tokens": None})
    prompt_logprobs = body.logprobs if body.echo else None
    return _wish(body, facts, max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar)


def make_request(
    request_id: str,
    ids: tuple[int, ...],
    wish: Wish,
    facts: ModelFacts,
    *,
    prompt_param: str,
    has_tokenizer: bool,
    trim: Trim | None = None,
) -> Request:
    """One prompt as the engine takes it; 400 for what it would never serve. ``trim``: what the draft took out."""
    rest = facts.max_model_len - len(ids)
    if rest < (wish.max_tokens or 1):
        raise too_long(len(ids), wish.max_tokens, facts.max_model_len, prompt_param)
    try:
        sampling = wish.sampling if wish.max_tokens is not None else replace(wish.sampling, max_tokens=rest)
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling=sampling,
            budget=wish.budget,
            selector=wish.selector,
            trim=trim,
            priority=wish.priority,
        )
        check_request(request, facts.engine, vocab_size=facts.vocab_size, has_tokenizer=has_tokenizer)
    except ValueError as error:
        raise _fault(error, prompt_param) from None
    return request


def check_samples(num_prompts: int, n: int, settings: ServerSettings) -> None:
    """Before anything is tokenized."""
    if num_prompts * n > settings.max_samples:
        raise bad_value(
            f"{num_prompts} prompts and n {n} make {num_prompts * n} samples; the limit is {settings.max_samples}",
            "n" if n > 1 else "prompt",
        )


def check_answer_size(requests: Sequence[Request], facts: ModelFacts, settings: ServerSettings) -> None:
    """Refuse what would make an answer that fits no memory: it is built whole before it is sent."""
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
        bits = sum(_kept_bits(request, facts) for request in requests)
        if bits > settings.max_kept_bits:
            raise bad_value(f"return_kept would send {bits} bits; the limit is {settings.max_kept_bits}", "kv_cache")
    elif sampling.return_kept:
        kept = sum(_kept_positions(request, facts) for request in requests)
        if kept > settings.max_kept_positions:
            raise bad_value(
                f"return_kept would list {kept} positions; the limit is {settings.max_kept_positions}", "kv_cache"
            )


def _kept_positions(request: Request, facts: ModelFacts) -> int:
    """How many positions the answer would list of this prompt, at most."""
    budget = request.budget or facts.engine.budget
    return facts.num_heads * budget.num_topk if _is_compressed(request, facts) else 0


def _kept_bits(request: Request, facts: ModelFacts) -> int:
    """How many bits the answer would have of this prompt."""
    return facts.num_heads * len(request.prompt_token_ids) if _is_compressed(request, facts) else 0


def _is_compressed(request: Request, facts: ModelFacts) -> bool:
    """Whether the row keeps less than the prompt, in any of its heads."""
    budget, heads = request.budget or facts.engine.budget, facts.engine.heads
    return len(request.prompt_token_ids) > (budget.capacity if heads is None else heads.least)


def _wish(
    body: GenerationBody,
    facts: ModelFacts,
    max_tokens: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None = None,
) -> Wish:
    params = SamplingParams()  # for its defaults
    try:
        if body.max_completion_tokens is not None and max_tokens is not None:  # refused by the name it was sent under
            as_count("max_completion_tokens", max_tokens, 1)
        sampling = SamplingParams(
            n=_or(body.n, params.n),
            # Without a limit the rest of max_model_len is taken later; min_tokens must pass until then.
            max_tokens=_or(max_tokens, facts.max_model_len),
            min_tokens=_or(body.min_tokens, params.min_tokens),
            temperature=_or(body.temperature, params.temperature),
            top_p=_or(body.top_p, params.top_p),
            top_k=_or(body.top_k, params.top_k),
            min_p=_or(body.min_p, params.min_p),
            presence_penalty=_or(body.presence_penalty, params.presence_penalty),
            frequency_penalty=_or(body.frequency_penalty, params.frequency_penalty),
            repetition_penalty=_or(body.repetition_penalty, params.repetition_penalty),
            logit_bias=_logit_bias(body.logit_bias),
            seed=body.seed,
            stop=body.stop or () if not isinstance(body.stop, str) else body.stop,
            stop_token_ids=body.stop_token_ids or (),
            ignore_eos=_or(body.ignore_eos, params.ignore_eos),
            include_stop=_or(body.include_stop_str_in_output, params.include_stop),
            skip_special_tokens=_or(body.skip_special_tokens, params.skip_special_tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            return_kept=False if body.kv_cache is None else body.kv_cache.return_kept,
        )
        selector = _selector(body)
    except ValueError as error:
        raise _fault(error) from None
    return Wish(sampling, max_tokens, _budget(body, facts, selector), selector, body.priority or 0)


def _selector(body: GenerationBody) -> Selector | None:
    return None if body.kv_cache is None or body.kv_cache.selector is None else make_selector(body.kv_cache.selector)


def _budget(body: GenerationBody, facts: ModelFacts, selector: Selector | None) -> KVBudget | None:
    """The request's own row size; the server's is the maximum."""
    if body.kv_cache is None or body.kv_cache.budget is None:
        return None
    given, most = body.kv_cache.budget, facts.engine.budget.capacity
    # Else the error would speak of max_model_len, not of the budget.
    if given != "full" and most < facts.max_model_len <= given:
        raise bad_value(f"a budget of {given} slots is larger than a row of this engine ({most})", "kv_cache")
    try:
        observation_len = (selector or facts.engine.selector).observation_len
        budget = resolve_budget(given, facts.max_model_len, observation_len)
        facts.engine.check_budget(budget, selector)
    except ValueError as error:
        raise bad_value(str(error), "kv_cache") from None
    return budget


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    try:
        return {int(token): bias for token, bias in given.items()} if given else None
    except ValueError:
        raise InvalidValue("logit_bias has a key that is not a token id", "logit_bias") from None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _fault(error: ValueError, prompt_param: str | None = None) -> ApiError:
    """A refusal of ``SamplingParams`` or ``check_request``, with the name that the API has for the field at fault."""
    field = error.field if isinstance(error, InvalidValue) else None
    if field in ("prompt_token_ids", "positions"):
        return bad_value(str(error), prompt_param)
    return bad_value(str(error), None if field is None else _API_NAMES.get(field, field))
