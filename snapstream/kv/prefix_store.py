"""Storage of the prefix store: exact keys and values of prompt tokens, in blocks, in host memory and on disk.

A block holds ``block_len`` tokens of all layers. The keys and values of one layer of a block are contiguous, so a
transfer to or from a device is one copy per layer. ``engine/prefix_cache.py`` knows which block holds what, and decides
what is read and written.

On disk a block is a safetensors file, and so is a snapshot of recurrent states at the end of one; a background thread
writes them. The name is a keyed hash over the chain of blocks up to it, so it depends on all tokens so far, their
namespace and the model that computed them. A file must carry its name, its tokens, the rank whose shard it is, and a
checksum of its data; on any mismatch it is a cache miss, the file is deleted, and a warning is logged. Files are
written under a temporary name, synced and renamed, so a crash leaves no partial block. When the byte limit is exceeded,
the least recently used files are deleted. Files contain no code.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from math import prod
from threading import Lock

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from snapstream.config.engine import NAMESPACE_SEPARATOR
from snapstream.kv.prefix_folder import MARKER, PrefixFolder
from snapstream.kv.spec import STATE_BYTES, Full, KVSpec, Latent
from snapstream.step import StoredBlock

log = logging.getLogger(__name__)

SLAB_BYTES = 256 * 2**20


class PrefixBlocks:
    """``num_blocks`` blocks of the layers with slots, in the staging dtype; ``pins`` memory for copies to a GPU.

    Memory is allocated in slabs on first use; low block numbers are used first.
    """

    def __init__(
        self, spec: KVSpec, num_blocks: int, block_len: int, num_snapshots: int = 0, *, pins: bool = False
    ) -> None:
        """``num_snapshots`` of the states of recurrent layers are kept with the blocks."""
        self.spec, self.num_blocks, self.block_len = spec, num_blocks, block_len
        self._snapshots: dict[int, Tensor] = {}  # by number, allocated on first use: fp32, layer after layer
        self._num_snapshots = num_snapshots
        self._pins = pins
        self._per_slab = min(max(SLAB_BYTES // (block_len * spec.prefix_token_bytes), 1), num_blocks)
        self._lock = Lock()
        self._slabs: dict[int, Tensor] = {}  # [blocks, elements of a block], layer after layer
        sizes = (block_len * own.token_size if isinstance(own, Full) else 0 for own in spec.layers)
        self._starts = list(accumulate(sizes, initial=0))  # of each layer in a block

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(slab.nbytes for slab in self._slabs.values()) + len(self._snapshots) * self.spec.state_bytes

    def whole(self, block: int) -> Tensor:
        """All layers of a block, ``[elements]``."""
        index, place = divmod(block, self._per_slab)
        with self._lock:  # the reader thread fills blocks too
            if index not in self._slabs:
                size = min(self._per_slab, self.num_blocks - index * self._per_slab), self._starts[-1]
                dtype = getattr(torch, self.spec.dtype)
                self._slabs[index] = torch.empty(size, dtype=dtype, pin_memory=self._pins)
        return self._slabs[index][place]

    def piece(self, block: int, layer: int) -> Tensor:
        """One layer of a block, ``[elements]``; none if it has no slots of its own."""
        return self.whole(block)[self._starts[layer] : self._starts[layer + 1]]

    def layer(self, block: int, layer: int) -> tuple[Tensor, Tensor | None]:
        """Keys ``[G, block_len, E]`` and values ``[G, block_len, E']`` of a block; None if keys hold the values."""
        own = self.spec.layers[layer]
        assert isinstance(own, Full)
        return split(own, self.piece(block, layer), self.block_len)

    def snapshot(self, number: int) -> Tensor:
        """The states of all recurrent layers in a snapshot, fp32 one after the other."""
        if not 0 <= number < self._num_snapshots:
            raise IndexError(f"snapshot {number} of {self._num_snapshots}")
        with self._lock:
            if number not in self._snapshots:
                self._snapshots[number] = torch.empty(self.spec.state_bytes // STATE_BYTES)
            return self._snapshots[number]

    def state(self, snapshot: int, layer: int) -> dict[str, Tensor]:
        """Views of the states of a recurrent layer in a snapshot, fp32 by name."""
        shapes, before = self.spec.state_shapes(layer), map(self.spec.layer_state_bytes, range(layer))
        pieces = self.snapshot(snapshot)[sum(before) // STATE_BYTES :]
        sizes = [prod(shape) for _, shape in shapes]
        parts = pieces[: sum(sizes)].split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def split(layer: Full, piece: Tensor, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """One layer of ``num_tokens`` tokens as keys ``[G, n, E]`` and values ``[G, n, E']``; None if keys hold them."""
    num_keys = num_tokens * layer.key_size
    keys = piece[:num_keys].view(layer.num_kv_heads, num_tokens, layer.key_dim)
    if isinstance(layer, Latent):
        return keys, None
    return keys, piece[num_keys:].view(layer.num_kv_heads, num_tokens, layer.value_dim)


FORMAT = "2"
SUFFIX, SNAPSHOT_SUFFIX, PARTIAL = ".safetensors", ".state.safetensors", ".partial"
_HASH_BYTES = 20
_HEX = f"[0-9a-f]{{{2 * _HASH_BYTES}}}"
_PLACE = re.compile(f"({_HEX}(/{_HEX})*)?")
_NAME = re.compile(f"({_HEX}/)+{_HEX}({re.escape(SUFFIX)}|{re.escape(SNAPSHOT_SUFFIX)})")


class PrefixFiles:
    """The ``DiskCache`` of one runner; one thread reads, another writes."""

    def __init__(
        self,
        blocks: PrefixBlocks,
        folder: PrefixFolder,
        model: bytes,
        max_bytes: int,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """``model`` identifies the model and its weights. ``settle`` waits for the device's copies to and from blocks;
        needed on worker ranks, where no step result is awaited.
        """
        self._blocks, self._folder, self._max_bytes, self._settle = blocks, folder, max_bytes, settle
        sizes = f"{FORMAT} {blocks.block_len} {blocks.spec}".encode()
        self._root = _keyed(folder.secret, b"root", sizes + model)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prefix-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix-writer")
        self._lock = Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by name, the least recently used first
        self._scan()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(self._sizes.values())

    def names(self, namespace: str, chain: Sequence[bytes], *, of_snapshots: bool = False) -> tuple[str, ...]:
        """See ``DiskCache.names``."""
        place, digest = self.place(namespace), self._root
        suffix = SNAPSHOT_SUFFIX if of_snapshots else SUFFIX
        names = []
        for tokens in chain:
            digest = _keyed(self._folder.secret, digest, place.encode() + tokens)
            names.append(f"{place}/{digest.hex()}{suffix}")
        return tuple(names)

    def has(self, name: str) -> bool:
        with self._lock:
            return name in self._sizes

    def load(self, wanted: Sequence[StoredBlock]) -> Future[int]:
        """Fill blocks and snapshots from their files; the result counts those before the first invalid. ValueError for
        a bad name.
        """
        for block in wanted:
            _check(_NAME, block.name)
        return self._reader.submit(self._load, wanted)

    def save(self, block: StoredBlock) -> Future[int]:
        """Write a block or a snapshot, which must not change until then. ValueError for an invalid name."""
        _check(_NAME, block.name)
        return self._writer.submit(self._save, block)

    def forget(self, namespace: str | None) -> None:
        """Delete the files of a namespace and of those below it; None: all."""
        self.forget_place("" if namespace is None else self.place(namespace))

    def forget_place(self, place: str) -> Future[int]:
        """``forget`` by the folder of a namespace; empty: all. ValueError for an invalid folder."""
        _check(_PLACE, place)
        self._drop(place)
        return self._writer.submit(self._delete_all, place)  # after pending writes

    def close(self) -> None:
        """Finish pending writes; idempotent."""
        self._reader.shutdown()
        self._writer.shutdown()
        self._folder.close()

    def place(self, namespace: str) -> str:
        """The folder of a namespace, which contains those of namespaces below it."""
        parts = [part.encode("utf-8", "surrogatepass") for part in namespace.split(NAMESPACE_SEPARATOR)]
        return "/".join(_keyed(self._folder.secret, b"space", part).hex() for part in parts)

    def _scan(self) -> None:
        found = []
        for path in self._folder.path.rglob("*"):
            if path.name.endswith(PARTIAL):
                path.unlink(missing_ok=True)
            elif path.name.endswith(SUFFIX):
                info = path.stat()
                found.append((info.st_mtime_ns, path.relative_to(self._folder.path).as_posix(), info.st_size))
        self._sizes.update((name, size) for _, name, size in sorted(found))
        self._make_room(0)

    def _load(self, wanted: Sequence[StoredBlock]) -> int:
        self._settle()
        for count, block in enumerate(wanted):
            try:
                self._read(block)
            except Exception as error:  # a damaged file may raise anything
                log.warning("deleting an unusable block of the disk cache: %s", error)
                with suppress(OSError):
                    self._forget_file(block.name)
                return count
        return len(wanted)

    @torch.inference_mode()  # blocks are inference tensors
    def _read(self, block: StoredBlock) -> None:
        path = self._folder.path / block.name
        stored = self._stored(block)
        with safe_open(path, framework="pt") as file:
            metadata, kv, tokens = file.metadata() or {}, file.get_tensor("kv"), file.get_tensor("tokens")
        if metadata.get("format") != FORMAT or metadata.get("name") != block.name:
            raise ValueError("its name belongs to another block")
        if metadata.get("share", "") != self._folder.part:
            raise ValueError("it is another rank's shard")
        if tokens.dtype != torch.int32 or tokens.numpy().tobytes() != block.tokens:
            raise ValueError("its tokens differ")
        if kv.dtype != stored.dtype or kv.shape != stored.shape:
            raise ValueError(f"it has {kv.dtype} {tuple(kv.shape)}, not {stored.dtype} {tuple(stored.shape)}")
        if metadata.get("checksum") != _checksum(kv):
            raise ValueError("its checksum is wrong")
        stored.copy_(kv)
        with suppress(OSError):  # of a disk that has become read-only
            os.utime(path)
        with self._lock:
            if block.name in self._sizes:
                self._sizes.move_to_end(block.name)

    def _stored(self, block: StoredBlock) -> Tensor:
        return self._blocks.snapshot(block.number) if block.is_snapshot else self._blocks.whole(block.number)

    def _save(self, block: StoredBlock) -> int:
        if self.has(block.name):
            return 0
        self._settle()
        kv = self._stored(block)
        tokens = torch.from_numpy(np.frombuffer(block.tokens, dtype=np.int32).copy())
        metadata = {"format": FORMAT, "name": block.name, "share": self._folder.part, "checksum": _checksum(kv)}
        data = save({"kv": kv.contiguous(), "tokens": tokens}, metadata)
        path = self._folder.path / block.name
        partial = path.with_suffix(PARTIAL)
        try:
            self._make_room(len(data))
            os.stat(self._folder.path / MARKER)  # a folder that was removed is not made again
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError as error:  # such as a full disk: the block is then in memory only
            log.warning("a block cannot be written to the disk: %s", error.strerror)
            partial.unlink(missing_ok=True)
            return 0
        with self._lock:
            self._sizes[block.name] = len(data)
        return 1

    def _make_room(self, num_bytes: int) -> None:
        while True:
            with self._lock:
                if not self._sizes or sum(self._sizes.values()) + num_bytes <= self._max_bytes:
                    return
                name = next(iter(self._sizes))
            self._forget_file(name)

    def _forget_file(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)
        (self._folder.path / name).unlink(missing_ok=True)

    def _drop(self, place: str) -> None:
        with self._lock:
            for name in [name for name in self._sizes if not place or name.startswith(f"{place}/")]:
                del self._sizes[name]

    def _delete_all(self, place: str) -> int:
        tops = [self._folder.path / place] if place else [path for path in self._folder.path.iterdir() if path.is_dir()]
        for top in tops:
            shutil.rmtree(top, ignore_errors=True)
        self._drop(place)
        return 0


def _check(pattern: re.Pattern[str], name: str) -> None:
    if not pattern.fullmatch(name):
        raise ValueError(f"{name!r:.100} names no block of the prefix store")


def _keyed(key: bytes, kind: bytes, value: bytes) -> bytes:
    return hashlib.blake2b(kind + b"\0" + value, key=key, digest_size=_HASH_BYTES).digest()


def _checksum(kv: Tensor) -> str:
    return hashlib.blake2b(kv.contiguous().view(torch.uint8).numpy().data, digest_size=_HASH_BYTES).hexdigest()
