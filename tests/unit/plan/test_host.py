"""Memory of the machine, or of the container around the process."""

from __future__ import annotations

from pathlib import Path

from snapstream.plan.host import HostMemory, host_memory

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


def machine(root: Path, **files: str) -> Path:
    """A folder with the given files of /proc and /sys; ``__`` stands for a slash."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_counts_what_the_page_cache_would_give_back(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path)) == HostMemory(total=16 * GIB, available=8 * GIB)
    total, available = host_memory()
    assert 0 < available <= total


def test_a_cgroup_bounds_the_memory(tmp_path: Path) -> None:
    outer, inner = "sys__fs__cgroup__pod__", "sys__fs__cgroup__pod__own__"
    root = machine(tmp_path, **{
        "proc__self__cgroup": "0::/pod/own\n",
        outer + "memory.max": f"{6 * GIB}\n", outer + "memory.current": f"{5 * GIB}\n",
        outer + "memory.stat": f"anon 1\ninactive_file {GIB}\n",
        inner + "memory.max": "max\n", inner + "memory.current": f"{GIB}\n", inner + "memory.stat": "",
    })  # fmt: skip
    assert host_memory(root) == HostMemory(total=6 * GIB, available=2 * GIB)


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    files = {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}", "memory.stat": "inactive_file 0"}
    own = {"sys__fs__cgroup__" + name: text for name, text in files.items()}
    root = machine(tmp_path, proc__self__cgroup="0::/system.slice/elsewhere\n", **own)
    assert host_memory(root) == HostMemory(total=4 * GIB, available=3 * GIB)


def test_the_older_cgroup(tmp_path: Path) -> None:
    own = "sys__fs__cgroup__memory__box__memory."
    root = machine(tmp_path, **{
        "proc__self__cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n",
        own + "limit_in_bytes": f"{3 * GIB}", own + "usage_in_bytes": f"{2 * GIB}",
        own + "stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
    })  # fmt: skip
    assert host_memory(root) == HostMemory(total=3 * GIB, available=2 * GIB)
