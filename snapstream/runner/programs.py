"""Two ways to make a static program of a function: ``torch.compile`` on a CPU, a captured CUDA graph on a GPU.

A program is called with the tensors it was made with: same shapes, same places. Compilation drops torch's guards for
that reason - checking some hundred tensors would cost as much as the rest of a small model's step - so every program is
compiled from a code object of its own and nothing can make it compile again. ``decode_graph.py`` decides what becomes
a program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from snapstream.kernels.compile_cache import compile_folder
from snapstream.kernels.cpu.native import find_compiler

Out = TypeVar("Out")  # a tensor, or a named tuple of tensors
Program = Callable[..., Out]
INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_WARM_UPS = 2  # runs before a capture: libraries and autotuners settle


class ProgramMaker(Protocol):
    """Makes programs of bound methods."""

    def make(self, function: Callable[..., Out], *inputs: Tensor) -> Program[Out]: ...


class Compiler:
    """Programs through ``torch.compile``; what it makes is kept in the user's cache folder."""

    def __init__(self) -> None:
        if find_compiler() is None:
            raise ValueError("executor 'graph' compiles C++ on a CPU: neither $CXX nor g++ is on the path")
        self._folder = compile_folder()

    def make(self, function: Callable[..., Out], *inputs: Tensor) -> Program[Out]:
        """Compile one full graph for these inputs, and run it once."""
        program = torch.compile(
            _own_code(cast(MethodType, function)),
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": _no_guards},
        )
        with inductor_folder(str(self._folder / "inductor")):
            program(*inputs)
        return program


class Capturer:
    """Programs as CUDA graphs in one memory pool. Make the largest first: the others then fit into its memory."""

    def __init__(self, first: ProgramMaker | None = None) -> None:
        """``first`` makes the program that is captured; by default the plain calls are."""
        self._first = first
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def make(self, function: Callable[..., Out], *inputs: Tensor) -> Program[Out]:
        """Warm up on a side stream, then capture there; the output of a replay is overwritten by the next."""
        work = function if self._first is None else self._first.make(function, *inputs)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work(*inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph, is_inference = torch.cuda.CUDAGraph(), torch.is_inference_mode_enabled()
        # The first capture of a process makes tensors for torch's generator, which every later one writes: made in
        # inference mode, they would break the captures of anybody who does without.
        with (
            torch.inference_mode(False),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
            torch.inference_mode(is_inference),
        ):
            out = work(*inputs)

        def replay(*_: Tensor) -> Out:
            graph.replay()
            return out

        return replay


def _own_code(method: MethodType) -> Any:
    """The same method around a copy of its code: torch keeps what it compiled by code object."""
    function = cast(FunctionType, method.__func__)
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return MethodType(copy, method.__self__)


def _no_guards(guards: Any) -> list[bool]:
    return [False for _ in guards]


@contextmanager
def inductor_folder(folder: str) -> Iterator[None]:
    """Torch's own cache of compiled code under ``folder`` for a while, unless the user has chosen a place.

    Torch writes its default, a folder under /tmp, into the variable as soon as it looks there: that is nobody's choice,
    does not last, and others may have made it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    before = os.environ.get(INDUCTOR_FOLDER)
    if before is not None and os.path.abspath(before) != os.path.abspath(default_cache_dir()):
        yield
        return
    os.environ[INDUCTOR_FOLDER] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[INDUCTOR_FOLDER]
        else:
            os.environ[INDUCTOR_FOLDER] = before
