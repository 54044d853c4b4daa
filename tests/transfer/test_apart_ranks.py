"""A server of two ranks reads prompts for another one of two ranks: answers are those of one device, whoever dies."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_process import ServerProcess
from snapstream import LLM, SamplingParams
from snapstream.assets import TINY_MODEL
from tests.transfer.servers import SETTINGS, metric, running, until_at_rest, write_secret
from tests.waiting import HANG_S, until

RANKS = ["--tensor-parallel", "2"]
PROMPTS = ["A key", "The harbour of the town has a lamp. " * 20]  # below the budget, and above it


def ask(server: ServerProcess, prompt: str) -> tuple[int, Any]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0.8, "seed": 3, "n": 2, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S)
    return response.status_code, [choice["text"] for choice in response.json().get("choices", [])]


def of_one_device() -> list[tuple[int, Any]]:
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=2, ignore_eos=True)
    with LLM(TINY_MODEL, progress=False, **SETTINGS) as llm:
        return [(200, [sample.text for sample in output.samples]) for output in llm.generate(PROMPTS, params)]


def follower_of(server: ServerProcess) -> int:
    (found,) = Path(f"/proc/{server.engine_pid}/task/{server.engine_pid}/children").read_text().split()
    return int(found)


def test_servers_of_two_ranks_each(tmp_path: Path) -> None:
    wanted, secret = of_one_device(), write_secret(tmp_path)
    with running([["--role", "prefill", *RANKS, *secret]], tmp_path / "reader") as (reader,):
        options = ["--role", "decode", *RANKS, "--prefill", reader.url, *secret]
        with running([options], tmp_path / "answering") as (answering,), ThreadPoolExecutor(1) as pool:
            assert [ask(answering, prompt) for prompt in PROMPTS] == wanted
            until_at_rest(answering, reader)
            assert metric(answering, "rows_received_total") == metric(reader, "rows_sent_total") == len(PROMPTS)

            rank = follower_of(reader)  # dies while a prompt waits for it
            os.kill(rank, signal.SIGSTOP)
            pending = pool.submit(ask, answering, PROMPTS[1])
            until(lambda: metric(answering, "rows_used") == 2)
            os.kill(rank, signal.SIGKILL)
            assert pending.result(HANG_S) in (wanted[1], (503, [])), "read again, or refused where nobody reads"
            until_at_rest(answering)
