"""Cuts the looped kernel for a model, holds its buffers, and launches it: whole, or a layer at a time.

Weights, rows and buffers stay at their addresses, so a launch can be captured. ``Looped.run`` is a step; ``run_layers``
is the same kernel called once per layer, which is what the loop is measured against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapstream.kernels import groups
from snapstream.kernels.rows import CosSin, RowPlaces
from snapstream.kernels.triton import configs
from snapstream.kernels.triton.attention import LOG2_E
from snapstream.kernels.triton.looped.kernel import looped_kernel

# What the looped kernel knows of a model: sizes, and stacks of weights, dense or in codes.
#
# ``launch.py`` cuts and launches the kernel for it, ``exec/looped_gpu.py`` makes one of a decoder.

ROLES = ("embed", "qkv", "o", "gate_up", "down", "head")  # in the order of the kernel's arguments


class Form(NamedTuple):
    """How a matrix is stored: bits of a code and numbers that share a scale, or 0 and 0 where it is dense."""

    bits: int
    group: int


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix, or a stack of them, of int8 or int4 (``kernels/groups.py``)."""

    codes: Tensor  # [..., out, in * bits / 8] uint8
    scales: Tensor  # [..., out, in / group] fp16
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers, ``[..., out, in]``."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    def __getitem__(self, index: int | Tensor) -> Codes:
        return Codes(self.codes[index], self.scales[index], self.bits)

    @property
    def words(self) -> Tensor:
        """The same bytes in words of 32 bits, as the kernel reads them."""
        return self.codes.view(torch.int32)

    def wide(self) -> Tensor:
        """The numbers, fp32."""
        return groups.dequantize(self.codes, self.scales, self.bits)


