"""Engines over four ranks answer as one device does, and rows of several ranks are transferred whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from snapstream import LLM, KVBudget, SamplingParams
from snapstream.config import KVDType, PrefixStoreConfig, SplitAttention
from snapstream.config.kv import HeadProfile
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.kv.selectors.diverse import Diverse
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.models.config_json import fingerprint
from snapstream.models.tokenizer import has_tokenizer
from snapstream.types import Request, RequestOutput
from tests.disaggregation.pair import joined
from tests.disaggregation.test_rows_between_engines import PARAMS, SETTINGS, TEXTS, check, requests_of
from tests.distributed import cases
from tests.distributed.cases import Drafted, counted
from tests.distributed.pairs import Pair, assert_same, ids
from tests.distributed.pool import Pool
from tests.distributed.travelling import Carried, carried
from tests.engine.test_speculation import draw_params, repeating, some_with_grammars, with_letters
from tests.llm.conftest import write_checkpoint
from tests.parity.checkpoints import VOCAB, make_model, save

# Whole engines over four ranks answer as one device does: heads split, experts distributed, rows distributed.
# Processes over gloo, which compare their drawn tokens after every step. Most of the time is their start, so there are
# two engines; what else engines can do is tested with two ranks, and other splits over four without an engine
# (``test_tensor_parallel.py``). Here two ranks share a kv head, and neither of the model's sizes is a rank's own.

NEEDS_COMPILER = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
FOUR_RANKS_SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "selector": SnapKV(observation_len=8),
    "max_model_len": 128, "chunk_len": 32, "progress": False, "max_rows": 5, "executor": "eager",
}  # fmt: skip
PROMPTS = [ids(length, seed=length, vocab=VOCAB) for length in (70, 5, 40)]  # above and below the budget
REQUESTS = [
    SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, return_kept=True, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.8, seed=5, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.9, seed=1, n=2, ignore_eos=True),
]


@pytest.mark.parametrize(
    ("name", "split"),
    [("llama-gqa-tied", {}), ("deepseek-v3", {"experts": "ep", "attention": "dp"})],
    ids=["llama", "latents, experts and rows distributed"],
)
def test_answers_are_those_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: dict[str, Any]
) -> None:
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    folder = save(make_model(name), tmp_path)
    with LLM(folder, **FOUR_RANKS_SETTINGS) as one:
        wanted = one.generate(PROMPTS, REQUESTS)
    with LLM(folder, **FOUR_RANKS_SETTINGS, tensor_parallel=4, **split) as four:
        found = four.generate(PROMPTS, REQUESTS)
        assert four.engine.rows_free == 5
    for ours, theirs in zip(wanted, found, strict=True):
        assert_same(ours, theirs)


SHARES = ((0.9, 0.0), (0.0, 0.0), (0.02, 0.08))  # some heads select nothing while others select


def test_heads_have_the_slots_of_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of prompts that fit the budget, that are a little longer, and that are much longer; also of requests with
    a smaller budget, and after a hit in the prefix store. Heads have unlike numbers of candidates, or none.
    """
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    folder = save(make_model("llama-gqa-tied"), tmp_path)
    settings = FOUR_RANKS_SETTINGS | {
        "heads": HeadProfile(shares=SHARES, model=fingerprint(folder)), "selector": Hops(observation_len=8, num_hops=2),
        "prefix_store": PrefixStoreConfig(num_bytes=2**22, block_len=8, min_tokens=8),
    }  # fmt: skip
    prompts = [ids(length, seed=length, vocab=VOCAB) for length in (100, 20, 34, 45)]
    smaller = KVBudget(num_sink=1, num_topk=9, num_recent=10)
    with pytest.raises(ValueError, match="heads: the profile is of another checkpoint"):
        LLM(folder, **settings | {"heads": HeadProfile(shares=SHARES, model="other")}, tensor_parallel=4)
    with LLM(folder, **settings) as one, LLM(folder, **settings, tensor_parallel=4) as four:
        pair, diverse = Pair(one, four), Diverse(observation_len=8, num_scored=4)
        for params in REQUESTS[:2]:
            pair.same(prompts, params)
            pair.same(prompts, params, selector=diverse)
            pair.same(prompts, params, budget=smaller)
        said = pair.same(prompts[1:2], REQUESTS[0])[0].samples[0].token_ids
        before = pair.stored_tokens()
        pair.same([[*prompts[1], *said, *prompts[2]]], REQUESTS[0], selector=diverse)
        assert pair.stored_tokens() == (before[0] + 24, before[1] + 24), "of the prompt and its answer"
        assert one.config.heads is not None
        sizes = [{own.capacity for own in one.config.heads.of(BUDGET, n).distinct} for n in (32, 34, 100)]
        assert list(map(len, sizes)) == [1, 2, 4], sizes


