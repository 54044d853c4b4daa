"""Rows whose kv heads have slots of their own keep and answer what rows of each head's own budget would.

The twin is ``evals.uneven.HeadRows``: a tensor per head, loops, no kernel of rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from evals.uneven import HeadRows, HeadRule, Rounding, RoundingOf, exact
from snapstream.config import KVBudget, PrefixStoreConfig, Selector
from snapstream.config.kv import HeadProfile
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.kernels.formats import ENCODINGS, FP8, INT4, Encoding
from snapstream.kernels.interface import HeadNorm, KernelVersion, bind
from snapstream.kv.cache import KVCache
from snapstream.kv.compress import write_rows
from snapstream.kv.selectors.diverse import Diverse
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.kv.spec import Full, KVSpec
from snapstream.llm import LLM
from snapstream.models.config_json import fingerprint
from snapstream.models.registry import read_model_config
from snapstream.models.views import RowsView
from snapstream.plan.memory import engine_memory
from snapstream.startup.build import build_runner
from snapstream.types import Request, RequestOutput, SamplingParams
from tests.kernels.triton import interpreter
from tests.parity import tape
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.lists_engine import ListsEngine
from tests.parity.test_invariance import OnTapes

BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
VOTES = SnapKV(observation_len=8)
SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "selector": VOTES, "max_model_len": 160, "max_rows": 3, "executor": "eager", "progress": False,
}  # fmt: skip
LENGTHS = (70, 5, 120, 33, 18, 1, 90, 40, 19)  # within all heads, within some, beyond all
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)  # more than the ring


def uneven(num_layers: int, num_kv_heads: int) -> tuple[tuple[float, ...], ...]:
    """Shares from nothing to a third, not in order."""
    weights = [[(7 * layer + 3 * head + 2) % 5 for head in range(num_kv_heads)] for layer in range(num_layers)]
    total = sum(map(sum, weights))
    return tuple(tuple(weight / total for weight in layer) for layer in weights)


def profile(folder: Path, num_kv_heads: int = 2) -> HeadProfile:
    return HeadProfile(shares=uneven(3, num_kv_heads), model=fingerprint(folder))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module", params=["qwen3", "llama-llama3", "llama-mha", "mixtral", "gpt-oss-full", "gemma2-full"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(request.param), tmp_path_factory.mktemp(request.param))


@torch.inference_mode()
def twin_answers(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    selector: Selector = VOTES,
    rounding_of: RoundingOf = exact,
    budget: KVBudget = BUDGET,
) -> list[list[int]]:
    """Greedy tokens by the twin, from the prefill of ``llm``; of requests with ``budget``."""
    runner, out = cast(ModelRunner, llm.engine.runner), []
    assert llm.config.heads is not None
    for prompt in prompts:
        slots = llm.config.heads.of(budget, len(prompt))
        rules = [HeadRule(name="", budgets=slots.budgets, selector=selector)]
        rows = HeadRows(runner, prompt, rules, rounding_of=rounding_of)
        tokens = [rows.first_logits.argmax().view(1)]
        while len(tokens) < 24:
            tokens.append(rows.feed(tokens[-1]).argmax(-1))
        out.append([int(token) for token in tokens])
    return out


def heads_of(folder: Path) -> HeadProfile:
    return profile(folder, 4 if "mha" in folder.name else 2)


@pytest.mark.parametrize("executor", ["eager", "looped"])
def test_answers_are_those_of_each_heads_own_budget(folder: Path, prompts: list[list[int]], executor: str) -> None:
    if executor == "looped" and find_compiler() is None:
        pytest.skip("looped steps need a C++ compiler")
    with LLM(folder, heads=heads_of(folder), **SETTINGS | {"executor": executor}) as llm:
        assert llm.config.heads is not None
        topk = [num for layer in llm.config.heads.topk for num in layer]
        assert len(set(topk)) > 2 and sum(topk) == 14 * len(topk)
        got = [output.token_ids for output in llm.generate(prompts, GREEDY)]
        assert got == twin_answers(llm, prompts)
    with LLM(folder, **SETTINGS) as even:
        assert got != [output.token_ids for output in even.generate(prompts, GREEDY)], "the profile does something"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3"), tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def expected(qwen: Path, prompts: list[list[int]]) -> list[list[int]]:
    with LLM(qwen, heads=profile(qwen), **SETTINGS) as llm:
        return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def with_kernels(folder: Path, version: KernelVersion, prompts: list[list[int]], params: Any) -> list[list[int]]:
    make_runner = partial(build_runner, kernels=bind("cpu", version))
    with LLM(folder, heads=profile(folder), make_runner=make_runner, **SETTINGS) as llm:
        return [output.token_ids for output in llm.generate(prompts, params)]


def test_plain_kernels_serve_such_rows(qwen: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert with_kernels(qwen, "torch", prompts, GREEDY) == expected


class TestTriton:
    pytestmark = [*interpreter.interpreted(), pytest.mark.slow]

    def test_its_kernels_serve_such_rows(self, qwen: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
        """Short, and few steps: interpreted kernels are slow."""
        few = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        got = with_kernels(qwen, "triton", [prompts[3], prompts[4]], few)
        assert got == [expected[3][:6], expected[4][:6]]


def test_captured_steps_answer_alike(
    qwen: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.parity import tape

    tape.install(monkeypatch)
    make_runner = partial(build_runner, kernels=bind("cpu", "torch"), make_decode=OnTapes)
    with LLM(qwen, heads=profile(qwen), make_runner=make_runner, **SETTINGS) as llm:
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected


@pytest.mark.parametrize("selector", [Diverse(observation_len=8), Hops(observation_len=8, num_hops=2)])
def test_selectors_choose_head_by_head(qwen: Path, prompts: list[list[int]], selector: Selector) -> None:
    with LLM(qwen, heads=profile(qwen), **SETTINGS | {"selector": selector}) as llm:
        got = [output.token_ids for output in llm.generate(prompts, GREEDY)]
        assert got == twin_answers(llm, prompts, selector)


def test_equal_shares_are_equal_heads(qwen: Path, prompts: list[list[int]]) -> None:
    even = HeadProfile(shares=((1 / 6, 1 / 6),) * 3, model=fingerprint(qwen))
    with LLM(qwen, heads=even, **SETTINGS) as llm, LLM(qwen, **SETTINGS) as plain:
        assert llm.config.heads is not None and llm.config.heads.topk == ((14, 14),) * 3
        for own, other in zip(llm.generate(prompts, GREEDY), plain.generate(prompts, GREEDY), strict=True):
            assert own.token_ids == other.token_ids and own.compression is not None and other.compression is not None
            assert own.compression.kept_tokens == other.compression.kept_tokens


MIXED = ["qwen2-windows", "gpt-oss", "lfm2", "granite-hybrid", "laguna", "llama4"]


@pytest.mark.parametrize("is_looped", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_layers_of_several_kinds_equal_the_list_based_engine(
    name: str, is_looped: bool, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Budgets of heads in the full layers of models with windows and states; what is planned is allocated."""
    if is_looped and find_compiler() is None:
        pytest.skip("looped steps need a C++ compiler")
    folder = save(make_model(name), tmp_path)
    spec = KVSpec.of(read_model_config(folder), "float32")
    own = HeadProfile(shares=uneven(len(spec.budget_layers), spec.num_kv_heads), model=fingerprint(folder))
    settings = SETTINGS | {"executor": "looped" if is_looped else "eager"}
    with LLM(folder, heads=own, **settings) as llm:
        heads, runner = llm.config.heads, cast(ModelRunner, llm.engine.runner)
        assert heads is not None and [bool(layer) for layer in heads.topk] == [
            layer in spec.budget_layers for layer in range(spec.num_layers)
        ]
        outputs = llm.generate(prompts[:4], replace(GREEDY, return_kept=True))
        assert runner.cache.num_bytes == 4 * engine_memory(llm.model_config, llm.config).row_bytes
    for prompt, output in zip(prompts, outputs, strict=False):
        budgets = heads.of(BUDGET, len(prompt)).budgets
        lists = ListsEngine(runner.decoder, BUDGET, VOTES, budgets)
        assert output.token_ids == lists.generate(prompt, 24)[0], len(prompt)
    assert outputs[2].compression is not None
    kept = outputs[2].compression.kept_positions
    assert kept is not None and [tuple(map(len, layer)) for layer in kept] == [
        tuple(budget.num_topk for budget in heads.budgets[layer]) or (0,) * spec.num_kv_heads
        for layer in spec.slot_layer_indices
    ]


