"""Rows sized from memory, executors chosen per device, and what is refused before a weight is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from snapstream import startup
from snapstream.assets import TINY_MODEL
from snapstream.config import EngineConfig, KVBudget
from snapstream.draft_memory import DraftMemory
from snapstream.host_memory import HostMemory, host_memory
from snapstream.kernels.cpu import native
from snapstream.llm import LLM
from snapstream.memory import MAX_AUTO_ROWS
from snapstream.models.registry import model_config_from_dict, read_model_config
from snapstream.models.shapes import num_parameters
from snapstream.planning import make_plan
from snapstream.server.engine.messages import EngineSpec
from snapstream.server.engine.worker import build
from snapstream.server.run import ServeOptions, memory_beside

GIB = 2**30
LLAMA_1B = model_config_from_dict({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "hidden_act": "silu", "tie_word_embeddings": True,
})  # fmt: skip


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with as many bytes as the list's only entry."""
    size = [80 * GIB]
    monkeypatch.setattr(startup, "_free_bytes", lambda device, only_free: size[0])
    return size


def config(slots: int = 8192, device: str = "cuda", **settings: int) -> EngineConfig:
    return EngineConfig(
        budget=KVBudget.of(slots), max_model_len=131_072, dtype="bfloat16", device=device, executor="eager", **settings
    )


@pytest.mark.parametrize("slots", [8192, 32_768, 131_072])
def test_auto_rows_are_those_of_the_plan(free: list[int], slots: int) -> None:
    """One formula: `snapstream plan` promises what the engine then allocates."""
    plan = make_plan(LLAMA_1B, budgets=[slots], max_model_len=131_072, memory_bytes=free[0], bandwidth=1)
    rows = startup.fit_rows(LLAMA_1B, config(slots), "auto").max_rows
    assert rows == min(plan.rows[1].max_rows, MAX_AUTO_ROWS)
    assert rows > 1


def test_as_many_rows_as_fit_and_not_one_more(free: list[int]) -> None:
    rows = startup.fit_rows(LLAMA_1B, config(32_768), "auto").max_rows
    assert startup.fit_rows(LLAMA_1B, config(32_768), rows).max_rows == rows
    with pytest.raises(ValueError, match=rf"{rows + 1} \+ 1 rows of 1 GiB.* need .* this GPU has 80 GiB free"):
        startup.fit_rows(LLAMA_1B, config(32_768), rows + 1)


def test_auto_rows_have_a_bound_and_need_room_for_one(free: list[int]) -> None:
    free[0] = 10**15
    assert startup.fit_rows(LLAMA_1B, config(), "auto").max_rows == MAX_AUTO_ROWS
    free[0] = 3 * GIB
    with pytest.raises(ValueError, match=r"2.30 GiB of weights, 1 \+ 1 rows .* 3 GiB free"):
        startup.fit_rows(LLAMA_1B, config(), "auto")


def test_executor_by_default_is_the_devices() -> None:
    assert startup.resolve_executor(None, "cpu") == "eager"
    assert startup.resolve_executor(None, "cuda:0") == "graph"
    assert startup.resolve_executor("eager", "cuda") == "eager"
    assert startup.resolve_executor("graph", "cpu") == "graph"


def test_graph_on_a_cpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = dataclasses.replace(config(device="cpu"), executor="graph")
    monkeypatch.setattr(native.shutil, "which", lambda name: f"/bin/{name}" if name == "g++" else None)
    monkeypatch.delenv("CXX", raising=False)
    startup.check_executor(graph)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.find_compiler() is None
    with pytest.raises(ValueError, match="neither .CXX nor g\\+\\+"):
        startup.check_executor(graph)
    startup.check_executor(config(device="cpu"))  # eager needs none


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


def test_auto_rows_on_a_cpu_ask_for_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "host_memory", lambda: HostMemory(total=80 * GIB, available=3 * GIB))
    with pytest.raises(ValueError, match="this machine has 3 GiB free"):
        startup.fit_rows(LLAMA_1B, config(device="cpu"), "auto")
    assert startup.fit_rows(LLAMA_1B, config(device="cpu"), 2).max_rows == 2


