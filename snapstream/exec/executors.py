"""The executors of the decode step: what each one supports, takes and is made by. No torch.

An ``Executor`` states its own requirements; ``plan/`` and ``startup/`` ask it and name none. ``config.EXECUTORS`` lists
the entries: ``eager`` and ``graph`` are here, ``looped`` is in ``looped.py``. A new executor is a ``DecodeStep``
(``eager.py``), an entry, and a line in ``EXECUTORS``; from outside the package, ``EXECUTORS.add(name, Executor(...))``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snapstream.config import DTYPE_BYTES, EXECUTORS, EngineConfig, ModelConfig
from snapstream.config.model import DeltaNet, Mamba2
from snapstream.config.values import imported
from snapstream.models.registry import kv_spec_of

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
    heads = max((model.num_heads + 2 * own.num_kv_heads) * own.head_dim for own in model.all_heads)
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
        hidden, inner = model.hidden_size, moe.inner
        # Of every pair: its token with gate and up; these with their product; that with the output; the output twice.
        pairs = moe.top_k * max(hidden + 2 * inner, 3 * inner, inner + hidden, 2 * hidden)
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
    reads_row_formats: bool = False  # whether rows may have another dtype than the computation without being asked for
    dequantizes: bool = True  # whether products dequantize weights to a buffer of their own
    # Why its steps take no drafted tokens (speculative decoding) of such a model; None where they do.
    why_not_drafts: Callable[[ModelConfig], str | None] = lambda model: "its steps verify no drafted tokens"
    batch_bytes: Callable[[ModelConfig, EngineConfig], int] = eager_batch_bytes  # of one entry of a decode batch
    scratch_bytes: Callable[[ModelConfig, EngineConfig], int] = lambda model, config: 0  # whatever the batch

    def decode_step(self, parts: Any) -> Any:
        """The ``DecodeStep`` over ``StepParts``; ValueError for what it does not support."""
        return imported(self.make)(parts)

    def storage(self, config: EngineConfig) -> Any:
        """The ``MakeMatrix`` of the weights that it reads."""
        make: Any = imported(self.make_matrix or "snapstream.models.matrix:make_matrix")
        return make if self.make_matrix is None else make(config)

    def problem_here(self, num_ranks: int = 1) -> str | None:
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
    if model.has_uneven_layers:
        return f"{model.architecture} has layers that differ in their heads, whose slots are not restored"
    if (size := config.parallel.size) > 1 and config.device.startswith("cuda"):
        return f"several ranks (tensor_parallel {size}) verify drafts on a CPU only"
    if size > 1 and config.parallel.attention == "dp":
        return "attention is 'dp', and ranks verify drafts only of rows that they share ('tp')"
    if config.reselection is not None:
        return "KV re-selection keeps the queries of tokens that may be rejected"
    return None


def preferred_executor(device: str) -> str:
    """The default on a device, where neither model nor machine prevents it; otherwise ``FALLBACK``."""
    return PREFERRED[device.partition(":")[0]]


def alternatives(name: str, device: str) -> str:
    """What an error recommends in place of an executor."""
    names = dict.fromkeys((preferred_executor(device), FALLBACK))
    return " or ".join(repr(other) for other in names if other != name)


def problems_here(device: str, num_ranks: int) -> dict[str, str]:
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
