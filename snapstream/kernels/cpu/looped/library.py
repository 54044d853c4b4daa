"""The functions of the C++ library in this folder, and the structs that it is handed (``abi.h``).

Addresses are taken from tensors; who passes one keeps the tensor alive. ``Team`` owns the threads of an engine.
"""

from __future__ import annotations

import threading
import weakref
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from snapstream.config.cores import num_cores as num_cores
from snapstream.kernels.cpu.looped.build import InstructionSet, instruction_sets
from snapstream.kernels.cpu.looped.prebuilt import open_library

PANEL = 32  # rows of a panel
ALIGN_COLS = 4  # its columns are filled up with zeros to a multiple of this
FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 3, "int8": 4, "int4": 5}


class Stack(Structure):
    """Matrices ``[layers, rows, cols]`` in panels, or one."""

    _fields_ = [
        ("data", c_void_p),
        *((name, c_int64) for name in "layer_bytes panel_bytes rows cols format group inputs".split()),
        ("scales", c_void_p),
    ]


class Mixture(Structure):
    """The experts of a model; all zeros where it has none."""

    _fields_ = [
        *((name, Stack) for name in "gate_up down shared_gate_up shared_down".split()),
        *((name, c_void_p) for name in "router correction".split()),
        *((name, c_int64) for name in "experts top_k inner shared_inner first_layer".split()),
        *((name, c_int64) for name in "groups top_groups best_of_group is_sigmoid normalises".split()),
        *((name, c_int64) for name in "first_held held".split()),
        ("scale", c_float),
    ]


class Latent(Structure):
    """Attention over latents; all zeros where a model has heads of its own keys and values."""

    _fields_ = [
        *((name, Stack) for name in "q_a q kv_a".split()),
        *((name, c_void_p) for name in "q_a_norm c_norm up".split()),
        *((name, c_int64) for name in "q_rank rank nope_dim rope_dim value_dim".split()),
        ("factor", c_float),
    ]


class Ranks(Structure):
    """This process among those that compute every step together."""

    _fields_ = [("shared", c_void_p), *((name, c_int64) for name in "rank size waits".split())]


class Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in "layers hidden heads kv_heads head_dim inner vocab".split()),
        *((name, Stack) for name in "embed qkv o gate_up down head".split()),
        *((name, c_void_p) for name in "input_norm post_norm final_norm".split()),
        *((name, c_void_p) for name in "qkv_bias o_bias gate_up_bias down_bias q_norm k_norm frequencies".split()),
        *((name, c_int64) for name in "rotated dynamic_original".split()),
        *((name, c_float) for name in "dynamic_factor dynamic_theta rope_scale eps".split()),
        *(("mixture", Mixture), ("latent", Latent)),
    ]


class Rows(Structure):
    _fields_ = [
        *((name, c_void_p) for name in "last_token num_tokens next_position ring_start capacity num_sampled".split()),
        *((name, c_void_p) for name in "keys values key_scales value_scales queries".split()),
        *((name, c_void_p) for name in "head_starts head_ends head_behind".split()),
        *((name, c_int64) for name in "num_rows slots kept_queries row_slots ring format".split()),
    ]


class Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in "rows logits tokens".split()),
        *((name, c_int64) for name in "batch first last touch_bytes".split()),
    ]


class Sampling(Structure):
    """What is kept of rows for their draws (``sample.h``)."""

    _fields_ = [
        *((name, c_void_p) for name in "is_greedy temperature top_p min_p presence frequency repetition".split()),
        *((name, c_void_p) for name in "top_k min_tokens stream stop_ids bias_ids bias_values prompt_seen".split()),
        *((name, c_void_p) for name in "output_counts allowed num_sampled".split()),
        *((name, c_void_p) for name in "last_token num_tokens next_position".split()),
        *((name, c_int64) for name in "vocab num_stop_ids num_bias".split()),
    ]


class Draw(Structure):
    _fields_ = [
        *((name, c_void_p) for name in "rows logits tokens logprobs top_ids top_logprobs".split()),
        *((name, c_int64) for name in "batch num_top bias min_tokens penalties grammar feeds".split()),
    ]


class Prompt(Structure):
    """A chunk of a prompt; strides in numbers."""

    _fields_ = [
        *((name, c_void_p) for name in "q k v out".split()),
        *((name, c_int64) for name in "queries heads kv_heads keys size value_size".split()),
        *((name, c_int64) for name in "q_token q_head k_head k_token v_head v_token".split()),
        ("scale", c_float),
    ]


class Passing(Structure):
    """Tokens that pass one matrix, or the two of an MLP (``prompt_layer.h``)."""

    _fields_ = [
        *((name, c_void_p) for name in "x residual norm".split()),
        *((name, Stack) for name in "matrix down".split()),
        *((name, c_void_p) for name in "bias down_bias out".split()),
        ("tokens", c_int64),
        ("eps", c_float),
    ]


class Routed(Structure):
    """Tokens, and the experts that they chose (``prompt_experts.h``)."""

    _fields_ = [
        ("x", c_void_p),
        *((name, Stack) for name in "gate_up down".split()),
        *((name, c_void_p) for name in "order ends weights out".split()),
        *((name, c_int64) for name in "tokens top_k experts".split()),
    ]