def test_rows_in_fp8_fit_twice_as_often(free: list[int]) -> None:
    """Plan and engine agree here too; the rest of a row's entry in a batch stays what it was."""
    wide, narrow = config(65_536), dataclasses.replace(config(65_536), kv_dtype="fp8")
    plan = make_plan(
        LLAMA_1B, budgets=[65_536], max_model_len=131_072, memory_bytes=free[0], bandwidth=1, kv_dtype="fp8"
    )
    rows = startup.fit_rows(LLAMA_1B, narrow, "auto").max_rows
    assert rows == plan.rows[1].max_rows
    assert rows > 1.9 * startup.fit_rows(LLAMA_1B, wide, "auto").max_rows


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_fp8_is_refused_on_a_gpu_that_cannot_convert_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    narrow = dataclasses.replace(config(), kv_dtype="fp8")
    with pytest.raises(ValueError, match=rf"Some GPU has compute capability {capability[0]}\.{capability[1]}.*8\.9"):
        startup.check_kv_dtype(narrow)
    startup.check_kv_dtype(config())
    startup.check_kv_dtype(dataclasses.replace(narrow, device="cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    startup.check_kv_dtype(narrow)


def test_an_unknown_storage_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_dtype is 'int4'; it must be auto or fp8"):
        dataclasses.replace(config(), kv_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_dtype is 'int4'"):
        make_plan(LLAMA_1B, memory_bytes=1, bandwidth=1, kv_dtype="int4")  # type: ignore[arg-type]


def test_a_gpu_is_not_chosen_by_its_number() -> None:
    with pytest.raises(ValueError, match="set CUDA_VISIBLE_DEVICES=2 and use 'cuda'"):
        startup.check_device("cuda:2")


@pytest.mark.parametrize(("device", "max_rows"), [("cuda", "auto"), ("cuda", 2), ("cpu", "auto")])
def test_what_a_draft_works_with_is_kept_free(free: list[int], device: str, max_rows: startup.MaxRows) -> None:
    """Its weights are loaded already and missing from what is free."""
    draft = DraftMemory(weight_bytes=10**15, working_bytes=20 * GIB)
    rows = startup.fit_rows(LLAMA_1B, config(32_768, device), "auto").max_rows
    fewer = startup.fit_rows(LLAMA_1B, config(32_768, device), "auto", draft).max_rows
    assert 19 <= rows - fewer <= 20  # of 1 GiB, and what decode needs for each
    if max_rows != "auto":
        with pytest.raises(ValueError, match="20 GiB for the draft.*or the window of the draft"):
            startup.fit_rows(LLAMA_1B, config(32_768, device), rows, draft)


def test_a_draft_counts_whole_against_all_of_a_machine(free: list[int]) -> None:
    draft = DraftMemory(weight_bytes=70 * GIB, working_bytes=10 * GIB)
    with pytest.raises(ValueError, match="80 GiB for the draft"):
        startup.fit_rows(LLAMA_1B, config(device="cpu"), 1, draft)


def test_a_draft_of_another_process_is_counted() -> None:
    """The server's draft lives in front of the engine's process."""
    beside = DraftMemory(weight_bytes=0, working_bytes=10**18)
    with pytest.raises(ValueError, match="for the draft"):
        build(EngineSpec(model=str(TINY_MODEL), beside=beside))


def test_an_own_draft_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[DraftMemory | None] = []
    fit = startup.fit_rows

    def fit_rows(*args: Any) -> EngineConfig:
        told.append(args[3])
        return fit(*args)

    monkeypatch.setattr("snapstream.llm.fit_rows", fit_rows)
    with LLM(TINY_MODEL, draft=TINY_MODEL, progress=False) as llm:
        weights = llm.engine._runner.decoder.weights.num_bytes  # type: ignore[attr-defined]
    assert told[0] is not None and told[0].weight_bytes == weights and told[0].working_bytes > 0
    with LLM(TINY_MODEL, progress=False):
        assert told[1] is None


def test_a_server_tells_its_engine_of_the_draft() -> None:
    """All of it, because it may or may not be loaded when the engine measures."""
    spec = EngineSpec(model=str(TINY_MODEL))
    assert memory_beside(spec, ServeOptions()) is None
    whole, short = (memory_beside(spec, ServeOptions(draft=TINY_MODEL, draft_window_len=n)) for n in (None, 128))
    weights = num_parameters(read_model_config(TINY_MODEL)) * 4
    assert whole is not None and short is not None
    assert weights < short.working_bytes < whole.working_bytes
