"""What an engine is decided to be: rows sized from memory, executors per device, and what is refused at once."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import DEEPSEEK_V3, QWEN3_30B
from snapstream.assets import TINY_LATENT_MODEL, TINY_MODEL
from snapstream.cli import main
from snapstream.config import AutoCount, EngineConfig, EngineOptions, Settings, WeightFormat
from snapstream.config.kv import HeadProfile
from snapstream.config.model import HeadSizes, LatentConfig
from snapstream.config.recurrent import Mamba2
from snapstream.config.values import format_bytes
from snapstream.config.weights import StoredWeights
from snapstream.kv.spec import KVSpec
from snapstream.llm import LLM
from snapstream.models.registry import model_config_from_dict, read_model_config
from snapstream.models.sharding import weight_bytes
from snapstream.plan.fit import MAX_AUTO_ROWS
from snapstream.plan.memory import DraftMemory, engine_memory, prefix_store_bytes
from snapstream.plan.plan import Device, make_plan
from snapstream.server.engine.api import EngineSpec
from snapstream.server.engine.process import build
from snapstream.server.options import ServeOptions
from snapstream.server.run import draft_memory_of
from snapstream.startup import measure
from snapstream.startup.measure import HostMemory, check_device, measure_machine
from snapstream.startup.notes import describe_budget, describe_decode, describe_indexer, describe_inputs
from snapstream.startup.resolve import Machine, resolve
from tests.gguf_files import write_gguf
from tests.parity.checkpoints import make_model, save
from tests.unit.plan.test_plan import GIB, LLAMA_32_1B

LLAMA_1B = model_config_from_dict(LLAMA_32_1B)

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # whole blocks of every GGUF type
H100 = Machine(device="cuda", free_bytes=80 * GIB, total_bytes=80 * GIB, name="Some GPU", capability=(9, 0))
LAPTOP = Machine(device="cpu", free_bytes=3 * GIB, total_bytes=80 * GIB)


def decided(machine: Machine = H100, slots: int = 8192, **said: Any) -> EngineConfig:
    """The engine of ``LLAMA_1B`` with as many rows as fit, unless it is said otherwise."""
    options = EngineOptions(budget=slots, dtype="bfloat16", max_rows="auto", device=machine.device, executor="eager")
    return resolve(LLAMA_1B, replace(options, **said), machine)


def planned_rows(slots: int, **said: Any) -> int:
    options = EngineOptions(dtype="bfloat16", max_model_len=131_072, **said)
    return make_plan(LLAMA_1B, options, budgets=[slots], gpu=Device(memory_bytes=80 * GIB)).rows[1].max_rows


@pytest.mark.parametrize("slots", [8192, 32_768])
def test_auto_rows_are_those_of_the_plan(slots: int) -> None:
    """One formula: `snapstream plan` promises what the engine then allocates."""
    rows = decided(slots=slots).max_rows
    assert rows == min(planned_rows(slots), MAX_AUTO_ROWS)
    assert rows > 1


def test_as_many_rows_as_fit_and_not_one_more() -> None:
    rows = decided(slots=32_768).max_rows
    assert decided(slots=32_768, max_rows=rows).max_rows == rows
    with pytest.raises(ValueError, match=rf"{rows + 1} \+ 1 rows of 1 GiB.* need .* this GPU has 80 GiB free"):
        decided(slots=32_768, max_rows=rows + 1)


def test_sliding_windows_are_slots_that_no_budget_changes() -> None:
    """Layers with a window hold 1,024 slots in place of 8,192; of such layers alone, a model takes any budget."""
    options = EngineOptions(budget=8192, dtype="bfloat16", max_rows="auto", device="cuda", executor="eager")
    half = replace(LLAMA_1B, windows=(1024,) * 8 + (None,) * 8)
    one_row = {model: engine_memory(model, resolve(model, options, H100)).row_bytes for model in (LLAMA_1B, half)}
    assert one_row[half] / one_row[LLAMA_1B] == (8 * 1024 + 8 * 8192) / (16 * 8192)
    alone = replace(LLAMA_1B, windows=(1024,) * 16)
    config = resolve(alone, options, H100)
    assert config.budget.capacity == config.max_model_len == 131_072
    assert engine_memory(alone, config).row_bytes == one_row[LLAMA_1B] / 8
    assert (
        KVSpec.of(half, "float32")
        .describe()
        .endswith("8 of 16 layers keep the last 1,024 tokens; the budget applies to the other 8")
    )
    assert (
        KVSpec.of(alone, "float32").describe().endswith("no budget applies")
        and KVSpec.of(LLAMA_1B, "float32").describe() == ""
    )
    short = resolve(alone, replace(options, max_model_len=512), H100)
    assert engine_memory(alone, short).row_bytes == one_row[LLAMA_1B] / 16  # no sequence fills a window
    profile = HeadProfile(shares=((1 / 64,) * 8,) * 8, model="")
    heads = resolve(half, replace(options, heads=profile), H100).heads
    assert heads is not None and heads.topk[:8] == ((),) * 8 and heads.row_slots == 64 * 8192
    with pytest.raises(ValueError, match="all 16 layers of LlamaForCausalLM have sliding windows"):
        resolve(alone, replace(options, heads=profile), H100)
    uneven = replace(half, full_heads=HeadSizes(num_kv_heads=4, head_dim=128), window_rope=half.rope)
    with pytest.raises(ValueError, match="per-head KV budgets are not supported for LlamaForCausalLM, whose layers"):
        resolve(uneven, replace(options, heads=profile), H100)


def test_auto_rows_have_a_bound_and_need_room_for_one() -> None:
    assert decided(replace(H100, free_bytes=10**15)).max_rows == MAX_AUTO_ROWS
    with pytest.raises(ValueError, match=r"2.30 GiB of weights, 1 \+ 1 rows .* 3 GiB free"):
        decided(replace(H100, free_bytes=3 * GIB))


def test_what_is_taken_as_it_is_said_arrives() -> None:
    said = {"kv_dtype": "fp8", "dtype": "float16", "prefill_attention": "sdpa_flash", "max_waiting": 5}
    found = decided(**said)
    assert {name: getattr(found, name) for name in said} == said
    assert {field.name for field in fields(Settings)} == said.keys()


def test_full_attention_is_a_row_of_the_context() -> None:
    for budget in ("full", 131_072, 10**6):
        config = decided(budget=budget, max_rows=1)
        assert (config.budget.capacity, config.budget.num_topk) == (131_072, 0)
        said = describe_budget(EngineOptions(budget=budget), config)
        assert said == ("" if budget != 10**6 else "budget: 1,000,000 slots were requested; a row has 131,072, because "
                        "no sequence is longer (max_model_len)")  # fmt: skip
    with pytest.raises(ValueError, match="max_model_len is 131073; the model's context is 131072 tokens"):
        decided(max_model_len=131_073)


def test_executor_by_default_is_the_devices() -> None:
    assert decided(LAPTOP, executor=None, max_rows=1).executor == "eager"
    assert decided(replace(H100, device="cuda:0"), executor=None).executor == "graph"
    assert decided(executor="eager").executor == "eager"
    with pytest.raises(
        ValueError, match="executor 'graph': it captures CUDA graphs, and device is 'cpu'; use 'looped' or 'eager'"
    ):
        decided(LAPTOP, executor="graph", max_rows=1)


def test_a_cpu_loops_where_it_can_and_says_why_not() -> None:
    """By default; who asks for looped steps gets them or an error."""
    bare = replace(LAPTOP, executor_problems={"looped": "no C++ compiler"})
    assert decided(LAPTOP, executor=None, dtype="float32", max_rows=1).executor == "looped"
    assert decided(LAPTOP, executor=None, dtype="float32", weights="int4", max_rows=1).executor == "looped"
    for machine, dtype in ((bare, "float32"), (LAPTOP, "bfloat16")):
        assert decided(machine, executor=None, dtype=dtype, max_rows=1).executor == "eager"
        with pytest.raises(ValueError, match="executor 'looped': .*; use 'eager'"):
            decided(machine, executor="looped", dtype=dtype, max_rows=1)
    with LLM(TINY_MODEL, dtype="bfloat16", progress=False) as llm:
        assert any("decode: eager, because dtype is 'bfloat16'" in note for note in llm.notes)
    with LLM(TINY_MODEL, dtype="bfloat16", executor="eager", progress=False) as llm:
        assert not any("decode:" in note for note in llm.notes)


def test_a_start_says_in_few_lines_what_was_chosen_and_how_to_change_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = EngineOptions(
        budget=64, max_rows=3, max_model_len=512, weights="int8", kv_dtype="int8", prefix_store="auto"
    )
    with LLM(TINY_MODEL, options, progress=False) as llm:
        notes, memory = llm.notes, engine_memory(llm.model_config, llm.config)
    assert len(notes) <= 6
    said = "\n".join(notes)
    for words in ("executor: looped; weights: int8", f"{format_bytes(memory.weight_bytes)} (--executor, --weights)",
                  f"rows: 3 rows of 64 slots, {format_bytes(memory.row_bytes)} each, KV dtype int8; requests of at",
                  "prefix store: "):  # fmt: skip
        assert words in said, said
    assert main(["serve", "--help"]) == 0
    flags = re.findall(r"--[a-z-]+", said)
    assert len(flags) == len(set(flags)) >= 8 and set(flags) <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


@pytest.mark.parametrize("kind", ["dense", "hybrid", "quantized"])
def test_a_start_says_it_in_six_lines_for_every_kind_of_checkpoint(kind: str, tmp_path: Path) -> None:
    name = "qwen3-next" if kind == "hybrid" else "qwen3"
    model = save(make_model(name, **{} if kind == "hybrid" else SIZES), tmp_path)
    if kind == "quantized":
        model = write_gguf(model, tmp_path / "model.gguf", "Q5_1")
    with LLM(model, budget=999, max_rows=2, max_model_len=64, prefix_store="auto", progress=False) as llm:
        notes = llm.notes
    assert len(notes) <= 6
    said = "\n".join(notes)
    assert ("recurrent states: " in said) == (kind == "hybrid")
    assert ("Q5_1 are dequantized" in said) == (kind == "quantized")
    assert all("(--" in line for line in notes), said


def test_prefill_rounds_its_inputs_where_that_is_faster_and_the_user_lets_it() -> None:
    fast = replace(LAPTOP, gains_by_bf16=True)
    loops = {"executor": None, "dtype": "float32", "max_rows": 1}

    def inputs(machine: Machine, **options: Any) -> str | None:
        formats = decided(machine, **loops | options).weights
        assert formats is not None
        return formats.prefill_inputs

    for weights in ("bfloat16", "int8", "int4"):
        assert inputs(fast, weights=weights) == "bfloat16"
        assert inputs(LAPTOP, weights=weights) is None
        assert inputs(fast, weights=weights, activations="dtype") is None
        assert weights == "bfloat16" or inputs(fast, weights=weights, activations="int8") is None
        assert inputs(fast, weights=weights, executor="eager") == "bfloat16"  # to mean the same
        for machine in (integers := replace(LAPTOP, gains_by_int8=True), both := replace(fast, gains_by_int8=True)):
            own = inputs(machine, weights=weights)
            assert own == ("int8" if weights != "bfloat16" else "bfloat16" if machine is both else None)
            assert inputs(machine, weights=weights, activations="dtype") is None
            assert weights == "bfloat16" or inputs(machine, weights=weights, activations="int8") is None  # decode alone
    assert inputs(both, weights="float32") is None is inputs(both, weights="float16")
    assert inputs(both, dtype="bfloat16") is None
    config = decided(integers, **loops, weights="int8")
    assert config.weights is not None and config.weights.describe() == "int8 in groups of 32; inputs int8"
    assert "prefill and decode: int8 inputs" in describe_inputs(config)
    assert decided(both, **loops, weights="int8").prefill_attention == "cpu_bf16"
    whole = replace(LAPTOP, attends_in_int16=True)
    for weights in ("bfloat16", "float16", "int8", "int4"):
        assert decided(whole, **loops, weights=weights).prefill_attention == "cpu_int16"
        assert decided(whole, **loops, weights=weights, activations="dtype").prefill_attention == "auto"
        assert decided(whole, **loops, weights=weights, prefill_attention="cpu").prefill_attention == "cpu"
        assert decided(LAPTOP, **loops, weights=weights).prefill_attention == "auto"
    assert decided(whole, **loops, weights="float32").prefill_attention == "auto"
    all_three = replace(fast, attends_in_int16=True)
    assert decided(all_three, **loops, weights="int8").prefill_attention == "cpu_bf16"
    assert decided(all_three, **loops, weights="float16").prefill_attention == "cpu_int16"  # no fewer bits than fp16
    assert decided(fast, **loops, weights="float16").prefill_attention == "auto"
    shorts = replace(LAPTOP, gains_by_int16=True)
    for weights in ("bfloat16", "float16"):
        config = decided(shorts, **loops, weights=weights)
        assert config.weights is not None and config.weights.describe() == f"{weights}; inputs int16 in prefill"
        assert "prefill: int16 inputs, faster here" in describe_inputs(config)
        assert inputs(shorts, weights=weights, executor="eager") == "int16"  # to mean the same
        assert inputs(shorts, weights=weights, activations="dtype") is None
        either = inputs(replace(shorts, gains_by_bf16=True), weights=weights)
        assert either == ("bfloat16" if weights == "bfloat16" else "int16")
    assert inputs(shorts, weights="float32") is None is inputs(shorts, weights="int8")
    assert inputs(replace(shorts, gains_by_int8=True), weights="int4") == "int8"
    blocks = StoredWeights(dtype="bfloat16", quantized=WeightFormat(dtype="fp8"))
    own = resolve(replace(LLAMA_1B, stored=blocks), EngineOptions(device="cpu", max_rows=1), shorts).weights
    assert own is not None and own.layers.is_fp8 and own.prefill_inputs == "int16"
    kept = WeightFormat(dtype="uint4", group=32), WeightFormat(dtype="q6_k", group=16)
    names = (frozenset({"model.layers.0.mlp.up_proj.weight"}), frozenset({"model.layers.1.mlp.up_proj.weight"}))
    stored = StoredWeights(dtype="float16", own=tuple(zip(kept, names, strict=True)))
    options = EngineOptions(device="cpu", max_rows=1)
    config = resolve(replace(LLAMA_1B, stored=stored), options, both)  # each matrix in its own, as in Q4_K_M files
    assert config.weights is not None and config.weights.prefill_inputs == "int8"
    assert all(form.rounds_inputs for form in config.weights.own) and config.prefill_attention == "cpu_bf16"
    assert "prefill and decode: int8 inputs" in describe_inputs(config)
    assert config.weights.describe().endswith("other layers float16; inputs int8")
    options = replace(options, weights="bfloat16")
    formats = resolve(read_model_config(TINY_LATENT_MODEL), options, fast).weights  # latents and experts
    assert formats is not None and formats.prefill_inputs == "bfloat16" and not formats.layers.rounds_inputs
    mixture = resolve(read_model_config(TINY_LATENT_MODEL), replace(options, weights="int8"), both).weights
    assert mixture is not None and mixture.prefill_inputs == "int8" == mixture.decode_inputs
    config = decided(fast, **loops, weights="bfloat16")
    assert config.weights is not None and config.weights.describe() == "bfloat16; inputs bf16"
    assert config.weights.layers.rounds_inputs and config.weights.tables.rounds_inputs
    assert "bfloat16 inputs" in describe_inputs(config)
    assert not describe_inputs(decided(LAPTOP, **loops, weights="bfloat16"))


def test_facts_are_those_of_the_device_that_was_asked_for() -> None:
    with pytest.raises(ValueError, match="device is 'cuda'; the machine was measured for 'cpu'"):
        decided(LAPTOP, device="cuda")


def test_auto_rows_on_a_cpu_ask_for_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "host_memory", lambda: HostMemory(total=80 * GIB, available=3 * GIB))
    found = measure_machine("cpu")
    assert (found.free_bytes, found.total_bytes) == (3 * GIB, 80 * GIB)
    with pytest.raises(ValueError, match="this machine has 3 GiB free"):
        decided(found)
    assert decided(found, max_rows=2).max_rows == 2


def test_rows_in_fp8_fit_twice_as_often() -> None:
    """Plan and engine agree here too; the rest of a row's entry in a batch stays what it was."""
    rows = decided(slots=65_536, kv_dtype="fp8").max_rows
    assert rows == planned_rows(65_536, kv_dtype="fp8")
    assert rows > 1.9 * decided(slots=65_536).max_rows


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_fp8_is_refused_on_a_gpu_that_cannot_convert_it(capability: tuple[int, int]) -> None:
    older = replace(H100, capability=capability)
    with pytest.raises(ValueError, match=rf"Some GPU has compute capability {capability[0]}\.{capability[1]}.*8\.9"):
        decided(older, kv_dtype="fp8")
    with pytest.raises(ValueError, match="Some GPU is not NVIDIA's"):
        decided(replace(H100, capability=None), kv_dtype="fp8")
    blocks = replace(LLAMA_1B, stored=StoredWeights(dtype="bfloat16", quantized=WeightFormat(dtype="fp8")))
    options = EngineOptions(budget=8192, dtype="bfloat16", max_rows="auto", device="cuda", executor="eager")
    with pytest.raises(ValueError, match=r"weights are fp8 in blocks of 128 by 128.* FP8 .*8\.9 .*this is Some GPU"):
        resolve(blocks, options, older)
    weights = resolve(blocks, options, H100).weights
    assert weights is not None and weights.layers.is_fp8 and weights.tables.dtype == "bfloat16"
    decided(older)
    decided(LAPTOP, kv_dtype="fp8", max_rows=1)
    decided(kv_dtype="fp8")