class Heads(Structure):
    """Heads of tokens as projected, and where they go."""

    _fields_ = [
        *((name, c_void_p) for name in "heads norm cos sin queries keys values runs".split()),
        *((name, c_int64) for name in "num_runs num_heads kv_heads size stride".split()),
        ("eps", c_float),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "team": (c_void_p, [c_int64]),
    "end_team": (None, [c_void_p]),
    "workspace": (c_int64, [POINTER(Model), POINTER(Rows), c_void_p, c_int64]),
    "shared_bytes": (c_int64, [POINTER(Model), c_int64, c_int64]),
    "engine": (c_void_p, [POINTER(Model), POINTER(Rows), POINTER(Ranks), c_void_p, c_int64, c_void_p]),
    "end_engine": (None, [c_void_p]),
    "step": (c_int64, [c_void_p, POINTER(Step)]),
    "sampling_bytes": (c_int64, [c_int64]),
    "draw": (None, [c_void_p, POINTER(Sampling), POINTER(Draw), c_void_p, c_int64]),
    "stages": (c_int64, [POINTER(Model)]),
    "linear": (None, [POINTER(Stack), c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64]),
    "copy_rows": (None, [POINTER(Stack), c_void_p, c_int64, c_void_p, c_int64]),
    "pass_tokens": (None, [POINTER(Passing), c_void_p, c_int64]),
    "pass_experts": (None, [POINTER(Routed), c_void_p, c_int64]),
    "stage_heads": (None, [POINTER(Heads), c_int64]),
    "way": (c_int64, [c_int64]),
    "attend_prompts": (None, [POINTER(Prompt), c_void_p, c_void_p, c_int64, c_int64]),
    "attend_prompts_f32": (None, [POINTER(Prompt), c_int64, c_int64]),
    "multiplies_bf16": (c_int64, []),
    "gains_by_bf16": (c_int64, []),
    "read": (c_double, [c_void_p, c_void_p, c_int64]),
    "multiply": (c_double, [c_void_p, c_int64]),
    "multiply_bf16": (c_double, [c_void_p, c_int64]),
    "multiply_codes": (c_double, [c_void_p, c_int64]),
    "wait_for_all": (None, [c_void_p, c_int64]),
}


class Library:
    """The library for one set of instructions."""

    def __init__(self, instructions: InstructionSet) -> None:
        self.instructions = instructions
        loaded = open_library(instructions)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"looped_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self._own = threading.local()

    def scratch(self, count: int) -> Tensor:
        """So many fp32 numbers or more for the inputs of a call; the calls of a thread share them.

        They are kept: a page that was touched once costs nothing any more.
        """
        kept: Tensor | None = getattr(self._own, "scratch", None)
        if kept is None or len(kept) < count:
            kept = self._own.scratch = torch.empty(count)
        return kept

    def __getattr__(self, name: str) -> Any:  # set above
        raise AttributeError(name)


@cache
def load(instructions: InstructionSet | None = None) -> Library:
    """The library for the best instructions of this processor, or for others of its own; ValueError where it cannot
    be had.
    """
    return Library(instructions or instruction_sets()[0])


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor; None for none."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is not contiguous")
    return tensor.data_ptr()


class Team:
    """Threads that live until ``close``, or until the team is forgotten. ValueError for more than there are cores."""

    def __init__(self, library: Library, num_threads: int) -> None:
        if not 1 <= num_threads <= num_cores():
            raise ValueError(f"{num_threads} threads were asked for; this process may use {num_cores()} cores")
        self.library, self.num_threads = library, num_threads
        self.handle = library.team(num_threads)
        if not self.handle:
            raise ValueError(f"the system gave no {num_threads - 1} further threads")
        self._end = weakref.finalize(self, library.end_team, self.handle)

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        self._end()


class NativeEngine:
    """A model and rows at fixed addresses, and the buffers between stages; made once, stepped many times."""

    def __init__(
        self, team: Team, model: Model, rows: Rows, max_batch: int, workspace: Tensor, ranks: Ranks | None = None
    ) -> None:
        """``workspace`` fp32, ``workspace_floats`` of them. ``ranks``: where there are several."""
        self.team, self._workspace = team, workspace
        library = team.library
        self.num_stages: int = library.stages(byref(model))
        ranks = ranks or Ranks(size=1)
        handle = library.engine(byref(model), byref(rows), byref(ranks), team.handle, max_batch, address(workspace))
        self._end = weakref.finalize(self, library.end_engine, handle)
        self._handle, self._step = handle, library.step

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.nbytes

    def run(self, step: Step) -> None:
        """The stages of ``step``. RuntimeError where another rank has gone; the engine cannot be used any more."""
        if not self._step(self._handle, byref(step)):
            raise RuntimeError("another rank has gone in the middle of a step")


def shared_bytes(library: Library, model: Model, num_ranks: int, max_batch: int) -> int:
    """Of the memory in which ranks meet; logits ``[max_batch, V]`` fp32 end it."""
    return int(library.shared_bytes(byref(model), num_ranks, max_batch))


def workspace_floats(team: Team, model: Model, rows: Rows, max_batch: int) -> int:
    """Of a ``NativeEngine``."""
    return int(team.library.workspace(byref(model), byref(rows), team.handle, max_batch))
