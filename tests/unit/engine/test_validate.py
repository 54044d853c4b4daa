"""Requests that can never be served are refused with the value and the limit."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from snapstream.config import Chunking, EngineConfig, InvalidValue, KVBudget, Selector
from snapstream.engine.validate import check_request
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.types import Request, SamplingParams

CONFIG = EngineConfig(
    budget=KVBudget(num_sink=4, num_topk=60, num_recent=16),
    max_model_len=200,
    max_rows=3,
    chunking=Chunking(chunk_len=8, short_len=10),
    short_reserve=16,
)
# Without a reserve the pool may be smaller than max_model_len: only then can a prompt be too long for staging.
TIGHT = EngineConfig(
    budget=KVBudget.full(200),
    max_model_len=200,
    chunking=Chunking(short_len=10),
    staging_tokens=50,
    short_reserve=0,
)


def check(
    prompt: tuple[Any, ...] = (1, 2, 3),
    *,
    config: EngineConfig = CONFIG,
    has_tokenizer: bool = True,
    budget: KVBudget | None = None,
    selector: Selector | None = None,
    max_tokens: int = 5,
    **sampling: Any,
) -> None:
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        budget=budget,
        selector=selector,
    )
    check_request(request, config, vocab_size=100, has_tokenizer=has_tokenizer)


def test_good_requests_pass_up_to_every_limit() -> None:
    check((0, 99), logit_bias={99: 1.0}, stop_token_ids=[99], n=3, stop="x")
    check((1,) * 195, max_tokens=5)
    check(budget=CONFIG.budget)
    check(selector=SnapKV(observation_len=8), budget=KVBudget(num_sink=4, num_topk=8, num_recent=8))
    check(selector=SnapKV(), config=replace(CONFIG, selector=Hops()))  # needs less than the engine's
    check(selector=Hops(num_hops=9), config=replace(CONFIG, selector=Hops()))
    check((1,) * 50, config=TIGHT)


@pytest.mark.parametrize(
    ("arguments", "message", "field"),
    [
        ({"prompt": ()}, r"0 tokens.*at least 1", "prompt_token_ids"),
        ({"prompt": (1, 100)}, r"prompt token id 100 .*0 to 99", "prompt_token_ids"),
        ({"prompt": (1, -1)}, r"prompt token id -1 .*0 to 99", "prompt_token_ids"),
        ({"prompt": (1, 2.5)}, r"prompt token id 2\.5", "prompt_token_ids"),
        ({"logit_bias": {100: 1.0}}, r"logit_bias token id 100 .*0 to 99", "logit_bias"),
        ({"stop_token_ids": [5, 100]}, r"stop token id 100 .*0 to 99", "stop_token_ids"),
        (
            {"prompt": (1,) * 190, "max_tokens": 11},
            r"190 tokens and max_tokens 11 make 201; the limit is 200",
            "prompt_token_ids",
        ),
        ({"n": 4}, r"n is 4.*engine has 3", "n"),
        ({"budget": KVBudget(num_sink=4, num_topk=61, num_recent=16)}, r"81 slots .*\(80\)", "budget"),
        ({"budget": KVBudget(num_sink=4, num_topk=8, num_recent=8)}, r"20 slots .*36\)", "budget"),
        (
            {"selector": Hops()},
            "selector 'hops' needs the queries of a whole prompt.*start the engine with .* 'hops'",
            "selector",
        ),
        (
            {"selector": SnapKV(observation_len=33)},
            "selector 'snapkv' has an observation window of 33.*memory for 32",
            "selector",
        ),
        ({"prompt": (1,) * 51, "config": TIGHT}, r"51 tokens can never be staged.*50", "prompt_token_ids"),
        ({"stop": "x", "has_tokenizer": False}, r"stop strings \['x'\].*stop_token_ids", "stop"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str, field: str) -> None:
    with pytest.raises(InvalidValue, match=message) as caught:
        check(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("max_tokens", True),
        ("min_tokens", 999),
        ("temperature", "warm"),
        ("top_p", 0),
        ("logprobs", 21),
        ("ignore_eos", 1),
        ("return_kept", "lists"),
        ("grammar", "{}"),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 33),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_wrong_sampling_parameters_carry_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert pickle.loads(pickle.dumps(caught.value)).field == field  # it may cross to another process


def test_ways_to_tell_what_was_kept() -> None:
    for way in (True, False, "bitmap"):
        assert SamplingParams(return_kept=way).return_kept == way
    for wrong in ("lists", "", 2, None):
        with pytest.raises(ValueError, match=r"return_kept is .*; it must be True, False or 'bitmap'"):
            SamplingParams(return_kept=wrong)
