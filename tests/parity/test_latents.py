"""What a request can ask of a model that keeps latents: samples, grammars, kept tokens, a compiled step."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evals.selectors import Variant
from snapstream.config import EngineOptions, KVBudget, WeightFormat, WeightFormats
from snapstream.exec.eager import EagerDecode
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import library_problem, load
from snapstream.kernels.reference import dequantize_blocks
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.checkpoint import load_weights
from snapstream.models.decoder import Decoder
from snapstream.models.matrix import Matrix, make_matrix, quantize
from snapstream.models.panels import PanelMatrix, make_panels
from snapstream.models.registry import model_config_from_dict, read_model_config
from snapstream.models.sharding import weight_bytes
from snapstream.plan.fit import weight_formats
from snapstream.spec_prefill.draft import token_scores
from snapstream.spec_prefill.settings import ScoringSettings
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.lists_engine import ListsEngine
from tests.parity.test_looped import random_runner

BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "selector": SnapKV(observation_len=8), "max_model_len": 160, "progress": False, "max_rows": 3,
    "executor": "eager",
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("deepseek-v3"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (70, 5, 110, 40)]


def test_one_selection_per_layer_is_reported(folder: Path, prompts: list[list[int]]) -> None:
    """All heads of a layer keep the same tokens, so a report has one list per layer; two samples have equal rows."""
    with LLM(folder, **SETTINGS) as llm:
        both = llm.generate([prompts[2]], replace(GREEDY, n=2, return_kept=True))[0]
        kept = both.compression
        assert kept is not None and kept.kept_positions is not None and kept.evicted_tokens == 110 - 32
        assert [len(layer) for layer in kept.kept_positions] == [1, 1, 1]
        assert both.samples[0].token_ids == both.samples[1].token_ids
        largest = Variant(observation_len=8, group_reduce="max")
        other = llm.generate([prompts[2]], replace(GREEDY, return_kept=True), selector=largest)[0].compression
    assert other is not None and other.kept_positions != kept.kept_positions


@pytest.mark.parametrize("look_ahead", [0, 4])
def test_a_draft_may_keep_latents(folder: Path, prompts: list[list[int]], look_ahead: int) -> None:
    """In plain PyTorch and in the looped library, the same scores."""
    if problem := library_problem():
        pytest.skip(problem)
    first, second = (
        token_scores(
            Decoder.load(folder, read_model_config(folder), "float32", "cpu", progress=False, make=make),
            prompts[0],
            ScoringSettings(look_ahead=look_ahead),
        )
        for make in (make_matrix, make_panels(load()))
    )
    assert first.shape == (70,) and first.isfinite().all() and first.std() > 0
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


# Mixtures of experts through the whole engine; transformers' answers are held by the files that go through all models.
# A first dense layer, groups, corrections and shared experts are all in ``glm4-moe``.

LENGTHS = (70, 5, 90, 33, 1)
EXPERTS_BUDGET, SELECTOR = KVBudget(num_sink=2, num_topk=14, num_recent=16), SnapKV(observation_len=8)
EXPERTS_SETTINGS: dict[str, Any] = {
    "budget": EXPERTS_BUDGET,
    "selector": SELECTOR,
    "max_model_len": 128,
    "executor": "eager",
    "progress": False,
}
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("glm4-moe"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def experts_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


def answers(experts_folder: Path, experts_prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    with LLM(experts_folder, **{**EXPERTS_SETTINGS, **settings}) as llm:
        return [output.token_ids for output in llm.generate(experts_prompts, PARAMS)]


@pytest.fixture(scope="module")
def alone(experts_folder: Path, experts_prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt by itself, in one chunk."""
    return [answers(experts_folder, [prompt], max_rows=1, chunk_len=128)[0] for prompt in experts_prompts]


@pytest.mark.parametrize(("chunk_len", "max_rows"), [(1, 3), (7, 5), (32, 2), (128, 5)])
def test_neighbours_change_nothing(
    experts_folder: Path, experts_prompts: list[list[int]], alone: list[list[int]], chunk_len: int, max_rows: int
) -> None:
    """No expert has a capacity: tokens of other prompts and rows that choose the same one take nothing away."""
    assert answers(experts_folder, experts_prompts, chunk_len=chunk_len, max_rows=max_rows) == alone


