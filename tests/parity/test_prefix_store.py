"""A prompt that begins in the prefix store is answered as one that was computed from its first token."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from errno import EAGAIN, ENOLCK, EROFS
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from snapstream.config import KVBudget, PrefixStoreConfig
from snapstream.exec.speculation import History, StepTimes
from snapstream.kv.prefix_folder import MARKER, PrefixFolder, folder_secret
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.types import Request, RequestOutput, SamplingParams
from tests.parity.checkpoints import ARCHITECTURES, RECURRENT, VOCAB, make_model, save
from tests.waiting import until

BLOCK, LONGEST = 8, 160
SELECTOR = SnapKV(observation_len=4)
BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
STORE = PrefixStoreConfig(num_bytes=2**20, block_len=BLOCK, min_tokens=BLOCK, idle_len=0)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0, return_kept=True)

SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "selector": SELECTOR, "max_model_len": LONGEST, "max_rows": 4, "chunk_len": BLOCK,
    "prefix_store": STORE, "progress": False,
}  # fmt: skip


def ids(count: int, seed: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


class Folders(dict[str, Path]):
    """Checkpoints by architecture, each written when it is first asked for."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self.make_folder = make_folder

    def __missing__(self, name: str) -> Path:
        self[name] = save(make_model(name), self.make_folder(name))
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp)


@pytest.fixture
def folder(folders: Folders) -> Path:
    return folders["llama-gqa-tied"]


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[LLM]:
    with LLM(folder, **(SETTINGS | settings)) as llm:
        yield llm


def row_of(llm: LLM, num_tokens: int) -> list[Tensor]:
    """Keys and values of the first row, where it was written."""
    cache = llm.engine.runner.cache  # type: ignore[attr-defined]
    layers = [cache.layer(layer) for layer in range(cache.spec.num_layers)]
    return [stored[0, :, :num_tokens].clone() for rows in layers for stored in (rows.k, rows.v)]


def answer(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY, **how: Any) -> RequestOutput:
    return llm.generate([list(prompt)], params, **how)[0]


def same(cold: RequestOutput, warm: RequestOutput, *, exact: bool) -> None:
    """Equal answers, kept tokens and log-probabilities; ``exact`` to the last bit."""
    for one, other in zip(cold.samples, warm.samples, strict=True):
        assert one.token_ids == other.token_ids
        given = [[entry.logprob for entry in sample.logprobs or []] for sample in (one, other)]
        assert given[0] == (given[1] if exact else pytest.approx(given[1], abs=1e-4))
    assert cold.compression is not None and warm.compression is not None
    assert cold.compression.kept_positions == warm.compression.kept_positions
    assert cold.compression.evicted_tokens == warm.compression.evicted_tokens


ACROSS = (  # kinds of layers whose hits end inside a chunk, too
    "llama-gqa-tied", "llama-dynamic", "qwen2-windows", "mistral-window", "minimax-m2", "gpt-oss", "gemma2",
    "gemma4-shared", "gemma3n", "deepseek-v3", "llama4",
)  # fmt: skip


@pytest.mark.parametrize(
    ("chunk_len", "name"),
    [*((BLOCK, name) for name in ARCHITECTURES if name not in RECURRENT), *((7, name) for name in ACROSS)],
)
def test_a_hit_is_a_cold_prefill(folders: Folders, name: str, chunk_len: int) -> None:
    """Bit for bit where the border of a block is that of a chunk, rows included; otherwise to rounding."""
    document, question = ids(59), ids(20, seed=8)
    one_token = replace(GREEDY, max_tokens=1)
    settings = {"max_rows": 1, "chunk_len": chunk_len}
    with engine(folders[name], prefix_store=None, **settings) as llm:
        cold = answer(llm, document + question, one_token)
        cold_row = row_of(llm, 79)
        longer = answer(llm, document + question)
    with engine(folders[name], **settings) as llm:
        answer(llm, document + ids(9, seed=5))
        warm = answer(llm, document + question, one_token)
        warm_row = row_of(llm, 79)
        again = answer(llm, document + question)
    # A rotation that stretches with the prompt gives its keys to this prompt alone.
    is_dynamic = name in ("llama-dynamic", "phi3-longrope")
    assert [warm.cached_tokens, again.cached_tokens] == ([0, 0] if is_dynamic else [56, 72])
    exact = chunk_len == BLOCK
    same(cold, warm, exact=exact)
    same(longer, again, exact=exact)
    for one, other in zip(cold_row, warm_row, strict=True):
        torch.testing.assert_close(one, other, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)


def test_dynamic_rope_within_its_window_is_shared(folders: Folders) -> None:
    """Within the original context, 64 tokens, its angles are those of every prompt."""
    document, question = ids(40), ids(24, seed=8)
    with engine(folders["llama-dynamic"], prefix_store=None) as llm:
        cold = answer(llm, document + question)
    with engine(folders["llama-dynamic"]) as llm:
        answer(llm, document)
        warm = answer(llm, document + question)
    assert warm.cached_tokens == 40
    same(cold, warm, exact=True)


