"""Soak of replicas on Ray Serve while engines and replicas are killed: nothing may be lost that is not told.

Fails (exit code 1) unless every sound request gets the very answer that it gets alone in process, or is told that it
gets none - 429, 503, or an error frame that ends its stream - and unless at the end every replica is there, takes
requests, and has all of its rows free.

    python -m benchmarks.ray_soak --minutes 10 --save
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import ceilings, report
from benchmarks.ray_process import Deployed, ReplicaWatch, deployed
from benchmarks.soak_jobs import BUDGET, NUM_JOBS, Job, plan, sound_jobs

REPLICAS, MAX_ROWS = 2, 8
REST_S = 300.0  # for replicas to come back, and for gauges to return to 0
RETRY_S = 0.2  # a client that was told waits so long
TOLD = (429, 503)


@dataclass
class Tally:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Left(Exception):
    """The client has had enough."""


async def _once(http: httpx.AsyncClient, job: Job) -> tuple[int, str, bool]:
    """Status, text, and whether an error frame ended the stream."""
    async with http.stream("POST", job.path, json=job.body) as response:
        if response.status_code != 200 or not job.body.get("stream"):
            body = json.loads(await response.aread())
            if response.status_code != 200:
                return response.status_code, str(body), False
            choice = body["choices"][0]
            return 200, choice["text"] if "text" in choice else choice["message"]["content"], False
        text, num_chunks, is_told, is_done = "", 0, False, False
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                is_done = is_done or bool(line)
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                is_told = True
                continue
            choice = chunk["choices"][0]
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            num_chunks += 1
            if num_chunks == job.cancel_after_chunks:
                raise Left
        return 200, text if is_done else "the stream ended without [DONE]", is_told


async def _ask(http: httpx.AsyncClient, job: Job, tally: Tally) -> None:
    try:
        async with asyncio.timeout(job.cancel_after_s):
            status, text, is_told = await _once(http, job)
    except (TimeoutError, Left):
        tally.outcomes["cancelled"] += 1
        return
    except (httpx.HTTPError, ValueError) as error:
        tally.faults.append(f"{job.path}: {type(error).__name__}: {error}")
        return
    if status in TOLD:
        tally.outcomes[f"told {status}"] += 1
        await asyncio.sleep(RETRY_S)
    elif is_told:
        tally.outcomes["told amid the stream"] += 1
        if not job.want.startswith(text):
            tally.faults.append(f"{job.path}: {text!r} before the error, but alone it is {job.want!r}")
    elif status == 200 and text == job.want:
        tally.outcomes["right"] += 1
    else:
        tally.faults.append(f"{job.path}: {status} {text!r}, but alone it is {job.want!r}")


async def _kill(watch: ReplicaWatch, tally: Tally, every_s: float, seed: int) -> None:
    """Engines and replicas in turn, and never the last one that answers."""
    rng = random.Random(seed)
    for number in count():
        await asyncio.sleep(every_s)
        reports = await asyncio.to_thread(watch.reports)
        ready = [each for each in reports if not each.load.unavailable]
        if len(ready) < 2:
            tally.kills["put off"] += 1
            continue
        victim = rng.choice(ready)
        part = "engine" if number % 2 else "replica"
        os.kill(victim.metadata.pid if part == "engine" else victim.pid, signal.SIGKILL)
        tally.kills[part] += 1


async def _load(
    cluster: Deployed, watch: ReplicaWatch, jobs: Callable[[], Job], num_clients: int, times: tuple[float, float]
) -> Tally:
    """``times``: seconds of the run, and between two kills."""
    tally, end = Tally(), time.monotonic() + times[0]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=600, limits=limits) as http:

        async def client() -> None:
            while time.monotonic() < end:
                await _ask(http, jobs(), tally)

        killing = asyncio.create_task(_kill(watch, tally, times[1], seed=1))
        await asyncio.gather(*(client() for _ in range(num_clients)))
        killing.cancel()
    return tally


def _leftovers(watch: ReplicaWatch) -> list[str]:
    """What is not as it should be when everything has come to rest."""
    deadline = time.monotonic() + REST_S
    while True:
        reports = watch.reports()
        found = [f"{len(reports)} replicas answer"] if len(reports) != REPLICAS else []
        found += [f"{each.replica}: {each.load.unavailable}" for each in reports if each.load.unavailable]
        found += [f"{each.replica}: {each.load.open_rows} rows are open" for each in reports if each.load.open_rows]
        found += [
            f"{each.replica}: {each.stats.rows_free} of {each.stats.rows_total} rows are free"
            for each in reports
            if each.stats.rows_free != MAX_ROWS
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _jobs(sound: list[Job], seed: int) -> Iterator[Job]:
    """Without end."""
    for number in count(seed):
        yield from plan(sound, 500, number, cancelled=0.1, malformed=0.0)


def soak(seconds: float, num_clients: int, kill_every_s: float, seed: int, num_jobs: int = NUM_JOBS) -> dict[str, Any]:
    """Run it; ``failures`` of the result lists what is not as it must be."""
    planned = _jobs(sound_jobs(seed, MAX_ROWS, num_jobs), seed)
    config = {
        "drain_timeout": 60,
        "engine": {"max_rows": MAX_ROWS, "budget": BUDGET, "max_waiting": 64},
        "decode": {"replicas": REPLICAS, "cpus": 0},
    }
    with tempfile.TemporaryDirectory() as folder, deployed(config, Path(folder)) as cluster:
        watch = ReplicaWatch(cluster.address)
        try:
            times = (seconds, kill_every_s)
            tally = asyncio.run(_load(cluster, watch, lambda: next(planned), num_clients, times))
            leftovers = _leftovers(watch)
        finally:
            watch.close()
        num_repeated = len(re.findall(r"is repeated on another replica", cluster.log))
    failures = tally.faults + leftovers
    failures += [] if tally.outcomes["right"] else ["no request was answered"]
    return {
        "seconds": seconds,
        "clients": num_clients,
        "replicas": REPLICAS,
        "max_rows": MAX_ROWS,
        "cores": len(os.sched_getaffinity(0)),
        "kills": dict(tally.kills),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "repeated": num_repeated,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    figures = soak(60 * args.minutes, args.clients, args.kill_every, args.seed)
    report("ray_soak", ceiling, figures, save=args.save)
    if figures["failures"]:
        raise SystemExit("\n".join(figures["failures"]))


if __name__ == "__main__":
    main()
