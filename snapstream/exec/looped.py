"""Kernel looping (a megakernel): what the ``looped`` executor supports and takes. No torch.

A step is one call of the native library (``looped_cpu.py``, ``kernels/cpu/looped``). Invariant: the workspace counted
here is never less than what the library allocates, and at most a few percent more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from snapstream.config import EngineConfig, ModelConfig, ParallelConfig, WeightFormats
from snapstream.config.model import DeltaNet, Mamba2
from snapstream.config.values import num_cores
from snapstream.exec.executors import Executor, max_batch
from snapstream.models.registry import FAMILIES, kv_spec_of, tensor_specs
from snapstream.models.tensors import base_name

# The tensors of layers that are supported.
_LOOPED_TENSORS = frozenset(
    "embed lm_head input_norm post_norm final_norm qkv qkv_bias o o_bias q_norm k_norm gate_up down gate_up_bias "
    "down_bias "
    "attention_out_norm mlp_out_norm q_a q_a_norm q kv_a kv_a_norm kv_b router router_bias experts_gate_up "
    "experts_down shared_gate_up shared_down sinks router_logit_bias experts_gate_up_bias experts_down_bias "
    "layer_scalar embed_per_layer per_layer_in per_layer_in_norm per_layer_gate per_layer_out per_layer_norm "
    "mlp_part_norm experts_norm experts_part_norm router_scale expert_scale "
    "shared_gate conv_in conv_in_bias conv_kernel conv_bias conv_out conv_out_bias delta_in delta_gates delta_decay "
    "delta_step delta_norm delta_out delta_decay_up delta_gate_up "
    "mamba_in mamba_in_bias mamba_decay mamba_step mamba_skip mamba_norm mamba_out "
    "mamba_out_bias".split()
)
_MAX_HEAD_DIM = 512


def why_not_looped(model: ModelConfig, *, dtype: str, device: str) -> str | None:
    """Why the native library cannot run such a model; None where it can."""
    if device != "cpu":
        return f"device is {device!r}; the native library runs on a CPU"
    if dtype != "float32":
        return f"dtype is {dtype!r}; the native library computes in float32, over weights of any format"
    tensors = map(base_name, tensor_specs(model))
    if FAMILIES.get(model.architecture).layer is not None or not _LOOPED_TENSORS.issuperset(tensors):
        return f"{model.architecture} has layers that it does not support"
    if model.latent is not None:
        return None
    for own in model.all_heads:
        if own.head_dim % 2 or own.head_dim > _MAX_HEAD_DIM:
            return f"head_dim is {own.head_dim}; it supports even ones up to {_MAX_HEAD_DIM}"
    return None


def why_not_looped_ranks(parallel: ParallelConfig) -> str | None:
    """Why the ranks of an engine cannot run the native library together; None where they can, or where there is one."""
    if parallel.size == 1:
        return None
    if parallel.address:
        return "its ranks all-reduce through shared memory, and these are on several machines"
    if parallel.attention == "dp":
        return "attention is 'dp'; its all-reduces are those of 'tp'"
    return None


def why_not_rounded_inputs(model: ModelConfig, formats: WeightFormats, *, dtype: str, device: str) -> str | None:
    """Why decode does not round the inputs of products with such weights; None where it does.

    Only the native library gains by it; eager decode rounds wherever the library could, so that both give the same
    tokens.
    """
    if not formats.layers.is_quantized or formats.layers.is_fp8 or formats.layers.is_mxfp4:
        return f"weights are {formats.describe()}; integer products need int8 or int4"
    return _why_not_latents(model) or why_not_looped(model, dtype=dtype, device=device)


def why_not_bf16_inputs(model: ModelConfig, *, dtype: str, device: str) -> str | None:
    """The same for bf16 weights."""
    if model.moe is not None:
        return f"{model.architecture} has experts, whose products take inputs in dtype"
    return _why_not_latents(model) or why_not_looped(model, dtype=dtype, device=device)


def _why_not_latents(model: ModelConfig) -> str | None:
    if model.latent is None:
        return None
    return f"{model.architecture} keeps latents, whose products take inputs in dtype"


# Workspace of the native library, by the rule of library.cpp and sample.cpp: per batch entry the numbers of every
# stage, per thread some scratch (one stage at a time: the largest) and room to sample in.

_NUMBER = 4  # bytes: fp32
_PANEL, _ALIGN, _LANES, _DOTS = 32, 4, 16, 4  # the widest that a CPU has
_PART_SLOTS = 1024  # of a row, that one task attends
_SAMPLE_BYTES, _TOKENS_OF_MAXIMUM = 20, 64  # of a token of the vocabulary: its score, a candidate, its weight
_LATENTS_AT_ONCE = 32  # of a row, that a thread reads at a time
# Per batch entry and token of the vocabulary where the library samples: logits of the step, and those of first tokens,
# as computed and by row. Several ranks also hold a part of them before it is gathered.
NATIVE_SAMPLING_BYTES, GATHERED_BYTES = 12, 4


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Of one engine."""

    entry_bytes: int  # of one row of the batch, for all threads together
    scratch_bytes: int  # of the threads, whatever the batch


