"""The functions of the C++ library in this folder, and the structs they take (``abi.h``).

Structs hold addresses of tensors: the caller keeps those alive. ``ThreadPool`` owns the threads of an engine.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int64, c_void_p, sizeof
from functools import cache
from typing import Any

import torch
from torch import Tensor

from snapstream.config.model import Activation
from snapstream.config.values import num_cores as num_cores
from snapstream.kernels.cpu.looped.build import SOURCES, InstructionSet, instruction_sets, open_library

PANEL = 32  # rows of a panel
ALIGN_COLS = 4  # its columns are padded with zeros to a multiple of this
FORMATS = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "float8_e4m3fn": 3,
    "int8": 4,
    "int4": 5,
    "mxfp4": 6,
    "uint4": 7,
    "int16": 8,
    "q3_k": 9,
    "q4_k": 10,
    "q5_k": 11,
    "q6_k": 12,
    "iq4_xs": 13,
    "q2_k": 14,
    "iq2_xxs": 15,
    "iq2_xs": 16,
    "iq2_s": 17,
    "iq3_xxs": 18,
    "iq3_s": 19,
}  # as ``abi.h``
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "xielu": 3, "ungated_gelu": 4}  # the same
FORMATS["fp8"] = FORMATS["float8_e4m3fn"]  # as rows name it


class Stack(Structure):
    """Matrices ``[layers, rows, cols]`` in panels, or one."""


class LowRank(Structure):
    """What a LoRA adapter adds to one product; all zeros if nothing."""


class Connection(Structure):
    """How a part of a layer reads residual streams and adds to them."""


class LayerParts(Structure):
    """The matrices of one layer, and what layers may differ in."""


class Mixture(Structure):
    """The experts of a model; all zeros without."""


class Latent(Structure):
    """Attention over latents; all zeros for a model with keys and values per head."""


class Recurrent(Structure):
    """Layers that keep a state in the place of keys and values; all zeros without."""


class Hyper(Structure):
    """Hyper-connections; all zeros without."""


class Ranks(Structure):
    """This process among the ranks of one machine that compute every step together."""


class Model(Structure):
    """All that a step reads of a model."""


class RowTable(Structure):
    """Where rows lie."""


class Step(Structure):
    """One call."""


class Sampling(Structure):
    """The state of rows that draws read and change."""


class Draw(Structure):
    """One call."""


class Prompt(Structure):
    """A chunk of a prompt."""


class Passing(Structure):
    """Tokens that pass one matrix, or the two of an MLP."""


class Routed(Structure):
    """Tokens, and the experts they are routed to."""


class Heads(Structure):
    """Heads of tokens as projected, and where they go."""


class Convolving(Structure):
    """Sequences of a causal convolution."""


class DeltaRule(Structure):
    """Sequences of the gated delta rule."""


STRUCTS: tuple[type[Structure], ...] = (
    Stack, LowRank, Connection, LayerParts, Mixture, Latent, Recurrent, Hyper, Ranks, Model, RowTable, Step, Sampling,
    Draw, Prompt, Passing, Routed, Heads, Convolving, DeltaRule,
)  # fmt: skip
_HEADER = re.sub("//.*", "", (SOURCES / "abi.h").read_text())


def _fields_of(struct: str) -> list[tuple[str, Any]]:
    """The fields of a struct of ``abi.h`` as ctypes takes them: pointers, integers, floats and structs."""
    kinds: dict[str, Any] = {"int64_t": c_int64, "float": c_float} | {own.__name__: own for own in STRUCTS}
    (body,) = re.findall(rf"^struct {struct} {{(.*?)^}};", _HEADER, re.MULTILINE | re.DOTALL)
    return [
        (name.strip(" *"), c_void_p if "*" in name else kinds[kind])
        for kind, names in re.findall(r"(?:const )?(\w+)([^;]+);", body)
        for name in names.split(",")
    ]


for struct in STRUCTS:  # in the order of ``abi.h``: a struct comes behind those that it contains
    struct._fields_ = _fields_of(struct.__name__)


def struct_problem(sizes: Sequence[int]) -> str | None:
    """Where the bytes of a library's structs differ from those above; None where they do not."""
    for struct, size in zip(STRUCTS, sizes, strict=True):
        if size != sizeof(struct):
            return f"its {struct.__name__} has {size} bytes where this package has {sizeof(struct)}"
    return None


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "pool": (c_void_p, [c_int64]),
    "end_pool": (None, [c_void_p]),
    "workspace": (c_int64, [POINTER(Model), POINTER(RowTable), c_void_p, c_int64]),
    "shared_bytes": (c_int64, [POINTER(Model), c_int64, c_int64]),
    "engine": (c_void_p, [POINTER(Model), POINTER(RowTable), POINTER(Ranks), c_void_p, c_int64, c_void_p]),
    "end_engine": (None, [c_void_p]),
    "step": (c_bool, [c_void_p, POINTER(Step)]),
    "accept": (None, [c_void_p, POINTER(Step), c_void_p]),
    "hidden": (None, [c_void_p, c_int64, c_void_p]),
    "sampling_bytes": (c_int64, [c_int64]),
    "draw": (None, [c_void_p, POINTER(Sampling), POINTER(Draw), c_void_p, c_int64]),
    "stages": (c_int64, [POINTER(Model)]),
    "copy_rows": (None, [POINTER(Stack), c_void_p, c_int64, c_void_p, c_int64]),
    "fill_codes": (None, [c_void_p, *[c_int64] * 4, c_void_p, c_void_p, *[c_int64] * 4]),
    "pass_tokens": (None, [POINTER(Passing), c_void_p, c_int64]),
    "pass_experts": (None, [POINTER(Routed), c_void_p, c_int64]),
    "stage_heads": (None, [POINTER(Heads), c_int64]),
    "convolve": (None, [POINTER(Convolving), c_int64]),
    "delta_rule": (None, [POINTER(DeltaRule), c_int64]),
    "way": (c_int64, [c_int64]),
    **{f"attend_{name}": (None, [POINTER(Prompt), c_int64, c_int64]) for name in ("float32", "bfloat16", "int16")},
    "attends_in_int16": (c_bool, []),
    "multiplies_bf16": (c_bool, []),
    "gains_by_bf16": (c_bool, []),
    "gains_by_int8": (c_bool, []),
    "gains_by_int16": (c_bool, []),
}


