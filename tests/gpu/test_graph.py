"""Captured decode on a GPU: eager's tokens, no waiting, rows that change between replays, and the memory it takes."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.stand_ins import random_weights
from snapstream.config import Chunking, DType, EngineConfig, KVBudget, ModelConfig
from snapstream.config.engine import Speculator
from snapstream.exec.cuda_graph import GraphDecode
from snapstream.exec.eager import EagerDecode
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.runner import ModelRunner
from snapstream.kernels import pytorch, reference
from snapstream.kernels.backends.autotune import choose, problem_of
from snapstream.kernels.backends.prefill import VERSIONS, Case
from snapstream.kernels.rows import PackedLens
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.decoder import Decoder
from snapstream.plan.memory import engine_memory
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange
from snapstream.types import SamplingParams
from tests.engine.test_speculation import DRAFTS, Oracle, draw_params, model_alone, repeating
from tests.parity.checkpoints import VOCAB, make_model, save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

SMALL = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SETTINGS: dict[str, Any] = {
    "budget": SMALL, "selector": SnapKV(observation_len=8), "max_rows": 5, "max_model_len": 160, "progress": False,
    "device": "cuda",
}  # fmt: skip


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.7, "frequency_penalty": 1.0}, {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "min_p": 0.1}, {"temperature": 0.0}, {"temperature": 1.0},
    ]  # fmt: skip
    return [SamplingParams(max_tokens=8 + 3 * i, seed=i, ignore_eos=True, **kind) for i, kind in enumerate(kinds)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (70, 5, 120, 33, 18, 1, 90, 40)]


@pytest.mark.parametrize(
    "name", ["llama-gqa-tied", "qwen2", "qwen3", "lfm2", "qwen3.5", "granite-hybrid", "kimi-linear"]
)
def test_tokens_equal_eager(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model(name), tmp_path)
    answers = []
    for executor in ("eager", "graph"):
        with LLM(folder, executor=executor, **SETTINGS) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, params())])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("executor", ["eager", "graph"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3", {}), ("qwen2", {"budget": "full"}), ("mistral-window", {}), ("deepseek-v3", {"max_rows": 16}),
     ("gpt-oss", {"max_rows": 16}), ("mixtral", {"max_rows": 17}), ("lfm2", {}), ("qwen3.5", {})],
)  # fmt: skip
def test_drafts_change_no_token(
    name: str, settings: dict[str, Any], executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts right and wrong, in rings that have wrapped around; graphs draft nothing for models with states."""
    oracle, rng, folder = Oracle(monkeypatch), random.Random(name), save(make_model(name), tmp_path)
    prompts = [repeating(rng, rng.choice([1, 30, 33, 90, 110])) for _ in range(14)]
    sampling = [replace(draw_params(rng), n=1, logprobs=None) for _ in prompts]
    has_drafts = executor == "eager" or name not in ("lfm2", "qwen3.5")
    said = []
    for count in (0, 4 if has_drafts else "auto"):
        own: dict[str, Any] = {**SETTINGS, **settings, "executor": executor, "num_speculative_tokens": count}
        with LLM(folder, **own) as llm:
            outputs = llm.generate(prompts, sampling)
        said.append([output.token_ids for output in outputs])
        oracle.texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    assert said[0] == said[1]
    drafted, accepted = (
        sum(getattr(output.timings, own) for output in outputs) for own in ("drafted_tokens", "accepted_tokens")
    )
    assert drafted > accepted > 5 if has_drafts else drafted == 0


