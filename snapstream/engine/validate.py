"""The limits of this model and this engine on a request: everything that ``SamplingParams`` alone cannot know.

Invariant: a request that passes can be served: it fits max_model_len, the rows and the staging pool, so none waits
forever. A refusal names the value and the limit; its ``field`` is that of ``Request`` or ``SamplingParams``.
"""

from __future__ import annotations

from collections.abc import Iterable

from snapstream.config import EngineConfig, InvalidValue, Selector, as_count
from snapstream.config.kv import is_shipped
from snapstream.types import MAX_PRIORITY, Request


def check_request(request: Request, config: EngineConfig, *, vocab_size: int, has_tokenizer: bool) -> None:
    """Raise InvalidValue, naming value, limit and field, if the request could never be served."""
    sampling = request.sampling
    _check_prompt(request, config, vocab_size)
    _check_ids("logit_bias token id", sampling.logit_bias or (), vocab_size, "logit_bias")
    _check_ids("prediction token id", sampling.prediction, vocab_size, "prediction")
    if len(sampling.prediction) > config.max_model_len:
        raise InvalidValue(
            f"a prediction of {len(sampling.prediction)} tokens; the limit is {config.max_model_len}", "prediction"
        )
    _check_ids("stop token id", sampling.stop_token_ids, vocab_size, "stop_token_ids")
    if sampling.n > config.max_rows:
        raise InvalidValue(f"n is {sampling.n}; each sample needs a row and the engine has {config.max_rows}", "n")
    if sampling.stop and not has_tokenizer:
        stops = list(sampling.stop)
        raise InvalidValue(f"stop strings {stops} given; without a tokenizer only stop_token_ids work", "stop")
    if sampling.grammar is not None and not has_tokenizer:
        raise InvalidValue(
            f"grammar ({sampling.grammar.kind}) needs the checkpoint's tokenizer, and it has none", "grammar"
        )
    config.adapter(request.lora)
    as_count("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.selector is not None:
        _check_selector(request.selector, config)
    if request.budget is not None or request.selector is not None:
        try:
            config.check_budget(request.budget or config.budget, request.selector)
        except ValueError as error:
            raise InvalidValue(str(error), "budget") from None


def _check_prompt(request: Request, config: EngineConfig, vocab_size: int) -> None:
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise InvalidValue("the prompt has 0 tokens; it needs at least 1", "prompt_token_ids")
    _check_ids("prompt token id", request.prompt_token_ids, vocab_size, "prompt_token_ids")
    if num_prompt + max_tokens > config.max_model_len:
        raise InvalidValue(
            f"a prompt of {num_prompt} tokens and max_tokens {max_tokens} make {num_prompt + max_tokens}; "
            f"the limit is {config.max_model_len}",
            "prompt_token_ids",
        )
    is_short = num_prompt <= config.chunking.short_len
    limit = config.pool_tokens if is_short else config.pool_tokens - config.short_reserve
    if num_prompt > limit:
        raise InvalidValue(
            f"a prompt of {num_prompt} tokens can never be staged; the pool takes up to {limit}", "prompt_token_ids"
        )


def _check_selector(selector: Selector, config: EngineConfig) -> None:
    """Refuse a selector that needs memory or features that this engine was started without."""
    name, own = selector.name, config.selector
    if config.parallel.size > 1 and not is_shipped(selector):
        raise InvalidValue(
            f"selector {name!r} is not shipped with the package, and worker ranks support shipped selectors only",
            "selector",
        )
    if selector.needs_all_queries and not own.needs_all_queries:
        raise InvalidValue(
            f"selector {name!r} needs the queries of a whole prompt, and this engine has no memory reserved for them; "
            f"start the engine with selector {name!r}",
            "selector",
        )
    if selector.observation_len > own.observation_len:
        raise InvalidValue(
            f"selector {name!r} has an observation window of {selector.observation_len}; this engine has memory for "
            f"{own.observation_len}; start the engine with this selector",
            "selector",
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int, field: str) -> None:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidValue(f"{name} {token!r} is outside the vocabulary (0 to {vocab_size - 1})", field)
