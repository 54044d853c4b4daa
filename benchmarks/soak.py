"""Soak of a real server: many clients at once, some leave in the middle, some send nonsense, some stream.

Fails (exit code 1) unless every sound request that was not cancelled gets the very answer that it gets alone in
process, nothing is answered with a 5xx, no row and no request is left over, and memory of both processes grows by less
than 5 % over the second half.

    python -m benchmarks.soak --clients 64 --requests 5000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.machine import ceilings, report
from benchmarks.server_process import ServerProcess, resident_bytes, served
from benchmarks.soak_jobs import BUDGET, NUM_JOBS, Job, plan, sound_jobs

MAX_ROWS = 8
MAX_GROWTH = 0.05
REST_S = 120.0  # for gauges to return to 0
SAMPLE_S = 0.5
GAUGES = ("num_requests_running", "num_requests_waiting", "rows_used", "kv_cache_usage_perc")


@dataclass
class Tally:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, bytes of front and of engine

    def fault(self, job: Job, what: str) -> None:
        self.outcomes["faulty"] += 1
        body = {name: value for name, value in job.body.items() if name not in ("prompt", "messages")}
        self.faults.append(f"{job.path} {body}: {what}")


class Left(Exception):
    """The client has had enough."""


async def _once(http: httpx.AsyncClient, job: Job) -> tuple[int, str, float]:
    """Status, text (or the error), and seconds to wait before another try."""
    async with http.stream("POST", job.path, json=job.body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode()
            return response.status_code, text, float(response.headers.get("retry-after", 0))
        if not job.body.get("stream"):
            choice = json.loads(await response.aread())["choices"][0]
            return 200, choice["text"] if "text" in choice else choice["message"]["content"], 0.0
        return 200, await _stream(response, job), 0.0


async def _stream(response: httpx.Response, job: Job) -> str:
    text, num_chunks, is_done = "", 0, False
    async for line in response.aiter_lines():
        if not line:
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            return f"error in the stream: {data}"
        choice = chunk["choices"][0]
        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        num_chunks += 1
        if num_chunks == job.cancel_after_chunks:
            raise Left
    return text if is_done else "the stream ended without [DONE]"


async def _ask(http: httpx.AsyncClient, job: Job, tally: Tally) -> None:
    """One request to its end; 429 is tried again, as clients do."""
    while True:
        try:
            async with asyncio.timeout(job.cancel_after_s):
                status, text, retry_s = await _once(http, job)
        except (TimeoutError, Left):
            tally.outcomes["cancelled"] += 1
            return
        except httpx.HTTPError as error:
            tally.fault(job, f"{type(error).__name__}: {error}")
            return
        tally.statuses[status] += 1
        if status == 429:
            tally.outcomes["tried again"] += 1
            await asyncio.sleep(retry_s)
            continue
        if status >= 500:
            tally.fault(job, f"{status} {text}")
        elif not job.is_sound:
            tally.outcomes["refused"] += 400 <= status < 500
            if status < 400:
                tally.fault(job, "nonsense was answered")
        elif status != 200 or text != job.want:
            tally.fault(job, f"{status} {text!r}, but alone it is {job.want!r}")
        else:
            tally.outcomes["right"] += 1
        return


async def _watch(server: ServerProcess, tally: Tally, start: float) -> None:
    while True:
        sizes = resident_bytes(server.pid), resident_bytes(server.engine_pid)
        tally.memory.append((time.monotonic() - start, *sizes))
        await asyncio.sleep(SAMPLE_S)


async def _run(server: ServerProcess, jobs: list[Job], num_clients: int) -> dict[str, Any]:
    tally, waiting, start = Tally(), iter(jobs), time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:

        async def client() -> None:
            for job in waiting:
                await _ask(http, job, tally)

        watcher = asyncio.create_task(_watch(server, tally, start))
        await asyncio.gather(*(client() for _ in range(num_clients)))
        seconds = time.monotonic() - start
        watcher.cancel()
        gauges = await _at_rest(http)
    return {
        "requests": len(jobs),
        "clients": num_clients,
        "max_rows": MAX_ROWS,
        "seconds": seconds,
        "outcomes": dict(tally.outcomes),
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "gauges_at_the_end": {name: gauges[name] for name in (*GAUGES, "rows_free")},
        "generation_tokens": gauges["generation_tokens_total"],
        "engine_restarts": gauges["engine_restarts_total"],
        "memory_growth": {
            "front": _growth([front for _, front, _ in tally.memory]),
            "engine": _growth([engine for _, _, engine in tally.memory]),
        },
        "memory_mib": [[round(at, 1), front >> 20, engine >> 20] for at, front, engine in tally.memory[::10]],
        "faults": tally.faults[:20],
    }


def _growth(sizes: list[int]) -> float:
    """Of the second half: the last tenth of the samples against the tenth at the middle, each by its median."""
    tenth = max(1, len(sizes) // 10)
    middle = len(sizes) // 2
    return median(sizes[-tenth:]) / median(sizes[middle : middle + tenth]) - 1


async def _at_rest(http: httpx.AsyncClient) -> dict[str, float]:
    """The figures of /metrics once no request runs, or after ``REST_S``."""
    deadline = time.monotonic() + REST_S
    while True:
        lines = [line for line in (await http.get("/metrics")).text.splitlines() if line.startswith("snapstream:")]
        found = {line.split("{")[0].removeprefix("snapstream:"): float(line.rsplit(" ", 1)[1]) for line in lines}
        if not any(found[name] for name in GAUGES) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


def soak(
    num_requests: int, num_clients: int, seed: int, log: Path, *, max_waiting: int = 40, num_jobs: int = NUM_JOBS
) -> dict[str, Any]:
    """Run it; ``failures`` of the result lists what is not as it must be."""
    jobs = plan(sound_jobs(seed, MAX_ROWS, num_jobs), num_requests, seed, cancelled=0.2, malformed=0.05)
    options = ["--max-rows", str(MAX_ROWS), "--budget", str(BUDGET), "--max-waiting", str(max_waiting)]
    with served(options, log) as server:
        figures = asyncio.run(_run(server, jobs, num_clients))
    text = log.read_text()
    failures = list(figures["faults"])
    failures += [f"{name} is {value} at the end" for name, value in figures["gauges_at_the_end"].items()
                 if value != (MAX_ROWS if name == "rows_free" else 0)]  # fmt: skip
    failures += [f"{name} answers" for name in figures["statuses"] if name.startswith("5")]
    failures += ["the engine was restarted"] if figures["engine_restarts"] else []
    failures += ["a traceback is in the log"] if "Traceback" in text else []
    return {**figures, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        figures = soak(args.requests, args.clients, args.seed, log)
        for name, growth in figures["memory_growth"].items():
            if growth >= MAX_GROWTH:
                figures["failures"].append(f"the memory of the {name} grew by {growth:.1%}")
    report("soak", ceiling, figures, save=args.save)
    if figures["failures"]:
        raise SystemExit("\n".join(figures["failures"]))


if __name__ == "__main__":
    main()
