"""Models with recurrent layers, whose rows hold states of constant size beside slots."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from snapstream.config import EngineOptions, KVBudget, PrefixStoreConfig
from snapstream.config.kv import HeadProfile
from snapstream.config.recurrent import ShortConv
from snapstream.engine.prefix_cache import Node, PrefixIndex, Reservation
from snapstream.kernels import pytorch, reference
from snapstream.kernels.cpu.looped import prompt
from snapstream.kernels.cpu.looped.build import find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import load
from snapstream.kernels.reference import causal_conv
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.kv.spec import KVSpec, State
from snapstream.llm import LLM
from snapstream.models.registry import model_config_from_dict, read_model_config
from snapstream.plan.fit import engine_config
from snapstream.plan.memory import prefix_store_bytes
from snapstream.plan.plan import prefix_plan
from snapstream.spec_prefill.draft import Draft
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, make_model, save

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"max_model_len": 128, "chunk_len": 16, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("lfm2"), tmp_path_factory.mktemp("lfm2"))


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("kernel", [2, 3, 7])
def test_a_convolution_continues_where_it_was_cut(kernel: int, cut: int) -> None:
    torch.manual_seed(kernel)
    x, taps, bias = torch.randn(2, 9, 5), torch.randn(kernel, 5), torch.randn(5)
    state = torch.zeros(2, kernel - 1, 5)
    parts = [causal_conv(part, state, taps, bias) for part in (x[:, :cut], x[:, cut:])]
    conv = torch.nn.functional.conv1d(x.transpose(1, 2), taps.t()[:, None], bias, padding=kernel - 1, groups=5)
    torch.testing.assert_close(torch.cat(parts, dim=1), conv[..., :9].transpose(1, 2))
    whole = torch.zeros(2, kernel - 1, 5)
    assert torch.equal(torch.cat(parts, dim=1), causal_conv(x, whole, taps, bias)) and torch.equal(state, whole)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 130])
def test_the_delta_rule_by_chunks_is_that_by_tokens(count: int) -> None:
    torch.manual_seed(count)
    q, k = (torch.nn.functional.normalize(torch.randn(2, count, 1, 8), dim=-1) for _ in range(2))
    v, decay, beta = torch.randn(2, count, 3, 12), -2.0 * torch.rand(2, count, 3), torch.rand(2, count, 3)
    want, got = (state := torch.randn(2, 3, 8, 12)).clone(), state.clone()
    out = reference.gated_delta(q, k, v, decay, beta, want)
    torch.testing.assert_close(pytorch.gated_delta(q, k, v, decay, beta, got), out, rtol=0, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 130])
def test_the_scan_by_chunks_is_that_by_tokens(count: int) -> None:
    torch.manual_seed(count)
    c, b = torch.randn(2, 2, count, 3, 8)
    x, decay = torch.randn(2, count, 6, 12), -2.0 * torch.rand(2, count, 6)
    want, got = (state := torch.randn(2, 6, 8, 12)).clone(), state.clone()
    out = reference.selective_scan(c, b, x, decay, want)
    torch.testing.assert_close(pytorch.selective_scan(c, b, x, decay, got), out, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.fixture(params=instruction_sets())
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(request.param)
    monkeypatch.setattr(prompt, "load", lambda: library)


def cut_into(draw: random.Random, count: int) -> list[slice]:
    at = sorted({0, count, *(draw.randrange(count + 1) for _ in range(3))})
    return [slice(*pair) for pair in zip(at, at[1:], strict=False)]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("seed", range(12))
def test_a_native_convolution_is_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sequences, count, channels, kernel = (draw.randint(1, most) for most in (3, 40, 600, 7))
    x, taps = torch.randn(sequences, count, channels + 5)[..., :channels], torch.randn(kernel, channels)
    bias, silu, state = (
        draw.choice([None, torch.randn(channels)]),
        bool(seed % 2),
        torch.randn(sequences, kernel - 1, channels),
    )
    want, got, in_parts = state.clone(), state.clone(), state.clone()
    out = prompt.causal_conv(x, got, taps, bias, silu)
    torch.testing.assert_close(out, causal_conv(x, want, taps, bias, silu), rtol=1e-5, atol=1e-5)
    assert torch.equal(got, want)
    parts = [prompt.causal_conv(x[:, own].contiguous(), in_parts, taps, bias, silu) for own in cut_into(draw, count)]
    assert torch.equal(torch.cat(parts, dim=1), out) and torch.equal(in_parts, got)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("seed", range(12))
def test_a_native_delta_rule_is_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sequences, count, key_heads, each, keys, values = (draw.randint(1, most) for most in (3, 70, 3, 3, 130, 130))
    heads = key_heads * each
    q, k = (torch.nn.functional.normalize(torch.randn(sequences, count, key_heads, keys), dim=-1) for _ in range(2))
    v = torch.randn(sequences, count, heads, values)
    by_channel = (keys,) if seed % 2 else ()  # a decay per element of a key
    decay = -2.0 * torch.rand(sequences, count, heads, *by_channel)
    beta = torch.rand(sequences, count, heads)
    state = torch.randn(sequences, heads, keys, values)
    want, got, in_parts = state.clone(), state.clone(), state.clone()
    out = prompt.gated_delta(q, k, v, decay, beta, got)
    torch.testing.assert_close(out, reference.gated_delta(q, k, v, decay, beta, want), rtol=0, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    parts = [
        prompt.gated_delta(*(x[:, own] for x in (q, k, v, decay, beta)), in_parts) for own in cut_into(draw, count)
    ]
    assert torch.equal(torch.cat(parts, dim=1), out) and torch.equal(in_parts, got)
    one = state[-1:].clone()  # alone as in its batch
    assert torch.equal(prompt.gated_delta(*(x[-1:] for x in (q, k, v, decay, beta)), one), out[-1:])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("seed", range(12))
def test_a_native_scan_is_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sequences, count, groups, each, states, size = (draw.randint(1, most) for most in (3, 70, 3, 3, 130, 130))
    c, b = torch.randn(2, sequences, count, groups, states)
    x, decay = torch.randn(sequences, count, groups * each, size), -2.0 * torch.rand(sequences, count, groups * each)
    state = torch.randn(sequences, groups * each, states, size)
    want, got, in_parts = state.clone(), state.clone(), state.clone()
    out = prompt.selective_scan(c, b, x, decay, got)
    torch.testing.assert_close(out, reference.selective_scan(c, b, x, decay, want), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    parts = [prompt.selective_scan(*(p[:, own] for p in (c, b, x, decay)), in_parts) for own in cut_into(draw, count)]
    assert torch.equal(torch.cat(parts, dim=1), out) and torch.equal(in_parts, got)


@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "lfm2-moe",
        "lfm3",
        "qwen3-next",
        "qwen3.5",
        "granite-hybrid",
        "granite-hybrid-moe",
        "nemotron-h",
        "nemotron-3",
        "nemotron-super",
        "kimi-linear",
        "kimi-linear-48b",
        "olmo-hybrid",
        "bamba",
    ],
)
def test_batches_of_16_and_17_answer_as_each_alone(name: str, tmp_path: Path) -> None:
    folder = save(make_model(name), tmp_path)
    asked = prompts(*range(1, 52, 3))
    assert len(asked) == 17
    with LLM(folder, max_rows=17, **SETTINGS) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in asked]
        assert [output.token_ids for output in llm.generate(asked, GREEDY)] == alone
        assert [output.token_ids for output in llm.generate(asked[:16], GREEDY)] == alone[:16]


@pytest.mark.skipif(find_compiler() is None, reason="the looped executor needs a C++ compiler")
def test_a_gate_of_odd_size_has_the_same_bits_alone_and_packed(tmp_path: Path) -> None:
    """Granite's last layer gates the last tokens of all prompts at once: 144 numbers each, no multiple of a vector."""
    folder = save(make_model("granite-hybrid", mamba_n_groups=1), tmp_path)
    asked, first = prompts(*range(3, 43)), SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    with LLM(folder, max_rows=40, executor="looped", **SETTINGS | {"chunk_len": 128}) as llm:
        alone = [llm.generate([prompt], first)[0].samples[0].logprobs for prompt in asked]
        assert [output.samples[0].logprobs for output in llm.generate(asked, first)] == alone