def test_what_rows_of_latents_cannot_have() -> None:
    latent = LatentConfig(q_rank=None, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16, softmax_scale=0.2)
    model = replace(
        LLAMA_1B, architecture="DeepseekV2ForCausalLM", num_kv_heads=1, head_dim=40, qk_norm=False, latent=latent
    )
    options = EngineOptions(device="cpu", max_model_len=4096)
    resolve(model, options, LAPTOP)
    resolve(model, replace(options, kv_dtype="fp8"), LAPTOP)
    with pytest.raises(ValueError, match="kv_dtype is 'int8', and this model keeps latents"):
        resolve(model, replace(options, kv_dtype="int8"), LAPTOP)
    resolve(model, replace(options, device="cuda"), H100)


def test_a_gpu_is_not_chosen_by_its_number() -> None:
    with pytest.raises(ValueError, match="set CUDA_VISIBLE_DEVICES=2 and use 'cuda'"):
        check_device("cuda:2")


@pytest.mark.parametrize(("device", "max_rows"), [("cuda", "auto"), ("cuda", 2), ("cpu", "auto")])
def test_what_a_draft_works_with_is_kept_free(device: str, max_rows: AutoCount) -> None:
    """Its weights are loaded already and missing from what is free."""
    alone = replace(H100, device=device)
    beside = replace(alone, draft=DraftMemory(weight_bytes=10**15, working_bytes=20 * GIB))
    rows = decided(alone, slots=32_768).max_rows
    assert 19 <= rows - decided(beside, slots=32_768).max_rows <= 20  # of 1 GiB, and what decode needs for each
    if max_rows != "auto":
        with pytest.raises(ValueError, match="20 GiB for the draft.*or the context of the draft"):
            decided(beside, slots=32_768, max_rows=rows)


