"""Equality 3: above the budget the engine gives what the list-based engine gives, token by token.

Outputs are longer than the ring, so it wraps; prompts run in chunks and in one batch, the lists know nothing of either.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.stand_ins import checkpoint_of
from evals.chat import Chat
from evals.score import found
from evals.selectors import Random, Variant
from evals.tasks import make_items
from snapstream.assets import TINY_MODEL
from snapstream.config import EngineOptions, KVBudget, WeightFormats
from snapstream.kernels.interface import bind
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.checkpoint import load_weights
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import dequantizing_bytes
from snapstream.models.weights import DequantizedLayer
from snapstream.startup.build import build_runner
from snapstream.types import RequestOutput, SamplingParams
from tests.kernels.triton import interpreter
from tests.live import LiveBytes
from tests.parity.checkpoints import ARCHITECTURES, VOCAB, greedy_along, make_model, save
from tests.parity.lists_engine import ListsEngine

CASES = [
    # budget, selector: generous ring, small ring, StreamingLLM, no sinks, R = 1, most of a prompt votes,
    # the end of the prompt stays, random selection, hops, a short reach ahead, none
    (KVBudget(num_sink=4, num_topk=12, num_recent=16), SnapKV(observation_len=8)),
    (KVBudget(num_sink=2, num_topk=20, num_recent=3), Variant(observation_len=8, pool_width=5)),
    (KVBudget(num_sink=4, num_topk=0, num_recent=12), SnapKV(observation_len=8)),
    (KVBudget(num_sink=0, num_topk=16, num_recent=8), Variant(observation_len=4, softmax_over="row")),
    (KVBudget(num_sink=1, num_topk=30, num_recent=1), Variant(observation_len=4, group_reduce="max")),
    (KVBudget(num_sink=4, num_topk=40, num_recent=4), Variant(observation_len=44, pool_width=1)),
    (KVBudget(num_sink=4, num_topk=12, num_window=8, num_recent=7), SnapKV(observation_len=8)),
    (KVBudget(num_sink=2, num_topk=12, num_recent=8), Random(observation_len=4)),
    (KVBudget(num_sink=2, num_topk=12, num_recent=8), Hops(observation_len=4, num_hops=2)),
    (KVBudget(num_sink=2, num_topk=12, num_recent=8), Variant(observation_len=4, pool_width=3, pool_half_life=2)),
    (KVBudget(num_sink=2, num_topk=12, num_recent=8), Variant(observation_len=4, pool_width=5, pool_half_life=0)),
]
LENGTHS = (3, 17, 33, 48, 60)
KINDS = (
    "llama-gqa-tied", "qwen3", "llama-dynamic", "deepseek-v3-dense", "gpt-oss", "gemma2", "gemma4-shared", "falcon-h1",
)  # fmt: skip


@pytest.mark.parametrize(  # each case with two kinds of layers, each kind with two cases or three
    ("case", "name"),
    [
        pytest.param(case, KINDS[(case + more) % len(KINDS)], marks=[pytest.mark.slow] * (more > 0))
        for case in range(len(CASES))
        for more in (0, 3)
    ],
)
def test_engine_equals_the_list_based_engine(case: int, name: str, tmp_path: Path) -> None:
    budget, selector = CASES[case]
    folder = save(make_model(name), tmp_path)
    rng = random.Random(case)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)
    with LLM(
        folder,
        budget=budget,
        selector=selector,
        max_rows=3,
        chunk_len=16,
        max_model_len=96,
        executor="eager",
        progress=False,
    ) as llm:
        outputs = llm.generate(prompts, params)
        decoder = llm.engine.runner.decoder  # type: ignore[attr-defined]
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, logprobs = ListsEngine(decoder, budget, selector).generate(prompt, 20)
        assert output.token_ids == tokens
        assert [entry.logprob for entry in output.logprobs or []] == pytest.approx(logprobs, abs=1e-3)
        assert output.compression is not None
        assert output.compression.evicted_tokens == max(0, len(prompt) - budget.capacity)


def test_a_small_budget_does_change_the_answer(tmp_path: Path) -> None:
    """The equality above would be empty if nothing were ever evicted."""
    folder = save(make_model("llama-gqa-tied"), tmp_path)
    rng = random.Random(0)
    prompt = [rng.randrange(3, VOCAB) for _ in range(80)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(folder, budget="full", max_model_len=96, executor="eager", progress=False) as llm:
        full = llm.generate([prompt], params)[0]
        small = llm.generate([prompt], params, budget=KVBudget(num_sink=2, num_topk=0, num_recent=6))[0]
    assert full.token_ids[0] == small.token_ids[0]  # the first token comes out of the uncompressed prefill
    assert full.token_ids != small.token_ids


# Equality 1: with room for every token the engine gives transformers' greedy tokens, for every architecture.
# Prompts of several lengths run together, so batching, packing and interleaving are in it as well.

LOSSLESS_LENGTHS = (1, 2, 13, 25, 90, 150)  # answers to the third and fourth leave windows of 21 and 33 tokens
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LOSSLESS_LENGTHS]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Also in rows of 180 slots, which hold 150 + 12 tokens: selection is configured but must lose nothing."""
    model = make_model(name)
    folder = save(model, tmp_path)
    batch = prompts(len(name))
    wanted: list[list[int]] = []
    for budget, executor in (("full", "eager"), (180, None)):  # the definition, and the default of this machine
        with LLM(
            folder, budget=budget, executor=executor, max_rows=4, chunk_len=32, max_model_len=256, progress=False
        ) as llm:
            outputs = llm.generate(batch, PARAMS)
        wanted = wanted or [greedy_along(model, output.prompt_token_ids, output.token_ids) for output in outputs]
        for output, tokens in zip(outputs, wanted, strict=True):
            assert output.token_ids == tokens, f"{name}, {budget}, {len(output.prompt_token_ids)} prompt tokens"
            assert output.compression is not None and output.compression.evicted_tokens == 0


