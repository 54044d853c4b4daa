"""The executors of the decode step: what each one supports, takes and is made by. No torch.

An ``Executor`` states its own requirements; ``plan/`` and ``startup/`` ask it and name none. ``config.EXECUTORS`` lists
the entries. A new executor is a ``DecodeStep`` (``eager.py``), an entry, and a line in ``EXECUTORS``; from outside the
package, ``EXECUTORS.add(name, Executor(...))``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from snapstream.config import DTYPE_BYTES, EXECUTORS, EngineConfig, ModelConfig, WeightFormats
from snapstream.config.recurrent import DeltaNet, Mamba2
from snapstream.config.values import imported, num_cores
from snapstream.models.registry import FAMILIES, kv_spec_of, tensor_specs
from snapstream.models.tensors import base_name

FALLBACK = EngineConfig.executor  # supports every model on every device
PREFERRED = {"cpu": "looped", "cuda": "graph"}  # by type of device
# Per batch entry and token of the vocabulary, with top-p: fp32 logits and scores, keys, integer weights, histogram.
SAMPLING_BYTES = 52
MAX_DRAFTED = 16  # drafted tokens of a step, over all rows
# Of a drafted one and a token of the vocabulary: logits as computed, in fp32 and by turn. On a GPU only where they are
# kept: as batches are counted twice there, the room to sample in holds the others.
_LOGITS_BYTES, _KEPT_LOGITS_BYTES = 12, 4


def eager_batch_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """One entry of an eager batch: logits, the sampler's work, activations; on a GPU twice: graphs keep a copy."""
    batch = model.vocab_size * SAMPLING_BYTES + _activation_bytes(model, config)
    if config.device.startswith("cuda"):
        return 2 * batch
    if config.kv_dtype != "auto":  # the visible slots of one layer are dequantized, with per-head budgets head by head
        spec = kv_spec_of(model, "float32").limited(config.max_model_len)
        dequantized = spec.layer_bytes(spec.max_slots(config.row_budget.capacity))
        batch += dequantized if config.heads is None else dequantized // model.num_kv_heads
    return batch


def _activation_bytes(model: ModelConfig, config: EngineConfig) -> int:
    heads = max((own.num_heads + 2 * own.num_kv_heads) * own.head_dim for own in model.all_heads)
    return (4 * model.hidden_size + 3 * heads + mlp_size(model)) * DTYPE_BYTES[config.dtype]


def max_batch(config: EngineConfig) -> int:
    """Entries of a step: a row has one, and more with drafted tokens."""
    return config.max_rows + (MAX_DRAFTED if config.num_speculative_tokens else 0)