def test_a_draft_counts_whole_against_all_of_a_machine() -> None:
    draft = DraftMemory(weight_bytes=70 * GIB, working_bytes=10 * GIB)
    with pytest.raises(ValueError, match="80 GiB for the draft"):
        decided(replace(LAPTOP, draft=draft), max_rows=1)


def test_a_draft_of_another_process_is_counted() -> None:
    """The server's draft lives in front of the engine's process."""
    draft = DraftMemory(weight_bytes=0, working_bytes=10**18)
    with pytest.raises(ValueError, match="for the draft"):
        build(EngineSpec(model=str(TINY_MODEL), draft_memory=draft))


def test_an_own_draft_is_counted() -> None:
    with LLM(TINY_MODEL, draft=TINY_MODEL, progress=False) as llm:
        assert llm.config.reserved_bytes > weight_bytes(llm.model_config, "float32")
    with LLM(TINY_MODEL, progress=False) as llm:
        assert llm.config.reserved_bytes == 0


def test_a_server_tells_its_engine_of_the_draft() -> None:
    """All of it, because it may or may not be loaded when the engine measures."""
    spec = EngineSpec(model=str(TINY_MODEL))
    assert draft_memory_of(spec, ServeOptions()) is None
    whole, short = (draft_memory_of(spec, ServeOptions(draft=TINY_MODEL, draft_context_len=n)) for n in (None, 128))
    weights = weight_bytes(read_model_config(TINY_MODEL), "float32")
    assert whole is not None and short is not None
    assert weights < short.working_bytes < whole.working_bytes