def test_a_profile_without_full_layers_is_refused(tmp_path: Path) -> None:
    folder = save(make_model("mistral-window"), tmp_path)
    own = HeadProfile(shares=uneven(3, 2), model=fingerprint(folder))
    with pytest.raises(ValueError, match="all 3 layers of MistralForCausalLM have sliding windows"):
        LLM(folder, heads=own, **SETTINGS)


def test_rows_take_the_bytes_of_equal_heads(qwen: Path) -> None:
    with LLM(qwen, heads=profile(qwen), **SETTINGS) as llm, LLM(qwen, **SETTINGS) as plain:
        own, other = cast(ModelRunner, llm.engine.runner), cast(ModelRunner, plain.engine.runner)
        assert own.cache.num_bytes == other.cache.num_bytes


def test_samples_neighbours_and_later_owners_of_a_row(qwen: Path, prompts: list[list[int]]) -> None:
    """Alone, beside others, as one of three samples, and in a row that a longer prompt had before."""
    with LLM(qwen, heads=profile(qwen), **SETTINGS) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        assert alone == [output.token_ids for output in llm.generate(prompts, GREEDY)]
        three = SamplingParams(n=3, max_tokens=24, temperature=0.0, ignore_eos=True)
        assert [sample.token_ids for sample in llm.generate([prompts[0]], three)[0].samples] == [alone[0]] * 3