def test_above_the_budget(experts_folder: Path, experts_prompts: list[list[int]]) -> None:
    with LLM(experts_folder, max_rows=3, chunk_len=16, **EXPERTS_SETTINGS) as llm:
        outputs = llm.generate(experts_prompts, PARAMS)
        decoder = llm.engine.runner.decoder  # type: ignore[attr-defined]
    for prompt, output in zip(experts_prompts, outputs, strict=True):
        tokens, logprobs = ListsEngine(decoder, EXPERTS_BUDGET, SELECTOR).generate(prompt, PARAMS.max_tokens)
        assert output.token_ids == tokens
        assert [entry.logprob for entry in output.logprobs or []] == pytest.approx(logprobs, abs=1e-3)


def test_a_model_in_half_precision_routes_in_fp32(experts_folder: Path) -> None:
    with LLM(experts_folder, dtype="bfloat16", **EXPERTS_SETTINGS) as llm:
        weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        assert {name: weights.vectors[name].dtype for name in ("router", "router_bias", "input_norm")} == {
            "router": torch.float32, "router_bias": torch.float32, "input_norm": torch.bfloat16,
        }  # fmt: skip
        (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.token_ids) == 5


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-lite", "glm4-moe"])
def test_a_tie_of_experts_may_fall_either_way(name: str, executor: str, tmp_path: Path) -> None:
    """A router chooses: where two experts tie to within rounding, logits are those of one choice or of the other.

    The two are far apart, so logits that differ from another program's by much prove no fault at such a token.
    """
    model, prompt = make_model(name), [5 + 7 * i % 190 for i in range(33)]
    gate = model.model.layers[-1].mlp.gate
    inputs: list[Tensor] = []
    handle = gate.register_forward_hook(lambda _, given, __: inputs.append(given[0].reshape(-1, given[0].shape[-1])))
    logprobs_of(model, prompt)
    handle.remove()
    bias = gate.e_score_correction_bias
    before = bias.detach().clone()
    scores = (inputs[0][-1].float() @ gate.weight.detach().float().T).sigmoid()

    def biased(expert: int, value: Tensor, margin: float) -> Tensor:
        bias.copy_(before)
        bias[expert] = value + margin
        return logprobs_of(model, prompt)

    with torch.no_grad():
        for chosen, other in itertools.permutations(range(len(scores)), 2):
            tie = scores[chosen] + before[chosen] - scores[other]
            below, above = biased(other, tie, -1e-4), biased(other, tie, 1e-4)
            if (below - above).abs().max() > 0.1:
                break
        else:
            pytest.fail("no expert can be brought to a tie")
        biased(other, tie, 0.0)
    folder = save(model, tmp_path)
    with LLM(folder, budget=64, max_model_len=64, executor=executor, progress=False) as llm:
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20))
    assert output.logprobs is not None
    ours = {each[0]: each[1] for each in output.logprobs[0].top}
    errors = [max(abs(value - float(wanted[token])) for token, value in ours.items()) for wanted in (below, above)]
    assert min(errors) < 2e-3


