"""NaN in the model ends the requests that meet it, and no others; it never becomes a token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evals.chat import Chat
from evals.forced import generate
from evals.selectors import Random, Variant
from evals.shared import Rule, generate_shared
from evals.tasks import TASKS, make_items
from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget
from snapstream.exec.cuda_graph import make_graph
from snapstream.exec.eager import EagerDecode, MakeDecode
from snapstream.exec.runner import ModelRunner
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.startup.build import build_runner
from snapstream.types import NOT_FINITE, FinishReason, Grammar, RequestOutput, SamplingParams
from tests.parity.test_graph import PlainMaker

BAD = 99  # the token whose embedding is NaN
SOUND = list(range(100, 130))
BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
FORCED = {BAD: 100.0}


DECODE: dict[str, MakeDecode] = {
    "eager": EagerDecode,
    "graph": partial(make_graph, maker=PlainMaker(), buckets=(4,)),
}


@pytest.fixture(scope="module", params=["eager", "graph"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    """A model that computes NaN for whatever follows one token; its weights were sound when they were read."""
    made: list[ModelRunner] = []

    def make_runner(*given: Any) -> ModelRunner:
        made.append(build_runner(*given, make_decode=DECODE[request.param]))
        return made[0]

    with LLM(
        checkpoint, budget=BUDGET, max_rows=4, max_model_len=256, chunk_len=32, progress=False,
        make_runner=make_runner, selector=SnapKV(observation_len=8),
    ) as engine:  # fmt: skip
        made[0].decoder.weights.embed.dense()[BAD] = float("nan")
        yield engine


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **more})


def ends(output: RequestOutput) -> list[tuple[list[int], FinishReason | None, Any]]:
    return [(sample.token_ids, sample.finish_reason, sample.stop_reason) for sample in output.samples]


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filters": {"temperature": 0.8, "seed": 3, "top_k": 9, "top_p": 0.7, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.5, "min_tokens": 2},
    "log-probabilities": {"logprobs": 3},
    "samples": {"temperature": 0.8, "seed": 3, "n": 2},
}


@pytest.mark.parametrize("sampling", list(SAMPLING.values()), ids=list(SAMPLING))
def test_a_prompt_that_ends_in_nan(llm: LLM, sampling: dict[str, Any]) -> None:
    params = greedy(**sampling)
    (output,) = llm.generate([[*SOUND, BAD, *SOUND]], params)
    assert ends(output) == [([], FinishReason.ERROR, NOT_FINITE)] * params.n
    assert output.text == ""


@pytest.mark.parametrize("sampling", list(SAMPLING.values()), ids=list(SAMPLING))
def test_an_answer_that_runs_into_nan(llm: LLM, sampling: dict[str, Any]) -> None:
    params = greedy(logit_bias=FORCED, **sampling)
    (output,) = llm.generate([SOUND], params)
    assert ends(output) == [([BAD], FinishReason.ERROR, NOT_FINITE)] * params.n


def test_a_grammar_does_not_hide_it(llm: LLM) -> None:
    (output,) = llm.generate([[*SOUND, BAD]], greedy(grammar=Grammar.regex("[a-z]{20}")))
    assert ends(output) == [([], FinishReason.ERROR, NOT_FINITE)]


def test_neighbours_and_later_requests_are_unharmed(llm: LLM) -> None:
    """Before, beside and after, in every row, with prompts that fit a row and prompts that do not."""
    rng = random.Random(4)
    prompts = [[rng.randrange(100, 250) for _ in range(size)] for size in (5, 90, 30, 12, 64, 1)]
    alone = [llm.generate([prompt], greedy())[0].token_ids for prompt in prompts]
    spoilt = [[*SOUND * 2, BAD, *SOUND], [BAD], [7, BAD]]
    params = [greedy()] * len(prompts)
    for _ in range(2):
        mixed = [spoilt[0], *prompts[:2], spoilt[1], *prompts[2:4], spoilt[2], *prompts[4:], SOUND]
        wanted = [greedy(), *params[:2], greedy(), *params[2:4], greedy(), *params[4:], greedy(logit_bias=FORCED)]
        outputs = llm.generate(mixed, wanted)
        sound = [output for output in outputs if output.finish_reason is FinishReason.LENGTH]
        assert [output.token_ids for output in sound] == alone
        assert [output.samples[0].stop_reason for output in outputs if output not in sound] == [NOT_FINITE] * 4
    assert [output.token_ids for output in llm.generate(prompts, params)] == alone


def test_a_stream_ends_with_it(llm: LLM) -> None:
    *_, last = llm.stream(SOUND, greedy(logit_bias=FORCED))
    assert last.is_finished and ends(last) == [([BAD], FinishReason.ERROR, NOT_FINITE)]


# An answer that is longer than the ring of its row says so: the end of the prompt has left the ring by then.

WINDOW = KVBudget(num_sink=2, num_topk=10, num_window=8, num_recent=12)


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[LLM]:
    selector = SnapKV(observation_len=8)
    with LLM(
        checkpoint, budget=BUDGET, selector=selector, max_rows=4, max_model_len=256, chunk_len=32, progress=False
    ) as llm:
        yield llm


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, n=n)


@pytest.mark.parametrize(
    ("budget", "prompt_len", "ring"),
    [
        (None, 100, 16),
        (None, 32, 16),
        (None, 20, 28),  # slots that a short prompt leaves unselected belong to the ring
        (WINDOW, 100, 12),
        ("full", 100, None),
    ],
)
def test_an_answer_longer_than_the_ring(
    small: LLM, llm: LLM, budget: KVBudget | str | None, prompt_len: int, ring: int | None
) -> None:
    prompt = list(range(50, 50 + prompt_len))
    if ring is None:  # a ring of the whole window never wraps
        (output,) = llm.generate([prompt], params(256 - prompt_len))
        assert output.compression is not None and not output.has_outgrown_ring
        return
    fitting, longer = (small.generate([prompt], params(size), budget=budget)[0] for size in (ring, ring + 1))
    assert fitting.compression is not None and fitting.compression.ring_tokens == ring
    assert (fitting.has_outgrown_ring, longer.has_outgrown_ring) == (False, True)


def test_it_is_known_while_the_answer_grows(small: LLM) -> None:
    seen = [
        (max(len(own.token_ids) for own in output.samples), output.has_outgrown_ring)
        for output in small.stream([60] * 50, params(20, n=2))
    ]
    assert {is_over for size, is_over in seen if size <= 16} == {False}
    assert {is_over for size, is_over in seen if size > 16} == {True}


# Answers measured on a shared prefill are the answers of each rule alone.

RULES: list[Rule] = [
    (KVBudget.full(640), SnapKV()),
    (KVBudget.of(64), SnapKV()),
    (KVBudget.of(64), Hops(num_hops=3)),
    (KVBudget.of(64), Random()),
    (KVBudget.of(96), Variant(observation_len=8, pool_width=13)),
    (KVBudget.of(128, num_window=16), SnapKV()),
    (KVBudget.streaming(80), SnapKV()),
]


@pytest.mark.parametrize("task", ["variable", "second_kept"])
def test_a_rule_answers_beside_others_as_it_does_alone(task: str) -> None:
    items = make_items(Chat(TINY_MODEL), task, 3, 512, 0)
    prompts, forced = [item.prompt_ids for item in items], [item.forced_ids for item in items]
    most = TASKS[task].max_tokens + max(map(len, forced))
    settings = {"max_rows": 4, "max_model_len": 640, "chunk_len": 128, "progress": False}
    with LLM(TINY_MODEL, budget="full", **settings) as llm:  # type: ignore[arg-type]
        shared = generate_shared(llm, prompts, forced, most, RULES)
    for index, (budget, selector) in enumerate(RULES):
        with LLM(TINY_MODEL, budget=budget, selector=selector, **settings) as llm:  # type: ignore[arg-type]
            alone = [output.token_ids for output in generate(llm, prompts, forced, most)]
        assert [answers[index] for answers in shared] == alone, (budget, selector)
    texts = {tuple(map(tuple, (answers[index] for answers in shared))) for index in range(len(RULES))}
    assert len(texts) > 2, "the rules do not differ: the test says nothing"
