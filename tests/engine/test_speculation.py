"""Speculative decoding by prompt lookup and by a draft model: answers are those without, whatever an engine serves."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from snapstream import LLM, KVBudget, SamplingParams
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.config import EngineConfig, EngineOptions
from snapstream.config.engine import Speculator
from snapstream.config.kv import HeadProfile
from snapstream.exec import draft_model, speculation
from snapstream.exec.cuda_graph import make_graph
from snapstream.exec.draft_model import DraftModel
from snapstream.exec.eager import DraftBatch, EagerDecode, MakeDecode
from snapstream.exec.results import RowGrammars
from snapstream.exec.sampling import Sampled
from snapstream.exec.sampling_state import SamplingState
from snapstream.exec.speculation import MIN_MATCH, History, Speculation, StepTimes
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.models.config_json import fingerprint
from snapstream.models.decoder import Decoder
from snapstream.models.registry import kv_spec_of, read_model_config
from snapstream.plan.fit import engine_config
from snapstream.plan.memory import speculator_config
from snapstream.startup.build import build_runner
from snapstream.types import Grammar, Logprob, Request
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.test_graph import PlainMaker
from tests.parity.test_heads import profile, uneven

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
# graph: plain functions for CUDA graphs; in CASES and PAIRS below without the slow tests, too
EXECUTORS = [pytest.param("looped", marks=needs_compiler), "eager", pytest.param("graph", marks=pytest.mark.slow)]

BUDGETS = {"full": "full", "rows": KVBudget(num_sink=2, num_topk=14, num_recent=16)}
MODELS = [
    "qwen3", "llama-dynamic", "mistral-window", "qwen2-windows", "smollm3", "mixtral", "deepseek-v3", "gpt-oss",
    "gemma2", "gemma3", "gemma3n-panels", "olmo3", "llama4", "lfm2", "lfm2-moe", "lfm3", "qwen3-next", "qwen3.5",
    "granite-hybrid", "granite-hybrid-moe", "nemotron-h", "nemotron-3", "kimi-linear", "falcon-h1", "falcon-h1-norm",
    "olmo-hybrid", "bamba", "gemma4", "laguna", "mimo-v2-panels", "hy-v4", "glm-5.3-flash",
]  # fmt: skip


def marks(executor: str, is_quick: bool) -> list[pytest.MarkDecorator]:
    return [needs_compiler] * (executor == "looped") + [pytest.mark.slow] * (not is_quick)


# Every model with the executor whose products are batch-invariant; with the others full rows.
ON_GRAPHS = ("qwen3", "mistral-window", "mixtral", "deepseek-v3", "gpt-oss")
CASES = [
    pytest.param(name, budget, executor, marks=marks(executor, name in quick))
    for executor, budget, names, quick in (
        ("looped", "rows", MODELS, MODELS),
        ("looped", "full", MODELS, ("qwen3", "gemma3", "lfm2")),
        ("eager", "rows", MODELS, ("qwen3", "deepseek-v3", "lfm2")),
        ("graph", "rows", ON_GRAPHS, ("mistral-window", "deepseek-v3")),
        ("graph", "full", ("qwen3",), ("qwen3",)),
    )
    for name in names
]


class Oracle:
    """Drafts what the samples say without drafts, here and there with a wrong token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[list[int]] = []
        self.random = Random(1)
        monkeypatch.setattr(speculation, "MAX_PAUSE", 0)
        monkeypatch.setattr(StepTimes, "cost", lambda times, entries: 0.0)
        monkeypatch.setattr(History, "draft", lambda history, most: self.draft(history, most))

    def draft(self, history: History, most: int) -> list[int]:
        known = history.token_ids
        texts = [text for text in self.texts if text[: len(known)] == known]
        if not texts:
            return [5, 6, 7][: max(most, 0)]
        following = self.random.choice(texts)[len(known) :][: max(most, 0)]
        return [3 if self.random.random() < 0.2 else token for token in following]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return Oracle(monkeypatch)


@pytest.fixture
def costless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft pays, however long steps take on this machine."""
    monkeypatch.setattr(StepTimes, "cost", lambda self, entries: 0.0)


def repeating(random: Random, num_tokens: int) -> list[int]:
    """Token ids in which runs come again, some with a token changed."""
    ids = [random.randrange(3, VOCAB) for _ in range(random.randint(1, 12))]
    while len(ids) < num_tokens:
        start = random.randrange(len(ids))
        ids += ids[start : start + random.randint(1, 9)]
        if random.random() < 0.5:
            ids.append(random.randrange(3, VOCAB))
    return ids[:num_tokens]


def draw_params(random: Random) -> SamplingParams:
    """Greedy and sampled, all that a sampler keeps of a row."""
    is_greedy = random.random() < 0.5
    return SamplingParams(
        max_tokens=random.choice([1, 2, 3, 9, 40]),
        min_tokens=random.choice([0, 1]),
        temperature=0.0 if is_greedy else 0.7,
        top_p=random.choice([1.0, 0.9]),
        seed=random.randrange(99),
        n=1 if is_greedy else random.choice([1, 2]),
        presence_penalty=random.choice([0.0, 0.5]),
        repetition_penalty=random.choice([1.0, 1.0, 1.2]),
        logprobs=random.choice([None, 0, 3]),
        ignore_eos=random.random() < 0.5,
        stop_token_ids=tuple(random.sample(range(3, VOCAB), random.choice([0, 6]))),
    )


def by(executor: str) -> dict[str, Any]:
    """Settings of an LLM; a draft model of "graph" and of "eager only" decodes as its target."""
    if executor not in makers():
        return {"executor": executor}
    return {"executor": "eager", "make_runner": partial(build_runner, make_decode=makers()[executor])}


def makers() -> dict[str, MakeDecode]:
    return {"graph": partial(make_graph, maker=PlainMaker()), "eager only": EagerDecode}


class Near(float):
    """Equal to what differs by rounding."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 5e-3

    __hash__ = float.__hash__