def test_an_llm_takes_options_and_single_fields_in_their_place() -> None:
    with LLM(TINY_MODEL, EngineOptions(budget=128, max_rows=2), budget=64, selector="hops", progress=False) as llm:
        assert (llm.config.budget.capacity, llm.config.max_rows) == (64, 2)
        assert llm.config.selector.needs_all_queries
    with pytest.raises(TypeError, match="max_row is not a setting of an engine"):
        LLM(TINY_MODEL, max_row=3)


def test_ranks_of_one_machine_loop_and_others_say_why_not() -> None:
    said: dict[str, Any] = {"executor": None, "dtype": "float32", "max_rows": 1, "tensor_parallel": 2}
    apart = said | {"local_ranks": 1, "master_addr": "host:7690"}
    bare = replace(LAPTOP, executor_problems={"looped": "no memfd_create"})
    assert decided(LAPTOP, **said).executor == "looped"
    assert decided(LAPTOP, **apart).executor == decided(bare, **said).executor == "eager"
    for machine, given, why in ((LAPTOP, apart, "these are on several machines"), (bare, said, "no memfd_create")):
        with pytest.raises(ValueError, match=f"executor 'looped': .*{why}; use 'eager'"):
            decided(machine, **given | {"executor": "looped"})
    options = EngineOptions(dtype="float32", tensor_parallel=2, local_ranks=1, master_addr="host:7690")
    assert "several machines" in describe_decode(LLAMA_1B, options, decided(LAPTOP, **apart))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"has_whole_qk_norm": True, "tie_word_embeddings": False}, "norms over all heads"),
        ({"qk_norm": True, "kv_sources": (0,) * 16}, "shared keys and values"),
        ({"recurrent": Mamba2(heads=8, head_dim=8, groups=1, state_dim=8, kernel=4), "recurrent_layers": (0,)},
         "fewer groups of Mamba-2 than ranks"),
    ],
)  # fmt: skip
def test_what_ranks_decode_eagerly(changes: dict[str, Any], why: str) -> None:
    model = replace(LLAMA_1B, **changes)
    options = EngineOptions(dtype="float32", max_rows=1, tensor_parallel=2, device="cpu")
    assert resolve(model, replace(options, tensor_parallel=1), LAPTOP).executor == "looped"
    assert resolve(model, options, LAPTOP).executor == "eager"
    with pytest.raises(ValueError, match=f"has {why}, which it runs on one rank; use 'eager'"):
        resolve(model, replace(options, executor="looped"), LAPTOP)