def logprobs_of(model: Any, prompt: list[int]) -> Tensor:
    """Of the token after a prompt, from transformers, ``[V]``."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)


# Checkpoints in FP8 blocks: read as they are, and the answers are those of the same numbers written wide.

PUBLISHED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
             "modules_to_not_convert": ["lm_head"]}  # fmt: skip
# Names of what stays as it is.
WIDE = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "_expert_gate", "bias", "conv1d", "A_log", "in_proj_a",
        "in_proj_b")  # fmt: skip
# Parts of a stack begin at whole blocks.
SIZES = {"hidden_size": 144, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2,
         "intermediate_size": 256}  # fmt: skip
# Rotated rows of a head lie within a block, as in the published models.
LATENT_SIZES = {"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64, "v_head_dim": 64}  # fmt: skip
# Heads of 256, of which a quarter is rotated: their rows leave their blocks. Those of a DeltaNet do not.
DELTA_SIZES = {"hidden_size": 144, "head_dim": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
               "linear_key_head_dim": 128, "linear_value_head_dim": 128, "intermediate_size": 256}  # fmt: skip
DELTA_MIXTURE = DELTA_SIZES | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
FP8_BLOCKS_PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + 7 * i % 190 for i in range(n)] for n in (90, 1, 17)]


ONE_SCALE = {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
             "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}  # fmt: skip


def narrowed(folder: Path, target: Path, *, has_one_scale: bool = False) -> tuple[Path, Path]:
    """A checkpoint in FP8 blocks of one of floats, and the same numbers as floats. ``has_one_scale``: of every matrix,
    and one of its inputs, as Ministral 3 is published.
    """
    tensors, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    codes, wide = dict[str, Tensor](), dict[str, Tensor]()
    for name, numbers in tensors.items():
        if any(part in name for part in WIDE):
            codes[name] = wide[name] = numbers
            continue
        if has_one_scale:
            scale = (numbers.abs().max() / 448).to(torch.bfloat16)
            codes[name] = (numbers / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            wide[name] = codes[name].float() * scale.float()
            codes[f"{name}_scale_inv"] = scale
            codes[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.01, dtype=torch.bfloat16)
            continue
        codes[name], scales = quantize(numbers)
        codes[f"{name}_scale_inv"] = scales
        wide[name] = dequantize_blocks(codes[name], scales)
    for kind, own in (("fp8", codes), ("wide", wide)):
        (target / kind).mkdir()
        save_file(own, target / kind / "model.safetensors")
        own_form = ONE_SCALE if has_one_scale else PUBLISHED
        extra = {"quantization_config": own_form} if kind == "fp8" else {}
        (target / kind / "config.json").write_text(json.dumps(settings | extra))
    return target / "fp8", target / "wide"


MIMO_SIZES = SIZES | {"head_dim": 192, "v_head_dim": 128, "moe_intermediate_size": 128,
                      "layer_types": ["sliding_attention", "full_attention"],
                      "mlp_layer_types": ["dense", "sparse"]}  # fmt: skip
REORDERED = {"qwen3-next": DELTA_MIXTURE, "qwen3.5": DELTA_SIZES, "qwen3.5-moe": DELTA_MIXTURE, "mimo-v2": MIMO_SIZES}


@pytest.fixture(scope="module", params=["qwen3", "one scale", "glm4-moe", "qwen3-moe", "deepseek-v3", *REORDERED])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if request.param == "one scale":
        folder = save(make_model("ministral3", **SIZES), tmp_path_factory.mktemp("source"))
        return narrowed(folder, tmp_path_factory.mktemp("both"), has_one_scale=True)
    if request.param in REORDERED:
        folder = save(make_model(request.param, **REORDERED[request.param]), tmp_path_factory.mktemp("source"))
        return narrowed(folder, tmp_path_factory.mktemp("both"))
    sizes = SIZES if request.param == "qwen3" else SIZES | {"moe_intermediate_size": 128}
    sizes = sizes | LATENT_SIZES if request.param.startswith("deepseek") else sizes
    folder = save(make_model(request.param, **sizes), tmp_path_factory.mktemp("source"))
    return narrowed(folder, tmp_path_factory.mktemp("both"))


@pytest.mark.parametrize("executor", ["eager", None])
def test_answers_are_those_of_the_wide_twin(both: tuple[Path, Path], executor: str | None) -> None:
    """In fp32, in chunks, alone and in a batch, and with compressed rows; by plain calls and by default."""
    kind = Matrix if executor == "eager" or find_compiler() is None else PanelMatrix
    answers: list[Any] = []
    for folder in both:
        with LLM(
            folder, dtype="float32", budget=48, chunk_len=32, max_rows=2, max_model_len=128, executor=executor,
            progress=False,
        ) as llm:  # fmt: skip
            weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
            kinds = {name for name, weight in weights.matrices.items() if type(weight) is kind and weight.form.is_fp8}
            answers.append([output.token_ids for output in llm.generate(PROMPTS, FP8_BLOCKS_PARAMS)])
        if folder == both[0]:
            wide = {"embed", "lm_head", "kv_b", "delta_gates"}  # kv_b is widened at load
            model = llm.model_config
            stays = wide | {"qkv", "qkv.full"} if model.recurrent_layers or model.value_dim else wide
            assert kinds == set(weights.matrices) - stays
            planned = weight_bytes(model, "float32", llm.config.weights)
            assert weights.num_bytes == planned or kind is PanelMatrix  # which fill up rows to 32
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == len(PROMPTS)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("instructions", instruction_sets())
def test_looped_steps_equal_eager(both: tuple[Path, Path], instructions: InstructionSet) -> None:
    """Over the same numbers row by row; a row's logits are the same bits alone and in a batch."""
    model = read_model_config(both[0])
    if model.recurrent_layers:
        pytest.skip("every step changes the states")
    formats = WeightFormats(layers=WeightFormat(dtype="fp8"), tables=WeightFormat(dtype="float32"))
    own, plain = (
        random_runner(model, formats, "auto", make, 40, 3) for make in (make_panels(load(instructions)), make_matrix)
    )
    looped, rows = LoopedDecode(own.step_parts, 1), torch.tensor([3, 0, 4, 2])
    with torch.inference_mode():
        got = looped.logits(rows).clone()
        alone = torch.cat([looped.logits(rows[i : i + 1]).clone() for i in range(len(rows))])
        want = EagerDecode(plain.step_parts).logits(rows)
    looped.close()
    assert torch.equal(alone, got)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_scheme": "static"}, "activation_scheme is 'static'; read is none or 'dynamic'"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\]; read is none or \[128, 128\]"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'; read is none or 'e4m3'"),
        ({"quant_method": "fbgemm_fp8"}, r"quantization_config is present \(fbgemm_fp8\)"),
    ],
)
def test_other_forms_of_fp8_are_refused(both: tuple[Path, Path], changes: dict[str, Any], reason: str) -> None:
    settings = json.loads((both[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=reason):
        model_config_from_dict(settings | {"quantization_config": PUBLISHED | changes})


@pytest.mark.parametrize("are_gates_fp8", [False, True])
def test_rows_that_leave_their_blocks_are_floats_of_the_checkpoint(are_gates_fp8: bool, tmp_path: Path) -> None:
    """As Qwen3.5 is published: a text part, floats and scales in bf16, and no FP8 of the gates of a DeltaNet."""
    source, _ = narrowed(save(make_model("qwen3.5-moe", **DELTA_MIXTURE), tmp_path / "source"), tmp_path)
    tensors = load_file(source / "model.safetensors")
    if are_gates_fp8:  # as transformers makes it
        for name in [name for name in tensors if "in_proj_a.weight" in name or "in_proj_b.weight" in name]:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name])
    floats = {name: own.bfloat16() if own.dtype == torch.float32 else own for name, own in tensors.items()}
    named = {name.replace("model.", "model.language_model."): own for name, own in floats.items()}
    folder, settings = tmp_path / "published", json.loads((source / "config.json").read_text())
    folder.mkdir()
    save_file(named, folder / "model.safetensors")
    around = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {}, "text_config": settings,
              "quantization_config": settings.pop("quantization_config")}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(around))
    model = read_model_config(folder)
    formats = weight_formats(model, EngineOptions(), device="cpu")
    weights = load_weights(folder, model, torch.float32, "cpu", False, formats)
    kinds = {name: matrix.form.dtype for name, matrix in weights.matrices.items() if not matrix.form.is_fp8}
    assert kinds == dict.fromkeys(("embed", "lm_head", "qkv"), "bfloat16") | {"delta_gates": "float32"}
    assert weights.num_bytes == weight_bytes(model, "float32", formats)
    name = "model.layers.0.self_attn.v_proj.weight"
    want = dequantize_blocks(floats[name], floats[f"{name}_scale_inv"].float()).bfloat16()
    assert torch.equal(weights.matrices["qkv"].data[0, -len(want) :], want)


