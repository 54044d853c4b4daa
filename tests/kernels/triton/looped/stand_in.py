"""A stand-in for Gluon on NumPy, so that the ring form of the looped kernel runs under Triton's interpreter.

It ignores layouts, and holds shared memory and asynchronous copies to their rules, in the order that code relies on
them at the worst: a copy arrives when a wait says so and no earlier; its numbers can be read behind the next barrier of
threads; a slot that was read may be copied into behind the barrier after that. What breaks one fails an assertion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime import interpreter


@dataclass
class Ring:
    """Shared memory of several slots: of each its numbers and what may be done with it."""

    dtype: Any
    shape: list[int]
    slots: list[Any] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # free, flying, arrived, visible, read

    def __post_init__(self) -> None:
        self.slots, self.states = [None] * self.shape[0], ["free"] * self.shape[0]

    def index(self, slot: Any) -> View:
        return View(self, int(slot), lambda numbers: numbers)

    def pass_barrier(self) -> None:
        following = {"arrived": "visible", "read": "free"}
        self.states = [following.get(state, state) for state in self.states]


@dataclass
class View:
    """A slot, perhaps in another shape."""

    ring: Ring
    slot: int
    shown: Any

    def reshape(self, shape: list[int]) -> View:
        return View(self.ring, self.slot, lambda numbers: self.shown(numbers).reshape([int(size) for size in shape]))

    def permute(self, order: list[int]) -> View:
        return View(self.ring, self.slot, lambda numbers: self.shown(numbers).transpose(order))

    def load(self, layout: Any) -> Any:
        assert self.ring.states[self.slot] == "visible", f"slot {self.slot} is {self.ring.states[self.slot]}"
        self.ring.states[self.slot] = "read"
        numbers = np.ascontiguousarray(self.shown(self.ring.slots[self.slot]))
        handle = interpreter.TensorHandle(numbers, self.ring.dtype)
        return tl.tensor(handle, tl.block_type(self.ring.dtype, list(numbers.shape)))


@dataclass
class Machine:
    """Of one program: its shared memory, its copies, and what stood in the ring at each barrier of the grid."""

    ring: Ring | None = None
    uncommitted: list[tuple[View, Any]] = field(default_factory=list)
    groups: list[list[tuple[View, Any]]] = field(default_factory=list)
    at_barriers: list[list[str]] = field(default_factory=list)
    num_copies: int = 0

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Ring:
        self.ring = Ring(dtype, shape)
        return self.ring

    def copy(self, to: View, at: Any, mask: Any) -> None:
        assert to.ring.states[to.slot] == "free", f"slot {to.slot} is {to.ring.states[to.slot]}"
        to.ring.states[to.slot], to.ring.slots[to.slot] = "flying", None
        self.uncommitted.append((to, tl.load(at, mask=mask, other=0.0).handle.data))
        self.num_copies += bool(mask.handle.data.any())

    def commit(self) -> None:
        self.groups.append(self.uncommitted)
        self.uncommitted = []

    def wait(self, left: int) -> None:
        while len(self.groups) > left:
            for view, numbers in self.groups.pop(0):
                view.ring.slots[view.slot], view.ring.states[view.slot] = numbers, "arrived"

    def barrier(self) -> None:
        assert self.ring is not None
        self.ring.pass_barrier()


class Language(SimpleNamespace):
    """Gluon's names; what is not given is Triton's, looked up late, because the interpreter patches it for a run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


def stand_in(monkeypatch: pytest.MonkeyPatch, modules: list[ModuleType]) -> Machine:
    """Puts the stand-in where the modules have Gluon, until the test ends."""
    machine = Machine()

    def product(a: Any, b: Any, acc: Any, **_: Any) -> Any:
        return tl.dot(a, b, acc, input_precision="ieee")

    fake = Language(
        BlockedLayout=gl.BlockedLayout, NVMMADistributedLayout=gl.NVMMADistributedLayout,
        SliceLayout=gl.SliceLayout, SwizzledSharedLayout=gl.SwizzledSharedLayout, DotOperandLayout=gl.DotOperandLayout,
        arange=lambda begin, end, layout: tl.arange(begin, end),
        zeros=lambda shape, dtype, layout: tl.full(shape, 0.0, dtype),
        full=lambda shape, value, dtype, layout: tl.full(shape, value, dtype),
        convert_layout=lambda value, layout: value, dot_fma=product, num_warps=lambda: 8,
        multiple_of=lambda value, by: value, max_contiguous=lambda value, by: value,
        max_constancy=lambda value, by: value,
        allocate_shared_memory=machine.allocate, thread_barrier=machine.barrier,
    )  # fmt: skip
    copies = SimpleNamespace(
        async_copy_global_to_shared=machine.copy, commit_group=machine.commit, wait_group=machine.wait
    )
    for module in modules:
        for name, value in list(vars(module).items()):
            if getattr(value, "is_gluon", bool)():
                made = interpreter.InterpretedFunction(value.fn)
                rewritten = made.rewrite()  # whose annotations are strings, of which it knows those of Triton
                rewritten.__annotations__ = {key: "tl.constexpr" for key in rewritten.__annotations__}
                monkeypatch.setattr(module, name, made)
        for name, value in {"gl": fake, "async_copy": copies, "mma_v2": product}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        if hasattr(module, "arrive"):
            real_arrive, real_wait = module.arrive, module.wait

            def arrive(counters: Any, real: Any = real_arrive) -> None:
                machine.barrier()
                real(counters)

            def wait(counters: Any, target: Any, programs: Any, real: Any = real_wait) -> None:
                assert machine.ring is not None
                machine.at_barriers.append(list(machine.ring.states))
                real(counters, target, programs)

            monkeypatch.setattr(module, "arrive", arrive)
            monkeypatch.setattr(module, "wait", wait)
    return machine