def looped_workspace(model: ModelConfig, config: EngineConfig, num_threads: int) -> Workspace:
    """``model``: as the device stores it."""
    slots = kv_spec_of(model, config.dtype).limited(config.max_model_len).max_slots(config.row_budget.capacity)
    entry = _dense_entry(model, slots) + _latent_entry(model) + _mixture_entry(model, num_threads)
    around = config.weights and (config.weights.attention or config.weights.layers)
    if around and around.is_quantized and around.rounds_inputs:
        # the output of attention, to be rounded, or of recurrent layers
        entry += max(model.num_heads * model.widest_head, _recurrent_sizes(model)[1])
    entry += 2 * num_threads * _PANEL  # sums of a panel of gate and one of up
    scratch = num_threads * (_scratch(model) + _LANES) + 8 * _LANES
    if num_drafted := max_batch(config) - config.max_rows:
        kept, copied = _drafted_states(model)
        scratch += num_drafted * kept + num_threads * copied
    sampling = min(num_threads, config.max_rows) * _sampling_bytes(model.vocab_size)
    return Workspace(entry_bytes=_NUMBER * entry, scratch_bytes=_NUMBER * scratch + sampling)


def _dense_entry(model: ModelConfig, slots: int) -> int:
    heads, latent = model.num_heads, model.latent
    attended = heads * (model.widest_head if latent is None else max(model.head_dim, latent.value_dim))
    q_rank = 0 if latent is None else latent.q_rank or 0
    inner, outer = _recurrent_sizes(model)
    inputs = 2 if model.stored.own else 1  # in a layer whose q, k and v differ in their formats
    widest = max(inputs * model.hidden_size, model.widest_inner, attended, q_rank, outer) + _ALIGN
    gates = heads if model.has_attention_gate else 0
    projected = inner
    if latent is None:
        heads_of = map(partial(_projected, model, gates), range(model.num_layers))
        projected = inner + max(heads_of) if model.has_parallel_recurrence else max(inner, *heads_of)
    parts = heads * -(-slots // _PART_SLOTS) * (2 + model.widest_head)
    wide = model.hidden_size * (2 if model.norms.has_outputs or model.is_parallel else 1)
    angles = model.widest_head * (1 if model.window_rope is None else 2)
    gate_up = (1 + model.has_gate) * model.widest_inner if model.dense_layers else 0
    if model.per_layer_dim:
        wide += _padded(model.hidden_size)  # packed embeddings
    if model.moe is not None and model.moe.is_beside_mlp:
        wide += model.hidden_size + _padded(model.hidden_size)  # what the MLP gave, and what the router reads
    return wide + projected + max(gate_up, 2 * model.per_layer_dim) + widest + angles + parts


def _projected(model: ModelConfig, gates: int, layer: int) -> int:
    """Numbers of a token's heads as one layer projects them."""
    own, is_shared = model.heads_of(layer), model.source_of(layer) != layer
    sides = 1 if model.keys_are_values and model.layer_windows[layer] is None else 2
    return (gates + model.num_heads + (0 if is_shared else sides * own.num_kv_heads)) * own.head_dim


def _recurrent_sizes(model: ModelConfig) -> tuple[int, int]:
    """What recurrent layers project a token to, and the input of their last product; zeros without."""
    net = model.recurrent if model.recurrent_layers else None
    if isinstance(net, DeltaNet):
        return net.projected, net.value_size
    if isinstance(net, Mamba2):
        return net.inner + net.channels + net.heads, net.inner
    return (0, 0) if net is None else (3 * net.channels, net.channels)


def _drafted_states(model: ModelConfig) -> tuple[int, int]:
    """Of a drafted entry what all recurrent layers keep until it is accepted, and the copy of states that a thread goes
    on with; zeros without.
    """
    net, layers = model.recurrent if model.recurrent_layers else None, len(model.recurrent_layers)
    if isinstance(net, DeltaNet):
        gates = net.value_heads * (1 + (net.key_dim if net.gate_rank else 1))
        return layers * (net.channels + gates), net.value_size // net.key_heads * net.key_dim
    if isinstance(net, Mamba2):
        return layers * (net.channels + net.heads), net.state_dim * net.head_dim
    return (0, 0) if net is None else (layers * net.channels, 0)


def _latent_entry(model: ModelConfig) -> int:
    latent, heads = model.latent, model.num_heads
    if latent is None:
        return 0
    kept = latent.kv_rank + latent.rope_dim
    return (latent.q_rank or 0) + heads * (latent.nope_dim + latent.rope_dim + kept + latent.kv_rank) + kept


def _mixture_entry(model: ModelConfig, num_threads: int) -> int:
    moe = model.moe
    if moe is None:
        return 0
    wide, pairs, halves = _padded(model.hidden_size), moe.top_k, 1 + model.has_gate
    chosen = 2 * wide + moe.num_experts + _LANES + pairs * (1 + halves * moe.inner + _padded(moe.inner))
    shared = halves * moe.shared_inner + _padded(moe.shared_inner) + int(moe.has_shared_gate)
    return chosen + shared + num_threads * (wide + 2 * (pairs + 1) * _PANEL)


def _scratch(model: ModelConfig) -> int:
    """Of one thread: the largest of its stages."""
    latent, moe = model.latent, model.moe
    if latent is None:
        groups = [(model.num_heads // own.num_kv_heads, own.head_dim) for own in model.all_heads]
        attention = max(
            shared * size + max(shared * size, shared * (_PART_SLOTS + 2 * _LANES)) for shared, size in groups
        )
    else:
        attention = max(_LATENTS_AT_ONCE * (latent.kv_rank + latent.rope_dim + _DOTS), _DOTS * latent.nope_dim)
    net, heads = model.recurrent if model.recurrent_layers else None, 0
    if isinstance(net, DeltaNet):
        heads = 2 * net.key_dim + 2 * net.value_size // net.key_heads
        heads += 2 * net.key_dim + net.value_dim + 2 * _LANES if net.gate_rank else 0
    if isinstance(net, Mamba2):
        heads = 2 * net.state_dim + 2 * net.inner // net.groups
    return max(attention, heads, model.per_layer_dim, _DOTS * _LANES, 0 if moe is None else 3 * moe.num_experts)


def _sampling_bytes(vocab_size: int) -> int:
    """Of a thread that samples: five arrays aligned to cache lines, three of them a vector longer."""
    maxima = _NUMBER * (vocab_size // _TOKENS_OF_MAXIMUM + _LANES)
    return _SAMPLE_BYTES * vocab_size + maxima + (_SAMPLE_BYTES - _NUMBER) * _LANES + 5 * _NUMBER * _LANES


def _padded(columns: int) -> int:
    return -(-columns // _ALIGN) * _ALIGN


def _scratch_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Of the threads, and of the entries of drafted tokens, with copies of the slots that they overwrite."""
    slots = kv_spec_of(model, config.dtype, config.kv_dtype).token_bytes()
    drafted = (max_batch(config) - config.max_rows) * (_batch_bytes(model, config) + slots)
    return looped_workspace(model, config, num_cores()).scratch_bytes + drafted


def _why_not(model: ModelConfig, config: EngineConfig) -> str | None:
    problem = why_not_looped(model, dtype=config.dtype, device=config.device)
    if model.has_parallel_recurrence and config.parallel.size > 1:
        return f"{model.architecture} has attention and recurrence side by side in a layer, which it runs on one rank"
    return problem or why_not_looped_ranks(config.parallel)


def _batch_bytes(model: ModelConfig, config: EngineConfig) -> int:
    sampling = NATIVE_SAMPLING_BYTES + (GATHERED_BYTES if config.parallel.size > 1 else 0)
    return model.vocab_size * sampling + looped_workspace(model, config, num_cores()).entry_bytes


LOOPED = Executor(
    make="snapstream.exec.looped_cpu:LoopedDecode",
    why_not=_why_not,
    machine_problem="snapstream.exec.looped_cpu:machine_problem",
    make_matrix="snapstream.exec.looped_cpu:panels_for",
    supports_ranks=True,
    reads_row_formats=True,
    dequantizes=False,
    batch_bytes=_batch_bytes,
    scratch_bytes=_scratch_bytes,
    why_not_drafts=lambda model: None,
)
