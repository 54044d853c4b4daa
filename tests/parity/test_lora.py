"""LoRA adapters: answers equal those of transformers with merged weights, in any batch and by every executor."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from snapstream.config import KVBudget, PrefixStoreConfig
from snapstream.config.values import num_cores
from snapstream.exec.executors import looped_workspace, max_batch
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.registry import read_model_config
from snapstream.plan.memory import adapter_bytes, engine_memory
from snapstream.startup.build import make_connector
from snapstream.types import SamplingParams
from tests.gguf_files import MODELS as MODELS_IN_GGUF
from tests.gguf_files import write_gguf
from tests.parity.checkpoints import VOCAB, greedy, greedy_along, make_model, save
from tests.waiting import until

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETTINGS: dict[str, Any] = {"budget": "full", "max_model_len": 128, "max_rows": 4, "chunk_len": 16, "progress": False}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def write_adapter(
    folder: Path, model: Any, seed: int, targets: Sequence[str] = ALL, layers: str = r"\d+", **settings: Any
) -> Path:
    """An adapter as PEFT saves it, with random numbers for the projections of a model of transformers."""
    config = {"peft_type": "LORA", "r": 5, "lora_alpha": 9.0, "bias": "none", "use_dora": False, **settings}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(tuple(targets)) and re.search(rf"\.{layers}\.", name):
            rank = next(
                (own for key, own in config.get("rank_pattern", {}).items() if re.search(key, name)), config["r"]
            )
            for side, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                numbers = torch.randn(shape, generator=generator) * (0.3 / rank**0.5)
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = numbers
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of the model with ``W + s B A`` in the place of W."""
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    changed = deepcopy(model)
    modules = dict(changed.named_modules())
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        up, path = (
            tensors[name.replace("lora_A", "lora_B")],
            name.removesuffix(".lora_A.weight").removeprefix("base_model.model."),
        )
        alpha = next(
            (own for key, own in config.get("alpha_pattern", {}).items() if re.search(key, path)), config["lora_alpha"]
        )
        rank = len(down)
        with torch.no_grad():
            modules[path].weight += alpha / (math.sqrt(rank) if config.get("use_rslora") else rank) * (up @ down)
    return changed


