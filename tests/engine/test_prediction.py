"""Prediction layers (MTP) as draft models: they draft what transformers' layers would, and answers do not change."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import modeling_layers

from snapstream import LLM
from snapstream.calibration import automatic_heads
from snapstream.config import EngineOptions
from snapstream.config.engine import Speculator
from snapstream.exec import draft_model, prediction
from snapstream.exec.prediction import PredictionDrafter
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.models.registry import prediction_config, read_model_config
from snapstream.models.sharding import weight_bytes
from snapstream.startup import build
from snapstream.types import SamplingParams
from tests.engine.test_speculation import BUDGETS, answers, draw_params, model_alone, needs_compiler
from tests.parity import test_latents
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.test_latents import DELTA_MIXTURE, LATENT_SIZES, SIZES, WIDE, narrowed
from tests.parity.test_lora import answers as answers_of_adapters
from tests.parity.test_lora import merged, write_adapter

if not hasattr(modeling_layers, "MtpLayer"):
    pytest.skip(f"transformers {transformers.__version__} has no prediction layers", allow_module_level=True)

MODELS = [
    "qwen3.5", "qwen3.5-moe", "qwen3-next", "deepseek-v3", "deepseek-v3.2", "kimi-k2", "glm4-moe", "glm4-lite", "glm-5",
]  # fmt: skip
# Random layers, which are hardly ever right, and some that nearly always are.
CASES = [
    pytest.param(name, max_rows, knows, marks=[pytest.mark.slow] * ((at + rows) % 3 > 0 or knows == bool(at % 2)))
    for at, name in enumerate(MODELS)
    for rows, max_rows in enumerate((1, 16, 17))
    for knows in (False, True)
]
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Oracle:
    """A model of transformers with a prediction layer, and what that drafts."""

    def __init__(self, name: str, **sizes: Any) -> None:
        self.model = make_model(name, **sizes)
        if hasattr(self.model.config, "num_mtp_layers"):
            self.model.config.num_mtp_layers = 1
        config = copy.deepcopy(self.model.config)
        config.layer_types, config.mlp_layer_types = ["full_attention"], ["sparse"]
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        base = self.model.model
        self.layer = modeling_layers.MtpLayer(config, type(base.layers[-1]), type(base.norm), 0).float().eval()
        forward = self.layer.mtp_block.forward

        def hidden_of(*args: Any, **kwargs: Any) -> Tensor:  # GLM-5 also returns what its indexer has chosen
            out = forward(*args, **kwargs)
            return out[0] if isinstance(out, tuple) else out

        self.layer.mtp_block.forward = hidden_of
        torch.manual_seed(5)
        with torch.no_grad():
            for key, value in (*self.layer.named_parameters(), *self.layer.named_buffers()):
                value.copy_(1.0 * ("norm" in key) + 0.25 * torch.randn_like(value))

    @torch.no_grad()
    def foresee(self) -> None:
        """Make layers add nothing, so that the layer knows what follows a token: what the model itself says."""
        for key, value in (*self.model.named_parameters(), *self.layer.named_parameters()):
            if key.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "experts.down_proj")):
                value.zero_()
        one = 0.0 if "qwen" in self.model.config.model_type else 1.0  # Qwen's norms add it
        self.layer.enorm.weight.fill_(one)
        self.layer.post_norm.weight.copy_(self.model.model.norm.weight)
        size = len(self.layer.eh_proj.weight)
        self.layer.eh_proj.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), 1))

    def save(self, folder: Path) -> Path:
        """With the layer as the family's checkpoints have it."""
        save(self.model, folder)
        is_qwen, behind = "qwen" in self.model.config.model_type, self.model.config.num_hidden_layers
        layer = "mtp.layers.0." if is_qwen else f"model.layers.{behind}."
        names = {"mtp_block.": layer, "enorm.": f"{layer}enorm.", "hnorm.": f"{layer}hnorm.",
                 "eh_proj.": f"{layer}eh_proj.", "post_norm.": f"{layer}shared_head.norm."}  # fmt: skip
        if is_qwen:
            outer = {
                "enorm.": "pre_fc_norm_embedding.",
                "hnorm.": "pre_fc_norm_hidden.",
                "eh_proj.": "fc.",
                "post_norm.": "norm.",
            }
            names |= {name: f"mtp.{stored}" for name, stored in outer.items()}
        own: dict[str, Tensor] = {}
        for key, value in self.layer.state_dict().items():
            prefix = next(prefix for prefix in names if key.startswith(prefix))
            own |= self._as_stored(names[prefix] + key.removeprefix(prefix), value)
        if not is_qwen:  # copies of what all layers share
            own[f"{layer}embed_tokens.weight"] = self.model.model.embed_tokens.weight.detach().clone()
            own[f"{layer}shared_head.head.weight"] = self.model.lm_head.weight.detach().clone()
        file = folder / "model.safetensors"
        save_file(load_file(file) | {name: value.contiguous() for name, value in own.items()}, file, {"format": "pt"})
        return folder

    def _as_stored(self, name: str, value: Tensor) -> dict[str, Tensor]:
        kind = name.rpartition(".")[2]
        if ".experts." not in name or self.model.config.model_type == "qwen3_5_moe_text":
            return {name: value}
        before = name.removesuffix(kind)
        return {
            f"{before}{expert}.{part}.weight": matrix
            for expert, joined in enumerate(value)
            for part, matrix in zip(EXPERTS[kind], joined.chunk(len(EXPERTS[kind])), strict=True)
        }

    @torch.no_grad()
    def scores(self, tokens: list[int], drafted: list[int]) -> Tensor:
        """Logits ``[len(drafted), V]`` of each drafted token behind ``tokens``, given those before it."""
        base, embed = self.model.model, self.model.get_input_embeddings()
        hidden = base(torch.tensor([tokens[:-1]])).last_hidden_state
        inputs, found = tokens[1:], []
        for token in drafted:
            positions = torch.arange(1, len(inputs) + 1)[None]
            embedded = embed(torch.tensor([inputs]))
            mask = torch.full((len(inputs), len(inputs)), float("-inf")).triu(1)[None, None]
            out = self.layer(
                embedded, hidden, position_embeddings=base.rotary_emb(embedded, positions), attention_mask=mask,
                position_ids=positions, past_key_values=None,
            )  # fmt: skip
            found.append(self.model.lm_head(out[0, -1]))
            hidden, inputs = torch.cat((hidden, out[:, -1:]), 1), [*inputs, token]
        return torch.stack(found)