@pytest.mark.parametrize(
    "form", [PUBLISHED, {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": True}]
)
def test_experts_in_one_tensor_are_refused(form: dict[str, Any], tmp_path: Path) -> None:
    folder = save(
        make_model("llama4", hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, head_dim=16), tmp_path
    )
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": form}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="gate_up_proj is several matrices in one tensor, which is not read if it is"):
        LLM(folder, progress=False)


def test_refused_widths_and_files(both: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="weights is 'int8'; the checkpoint has fp8 in blocks of 128 by 128: use 'auto'"
    ):
        LLM(both[0], weights="int8", progress=False)
    tensors = load_file(both[0] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    spoiled: dict[str, dict[str, Tensor]] = {
        f"{name} holds NaN": {name: torch.full_like(tensors[name].view(torch.uint8), 127).view(torch.float8_e4m3fn)},
        f"{name} holds infinity": {f"{name}_scale_inv": torch.full_like(tensors[f"{name}_scale_inv"], 1e37)},
        f"lacks {name}_scale_inv": {f"{name}_scale_inv": torch.empty(0)},
        f"{name} in model.safetensors is stored as F32": {name: tensors[name].float()},
    }
    (tmp_path / "config.json").write_text((both[0] / "config.json").read_text())
    for reason, changed in spoiled.items():
        kept = {key: tensor for key, tensor in (tensors | changed).items() if tensor.numel()}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=reason):
            LLM(tmp_path, progress=False)


def test_parts_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    folder = save(make_model("qwen3", **SIZES | {"intermediate_size": 80}), tmp_path / "source")
    narrow, _ = narrowed(folder, tmp_path)
    with pytest.raises(ValueError, match=r"rows 0 to 80 of an FP8 matrix \[160, 144\] are not whole blocks of 128"):
        LLM(narrow, progress=False)
