"""How prefill is cut: the constants of an 8B model on a GPU, what a CPU keeps, and what a caller fixes."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.pace import predict
from snapstream.config import Chunking, EngineOptions, KVBudget, ModelConfig, make_selector
from snapstream.engine.pace import job_chunk_len, unit_work
from snapstream.models.shapes import decode_weight_bytes
from snapstream.plan.chunking import resolve_chunking
from snapstream.plan.memory import chunk_bytes, prefill_memory
from snapstream.request import SamplingParams
from snapstream.start.resolve import Machine, resolve
from snapstream.step import JobSpec, PrefillEntry

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, intermediate_size=14_336, max_position=131_072,
)  # fmt: skip
GIB = 2**30


def on_gpu(**given: int) -> Chunking:
    return resolve_chunking(LLAMA_8B, dtype="bfloat16", device="cuda", **given)  # type: ignore[arg-type]


def test_an_8b_model_on_a_gpu() -> None:
    """Counted by hand: a layer has 4096 (4096 + 2 x 1024 + 4096 + 3 x 14336) numbers, a pair costs 4 x 4096 flop."""
    cut = on_gpu()
    assert cut.token_keys == 2 * 4096 * (4096 + 2048 + 4096 + 43_008) // 16_384 == 26_624
    assert cut.step_work == int(0.8 * 140 * decode_weight_bytes(LLAMA_8B, "bfloat16") / 16_384)
    assert decode_weight_bytes(LLAMA_8B, "bfloat16") == pytest.approx(15.0e9, rel=0.01)
    assert cut.chunk_len == 2048
    assert chunk_bytes(LLAMA_8B, 2048, "bfloat16") <= 256 * 2**20 < chunk_bytes(LLAMA_8B, 4096, "bfloat16")


def test_peak_of_a_128k_prefill_is_under_two_gib() -> None:
    for chunk_len in (2048, job_chunk_len(on_gpu(), 131_072)):
        assert (
            prefill_memory(
                LLAMA_8B, 131_072, chunk_len=chunk_len, dtype="bfloat16", selector=make_selector()
            ).total_bytes
            < 1.8 * GIB
        )


@pytest.mark.parametrize(("prompt_len", "chunk_len"), [(24, 2048), (8192, 2048), (32_768, 1024), (131_072, 512)])
def test_long_prompts_are_cut_shorter(prompt_len: int, chunk_len: int) -> None:
    cut = on_gpu()
    assert job_chunk_len(cut, prompt_len) == chunk_len
    assert chunk_len * (cut.token_keys + prompt_len) <= cut.step_work


def test_what_is_given_holds_for_every_prompt() -> None:
    assert job_chunk_len(on_gpu(chunk_len=4096), 131_072) == 4096
    assert on_gpu(prefill_quantum=3).step_work == 0  # then units are counted


def test_a_cpu_keeps_its_own() -> None:
    cut = resolve_chunking(LLAMA_8B, dtype="float32", device="cpu")
    assert (cut.chunk_len, cut.step_work, cut.least_chunk_len) == (512, 0, 0)
    assert job_chunk_len(cut, 131_072) == 512


@pytest.mark.parametrize("chunk_len", [0, "many", 1.5])
def test_nonsense_is_refused(chunk_len: object) -> None:
    with pytest.raises(ValueError, match="chunk_len is"):
        resolve_chunking(LLAMA_8B, dtype="float32", device="cpu", chunk_len=chunk_len)  # type: ignore[arg-type]


def test_the_engines_settings_take_all_of_it() -> None:
    machine = Machine(device="cuda", free_bytes=80 * GIB, total_bytes=80 * GIB)
    cut = resolve(LLAMA_8B, EngineOptions(dtype="bfloat16", device="cuda"), machine).chunking
    assert (cut.chunk_len, cut.short_len, cut.least_chunk_len) == (2048, 2048, 512)
    assert cut == on_gpu()


def test_work_of_units() -> None:
    """A job of 5,000 tokens in units of 2,048: the last unit is shorter, and a short prompt costs as much as 128."""
    cut = dataclasses.replace(on_gpu(), token_keys=1000)

    def job(num_tokens: int) -> JobSpec:
        entry = PrefillEntry(
            request_id="r", token_ids=(1,) * num_tokens, rows=(0,), seeds=(0,), sampling=SamplingParams(),
            budget=KVBudget.full(9000), selector=make_selector(),
        )  # fmt: skip
        return JobSpec(job_id=0, staging_start=0, entries=(entry,))

    works = [unit_work(cut, job(5000), unit) for unit in range(6)]
    assert works[:3] == [2048 * (1000 + 2048), 2048 * (1000 + 4096), 904 * (1000 + 5000)]
    assert works[3:] == works[:3]  # the next layer
    assert unit_work(cut, job(3), 1) == 128 * 1003
    assert unit_work(cut, dataclasses.replace(job(5000), chunk_len=512), 9) == 392 * 6000


def test_predicted_time_between_tokens_stays_below_twice_the_idle_one() -> None:
    """Of streams beside a prefill on an H200: at most 2x is wanted; what a CPU's default would do is the contrast."""
    for prompt_len in (64, 2048, 8192, 32_768, 131_072):
        found = predict(prompt_len)
        assert found.p99_ms < 1.85 * found.idle_ms
    assert predict(131_072, 512, 32).p99_ms > 15 * predict(131_072).idle_ms