def test_a_gpu_captures_no_choice_among_experts_in_codes() -> None:
    """Their products read counts on the host. Other widths have a kernel that reads them on the device."""
    model = model_config_from_dict(QWEN3_30B)

    def resolved(weights: str, executor: str | None) -> EngineConfig:
        options = EngineOptions(budget=4096, dtype="bfloat16", device=H100.device, executor=executor, weights=weights)
        return resolve(model, options, H100)

    assert resolved("bfloat16", None).executor == "graph"
    config = resolved("int4", None)
    assert config.executor == "eager"
    assert "quantized experts" in describe_decode(model, EngineOptions(device=H100.device, weights="int4"), config)
    with pytest.raises(ValueError, match="executor 'graph': weights are int4 .* quantized experts .*; use 'eager'"):
        resolved("int4", "graph")


def test_looped_steps_are_of_a_cpu() -> None:
    with pytest.raises(ValueError, match="executor 'looped': device is 'cuda'; the native library runs on a CPU; use"):
        decided(executor="looped")


TWO_H100 = replace(H100, num_gpus=2)


@pytest.mark.parametrize(
    ("said", "machine", "words"),
    [
        ({"tensor_parallel": 2, "attention": "dp"}, TWO_H100, "attention is 'dp', which needs latent attention"),
        ({"tensor_parallel": 3}, replace(H100, num_gpus=3), "cannot be split over 3 ranks"),
        ({"tensor_parallel": 2}, H100, "tensor_parallel is 2; this process sees 1 GPUs, and each rank needs one"),
        ({"tensor_parallel": 2, "executor": "graph"}, LAPTOP, "executor 'graph': it captures CUDA graphs"),
    ],
)
def test_what_ranks_cannot_do_is_refused(said: dict[str, Any], machine: Machine, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decided(machine, **said)


@pytest.mark.parametrize("attention", ["tp", "dp"])
def test_ranks_share_the_size_of_a_prefix_store(attention: Any) -> None:
    """Latents are whole on every rank, and so are kv heads that are fewer than ranks."""
    latents = model_config_from_dict(DEEPSEEK_V3 | {"num_hidden_layers": 4})
    few_heads = model_config_from_dict(QWEN3_30B)  # 4 kv heads
    for model in [latents] if attention == "dp" else [latents, few_heads, LLAMA_1B]:
        options = EngineOptions(budget=4096, dtype="bfloat16", tensor_parallel=8, attention=attention, max_rows=8,
                                max_model_len=32_768, device="cuda", prefix_store="4GiB")  # fmt: skip
        machine = replace(H100, num_gpus=8, host_free_bytes=GIB // 2)  # of each rank
        config = resolve(model, options, machine)
        one = resolve(
            model, replace(options, tensor_parallel=1, attention="tp"), replace(machine, host_free_bytes=4 * GIB)
        )
        block = 8 * prefix_store_bytes(model, config) // config.prefix_blocks
        assert 4 * GIB - block < 8 * prefix_store_bytes(model, config) <= 4 * GIB
        copies = {latents: 8, few_heads: 2}.get(model, 1)
        assert one.prefix_blocks // copies == config.prefix_blocks
        with pytest.raises(ValueError, match=r"prefix_store takes 5\d\d MiB of host memory"):
            resolve(model, replace(options, prefix_store="4GiB"), replace(machine, host_free_bytes=GIB // 4))


@pytest.mark.parametrize("is_gpu", [True, False])
def test_the_example_of_several_machines_starts(is_gpu: bool) -> None:
    """Nobody has set its prefix store: ``auto`` takes a part of what is free for each rank."""
    model = model_config_from_dict(DEEPSEEK_V3)
    machine = Machine(device="cuda" if is_gpu else "cpu", free_bytes=140 * GIB, total_bytes=140 * GIB, name="Some GPU",
                      capability=(9, 0), num_gpus=8, host_free_bytes=128 * GIB if is_gpu else None)  # fmt: skip
    options = EngineOptions(tensor_parallel=16, local_ranks=8, master_addr="10.0.0.1:7690", dtype="bfloat16",
                            attention="dp", experts="ep", prefix_store="auto", device=machine.device)  # fmt: skip
    config = resolve(model, options, machine)
    assert config.prefix_blocks > 0
    free = (
        128 * GIB
        if is_gpu
        else machine.free_bytes - engine_memory(model, replace(config, prefix_store=None)).total_bytes
    )
    assert prefix_store_bytes(model, config) <= free // 2


def test_a_start_says_that_an_indexer_is_left_out() -> None:
    """But not where no sequence has more tokens than it would choose."""
    model = replace(LLAMA_1B, index_topk=2048)
    config = decided(LAPTOP, max_model_len=4096)
    assert "the indexer, which chooses 2,048 tokens for a query, is left out" in describe_indexer(model, config)
    assert not describe_indexer(model, replace(config, max_model_len=2048))
    assert not describe_indexer(LLAMA_1B, config)
