"""What Ray Serve costs per token, and what a second replica brings: ``snapstream serve`` against one and two replicas.

All run the shipped tiny model, one thread per engine, the same prompts and rows. A model this small is the worst case:
Ray's work per token is the same for every model. Where the machine has fewer cores than there are busy processes (an
engine per replica, the ingress, Ray's proxy, this client), a second replica cannot show what it brings elsewhere: the
record says how many cores there were. Servers are measured one after the other, and in rounds, so that a drift of
the machine shows.

    python -m benchmarks.ray_scale --save
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import ceilings, report
from benchmarks.ray_process import deployed
from benchmarks.server_process import served
from benchmarks.serving import http_seconds, make_prompts

BUDGET = 512
ARMS = ("serve", "1 replica", "2 replicas")


@contextmanager
def running(arm: str, rows: int) -> Iterator[str]:
    """The address of a server. Each replica has as many rows as the server alone."""
    with tempfile.TemporaryDirectory() as folder:
        if arm == "serve":
            with served(["--max-rows", str(rows), "--budget", str(BUDGET)], Path(folder) / "log") as server:
                yield server.url
            return
        config = {
            "engine": {"max_rows": rows, "budget": BUDGET},
            "decode": {"replicas": int(arm.split()[0]), "cpus": 0},
        }
        with deployed(config, Path(folder)) as cluster:
            yield cluster.url


def measure_arm(url: str, streams: int, prompt_len: int, max_tokens: int, repeats: int) -> dict[str, float]:
    """Of many streams that begin together, and of one alone."""
    many: list[float] = []
    alone: list[float] = []
    first: list[float] = []
    for turn in range(repeats + 1):  # the first is a warm-up
        prompts = make_prompts(streams, prompt_len)
        seconds = http_seconds(url, prompts, max_tokens)[1]
        first_s, alone_s, _ = http_seconds(url, prompts[:1], max_tokens)
        if turn:
            many.append(seconds)
            alone.append((alone_s - first_s) / (max_tokens - 1))
            first.append(first_s)
    return {
        "requests_per_s": streams / median(many),
        "tokens_per_s": streams * max_tokens / median(many),
        "first_token_ms": 1e3 * median(first),
        "token_us_alone": 1e6 * median(alone),
        "token_us_together": 1e6 * median(many) / (streams * max_tokens),
    }


def measure(streams: int, prompt_len: int, max_tokens: int, repeats: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(rounds):
        for arm in ARMS:
            with running(arm, streams) as url:
                found[arm].append(measure_arm(url, streams, prompt_len, max_tokens, repeats))
    middle = {arm: {name: median(each[name] for each in runs) for name in runs[0]} for arm, runs in found.items()}
    alone, one, two = (middle[arm] for arm in ARMS)
    return {
        "model": "the tiny model that ships",
        "cores": len(os.sched_getaffinity(0)),
        "streams": streams,
        "prompt_len": prompt_len,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "arms": middle,
        "rounds": found,
        "ray_us_per_token_alone": one["token_us_alone"] - alone["token_us_alone"],
        "ray_us_per_token_together": one["token_us_together"] - alone["token_us_together"],
        "ray_first_token_ms": one["first_token_ms"] - alone["first_token_ms"],
        "second_replica_throughput_ratio": two["requests_per_s"] / one["requests_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    figures = measure(args.streams, args.prompt_len, args.max_tokens, args.repeats, args.rounds)
    report("ray_scale", ceiling, figures, save=args.save)


if __name__ == "__main__":
    main()