def draft_sizes(num_rows: int, depth: int) -> tuple[int, ...]:
    """Entries of a step whose shape is fixed, by how far they are ahead: ``num_rows`` last tokens, then room for any
    drafts of up to ``depth`` tokens a row.
    """
    return (num_rows, *(min(num_rows, MAX_DRAFTED // ahead) for ahead in range(1, depth + 1)))


def eager_drafted_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Of the drafted tokens of a step: their entries, copies of the slots that they overwrite, and of states what goes
    on without them. On a GPU a step has room for any drafts.
    """
    if not config.num_speculative_tokens:
        return 0
    drafted, logits = MAX_DRAFTED, MAX_DRAFTED * _LOGITS_BYTES
    if config.device.startswith("cuda"):
        sizes = draft_sizes(MAX_DRAFTED, min(config.num_speculative_tokens, MAX_DRAFTED))
        drafted, logits = sum(sizes[1:]), sum(sizes) * _KEPT_LOGITS_BYTES
    spec = kv_spec_of(model, config.dtype, config.kv_dtype)
    states = max(map(spec.layer_state_bytes, range(spec.num_layers)))
    inputs = len(model.recurrent_layers) * _recurrence_size(model) * DTYPE_BYTES[config.dtype]
    of_entries = model.vocab_size * logits + drafted * _activation_bytes(model, config)
    return of_entries + MAX_DRAFTED * (spec.token_bytes() + 2 * states + inputs)


def _recurrence_size(model: ModelConfig) -> int:
    """Numbers of a token that a recurrent layer is fed (``models/recurrent.py``)."""
    net = model.recurrent
    if isinstance(net, DeltaNet):
        return net.channels + net.value_heads * (1 + (net.key_dim if net.gate_rank else 1))
    if isinstance(net, Mamba2):
        return net.channels + net.heads
    return 0 if net is None else 3 * net.channels


def mlp_size(model: ModelConfig) -> int:
    """Numbers that the MLP of a layer holds at a time per token, in the largest of the model's layers."""
    moe = model.moe
    sizes = [3 * model.widest_inner if model.dense_layers else 0]  # gate and up, product
    if moe is not None:
        hidden, inner, width = model.hidden_size, moe.inner, moe.latent or model.hidden_size
        # Of every pair: its token with gate and up; these with their product; that with the output; the output twice.
        pairs = moe.top_k * max(width + 2 * inner, 3 * inner, inner + width, 2 * width)
        pairs += moe.latent  # of the token: what its experts read
        if moe.is_beside_mlp:
            pairs += 3 * hidden  # what the router and the experts read, and the output of the MLP
        sizes.append(pairs + 2 * moe.num_experts + 16 * moe.top_k)  # with fp32 scores, and the order of the pairs
        sizes.append(hidden + 3 * moe.shared_inner)  # with the sum of the chosen
    return max(sizes)


@dataclass(frozen=True, kw_only=True)
class Executor:
    """One executor. A function that needs torch is named by text, ``"module:function"``."""

    make: str | Callable[[Any], Any]  # StepParts -> DecodeStep
    # Why it does not support an engine of this config; None where it does.
    why_not: Callable[[ModelConfig, EngineConfig], str | None] = lambda model, config: None
    machine_problem: str | Callable[[int], str | None] | None = None  # the same for a machine and its number of ranks
    make_matrix: str | Callable[[EngineConfig], Any] | None = None  # MakeMatrix of its weights; None: row-major
    supports_ranks: bool = False  # whether steps stop for the collectives of several ranks
    supports_loras: bool = False  # whether it reads ``Rows.adapter``
    reads_row_formats: bool = False  # whether rows may have another dtype than the computation without being asked for
    dequantizes: bool = True  # whether products dequantize weights to a buffer of their own
    # Why its steps take no drafted tokens (speculative decoding) of such a model; None where they do.
    why_not_drafts: Callable[[ModelConfig], str | None] = lambda model: "its steps verify no drafted tokens"
    batch_bytes: Callable[[ModelConfig, EngineConfig], int] = eager_batch_bytes  # of one entry of a decode batch
    scratch_bytes: Callable[[ModelConfig, EngineConfig], int] = lambda model, config: 0  # whatever the batch

    def problem(self, model: ModelConfig, config: EngineConfig) -> str | None:
        """Why it does not support an engine, whatever the machine; None where it does."""
        if config.loras and not self.supports_loras:
            return "LoRA adapters are given, which its steps do not apply"
        return self.why_not(model, config)

    def decode_step(self, parts: Any) -> Any:
        """The ``DecodeStep`` over ``StepParts``; ValueError for what it does not support."""
        return imported(self.make)(parts)

    def storage(self, config: EngineConfig) -> Any:
        """The ``MakeMatrix`` of the weights that it reads."""
        make: Any = imported(self.make_matrix or "snapstream.models.matrix:make_matrix")
        return make if self.make_matrix is None else make(config)

    def problem_here(self, num_ranks: int) -> str | None:
        """Why this machine cannot run it; the first call may compile a library."""
        return None if self.machine_problem is None else imported(self.machine_problem)(num_ranks)


def executor_of(name: str) -> Executor:
    """The entry of an executor; ValueError for an unknown name."""
    entry: Executor = EXECUTORS.get(name)
    return entry


def why_not_speculative(model: ModelConfig, config: EngineConfig) -> str | None:
    """Why an engine of this config cannot verify drafted tokens; None where it can."""
    if (reason := executor_of(config.executor).why_not_drafts(model)) is not None:
        return f"executor {config.executor!r}: {reason}"
    if model.kv_sources is not None:  # a ring has the keys of later drafts when the layers that share it are computed
        return f"{model.architecture} has layers that share keys and values"
    if (size := config.parallel.size) > 1 and config.device.startswith("cuda"):
        return f"several ranks (tensor_parallel {size}) verify drafts on a CPU only"
    if config.parallel.dp_size > 1:
        return "attention is 'dp', and ranks verify drafts only of rows that they share ('tp')"
    return None


def preferred_executor(device: str) -> str:
    """The default on a device, where neither model nor machine prevents it; otherwise ``FALLBACK``."""
    return PREFERRED[device.partition(":")[0]]


def alternatives(name: str, device: str) -> str:
    """What an error recommends in place of an executor."""
    names = dict.fromkeys((preferred_executor(device), FALLBACK))
    return " or ".join(repr(other) for other in names if other != name)


def problems_here(num_ranks: int) -> dict[str, str]:
    """Executors that this machine cannot run, and why."""
    found = ((name, executor_of(name).problem_here(num_ranks)) for name in EXECUTORS.names)
    return {name: problem for name, problem in found if problem is not None}


def _why_not_graph(model: ModelConfig, config: EngineConfig) -> str | None:
    if not config.device.startswith("cuda"):
        return f"it captures CUDA graphs, and device is {config.device!r}"
    if model.kv_sources is not None:
        return f"{model.architecture} has layers that share keys and values, which are not captured"
    weights = config.weights
    if model.moe is None or weights is None or not weights.layers.is_quantized or weights.layers.is_fp8:
        return None
    return f"weights are {weights.describe()}, and quantized experts are counted on the host, which a graph cannot do"


def _why_no_captured_drafts(model: ModelConfig) -> str | None:
    if model.recurrent_layers:
        return f"{model.architecture} has recurrent layers, and no graph takes back their states; 'eager' does"
    return None


EAGER = Executor(
    make="snapstream.exec.eager:EagerDecode",
    supports_ranks=True,
    supports_loras=True,
    reads_row_formats=True,
    why_not_drafts=lambda model: None,
    scratch_bytes=eager_drafted_bytes,
)
GRAPH = Executor(
    make="snapstream.exec.cuda_graph:make_graph",
    why_not=_why_not_graph,
    supports_ranks=True,
    why_not_drafts=_why_no_captured_drafts,
    scratch_bytes=eager_drafted_bytes,
)


# Kernel looping (a megakernel): a step is one call of the native library (``looped_cpu.py``, ``kernels/cpu/looped``).
# Invariant: the workspace counted here is never less than what the library allocates, and at most a few percent more.

# The tensors of layers that are supported.
_LOOPED_TENSORS = frozenset(
    "embed lm_head input_norm post_norm final_norm qkv qkv_bias o o_bias q_norm k_norm gate_up down gate_up_bias "
    "down_bias input_norm_bias post_norm_bias final_norm_bias lm_head_bias "
    "attention_out_norm mlp_out_norm q_a q_a_norm q kv_a kv_a_norm kv_b gates router router_bias experts_gate_up "
    "experts_down shared_gate_up shared_down sinks router_logit_bias experts_gate_up_bias experts_down_bias "
    "layer_scalar embed_per_layer per_layer_in per_layer_in_norm per_layer_gate per_layer_out per_layer_norm "
    "xielu streams_in streams_out stream_router stream_router_norm stream_prediction stream_correction stream_scale "
    "laurel_in laurel_out laurel_norm mlp_part_norm experts_norm experts_part_norm router_scale expert_scale "
    "latent_in latent_out shared_gate conv_in conv_in_bias conv_kernel conv_bias conv_out conv_out_bias delta_in "
    "delta_gates delta_decay delta_step delta_norm delta_out delta_decay_up delta_gate_up "
    "mamba_in mamba_in_bias mamba_decay mamba_step mamba_skip mamba_norm mamba_out "
    "mamba_out_bias token_norm hidden_norm join".split()
) | {f"hyper_{part}_{kind}" for part in ("attention", "mlp", "head") for kind in ("weights", "base", "scale")}
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


def why_not_rounded_inputs(model: ModelConfig, formats: WeightFormats, *, dtype: str, device: str) -> str | None:
    """Why decode does not round the inputs of products with such weights; None where it does.

    Only the native library gains by it; eager decode rounds wherever the library could, so that both give the same
    tokens.
    """
    if not formats.has_groups:
        return f"weights are {formats.describe()}; integer products need int8, int4 or MXFP4"
    return why_not_looped(model, dtype=dtype, device=device)


def why_not_bf16_inputs(model: ModelConfig, *, dtype: str, device: str) -> str | None:
    """The same for bf16 weights."""
    if model.moe is not None:
        return f"{model.architecture} has experts, whose products take inputs in dtype"
    if model.latent is not None:
        return f"{model.architecture} keeps latents, whose products take inputs in dtype or int8"
    return why_not_looped(model, dtype=dtype, device=device)


# Workspace of the native library, by the rule of library.cpp and sampling.cpp: per batch entry the numbers of every
# stage, per thread some scratch (one stage at a time: the largest) and room to sample in.

_NUMBER = 4  # bytes: fp32
PANEL, _PIECE, ALIGN, _LANES, _DOTS = 32, 128, 4, 16, 4  # the widest that a CPU has
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
    weights = config.weights
    around = () if weights is None else (weights.attention or weights.layers, *weights.own)
    if any(form.group and form.rounds_inputs for form in around):
        # the output of attention, to be rounded, or of recurrent layers
        value_dim = model.widest_head if model.latent is None else model.latent.value_dim
        entry += max(model.most_heads * value_dim, _recurrent_sizes(model)[1])
    entry += 2 * num_threads * PANEL  # sums of a panel of gate and one of up
    scratch = num_threads * (_scratch(model) + _LANES) + 8 * _LANES
    if config.loras:  # what they make of each piece of an input, and per thread of all of it
        rank = -(-max(own.rank for own in config.loras) // PANEL) * PANEL
        pieces = max(-(-model.hidden_size // _PIECE), *(own.num_kv_heads for own in model.all_heads))
        entry += rank * (pieces + -(-model.widest_inner // PANEL) + num_threads)
        scratch += (num_threads + 2) * _LANES
    if num_drafted := max_batch(config) - config.max_rows:
        kept, copied = _drafted_states(model)
        scratch += num_drafted * kept + num_threads * copied
    sampling = min(num_threads, config.max_rows) * _sampling_bytes(model.vocab_size)
    return Workspace(entry_bytes=_NUMBER * entry, scratch_bytes=_NUMBER * scratch + sampling)


def _dense_entry(model: ModelConfig, slots: int) -> int:
    heads, latent = model.most_heads, model.latent
    attended = heads * (model.widest_head if latent is None else max(model.head_dim, latent.value_dim))
    q_rank = 0 if latent is None else latent.q_rank or 0
    inner, outer = _recurrent_sizes(model)
    # In a layer whose q, k and v differ in their formats, or queries and latents.
    inputs = 1 if latent is None and not model.stored.own else 3 if latent is not None and model.gate_dim else 2
    widest = max(inputs * _padded(model.hidden_size), model.widest_inner, attended, q_rank, outer) + ALIGN
    projected = inner
    if latent is None:
        heads_of = map(partial(_projected, model), range(model.num_layers))
        projected = inner + max(heads_of) if model.has_parallel_recurrence else max(inner, *heads_of)
    parts = heads * -(-slots // _PART_SLOTS) * (2 + model.widest_head)
    has_outputs = model.norms.after_mlp is not None or model.is_parallel or model.hyper is not None
    wide = model.hidden_size * (2 if has_outputs else 1)
    angles = model.widest_head * (1 if model.window_rope is None else 2)
    gate_up = (1 + model.has_gate) * model.widest_inner if model.dense_layers else 0
    if model.per_layer_dim:
        wide += _padded(model.hidden_size)  # packed embeddings
    if (altup := model.altup) is not None:
        wide += model.hidden_size + model.stream_size + altup.laurel_rank  # of both branches, and the streams
        widest = max(widest, altup.laurel_rank + ALIGN)
    if (hyper := model.hyper) is not None:
        wide += model.stream_size + hyper.num_shares + hyper.num_streams * (1 + hyper.num_streams)
    if model.moe is not None and model.moe.is_beside_mlp:
        wide += model.hidden_size + _padded(model.hidden_size)  # what the MLP gave, and what the router reads
    return wide + projected + max(gate_up, 2 * model.per_layer_dim) + widest + angles + parts


def _projected(model: ModelConfig, layer: int) -> int:
    """Numbers of a token's heads, and of their gates, as one layer projects them."""
    own, is_shared = model.heads_of(layer), model.source_of(layer) != layer
    sides = 1 if model.keys_are_values and model.layer_windows[layer] is None else 2
    heads = (own.num_heads + (0 if is_shared else sides * own.num_kv_heads)) * own.head_dim
    return own.num_heads * model.gate_dim + heads


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
    of_head = latent.nope_dim + latent.rope_dim + model.gate_dim + kept + latent.kv_rank
    return (latent.q_rank or 0) + heads * of_head + kept


def _mixture_entry(model: ModelConfig, num_threads: int) -> int:
    moe = model.moe
    if moe is None:
        return 0
    wide, pairs, halves = _padded(model.hidden_size), moe.top_k, 1 + model.has_gate
    chosen = 2 * wide + moe.num_experts + _LANES + pairs * (1 + halves * moe.inner + _padded(moe.inner))
    shared = halves * moe.shared_inner + _padded(moe.shared_inner) + int(moe.has_shared_gate)
    return chosen + shared + _padded(moe.latent) + num_threads * (wide + 2 * (pairs + 1) * PANEL)


def _scratch(model: ModelConfig) -> int:
    """Of one thread: the largest of its stages."""
    latent, moe = model.latent, model.moe
    if latent is None:
        groups = [(own.num_heads // own.num_kv_heads, own.head_dim) for own in model.all_heads]
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
    return -(-columns // ALIGN) * ALIGN


def _scratch_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Of the threads, and of the entries of drafted tokens, with copies of the slots that they overwrite."""
    slots = kv_spec_of(model, config.dtype, config.kv_dtype).token_bytes()
    drafted = (max_batch(config) - config.max_rows) * (_batch_bytes(model, config) + slots)
    return looped_workspace(model, config, num_cores()).scratch_bytes + drafted


def _why_not(model: ModelConfig, config: EngineConfig) -> str | None:
    problem, parallel = why_not_looped(model, dtype=config.dtype, device=config.device), config.parallel
    if problem is not None or parallel.size == 1:
        return problem
    one_rank = {
        "norms over all heads": model.has_whole_qk_norm, "shared keys and values": model.kv_sources is not None,
        "embeddings for each layer": model.per_layer_dim > 0,
        "attention and recurrence side by side": model.has_parallel_recurrence,
        "experts beside an MLP": model.moe is not None and model.moe.is_beside_mlp,
        "fewer groups of Mamba-2 than ranks": isinstance(net := model.recurrent, Mamba2) and net.groups < parallel.size,
    }  # fmt: skip
    if found := [name for name, has in one_rank.items() if has]:
        return f"{model.architecture} has {found[0]}, which it runs on one rank"
    if parallel.address:
        return "its ranks all-reduce through shared memory, and these are on several machines"
    if parallel.dp_size > 1:
        return "attention is 'dp'; its all-reduces are those of 'tp'"
    return None


def _batch_bytes(model: ModelConfig, config: EngineConfig) -> int:
    sampling = NATIVE_SAMPLING_BYTES + (GATHERED_BYTES if config.parallel.size > 1 else 0)
    return model.vocab_size * sampling + looped_workspace(model, config, num_cores()).entry_bytes


LOOPED = Executor(
    make="snapstream.exec.looped_cpu:LoopedDecode",
    why_not=_why_not,
    machine_problem="snapstream.exec.looped_cpu:machine_problem",
    make_matrix="snapstream.exec.looped_cpu:panels_for",
    supports_ranks=True,
    supports_loras=True,
    reads_row_formats=True,
    dequantizes=False,
    batch_bytes=_batch_bytes,
    scratch_bytes=_scratch_bytes,
    why_not_drafts=lambda model: None,
)
