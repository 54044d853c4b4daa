"""What a request may ask of this model and this engine; everything that ``SamplingParams`` alone cannot know.

Invariant: a request that passes can be served, however loaded the engine is: it fits the window, a row, the
rows and the staging pool. So the scheduler never meets one that waits for ever. A refusal names the value and
the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from snapstream.config import EngineConfig, Selector
from snapstream.request import Request


class QueueFull(RuntimeError):
    """Too many requests wait; the caller may try again later. Nothing is wrong with the request itself."""


def check_request(request: Request, config: EngineConfig, *, vocab_size: int, has_tokenizer: bool) -> None:
    """Raise ValueError, naming value and limit, if the request could never be served."""
    sampling = request.sampling
    _check_prompt(request, config, vocab_size)
    _check_ids("logit_bias token id", sampling.logit_bias or (), vocab_size)
    _check_ids("stop token id", sampling.stop_token_ids, vocab_size)
    if sampling.n > config.max_rows:
        raise ValueError(f"n is {sampling.n}; each sample needs a row and the engine has {config.max_rows}")
    if sampling.stop and not has_tokenizer:
        stops = list(sampling.stop)
        raise ValueError(f"stop strings {stops} given; without a tokenizer only stop_token_ids work")
    if sampling.grammar is not None and not has_tokenizer:
        raise ValueError(f"grammar ({sampling.grammar.kind}) needs the checkpoint's tokenizer, and it has none")
    if request.selector is not None:
        _check_selector(request.selector, config)
    if request.budget is not None or request.selector is not None:
        config.check_budget(request.budget or config.budget, request.selector)


def _check_prompt(request: Request, config: EngineConfig, vocab_size: int) -> None:
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise ValueError("the prompt has 0 tokens; it needs at least 1")
    _check_ids("prompt token id", request.prompt_token_ids, vocab_size)
    if request.positions is not None:
        _check_positions(request, request.positions, config)
    if num_prompt + max_tokens > config.max_model_len:
        raise ValueError(
            f"a prompt of {num_prompt} tokens and max_tokens {max_tokens} make {num_prompt + max_tokens}; "
            f"the limit is {config.max_model_len}"
        )
    is_short = num_prompt <= config.chunking.short_len
    limit = config.pool_tokens if is_short else config.pool_tokens - config.short_reserve
    if num_prompt > limit:
        raise ValueError(f"a prompt of {num_prompt} tokens can never be staged; the pool takes up to {limit}")


def _check_selector(selector: Selector, config: EngineConfig) -> None:
    """Refuse a selector that needs memory which this engine has not set aside, or cannot do what its rows do."""
    name, own = selector.name, config.selector
    if selector.needs_all_queries and not own.needs_all_queries:
        raise ValueError(
            f"selector {name!r} needs the queries of a whole prompt, for which this engine has set no memory aside; "
            f"start the engine with selector {name!r}"
        )
    if selector.observation_len > own.observation_len:
        raise ValueError(
            f"selector {name!r} lets {selector.observation_len} queries vote; this engine has memory for "
            f"{own.observation_len}; start the engine with this selector"
        )
    if config.rescoring is not None and not selector.can_rescore:
        raise ValueError(f"selector {name!r} cannot rescore, and this engine does; start the engine without rescoring")


def _check_positions(request: Request, positions: tuple[int, ...], config: EngineConfig) -> None:
    if len(positions) != len(request.prompt_token_ids):
        raise ValueError(f"{len(positions)} positions were given for {len(request.prompt_token_ids)} prompt tokens")
    if positions[0] < 0 or any(a >= b for a, b in pairwise(positions)):
        raise ValueError("the positions of a prompt must ascend from 0 or more")
    length = positions[-1] + 1 + request.sampling.max_tokens
    if length > config.max_model_len:
        raise ValueError(
            f"a prompt whose last position is {positions[-1]} and max_tokens {request.sampling.max_tokens} reach "
            f"{length}; the limit is {config.max_model_len}"
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"{name} {token!r} is outside the vocabulary (0 to {vocab_size - 1})")