Stored = Tensor | Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedModel:
    """Sizes and stacked tensors of a decoder of grouped-query attention and one MLP, weights ``[L, out, in]``.

    ValueError where the two matrices of attention, of the MLP, or the two tables are not stored alike.
    """

    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    embed: Stored  # [V, D]
    head: Stored  # [V, D]; may be ``embed``
    qkv: Stored  # [L, (H+2G)E, D]
    o: Stored  # [L, D, HE]
    gate_up: Stored  # [L, 2I, D]
    down: Stored  # [L, D, I]
    input_norm: Tensor  # [L, D]
    post_norm: Tensor  # [L, D]
    final_norm: Tensor  # [D]
    q_norm: Tensor | None = None  # [L, E]
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None  # [L, (H+2G)E]
    o_bias: Tensor | None = None  # [L, D]
    gate_up_bias: Tensor | None = None  # [L, 2I]
    down_bias: Tensor | None = None  # [L, D]

    def __post_init__(self) -> None:
        for one, other in (("qkv", "o"), ("gate_up", "down"), ("embed", "head")):
            forms = form_of(getattr(self, one)), form_of(getattr(self, other))
            if forms[0] != forms[1]:
                raise ValueError(f"{one} and {other} are stored as {forms}; the looped kernel wants both alike")

    @property
    def dtype(self) -> torch.dtype:
        """That norms, biases, rows and what goes from stage to stage have; also dense weights."""
        return self.input_norm.dtype

    @property
    def weights(self) -> tuple[Stored, ...]:
        """In the order of ``ROLES``."""
        return self.embed, self.qkv, self.o, self.gate_up, self.down, self.head

    @property
    def forms(self) -> tuple[Form, Form, Form]:
        """Of the matrices of attention, of those of the MLP, and of the tables."""
        return form_of(self.qkv), form_of(self.gate_up), form_of(self.embed)

    @property
    def has_codes(self) -> bool:
        return any(form.bits for form in self.forms)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the weights lie in."""
        stored = [(weight.codes, weight.scales) if isinstance(weight, Codes) else (weight,) for weight in self.weights]
        return [tensor for tensors in stored for tensor in tensors]


def form_of(weight: Stored) -> Form:
    """How a matrix is stored."""
    return Form(weight.bits, weight.shape[-1] // weight.scales.shape[-1]) if isinstance(weight, Codes) else Form(0, 0)


MOST_BY_NUMBER = 4  # entries that are multiplied number by number; more go through tensor cores, 16 at least
MOST_BY_CODE = 2  # the same of codes, which come two and four times as fast
LEAST_DOT = 16  # the side of the smallest product of tensor cores
TARGET_SPLITS = 132  # tasks of the attention stage for one entry, at most one a program


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedLaunch:
    """The cut; constant for an engine, so that a row sums in one order in every step."""

    num_programs: int  # all of them run at once, or the barrier never opens
    block_rows: int  # weight rows of a tile
    block_cols: int
    num_warps: int
    loads_ahead: bool = True
    stages: int = 0  # blocks in the ring of ``ring.py``; 0: loads through registers, ``kernel.py``
    cache: str = ".cg"  # how inputs of products are loaded: ".cg" past L1, ".ca" through it
    phases: int = 1  # rows of the ring after which the swizzle of 16 bytes repeats; 1: none


def default_launch(model: LoopedModel, num_programs: int, max_batch: int) -> LoopedLaunch:
    """The ring for dense weights; codes, and columns that are no whole copies, are loaded through registers."""
    if model.has_codes or _cut_copies(model):
        return register_launch(model, num_programs, max_batch)
    return ring_launch(model, num_programs, max_batch)


def register_launch(model: LoopedModel, num_programs: int, max_batch: int) -> LoopedLaunch:
    """Reasoned, not measured: tiles so small that the narrowest matrix gives every program one, 16 KB a block.

    A multiprocessor needs some 55 KB in flight over a barrier; two blocks of gate and up and one ahead are 48 KB, in
    the registers of 256 threads. Products of tensor cores hold operands in shared memory too, and blocks of half the
    size: more would spill. Of codes a block has as many numbers and fewer bytes, and more blocks are on their way
    (``blocks.py``).
    """
    uses_dot, num_bytes = _uses_dot(model, max_batch), model.dtype.itemsize
    rows = LEAST_DOT if uses_dot else 4
    while rows < 16 and model.hidden_size // (2 * rows) >= num_programs:
        rows *= 2
    block_bytes = 8192 if uses_dot or num_bytes == 4 else 16384
    cols = min(block_bytes // (rows * num_bytes), configs.power_of_two(model.hidden_size, 16))
    least = max(form.group for form in model.forms)
    return LoopedLaunch(num_programs=num_programs, block_rows=rows, block_cols=max(cols, 16, least), num_warps=8)


def ring_launch(model: LoopedModel, num_programs: int, max_batch: int) -> LoopedLaunch:
    """Reasoned, not measured: 96 KB on their way, in blocks of up to 16.

    Warps stand side by side along up to 2,048 columns in 16 bits, so that each number of an input is read once a block;
    entries that tensor cores multiply take 16 rows. fp32 has none at full precision.
    """
    num_bytes = model.dtype.itemsize
    is_dot = _uses_dot(model, max_batch, is_ring=True)
    cols = min((1024 if is_dot else 4096) // num_bytes, configs.power_of_two(model.hidden_size, 8 * LEAST_DOT))
    rows = LEAST_DOT if is_dot else min(16384 // (cols * num_bytes), 16)
    while not is_dot and rows > 1 and model.hidden_size < rows * num_programs:
        rows //= 2  # or some programs would have no tile of a matrix
    stages = 6 * 16384 // (rows * cols * num_bytes)
    return LoopedLaunch(num_programs=num_programs, block_rows=rows, block_cols=cols, num_warps=8, stages=stages)


def ring_variants(model: LoopedModel, num_programs: int, max_batch: int) -> dict[str, LoopedLaunch]:
    """``ring_launch``, and what only a GPU can compare with it: inputs through L1, because tiles of a program read the
    same; and for tensor cores a swizzle, without which the rows of a block, 1,024 bytes each, meet in the same banks.
    """
    launch = ring_launch(model, num_programs, max_batch)
    found = {"ring": launch, "ring, inputs in L1": replace(launch, cache=".ca")}
    if _uses_dot(model, max_batch, is_ring=True):
        found["ring, swizzled"] = replace(launch, phases=8)
    return found


class Looped:
    """A model over rows ``keys, values [L, rows+1, G, C, E]`` for steps of up to ``max_batch`` entries.

    ValueError for what the kernel cannot read: rows in another dtype than the norms, tensors that are not contiguous,
    groups that are cut by blocks of columns, and for the ring codes, and columns that are not whole copies of 16 bytes.
    """

    def __init__(
        self, model: LoopedModel, keys: Tensor, values: Tensor, max_batch: int, launch: LoopedLaunch | None = None
    ) -> None:
        if keys.dtype != model.dtype or values.dtype != keys.dtype:
            raise ValueError(f"rows are {keys.dtype}; the looped kernel reads rows in the dtype of {model.dtype}")
        if not all(stack.is_contiguous() for stack in (keys, values, *model.tensors)):
            raise ValueError("the looped kernel reads contiguous stacks of weights and rows")
        self.model, self.keys, self.values, self.max_batch = model, keys, values, max_batch
        choose = default_launch if keys.is_cuda else register_launch  # Triton's interpreter does not run Gluon
        self.launch = launch or choose(model, num_multiprocessors(keys.device), max_batch)
        kind, device, wide = model.dtype, keys.device, model.num_heads * model.head_dim
        if self.launch.stages:
            _check_ring(model, self.launch)
        elif any(form.group and self.launch.block_cols % form.group for form in model.forms):
            raise ValueError(f"blocks have {self.launch.block_cols} columns; groups of codes must not be cut by them")
        self._splits = _splits(self.launch, keys.shape[3], model.num_kv_heads)
        num_splits = self._splits.num_splits

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        self.residual = empty(max_batch, model.hidden_size)
        self.heads = empty(max_batch, model.qkv.shape[1], dtype=kind)
        self.partial = empty(max_batch, model.num_heads, num_splits, model.head_dim)
        self.lse = empty(max_batch, model.num_heads, num_splits)
        self.attended = empty(max_batch, wide, dtype=kind)
        self.inner = empty(max_batch, model.inner_size, dtype=kind)
        self.logits = empty(max_batch, model.head.shape[0])
        size = 2 + max_batch * model.num_kv_heads
        self.counters = torch.zeros(size, dtype=torch.int32, device=device)

    def run(self, token_ids: Tensor, places: RowPlaces, rope: CosSin) -> Tensor:
        """A step: ``token_ids [B]`` int64, ``places`` and ``rope`` of the batch; scores ``[B, V]`` fp32, reused."""
        self.run_part(token_ids, places, rope, range(self.model.num_layers), begins=True, ends=True)
        return self.logits[: len(token_ids)]

    def run_layers(self, token_ids: Tensor, places: RowPlaces, rope: CosSin) -> Tensor:
        """The same by a call for each layer; the first has the embedding, the last the logits."""
        last = self.model.num_layers - 1
        for layer in range(last + 1):
            own = range(layer, layer + 1)
            self.run_part(token_ids, places, rope, own, begins=layer == 0, ends=layer == last)
        return self.logits[: len(token_ids)]

    def run_part(
        self, token_ids: Tensor, places: RowPlaces, rope: CosSin, layers: range, *, begins: bool, ends: bool
    ) -> None:
        """One launch. ValueError for more entries than there are buffers."""
        batch, model, launch, splits = len(token_ids), self.model, self.launch, self._splits
        if not 1 <= batch <= self.max_batch:
            raise ValueError(f"{batch} entries in a step; this one has buffers for 1 to {self.max_batch}")
        cos, sin = rope
        uses_dot = _uses_dot(model, self.max_batch, is_ring=launch.stages > 0)

        def given(tensor: Tensor | None) -> Tensor:
            return self.residual if tensor is None else tensor  # never read

        kernel, of_form = _form(model, launch)
        kernel[(launch.num_programs,)](
            token_ids, places.rows, places.slots, places.lengths, cos.contiguous(), sin.contiguous(),
            *(weight.words if isinstance(weight, Codes) else weight for weight in model.weights),
            model.input_norm, model.post_norm, model.final_norm, given(model.q_norm), given(model.k_norm),
            given(model.qkv_bias), given(model.o_bias), given(model.gate_up_bias), given(model.down_bias),
            self.keys, self.values,
            self.residual, self.heads, self.partial, self.lse, self.attended, self.inner, self.logits, self.counters,
            layers.start, layers.stop, model.eps, model.head_dim**-0.5 * LOG2_E,
            BATCH=batch, BATCH_PAD=configs.power_of_two(batch, LEAST_DOT if uses_dot else 1),
            HIDDEN=model.hidden_size, INNER=model.inner_size, VOCAB=model.head.shape[0],
            NUM_HEADS=model.num_heads, NUM_KV_HEADS=model.num_kv_heads, HEAD_DIM=model.head_dim,
            HEAD_PAD=configs.power_of_two(model.head_dim, 16), HALF_PAD=configs.power_of_two(model.head_dim // 2, 16),
            GROUP_PAD=configs.power_of_two(model.num_heads // model.num_kv_heads, 16),
            NUM_ROWS=self.keys.shape[1], CAPACITY=self.keys.shape[3],
            HAS_HEAD_NORM=model.q_norm is not None, HAS_QKV_BIAS=model.qkv_bias is not None,
            HAS_O_BIAS=model.o_bias is not None, HAS_MLP_BIAS=model.down_bias is not None,
            BEGINS=begins, ENDS=ends, LOADS_AHEAD=launch.loads_ahead, USES_DOT=uses_dot,
            NUM_PROGRAMS=launch.num_programs, BLOCK_ROWS=launch.block_rows, BLOCK_COLS=launch.block_cols,
            BLOCK_SLOTS=splits.block, SPLIT_SLOTS=splits.split_slots, NUM_SPLITS=splits.num_splits,
            SPLITS_PAD=configs.power_of_two(splits.num_splits), CACHE=launch.cache,
            **of_form, num_warps=launch.num_warps, launch_cooperative_grid=launch.num_programs > 1,
        )  # fmt: skip

    def without_loads_ahead(self) -> Looped:
        """The same model and rows, for the comparison: loads begin behind the barrier."""
        launch = replace(self.launch, loads_ahead=False)
        return Looped(self.model, self.keys, self.values, self.max_batch, launch)


def _form(model: LoopedModel, launch: LoopedLaunch) -> tuple[Any, dict[str, Any]]:
    """The kernel, and what it takes beside the arguments of both."""
    if launch.stages:
        from snapstream.kernels.triton.looped import ring

        return ring.ring_kernel, {"STAGES": launch.stages, "PHASES": launch.phases}
    arguments: dict[str, Any] = {
        f"{role}_scales_ptr": weight.scales.view(torch.int16)
        if isinstance(weight, Codes)
        else weight  # the latter is never read
        for role, weight in zip(ROLES, model.weights, strict=True)
    }
    for part, form in zip(("ATTENTION", "MLP", "TABLE"), model.forms, strict=True):
        arguments |= {f"{part}_BITS": form.bits, f"{part}_GROUP": form.group}
    return looped_kernel, arguments


def _uses_dot(model: LoopedModel, max_batch: int, *, is_ring: bool = False) -> bool:
    most = MOST_BY_CODE if model.has_codes else MOST_BY_NUMBER
    return max_batch > most and not (is_ring and model.dtype == torch.float32)


def _check_ring(model: LoopedModel, launch: LoopedLaunch) -> None:
    if model.has_codes:
        raise ValueError("the ring copies dense weights, and these are codes")
    if _cut_copies(model):
        copied = 16 // model.dtype.itemsize
        raise ValueError(f"matrices have {_columns(model)} columns; the ring copies {copied} numbers at a time")
    if launch.stages < 2 or not launch.loads_ahead:
        raise ValueError(f"a ring of {launch.stages} blocks; it takes 2 or more, and always loads ahead")


def _columns(model: LoopedModel) -> list[int]:
    """Of all matrices."""
    return sorted({model.hidden_size, model.num_heads * model.head_dim, model.inner_size})


def _cut_copies(model: LoopedModel) -> bool:
    """Whether a row of a matrix is no whole number of copies of 16 bytes."""
    return any(cols * model.dtype.itemsize % 16 for cols in _columns(model))


def num_multiprocessors(device: torch.device) -> int:
    """Programs that run at once, one each; 1 under the interpreter, which runs them one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _splits(launch: LoopedLaunch, capacity: int, num_kv_heads: int) -> configs.DecodeLaunch:
    block = configs.Launch(block=32, num_warps=launch.num_warps)
    return configs.split_row(block, capacity, num_kv_heads, TARGET_SPLITS)
