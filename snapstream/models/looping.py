"""Which engines can decode by one native call or kernel (executor ``looped``), from plain data. No torch.

``start/resolve.py`` asks before anything is loaded, ``runner/decode_looped.py`` once more.
"""

from __future__ import annotations

from snapstream.config import EngineConfig, ModelConfig, ParallelConfig, WeightForms
from snapstream.models.dense_roles import dense_roles
from snapstream.models.expert_roles import mixtral_roles, moe_roles
from snapstream.models.families import FAMILIES
from snapstream.models.latent_roles import latent_roles

_LAYERS = {  # that the library computes, and the weights that they may have
    "snapstream.models.dense:DenseLayer": (dense_roles, moe_roles, mixtral_roles),
    "snapstream.models.latent:LatentLayer": (latent_roles,),
}
_MAX_HEAD_DIM = 256
MOST_LOOPED_ROWS = 16  # entries of a step that the kernel of a GPU takes


def problem_of_rounded_inputs(model: ModelConfig, forms: WeightForms, *, dtype: str, device: str) -> str | None:
    """Why decode does not round what such weights are multiplied with; None where it can. Only looped steps gain by it,
    and plain calls do it where looped steps could, so that both mean the same.
    """
    if not forms.layers.is_codes or forms.layers.is_blocks:
        return f"weights are {forms.describe()}; products of whole numbers need int8 or int4"
    return problem_of_bf16_inputs(model, dtype=dtype, device=device)


def problem_of_bf16_inputs(model: ModelConfig, *, dtype: str, device: str) -> str | None:
    """The same of weights of bf16."""
    if model.moe is not None:
        return f"{model.architecture} has experts, whose products take inputs in dtype"
    if model.latent is not None:
        return f"{model.architecture} keeps latents, whose products take inputs in dtype"
    return problem_of_looping(model, dtype=dtype, device=device)


def problem_of_looped_ranks(parallel: ParallelConfig) -> str | None:
    """Why the ranks of an engine cannot run looped steps together; None where they can, or where there is one."""
    if parallel.size == 1:
        return None
    if parallel.address:
        return "ranks meet within a looped step in memory that they share, and these are on several machines"
    if parallel.attention == "dp":
        return "attention is 'dp'; ranks that have whole rows each meet in other places than looped steps know"
    return None


def problem_of_looping(model: ModelConfig, *, dtype: str, device: str) -> str | None:
    """Why such an engine cannot run looped steps; None where it can."""
    if device != "cpu":
        return f"device is {device!r}; looped steps run on a CPU"
    if dtype != "float32":
        return f"dtype is {dtype!r}; looped steps compute in float32, over weights of any width"
    family = FAMILIES.get(model.architecture)
    if family.roles not in (_LAYERS.get(family.layer, ()) if isinstance(family.layer, str) else ()):
        return f"the layers of {model.architecture} are none that looped steps know"
    if model.latent is not None:
        return None
    if model.head_dim % 2 or model.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {model.head_dim}; looped steps take even ones up to {_MAX_HEAD_DIM}"
    return None


def problem_of_capture(model: ModelConfig, weights: WeightForms | None) -> str | None:
    """Why a GPU cannot capture an engine's steps; None where it can. Experts in codes are multiplied one after the
    other, by counts that the host reads.
    """
    if model.moe is None or weights is None or not weights.layers.is_codes or weights.layers.is_blocks:
        return None
    return f"weights are {weights.describe()}, and a captured step cannot choose among experts in codes"


def _reads(forms: WeightForms, dtype: str) -> bool:
    """Whether the looped kernel of a GPU reads such weights."""
    of_matrices = [form for form in (forms.layers, forms.tables, forms.attention) if form is not None]
    known = all(form.width == dtype or (form.is_codes and not form.is_blocks) for form in of_matrices)
    return known and not any(form.rounds_inputs for form in of_matrices)


def problem_of_looped_kernel(model: ModelConfig, config: EngineConfig) -> str | None:
    """Why the looped kernel of a GPU cannot run an engine's steps; None where it can."""
    if FAMILIES.get(model.architecture).roles is not dense_roles or model.moe is not None or model.latent is not None:
        return f"the layers of {model.architecture} are none that the looped kernel of a GPU knows"
    if model.head_dim % 2 or model.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {model.head_dim}; the looped kernel takes even ones up to {_MAX_HEAD_DIM}"
    if config.weights is not None and not _reads(config.weights, config.dtype):
        return (
            f"weights are {config.weights.describe()}; the looped kernel of a GPU reads {config.dtype}, int8 and int4, "
            f"and inputs in {config.dtype}"
        )
    if config.kv_dtype != "auto":
        return f"kv_dtype is {config.kv_dtype!r}; the looped kernel of a GPU reads rows in {config.dtype}"
    if config.heads is not None or config.rescoring is not None:
        return "kv heads with slots of their own, and rescoring, are not known to the looped kernel of a GPU"
    if config.parallel.size > 1:
        return f"there are {config.parallel.size} ranks, and the looped kernel of a GPU never stops for others"
    if config.max_rows > MOST_LOOPED_ROWS:
        return f"max_rows is {config.max_rows}; the looped kernel of a GPU takes up to {MOST_LOOPED_ROWS}"
    return None
