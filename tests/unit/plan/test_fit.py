"""How prefill is cut: the constants of an 8B model on a GPU, what a CPU keeps, and what a caller fixes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from benchmarks.pace import predict
from snapstream.config import (
    Chunking,
    EngineOptions,
    KVBudget,
    ModelConfig,
    StoredWeights,
    make_selector,
)
from snapstream.config.weights import Packing, WeightsOption
from snapstream.engine.admission import job_chunk_len, unit_work
from snapstream.models.sharding import decode_weight_bytes
from snapstream.models.weights import DecoderWeights
from snapstream.plan.fit import engine_config, resolve_chunking
from snapstream.plan.memory import chunk_bytes, engine_memory, prefill_memory
from snapstream.plan.plan import Device, make_plan
from snapstream.startup.resolve import Machine, resolve
from snapstream.step import JobSpec, PrefillEntry
from snapstream.types import SamplingParams
from tests.unit.plan.test_plan import GIB, LLAMA_8B


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
    cut = replace(on_gpu(), token_keys=1000)

    def job(num_tokens: int) -> JobSpec:
        entry = PrefillEntry(
            request_id="r", token_ids=(1,) * num_tokens, rows=(0,), seeds=(0,), sampling=SamplingParams(),
            budget=KVBudget.full(9000), selector=make_selector(),
        )  # fmt: skip
        return JobSpec(job_id=0, staging_start=0, entries=(entry,), chunk_len=cut.chunk_len)

    works = [unit_work(cut, job(5000), unit) for unit in range(6)]
    assert works[:3] == [2048 * (1000 + 2048), 2048 * (1000 + 4096), 904 * (1000 + 5000)]
    assert works[3:] == works[:3]  # the next layer
    assert unit_work(cut, job(3), 1) == 128 * 1003
    assert unit_work(cut, replace(job(5000), chunk_len=512), 9) == 392 * 6000


def test_predicted_time_between_tokens_stays_below_twice_the_idle_one() -> None:
    """Of streams beside a prefill on an H200: at most 2x is wanted; what a CPU's default would do is the contrast."""
    for prompt_len in (64, 2048, 8192, 32_768, 131_072):
        found = predict(prompt_len)
        assert found.p99_ms < 1.85 * found.idle_ms
    assert predict(131_072, 512, 32).p99_ms > 15 * predict(131_072).idle_ms


# Which width follows from what the user said, what the checkpoint stores, the dtype, the device and the executor.

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, intermediate_size=160, max_position=64, stored=StoredWeights(dtype="bfloat16"),
)  # fmt: skip


def width(model: ModelConfig = MODEL, device: str = "cpu", **options: Any) -> str:
    config = engine_config(model, EngineOptions(**options), KVBudget.full(64), 64, device=device)
    assert config.weights is not None
    return config.weights.describe()


def test_auto_keeps_what_is_stored_where_nothing_is_lost() -> None:
    assert width() == "bfloat16"
    assert width(replace(MODEL, stored=StoredWeights(dtype="float16"))) == "float16"
    assert width(replace(MODEL, stored=StoredWeights(dtype="float32"))) == "float32"
    assert width(replace(MODEL, stored=StoredWeights())) == "float32"  # nobody said


def test_types_of_gguf_that_no_format_holds_become_int8() -> None:
    """On a CPU in fp32, where all rows are whole groups; else they are floats."""
    files = StoredWeights(dtype="float16", dequantized=("Q4_K",))
    assert width(replace(MODEL, stored=files), activations="dtype") == "int8 in groups of 32"
    assert width(replace(MODEL, stored=files, intermediate_size=48)) == "float16"
    assert width(replace(MODEL, stored=files), dtype="bfloat16") == "bfloat16"
    assert width(replace(MODEL, stored=files), weights="float16") == "float16"
    assert width(replace(MODEL, stored=replace(files, packing=Packing(layout="gptq", bits=4, group=32)))) == "float16"


def test_auto_is_the_dtype_elsewhere() -> None:
    assert width(dtype="float16") == "float16"
    assert width(device="cuda") == "float32"
    assert width(device="cuda", dtype="bfloat16") == "bfloat16"


