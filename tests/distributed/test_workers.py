"""Ranks of other machines: ``snapstream worker`` connects to a rank 0 that listens at an address. One machine here."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from snapstream import LLM, SamplingParams
from snapstream.cli import main
from snapstream.cli.serve import environment, run_all
from snapstream.config import EngineOptions
from snapstream.distributed.control import Hello, RankLost
from snapstream.exec.parallel import ParallelRunner
from snapstream.server.engine.api import EngineSpec
from snapstream.server.engine.process import EngineProcess
from snapstream.startup.build import check_versions, use_own_gpu
from snapstream.types import Request
from snapstream.version import __version__
from tests.llm.conftest import write_checkpoint
from tests.waiting import HANG_S, HTTP, until, until_async

SETTINGS: dict[str, Any] = {
    "budget": 64, "max_rows": 2, "max_model_len": 256, "chunk_len": 32, "executor": "eager", "progress": False,
}  # fmt: skip
KEY = "a key of sixteen letters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("rank-0"))


@contextmanager
def worker_of(address: str, folder: Path, key: str = KEY) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "snapstream.cli", "worker", address, str(folder)]
    env = {**os.environ, "SNAPSTREAM_RANKS_KEY": key, "PYTHONPATH": str(Path(__file__).parents[2])}
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # its warnings on each failed attempt would fill the pipe, which is read late
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of an engine of which one rank is elsewhere."""
    monkeypatch.setenv("SNAPSTREAM_RANKS_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as own:
        address = f"127.0.0.1:{own.getsockname()[1]}"
    return {**SETTINGS, "tensor_parallel": 2, "local_ranks": 1, "master_addr": address}


def test_a_rank_from_elsewhere_is_one_like_any(folder: Path, tmp_path: Path, spread: dict[str, Any]) -> None:
    """Its copy of the checkpoint lies in another folder. When rank 0 closes, it ends."""
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, n=2)
    prompts = ["Some words to begin with, more than fit.", "Few"]
    with LLM(folder, **SETTINGS) as llm:
        wanted = [[sample.token_ids for sample in output.samples] for output in llm.generate(prompts, params)]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with worker_of(spread["master_addr"], copy) as worker, LLM(folder, **spread) as llm:
        assert f"ranks: 2 (cpu, 1 thread each; 1 here, 1 join at {spread['master_addr']})" in llm.notes
        found = [[sample.token_ids for sample in output.samples] for output in llm.generate(prompts, params)]
        assert found == wanted
        runner = llm.engine.runner
        assert isinstance(runner, ParallelRunner) and runner.workers.pids == ()
        llm.close()
        assert worker.wait(HANG_S) == 0
        assert worker.stderr is not None and "rank 0 has closed its engine, or is lost" in worker.stderr.read()


def test_a_rank_from_elsewhere_that_dies_is_missed(folder: Path, spread: dict[str, Any]) -> None:
    with worker_of(spread["master_addr"], folder) as worker, LLM(folder, **spread) as llm:
        os.kill(worker.pid, signal.SIGKILL)
        runner = llm.engine.runner
        assert isinstance(runner, ParallelRunner)
        until(lambda: runner.workers.lost is not None)
        with pytest.raises(RankLost, match="rank 1 is lost: its machine, its process or the network between"):
            llm.generate(["Some words"], SamplingParams(max_tokens=4))
        with pytest.raises(RuntimeError, match="an earlier step of this LLM failed, and nothing more is run"):
            llm.generate(["Some words"], SamplingParams(max_tokens=4))


def test_a_server_starts_again_with_the_rank_that_comes_next(folder: Path, spread: dict[str, Any]) -> None:
    """What starts workers again, a service manager or a loop, is played by the test."""
    options = EngineOptions(**{name: value for name, value in spread.items() if name != "progress"})
    request = Request(request_id="a", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4, temperature=0))

    async def main() -> None:
        engine = EngineProcess(EngineSpec(model=str(folder), options=options, num_threads=1), first_backoff_s=0.0)
        try:
            with worker_of(spread["master_addr"], folder) as first:
                await engine.start()
                wanted = [one async for one in engine.generate(request)][-1]
                first.kill()
                await until_async(lambda: not engine.is_ready)
            with worker_of(spread["master_addr"], folder):
                await until_async(lambda: engine.is_ready)
                assert [one async for one in engine.generate(request)][-1].samples == wanted.samples
        finally:
            await engine.shutdown(0)

    asyncio.run(main())