def answers(llm: LLM, asked: Sequence[tuple[str, list[int]]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Of all prompts, each by its adapter, in one batch."""
    requests = [llm.requests([prompt], params, lora=lora)[0] for lora, prompt in asked]
    return [list(output.token_ids) for output in llm.answer(requests)]


MODELS: Mapping[str, dict[str, Any]] = {
    "llama-gqa-tied": {"targets": ALL},
    "qwen3": {"targets": ("q_proj", "v_proj"), "use_rslora": True},
    "qwen2": {"targets": ALL, "layers": "[02]", "rank_pattern": {"k_proj": 3}, "alpha_pattern": {"o_proj": 2.0}},
    "qwen2-windows": {"targets": ALL},
    "gemma3": {"targets": ALL},
    "phi3-window": {"targets": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")},
    "cohere": {"targets": ALL},
    "granite-moe": {"targets": ("q_proj", "o_proj")},
    "glm4": {"targets": ("k_proj", "gate_up_proj")},
    "qwen3-next": {"targets": ("q_proj", "o_proj"), "layers": r"\d+\.self_attn"},
    "mimo-v2": {"targets": ("q_proj", "v_proj", "o_proj")},
    "falcon-h1": {"targets": ("q_proj", "gate_proj", "down_proj")},
    "muse-glimmer": {"targets": ALL, "layers": r"language_model\.layers\.\d+\.(self_attn|mlp)"},
    "gemma4-shared": {"targets": ("q_proj", "k_proj", "o_proj", "down_proj"), "layers": r"\d+\.(self_attn|mlp)"},
    "arcee": {"targets": ("up_proj", "down_proj")},
}


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if index < 5 else pytest.mark.slow) for index, name in enumerate(MODELS)]
)
def test_answers_equal_merged_weights(name: str, executor: str, tmp_path: Path) -> None:
    """Two adapters and none, in one batch and in packed prefill."""
    model = make_model(name)
    folder = save(model, tmp_path / "model")
    first = write_adapter(tmp_path / "first", model, 1, **MODELS[name])
    second = write_adapter(tmp_path / "second", model, 2, **{**MODELS[name], "r": 2})
    models = {"": model, "first": merged(model, first), "second": merged(model, second)}
    asked = [(lora, ids(length, length)) for lora, length in (("first", 7), ("", 30), ("second", 5), ("first", 21))]
    with LLM(folder, executor=executor, loras={"first": first, "second": second}, **SETTINGS) as llm:
        found = answers(llm, asked)
        alone = [answers(llm, [one])[0] for one in asked]
    assert found == alone
    for (lora, prompt), answer in zip(asked, found, strict=True):
        assert answer == greedy_along(models[lora], prompt, answer)
    with LLM(folder, executor=executor, **SETTINGS) as llm:
        assert answers(llm, [("", asked[1][1])]) == [found[1]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A checkpoint and two adapters."""
    root, model = tmp_path_factory.mktemp("lora"), make_model("llama-gqa-tied")
    adapters = {name: write_adapter(root / name, model, seed) for seed, name in enumerate(("first", "second"), start=1)}
    return save(model, root / "model"), adapters


@pytest.mark.parametrize("executor", ["eager", "looped"])
def test_a_gguf_file_has_the_adapters_of_its_checkpoint(executor: str, tmp_path: Path) -> None:
    """Its rows of queries and keys lie in another order, in which pairs of neighbors are rotated."""
    model = make_model("llama-gqa-tied", **MODELS_IN_GGUF["llama-gqa-tied"])
    folder = save(model, tmp_path / "model")
    file, adapter = (
        write_gguf(folder, tmp_path / "model.gguf"),
        write_adapter(tmp_path / "lora", model, 1, lora_alpha=20),
    )
    changed, prompt = merged(model, adapter), ids(21, 3)
    with LLM(file, executor=executor, loras={"a": adapter}, **SETTINGS | {"kv_dtype": "float32"}) as llm:
        assert read_model_config(file).rope.is_interleaved and not read_model_config(folder).rope.is_interleaved
        assert answers(llm, [("a", prompt), ("", prompt)]) == [greedy(own, prompt, 12) for own in (changed, model)]


Adapted = tuple[Path, dict[str, Path]]


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "int8"}, {"weights": "int4"}, {"weights": "bfloat16"}, {"weights": "int8", "executor": "eager"},
        {"dtype": "bfloat16", "executor": "eager"},
    ],
    ids=str,
)  # fmt: skip
def test_batches_over_low_precision(settings: dict[str, Any], tmp_path: Path) -> None:
    """A request's answer does not depend on the others, and one without an adapter not on there being any."""
    model = make_model("qwen3", hidden_size=64, intermediate_size=96, head_dim=32)
    folder = save(model, tmp_path / "model")
    adapter = write_adapter(tmp_path / "lora", model, 1, r=33, lora_alpha=99)
    asked = [(lora, ids(length, length)) for lora, length in (("a", 7), ("", 30), ("a", 12), ("", 3))]
    exact = replace(GREEDY, logprobs=0)
    with LLM(folder, loras={"a": adapter}, **SETTINGS | settings) as llm:
        found = answers(llm, asked)
        assert [answers(llm, [one])[0] for one in asked] == found
        scored = llm.answer([llm.requests([prompt], exact, lora=lora)[0] for lora, prompt in asked])
    with LLM(folder, **SETTINGS | settings) as llm:
        without = llm.generate([prompt for _, prompt in asked], exact)
    is_same = [own.logprobs == other.logprobs for own, other in zip(scored, without, strict=True)]
    assert is_same == [False, True, False, True]


@pytest.mark.parametrize("executor", ["eager", "looped"])
def test_the_memory_is_what_the_plan_says(executor: str, llama: Adapted) -> None:
    folder, adapters = llama
    with LLM(folder, executor=executor, loras=adapters, **SETTINGS) as llm:
        runner: Any = llm.engine.runner
        assert runner.decoder.adapters.num_bytes == adapter_bytes(llm.config) > 0
        memory = engine_memory(llm.model_config, llm.config)
        assert memory.total_bytes - engine_memory(llm.model_config, replace(llm.config, loras=())).total_bytes >= (
            memory.adapter_bytes
        )
        assert "of LoRA adapters" in memory.describe() and any("first, second" in note for note in llm.notes)
        if executor == "looped":
            planned = looped_workspace(llm.model_config, llm.config, num_cores())
            most = planned.scratch_bytes + max_batch(llm.config) * planned.entry_bytes
            assert runner.decode.engine.workspace_bytes <= most


@pytest.mark.parametrize("executor", ["eager", "looped"])
def test_drafts_are_verified_with_the_adapter(executor: str, llama: Adapted) -> None:
    """The same tokens are drawn with and without drafts from a prediction."""
    folder, adapters = llama
    asked = [(lora, ids(6, 5) * 5) for lora in ("first", "", "second", "first")]
    params = [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)] * len(asked)
    found, accepted = [], 0
    for most in (0, 4):
        with LLM(folder, executor=executor, loras=adapters, num_speculative_tokens=most, **SETTINGS) as llm:
            each = zip(asked, params, strict=True)
            outputs = llm.answer([llm.requests([prompt], own, lora=lora)[0] for (lora, prompt), own in each])
        accepted += sum(output.timings.accepted_tokens for output in outputs)
        found.append([list(output.token_ids) for output in outputs])
        params = [replace(own, prediction=tuple(tokens)) for own, tokens in zip(params, found[0], strict=True)]
    assert found[0] == found[1] and found[0][0] == found[0][3] != found[0][1] != found[0][2]
    assert accepted > 20


