"""Ranks that come from elsewhere: ``snapstream follow`` meets a leader that waits at an address. One machine here."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapstream import LLM, SamplingParams
from snapstream.cli.follow import environment, run_all
from snapstream.config import EngineOptions
from snapstream.distributed.launch import RankLost
from snapstream.distributed.messages import Hello
from snapstream.request import Request
from snapstream.runner.parallel import ParallelRunner
from snapstream.server.engine.messages import EngineSpec
from snapstream.server.engine.process import EngineProcess
from snapstream.start.ranks import check_versions
from snapstream.version import __version__
from tests.llm.conftest import write_checkpoint
from tests.waiting import HANG_S, until, until_async

SETTINGS: dict[str, Any] = {
    "budget": 64, "max_rows": 2, "max_model_len": 256, "chunk_len": 32, "executor": "eager", "progress": False,
}  # fmt: skip
KEY = "a key of sixteen letters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("leader"))


@contextmanager
def following(address: str, folder: Path, key: str = KEY) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "snapstream.cli", "follow", address, str(folder)]
    env = {**os.environ, "SNAPSTREAM_RANKS_KEY": key, "PYTHONPATH": str(Path(__file__).parents[2])}
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
    return {**SETTINGS, "tensor_parallel": 2, "local_ranks": 1, "leader_address": address}


def test_a_rank_from_elsewhere_is_one_like_any(folder: Path, tmp_path: Path, spread: dict[str, Any]) -> None:
    """Its copy of the checkpoint lies in another folder. When the leader closes, it ends."""
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, n=2)
    prompts = ["Some words to begin with, more than fit.", "Few"]
    with LLM(folder, **SETTINGS) as llm:
        wanted = [[sample.token_ids for sample in output.samples] for output in llm.generate(prompts, params)]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with following(spread["leader_address"], copy) as follower, LLM(folder, **spread) as llm:
        assert llm.notes[0] == f"ranks: 2 (cpu, 1 thread each; 1 here, 1 come to {spread['leader_address']})"
        found = [[sample.token_ids for sample in output.samples] for output in llm.generate(prompts, params)]
        assert found == wanted
        runner = llm.engine.runner
        assert isinstance(runner, ParallelRunner) and runner.follower_pids == ()
        llm.close()
        assert follower.wait(HANG_S) == 0
        assert follower.stderr is not None and "the leader has closed its engine, or is gone" in follower.stderr.read()


def test_a_rank_from_elsewhere_that_dies_is_missed(folder: Path, spread: dict[str, Any]) -> None:
    with following(spread["leader_address"], folder) as follower, LLM(folder, **spread) as llm:
        os.kill(follower.pid, signal.SIGKILL)
        runner = llm.engine.runner
        assert isinstance(runner, ParallelRunner)
        until(lambda: runner.lost is not None)
        with pytest.raises(RankLost, match="rank 1 has gone: its machine, its process or the network between"):
            llm.generate(["Some words"], SamplingParams(max_tokens=4))
        with pytest.raises(RuntimeError, match="an earlier step of this LLM failed; make a new one"):
            llm.generate(["Some words"], SamplingParams(max_tokens=4))


def test_a_server_starts_again_with_the_rank_that_comes_next(folder: Path, spread: dict[str, Any]) -> None:
    """What starts followers again, a service manager or a loop, is played by the test."""
    options = EngineOptions(**{name: value for name, value in spread.items() if name != "progress"})
    request = Request(request_id="a", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4, temperature=0))

    async def main() -> None:
        engine = EngineProcess(EngineSpec(model=str(folder), options=options, num_threads=1), first_backoff_s=0.0)
        try:
            with following(spread["leader_address"], folder) as first:
                await engine.start()
                wanted = [one async for one in engine.generate(request)][-1]
                first.kill()
                await until_async(lambda: not engine.is_ready)
            with following(spread["leader_address"], folder):
                await until_async(lambda: engine.is_ready)
                assert [one async for one in engine.generate(request)][-1].samples == wanted.samples
        finally:
            await engine.shutdown(0)

    asyncio.run(main())


def test_another_checkpoint_is_refused_at_both_ends(folder: Path, tmp_path: Path, spread: dict[str, Any]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # the last number
    (other / "model.safetensors").write_bytes(weights)
    with following(spread["leader_address"], other) as follower:
        with pytest.raises(ValueError, match=f"rank 1: {other} on .* is not the leader's checkpoint"):
            LLM(folder, **spread)
        assert follower.wait(HANG_S) != 0
        assert follower.stderr is not None and "is not the leader's checkpoint" in follower.stderr.read()


def test_a_key_is_asked_for_before_anything_is_loaded(
    folder: Path, spread: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SNAPSTREAM_RANKS_KEY")
    with pytest.raises(ValueError, match="SNAPSTREAM_RANKS_KEY has 0 characters"):
        LLM(folder, **spread)
    monkeypatch.setenv("SNAPSTREAM_RANKS_KEY", KEY)
    port = int(spread["leader_address"].rpartition(":")[2])
    in_use = pytest.raises(ValueError, match="nobody can be waited for there: .*in use")
    with socket.create_server(("127.0.0.1", port)), in_use:
        LLM(folder, **spread)


def test_other_versions_are_refused() -> None:
    def hello(version: str, torch: str) -> Hello:
        return Hello(version=version, torch=torch, host="far", pid=1)

    same = hello(__version__, "2.0")
    check_versions([same, same], "2.0")
    with pytest.raises(ValueError, match=f"rank 2 on far runs snapstream 0; the leader runs {__version__}"):
        check_versions([same, hello("0", "2.0")], "2.0")
    with pytest.raises(ValueError, match="rank 1 on far runs torch 2.0; the leader runs 2.1"):
        check_versions([same], "2.1")


def test_several_ranks_of_a_machine_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [environment(rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert [environment(rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["5", "7"]
    with pytest.raises(ValueError, match="--ranks is 3; CUDA_VISIBLE_DEVICES names 2 GPUs"):
        environment(0, 3)


def test_ranks_of_one_command_end_together() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        codes = ("exit(5)", "import time; time.sleep(600)")
        assert run_all([([sys.executable, "-c", code], dict(os.environ)) for code in codes]) == 5
    finally:
        signal.signal(signal.SIGTERM, before)