def rounded(logprobs: list[Logprob] | None) -> list[tuple[int, Near, int]] | None:
    return None if logprobs is None else [(own.token_id, Near(own.logprob), len(own.top)) for own in logprobs]


def answers(folder: Path, count: int, prompts: list[list[int]], params: list[SamplingParams], **settings: Any) -> Any:
    """What every sample says, prompts with their answers, and how many drafted tokens were verified and accepted.

    Log-probabilities are to the bit where products are batch-invariant, else nearly.
    """
    settings = {
        "max_model_len": 256,
        "max_rows": 5,
        "selector": SnapKV(observation_len=8),
        "progress": False,
        "executor": "looped",
    } | settings
    is_exact = settings["executor"] == "looped"
    settings |= by(settings["executor"])
    with LLM(folder, num_speculative_tokens=count, **settings) as llm:
        outputs = llm.generate(prompts, params)
        said = [
            [
                (own.token_ids, own.finish_reason, own.stop_reason, own.logprobs if is_exact else rounded(own.logprobs))
                for own in output.samples
            ]
            for output in outputs
        ]
        texts = [[*output.prompt_token_ids, *own.token_ids] for output in outputs for own in output.samples]
        drafted, accepted = (
            sum(getattr(output.timings, name) for output in outputs) for name in ("drafted_tokens", "accepted_tokens")
        )
        return said, texts, (drafted, accepted)


@pytest.mark.parametrize(("name", "budget", "executor"), CASES)
def test_answers_are_those_without_drafts(
    name: str, budget: str, executor: str, tmp_path: Path, oracle: Oracle
) -> None:
    folder, random = with_letters(save(make_model(name), tmp_path)), Random(f"{name} {budget}")
    prompts = [repeating(random, random.choice([1, 4, 30, 33, 90, 150])) for _ in range(14)]
    params = some_with_grammars(random, [draw_params(random) for _ in prompts])
    settings: dict[str, Any] = {"budget": BUDGETS[budget], "executor": executor}
    if name in (
        "mixtral", "deepseek-v3", "gpt-oss", "lfm2-moe", "lfm3", "qwen3-next", "qwen3.5", "granite-hybrid-moe",
        "nemotron-3", "kimi-linear", "olmo-hybrid", "gemma3n-panels", "llama4", "laguna",
        "mimo-v2-panels", "hy-v4", "glm-5.3-flash",
    ):  # fmt: skip # products of routers and gates in prefill depend on which prompts share a job
        settings["max_rows"] = 28
    want, oracle.texts, none = answers(folder, 0, prompts, params, **settings)
    got, _, (num_drafted, num_accepted) = answers(folder, 4, prompts, params, **settings)
    assert got == want
    assert none == (0, 0) and num_drafted > num_accepted > 10


@pytest.mark.parametrize("executor", EXECUTORS[:2])
@pytest.mark.parametrize(
    "kv_dtype",
    ["fp8", "int8/int4", *(pytest.param(own, marks=pytest.mark.slow) for own in ("bfloat16", "int8", "int4"))],
)
def test_rows_of_other_formats_and_heads_with_their_own_budgets(
    kv_dtype: str, executor: str, tmp_path: Path, oracle: Oracle
) -> None:
    folder, random = save(make_model("qwen3", head_dim=32), tmp_path), Random(kv_dtype)
    prompts = [repeating(random, 100) for _ in range(9)]
    params = [draw_params(random) for _ in prompts]
    settings = {"budget": BUDGETS["rows"], "kv_dtype": kv_dtype, "heads": profile(folder), "executor": executor}
    want, oracle.texts, _ = answers(folder, 0, prompts, params, **settings)
    got, _, (num_drafted, num_accepted) = answers(folder, 3, prompts, params, **settings)
    assert got == want and num_drafted > num_accepted > 5


@pytest.mark.parametrize("executor", EXECUTORS[:2])
@pytest.mark.parametrize("name", ["qwen2-windows", "lfm2"])
def test_heads_with_their_own_budgets_in_some_layers(name: str, executor: str, tmp_path: Path, oracle: Oracle) -> None:
    """Of drafted tokens that are rejected, slots are restored in full layers and in rings of windows."""
    folder, random = save(make_model(name), tmp_path), Random(name)
    prompts = [repeating(random, 100) for _ in range(9)]
    params = [draw_params(random) for _ in prompts]
    model = read_model_config(folder)
    layers = len(kv_spec_of(model, "float32").budget_layers)
    heads = HeadProfile(shares=uneven(layers, model.num_kv_heads), model=fingerprint(folder))
    settings: dict[str, Any] = {"budget": BUDGETS["rows"], "heads": heads, "executor": executor}
    want, oracle.texts, _ = answers(folder, 0, prompts, params, **settings)
    got, _, (num_drafted, num_accepted) = answers(folder, 3, prompts, params, **settings)
    assert got == want and num_drafted > num_accepted > 5