def test_rows_cut_the_attention_layers_alone(folder: Path) -> None:
    model = read_model_config(folder)
    spec = KVSpec.of(model, "float32")
    assert [type(layer) is State for layer in spec.layers] == [True, False, True, False, True]
    state = 4 * 2 * model.hidden_size  # two inputs of each channel
    assert spec.state_bytes == 3 * state
    assert spec.row_bytes(32) == 2 * 32 * spec.slot_bytes(spec.slots_of(spec.slot_layer_indices[0])) + 3 * state
    with LLM(folder, budget=48, max_rows=2, **SETTINGS) as llm:
        assert "recurrent states: 3 of 5 layers keep a state" in "\n".join(llm.notes)
        out = llm.generate(prompts(100), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0]
        assert llm.engine.runner.cache.num_bytes == 3 * spec.row_bytes(48)
    assert out.compression is not None and out.compression.evicted_tokens == 52
    assert out.compression.row_bytes == spec.row_bytes(48)


def test_a_hybrid_keeps_what_its_documents_say() -> None:
    """Of 40 layers 30 are recurrent: of 262,144 tokens 5.0 GiB of keys and values in bf16, in a row of 8,192 slots
    160 MiB and the states.
    """
    settings = {"architectures": ["Qwen3_5MoeForCausalLM"], "max_position_embeddings": 262144}
    model = model_config_from_dict(settings)
    spec = KVSpec.of(model, "bfloat16")
    assert spec.token_bytes() * 262144 == 5 * 2**30
    assert spec.row_bytes(8192) - spec.state_bytes == 160 * 2**20
    assert spec.state_bytes == 30 * 4 * (32 * 128 * 128 + 3 * 8192)