@pytest.mark.parametrize("executor", ["eager", "graph"])
@pytest.mark.parametrize(
    ("name", "draft", "max_rows"), [("qwen3", {}, 5), ("qwen3", DRAFTS["another"], 17), ("lfm2", DRAFTS["another"], 16)]
)
def test_a_draft_model_changes_no_token(
    name: str, draft: dict[str, Any], max_rows: int, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full rows of target and draft; the draft is the model itself or random."""
    model_alone(monkeypatch)
    monkeypatch.setattr(Speculator, "MOST_SLOTS", 48)
    rng, folder = random.Random(name), save(make_model(name), tmp_path / "target")
    small = save(make_model("qwen3", **draft), tmp_path / "draft")
    prompts = [repeating(rng, rng.choice([1, 30, 33, 90, 110])) for _ in range(20)]
    sampling = [replace(draw_params(rng), n=1, logprobs=None) for _ in prompts]
    own: dict[str, Any] = {**SETTINGS, "max_rows": max_rows, "executor": executor}
    if executor == "graph" and name == "lfm2":
        with pytest.raises(ValueError, match="no graph takes back their states"):
            LLM(folder, speculative_model=small, **own)
        return
    said = []
    for model in (None, small):
        with LLM(folder, speculative_model=model, **own) as llm:
            outputs = llm.generate(prompts, sampling)
        said.append([output.token_ids for output in outputs])
    assert said[0] == said[1]
    assert sum(output.timings.drafted_tokens for output in outputs) > 8


@pytest.mark.parametrize("executor", ["eager", "graph"])
def test_steps_that_draft_nothing_never_wait(executor: str) -> None:
    """A ring of one slot leaves no room for a draft."""
    budget = KVBudget(num_sink=4, num_topk=507, num_recent=1)
    runner = make_runner(torch.bfloat16, executor, budget=budget, num_speculative_tokens=4)
    runner.submit(prefill(runner, (0, 1), 900, 0, SamplingParams(temperature=0.0))).result()
    for step in range(1, 70):  # the host catches up with histories now and then
        runner.submit(StepPlan(step_id=step, decode_rows=(0, 1))).result()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = runner.submit(StepPlan(step_id=70, decode_rows=(0, 1)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(pending.result().decoded) == 2


def test_graph_is_the_default(tmp_path: Path) -> None:
    with LLM(save(make_model("qwen3"), tmp_path), **SETTINGS) as llm:
        runner: Any = llm.engine.runner
        assert isinstance(runner.decode, GraphDecode)


def make_runner(dtype: torch.dtype, executor: str, max_rows: int = 12, **settings: Any) -> ModelRunner:
    model = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=32_000, hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=2,
        head_dim=64, intermediate_size=1024, max_position=8192, eos_token_ids=(2,),
    )  # fmt: skip
    config = EngineConfig(
        max_model_len=4096, max_rows=max_rows, chunking=Chunking(chunk_len=256, short_len=256),
        dtype=cast(DType, str(dtype).removeprefix("torch.")), device="cuda", executor=executor,
        **{"budget": KVBudget.of(512)} | settings,
    )  # fmt: skip
    return ModelRunner(Decoder(model, random_weights(model, dtype, "cuda", seed=0)), config)


def prefill(runner: ModelRunner, rows: tuple[int, ...], length: int, job_id: int, sampling: SamplingParams) -> StepPlan:
    entry = PrefillEntry(
        request_id=f"r{job_id}", token_ids=tuple(3 + i % 31_000 for i in range(length)), rows=rows, seeds=rows,
        sampling=sampling, budget=runner.config.budget, selector=runner.config.selector,
    )  # fmt: skip
    job = JobSpec(job_id=job_id, staging_start=0, entries=(entry,), chunk_len=runner.config.chunking.chunk_len)
    units = UnitRange(job_id, 0, job.num_units(runner.decoder.config.num_layers))
    return StepPlan(step_id=job_id, opened_jobs=(job,), units=(units,))


@pytest.mark.parametrize("executor", ["eager", "graph"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, logprobs=2, frequency_penalty=0.5, logit_bias={5: 1.0}),
    ],
    ids=["greedy", "everything"],
)
def test_submit_never_waits(executor: str, sampling: SamplingParams) -> None:
    """Prefill, compression, admission and decode of a step, all without a host synchronisation."""
    runner = make_runner(torch.bfloat16, executor)
    runner.submit(prefill(runner, (0, 1), 900, 0, sampling)).result()
    runner.submit(StepPlan(step_id=1, decode_rows=(0, 1))).result()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [
            runner.submit(prefill(runner, (2, 7, 3), 900, 2, sampling)),
            runner.submit(StepPlan(step_id=3, decode_rows=(0, 1, 2, 3, 7))),
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first, second = (step.result() for step in pending)
    assert first.prefilled["r2"].compression.compress_ms > 0.0  # measured with events
    assert len(second.decoded) == 5


def test_replays_follow_rows_that_change() -> None:
    """Any rows in any order and number through the same captures, against plain calls on the same state."""
    runner = make_runner(torch.float32, "graph")
    assert isinstance(runner.decode, GraphDecode)
    for row in range(12):
        plan = prefill(runner, (row,), 40 + 70 * row, row, SamplingParams(temperature=0.0))
        runner.submit(plan).result()
    eager = EagerDecode(runner.step_parts)
    rng = random.Random(0)
    with torch.inference_mode():
        for size in (1, 2, 3, 5, 12, 8, 4, 1, 11):
            rows = torch.tensor(rng.sample(range(12), size), device="cuda")
            before = runner.cache.k.clone(), runner.cache.v.clone()
            got = runner.decode.logits(rows).clone()
            runner.cache.k.copy_(before[0])
            runner.cache.v.copy_(before[1])
            torch.testing.assert_close(got, eager.logits(rows), rtol=1e-4, atol=1e-4)
            runner.decode.step(rows, SamplingNeeds())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("chunk", "keys"), [(1, 700), (256, 256), (256, 700), (64, 4000)])
@pytest.mark.parametrize("window", [None, 1, 130, 600])
def test_fused_prefill_attention_equals_the_reference(
    dtype: torch.dtype, chunk: int, keys: int, window: int | None
) -> None:
    torch.manual_seed(0)
    q = torch.randn(chunk, 8, 128, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, keys, 128, device="cuda", dtype=dtype)
    expected = reference.prefill_attention(q, k, v, window=window)
    case = replace(Case.of(q.device, dtype, 128, 4), window=window)
    usable = [version for version in VERSIONS.values() if not problem_of(version, case)]
    assert {"sdpa_flash", "sdpa_efficient"} <= {version.name for version in usable}
    for version in usable:
        torch.testing.assert_close(version.attend(q, k, v, window=window), expected, rtol=2e-2, atol=2e-2)
    if window is None:
        torch.testing.assert_close(pytorch.split(q, k, v, pytorch.flash), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 130, 600])
def test_packed_prompts_equal_the_reference(dtype: torch.dtype, window: int | None) -> None:
    """Three prompts in one call; of the first only the last 100 tokens are queries."""
    torch.manual_seed(0)
    q = torch.randn(800, 8, 128, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, 1300, 128, device="cuda", dtype=dtype)
    spans = [(0, 100, 0, 600), (100, 101, 600, 601), (101, 800, 601, 1300)]
    parts = [reference.prefill_attention(q[a:b], k[:, c:d], v[:, c:d], window=window) for a, b, c, d in spans]
    expected = torch.cat(parts)
    ends = torch.tensor([[0, 100, 101, 800], [0, 600, 601, 1300]], dtype=torch.int32, device="cuda")
    lens, num_tried = PackedLens(ends[0], ends[1], 699, 699), 0
    for version in VERSIONS.values():
        if version.attend_packed is None or version.why_not(Case.of(q.device, dtype, 128, 4)):
            continue
        if not version.why_not_packed():
            got = version.attend_packed(q, k, v, lens, window=window)
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
            num_tried += 1
    assert num_tried, "PyTorch's own kernel for packed prompts should be here"


def test_fp32_prefill_holds_no_matrix_of_scores() -> None:
    """The table's kernel for fp32 at 32k keys: the scores alone would take 4 GiB."""
    case = Case.of(torch.device("cuda"), torch.float32, 128, 4)
    q = torch.randn(1024, 32, 128, device="cuda")
    k, v = torch.randn(2, 8, 32_768, 128, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen = choose("auto", case)
    chosen.attend(q, k, v)
    assert chosen.name == "sdpa_efficient"
    assert torch.cuda.max_memory_allocated() - before < 2**30


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="reads the free memory of the GPU: run it alone, -n 0")
def test_memory_is_what_the_plan_says() -> None:
    """Within 3 %, with rows that are most of it, after a prompt and a full batch."""
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    runner = make_runner(torch.bfloat16, "graph", max_rows=8)
    model, size = runner.decoder.config, 2**20
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    slots = 4 * size  # 8 GiB of keys and values per row
    config = EngineConfig(
        budget=KVBudget.of(slots), max_model_len=slots + 8, max_rows=4, staging_tokens=8192, dtype="bfloat16",
        device="cuda", executor="graph",
    )  # fmt: skip
    planned = engine_memory(model, config)
    if before < 1.1 * planned.total_bytes:
        pytest.skip("too little memory on this GPU")
    runner = ModelRunner(Decoder(model, random_weights(model, torch.bfloat16, "cuda", seed=0)), config)
    runner.submit(prefill(runner, (0, 1, 2, 3), 4000, 0, SamplingParams(temperature=0.0))).result()
    for step in range(3):
        runner.submit(StepPlan(step_id=step + 1, decode_rows=(0, 1, 2, 3))).result()
    used = before - torch.cuda.mem_get_info()[0]
    assert used == pytest.approx(planned.total_bytes, rel=0.03)
