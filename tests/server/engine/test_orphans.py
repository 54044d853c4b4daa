"""An engine does not outlive its front, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server_process import is_running
from tests.waiting import until

SOURCE = Path(__file__).parents[3]

FRONT = """
import asyncio, multiprocessing, sys
from snapstream.config import EngineOptions
from snapstream.server.engine.process import EngineProcess
from snapstream.server.engine.api import EngineSpec

async def main():
    options = EngineOptions(budget=64, max_rows=2, max_model_len=512)
    engine = EngineProcess(EngineSpec(model=sys.argv[1], options=options, num_threads=1))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    if sys.argv[2] == "serving":
        await starting
    [child] = multiprocessing.active_children()
    print(child.pid, flush=True)
    assert "torch" not in sys.modules, "the front does not load torch"
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["loading", "serving"])
def test_a_front_that_is_killed_leaves_no_engine_behind(folder: Path, tmp_path: Path, state: str) -> None:
    script = tmp_path / "front.py"
    script.write_text(FRONT)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder), state], stdout=subprocess.PIPE, text=True, env=env
    ) as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        assert is_running(pid)
        front.kill()
    until(lambda: not is_running(pid))  # else the engine outlives its front