# Around windows of 21 and 33 tokens, chunks of 32, and the 32 tokens from which Ministral 3 scales queries here.
BORDERS = (1, 20, 21, 22, 31, 32, 33, 34, 63, 64, 65, 96, 97, 2, 41, 42, 43)


@pytest.mark.parametrize(
    "name",
    [
        "minimax-m2",
        "ministral3",
        "mistral4",
        "cohere2",
        "cohere2-panels",
        "ernie-moe",
        "hy3",
        "mellum",
        "dots1",
        "falcon-h1",
        "falcon-h1-norm",
        "gemma2",
        "gemma4",
        "gemma4-shared",
        "gemma4-moe",
        "gemma3n",
        "gemma3n-panels",
    ],
)
def test_many_rows_equal_transformers(name: str, tmp_path: Path) -> None:
    """In one batch of 17 rows, and in two of 16 and 1, in each executor."""
    model = make_model(name)
    folder, rng, params = save(model, tmp_path), random.Random(len(name)), replace(PARAMS, max_tokens=8)
    batch = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in BORDERS]
    wanted: list[list[int]] = []
    for num_rows, executor in ((17, "eager"), (17, None), (16, None)):
        with LLM(
            folder, budget="full", executor=executor, max_rows=num_rows, chunk_len=32, max_model_len=128, progress=False
        ) as llm:
            answers = [output.token_ids for output in llm.generate(batch, params)]
        wanted = wanted or [greedy_along(model, *pair) for pair in zip(batch, answers, strict=True)]
        assert answers == wanted


# Engines over narrow weights answer as those over the same numbers widened, and read the checkpoint's own width.

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + 7 * i % 190 for i in range(90)], [3, 1, 4, 1, 5]]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def checkpoint(folder: Path, dtype: torch.dtype, name: str = "qwen3") -> Path:
    return save(make_model(name, **SIZES).to(dtype), folder)


def answers(folder: Path, weights: str) -> list[list[int]]:
    options = EngineOptions(budget=48, chunk_len=16, max_model_len=120, weights=weights, activations="dtype")
    with LLM(folder, options, progress=False) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("weights", ["float16", "bfloat16", "int8", "int4"])
def test_as_over_the_same_numbers_widened(weights: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "own", torch.float32)
    narrow = load_weights(folder, read_model_config(folder), torch.float32, "cpu", False, WeightFormats.of(weights))
    model = make_model("qwen3", **SIZES)
    model.load_state_dict(checkpoint_of(narrow))
    widened = answers(save(model, tmp_path / "wide"), "float32")
    assert answers(folder, weights) == widened
    if weights == "int4":
        assert widened != answers(folder, "float32")  # the comparison can fail


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_keeps_16_bits_and_loses_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, dtype)
    assert read_model_config(folder).stored.dtype == str(dtype).removeprefix("torch.")
    with LLM(folder, max_model_len=120, activations="dtype", progress=False) as llm:
        assert llm.config.weights == WeightFormats.of(str(dtype).removeprefix("torch."))
    assert answers(folder, "auto") == answers(folder, "float32")