# Rows of engines of several ranks travel whole: the pieces over two ranks, and engines of unlike numbers of ranks.

RANKS: dict[str, Any] = {"tensor_parallel": 2}


def short(params: dict[str, SamplingParams]) -> list[Request]:
    """Each with a prompt below the budget and one above; a step of several ranks is many waits for each other."""
    return requests_of({name: replace(own, max_tokens=8) for name, own in params.items()}, (20, 70))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("deepseek-v3"), tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kv head that both ranks have, or two with windows."""
    return save(make_model("mimo-v2-panels"), tmp_path_factory.mktemp("uneven"))


@pytest.mark.parametrize(
    ("name", "attention", "kv_dtype"),
    [
        ("letters", "tp", "auto"), ("letters", "tp", "int8"), ("letters", "tp", "fp8"),
        ("latents", "tp", "auto"), ("latents", "dp", "auto"), ("latents", "dp", "fp8"), ("uneven", "tp", "auto"),
    ],
)  # fmt: skip
def test_a_row_that_ranks_gather_is_that_of_one_device(
    two: Pool, name: str, attention: SplitAttention, kv_dtype: KVDType, request: pytest.FixtureRequest
) -> None:
    """Its bytes come back bit for bit from other rows of another rank; heads of several ranks stand in order."""
    folder = request.getfixturevalue(name)
    with torch.inference_mode():
        wanted = carried(None, Carried(folder, "tp", kv_dtype))
    first, second = two.run(carried, Carried(folder, attention, kv_dtype))
    assert first.sent == second.sent, "every rank has the whole row"
    for own in (wanted, first, second):
        assert own.again == own.sent
        assert tuple(map(len, own.sent)) == wanted.layer_bytes
    if kv_dtype == "auto":  # narrow numbers may round to a neighbour
        for ours, theirs in zip(wanted.sent, first.sent, strict=True):
            torch.testing.assert_close(_numbers(theirs), _numbers(ours), atol=1e-4, rtol=1e-4)


def _numbers(part: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(part), dtype=torch.float32)


def test_an_engine_of_two_ranks_reads_for_one_device(letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    with joined(letters, reading=RANKS, **SETTINGS) as pair:
        wanted = ("seeded, three samples", "logprobs", "kept bitmap")
        check(pair, short({**{name: PARAMS[name] for name in wanted}, "grammar": TEXTS["grammar"]}))


def test_one_device_reads_for_ranks_that_have_whole_rows(latents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one request lie on both ranks."""
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    with joined(latents, answering={**RANKS, "attention": "dp"}, **SETTINGS) as pair:
        check(pair, short({name: PARAMS[name] for name in ("greedy", "seeded, three samples")}))


# Speculative decoding over ranks: rank 0 looks for drafts, and all ranks verify them. Drawn tokens of all ranks are
# compared after every step.

SHORT_RINGS = {"budget": KVBudget(num_sink=1, num_topk=25, num_recent=6)}
LONG_VALUES = {"v_head_dim": 40, "kv_lora_rank": 24}  # values of a head are longer than latents


