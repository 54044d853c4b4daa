"""Large memory of a CPU: what it holds, where it begins, what it costs before it is used."""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from snapstream.kernels.cpu import pages

SHAPE = (3, pages.LEAST // 4 // 2, 2)  # of fp32: three times the least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shape", [(5, 7), (0, 4), SHAPE])
def test_zeros_of_any_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """They are zeros that can be written, contiguous, and begin with a cache line."""
    data = pages.zeros(shape, dtype)
    assert data.shape == shape and data.dtype == dtype and data.is_contiguous() and data.data_ptr() % 64 == 0
    assert data.untyped_storage().nbytes() == data.nbytes
    assert not data.view(torch.uint8).any()
    data.view(torch.uint8).fill_(1)
    assert data.view(torch.uint8).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
def test_what_is_large_asks_for_huge_pages_and_costs_nothing_untouched() -> None:
    """The mapping has the flag, begins with a huge page, and is gone with the last tensor over it."""
    data = pages.zeros(SHAPE, torch.float32)
    start = data.data_ptr()
    assert start % pages.HUGE == 0
    assert _mapping(start)["Rss"] == 0
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in str(_mapping(start)["VmFlags"]).split()
    part = data[1:]
    del data
    gc.collect()
    assert not part.any()
    del part
    gc.collect()
    assert not _mapping(start)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
def test_what_the_system_does_not_give_is_told() -> None:
    with pytest.raises(OSError, match=r"the system gives no 1,152,921,504,606,846,976 bytes of memory: \w+"):
        pages.zeros((1 << 60,), torch.uint8)


def _mapping(address: int) -> dict[str, int | str]:
    """What the system says of the mapping with that address: sizes in kB, flags; nothing where there is none."""
    found: dict[str, int | str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if border := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(border[1], 16) <= address < int(border[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) if value.endswith(" kB") else value.strip()
    return found