def test_a_width_that_was_asked_for() -> None:
    assert width(weights="float32") == "float32"
    assert width(weights="float16") == "float16"
    assert width(weights="int8", activations="dtype") == "int8 in groups of 32"
    assert width(weights="int8") == "int8 in groups of 32; inputs int8 in decode"
    assert width(weights="int4", activations="dtype") == (
        "int4 in groups of 32, attention, embedding and head int8 in groups of 32"
    )
    assert width(weights="int4", dtype="bfloat16", device="cuda").startswith("int4")


def test_inputs_are_rounded_where_looped_steps_could_run() -> None:
    rounded = "; inputs int8 in decode"
    for options in ({}, {"executor": "eager"}, {"activations": "int8"}):
        assert width(weights="int8", **options).endswith(rounded)
    for options in ({"device": "cuda"}, {"dtype": "bfloat16"}, {"activations": "dtype"}):
        assert not width(weights="int8", **options).endswith(rounded)
    assert width(activations="auto") == "bfloat16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activations": "int4"}, "activations is 'int4'; it must be one of auto, dtype, int8"),
        (
            {"activations": "int8"},
            "activations is 'int8': weights are bfloat16; integer products need int8, int4 or MXFP4",
        ),
        (
            {"activations": "int8", "weights": "int8", "device": "cuda"},
            "activations is 'int8': device is 'cuda'; the",
        ),
        ({"weights": "int2"}, "weights is 'int2'; it must be one of auto, float32, bfloat16, float16, int8, int4"),
        ({"weights": 8}, "weights is 8; it must be one of auto"),
        ({"weights": "float32", "dtype": "bfloat16"}, "weights is 'float32' and dtype 'bfloat16'; weights must be bf"),
        ({"weights": "float16", "dtype": "bfloat16"}, "weights must be bfloat16, int8, int4 or auto"),
        (
            {"executor": "graph"},
            "executor 'graph': it captures CUDA graphs, and device is 'cpu'; use 'looped' or 'eager'",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        width(**options)


@pytest.mark.parametrize("weights", get_args(WeightsOption))
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_and_engine_have_one_rule(weights: Any, stored: Any, kind: Any, dtype: Any) -> None:
    model = replace(MODEL, stored=StoredWeights(dtype=stored))
    options = EngineOptions(weights=weights, dtype=dtype, device=kind, budget="full", max_model_len=64)
    machine = Machine(device=kind, free_bytes=2**30, total_bytes=2**30, capability=(9, 0))
    try:
        config = resolve(model, options, machine)
    except ValueError as refused:
        with pytest.raises(ValueError, match=re.escape(str(refused))):
            make_plan(model, options, gpu=Device(kind=kind))
        return
    plan, memory = make_plan(model, options, gpu=Device(kind=kind)), engine_memory(model, config)
    assert config.weights is not None
    assert (plan.weights, plan.kv_dtype) == (config.weights.describe(), config.kv_dtype)
    assert (plan.weight_bytes, plan.rows[0].row_bytes) == (memory.weight_bytes, memory.row_bytes)
    assert DecoderWeights.empty(model, getattr(torch, dtype), "meta", config.weights).num_bytes == plan.weight_bytes


def test_rows_are_bf16_on_a_cpu_unless_weights_are_fp32() -> None:
    def rows(model: ModelConfig = MODEL, device: str = "cpu", **options: Any) -> str:
        return engine_config(model, EngineOptions(**options), KVBudget.full(64), 64, device=device).kv_dtype

    assert rows() == rows(executor="eager") == rows(kv_dtype="bfloat16") == "bfloat16"
    assert rows(kv_dtype="float32") == "auto"  # those of the dtype
    assert rows(kv_dtype="int8") == "int8"
    assert rows(weights="float32") == rows(replace(MODEL, stored=StoredWeights(dtype="float32"))) == "auto"
    assert rows(weights="int8") == rows(weights="int4") == "bfloat16"
    assert rows(replace(MODEL, stored=StoredWeights(dtype="float16"))) == "bfloat16"
    assert rows(device="cuda", dtype="bfloat16") == rows(device="cuda", weights="bfloat16") == "auto"
    with pytest.raises(ValueError, match="kv_dtype is 'float32' and dtype 'bfloat16'"):
        rows(kv_dtype="float32", dtype="bfloat16")


def test_rows_that_are_no_whole_groups() -> None:
    with pytest.raises(ValueError, match="the rows of down have 170 numbers, which must be a multiple of 32"):
        width(replace(MODEL, intermediate_size=170), weights="int4")