Drafted = tuple[list[int], list[int]]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """What the layer has drafted, and behind which tokens; what it keeps is in fp32."""
    model_alone(monkeypatch)
    monkeypatch.setattr(prediction, "KEPT", torch.float32)
    config, draft, found = build.speculator_config, PredictionDrafter.draft, list[Drafted]()
    monkeypatch.setattr(build, "speculator_config", lambda *given: replace(config(*given), kv_dtype="float32"))

    def record(own: PredictionDrafter, wanted: Any) -> list[list[int]]:
        tokens = [history.token_ids for _, history, _ in wanted]
        drafts = draft(own, wanted)
        found.extend(zip(tokens, drafts, strict=True))
        return drafts

    monkeypatch.setattr(PredictionDrafter, "draft", record)
    return found


def prompts_of(random: Random, *sizes: int) -> list[list[int]]:
    return [[random.randrange(3, VOCAB) for _ in range(size)] for size in sizes]


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
def test_it_drafts_as_transformers_does(name: str, tmp_path: Path, drafted: list[Drafted]) -> None:
    """Prompts also of several chunks, which share some."""
    oracle, random = Oracle(name), Random(3)
    settings: dict[str, Any] = {"kv_dtype": "float32", "budget": "full", "max_rows": 4, "chunk_len": 32}
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(oracle.save(tmp_path), speculative_model="mtp", progress=False, **settings) as llm:
        assert any("the model's own prediction layer" in line for line in llm.notes)
        llm.generate(prompts_of(random, 2, 9, 40, 90, 17, 150), params)
    assert sum(len(draft) for _, draft in drafted) > 60
    assert max(len(draft) for _, draft in drafted) > 1
    for tokens, draft in drafted:
        if draft:
            scores = oracle.scores(tokens, draft)
            best = scores.max(1).values
            torch.testing.assert_close(scores[torch.arange(len(draft)), draft], best, atol=2e-3, rtol=1e-3)