@pytest.mark.parametrize("executor", ["eager", pytest.param("looped", marks=NEEDS_COMPILER)])
@pytest.mark.parametrize(
    ("ranks", "name", "changes", "settings"),
    [
        ("two", "llama-gqa-tied", {}, {"max_rows": 16, **SHORT_RINGS}),
        ("two", "llama-gqa-tied", {}, {"max_rows": 17, "heads": SHARES}),
        ("two", "deepseek-v3", LONG_VALUES, {"max_rows": 20, "budget": "full"}),
        ("two", "qwen3.5", {}, {"max_rows": 20}),
        ("four", "llama-gqa-tied", {}, {"heads": SHARES}),
        ("four", "deepseek-v3", LONG_VALUES, {"max_rows": 20}),
    ],
    ids=["16 rows", "17 rows, heads", "latents", "states", "four ranks, heads", "four ranks, latents"],
)
def test_drafts_over_ranks_change_no_answer(
    ranks: str, name: str, changes: dict[str, Any], settings: dict[str, Any], executor: str,
    tmp_path: Path, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Greedy and sampled, with penalties, log-probabilities, grammars, several samples: see ``draw_params``."""
    pool, of_ranks = request.getfixturevalue(ranks), {"experts": "ep" if ranks == "four" else "tp"}
    folder = with_letters(save(make_model(name, **changes), tmp_path))
    random = Random(f"{ranks} {name} {len(settings)}")
    if "heads" in settings:
        settings = settings | {"heads": HeadProfile(shares=SHARES, model=fingerprint(folder))}
    settings = FOUR_RANKS_SETTINGS | {"executor": executor} | settings
    asked = drawn(random, folder, settings)
    want = asked.answers(num_speculative_tokens=0)
    check_drafts(want, pool.run(cases.drafting, with_answers(asked, want), {"num_speculative_tokens": 4, **of_ranks}))


def drawn(random: Random, folder: Path, settings: dict[str, Any]) -> Drafted:
    count = 19 if settings["max_rows"] in (16, 17) else 10
    prompts = [repeating(random, random.choice([1, 4, 30, 33, 60, 80])) for _ in range(count)]
    params = [draw_params(random) for _ in prompts]
    if has_tokenizer(folder):
        params = some_with_grammars(random, params)
    return Drafted(folder=folder, settings=settings, prompts=prompts, params=params)


def with_answers(asked: Drafted, want: list[RequestOutput]) -> Drafted:
    texts = [[*output.prompt_token_ids, *own.token_ids] for output in want for own in output.samples]
    return replace(asked, texts=texts)


def check_drafts(want: list[RequestOutput], found: list[list[RequestOutput]]) -> None:
    """``found``: by rank."""
    for one, two in zip(want, found[0], strict=True):
        assert_same(one, two)
    drafted, accepted = counted(found[0])
    assert drafted > accepted > 10 and not any(found[1:])


@NEEDS_COMPILER
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8", "int8", "int4", "int8/int4"])
def test_drafts_over_ranks_in_rows_of_every_format(two: Pool, kv_dtype: str, tmp_path: Path) -> None:
    """What rejected tokens overwrote is restored. Compared with ranks without drafts: one device rounds otherwise."""
    folder = save(make_model("qwen3", head_dim=32), tmp_path)
    heads = HeadProfile(shares=SHARES, model=fingerprint(folder))
    asked = drawn(Random(kv_dtype), folder, FOUR_RANKS_SETTINGS | {
        "executor": "looped", "kv_dtype": kv_dtype, "heads": heads, "max_rows": 20,
    })  # fmt: skip
    want = two.run(cases.drafting, asked, {"num_speculative_tokens": 0})[0]
    check_drafts(want, two.run(cases.drafting, with_answers(asked, want), {"num_speculative_tokens": 3}))


@pytest.mark.parametrize("executor", ["eager", pytest.param("looped", marks=NEEDS_COMPILER)])
def test_rank_0_has_the_draft_model(two: Pool, executor: str, tmp_path: Path) -> None:
    folder = save(make_model("llama-gqa-tied"), tmp_path)
    asked = drawn(Random(5), folder, FOUR_RANKS_SETTINGS | {"executor": executor})
    want = asked.answers(num_speculative_tokens=0)
    check_drafts(want, two.run(cases.drafting, asked, {"num_speculative_tokens": 4, "speculative_model": folder}))