def test_another_checkpoint_is_refused_and_rank_0_waits_on(
    folder: Path, tmp_path: Path, spread: dict[str, Any]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # the last number
    (other / "model.safetensors").write_bytes(weights)
    errors: list[str] = []

    def be_refused_then_join() -> None:
        with worker_of(spread["master_addr"], other) as worker:
            assert worker.wait(HANG_S) == 1
            assert worker.stderr is not None
            errors.append(worker.stderr.read())
        with worker_of(spread["master_addr"], folder) as worker:
            worker.wait(HANG_S)

    rest = threading.Thread(target=be_refused_then_join, daemon=True)
    rest.start()
    with LLM(folder, **spread) as llm:
        assert llm.generate(["Some words"], SamplingParams(max_tokens=4))
    rest.join(HANG_S)
    assert len(errors) == 1 and "rank 0 does not admit this rank: its checkpoint is not rank 0's" in errors[0]


def test_ranks_of_a_launcher(folder: Path, spread: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE say who is who, whoever comes first."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    host, _, port = spread["master_addr"].rpartition(":")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", host), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    with LLM(folder, **SETTINGS) as llm:
        wanted = llm.generate(["Some words"], greedy)[0].samples[0].token_ids
    command = [sys.executable, "-m", "snapstream.cli", "serve", str(folder), "--master-addr", "env"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    others = [subprocess.Popen(command, env=env | {"RANK": str(rank)}, stderr=subprocess.PIPE) for rank in (3, 1, 2)]
    try:
        with LLM(folder, **SETTINGS, master_addr="env") as llm:
            assert llm.config.parallel.size == 4
            assert llm.generate(["Some words"], greedy)[0].samples[0].token_ids == wanted
            llm.close()
            assert [other.wait(HANG_S) for other in others] == [0, 0, 0]
    finally:
        for other in others:
            other.kill()
            other.communicate()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"RANK": "0"}, "the environment lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "RANK is '2'; it must be from 0 to 1",
        ),
        ({"RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "WORLD_SIZE is 'x'"),
    ],
)
def test_a_launcher_that_says_too_little(said: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        EngineOptions(master_addr="env")


def test_a_key_is_asked_for_before_anything_is_loaded(
    folder: Path, spread: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SNAPSTREAM_RANKS_KEY")
    with pytest.raises(ValueError, match="SNAPSTREAM_RANKS_KEY has 0 characters"):
        LLM(folder, **spread)
    monkeypatch.setenv("SNAPSTREAM_RANKS_KEY", KEY)
    port = int(spread["master_addr"].rpartition(":")[2])
    in_use = pytest.raises(ValueError, match="cannot listen there: .*in use")
    with socket.create_server(("127.0.0.1", port)), in_use:
        LLM(folder, **spread)


def test_other_versions_are_refused() -> None:
    def hello(version: str, torch: str) -> Hello:
        return Hello(version=version, torch=torch, host="far", pid=1)

    same = hello(__version__, "2.0")
    check_versions([same, same], "2.0")
    with pytest.raises(ValueError, match=f"rank 2 on far runs snapstream 0; rank 0 runs {__version__}"):
        check_versions([same, hello("0", "2.0")], "2.0")
    with pytest.raises(ValueError, match="rank 1 on far runs torch 2.0; rank 0 runs 2.1"):
        check_versions([same], "2.1")


def test_several_ranks_of_a_machine_have_a_gpu_each_and_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that this process may use: looped decode is refused with more threads."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert environment(0, 2)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [environment(rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert [environment(rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["5", "7"]
    with pytest.raises(ValueError, match="--ranks is 3; CUDA_VISIBLE_DEVICES names 2 GPUs"):
        environment(0, 3)


@pytest.mark.parametrize("patience", ["nan", "-1", "inf"])
def test_a_worker_waits_for_a_time(patience: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["worker", "127.0.0.1:1", str(tmp_path), "--patience", patience]) == 2
    assert "--patience" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("visible", "local", "own"),
    [("", "1", "1"), ("5, 7", "1", "7"), ("5,7", "", "5,7"), ("5", "0", "5"), ("5", "1", "5")],
)
def test_a_launched_rank_takes_its_gpu_of_those_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str, local: str, own: str
) -> None:
    """A launcher may show all GPUs of a machine to each rank, or each rank its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", local)
    use_own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    if visible == "5,7":
        monkeypatch.setenv("LOCAL_RANK", "2")
        with pytest.raises(ValueError, match="LOCAL_RANK is 2; CUDA_VISIBLE_DEVICES names 2 GPUs"):
            use_own_gpu()


def test_ranks_of_one_command_end_together() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        codes = ("exit(5)", "import time; time.sleep(600)")
        assert run_all([([sys.executable, "-c", code], dict(os.environ)) for code in codes]) == 5
    finally:
        signal.signal(signal.SIGTERM, before)


def test_torchrun_starts_and_stops_a_server(folder: Path, spread: dict[str, Any], tmp_path: Path) -> None:
    """The real launcher, two ranks: its agent owns the store. SIGTERM to the launcher drains and ends both."""
    with LLM(folder, **SETTINGS) as llm:
        wanted = llm.generate(["Some words"], SamplingParams(max_tokens=8, temperature=0.0))[0].samples[0].text
    host, _, port = spread["master_addr"].rpartition(":")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "0"]
    serve = ["-m", "snapstream.cli", "serve", str(folder), "--master-addr", "env", "--port", "0"]
    sizes = ["--budget", "64", "--max-rows", "2", "--max-model-len", "256", "--executor", "eager"]
    log = tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as err:
        command = [*launcher, "--master-addr", host, "--master-port", port, *serve, *sizes]
        process = subprocess.Popen(command, stdout=err, stderr=err, env=env, start_new_session=True)
    try:
        until(lambda: "serving" in log.read_text() or process.poll() is not None)
        url = re.search(r"serving .+? at (https?://\S+?/v1)", log.read_text())
        assert url is not None, log.read_text()
        fields = {"prompt": "Some words", "max_tokens": 8, "temperature": 0.0}
        answer = HTTP.post(f"{url[1]}/completions", json=fields, timeout=HANG_S).json()
        assert answer["choices"][0]["text"] == wanted
        process.terminate()
        process.wait(HANG_S)
        until(lambda: not _has_group(process.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
