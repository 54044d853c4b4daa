"""What each executor of the decode step requires of a model, a config and a machine. Plain data, no torch.

``plan/`` and ``startup/`` ask ``why_not`` before anything is loaded; an executor asks again when it is built. Executors
that ``config.EXECUTORS`` gains from outside have no entry here and check for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from snapstream.config import EngineConfig, ModelConfig, ParallelConfig, WeightFormats
from snapstream.models.registry import FAMILIES, tensor_specs

# The tensors of layers that looped decode computes, on a GPU without the second line.
_DENSE_TENSORS = frozenset(
    "embed lm_head input_norm post_norm final_norm qkv qkv_bias o o_bias q_norm k_norm gate_up down gate_up_bias "
    "down_bias".split()
)
_LOOPED_TENSORS = _DENSE_TENSORS | frozenset(
    "q_a q_a_norm q kv_a kv_a_norm kv_b router router_bias experts_gate_up experts_down shared_gate_up "
    "shared_down".split()
)
_MAX_HEAD_DIM = 256
MOST_LOOPED_ROWS = 16  # rows of a step that the looped kernel of a GPU takes


@dataclass(frozen=True)
class Requirements:
    """``why_not``: why the executor cannot run an engine of this config; None where it can."""

    why_not: Callable[[ModelConfig, EngineConfig], str | None]
    is_native: bool = False  # needs the compiled library of a CPU, or Triton on a GPU
    instead: str = "'eager'"  # what an error message recommends


def requirements_of(executor: str, device: str) -> Requirements:
    """The requirements of an executor on ``"cpu"`` or ``"cuda"``; none for one from outside the package."""
    return _REQUIREMENTS.get((executor, device.split(":")[0]), Requirements(lambda model, config: None))


def why_not(executor: str, model: ModelConfig, config: EngineConfig, native_problem: str | None = None) -> str | None:
    """Why ``executor`` cannot run an engine of ``config``, whatever executor that names; None where it can.

    ``native_problem``: why this machine has no native code for looped decode, as ``startup/measure.py`` finds it.
    """
    needs = requirements_of(executor, config.device)
    return needs.why_not(model, config) or (native_problem if needs.is_native else None)


def preferred_executor(device: str) -> str:
    """What an engine decodes with on a device where neither model nor machine prevents it; otherwise ``"eager"``."""
    return "graph" if device.startswith("cuda") else "looped"


def max_looped_rows(executor: str, device: str) -> int | None:
    """The most rows that an executor can decode in a step; None: any number."""
    return MOST_LOOPED_ROWS if (executor, device.split(":")[0]) == ("looped", "cuda") else None


def why_not_rounded_inputs(model: ModelConfig, formats: WeightFormats, *, dtype: str, device: str) -> str | None:
    """Why decode does not round the inputs of products with such weights; None where it can. Only looped decode gains
    by it; eager decode does the same wherever looped decode could, so that both give the same tokens.
    """
    if not formats.layers.is_quantized or formats.layers.is_fp8:
        return f"weights are {formats.describe()}; products of whole numbers need int8 or int4"
    return why_not_bf16_inputs(model, dtype=dtype, device=device)


def why_not_bf16_inputs(model: ModelConfig, *, dtype: str, device: str) -> str | None:
    """The same for bf16 weights."""
    if model.moe is not None:
        return f"{model.architecture} has experts, whose products take inputs in dtype"
    if model.latent is not None:
        return f"{model.architecture} keeps latents, whose products take inputs in dtype"
    return why_not_looped_cpu(model, dtype=dtype, device=device)


def why_not_looped_ranks(parallel: ParallelConfig) -> str | None:
    """Why the ranks of an engine cannot run looped decode together; None where they can, or where there is one."""
    if parallel.size == 1:
        return None
    if parallel.address:
        return "ranks meet within a looped step in memory that they share, and these are on several machines"
    if parallel.attention == "dp":
        return "attention is 'dp'; ranks that have whole rows each meet in other places than looped steps know"
    return None


def why_not_looped_cpu(model: ModelConfig, *, dtype: str, device: str) -> str | None:
    """Why looped decode on a CPU cannot run such a model; None where it can."""
    if device != "cpu":
        return f"device is {device!r}; looped steps run on a CPU"
    if dtype != "float32":
        return f"dtype is {dtype!r}; looped steps compute in float32, over weights of any width"
    if not _has_known_layers(model, _LOOPED_TENSORS):
        return f"the layers of {model.architecture} are none that looped steps know"
    if model.rotated_layers is not None:
        return f"{model.architecture} has layers without rotary embedding; looped steps rotate the heads of all layers"
    if model.latent is not None:
        return None
    if model.head_dim % 2 or model.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {model.head_dim}; looped steps take even ones up to {_MAX_HEAD_DIM}"
    return None


def _has_known_layers(model: ModelConfig, known: frozenset[str]) -> bool:
    """Whether a model has layers of the package's own mathematics, and no tensors but ``known`` ones."""
    return FAMILIES.get(model.architecture).layer is None and known.issuperset(tensor_specs(model))