class Library:
    """The library for one set of instructions."""

    def __init__(self, instructions: InstructionSet) -> None:
        self.instructions = instructions
        loaded = open_library(instructions)
        loaded.looped_struct_bytes.restype = POINTER(c_int64)
        if problem := struct_problem(loaded.looped_struct_bytes()[: len(STRUCTS)]):
            raise ValueError(f"the library of looped steps was not made for this package: {problem}")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"looped_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self._own = threading.local()

    def scratch(self, count: int) -> Tensor:
        """So many fp32 numbers or more for the inputs of a call; kept, and shared by the calls of a thread."""
        kept: Tensor | None = getattr(self._own, "scratch", None)
        if kept is None or len(kept) < count:
            kept = self._own.scratch = torch.empty(count)
        return kept

    def __getattr__(self, name: str) -> Any:  # set above
        raise AttributeError(name)


@cache
def load(instructions: InstructionSet | None = None) -> Library:
    """The library for this processor's best instructions, or for given ones; ValueError if there is none."""
    return Library(instructions or instruction_sets()[0])


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor; None for none."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is not contiguous")
    return tensor.data_ptr()


def library_problem() -> str | None:
    """Why this process cannot run the library with torch's number of threads; the first call may compile it."""
    if torch.get_num_threads() > num_cores():
        return f"torch has {torch.get_num_threads()} threads, and this process may use {num_cores()} cores"
    try:
        load()
    except ValueError as problem:
        return str(problem)
    return None


class ThreadPool:
    """Threads that live until ``close`` or garbage collection. ValueError for more than there are cores."""

    def __init__(self, library: Library, num_threads: int) -> None:
        if not 1 <= num_threads <= num_cores():
            raise ValueError(f"{num_threads} threads were asked for; this process may use {num_cores()} cores")
        self.library, self.num_threads = library, num_threads
        self.handle = library.pool(num_threads)
        if not self.handle:
            raise ValueError(f"the system gave no {num_threads - 1} further threads")
        self._end = weakref.finalize(self, library.end_pool, self.handle)

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        self._end()


class NativeEngine:
    """A model and rows at fixed addresses, and the buffers between stages; made once, stepped many times."""

    def __init__(
        self,
        pool: ThreadPool,
        model: Model,
        rows: RowTable,
        max_batch: int,
        workspace: Tensor,
        ranks: Ranks | None = None,
    ) -> None:
        """``workspace`` fp32, ``workspace_floats`` of them. ``ranks``: where there are several."""
        self.pool, self._workspace = pool, workspace
        library = pool.library
        self.num_stages: int = library.stages(byref(model))
        ranks = ranks or Ranks(size=1)
        handle = library.engine(byref(model), byref(rows), byref(ranks), pool.handle, max_batch, address(workspace))
        self._end = weakref.finalize(self, library.end_engine, handle)
        self._handle, self._step, self._accept = handle, library.step, library.accept

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.nbytes

    def run(self, step: Step) -> None:
        """The stages of ``step``. RuntimeError where another rank has gone; the engine cannot be used any more."""
        if not self._step(self._handle, byref(step)):
            raise RuntimeError("another rank has gone in the middle of a step")

    def accept(self, step: Step, counts: Tensor) -> None:
        """After a step with drafts: the recurrent states of its rows go on by the entries that they accepted, of which
        there are ``counts [rows]`` int64.
        """
        self._accept(self._handle, byref(step), address(counts))

    def hidden(self, out: Tensor) -> None:
        """What the last layer gave the first entries of the last step, before the final norm, to ``out [count, D]``."""
        self.pool.library.hidden(self._handle, len(out), address(out))


def shared_bytes(library: Library, model: Model, num_ranks: int, max_batch: int) -> int:
    """Of the memory in which ranks meet; logits ``[max_batch, V]`` fp32 end it."""
    return int(library.shared_bytes(byref(model), num_ranks, max_batch))


def workspace_floats(pool: ThreadPool, model: Model, rows: RowTable, max_batch: int) -> int:
    """Of a ``NativeEngine``."""
    return int(pool.library.workspace(byref(model), byref(rows), pool.handle, max_batch))