def test_a_stored_prefix_gives_the_same_rows(qwen: Path, prompts: list[list[int]]) -> None:
    store = PrefixStoreConfig(num_bytes=2**24, block_len=16, min_tokens=16)
    with LLM(qwen, heads=profile(qwen), prefix_store=store, chunk_len=16, **SETTINGS) as llm:
        cold, warm = (llm.generate([prompts[2]], GREEDY)[0] for _ in range(2))
        assert warm.cached_tokens > 0 and warm.token_ids == cold.token_ids


def test_what_heads_keep_is_what_rows_of_their_own_budget_keep(qwen: Path, prompts: list[list[int]]) -> None:
    """Lists by layer and head, and the same as bits; the other engine has equal heads."""
    listed, bits = (SamplingParams(max_tokens=1, return_kept=kind) for kind in (True, "bitmap"))  # type: ignore[arg-type]
    with LLM(qwen, heads=profile(qwen), **SETTINGS) as llm:
        assert llm.config.heads is not None
        slots = [llm.config.heads.of(BUDGET, len(prompt)) for prompt in prompts]
        told = [(output.compression, more.compression) for output, more in
                zip(llm.generate(prompts, listed), llm.generate(prompts, bits), strict=True)]  # fmt: skip
    assert len(set(slots)) == 4, "prompts that fit, two that a head would hold whole, and longer ones"
    with LLM(qwen, **SETTINGS | {"budget": llm.config.heads.widest}) as plain:
        distinct = {budget for own in slots for budget in own.distinct}
        own = {budget: plain.generate(prompts, listed, budget=budget) for budget in distinct}
    for index, (prompt, (lists, bitmap)) in enumerate(zip(prompts, told, strict=True)):
        assert lists is not None and bitmap is not None
        if len(prompt) <= BUDGET.capacity:
            assert lists.kept_positions is None and bitmap.kept_bitmap is None
            continue
        assert lists.kept_positions is not None and bitmap.kept_bitmap is not None
        for layer, heads in enumerate(slots[index].budgets):
            for head, budget in enumerate(heads):
                compression = own[budget][index].compression
                assert compression is not None
                last = range(len(prompt) - budget.num_recent, len(prompt))
                wanted = tuple(range(2, last.start))
                if compression.kept_positions is not None:
                    wanted = compression.kept_positions[layer][head]
                assert lists.kept_positions[layer][head] == wanted
                width = -(-len(prompt) // 8)
                start = (layer * len(heads) + head) * width
                own_bits = bitmap.kept_bitmap.bits[start : start + width]
                kept = [token for token in range(8 * width) if own_bits[token // 8] >> token % 8 & 1]
                assert kept == [0, 1, *wanted, *last]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": "full"}, "num_topk 0"),
        ({"budget": KVBudget(num_sink=2, num_topk=14, num_window=4, num_recent=12)}, "num_window 4"),
    ],
)
def test_what_cannot_be_had_with_heads_is_refused(qwen: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(qwen, heads=profile(qwen), **SETTINGS | changes)


def test_profiles_of_other_models_are_refused(qwen: Path, tmp_path: Path) -> None:
    other = save(make_model("qwen3", intermediate_size=96), tmp_path / "other")
    with pytest.raises(ValueError, match="another checkpoint"):
        LLM(other, heads=profile(qwen), **SETTINGS)
    with pytest.raises(ValueError, match="2 layers of 2 kv heads; this model has 3 of 2"):
        LLM(qwen, heads=HeadProfile(shares=uneven(2, 2), model=fingerprint(qwen)), **SETTINGS)


def test_prompts_that_fit_keep_all_tokens(qwen: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Such rows have equal heads, as without a profile."""
    with LLM(qwen, **SETTINGS) as plain:
        equal = [output.token_ids for output in plain.generate(prompts, GREEDY)]
    fits = [len(prompt) <= BUDGET.capacity for prompt in prompts]
    assert [own == other for own, other in zip(expected, equal, strict=True)] == fits


OWN = (  # fewer of each, a longer ring, no selection, no sinks
    KVBudget(num_sink=2, num_topk=9, num_recent=9), KVBudget(num_sink=1, num_topk=10, num_recent=21),
    KVBudget(num_sink=0, num_topk=0, num_recent=32), KVBudget(num_sink=0, num_topk=14, num_recent=3),
)  # fmt: skip


@pytest.mark.parametrize("executor", ["eager", "looped"])
def test_requests_have_budgets_of_their_own(qwen: Path, prompts: list[list[int]], executor: str) -> None:
    """Each by the profile, beside others and in rows that requests with other budgets had before."""
    if executor == "looped" and find_compiler() is None:
        pytest.skip("looped steps need a C++ compiler")
    with LLM(qwen, heads=profile(qwen), **SETTINGS | {"executor": executor}) as llm:
        budgets = [(BUDGET, *OWN)[i % 5] for i in range(len(prompts))]
        pairs = [*zip(prompts, budgets, strict=True), *zip(prompts, budgets[::-1], strict=True)]
        requests = [
            Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=GREEDY, budget=budget)
            for i, (prompt, budget) in enumerate(pairs)
        ]
        got = [list(output.samples[0].token_ids) for output in llm.answer(requests)]
        wanted = [twin_answers(llm, [prompt], budget=budget)[0] for prompt, budget in pairs]
        assert got == wanted
        assert llm.config.heads is not None and llm.config.heads.of(OWN[0], 99).topk != llm.config.heads.topk


@pytest.mark.parametrize(
    "budget",
    [KVBudget(num_sink=0, num_topk=15, num_recent=8), KVBudget(num_sink=2, num_topk=8, num_window=4, num_recent=8)],
)
def test_requests_that_such_rows_cannot_serve_are_refused(
    qwen: Path, prompts: list[list[int]], budget: KVBudget
) -> None:
    match = "per-head budgets of this engine they are at most 14 and 0"
    with LLM(qwen, heads=profile(qwen), **SETTINGS) as llm, pytest.raises(ValueError, match=match):
        llm.generate([prompts[0]], GREEDY, budget=budget)


def test_the_store_takes_answers_from_rows_that_hold_all_tokens(qwen: Path, prompts: list[list[int]]) -> None:
    store = PrefixStoreConfig(num_bytes=2**24, block_len=4, min_tokens=4, idle_len=0)
    first, few = prompts[8][:12], SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True)
    with LLM(qwen, heads=profile(qwen), prefix_store=store, chunk_len=4, **SETTINGS) as llm:
        longer = [*first, *llm.generate([first], few)[0].token_ids]
        warm = llm.generate([longer], GREEDY)[0]
        llm.reset_prefix_store()
        assert warm.cached_tokens > len(first) and warm.token_ids == llm.generate([longer], GREEDY)[0].token_ids


# Quantized rows with per-head budgets: FP8 with scales per head, integers with scales per slot, bf16.
# The twin keeps a tensor of numbers per head and rounds what goes there by the forms' own definitions.

__all__ = ["prompts"]  # a fixture


def of_fp8(prompt: Tensor) -> Rounding:
    scale = FP8.scale_of(prompt[None])  # [1]: of the whole prompt, and of what follows
    return lambda tokens: FP8.decode(FP8.encode(tokens, scale), scale)


def of_slots(encoding: Encoding) -> RoundingOf:
    def rounded(tokens: Tensor) -> Tensor:
        scale = encoding.scale_of(tokens)
        return encoding.decode(encoding.encode(tokens, scale), scale)

    return lambda prompt: rounded


def of_bfloat16(prompt: Tensor) -> Rounding:
    return lambda tokens: tokens.bfloat16().float()


ROUNDING: dict[str, RoundingOf] = {"fp8": of_fp8, "bfloat16": of_bfloat16} | {
    name: of_slots(encoding) for name, encoding in ENCODINGS.items() if encoding.format.scales == "slot"
}
ROUNDING["int4"] = lambda prompt: lambda tokens: INT4.decode(INT4.encode(tokens, None), None)


def before_a_tie(output: RequestOutput) -> list[int]:
    """Its tokens before the first of which the two likeliest differ by rounding alone."""
    assert output.logprobs is not None
    ties = (index for index, own in enumerate(output.logprobs) if own.top[0][1] - own.top[1][1] < 1e-5)
    return output.token_ids[: next(ties, None)]


@pytest.mark.parametrize(("name", "executor"), [("qwen3", "eager"), ("llama-mha", "looped")])
@pytest.mark.parametrize(
    "kv_dtype",
    [pytest.param(own, marks=[pytest.mark.slow] * (own in ("bfloat16", "int8"))) for own in ROUNDING],
)
def test_answers_are_those_of_the_twin(
    name: str, executor: str, kv_dtype: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    if executor == "looped" and find_compiler() is None:
        pytest.skip("looped steps need a C++ compiler")
    changes: dict[str, Any] = {"executor": executor, "kv_dtype": kv_dtype}
    sizes = {"head_dim": 32} if kv_dtype == "int4" else {}
    folder = save(make_model(name, **sizes), tmp_path / name)
    with LLM(folder, heads=heads_of(folder), **SETTINGS | changes) as llm:
        outputs = llm.generate(prompts, replace(GREEDY, logprobs=2))
        for output, want in zip(outputs, twin_answers(llm, prompts, rounding_of=ROUNDING[kv_dtype]), strict=True):
            got = before_a_tie(output)
            assert got and got == want[: len(got)]
        assert got != twin_answers(llm, prompts), "the rounding does something"
        cache = cast(ModelRunner, llm.engine.runner).cache
        planned = engine_memory(llm.model_config, llm.config).row_bytes
        assert cache.num_bytes == (llm.config.max_rows + 1) * planned
        assert planned == engine_memory(llm.model_config, replace(llm.config, heads=None)).row_bytes


def answers(folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **more: Any) -> list[list[int]]:
    with LLM(folder, heads=profile(folder), **SETTINGS | {"kv_dtype": "fp8"} | more) as llm:
        return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def narrow_heads_expected(qwen: Path, prompts: list[list[int]]) -> list[list[int]]:
    return answers(qwen, prompts)


def by_kernels(version: KernelVersion, **parts: Any) -> Callable[..., Any]:
    return partial(build_runner, kernels=bind("cpu", version), **parts)


def test_captured_steps_answer_alike_of_narrow_heads(
    qwen: Path, prompts: list[list[int]], narrow_heads_expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tape.install(monkeypatch)
    assert answers(qwen, prompts, make_runner=by_kernels("torch", make_decode=OnTapes)) == narrow_heads_expected


def test_later_owners_and_samples_have_the_scales_of_their_prompt(
    qwen: Path, prompts: list[list[int]], narrow_heads_expected: list[list[int]]
) -> None:
    """One row, so that each prompt follows another; then three rows of one prompt."""
    assert answers(qwen, prompts, max_rows=1) == narrow_heads_expected
    three = SamplingParams(n=3, max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(qwen, heads=profile(qwen), kv_dtype="fp8", **SETTINGS) as llm:
        samples = llm.generate([prompts[0]], three)[0].samples
        assert [sample.token_ids for sample in samples] == [narrow_heads_expected[0]] * 3


class TestTritonOverNarrowRows:
    pytestmark = [*interpreter.interpreted(), pytest.mark.slow]

    def test_its_kernels_serve_rows_in_fp8(
        self, qwen: Path, prompts: list[list[int]], narrow_heads_expected: list[list[int]]
    ) -> None:
        few = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        got = answers(qwen, [prompts[3], prompts[4]], few, make_runner=by_kernels("triton"))
        assert got == [narrow_heads_expected[3][:6], narrow_heads_expected[4][:6]]

    def test_in_bfloat16_over_fp8_they_see_the_numbers_of_plain_kernels(self, qwen: Path) -> None:
        """A decode step of a layer: the dtype of a GPU, with magnitudes that FP8 cuts and that it loses."""

        slots = profile(qwen).slots(BUDGET, 160)
        spec = KVSpec(
            layers=(Full(num_kv_heads=2, key_dim=16, value_dim=16),) * 3, num_heads=4, dtype="bfloat16", kv_dtype="fp8"
        )
        torch.manual_seed(0)
        keys, values = torch.randn(2, 2, 40, 16, dtype=torch.bfloat16) * 30
        queries, heads = torch.randn(8, 4, 16), torch.randn(2, 8, 16).bfloat16()
        heads[0, 4:] *= 1000
        rows, rope = torch.tensor([0, 2]), (torch.ones(2, 1, 16), torch.zeros(2, 1, 16))
        found = []
        for version in ("torch", "triton"):
            kernels = bind("cpu", version)
            cache = KVCache(spec, 2, BUDGET.capacity, "cpu", kernels, heads=slots)
            assert cache.heads is not None
            write_rows(cache, 1, rows.tolist(), keys, values, queries.bfloat16(), BUDGET, VOTES)
            places = cache.heads.places(rows, torch.tensor([40, 40]), torch.tensor([24, 24]))
            out = RowsView(cache, rows, places, kernels).attend(1, heads, HeadNorm(None, 1e-6), rope)
            found.append((out, cache.k.float(), cache.v.float(), cache.k_scale))
        for own, other in zip(*found, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)
        assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])