BORDERS = [
    # tokens of the document, tokens shared, tokens of the second prompt, restored; 4 queries vote
    (64, 64, 80, 64),
    (63, 63, 80, 56),
    (65, 65, 80, 64),
    (64, 64, 64, 56),  # the same prompt again: the last block holds the voting queries
    (64, 64, 65, 56),  # one new token: 61 could be restored, 56 are
    (64, 64, 67, 56),
    (64, 64, 68, 64),  # N - w is a border
    (64, 64, 69, 64),
    (64, 63, 80, 56),  # the last shared token is one short of a border
    (64, 9, 80, 8),
    (64, 8, 80, 8),
    (64, 7, 80, 0),
    (16, 16, 17, 8),
    (16, 16, 16, 8),
    (100, 100, 60, 56),  # the beginning of a longer one
]


@pytest.mark.parametrize(("stored", "shared", "length", "restored"), BORDERS)
def test_every_border(folder: Path, stored: int, shared: int, length: int, restored: int) -> None:
    document = ids(stored)
    second = (document[:shared] + ids(LONGEST, seed=8))[:length]
    with engine(folder, prefix_store=None) as llm:
        cold = answer(llm, second)
    with engine(folder) as llm:
        assert answer(llm, document).cached_tokens == 0
        warm = answer(llm, second)
        assert warm.cached_tokens == restored
        same(cold, warm, exact=True)
        assert warm.num_prompt_tokens == length
        # What was saved behind the restored blocks is as good as what was saved first.
        third = second + ids(10, seed=9)
        hit = answer(llm, third)
    with engine(folder, prefix_store=None) as llm:
        same(answer(llm, third), hit, exact=True)
    assert hit.cached_tokens == min(length, length + 10 - 4) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("settings", "how", "params"),
    [
        ({"budget": KVBudget(num_sink=4, num_topk=40, num_recent=20)}, {}, {}),  # 1/2
        ({"budget": KVBudget(num_sink=2, num_topk=18, num_recent=12)}, {}, {}),  # 1/4
        ({"budget": KVBudget(num_sink=2, num_topk=8, num_recent=6)}, {}, {}),  # 1/8
        ({"budget": KVBudget(num_sink=1, num_topk=3, num_recent=4)}, {}, {}),  # 1/16
        ({"budget": "full"}, {}, {}),
        ({"budget": KVBudget(num_sink=2, num_topk=14, num_window=6, num_recent=10)}, {}, {}),
        ({"budget": KVBudget.streaming(20)}, {}, {}),
        ({"kv_dtype": "fp8"}, {}, {}),
        ({}, {}, {"n": 4, "temperature": 0.9, "seed": 5, "return_kept": None}),
        ({"budget": "full"}, {"budget": KVBudget(num_sink=2, num_topk=10, num_recent=8)}, {}),
        ({}, {"selector": SnapKV(observation_len=2)}, {}),
    ],
)
def test_a_second_question_is_one_to_a_fresh_engine(
    folder: Path, settings: dict[str, Any], how: dict[str, Any], params: dict[str, Any]
) -> None:
    """Budgets, FP8 rows, windows and samples share what is stored: it precedes all of them."""
    document, questions = ids(100), [ids(28, seed=seed) for seed in (11, 12)]
    if params.get("return_kept", "") is None:
        params = params | {"return_kept": False}
    wanted = replace(GREEDY, **params)
    cold = []
    for question in questions:
        with engine(folder, prefix_store=None, **settings) as llm:
            cold.append(answer(llm, document + question, wanted, **how))
    with engine(folder, **settings) as llm:
        warm = [answer(llm, document + question, wanted, **how) for question in questions]
    assert [output.cached_tokens for output in warm] == [0, 96]
    for one, other in zip(cold, warm, strict=True):
        same(one, other, exact=True)