def test_a_planned_store_shares_its_bytes_between_blocks_and_snapshots() -> None:
    model = model_config_from_dict({"architectures": ["Qwen3_5MoeForCausalLM"], "max_position_embeddings": 262144})
    spec, store = KVSpec.of(model, "bfloat16"), PrefixStoreConfig(num_bytes=64 * 2**30).on("cuda")
    num_blocks = store.num_blocks(spec.stored_token_bytes(store.snapshot_len))
    snapshots = store.num_snapshots(num_blocks)
    assert snapshots == num_blocks * store.block_len // 1024
    used = num_blocks * store.block_len * spec.prefix_token_bytes + snapshots * spec.state_bytes
    assert (
        store.num_bytes - spec.state_bytes - store.block_len * spec.stored_token_bytes(2048) < used <= store.num_bytes
    )
    planned = prefix_plan(model, EngineOptions(dtype="bfloat16", prefix_store=store), 100_000, "cuda")
    assert planned is not None and planned.num_tokens == num_blocks * store.block_len
    assert planned.prompt_bytes == 390 * store.block_len * spec.prefix_token_bytes + spec.state_bytes


def test_experts_in_one_tensor_are_those_of_one_each(tmp_path: Path) -> None:
    each, fused = save(make_model("qwen3.5-moe"), tmp_path / "each"), tmp_path / "fused"
    shutil.copytree(each, fused)
    tensors = load_file(each / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        own = [{k: tensors.pop(f"{prefix}{x}.{k}_proj.weight") for k in ("gate", "up", "down")} for x in range(6)]
        tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in own])
        tensors[f"{prefix}down_proj"] = torch.stack([one["down"] for one in own])
    tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(48)  # not loaded
    save_file(tensors, fused / "model.safetensors")
    found = []
    for folder in (each, fused):
        with LLM(folder, max_rows=2, **SETTINGS) as llm:
            found.append([out.token_ids for out in llm.generate(prompts(40, 7), GREEDY)])
    assert found[0] == found[1]


def test_attention_in_place_of_positions_on_several_axes() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10]}  # fmt: skip
    model = model_config_from_dict({"architectures": ["Qwen3_5ForCausalLM"], "rope_parameters": rope})
    assert model.rope.kind == "default" and model.rope.rotary_dim(model.head_dim) == 64


STORE = PrefixStoreConfig(num_bytes=2**20, block_len=8, min_tokens=8, snapshot_len=16)
STORED: dict[str, Any] = {**SETTINGS, "selector": SnapKV(observation_len=4), "budget": 48, "chunk_len": 24}


