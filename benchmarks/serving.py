"""What the server costs over the engine that it serves: throughput of many streams, the first token when idle, and
the latency of requests that follow each other on one kept-alive connection.

Both sides run the shipped tiny model with one thread, the same prompts, rows and budget. A model this small is the
worst case: the server's work per token is the same for every model, while a step of a real one takes longer. The client
counts frames and parses none, so that it takes as little as possible of the machine that it shares with the server.

    python -m benchmarks.serving --save
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.machine import ceilings, report
from benchmarks.server_process import cpu_seconds, served
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.types import Request, SamplingParams

BUDGET = 512
FRAME = b"data: {"
END = b"data: [DONE]"


def make_prompts(rows: int, prompt_len: int) -> list[list[int]]:
    return [[3 + (7 * row + 11 * i + i * i % 13) % 250 for i in range(prompt_len)] for row in range(rows)]


def engine_seconds(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[float, float]:
    """Seconds to the first token and to the last of requests that begin together, in process."""
    began = perf_counter()
    first = 0.0
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(Request(request_id=f"r{index}", prompt_token_ids=tuple(prompt), sampling=params))
    while llm.engine.has_work:
        if llm.engine.step() and not first:
            first = perf_counter() - began
    return first, perf_counter() - began


async def _stream(host: str, port: int, body: bytes) -> tuple[float, int]:
    """Seconds to the first frame, and how many came."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    began = perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    first, num_frames, last = 0.0, 0, b""
    while piece := await reader.read(2**16):
        num_frames += piece.count(FRAME)
        first = first or (perf_counter() - began if FRAME in piece else 0.0)
        last = piece if len(piece) > 64 else last[-64:] + piece
    writer.close()
    if END not in last:
        raise RuntimeError(f"the stream did not end as it should: {last[-200:]!r}")
    return first, num_frames


def http_seconds(url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, float, int]:
    """The same over HTTP; also the number of frames."""
    parts = urlsplit(url)
    fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [json.dumps({"prompt": list(prompt), **fields}).encode() for prompt in prompts]

    async def run() -> tuple[float, float, int]:
        began = perf_counter()
        streams = (_stream(parts.hostname or "", parts.port or 80, body) for body in bodies)
        results = await asyncio.gather(*streams)
        return results[0][0], perf_counter() - began, sum(count for _, count in results)

    return asyncio.run(run())


def kept_alive_seconds(connection: HTTPConnection, prompt: Sequence[int], max_tokens: int) -> float:
    """Seconds from a request to the end of its response, not streamed, on a connection that stays open."""
    fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"prompt": list(prompt), **fields}).encode()
    began = perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    seconds = perf_counter() - began
    if response.status != 200 or response.will_close:
        raise RuntimeError(f"status {response.status}, connection closed: {response.will_close}: {answer[:200]!r}")
    return seconds


def measure(rows: int, prompt_len: int, max_tokens: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    prompts = make_prompts(rows, prompt_len)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    one = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    options = ["--max-rows", str(rows), "--budget", str(BUDGET), "--num-speculative-tokens", "0"]
    engine: list[float] = []
    http: list[float] = []
    first_engine: list[float] = []
    first_http: list[float] = []
    whole_engine: list[float] = []
    kept_alive: list[float] = []
    engine_cpu = child_cpu = front_cpu = 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        served(options, Path(folder) / "log") as server,
        LLM(TINY_MODEL, budget=BUDGET, max_rows=rows, num_speculative_tokens=0, progress=False) as llm,
        closing(HTTPConnection(urlsplit(server.url).netloc)) as connection,
    ):
        for turn in range(repeats + 1):  # side by side, so that both meet the same machine; the first is a warm-up
            began = process_time()
            seconds = engine_seconds(llm, prompts, params)[1]
            engine_cpu += process_time() - began if turn else 0.0
            before = [cpu_seconds(pid) for pid in (server.engine_pid, server.pid)]
            _, http_s, frames = http_seconds(server.url, prompts, max_tokens)
            if turn:
                engine.append(seconds)
                http.append(http_s)
                child_cpu += cpu_seconds(server.engine_pid) - before[0]
                front_cpu += cpu_seconds(server.pid) - before[1]
        for turn in range(10 * repeats + 1):
            prompt = [make_prompts(turn + 1, prompt_len)[turn]]
            alone = engine_seconds(llm, prompt, one)[0]
            over_http = http_seconds(server.url, prompt, 2)[0]
            if turn:
                first_engine.append(alone)
                first_http.append(over_http)
        num_turns = 10 * repeats + 1
        for turn, token_ids in enumerate(make_prompts(2 * num_turns, prompt_len)[num_turns:]):
            alone = engine_seconds(llm, [token_ids], one)[1]
            over_http = kept_alive_seconds(connection, token_ids, 2)
            if turn:  # the first opens the connection
                whole_engine.append(alone)
                kept_alive.append(over_http)
    tokens = rows * max_tokens
    per_token = 1e6 / (repeats * tokens)
    ratios = [ours / theirs for ours, theirs in zip(engine, http, strict=True)]
    return {
        "model": "the tiny model that ships",
        "rows": rows,
        "prompt_len": prompt_len,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "frames": frames,
        "engine_tokens_per_s": tokens / median(engine),
        "server_tokens_per_s": tokens / median(http),
        "throughput_ratio": median(ratios),
        # Less blurred by a busy machine than times: what each process worked for a token.
        "engine_cpu_us_per_token": engine_cpu * per_token,
        "server_engine_cpu_us_per_token": child_cpu * per_token,
        "front_cpu_us_per_token": front_cpu * per_token,
        "engine_first_token_ms": 1e3 * median(first_engine),
        "server_first_token_ms": 1e3 * median(first_http),
        "first_token_cost_ms": 1e3 * median(b - a for a, b in zip(first_engine, first_http, strict=True)),
        "engine_request_ms": 1e3 * median(whole_engine),
        "kept_alive_ms": 1e3 * median(kept_alive),
        "kept_alive_cost_ms": 1e3 * median(b - a for a, b in zip(whole_engine, kept_alive, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    report("serving", ceiling, measure(args.rows, args.prompt_len, args.max_tokens, args.repeats), save=args.save)


if __name__ == "__main__":
    main()
