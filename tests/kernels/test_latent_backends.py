"""Optional kernels over rows of latents: stand-ins check arguments and layout, and answer through the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from snapstream.assets import TINY_LATENT_MODEL
from snapstream.config import EngineConfig, KVBudget, ModelConfig, ParallelConfig, SplitAttention
from snapstream.kernels.backends import latents as plain
from snapstream.kernels.backends import latents as versions
from snapstream.kernels.backends import packages
from snapstream.kernels.backends.autotune import Entry, find, read
from snapstream.kernels.backends.latents import (
    FILE,
    VERSIONS,
    Attend,
    Case,
    LatentAttention,
    Version,
    choose_from,
    random_rows,
    with_latents,
)
from snapstream.kernels.interface import HeadNorm, RowPlaces, bind
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import KVSpec, Latent
from snapstream.models.registry import read_model_config
from snapstream.startup.measure import latent_attention

CASE = Case(torch.device("cpu"), torch.bfloat16, 4, 512, 64, 128, 256, (9, 0))
SMALL = replace(CASE, dtype=torch.float32, rank=24, rope_dim=8)


class Pages:
    """What the packages would be: every method insists on names, shapes and pages of the real one."""

    def __init__(self, latents: Tensor) -> None:
        self.latents, self.calls = latents, 0

    def attend(self, q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, rank: int, scale: float) -> Tensor:
        """``q [B, H, E]``, ``cache [pages, 64, E]``; reads pages through the table, as a kernel does."""
        self.calls += 1
        assert table.dtype == lengths.dtype == torch.int32 and table.shape == (len(q), self.latents.shape[2] // 64)
        assert cache.data_ptr() == self.latents.data_ptr() and cache.shape[1:] == (64, q.shape[2])  # nothing is copied
        assert scale == pytest.approx(q.shape[2] ** -0.5)
        rows = cache[table.long()].flatten(1, 2)[:, None]  # [B, 1, C, E]
        return plain.attend_plain(q, rows, rank, torch.arange(len(q)), lengths)

    # flash_mla
    def get_mla_metadata(self, cache_seqlens: Tensor, heads_per_kv_head: int, num_kv_heads: int) -> tuple[str, None]:
        assert cache_seqlens.dtype == torch.int32 and num_kv_heads == 1
        return f"schedule of {heads_per_kv_head}", None

    def flash_mla_with_kvcache(
        self, q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int, schedule: str,
        num_splits: None, *, softmax_scale: float, causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert q.shape[1] == 1 and k_cache.shape[2] == 1 and not causal and num_splits is None
        assert schedule == f"schedule of {q.shape[2]}"
        out = self.attend(q[:, 0], k_cache[:, :, 0], block_table, cache_seqlens, head_dim_v, softmax_scale)
        return out[:, None], None

    # flashinfer.mla
    def trtllm_batch_decode_with_kv_cache_mla(
        self, *, query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int, kv_lora_rank: int,
        qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, bmm1_scale: float,
    ) -> Tensor:  # fmt: skip
        assert query.shape[1] == 1 and qk_nope_head_dim == 128 and kv_lora_rank + qk_rope_head_dim == query.shape[3]
        assert workspace_buffer.dtype == torch.uint8 and max_seq_len == self.latents.shape[2]
        return self.attend(query[:, 0], kv_cache, block_tables, seq_lens, kv_lora_rank, bmm1_scale)[:, None]

    def install(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        for name in names:
            module: Any = ModuleType(name)
            for function in ("get_mla_metadata", "flash_mla_with_kvcache", "trtllm_batch_decode_with_kv_cache_mla"):
                setattr(module, function, getattr(self, function))
            monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["flash_mla", "flashinfer"])
def test_a_row_is_a_run_of_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "WORKSPACE_BYTES", 64)
    q, latents, rows = random_rows(SMALL, 3, 256)
    lengths = torch.tensor([1, 65, 256])
    stand = Pages(latents)
    stand.install(monkeypatch, "flash_mla", "flashinfer", "flashinfer.mla")
    attend = VERSIONS[name].make(SMALL)
    got = [attend(q, latents, 24, rows, lengths) for _ in range(2)]
    assert stand.calls == 2 and torch.equal(got[0], got[1])
    torch.testing.assert_close(got[0], plain.attend_plain(q, latents, 24, rows, lengths))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flash_mla", {}, ""),
        ("flash_mla", {"capability": (10, 0)}, "needs compute capability 9.x; this GPU has 10.0"),
        ("flash_mla", {"dtype": torch.float32}, "takes bfloat16 and float16, not float32"),
        ("flash_mla", {"rank": 256}, "needs latents of 512 and 64 numbers; this model's have 256 and 64"),
        ("flash_mla", {"slots": 1000}, "needs rows of a multiple of 64 slots; these have 1000"),
        ("flashinfer", {"capability": (10, 0)}, ""),
        ("flashinfer", {"capability": (10, 0), "slots": 192}, "needs rows of a multiple of 128 slots; these have 192"),
        ("flashinfer", {}, "needs compute capability 10.x; this GPU has 9.0"),
    ],
)
def test_what_a_package_cannot_serve(
    name: str, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASE, **changes)
    assert VERSIONS[name].why_not(case) == f"needs the package {name}, which is not installed"
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda package: object())
    assert VERSIONS[name].why_not(case) == reason


def entry(*order: str) -> Entry:
    return Entry(
        capability=None, dtype="float32", head_dim=None, chunk=order, packed=(), measured=None, reason="for a test"
    )


def wrong(q: Tensor, latents: Tensor, rank: int, rows: Tensor, lengths: Tensor) -> Tensor:
    return plain.attend_plain(q, latents, rank, rows, lengths) + 0.1


def broken(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image\nis available")


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> dict[str, Attend]:
    """Three that answer rightly, one wrongly, one not at all; and one that is missing."""

    def copy_of(scale: float) -> Attend:
        return lambda *arguments: plain.attend_plain(*arguments) * scale

    made: dict[str, Attend] = {name: copy_of(1.0) for name in ("a", "b", "c")} | {"wrong": wrong, "broken": broken}
    for name, attend in made.items():
        monkeypatch.setitem(VERSIONS, name, Version(name, lambda case, own=attend: own, lambda case: ""))  # type: ignore[misc]
    monkeypatch.setitem(VERSIONS, "missing", Version("missing", lambda case: broken, lambda case: "is not installed"))
    return made


def timer(made: dict[str, Attend], times: dict[str, float]) -> Callable[[Attend, Case], float]:
    def time_of(attend: Attend, case: Case) -> float:
        name = next(name for name, own in made.items() if own is attend)
        if name not in times:
            raise RuntimeError("out of memory")
        return times[name]

    return time_of


def test_the_fastest_that_is_right(candidates: dict[str, Attend]) -> None:
    def chosen(times: dict[str, float], *order: str) -> LatentAttention:
        return choose_from(entry(*order), SMALL, timer(candidates, times))

    assert chosen({"a": 1.0, "b": 0.8}, "a", "b").name == "b"
    assert chosen({"a": 1.0, "b": 0.95}, "a", "b").name == "a"  # not faster by a tenth
    assert chosen({"b": 1.0}, "a", "b").name == "b"  # a fails beside a model
    only = chosen({}, "missing", "wrong", "broken", "c", "reference")
    assert only.name == "c" and "missing is not installed; wrong failed its trial (wrong by 0.1" in only.why
    assert "broken failed its trial (RuntimeError: no kernel image is available)" in only.describe()
    assert chosen({}, "wrong", "reference").name == "reference"
    with pytest.raises(ValueError, match="no attention over latents can serve here: missing is not installed; broken"):
        chosen({}, "missing", "broken")


def test_the_table_has_an_order_for_every_gpu() -> None:
    entries = read(FILE)
    assert all(name in VERSIONS for line in entries for name in line.chunk)
    assert find(entries, "9.0", "bfloat16", 576).chunk[0] == "flash_mla"
    assert find(entries, "10.0", "bfloat16", 576).chunk[0] == "flashinfer"
    for capability, size in (("8.0", 576), ("9.0", 320), ("12.0", 576)):
        assert find(entries, capability, "bfloat16", size).chunk == ("triton", "reference")


def test_a_step_through_another_kernel() -> None:
    """The new latent is written, queries are kept, and the kernel is handed the layer."""
    spec = KVSpec(layers=(Latent(num_kv_heads=1, key_dim=32, value_dim=24),) * 2, num_heads=4)
    seen: list[tuple[int, ...]] = []

    def attend(q: Tensor, latents: Tensor, rank: int, rows: Tensor, lengths: Tensor) -> Tensor:
        seen.append(tuple(latents.shape))
        return plain.attend_plain(q, latents, rank, rows, lengths)

    torch.manual_seed(0)
    heads, places = torch.randn(2, 5, 32), RowPlaces(torch.tensor([2, 0]), torch.tensor([3, 9]), torch.tensor([4, 10]))
    found = []
    plainly = bind("cpu", "torch")
    for kernels in (plainly, with_latents(plainly, LatentAttention("other", attend, "for a test"))):
        cache, kept = KVCache(spec, 3, 64, "cpu", kernels), list[Tensor]()
        cache.k.copy_(torch.randn(cache.k.shape, generator=torch.Generator().manual_seed(1)))
        out = kernels.attend_rows(heads, HeadNorm(None, 0.0), None, cache.layer(1), places, kept.append)
        found.append((out, cache.k, kept[0]))
    assert seen == [(4, 1, 64, 32)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(found[1][1][1, 2, 0, 3], heads[0, -1])


@pytest.mark.parametrize(("attention", "num_heads"), [("tp", 2), ("dp", 4)])
def test_a_rank_chooses_for_its_own_heads(
    attention: SplitAttention, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def note(device: torch.device, dtype: torch.dtype, model: ModelConfig, slots: int) -> None:
        asked.append((model.num_heads, slots))

    monkeypatch.setattr(Case, "of", note)
    model = read_model_config(TINY_LATENT_MODEL)
    parallel = ParallelConfig(size=2, attention=attention)
    config = EngineConfig(budget=KVBudget.full(100), max_model_len=100, max_rows=2, parallel=parallel)
    assert latent_attention(model, config) is None and asked == [(num_heads, 100)]