def why_not_graph(model: ModelConfig, weights: WeightFormats | None) -> str | None:
    """Why CUDA graphs cannot hold an engine's steps; None where they can. Quantized experts are multiplied one after
    the other, by counts that the host reads.
    """
    if model.moe is None or weights is None or not weights.layers.is_quantized or weights.layers.is_fp8:
        return None
    return f"weights are {weights.describe()}, and a captured step cannot choose among experts in codes"


def _reads(formats: WeightFormats, dtype: str) -> bool:
    """Whether the looped kernel of a GPU reads such weights."""
    of_matrices = [form for form in (formats.layers, formats.tables, formats.attention) if form is not None]
    known = all(form.dtype == dtype or (form.is_quantized and not form.is_fp8) for form in of_matrices)
    return known and not any(form.rounds_inputs for form in of_matrices)


def why_not_looped_gpu(model: ModelConfig, config: EngineConfig) -> str | None:
    """Why the looped kernel of a GPU cannot run an engine's steps; None where it can."""
    if not _has_known_layers(model, _DENSE_TENSORS):
        return f"the layers of {model.architecture} are none that the looped kernel of a GPU knows"
    if model.rotated_layers is not None:
        return (
            f"{model.architecture} has layers without rotary embedding; the looped kernel rotates those of all layers"
        )
    if model.head_dim % 2 or model.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {model.head_dim}; the looped kernel takes even ones up to {_MAX_HEAD_DIM}"
    if config.weights is not None and not _reads(config.weights, config.dtype):
        return (
            f"weights are {config.weights.describe()}; the looped kernel of a GPU reads {config.dtype}, int8 and int4, "
            f"and inputs in {config.dtype}"
        )
    if config.kv_dtype != "auto":
        return f"kv_dtype is {config.kv_dtype!r}; the looped kernel of a GPU reads rows in {config.dtype}"
    if config.heads is not None or config.reselection is not None:
        return "kv heads with slots of their own, and KV re-selection, are not known to the looped kernel of a GPU"
    if config.parallel.size > 1:
        return f"there are {config.parallel.size} ranks, and the looped kernel of a GPU never stops for others"
    if config.max_rows > MOST_LOOPED_ROWS:
        return f"max_rows is {config.max_rows}; the looped kernel of a GPU takes up to {MOST_LOOPED_ROWS}"
    return None


def _why_not_looped_cpu(model: ModelConfig, config: EngineConfig) -> str | None:
    problem = why_not_looped_cpu(model, dtype=config.dtype, device=config.device)
    return problem or why_not_looped_ranks(config.parallel)


def _why_not_graph_cpu(model: ModelConfig, config: EngineConfig) -> str | None:
    return f"it captures CUDA graphs, and device is {config.device!r}"


def _why_not_graph(model: ModelConfig, config: EngineConfig) -> str | None:
    return why_not_graph(model, config.weights)


_REQUIREMENTS = {
    ("looped", "cpu"): Requirements(_why_not_looped_cpu, is_native=True),
    ("looped", "cuda"): Requirements(why_not_looped_gpu, is_native=True, instead="'graph'"),
    ("graph", "cpu"): Requirements(_why_not_graph_cpu, instead="'looped' or 'eager'"),
    ("graph", "cuda"): Requirements(_why_not_graph),
}