@pytest.mark.parametrize("name", ["qwen3-moe", "kimi-linear", "step3.7"])
def test_16_bits_are_kept_beside_what_stays_fp32(name: str, tmp_path: Path) -> None:
    """Routers, decays of recurrent layers and towers, which published checkpoints often store so."""
    model = make_model(name)
    with torch.no_grad():
        for key, own in model.named_parameters():
            is_fp32 = key.endswith(("gate.weight", "A_log")) or "vision" in key
            own.data = own.data if is_fp32 else own.data.to(torch.bfloat16)
    folder = save(model, tmp_path)
    assert read_model_config(folder).stored.dtype == "bfloat16"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "F32" in {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118


def test_a_layer_is_widened_once_per_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """90 tokens in chunks of 16 and a short prompt beside them: three layers, as often as passes change layers."""
    held: list[int] = []
    hold = DequantizedLayer.hold

    def counted(self: DequantizedLayer, layer: int) -> None:
        if not held or held[-1] != layer:
            held.append(layer)
        hold(self, layer)

    monkeypatch.setattr(DequantizedLayer, "hold", counted)
    folder = checkpoint(tmp_path, torch.bfloat16)
    options = EngineOptions(budget=48, chunk_len=16, max_model_len=120, executor="eager")  # looped widens no layer
    with LLM(folder, options, progress=False) as llm:
        llm.generate(PROMPTS[0], GREEDY)
    assert held == [0, 1, 2]


def test_loading_holds_no_more_than_the_model_and_a_block(tmp_path: Path) -> None:
    """Beside two tensors of the file at most, the last and the next, which are mapped."""
    model = make_model("llama-mha", hidden_size=256, intermediate_size=1024, vocab_size=8192)
    folder = save(model, tmp_path)
    config = read_model_config(folder)
    with LiveBytes("cpu") as live:
        weights = load_weights(folder, config, torch.float32, "cpu", False, WeightFormats.of("int4"))
        assert weights.dequantized is not None
        kept = weights.num_bytes + weights.dequantized.num_bytes
    table, block = 4 * 8192 * 256, dequantizing_bytes(config, "float32", WeightFormats.of("int4"), "cpu")
    assert block < table  # of which no copy is made as a whole
    assert kept < live.peak <= kept + 2 * table + block


# Rows in FP8: executors, kernels, chunks and neighbours agree on them as they do on others; the answers stay right.

SETTINGS: dict[str, Any] = {
    "executor": "eager",
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8),
    "max_model_len": 160, "progress": False, "kv_dtype": "fp8",
}  # fmt: skip
FP8_ROWS_PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of keys and values, and of latents, which have one scale for both."""
    return save(make_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fp8_rows_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (70, 5, 33, 100)]


def fp8_rows_answers(
    folder: Path, fp8_rows_prompts: list[list[int]], params: SamplingParams = FP8_ROWS_PARAMS, **changes: Any
) -> Any:
    with LLM(folder, **SETTINGS | changes) as llm:
        return llm.generate(fp8_rows_prompts, params)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(interpreter.why_not() is not None, reason=str(interpreter.why_not()))
def test_triton_equals_plain(folder: Path, fp8_rows_prompts: list[list[int]]) -> None:
    interpreter.mend()
    short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    some = [fp8_rows_prompts[1], fp8_rows_prompts[2]]
    want = tokens(fp8_rows_answers(folder, some, short, max_rows=2, max_model_len=48))
    by_triton = partial(build_runner, kernels=bind("cpu", "triton"))
    assert tokens(fp8_rows_answers(folder, some, short, max_rows=2, max_model_len=48, make_runner=by_triton)) == want


def test_chunks_and_neighbours_change_nothing(folder: Path, fp8_rows_prompts: list[list[int]]) -> None:
    together = tokens(fp8_rows_answers(folder, fp8_rows_prompts, max_rows=4, chunk_len=16))
    alone = [tokens(fp8_rows_answers(folder, [prompt], max_rows=1, chunk_len=64))[0] for prompt in fp8_rows_prompts]
    assert together == alone


def test_the_response_counts_a_quarter_of_the_bytes(folder: Path, fp8_rows_prompts: list[list[int]]) -> None:
    wide, narrow = (
        fp8_rows_answers(folder, fp8_rows_prompts[:1], max_rows=1, kv_dtype=kind)[0].compression
        for kind in ("auto", "fp8")
    )
    assert wide is not None and narrow is not None
    with LLM(folder, max_rows=1, **SETTINGS) as llm:
        model, cache = llm.model_config, llm.engine.runner.cache  # type: ignore[attr-defined]
        assert cache.k.dtype == torch.float8_e4m3fn and cache.num_bytes == 2 * narrow.row_bytes
    scales = (2 if model.latent is None else 1) * model.num_layers * model.num_kv_heads * 4
    assert narrow.row_bytes == wide.row_bytes // 4 + scales and narrow.full_bytes == wide.full_bytes // 4 + scales


@pytest.mark.parametrize("family", ["single_words", "kv"])
def test_the_shipped_model_still_answers_from_a_quarter(family: str) -> None:
    items = make_items(Chat(TINY_MODEL), family, 12, 1024, seed=7)
    with LLM(TINY_MODEL, budget=256, kv_dtype="fp8", max_rows=12, max_model_len=1056, progress=False) as llm:
        outputs = llm.generate([item.prompt_ids for item in items], SamplingParams(max_tokens=24, temperature=0.0))
    right = sum(all(found(o.text, item.references)) for o, item in zip(outputs, items, strict=True))
    assert right >= 11