@pytest.mark.parametrize("name", ["lfm2", "lfm2-moe", "lfm3", "qwen3.5", "nemotron-3", "kimi-linear", "olmo-hybrid"])
def test_a_hit_begins_at_a_snapshot_and_answers_as_a_cold_prefill(name: str, tmp_path: Path) -> None:
    """A further turn, the same prompt again, other ends of a prompt, several samples; alone and together."""
    folder = save(make_model(name), tmp_path)
    document, more, other = prompts(61, 20, 30)
    asked = [document, document + more, document + more, document[:45] + other, document[:10] + other, other * 2]
    three = SamplingParams(max_tokens=8, temperature=0.9, seed=5, n=3, ignore_eos=True)

    def answers(llm: LLM, *, together: bool) -> list[Any]:
        outputs = llm.generate(asked, GREEDY) if together else [llm.generate([own], GREEDY)[0] for own in asked]
        samples = llm.generate([document + more], three)[0].samples
        return [output.token_ids for output in outputs] + [sample.token_ids for sample in samples]

    with LLM(folder, max_rows=4, **STORED) as llm:
        cold = answers(llm, together=False)
    with LLM(folder, max_rows=4, prefix_store=STORE, **STORED) as llm:
        cached = []
        for prompt, want in zip(asked, cold, strict=False):
            output = llm.generate([prompt], GREEDY)[0]
            assert output.token_ids == want
            cached.append(output.cached_tokens)
        assert cached == [0, 56, 72, 32, 0, 0]
        assert answers(llm, together=True) == cold
    with LLM(folder, max_rows=4, prefix_store=STORE, **STORED) as llm:
        assert answers(llm, together=True) == cold


def test_a_store_of_few_snapshots_answers_alike(folder: Path) -> None:
    """Snapshots are evicted all the time, also of blocks that stay."""
    small = PrefixStoreConfig(num_bytes=2**15, block_len=8, min_tokens=8, snapshot_len=64)
    asked = [base[:cut] + tail for base in prompts(90, 70) for cut in (30, 90) for tail in prompts(9, 25)] * 2
    random.Random(1).shuffle(asked)
    with LLM(folder, max_rows=3, **STORED) as llm:
        cold = [output.token_ids for output in llm.generate(asked, GREEDY)]
    with LLM(folder, max_rows=3, prefix_store=small, **STORED) as llm:
        config = llm.config
        assert 1 <= config.prefix_snapshots < 8
        assert [output.token_ids for output in llm.generate(asked, GREEDY)] == cold
        assert [llm.generate([own], GREEDY)[0].token_ids for own in asked] == cold
        blocks = llm.engine.runner.prefix_blocks
        assert 0 < blocks.num_bytes <= prefix_store_bytes(llm.model_config, config)


def snapshot_files(store: Path) -> list[Path]:
    """In the order in which they were written."""
    return sorted(store.rglob("*.state.safetensors"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "granite-hybrid", "nemotron-3", "kimi-linear"])