def test_many_turns(folder: Path) -> None:
    """Ten turns of a conversation: each begins with the one before and its answer, and is computed from there."""
    say = replace(GREEDY, max_tokens=5)
    conversation = ids(20)
    seen = []
    with engine(folder) as warm, engine(folder, prefix_store=None) as cold:
        for turn in range(10):
            outputs = [answer(llm, conversation, say) for llm in (cold, warm)]
            same(*outputs, exact=True)
            seen.append(outputs[1].cached_tokens)
            conversation += outputs[1].token_ids + ids(6, seed=turn)
    assert seen == [0, *((20 + 11 * turn) // BLOCK * BLOCK for turn in range(9))]


SAY = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True, logprobs=2)
BF16_TIE = 0.1  # nats between the two likeliest tokens: what bf16's 8 bits move in logits of about 10
LATER = [24, 56, 88]  # tokens that turns two to four find; 32, 62 and 92 were prompts and answers before them
FOUND: list[tuple[str, dict[str, Any], list[int], int]] = [  # tokens found in each turn, and those made by decode
    ("llama-gqa-tied", {}, LATER, 104),
    ("llama-gqa-tied", {"executor": "eager", "chunk_len": 7}, LATER, 104),
    ("llama-gqa-tied", {"num_speculative_tokens": 4}, LATER, 104),
    ("llama-gqa-tied", {"dtype": "bfloat16"}, LATER, 104),
    ("qwen2", {}, LATER, 104),
    ("deepseek-v3", {}, LATER, 104),
    ("qwen2-windows", {"num_speculative_tokens": 0}, [24, 40, 64], 48),  # a window of 33 tokens loses later answers
    # Not stored: rows that have evicted tokens, that are in another order or rounded, or of layers with states.
    ("llama-gqa-tied", {"budget": BUDGET}, [8, 40, 64], 0),
    ("llama-gqa-tied", {"budget": KVBudget(num_sink=2, num_topk=90, num_window=18, num_recent=50)}, [8, 40, 64], 0),
    ("llama-gqa-tied", {"kv_dtype": "bfloat16"}, [8, 40, 64], 0),
    ("llama-gqa-tied", {"kv_dtype": "fp8"}, [8, 40, 64], 0),
    ("lfm2", {}, [0, 32, 64], 0),
]


@pytest.mark.parametrize(("name", "settings", "found", "by_decode"), FOUND)
def test_the_next_turn_continues_after_the_answer(
    folders: Folders, name: str, settings: dict[str, Any], found: list[int], by_decode: int
) -> None:
    """Each turn computes its message and the last part of a block; tokens are those of an engine without a store."""
    given = {"budget": "full", "max_rows": 1} | settings
    conversation, cached = ids(11), []
    with engine(folders[name], **given) as warm, engine(folders[name], prefix_store=None, **given) as cold:
        for turn in range(4):
            outputs = [answer(llm, conversation, SAY) for llm in (cold, warm)]
            pairs = zip(*(output.token_ids for output in outputs), strict=True)
            differs = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
            if differs is not None:  # decode and prefill of bf16 round by other sums: a near tie may fall either way
                assert settings.get("dtype") == "bfloat16" and outputs[0].logprobs is not None
                first, second = (value for _, value in outputs[0].logprobs[differs].top[:2])
                assert first - second < BF16_TIE
            cached.append(outputs[1].cached_tokens)
            conversation += outputs[1].token_ids + ids(9, seed=turn)
        stats = warm.engine.prefix_stats
    assert stats is not None
    assert (cached, stats.answer_hits) == ([0, *found], by_decode)
    assert (stats.saved_answers > 0) == (by_decode > 0) and (stats.lost_answers > 0) == (found != LATER)


@pytest.mark.parametrize(("name", "settings"), [
    ("llama-gqa-tied", {"budget": BUDGET}),
    ("llama-gqa-tied", {"kv_dtype": "fp8"}),
    ("qwen2-windows", {"num_speculative_tokens": 0}),
    ("lfm2", {}),
    ("qwen3.5", {}),
    ("granite-hybrid", {}),
    ("nemotron-h", {}),
    ("kimi-linear", {}),
])  # fmt: skip
def test_an_idle_engine_prefills_answers_that_it_cannot_copy(
    folders: Folders, name: str, settings: dict[str, Any]
) -> None:
    """Rows that evict, round, or have states: the next turn finds the answer, as exact as a prompt."""
    given = {"budget": "full", "max_rows": 1} | settings
    conversation, cached = ids(11), []
    store = replace(STORE, idle_len=64, snapshot_len=64)
    with engine(folders[name], **given, prefix_store=store) as warm:
        for turn in range(4):
            with engine(folders[name], prefix_store=None, **given) as cold:
                outputs = [answer(llm, conversation, SAY) for llm in (cold, warm)]
            assert outputs[0].token_ids == outputs[1].token_ids
            cached.append(outputs[1].cached_tokens)
            conversation += outputs[1].token_ids + ids(9, seed=turn)
            assert not warm.engine.has_work and warm.engine.rows_free == 1  # it waits until the engine is idle
        stats = warm.engine.prefix_stats
    assert stats is not None and stats.idle_hits >= 3 * 8 and stats.queries == 11 + 41 + 71 + 101
    # States are stored at the block before the last tokens, which the next prompt may need as observation queries.
    assert cached == [0, 24, 56, 80 if name in RECURRENT else 88]


def test_idle_prefill_makes_way(folder: Path) -> None:
    """A request that it does not help drops it; one that it helps waits for it; a reset forgets it."""
    store = replace(STORE, idle_len=64)
    with engine(folder, prefix_store=store) as llm:
        own = llm.engine

        def until_idle_prefill(name: str) -> list[int]:
            own.add_request(request(name, ids(50), sampling=SAY))
            said: list[int] = []
            while own.num_running or own.num_waiting or not said:
                said = next((output.token_ids for output in own.step() if output.is_finished), said)
            for _ in range(2):
                own.step()
            assert own.has_work and own.rows_free == 3
            return said

        def drained() -> RequestOutput:
            (output,) = [output for _ in iter(lambda: own.has_work, False) for output in own.step()
                         if output.is_finished]  # fmt: skip
            return output

        said = until_idle_prefill("first")
        own.add_request(request("stranger", ids(70, seed=9)))
        assert own.rows_free == 4, "it was dropped"
        assert drained().cached_tokens == 0 and own.rows_free == 4
        said = until_idle_prefill("second")
        own.add_request(request("next turn", ids(50) + said + ids(8)))
        assert drained().cached_tokens == 64, "50 tokens of the prompt, 20 of the answer"
        own.reset_prefix_store()
        until_idle_prefill("third")
        own.reset_prefix_store()
        while own.has_work:
            own.step()
        stats = own.prefix_stats
        assert stats is not None and stats.used_blocks == 0 and stats.idle_hits == 16


def test_answers_that_stop_or_are_aborted_are_stored_with_what_was_shown(folder: Path) -> None:
    """One that ends by a stop token, one by an abort; four samples of a prompt each have their own answer."""
    with engine(folder, budget="full") as llm:
        whole = answer(llm, ids(30), replace(SAY, max_tokens=60)).token_ids
        llm.reset_prefix_store()
        stop = next(token for token in whole[30:] if whole.index(token) >= 30)
        end = whole.index(stop) + 1
        stopped = answer(llm, ids(30), replace(SAY, max_tokens=60, stop_token_ids=[stop]))
        assert stopped.token_ids == whole[:end]
        assert answer(llm, ids(30) + whole, SAY).cached_tokens == (30 + end - 1) // BLOCK * BLOCK
        llm.engine.add_request(request("gone", ids(30, seed=9), sampling=replace(SAY, max_tokens=60)))
        while len(output := llm.engine.step()) == 0 or len(output[0].token_ids) < 35:
            pass
        llm.engine.abort("gone")
        while llm.engine.has_work:
            llm.engine.step()
        assert answer(llm, ids(30, seed=9) + output[0].token_ids + ids(20), SAY).cached_tokens == 64
        samples = answer(llm, ids(30, seed=5), replace(SAY, n=3, temperature=1.0, seed=4, max_tokens=40)).samples
        found = [answer(llm, ids(30, seed=5) + sample.token_ids + ids(5), SAY).cached_tokens for sample in samples]
        assert found == [64, 64, 64]


SHORT = KVBudget(num_sink=0, num_topk=8, num_recent=28)


@pytest.mark.parametrize(("name", "budget"), [("qwen2-windows", "full"), ("llama-gqa-tied", SHORT)])
def test_a_stop_among_accepted_drafts_leaves_a_row_that_may_have_evicted_tokens(
    folders: Folders, name: str, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens behind the stop were written too, and the next step went on from them before it was seen."""
    prompt, params = ids(7, seed=2), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    given = {"budget": budget, "max_rows": 1}
    with engine(folders[name], prefix_store=None, num_speculative_tokens=0, **given) as cold:
        whole = answer(cold, prompt, params).token_ids
        monkeypatch.setattr(StepTimes, "cost", lambda times, entries: 0.0)
        monkeypatch.setattr(History, "draft", lambda own, most: [*prompt, *whole][own.num_tokens :][: max(most, 0)])
        with engine(folders[name], num_speculative_tokens=4, **given) as warm:
            for last in {whole.index(token) for token in whole[15:30]}:
                turn = prompt + answer(warm, prompt, replace(params, stop_token_ids=(whole[last],))).token_ids + ids(3)
                same(answer(cold, turn), answer(warm, turn), exact=False)
                warm.reset_prefix_store()


def test_three_blocks_and_many_prompts(folder: Path) -> None:
    """Everything is evicted again and again: no answer ever comes from a block that was given away."""
    rng = random.Random(4)
    bases = [ids(40, seed=seed) for seed in range(3)]
    with engine(folder, prefix_store=None) as cold, engine(folder, prefix_store=small(folder, 3)) as warm:
        hits = 0
        for index in range(40):
            prompt = rng.choice(bases)[: rng.randrange(9, 40)] + ids(rng.randrange(1, 20), seed=100 + index)
            outputs = [answer(llm, prompt, replace(GREEDY, max_tokens=2)) for llm in (cold, warm)]
            same(*outputs, exact=True)
            hits += outputs[1].cached_tokens > 0
    assert hits >= 5


def small(folder: Path, num_blocks: int) -> PrefixStoreConfig:
    """A store of so many blocks."""
    with engine(folder) as llm:
        spec = llm.engine.runner.cache.spec  # type: ignore[attr-defined]
    return replace(STORE, num_bytes=num_blocks * BLOCK * spec.prefix_token_bytes)


def request(name: str, prompt: list[int], **fields: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=tuple(prompt), **({"sampling": GREEDY} | fields))


def test_namespaces_share_nothing(folder: Path) -> None:
    """Pairwise: the same namespace finds it, another does not, and the answers are equal all the same."""
    prompt = ids(60)
    with engine(folder) as llm:
        first, other, same_again, empty = (
            llm.answer([request(str(index), prompt, namespace=namespace)])[0]
            for index, namespace in enumerate(["a", "b", "a", ""])
        )
        assert [first.cached_tokens, other.cached_tokens, same_again.cached_tokens, empty.cached_tokens] == [
            0,
            0,
            56,
            0,
        ]
        assert first.token_ids == other.token_ids == same_again.token_ids
        assert llm.reset_prefix_store("a") == 7
        again = [llm.answer([request(f"{name}-again", prompt, namespace=name)])[0].cached_tokens for name in "ab"]
    assert again == [0, 56]


def test_what_needs_every_token_computed_bypasses_the_store(folder: Path) -> None:
    """Log-probabilities of the prompt fill the store but do not read it."""
    prompt = ids(60)
    with engine(folder, prefix_store=None) as llm:
        cold = answer(llm, prompt, replace(GREEDY, prompt_logprobs=0))
    with engine(folder) as llm:
        scored = [answer(llm, prompt, replace(GREEDY, prompt_logprobs=0)) for _ in range(2)]
        assert [output.cached_tokens for output in scored] == [0, 0]
        assert answer(llm, prompt).cached_tokens == 56
    for output in scored:
        assert output.prompt_logprobs == cold.prompt_logprobs


def test_selectors_that_need_all_queries_read_what_fits_their_rows(folder: Path) -> None:
    """Hops fill the store, and read it for prompts of which nothing is evicted; others are computed as a whole."""
    settings: dict[str, Any] = {"selector": Hops(observation_len=4), "budget": 64}
    prompts = [ids(60), ids(60), ids(90), ids(90), ids(60) + ids(3, seed=2)]
    with engine(folder, prefix_store=None, **settings) as llm:
        cold = [answer(llm, prompt) for prompt in prompts]
    with engine(folder, **settings) as llm:
        warm = [answer(llm, prompt) for prompt in prompts]
        assert [output.cached_tokens for output in warm] == [0, 56, 0, 0, 56]
        other = answer(llm, ids(90) + ids(5), selector=SELECTOR)
        assert other.cached_tokens == 88, "another selector reads what hops have filled"
    for one, two in zip(cold, warm, strict=True):
        same(one, two, exact=True)
    with engine(folder, **settings, prefix_store=replace(STORE, idle_len=64)) as llm:
        said = answer(llm, ids(60), SAY).token_ids
        assert not llm.engine.has_work
        assert answer(llm, ids(60) + said + ids(9), SAY, selector=SELECTOR).cached_tokens == 72


def test_a_prompt_waits_for_the_one_that_writes_its_beginning(folder: Path) -> None:
    """Four questions at once over one document cost one prefill of it, beside a prompt that waits for nobody."""
    document = ids(80)
    prompts = [document + ids(12, seed=seed) for seed in range(4)]
    alone = ids(70, seed=77)
    with engine(folder, prefix_store=None) as llm:
        cold = llm.generate([*prompts, alone], GREEDY)
    with engine(folder, max_rows=5) as llm:
        warm = llm.generate([*prompts, alone], GREEDY)
        stats = llm.engine.prefix_stats
    assert [output.cached_tokens for output in warm] == [0, 80, 80, 80, 0]
    for one, other in zip(cold, warm, strict=True):
        same(one, other, exact=False)
    assert stats is not None and (stats.hits, stats.queries) == (240, 4 * 92 + 70)


def test_short_prompts_share_a_job_and_their_beginning(folder: Path) -> None:
    """Packed prompts fill the store and read it, each its own part; of several that begin alike one is computed."""
    system, settings = ids(45), {"chunk_len": 64, "max_rows": 8}
    prompts = [ids(20, seed=31), system + ids(5, seed=32), ids(9, seed=33), ids(6, seed=34)]
    second = [prompts[0] + ids(12, seed=41), system + ids(9, seed=42), prompts[2] + ids(17, seed=43), ids(5, seed=44)]
    alike = [ids(40, seed=50) + ids(4 + seed, seed=51 + seed) for seed in range(3)]
    with engine(folder, prefix_store=None, **settings) as llm:
        cold = [llm.generate(own, GREEDY) for own in (prompts, second, alike)]
    with engine(folder, **settings) as llm:
        warm = [llm.generate(own, GREEDY) for own in (prompts, second, alike)]
    cached = [[output.cached_tokens for output in own] for own in warm]
    assert cached == [[0, 0, 0, 0], [16, 40, 8, 0], [0, 40, 40]]
    for one, other in zip(sum(cold, []), sum(warm, []), strict=True):
        same(one, other, exact=False)


def test_the_default_store_finds_prompts_of_a_hundred_tokens(folder: Path) -> None:
    document = ids(100)
    with engine(folder, prefix_store="1MiB", chunk_len=512) as llm:
        assert [answer(llm, document + ids(3, seed=seed)).cached_tokens for seed in (1, 2)] == [0, 64]


def test_aborts_while_blocks_are_read_and_written(folder: Path) -> None:
    """A request given up in the middle of its prefill leaves nothing behind, and the next finds no half block."""
    document = ids(90)
    with engine(folder, prefill_quantum=1) as llm:
        for stop_after in (1, 2, 7, 20):
            for seed in (1, 1):
                llm.engine.add_request(request("gone", document[: 40 + stop_after] + ids(30, seed=seed)))
                for _ in range(stop_after):
                    llm.engine.step()
                llm.engine.abort("gone")
                while llm.engine.has_work:
                    llm.engine.step()
        stats = llm.engine.prefix_stats
        assert stats is not None and stats.used_blocks * BLOCK == stats.saved
        warm = answer(llm, document)
        llm.reset_prefix_store()
        stats = llm.engine.prefix_stats
        assert stats is not None and stats.used_blocks == 0
    with engine(folder, prefix_store=None) as llm:
        same(answer(llm, document), warm, exact=True)


def test_what_is_allocated_is_what_is_counted(folder: Path) -> None:
    """The start refuses a store that is larger than what is free; a full one holds what it was given."""
    with engine(folder, prefix_store=small(folder, 5)) as llm:
        for seed in range(4):
            answer(llm, ids(60, seed=seed))
        blocks = llm.engine.runner.prefix_blocks  # type: ignore[attr-defined]
        assert blocks.num_bytes == small(folder, 5).num_bytes
        assert llm.engine.prefix_stats is not None and llm.engine.prefix_stats.used_blocks == 5
    with pytest.raises(ValueError, match=r"for the prefix store|prefix_store takes .* are free"):
        LLM(folder, budget=64, prefix_store="900TiB", progress=False)
    with pytest.raises(ValueError, match="prefix_store is 100 bytes; a block of 64 tokens takes"):
        LLM(folder, budget=64, prefix_store=100, progress=False)
    for wrong in ("8", "much", -1, "8 potatoes"):
        with pytest.raises(ValueError, match="prefix_store"):
            LLM(folder, budget=64, prefix_store=wrong, progress=False)


# The prefix store's disk cache: a restart finds yesterday's documents, and whatever is wrong with a file is a miss.

DOCUMENT = ids(80)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama-gqa-tied"), tmp_path_factory.mktemp("model"))


@contextmanager
def disk(model: Path, folder: Path, **settings: Any) -> Iterator[LLM]:
    with engine(model, prefix_dir=str(folder), **settings) as llm:
        yield llm


def blocks(folder: Path) -> list[Path]:
    """In the order in which they were written, a prompt's first block first."""
    return sorted(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def test_a_restart_finds_yesterdays_documents(model: Path, tmp_path: Path) -> None:
    question = DOCUMENT + ids(20, seed=8)
    with engine(model, prefix_store=None) as llm:
        cold = answer(llm, question)
    with disk(model, tmp_path / "store") as llm:
        answer(llm, DOCUMENT)
    assert len(blocks(tmp_path / "store")) == 10, "they are written when the engine ends"
    with disk(model, tmp_path / "store") as llm:
        warm = answer(llm, question)
        assert answer(llm, question).cached_tokens == 96, "from memory now"
    assert warm.cached_tokens == 80
    same(cold, warm, exact=True)
    for path in (tmp_path / "store").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, "others may read it"
        assert not any(str(list(range(3))) in part for part in path.parts)


def test_a_reset_forgets_what_runs_too(folder: Path) -> None:
    """The answers of requests that run when their namespace is cleared, or that have just ended, are not stored."""
    with engine(folder, budget="full") as llm:
        for steps in range(1, 14):
            llm.engine.add_request(request("gone", ids(30), namespace="a", sampling=replace(SAY, max_tokens=9)))
            for _ in range(steps):
                llm.engine.step()
            llm.engine.reset_prefix_store("a")
            while llm.engine.has_work:
                llm.engine.step()
            stats = llm.engine.prefix_stats
            assert stats is not None and stats.used_blocks == 0
        llm.engine.add_request(request("kept", ids(30), namespace="a", sampling=replace(SAY, max_tokens=9)))
        llm.engine.reset_prefix_store("b")
        while llm.engine.has_work:
            llm.engine.step()
        stats = llm.engine.prefix_stats
        assert stats is not None and stats.used_blocks == 4


@pytest.mark.parametrize("settings", [{"budget": "full"}, {"prefix_store": replace(STORE, idle_len=64)}])
def test_answers_are_written_too(model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Those that rows hold, and those that were prefilled in idle time."""
    with disk(model, tmp_path / "store", **settings) as llm:
        said = answer(llm, DOCUMENT, SAY).token_ids
        assert not llm.engine.has_work  # it waits until the engine is idle
    assert len(blocks(tmp_path / "store")) == 12, "80 tokens of the prompt, 20 of the answer"
    with disk(model, tmp_path / "store", **settings) as llm:
        warm = answer(llm, DOCUMENT + said + ids(9), SAY)
    with engine(model, **settings | {"prefix_store": None}) as llm:
        assert answer(llm, DOCUMENT + said + ids(9), SAY).token_ids == warm.token_ids
    assert warm.cached_tokens == 96


def test_the_disk_gives_back_what_memory_forgot(model: Path, tmp_path: Path) -> None:
    """Memory for two documents, disk for three: each comes back, from the one or from the other."""
    store = small(model, 16)
    for seed in (1, 2, 3):
        with disk(model, tmp_path / "store", prefix_store=store) as llm:
            answer(llm, ids(60, seed=seed))
    found = []
    with disk(model, tmp_path / "store", prefix_store=store) as llm:
        for seed, num_stored in ((3, 22), (2, 23), (1, 24), (3, 24)):
            found.append(answer(llm, ids(60, seed=seed) + ids(9)).cached_tokens)
            # A block that is not written yet stays in memory, and what is before it: there may be no room for others.
            until(lambda wanted=num_stored: len(blocks(tmp_path / "store")) == wanted)  # type: ignore[misc]
    assert found[:2] == [56, 56] and min(found) > 0


def test_what_is_read_from_the_disk_takes_no_block_of_an_answer_that_was_not_copied_yet(
    model: Path, tmp_path: Path
) -> None:
    """Memory for little more than one conversation: as it ends, the prompt that waits for its row is read."""
    settings = {"budget": "full", "max_rows": 1}
    with disk(model, tmp_path / "store", **settings) as llm:
        cold = answer(llm, ids(60))
    with disk(model, tmp_path / "store", prefix_store=small(model, 8), **settings) as llm:
        _, warm = llm.generate([ids(20, seed=8), ids(60)], [replace(GREEDY, max_tokens=30), GREEDY])
    assert warm.cached_tokens > 0
    same(cold, warm, exact=True)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def nonsense(path: Path) -> None:
    path.write_bytes(b"\x80\x04nothing of this is unpickled")


def another(path: Path) -> None:
    other = next(other for other in blocks(path.parents[1]) if other != path)
    path.write_bytes(other.read_bytes())


def huge_header(path: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def other_shape(path: Path) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    head["kv"]["shape"] = [*head["kv"]["shape"], 1]
    written = json.dumps(head).encode().ljust(size)
    path.write_bytes(len(written).to_bytes(8, "little") + written + data[8 + size :])


@pytest.mark.parametrize("fault", [damaged, cut, nonsense, another, huge_header, other_shape, Path.unlink])
def test_any_fault_is_a_miss(
    model: Path, tmp_path: Path, fault: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with engine(model, prefix_store=None) as llm:
        cold = answer(llm, DOCUMENT)
    with disk(model, tmp_path / "store") as llm:
        answer(llm, DOCUMENT)
    with disk(model, tmp_path / "store") as llm, caplog.at_level(logging.WARNING):
        fault(blocks(tmp_path / "store")[3])
        warm = answer(llm, DOCUMENT)
    same(cold, warm, exact=True)
    assert warm.cached_tokens < 72, "a block that is wrong was used"
    assert "deleting an unusable block of the disk cache" in caplog.text
    with disk(model, tmp_path / "store") as llm:
        assert answer(llm, DOCUMENT).cached_tokens == 72, "what was wrong is written anew"


def test_a_disk_that_fails_while_it_is_used(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk(model, tmp_path / "store") as llm:
        answer(llm, DOCUMENT)
    with disk(model, tmp_path / "store") as llm, monkeypatch.context() as patch:
        damaged(blocks(tmp_path / "store")[3])
        for owner, name in ((os, "open"), (os, "utime"), (Path, "unlink")):
            patch.setattr(owner, name, Mock(side_effect=OSError(EROFS, os.strerror(EROFS))))
        assert [answer(llm, DOCUMENT).cached_tokens for _ in range(2)] == [24, 72]
    with disk(model, tmp_path / "store") as llm:
        shutil.rmtree(tmp_path / "store")
        assert answer(llm, DOCUMENT).cached_tokens == 0
    assert not (tmp_path / "store").exists(), "the next start would refuse what is not private"


def test_other_models_and_namespaces_find_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(llm: LLM, name: str, namespace: str) -> int:
        asked = Request(request_id=name, prompt_token_ids=tuple(DOCUMENT), sampling=GREEDY, namespace=namespace)
        return llm.answer([asked])[0].cached_tokens

    with disk(model, tmp_path / "store") as llm:
        assert cached(llm, "1", "a/b") == 0
    with disk(model, tmp_path / "store") as llm:
        assert [cached(llm, "2", "a"), cached(llm, "3", ""), cached(llm, "4", "a/b")] == [0, 0, 72]
    other = save(make_model("llama-mha"), tmp_path / "other")
    with disk(other, tmp_path / "store") as llm:
        assert cached(llm, "1", "a/b") == 0
    for own in ({"dtype": "bfloat16"}, {"prefill_attention": "reference"}):
        with disk(model, tmp_path / "store", **own) as llm:
            assert cached(llm, "1", "a/b") == 0
    with monkeypatch.context() as patch:
        patch.setattr("snapstream.startup.build.__version__", "0.0.0")
        with disk(model, tmp_path / "store") as llm:
            assert cached(llm, "1", "a/b") == 0
    with disk(model, tmp_path / "store") as llm:
        llm.reset_prefix_store("a")
    with disk(model, tmp_path / "store") as llm:
        assert [cached(llm, "1", "a/b"), cached(llm, "2", "")] == [0, 72], "a reset reaches the disk, and no other"


def test_the_disk_keeps_to_its_bytes(model: Path, tmp_path: Path) -> None:
    with disk(model, tmp_path / "store") as llm:
        answer(llm, ids(40))
    (size,) = {path.stat().st_size for path in blocks(tmp_path / "store")}
    with disk(model, tmp_path / "store", prefix_disk=4 * size) as llm:
        for seed in range(4):
            answer(llm, ids(60, seed=seed))
    assert 0 < sum(path.stat().st_size for path in blocks(tmp_path / "store")) <= 4 * size


def test_a_crash_leaves_no_half_block(model: Path, tmp_path: Path) -> None:
    with disk(model, tmp_path / "store") as llm:
        answer(llm, DOCUMENT)
    half = blocks(tmp_path / "store")[0].with_suffix(".partial")
    half.write_bytes(b"half")
    with disk(model, tmp_path / "store") as llm:
        assert answer(llm, DOCUMENT).cached_tokens == 72
    assert not half.exists()


def start(model: Path, folder: Path, **settings: Any) -> None:
    with disk(model, folder, **settings):
        pass


def test_bad_folders_are_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"has mode 755; it holds prompts, so it must be private"):
        start(model, public)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="prefix_dir .* cannot be used|is not a folder"):
        start(model, file)
    link = tmp_path / "link"
    (tmp_path / "aim").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "aim")
    with pytest.raises(ValueError, match="is not a folder"):
        start(model, link)
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    (foreign / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not a disk cache: it holds 'thesis.tex'"):
        start(model, foreign)
    assert (foreign / "thesis.tex").exists()
    ours = tmp_path / "ours"
    held = PrefixFolder(ours)
    with pytest.raises(ValueError, match="in use by another engine"):
        start(model, ours)
    held.close()
    start(model, ours)
    (ours / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="secret has 5 bytes, not 32"):
        start(model, ours)
    with pytest.raises(ValueError, match="prefix_dir .* needs a prefix_store"):
        start(model, ours, prefix_store=None)
    with pytest.raises(ValueError, match="prefix_disk"):
        start(model, ours, prefix_disk="lots")


def test_a_start_that_fails_leaves_the_folder_to_the_next(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(Exception) as failed:  # noqa: B017  # of the library that reads the file
        start(broken, tmp_path / "store")
    assert "in use" not in str(failed.value)
    start(model, tmp_path / "store")


def test_a_dropped_engine_leaves_the_folder_to_the_next(model: Path, tmp_path: Path) -> None:
    llm = LLM(model, **SETTINGS, prefix_dir=str(tmp_path / "store"))
    answer(llm, DOCUMENT)
    del llm

    def is_free() -> bool:
        gc.collect()
        with suppress(ValueError):  # until its thread has ended
            PrefixFolder(tmp_path / "store").close()
            return True
        return False

    until(is_free)


@pytest.mark.parametrize(("number", "why"), [(EAGAIN, "is in use by another engine"), (ENOLCK, "cannot be locked: No")])
def test_a_folder_that_is_not_locked(number: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOLCK: a network file system may have no locks."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(ValueError, match=why):
        PrefixFolder(tmp_path / "a")


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    first = folder_secret(tmp_path / "a")
    assert first == folder_secret(tmp_path / "a") != folder_secret(tmp_path / "b")
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a" / MARKER).exists() and not list(tmp_path.glob("a/secret.*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    PrefixFolder(tmp_path / "a").close()
    (tmp_path / "a").chmod(0o500)
    with pytest.raises(ValueError, match="cannot be"):
        PrefixFolder(tmp_path / "a")