@needs_compiler
@pytest.mark.parametrize(("name", "max_rows", "knows"), CASES)
def test_answers_are_those_without(
    name: str, max_rows: int, knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its rows are full again and again, where it falls behind, and of prompts from the prefix store."""
    monkeypatch.setattr(Speculator, "MOST_SLOTS", 48)
    monkeypatch.setattr(draft_model, "MOST_FED", 21)
    oracle, random = Oracle(name), Random(f"{name} {max_rows}")
    if knows:
        oracle.foresee()
    folder = oracle.save(tmp_path)
    prompts = prompts_of(random, *(random.choice([1, 2, 5, 20, 60, 150]) for _ in range(max_rows + 6)))
    prompts += [prompt + other for prompt, other in zip(prompts, prompts_of(random, 3, 40, 7), strict=False)]
    params = [replace(draw_params(random), max_tokens=random.choice([3, 20, 60])) for _ in prompts]
    if knows:
        params = [SamplingParams(max_tokens=own.max_tokens, temperature=0.0, ignore_eos=True) for own in params]
    params = [replace(own, n=min(own.n, max_rows)) for own in params]
    budget = BUDGETS["rows"] if name in ("glm4-moe", *MODELS[:3]) else "full"  # full rows of latents draft nothing
    settings: dict[str, Any] = {"budget": budget, "max_rows": max_rows}
    if name != "qwen3.5" or max_rows == 17:
        # What is prefilled together, and what the store has of it, depends on the drafts; it changes last bits.
        settings["prefix_store"], params = "1MB", [replace(own, logprobs=None) for own in params]
    want, _, _ = answers(folder, 0, prompts, params, **settings)
    model_alone(monkeypatch)
    got, _, (num_drafted, num_accepted) = answers(folder, 4, prompts, params, speculative_model="mtp", **settings)
    assert got == want
    assert num_drafted > 30
    if knows:
        assert num_accepted > 0.8 * num_drafted


@needs_compiler
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_layers_in_fp8_blocks(
    name: str, tmp_path: Path, drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As published: the product that joins token and hidden state stays in floats."""
    sizes = {"deepseek-v3": SIZES | LATENT_SIZES | {"moe_intermediate_size": 128}, "qwen3-next": DELTA_MIXTURE}[name]
    monkeypatch.setattr(test_latents, "WIDE", (*WIDE, "eh_proj", "mtp.fc", "shared_head"))
    folder = Oracle(name, **sizes).save(tmp_path / "source")
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    found = []
    for own in narrowed(folder, tmp_path):
        drafted.clear()
        with LLM(own, speculative_model="mtp", budget="full", max_rows=2, activations="dtype", progress=False) as llm:
            llm.generate(prompts_of(Random(4), 5, 30), params)
            layer = llm.engine.runner.speculation.drafter.layer  # type: ignore[attr-defined]
            assert layer.weights.matrices["o"].form.is_fp8 == (own.name == "fp8")
        found.append(list(drafted))
    assert found[0] == found[1]
    assert sum(len(draft) for _, draft in found[0]) > 9


@needs_compiler
@pytest.mark.parametrize(
    ("name", "has_layer", "settings", "reason"),
    [
        ("qwen3.5", False, {}, "has no prediction layer: neither mtp.fc.weight nor model.layers.5.eh_proj.weight"),
        ("qwen3", False, {}, "prediction layers of Qwen3ForCausalLM are not supported; those of Qwen3NextForCausalLM"),
        ("qwen3.5", True, {"executor": "eager"}, "one rank with executor 'looped'; there are 1 with 'eager'"),
        ("qwen3.5", True, {"tensor_parallel": 2}, "one rank with executor 'looped'; there are 2 with 'looped'"),
        ("qwen3.5", True, {"num_speculative_tokens": 0}, ", and num_speculative_tokens is 0"),
    ],
)
def test_what_has_no_prediction_layer_is_refused(
    name: str, has_layer: bool, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = Oracle(name).save(tmp_path) if has_layer else save(make_model(name), tmp_path)
    with pytest.raises(ValueError, match=f"^speculative_model is 'mtp'.*{reason}"):
        LLM(folder, speculative_model="mtp", progress=False, **settings)


@needs_compiler
@pytest.mark.parametrize("is_tied", [False, True])
def test_its_output_embedding_takes_four_bits(is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_alone(monkeypatch)
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "tie_word_embeddings": is_tied}
    oracle = Oracle("qwen3.5", **sizes)
    oracle.foresee()
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(oracle.save(tmp_path), speculative_model="mtp", budget="full", max_rows=2, progress=False) as llm:
        layer = llm.engine.runner.speculation.drafter.layer  # type: ignore[attr-defined]
        assert layer.weights.lm_head.form.describe() == "int4 in groups of 32"
        assert llm.config.speculator is not None
        planned = weight_bytes(layer.config, "float32", llm.config.speculator.formats)
        assert 0 <= layer.weights.num_bytes - planned < 0.25 * planned  # a table of inputs, and whole panels
        outputs = llm.generate(prompts_of(Random(1), 3, 40), params)
    drafted, accepted = (sum(getattr(o.timings, f"{n}_tokens") for o in outputs) for n in ("drafted", "accepted"))
    assert accepted > 0.5 * drafted > 4


@needs_compiler
def test_with_heads_that_are_found_at_the_start(tmp_path: Path) -> None:
    """As a server does it, before there is an engine."""
    folder = Oracle("qwen3.5").save(tmp_path)
    options = EngineOptions(speculative_model="mtp", budget=BUDGETS["rows"], selector=SnapKV(observation_len=8))
    found, _ = automatic_heads(folder, read_model_config(folder), options)
    assert isinstance(found.speculative_model, Speculator) and found.speculative_model.is_own


def test_prediction_layers_of_gguf_files_are_refused(tmp_path: Path) -> None:
    model = read_model_config(Oracle("qwen3.5").save(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="prediction layers of GGUF files are not read"):
        prediction_config(file, model)


@needs_compiler
def test_rows_that_came_from_elsewhere_are_drafted_for_later(tmp_path: Path, drafted: list[Drafted]) -> None:
    """Nothing is known of their prompts: context begins with what the engine feeds itself."""
    oracle = Oracle("qwen3.5")
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with LLM(oracle.save(tmp_path), speculative_model="mtp", budget="full", max_rows=1, progress=False) as llm:
        drafter = llm.engine.runner.speculation.drafter  # type: ignore[attr-defined]
        begin = drafter.begin
        drafter.begin = lambda rows, first, hidden: begin(rows, first + len(hidden), hidden[:0])
        (output,) = llm.generate(prompts_of(Random(6), 30), params)
        with_prompts = len(drafted)
        drafter.begin = begin
        (again,) = llm.generate(prompts_of(Random(6), 30), params)
    assert output.token_ids == again.token_ids
    assert drafted[0][1] == [] and any(draft for _, draft in drafted[:with_prompts])
    assert drafted[with_prompts][1]


@needs_compiler
def test_rows_with_adapters(tmp_path: Path, drafted: list[Drafted]) -> None:
    """The model's hidden states are those of the row's adapter; the layer itself has none."""
    oracle, random = Oracle("qwen3-next"), Random(7)
    folder, targets = oracle.save(tmp_path / "model"), {"targets": ("q_proj", "o_proj"), "layers": r"\d+\.self_attn"}
    loras = {"one": write_adapter(tmp_path / "one", oracle.model, 1, **targets)}
    asked = list(zip(("one", "", "one"), prompts_of(random, 9, 30, 21), strict=True))
    settings: dict[str, Any] = {"loras": loras, "budget": "full", "kv_dtype": "float32", "max_rows": 3}
    with LLM(folder, num_speculative_tokens=0, progress=False, **settings) as llm:
        want = answers_of_adapters(llm, asked)
    with LLM(folder, speculative_model="mtp", progress=False, **settings) as llm:
        assert answers_of_adapters(llm, asked) == want
    oracle.model = merged(oracle.model, loras["one"])
    of_one = [(tokens, draft) for tokens, draft in drafted if draft and tokens[:9] == asked[0][1]]
    assert of_one
    for tokens, draft in of_one:
        scores = oracle.scores(tokens, draft)
        best = scores.max(1).values
        torch.testing.assert_close(scores[torch.arange(len(draft)), draft], best, atol=2e-3, rtol=1e-3)
