"""LoRA adapters: answers equal those of transformers with merged weights, in any batch and by every executor."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, greedy, make_model, save

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
    "arcee": {"targets": ("up_proj", "down_proj")},
}


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize("name", MODELS)
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
    assert found == [greedy(models[lora], prompt, 12) for lora, prompt in asked]
    with LLM(folder, executor=executor, **SETTINGS) as llm:
        assert answers(llm, [("", asked[1][1])]) == [found[1]]
