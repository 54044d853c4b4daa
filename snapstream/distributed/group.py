"""The process group of the ranks: three collectives, and memory that the ranks of one machine share.

A decoder calls its ``Group`` wherever a GEMM gives one rank's part of a sum; ``Alone`` is the group of one rank.
Invariant: after a collective all ranks hold the same bits. Every rank must make the same calls in the same order, with
tensors of one shape. What a rank stores: ``models/sharding.py``.
"""

from __future__ import annotations

import os
from datetime import timedelta
from mmap import mmap
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def memory_problem() -> str | None:
    """Why ranks of this machine cannot share memory; None where they can."""
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return "ranks would share memory, and this system has no memfd_create or no /proc"
    return None


def create(num_bytes: int) -> int:
    """Descriptor of a memfd of zeros, freed with the last process that maps it. OSError if memory is short."""
    made = os.memfd_create("snapstream-ranks")
    os.ftruncate(made, num_bytes)
    return made


def reach(pid: int, number: int, num_bytes: int) -> mmap:
    """Map descriptor ``number`` of process ``pid``, which must be of the same user (Linux); OSError otherwise."""
    own = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap(own, num_bytes)
    finally:
        os.close(own)


ReduceOp = Literal["sum", "max"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}


class Group(Protocol):
    """One rank's view of all of them."""

    @property
    def rank(self) -> int:
        """This rank, ``0 <= rank < size``."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks, W."""
        ...

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """The sum, or the largest, of every rank's ``x``, number by number. ``x`` may be overwritten with it."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's ``x``, rank after rank along ``dim``."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Rank ``source``'s ``x``. The others' ``x`` may be overwritten with it."""
        ...

    def share_memory(self, num_bytes: int) -> Tensor | None:
        """Zeros ``[num_bytes]`` uint8 that all ranks see, which are on one machine; None for one rank.

        The first byte becomes 1 when a rank is lost.
        """
        ...


class Alone:
    """One device: nothing is communicated."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """See ``Group.all_reduce``: ``x`` itself."""
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See ``Group.all_gather``: ``x`` itself."""
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See ``Group.broadcast``: ``x`` itself."""
        return x

    def share_memory(self, num_bytes: int) -> Tensor | None:
        """See ``Group.share_memory``: None."""
        return None


class Ranks:
    """The ranks of ``torch.distributed``: NCCL between NVIDIA GPUs, gloo between CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """``group``: made in every rank's process; ``join`` makes one of all of them."""
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self._shared: list[mmap] = []

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        address: str,
        device: torch.device | str,
        timeout_s: float,
        store: Store | None = None,
    ) -> Ranks:
        """Wait for the other ranks at ``address`` (``file://PATH``), or in ``store`` under the last part of it.

        ``device`` is the one whose tensors this rank will communicate. It is the process's one group: a second
        call is a ValueError of torch's. RuntimeError, or torch's own error, when the others do not come within
        ``timeout_s`` seconds.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {size - 1}, one of {size} ranks")
        own = torch.device(device)
        if str(own) == "cuda":  # NCCL asks which one
            own = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(
            backend="nccl" if own.type == "cuda" else "gloo",
            init_method=address if store is None else None,
            store=None if store is None else PrefixStore(address.rpartition("/")[2], store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=own if own.type == "cuda" else None,
        )
        assert dist.group.WORLD is not None, "torch makes it above"
        return cls(dist.group.WORLD)

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """See ``Group.all_reduce``: overwrites ``x``, if it is contiguous."""
        own = x.contiguous()
        dist.all_reduce(own, op=_OPS[op], group=self._group)
        return own

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See ``Group.all_gather``."""
        whole = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
        gather(whole, x.contiguous(), group=self._group)
        return whole if dim == 0 else torch.cat(whole.chunk(self.size), dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See ``Group.broadcast``: overwrites ``x``, if it is contiguous."""
        own = x.contiguous()
        dist.broadcast(own, group=self._group, group_src=source)
        return own

    def share_memory(self, num_bytes: int) -> Tensor | None:
        """See ``Group.share_memory``; a collective. OSError where a rank cannot reach what rank 0 has made."""
        made = create(num_bytes) if self.rank == 0 else None
        pid, number = self.all_gather(torch.tensor([[os.getpid(), -1 if made is None else made]]), 0)[0].tolist()
        own = reach(pid, number, num_bytes)
        self.all_gather(torch.zeros(1), 0)  # all have it
        if made is not None:
            os.close(made)
        self._shared.append(own)
        return torch.frombuffer(own, dtype=torch.uint8)

    def abandon(self) -> None:
        """A rank is lost: end the waits for it in shared memory. Any thread may call this."""
        for own in self._shared:
            own[0] = 1

    @staticmethod
    def is_joined() -> bool:
        """Whether this process is in a group already; it can be in one."""
        return dist.is_initialized()

    def set_timeout(self, timeout_s: float) -> None:
        """How long a collective may wait for the other ranks from here on."""
        self._group.set_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Leave the group; its collectives cannot be called any more."""
        self._shared.clear()
        dist.destroy_process_group(self._group)