def test_stored_prefixes_are_never_shared(llama: Adapted, tmp_path: Path) -> None:
    """Each adapter and the base find their own blocks alone, also on disk, where the content of an adapter counts."""
    folder, adapters = llama
    store = PrefixStoreConfig(num_bytes=2**20, block_len=8, min_tokens=8)
    settings = SETTINGS | {"prefix_store": store, "prefix_dir": tmp_path / "store"}
    prompt = ids(60, 9)

    def ask(llm: LLM, lora: str) -> tuple[int, list[int]]:
        output = llm.generate([prompt], GREEDY, lora=lora)[0]
        return output.cached_tokens, list(output.token_ids)

    with LLM(folder, loras=adapters, **SETTINGS) as llm:
        cold = {lora: answers(llm, [(lora, prompt)])[0] for lora in ("", "first", "second")}
    with LLM(folder, loras=adapters, **settings) as llm:
        for lora in ("", "first", "second"):
            assert ask(llm, lora) == (0, cold[lora])
        for lora in ("second", "", "first"):
            cached, answer = ask(llm, lora)
            assert cached >= 24 and answer == cold[lora]
    swapped = {"first": adapters["second"], "renamed": adapters["first"]}
    shutil.copytree(adapters["first"], tmp_path / "changed")
    write_adapter(tmp_path / "changed", make_model("llama-gqa-tied"), 7)
    with LLM(folder, loras={**swapped, "changed": tmp_path / "changed"}, **settings) as llm:
        for lora, other in (("first", "second"), ("renamed", "first"), ("", "")):
            cached, answer = ask(llm, lora)
            assert cached >= 24 and answer == cold[other]
        assert ask(llm, "changed")[0] == 0
        assert llm.reset_prefix_store() > 0
        assert ask(llm, "first") == (0, cold["second"])


def test_idle_prefill_keeps_the_adapter(llama: Adapted) -> None:
    """A conversation whose row lost tokens is prefilled again with its adapter."""
    folder, adapters = llama
    store = PrefixStoreConfig(num_bytes=2**20, block_len=8, min_tokens=8)
    budget = KVBudget(num_sink=2, num_topk=14, num_recent=16)
    settings = SETTINGS | {"budget": budget, "selector": SnapKV(observation_len=4), "prefix_store": store}
    with LLM(folder, loras=adapters, **settings) as llm:
        first = llm.generate([ids(40, 9)], GREEDY, lora="first")[0]
        following = [*ids(40, 9), *first.token_ids, *ids(9, 4)]
        until(lambda: llm.engine_thread.client.num_stored(
            tuple(following), llm.config.prefix_namespace("", "first")).result() >= 24)  # fmt: skip
        assert llm.engine_thread.client.num_stored(tuple(following)).result() == 0
        second = llm.generate([following], GREEDY, lora="first")[0]
        assert second.cached_tokens >= 40
    with LLM(folder, loras=adapters, **SETTINGS | {"budget": budget, "selector": SnapKV(observation_len=4)}) as llm:
        assert list(llm.generate([following], GREEDY, lora="first")[0].token_ids) == list(second.token_ids)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel": 2}, "2 adapters are given, and tensor_parallel is 2"),
        ({"tensor_parallel": 2, "attention": "dp"}, "2 adapters are given, and tensor_parallel is 2"),
        ({"executor": "graph"}, "LoRA adapters are given, which its steps do not apply"),
    ],
)
def test_engines_that_have_no_adapters(settings: dict[str, Any], reason: str, llama: Adapted) -> None:
    with pytest.raises(ValueError, match=reason):
        LLM(llama[0], loras=llama[1], **SETTINGS | settings)


def test_unknown_names(llama: Adapted) -> None:
    with LLM(llama[0], loras=llama[1], **SETTINGS) as llm:
        with pytest.raises(ValueError, match="lora is 'third'; the adapters of this engine: first, second"):
            llm.generate([ids(5, 5)], lora="third")
        with pytest.raises(ValueError, match="first, second are given; one answers here"):
            _ = llm.config.only_lora
        with pytest.raises(ValueError, match="engines that transfer KV have none"):
            make_connector(llama[0], llm.model_config, llm.config, Mock(), lambda: None)
