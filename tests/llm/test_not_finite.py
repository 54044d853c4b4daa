"""NaN in the model ends the requests that meet it, and no others; it never becomes a token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import KVBudget
from snapstream.kernels.cpu.native import find_compiler
from snapstream.llm import LLM
from snapstream.request import NOT_FINITE, FinishReason, Grammar, RequestOutput, SamplingParams
from snapstream.runner.decode_step import MakeDecode
from snapstream.runner.executors import make_eager, make_graph
from snapstream.runner.model_runner import ModelRunner
from snapstream.start.build import build_runner

BAD = 99  # the token whose embedding is NaN
SOUND = list(range(100, 130))
BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
FORCED = {BAD: 100.0}


DECODE: dict[str, MakeDecode] = {
    "eager": make_eager,
    "graph": partial(make_graph, buckets=(4,)),  # compiling is slow: one batch size, with all that draws
}


@pytest.fixture(scope="module", params=["eager", pytest.param("graph", marks=needs_compiler)])
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