def test_a_restart_finds_snapshots(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn continues at the end of the first; without that file at the snapshot before, bit for bit."""
    fsync = os.fsync
    # Files that are written within one tick of the kernel's clock have the same time.
    monkeypatch.setattr("snapstream.kv.prefix_store.os.fsync", lambda file: (time.sleep(0.02), fsync(file)))
    folder, store = save(make_model(name), tmp_path / "model"), tmp_path / "store"
    document, more = prompts(61, 20)
    stored = {**STORED, "prefix_store": STORE, "prefix_dir": str(store)}
    with LLM(folder, max_rows=2, **STORED) as llm:
        cold = llm.generate([document + more], GREEDY)[0]
    for cached, damage in ((56, None), (48, Path.unlink), (32, lambda path: path.write_bytes(b"x")), (0, None)):
        if not snapshot_files(store):
            with LLM(folder, max_rows=2, **stored) as llm:
                llm.generate([document], GREEDY)
            assert len(snapshot_files(store)) >= 4, "after 16, 32, 48 and 56 tokens"
        for path in snapshot_files(store)[4:]:  # of the answer, if there was time for it, and of the turn before
            path.unlink()
        if damage is not None:
            damage(snapshot_files(store)[-1])
        elif not cached:
            for path in snapshot_files(store):
                path.unlink()
        with LLM(folder, max_rows=2, **stored) as llm:
            output = llm.generate([document + more], GREEDY)[0]
            # A damaged file is found while it is read: its blocks are kept, and the prompt is computed as a whole.
            assert output.cached_tokens == (0 if cached == 32 else cached)
            assert output.token_ids == cold.token_ids
            assert llm.generate([document + more], GREEDY)[0].token_ids == cold.token_ids


@pytest.mark.parametrize("num_bytes", [2**14, 2**17])
def test_a_store_on_disk_answers_as_none(num_bytes: int, folder: Path, tmp_path: Path) -> None:
    """Snapshots and blocks leave the memory, and are read again from files; many prompts, several lives."""
    small = PrefixStoreConfig(num_bytes=num_bytes, block_len=8, min_tokens=8, snapshot_len=16)
    asked = [base[:cut] + tail for base in prompts(90, 70) for cut in (30, 60, 90) for tail in prompts(9, 25)] * 2
    random.Random(1).shuffle(asked)
    with LLM(folder, max_rows=3, **STORED) as llm:
        cold = [output.token_ids for output in llm.generate(asked, GREEDY)]
    hits = []
    for _ in range(2):
        with LLM(folder, max_rows=3, prefix_store=small, prefix_dir=str(tmp_path), **STORED) as llm:
            found = [llm.generate([own], GREEDY)[0] for own in asked]
            assert [output.token_ids for output in found] == cold
            assert [output.token_ids for output in llm.generate(asked, GREEDY)] == cold
            hits.append(sum(output.cached_tokens for output in found))
    assert min(hits) > 0


@pytest.mark.parametrize("seed", range(6))
def test_every_snapshot_has_one_owner(seed: int) -> None:
    """Jobs open, end and are dropped in any order, and namespaces are reset; no number is lost or used twice."""
    draw, index = random.Random(seed), PrefixIndex(12, num_snapshots=4)
    jobs: list[tuple[list[Node], Reservation, list[tuple[Node, int]]]] = []
    for _ in range(400):
        if len(jobs) < 3 and draw.random() < 0.6:
            chain = tuple(bytes([draw.randrange(2)]) * 4 for _ in range(draw.randrange(1, 7)))
            path = index.path("", chain)
            ready = next((n for n, node in enumerate(path) if not node.is_ready), len(path))
            restored = index.up_to_snapshot(path[:ready])
            assert not restored or restored[-1].snapshot is not None
            index.take(restored)
            saved = index.reserve("", chain)
            found = [(node, index.reserve_snapshot(node)) for node in [*path, *saved.nodes] if draw.random() < 0.5]
            jobs.append((restored, saved, [(node, number) for node, number in found if number is not None]))
        elif jobs:
            restored, saved, due = jobs.pop(draw.randrange(len(jobs)))
            is_done = draw.random() < 0.7
            index.release(restored)
            (index.commit if is_done else index.drop)(saved)
            for node, number in due:
                index.end_snapshot(node, number, is_done=is_done)
        if draw.random() < 0.02:
            index.reset()
        kept = [number for number, node in index.snapshots.items() if node.snapshot == number and not node.is_lost]
        used = [*kept, *(number for _, _, due in jobs for _, number in due)]
        assert len(kept) <= len(index.snapshots) and len(set(used)) == len(used) and set(used) <= {0, 1, 2, 3}
    for restored, saved, due in jobs:
        index.release(restored)
        index.drop(saved)
        for node, number in due:
            index.end_snapshot(node, number, is_done=False)
    index.reset()
    assert not index.snapshots
    fresh = index.reserve("", tuple(bytes([n]) * 4 for n in range(6))).nodes
    assert sorted(number for node in fresh if (number := index.reserve_snapshot(node)) is not None) == [0, 1, 2, 3]


_EVEN = HeadProfile(shares=((0.1, 0.1),) * 5, model="", made_by="hand")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"heads": _EVEN, "budget": 64}, "5 layers of 2 kv heads; this model has 2 of 2 to which a budget applies"),
        ({"executor": "graph"}, "CUDA graphs"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], problem: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=problem), LLM(folder, max_rows=2, **SETTINGS, **options):
        pass


def test_an_automatic_store_has_snapshots(folder: Path) -> None:
    with LLM(folder, max_rows=1, prefix_store="auto", **SETTINGS) as llm:
        assert "snapshots of states (--prefix-store)" in "\n".join(llm.notes)


def test_a_store_on_a_gpu_and_a_draft_are_refused(folder: Path) -> None:
    options = EngineOptions(prefix_store=PrefixStoreConfig(num_bytes=2**20))
    with pytest.raises(ValueError, match="has recurrent layers, which a prefix store does not support on a GPU"):
        engine_config(read_model_config(folder), options, KVBudget.full(128), 128, device="cuda")
    with pytest.raises(ValueError, match="recurrent layers; a draft needs attention"):
        Draft.load(folder)


def test_a_convolution_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="a convolution over 1 tokens"):
        ShortConv(channels=4, kernel=1)
