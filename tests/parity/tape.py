"""CUDA graphs without a GPU: what a capture would hold is recorded as a list of operators and run again by a replay.

A replay of the tape has the limits of a graph: it reads and writes the very tensors of the capture, runs no Python of
the captured function, and so repeats what the host decided while it was captured. Reading a number on the host is an
error, as it is in a capture. What a tape cannot show: streams, and memory that a pool hands out twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from snapstream.kernels.interface import Kernels


class Tape:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def replay(self) -> None:
        """Run the operators again, each into the places of its first results."""
        for func, args, kwargs, places in self.calls:
            for place, fresh in zip(places, _tensors(func(*args, **kwargs)), strict=True):
                if place.untyped_storage().data_ptr() != fresh.untyped_storage().data_ptr():  # else in place, or a view
                    place.copy_(fresh)


class _Recorder(TorchDispatchMode):
    running: _Recorder | None = None

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __enter__(self) -> _Recorder:
        _Recorder.running = self
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        _Recorder.running = None
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read while capturing"
        assert func is not torch.ops.aten.lift_fresh.default, "a number of the host was sent while capturing"
        found = func(*args, **(kwargs or {}))
        self.record(func, args, kwargs or {}, found)
        return found

    def record(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        self._tape.calls.append((func, args, kwargs, _tensors(found)))


def launched(kernels: Kernels) -> Kernels:
    """The same, each a single operator of a tape: what is interpreted shows none."""

    def whole(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                found = kernel(*args, **kwargs)
            if _Recorder.running is not None:
                _Recorder.running.record(kernel, args, kwargs, found)
            return found

        return call

    fields = {field.name: getattr(kernels, field.name) for field in dataclasses.fields(kernels)}
    return replace(kernels, **{name: whole(own) for name, own in fields.items() if callable(own)})


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, Stream)


@contextmanager
def _capture(graph: Tape, *, pool: Any, stream: Stream) -> Iterator[None]:
    assert pool == (0, 1) and isinstance(stream, Stream)
    assert not torch.is_inference_mode_enabled(), "what torch makes for its generator would be inference tensors"
    with _Recorder(graph), mock.patch.object(Tensor, "tolist", _refused):
        yield


def _refused(tensor: Tensor) -> Any:
    raise AssertionError("numbers were read while capturing")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``runner.programs.Capturer`` record tapes on a CPU."""
    stands = {"CUDAGraph": Tape, "Stream": Stream, "graph": _capture, "stream": lambda stream: nullcontext(),
              "current_stream": Stream, "graph_pool_handle": lambda: (0, 1)}  # fmt: skip
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