@pytest.mark.parametrize("max_rows", [16, 17])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_short_rings_in_full_batches(executor: str, max_rows: int, tmp_path: Path, oracle: Oracle) -> None:
    """Drafts as long as a ring lets them be; graphs verify none in batches of 17."""
    folder, random = save(make_model("llama-gqa-tied"), tmp_path), Random(max_rows)
    prompts = [repeating(random, random.choice([4, 31, 90])) for _ in range(19)]
    params = [replace(draw_params(random), n=1) for _ in prompts]
    budget = KVBudget(num_sink=1, num_topk=25, num_recent=6)
    settings: dict[str, Any] = {"budget": budget, "executor": executor, "max_rows": max_rows}
    want, oracle.texts, _ = answers(folder, 0, prompts, params, **settings)
    got, _, (num_drafted, num_accepted) = answers(folder, 16, prompts, params, **settings)
    assert got == want and num_drafted > num_accepted > 10


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.usefixtures("costless")
def test_text_that_repeats_takes_fewer_steps(executor: str) -> None:
    """Of a trained model: most drafts are right, also behind a compressed prompt, and stop strings end where they do
    without drafts."""
    text = "The quick brown fox jumps over the lazy dog. " * 12
    params = [
        SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.0, stop=["lazy d"]),
        SamplingParams(max_tokens=7, temperature=0.0, logprobs=1),
    ]
    for budget in ("full", 96):
        said = []
        for count in (0, 8):
            settings = by(executor) | {"budget": budget, "num_speculative_tokens": count, "max_rows": 4}
            with LLM(TINY_MODEL, progress=False, **settings) as llm:
                outputs = llm.generate([text, text[:150] + "The quick", text[:99]], params)
                said.append([(output.text, output.token_ids) for output in outputs])
        assert said[0] == said[1]
        assert sum(output.timings.accepted_tokens for output in outputs) > 30


@pytest.mark.parametrize("has_drafter", [False, True])
@pytest.mark.usefixtures("costless")
def test_tokens_that_are_read_for_drafts_alone(monkeypatch: pytest.MonkeyPatch, has_drafter: bool) -> None:
    """As on a GPU: rows in a pause read nothing, and the next lookup sees all their tokens, as does a draft model."""
    random, lookups, lags = Random(4), [], []
    monkeypatch.setattr(StepTimes, "steps", lambda self, seconds, entries: 0.0)
    text = "The quick brown fox jumps over the lazy dog. " * 8
    prompts: list[Any] = [text, [random.randrange(6, 4000) for _ in range(40)]]
    params = [
        SamplingParams(max_tokens=80, temperature=temperature, seed=3, ignore_eos=True) for temperature in (0.0, 1.3)
    ]
    found, caught = History.draft, Speculation.step

    def step(own: Speculation, rows: tuple[int, ...], *more: Any) -> Any:
        before = len(lookups)
        drawn = caught(own, rows, *more)
        lags.append(len(lookups) == before)
        return drawn

    def draft(history: History, most: int) -> list[int]:
        lookups.append(history.num_tokens)
        return found(history, most)

    monkeypatch.setattr(History, "draft", draft)
    monkeypatch.setattr(Speculation, "step", step)
    said, seen = [], []
    for is_lazy in (False, True):
        with LLM(TINY_MODEL, executor="eager", num_speculative_tokens=8, max_rows=2, progress=False) as llm:
            own: Any = llm.engine.runner.speculation  # type: ignore[attr-defined]
            own.is_lazy, own.drafter = is_lazy, Wrong(lookups) if has_drafter else None
            lookups.clear()
            said.append([llm.generate([ids], one)[0].token_ids for ids, one in zip(prompts, params, strict=True)])
            seen.append(list(lookups))
    assert said[0] == said[1] and seen[0] == seen[1]
    assert sum(lags) > 40


@needs_compiler
@pytest.mark.usefixtures("costless")
def test_a_prediction_is_drafted_from() -> None:
    ids = [11, 45, 200, 31, 77, 98, 150, 9, 62]
    params = SamplingParams(max_tokens=50, temperature=0.9, seed=5, ignore_eos=True)
    with LLM(TINY_MODEL, num_speculative_tokens=4, progress=False) as llm:
        (want,) = llm.generate([ids], params)
        (got,) = llm.generate([ids], replace(params, prediction=want.token_ids))
        with pytest.raises(ValueError, match="prediction token id 99999 is outside the vocabulary"):
            llm.generate([ids], replace(params, prediction=[99999]))
        with pytest.raises(ValueError, match="a prediction of 70000 tokens; the limit is"):
            llm.generate([ids], replace(params, prediction=[1] * 70000))
    assert got.token_ids == want.token_ids
    assert got.timings.accepted_tokens > 30 > want.timings.accepted_tokens


NAMES = {
    "the_first_long_property_name": {"type": "string", "maxLength": 9}, "another_long_name": {"enum": ["abc", "abd"]},
    "the_third_of_the_long_names": {"type": "integer", "minimum": 0, "maximum": 999},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": NAMES, "required": list(NAMES), "additionalProperties": False}
LONG_NAMES = Grammar.json_schema(SCHEMA)
CALL = Grammar.lark(f'start: "<call>" /[a-c]{{1,3}}/ " with " %json {json.dumps(SCHEMA)} "</call>"')
ENDS_FORCED = Grammar.regex("[ab]{1,2}cdefghijkl|xyz")
GRAMMARS = [
    LONG_NAMES, CALL, ENDS_FORCED, Grammar.regex("[a-f]{2,6}(-[0-9]{3}){1,2}"), Grammar.json_object(),
    replace(LONG_NAMES, preface='preface: "<think>" /[a-d]{0,9}/ "</think>"'),
]  # fmt: skip


def with_letters(folder: Path) -> Path:
    """Add a tokenizer: letters, and some pairs of them."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())[:94], "\u0120", "\u010a"]
    pairs = [*product("abcdef", repeat=2), *product("0123456789", repeat=2)][: VOCAB - 3 - len(letters)]
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *letters, *map("".join, pairs)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    return folder


def some_with_grammars(random: Random, params: list[SamplingParams]) -> list[SamplingParams]:
    """A third of ``params`` with a grammar, a few with a stop string."""
    return [
        replace(
            own, grammar=random.choice([None, None, random.choice(GRAMMARS)]), stop=random.choice([[]] * 5 + [["e_"]])
        )
        for own in params
    ]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("has_lookups", [False, True])
def test_answers_under_grammars_are_those_without_drafts(
    executor: str, has_lookups: bool, tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of grammar, greedy and sampled, beside rows without one; of rows alone, tokens that are forced."""
    if not has_lookups:
        monkeypatch.setattr(History, "draft", lambda history, most: [])
    folder, random = with_letters(save(make_model("qwen3"), tmp_path)), Random(f"{executor} {has_lookups}")
    params = [replace(draw_params(random), grammar=own) for own in [*GRAMMARS, None] * 4]
    params = [replace(own, stop=random.choice([[], [], ["e_", "-1"]])) for own in params]
    prompts = [repeating(random, random.choice([1, 30, 90])) for _ in params]
    settings: dict[str, Any] = {"budget": BUDGETS["rows"], "executor": executor}
    want, oracle.texts, _ = answers(folder, 0, prompts, params, **settings)
    got, _, (num_drafted, num_accepted) = answers(folder, 6, prompts, params, **settings)
    assert got == want and num_drafted >= num_accepted > 60
    assert num_accepted < num_drafted if has_lookups else num_accepted > 0.95 * num_drafted


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.usefixtures("costless")
def test_ends_within_accepted_tokens(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a grammar, of max_tokens, by a stop string and a stop token: no token is lost and none too many."""
    monkeypatch.setattr(History, "draft", lambda history, most: [])
    greedy = SamplingParams(max_tokens=30, temperature=0.0, grammar=ENDS_FORCED)
    with LLM(TINY_MODEL, max_rows=3, num_speculative_tokens=8, progress=False, **by(executor)) as llm:
        (comma,) = llm.tokenizer(",", add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        params = [
            greedy,
            *(replace(greedy, max_tokens=most) for most in (3, 4, 6)),
            replace(greedy, stop=["fg"]),
            replace(greedy, grammar=Grammar.regex("aa,bcdefgh"), stop_token_ids=(comma,)),
            replace(greedy, temperature=1.0, seed=4, n=3, logprobs=2),
        ]
        outputs = llm.generate(["Letters: "] * len(params), params)
        whole = llm.tokenizer(outputs[0].text, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    assert re.fullmatch(ENDS_FORCED.text, outputs[0].text) and outputs[0].finish_reason == "stop"
    assert outputs[0].token_ids == whole
    for output, most in zip(outputs[1:4], (3, 4, 6), strict=True):
        assert (output.token_ids, output.finish_reason) == (whole[:most], "length")
    assert outputs[4].text == outputs[0].text.split("fg")[0] and outputs[4].samples[0].stop_reason == "fg"
    assert outputs[5].text == "aa" and outputs[5].samples[0].stop_reason == comma
    for sample in outputs[6].samples:
        assert re.fullmatch(ENDS_FORCED.text, sample.text) and len(sample.logprobs or ()) == len(sample.token_ids)
    assert all(output.timings.accepted_tokens for output in outputs)


@needs_compiler
def test_forced_tokens_are_drafted_whatever_lookups_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups that are always wrong end in a pause; what they are known for is not that of forced tokens."""
    monkeypatch.setattr(StepTimes, "cost", lambda self, entries: 0.05)
    lookups: list[int] = []

    def draft(history: History, most: int) -> list[int]:
        lookups.append(history.num_tokens)
        return wrong * most

    params = SamplingParams(max_tokens=400, temperature=0.0, grammar=Grammar.json_schema(
        {"type": "array", "items": SCHEMA, "minItems": 4, "maxItems": 4}
    ))  # fmt: skip
    found = []
    with LLM(TINY_MODEL, num_speculative_tokens=8, max_rows=2, progress=False) as llm:
        wrong = llm.tokenizer("Q", add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        for fake in (lambda history, most: [], draft):
            monkeypatch.setattr(History, "draft", fake)
            found += llm.generate(["A list: "], params)
    without, beside = found
    assert beside.token_ids == without.token_ids and "Q" not in beside.text
    assert beside.timings.accepted_tokens == without.timings.accepted_tokens > 0.4 * len(without.token_ids)
    assert 0 < beside.timings.drafted_tokens - without.timings.drafted_tokens < 40
    assert len(lookups) < 0.7 * (len(without.token_ids) - without.timings.accepted_tokens)


@needs_compiler
@pytest.mark.usefixtures("costless")
def test_text_that_repeats_under_a_grammar_is_looked_up() -> None:
    params = SamplingParams(max_tokens=120, temperature=0.9, seed=7, grammar=LONG_NAMES)
    with LLM(TINY_MODEL, num_speculative_tokens=8, max_rows=2, progress=False) as llm:
        (want,) = llm.generate(["One: "], params)
        (got,) = llm.generate(["One: "], replace(params, prediction=want.token_ids))
    assert got.token_ids == want.token_ids
    assert got.timings.accepted_tokens > want.timings.accepted_tokens > 20


@pytest.mark.usefixtures("costless")
def test_on_a_gpu_rows_with_a_grammar_draft_nothing() -> None:
    text = "one two three four five six seven " * 9
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    params = [replace(greedy, grammar=LONG_NAMES), greedy]
    said = []
    for is_lazy in (False, True):
        with LLM(TINY_MODEL, executor="eager", num_speculative_tokens=8, max_rows=4, progress=False) as llm:
            llm.engine.runner.speculation.is_lazy = is_lazy  # type: ignore[attr-defined]
            outputs = llm.generate([text, text], params)
        said.append([output.token_ids for output in outputs])
        assert (outputs[0].timings.drafted_tokens == 0) == is_lazy and outputs[1].timings.accepted_tokens > 0
    assert said[0] == said[1]


@needs_compiler
@pytest.mark.usefixtures("costless")
def test_an_aborted_row_drafts_for_its_next_owner() -> None:
    text = "one two three four five six seven " * 9
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with LLM(TINY_MODEL, num_speculative_tokens=8, max_rows=1, progress=False) as llm:
        (want,) = llm.generate([text], params)
        ids = tuple(llm.tokenizer(text * 2)["input_ids"])  # type: ignore[misc]
        llm.engine.add_request(Request(request_id="gone", prompt_token_ids=ids, sampling=params))
        for _ in range(4):
            llm.engine.step()
        llm.engine.abort("gone")
        while llm.engine.has_work:
            llm.engine.step()
        (got,) = llm.generate([text], params)
    assert got.token_ids == want.token_ids


def decided(name: str, folder: Path, device: str, **options: Any) -> EngineConfig:
    model = read_model_config(save(make_model(name), folder))
    return engine_config(model, EngineOptions(**options), KVBudget.full(128), 128, device=device)


@pytest.mark.parametrize(
    ("name", "device", "executor", "ranks", "count"),
    [("qwen3", "cpu", "looped", 1, 8), ("qwen3", "cpu", "eager", 1, 0), ("qwen3", "cuda", "eager", 1, 0),
     ("qwen3", "cuda", "graph", 1, 0), ("lfm2", "cpu", "looped", 1, 8), ("qwen3", "cpu", "looped", 2, 8),
     ("qwen3", "cpu", "eager", 2, 0), ("qwen3", "cuda", "graph", 2, 0)],
)  # fmt: skip
def test_it_is_on_where_it_was_measured(
    name: str, device: str, executor: str, ranks: int, count: int, tmp_path: Path
) -> None:
    config = decided(name, tmp_path, device, executor=executor, tensor_parallel=ranks)
    assert config.num_speculative_tokens == count


@pytest.mark.parametrize(
    ("name", "device", "options", "reason"),
    [
        ("lfm2", "cuda", {}, "executor 'graph': Lfm2.* recurrent layers"),
        (
            "qwen3",
            "cuda",
            {"tensor_parallel": 2},
            r"several ranks \(tensor_parallel 2\) .* on a CPU only; leave it out",
        ),
        ("deepseek-v3", "cpu", {"tensor_parallel": 2, "attention": "dp"}, "attention is 'dp', and .*; leave it out"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    name: str, device: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"num_speculative_tokens is 4: {reason}"):
        decided(name, tmp_path, device, num_speculative_tokens=4, **options)


@pytest.fixture
def no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    model_alone(monkeypatch)


def model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the draft model drafts, and always pays."""
    monkeypatch.setattr(StepTimes, "cost", lambda self, entries: 0.0)
    monkeypatch.setattr(History, "draft", lambda history, most: [])
    monkeypatch.setattr(StepTimes, "steps", lambda self, seconds, entries: 0.0)
    monkeypatch.setattr(speculation, "MOST_WAIT", 1)


DRAFTS: dict[str, dict[str, Any]] = {
    "itself": {},
    "another": {"head_dim": 32, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
}


# Target, draft model, rows, executor. Looped, every two of target, draft model and rows.
PAIRS = [
    pytest.param(
        ("qwen3", "deepseek-v3")[(kind + size) % 2], draft, max_rows, "looped", marks=marks("looped", size == kind % 3)
    )
    for kind, draft in enumerate((*DRAFTS, "latents", "windows", "small windows"))
    for size, max_rows in enumerate((1, 16, 17))
]
PAIRS += [pytest.param("lfm2", "another", 17, "eager", marks=needs_compiler)]
PAIRS += [
    pytest.param(name, draft, max_rows, executor, marks=marks(executor, executor == quick))
    for executor in ("eager only", "graph")
    for name, draft, max_rows, quick in (
        ("qwen3", "itself", 1, "graph"), ("qwen3", "another", 16, "eager only"), ("qwen3", "latents", 17, "eager only"),
        ("mistral-window", "windows", 16, "graph"), ("deepseek-v3", "small windows", 1, ""),
    )
]  # fmt: skip
PAIRS += [
    pytest.param(name, "another", 17, "eager only", marks=marks("eager only", name == "qwen3.5"))
    for name in ("lfm2", "qwen3.5", "gpt-oss")
]


@pytest.mark.usefixtures("no_lookup")
@pytest.mark.parametrize(("name", "draft", "max_rows", "executor"), PAIRS)
def test_a_draft_model_changes_no_answer(
    name: str, draft: str, max_rows: int, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its rows are full again and again, and where it falls behind more than a step takes."""
    monkeypatch.setattr(Speculator, "MOST_SLOTS", 48)
    monkeypatch.setattr(draft_model, "MOST_FED", 21)
    folder, random = save(make_model(name), tmp_path / "target"), Random(f"{name} {draft} {max_rows}")
    own = {"latents": make_model("deepseek-v3", q_lora_rank=None), "windows": make_model("mistral-window"),
           "small windows": make_model("mistral-window", sliding_window=5)}.get(draft)  # fmt: skip
    other = save(own if own is not None else make_model("qwen3", **DRAFTS[draft]), tmp_path / "draft")
    prompts = [repeating(random, random.choice([1, 4, 30, 33, 90, 150])) for _ in range(9 if max_rows == 1 else 20)]
    params = [draw_params(random) for _ in prompts]
    if max_rows == 1:
        params = [replace(own, n=1) for own in params]
    settings: dict[str, Any] = {"budget": BUDGETS["rows"], "max_rows": max_rows, "executor": executor}
    if name in ("deepseek-v3", "gpt-oss", "qwen3.5"):
        settings["max_rows"] = max(max_rows, 28) if max_rows > 1 else 1
    want, _, _ = answers(folder, 0, prompts, params, **settings)
    got, _, (num_drafted, num_accepted) = answers(folder, 4, prompts, params, speculative_model=other, **settings)
    assert got == want
    assert num_drafted > num_accepted
    assert num_drafted > (1 if name == "deepseek-v3" else 8)  # full rows of latents draft none where decode is looped


@pytest.mark.usefixtures("no_lookup")
@pytest.mark.parametrize("executor", ["eager only", "graph"])
def test_a_draft_model_beside_all_that_rows_have(executor: str, tmp_path: Path) -> None:
    """Formats of rows, per-head budgets, rows with a grammar, and stop strings."""
    folder, random = save(make_model("qwen3", head_dim=32), tmp_path / "target"), Random(executor)
    other = save(make_model("qwen3", head_dim=32), tmp_path / "draft")
    prompts = [repeating(random, random.choice([4, 33, 100])) for _ in range(9)]
    params = [draw_params(random) for _ in prompts]
    settings: dict[str, Any] = {
        "budget": BUDGETS["rows"], "kv_dtype": "fp8", "heads": profile(folder), "executor": executor,
    }  # fmt: skip
    want, _, _ = answers(folder, 0, prompts, params, **settings)
    got, _, (num_drafted, num_accepted) = answers(folder, 4, prompts, params, speculative_model=other, **settings)
    assert got == want and num_drafted > num_accepted > 5
    texts = ["one two three four five six seven", "The quick brown fox"]
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    params = [
        replace(greedy, max_tokens=24, grammar=Grammar.regex("[ -~]{24,30}")), replace(greedy, stop=["e"]),
    ]  # fmt: skip
    said = []
    for draft in (None, TINY_MODEL):
        with LLM(TINY_MODEL, speculative_model=draft, max_rows=4, progress=False, **by(executor)) as llm:
            outputs = llm.generate(texts, params)
            said.append([(output.text, output.finish_reason) for output in outputs])
    assert said[0] == said[1]
    assert outputs[0].timings.accepted_tokens > 5


@pytest.mark.parametrize("executor", [EXECUTORS[0], "eager only"])
@pytest.mark.usefixtures("no_lookup")
def test_a_grammar_ends_before_what_a_draft_model_expects(executor: str) -> None:
    """The step after the end is planned before the end is seen: the draft model holds all tokens of the row then."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    with LLM(TINY_MODEL, speculative_model=TINY_MODEL, max_rows=1, progress=False, **by(executor)) as llm:
        (whole,) = llm.generate([prompt], params)
        for count in range(3, 12):
            text = llm.tokenizer.decode(whole.token_ids[:count])  # type: ignore[union-attr]
            grammar = Grammar.regex(rf"(.|\n){{{len(text)}}}")
            (output,) = llm.generate([prompt], replace(params, grammar=grammar))
            assert (output.text, output.finish_reason) == (text, "stop")


@pytest.mark.parametrize("executor", [*EXECUTORS, "eager only"])
@pytest.mark.usefixtures("no_lookup")
def test_a_draft_model_that_is_the_model_is_nearly_always_right(executor: str) -> None:
    """Its rows are in int8 where it is looped; its context is whole, so nothing else differs."""
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    random = Random(2)
    prompts = [[random.randrange(6, 4000) for _ in range(size)] for size in (1, 30, 400)]
    settings = by(executor) | {"budget": "full", "max_model_len": 512, "speculative_model": TINY_MODEL}
    with LLM(TINY_MODEL, progress=False, **settings) as llm:
        assert any(line.startswith("draft model: ") and "a row, at most 8 tokens" in line for line in llm.notes)
        outputs = llm.generate(prompts, params)
    for output in outputs:
        assert output.timings.drafted_tokens > 40
        assert output.timings.accepted_tokens > 0.9 * output.timings.drafted_tokens


@pytest.mark.parametrize(("executor", "num_rows"), [("eager only", 17), ("graph", 16)])
def test_what_a_draft_model_is_fed_is_what_it_would_read(executor: str, num_rows: int, tmp_path: Path) -> None:
    """Rows that go on by none, some or all of their drafts and by other tokens, more than a step feeds at once."""
    folder, random = save(make_model("qwen3"), tmp_path), Random(num_rows)
    model = Speculator(folder=str(folder), model=read_model_config(folder), executor="eager")
    config, decoder = speculator_config(model, 17), Decoder.load(folder, model.model, "float32", "cpu", progress=False)
    fed, read = (DraftModel(decoder, config, makers()[executor]) for _ in range(2))
    for own in (fed, read):
        own.warm_up(progress=False)
    rows = [History([random.randrange(3, VOCAB) for _ in range(random.choice([1, 7, 40]))]) for _ in range(17)]
    for _ in range(8):
        chosen = random.sample(range(17), num_rows - random.choice([0, 0, 5]))
        wanted = [(row, rows[row], random.choice([1, 2, 5])) for row in chosen]
        for row in chosen:
            read.forget(row)
        drafts = fed.draft(wanted)
        assert drafts == read.draft(wanted)
        assert [len(draft) for draft in drafts] == [count for _, _, count in wanted]
        for row, draft in zip(chosen, drafts, strict=True):
            others = [random.randrange(3, VOCAB) for _ in range(random.choice([1, 1, 1, 9]))]
            for token in [*draft[: random.choice([0, 1, 5])], *others]:
                rows[row].append(token)


@needs_compiler
@pytest.mark.usefixtures("costless")
def test_lookup_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "steps", lambda self, seconds, entries: 0.0)
    asked: list[int] = []
    ask = DraftModel.draft

    def counted(self: DraftModel, wanted: Any) -> list[list[int]]:
        asked.extend(row for row, _, _ in wanted)
        return ask(self, wanted)

    monkeypatch.setattr(DraftModel, "draft", counted)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with LLM(TINY_MODEL, speculative_model=TINY_MODEL, progress=False) as llm:
        (text,) = llm.generate([[9, 8, 7]], params)
        num_fresh = len(asked)
        asked.clear()
        (again,) = llm.generate([[9, 8, 7]], replace(params, prediction=text.token_ids))
    assert again.token_ids == text.token_ids
    assert len(asked) < num_fresh and again.timings.accepted_tokens > 15


class Wrong:
    """A drafter that is never right and takes as long as a step."""

    def __init__(self, seen: list[int] | None = None) -> None:
        """``seen``: of every row that is asked for, how many tokens it has."""
        self.seconds, self.read_seconds, self.num_asked = 1.0, 0.0, 0
        self._seen = seen

    def forget(self, row: int) -> None: ...

    def holds(self, row: int) -> bool:
        return True

    def draft(self, wanted: Any) -> list[list[int]]:
        self.num_asked += 1
        if self._seen is not None:
            self._seen += [history.num_tokens for _, history, _ in wanted]
        return [[3] * count for _, _, count in wanted]


@needs_compiler
def test_a_draft_model_that_does_not_pay_is_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "draft", lambda history, most: [])
    monkeypatch.setattr(StepTimes, "cost", lambda self, entries: 0.05)
    monkeypatch.setattr(StepTimes, "steps", lambda self, seconds, entries: 0.2)
    with LLM(TINY_MODEL, progress=False) as llm:
        runner, drafter = llm.engine.runner, Wrong()
        own = Speculation(runner.step_parts, NeverRight(), 8, no_grammars(), drafter)  # type: ignore[arg-type]
        from snapstream.step import PrefillEntry

        entry = PrefillEntry(
            request_id="r", token_ids=(1, 2, 9), rows=(0,), seeds=(0,), budget=llm.config.budget,
            sampling=SamplingParams(max_tokens=5000, temperature=0.0), selector=llm.config.selector,
        )  # fmt: skip
        own.admit(entry)
        runner.rows.last_token[0] = 1
        for _ in range(2000):
            own.step((0,), torch.tensor([0]), None)  # type: ignore[arg-type]
    assert 5 < drafter.num_asked < 80


@needs_compiler
def test_a_draft_model_that_a_grammar_refuses_is_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "draft", lambda history, most: [])
    monkeypatch.setattr(StepTimes, "cost", lambda self, entries: 0.05)
    monkeypatch.setattr(StepTimes, "steps", lambda self, seconds, entries: 0.2)
    params = SamplingParams(max_tokens=250, temperature=0.0, grammar=Grammar.regex("[0-9]{240}"))
    with LLM(TINY_MODEL, num_speculative_tokens=8, max_rows=1, progress=False) as llm:
        own: Any = llm.engine.runner.speculation  # type: ignore[attr-defined]
        own.drafter = drafter = Wrong()
        (output,) = llm.generate(["Digits: "], params)
    assert output.timings.drafted_tokens == 0 and 0 < drafter.num_asked < 40


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; leave one of them out"),
        ({"speculative_model": "/nowhere"}, "/nowhere"),
        ({"speculative_model": TINY_DRAFT_MODEL}, "a draft model needs the same vocabulary"),
        ({"speculative_model": TINY_DRAFT_MODEL, "tensor_parallel": 2}, "a draft model needs the same vocabulary"),
    ],
)
def test_a_draft_model_that_cannot_be_used_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Before the prefix store's folder is taken: a caller that keeps the error could not start again."""
    disk = {"prefix_store": "64MiB", "prefix_dir": str(tmp_path / "store")}
    with pytest.raises(ValueError, match=reason):
        LLM(TINY_MODEL, progress=False, **{"speculative_model": TINY_MODEL} | disk | settings)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("device", "target", "draft", "problems", "own"),
    [
        ("cpu", {"executor": "looped"}, "qwen3", {}, ("looped", "float32", "int8")),
        ("cpu", {"executor": "eager", "dtype": "bfloat16"}, "qwen3", {}, ("looped", "float32", "int8")),
        ("cpu", {"executor": "eager", "dtype": "bfloat16"}, "qwen3", {"looped": "no compiler"},
         ("eager", "bfloat16", "auto")),
        ("cuda", {"executor": "graph", "dtype": "bfloat16"}, "qwen3", {}, ("graph", "bfloat16", "auto")),
        ("cuda", {"executor": "eager", "dtype": "bfloat16"}, "deepseek-v3", {}, ("eager", "bfloat16", "auto")),
        ("cuda", {"executor": "graph", "weights": "int8"}, "mixtral", {}, ("eager", "float32", "auto")),
    ],
)  # fmt: skip
def test_a_draft_model_has_the_executor_of_its_device(
    device: str, target: dict[str, Any], draft: str, problems: dict[str, str], own: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = (
        {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96} if target.get("weights") else {}
    )  # whole groups
    model = read_model_config(save(make_model("qwen3", **sizes), tmp_path / "target"))
    small = read_model_config(save(make_model(draft, **sizes), tmp_path / "draft"))
    other = Speculator(folder="draft", model=small)
    config = engine_config(
        model, EngineOptions(speculative_model=other, **target), KVBudget.full(128), 128, device=device,
        executor_problems=problems,
    )  # fmt: skip
    assert config.speculator is not None and config.num_speculative_tokens == 8
    steps = speculator_config(config.speculator, 4)
    assert (steps.executor, steps.dtype, steps.kv_dtype) == own and steps.device == device


@pytest.mark.parametrize(
    ("target", "draft", "executor", "reason"),
    [
        ("lfm2", "qwen3", "graph", "executor 'graph': Lfm2ForCausalLM has recurrent layers, and no graph takes back"),
        ("qwen3", "lfm2", "graph", "Lfm2ForCausalLM has recurrent layers; such a model takes drafts, and drafts none"),
        ("qwen3", "gemma4-shared", "eager", "has layers that share keys and values"),
    ],
)
def test_pairs_that_no_executor_runs_are_refused(
    target: str, draft: str, executor: str, reason: str, tmp_path: Path
) -> None:
    other = Speculator(folder="small", model=read_model_config(save(make_model(draft), tmp_path / "draft")))
    with pytest.raises(ValueError, match=f"speculative_model is 'small': .*{reason}"):
        decided(target, tmp_path / "target", "cuda", executor=executor, speculative_model=other)


@needs_compiler
def test_a_draft_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    hybrid = save(make_model("lfm2"), tmp_path / "hybrid")
    with pytest.raises(ValueError, match=f"speculative_model is '{hybrid}': Lfm2ForCausalLM has recurrent layers"):
        LLM(TINY_MODEL, speculative_model=hybrid, progress=False)
    small = save(make_model("qwen3"), tmp_path / "small")
    with pytest.raises(ValueError, match=f"with {VOCAB} tokens, of which 0 are those .*: a draft model needs the same"):
        LLM(TINY_MODEL, speculative_model=small, progress=False)
    with pytest.raises(ValueError, match="tokens; .* are those of|with .* tokens, of which .*needs the same"):
        LLM(TINY_MODEL, speculative_model=TINY_DRAFT_MODEL, progress=False)


class TestHistory:
    def test_a_draft_continues_the_longest_then_latest_occurrence(self) -> None:
        ids = [7, 1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3, 70, 8, 2, 3, 80, 1, 2, 3]
        assert History(ids).draft(2) == [70, 8]

    def test_too_short_a_match_drafts_nothing(self) -> None:
        assert MIN_MATCH == 2
        assert History([5, 1, 6, 1]).draft(4) == []
        assert History([1]).draft(4) == [] and History([]).draft(4) == []

    def test_a_period_goes_on(self) -> None:
        assert History([9, 4, 5, 4, 5, 4, 5]).draft(5) == [4, 5, 4, 5, 4]

    def test_lookups_equal_a_plain_search(self) -> None:
        random = Random(3)
        for _ in range(300):
            ids = [random.randrange(4) for _ in range(random.randint(0, 60))]
            history = History(ids[:5])
            for token in ids[5:]:
                history.append(token)
            assert history.draft(3) == plain_draft(ids, 3)


def plain_draft(ids: list[int], most: int) -> list[int]:
    for size in range(min(8, len(ids) - 1), MIN_MATCH - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                out = list(ids)
                for i in range(most):
                    out.append(out[end + i])
                return out[len(ids) :]
    return []


def no_grammars() -> RowGrammars:
    return RowGrammars(None, SamplingState(1, VOCAB, "cpu"))


class NeverRight:
    """A step whose drafts are all wrong, and that costs its entries."""

    most_draft_rows: int | None = None
    keeps_latents = True

    def __init__(self) -> None:
        self.num_verified: list[int] = []

    def step(self, rows: torch.Tensor, needs: object) -> Sampled:
        self.num_verified.append(0)
        return Sampled(torch.zeros_like(rows))

    def verify(self, batch: DraftBatch, needs: object, go_on: object = None) -> tuple[Sampled, list[int]]:
        self.num_verified.append(len(batch.rows) - len(batch.starts))
        return Sampled(torch.zeros(len(batch.starts), dtype=torch.int64)), [1] * len(batch.starts)


@needs_compiler
@pytest.mark.usefixtures("costless")
def test_drafts_that_are_never_right_become_rare() -> None:
    with LLM(TINY_MODEL, num_speculative_tokens=8, progress=False) as llm:
        runner = llm.engine.runner
        decode = NeverRight()
        own = Speculation(runner.step_parts, decode, 8, no_grammars())  # type: ignore[arg-type]
        prompt = Request(
            request_id="r",
            prompt_token_ids=tuple([1, 2] * 20),
            sampling=SamplingParams(max_tokens=900, temperature=0.0),
        )
        from snapstream.step import PrefillEntry

        entry = PrefillEntry(
            request_id="r", token_ids=prompt.prompt_token_ids, rows=(0,), seeds=(0,), sampling=prompt.sampling,
            budget=llm.config.budget, selector=llm.config.selector,
        )  # fmt: skip
        own.admit(entry)
        runner.rows.last_token[0] = 1
        for _ in range(400):
            own.step((0,), torch.tensor([0]), None)  # type: ignore[arg-type]
    assert 0 < sum(map(bool, decode.num_verified)) <= 12


def test_costs_follow_the_times_of_wider_steps() -> None:
    flat, steep = StepTimes(), StepTimes()
    for _ in range(5):
        for entries in (1, 2, 5, 9):
            flat.add(entries, 1.0 + 0.001 * entries)
            steep.add(entries, 0.1 + 0.5 * entries)
    assert flat.cost(1) < 0.02 and steep.cost(1) > 0.4
    assert StepTimes().cost(1) > 0
