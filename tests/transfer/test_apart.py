"""One server that answers and two that read for it, real processes: answers are those of one engine, whoever dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server_process import ServerProcess, is_running
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.server.app import make_app
from snapstream.server.engine.local import LocalEngine
from snapstream.server.settings import ModelFacts, ServerSettings
from tests.transfer.servers import MAX_ROWS, SETTINGS, apart, metric, until_at_rest
from tests.waiting import HANG_S, until

LONG = "The harbour of the town has a lamp. " * 40  # above the budget
PROMPTS = ("Once upon a time", LONG)
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "three samples": {"temperature": 0.9, "seed": 3, "n": 3},
    "log-probabilities": {"temperature": 0, "logprobs": 2},
    "echo": {"temperature": 0, "logprobs": 1, "echo": True, "max_tokens": 4},
    "grammar": {"temperature": 0, "structured_outputs": {"regex": "(red|blue|green){2,4}"}, "max_tokens": 40},
    "stop string": {"temperature": 0.7, "seed": 1, "stop": ["e"]},
    "smaller row": {"temperature": 0, "kv_cache": {"budget": 64}},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}
FIELDS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
JOBS = [{"prompt": prompt, **FIELDS, **own} for own in BODIES.values() for prompt in PROMPTS]
SHORT: dict[str, Any] = {"prompt": "A key", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
Answer = tuple[int, Any]


def of_one_engine() -> list[Any]:
    """The answers to ``JOBS`` and ``SHORT`` by an engine of this process."""

    async def main() -> list[Any]:
        with LLM(TINY_MODEL, progress=False, **SETTINGS) as llm:
            engine = LocalEngine(llm)
            facts = ModelFacts(names=("tiny",), vocab_size=llm.model_config.vocab_size, engine=llm.config)
            app = make_app(engine, llm.tokenizer, ServerSettings(), lambda: facts)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                asked = [await http.post("/v1/completions", json=job, timeout=HANG_S) for job in (*JOBS, SHORT)]
            app.state.front.close()
            await engine.shutdown(0)
        return [one.json() for one in asked]

    return asyncio.run(main())


def ask(server: ServerProcess, body: dict[str, Any]) -> Answer:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S)
    return response.status_code, response.json()


def streamed(server: ServerProcess, body: dict[str, Any]) -> str:
    """The text of a stream, which must end well."""
    told = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=HANG_S).text
    *frames, done = [part.removeprefix("data: ") for part in told.split("\n\n")[:-1]]
    assert done == "[DONE]"
    return "".join(json.loads(frame)["choices"][0]["text"] for frame in frames)


def close_to(found: Any) -> Any:
    """The same with numbers that may round differently."""
    if isinstance(found, dict):
        return {name: close_to(value) for name, value in found.items()}
    if isinstance(found, list):
        return [close_to(value) for value in found]
    return pytest.approx(found, abs=1e-3) if isinstance(found, float) else found


def test_a_server_that_answers_and_two_that_read(tmp_path: Path) -> None:
    *wanted, short = of_one_engine()
    with apart(tmp_path) as (answering, readers), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: ask(answering, job), JOBS))
        for job, own, (status, other) in zip(JOBS, wanted, found, strict=True):
            assert status == 200 and other["choices"] == close_to(own["choices"]), job
            assert other["usage"] == own["usage"]
        assert streamed(answering, JOBS[0]) == wanted[0]["choices"][0]["text"]
        until_at_rest(answering, *readers)
        until(lambda: metric(answering, "rows_received_total") == len(JOBS) + 1)
        assert all(metric(reader, "rows_sent_total") > 0 for reader in readers), "both have read some"
        assert all(metric(reader, "generation_tokens_total") == 0 for reader in readers)
        assert metric(answering, "rows_lost_total") == 0
        strangers_are_refused(answering, readers[0])

        good = 200, short["choices"]
        killed_amid(pool, answering, readers, good)
        killed_after(pool, answering, readers[0], good)
        killed_before(answering, readers[0], good)
        answering_killed(pool, answering, readers[1])


def strangers_are_refused(answering: ServerProcess, reader: ServerProcess) -> None:
    assert httpx.get(f"{reader.url}/health", timeout=HANG_S).status_code == 200
    assert httpx.post(f"{reader.url}/v1/completions", json={"prompt": "a"}, timeout=HANG_S).status_code == 404
    for proof in ("", "00:00", "\u00e9"):
        refused = httpx.post(
            f"{reader.url}/internal/read_prompt",
            content=b"{}",
            headers={b"x-snapstream-proof": proof.encode()},
            timeout=HANG_S,
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_proof")
    assert httpx.post(f"{answering.url}/internal/read_prompt", content=b"{}", timeout=HANG_S).status_code == 404
    assert httpx.post(f"{answering.url}/reset_prefix_cache", timeout=HANG_S).status_code == 400


def choices(pending: Future[Answer]) -> Answer:
    status, body = pending.result(HANG_S)
    return status, body.get("choices", body)


def killed_amid(pool: ThreadPoolExecutor, answering: ServerProcess, readers: list[ServerProcess], good: Answer) -> None:
    """Two requests, one with each reader; one reader's engine dies before either has read: the other reads both."""
    for reader in readers:
        os.kill(reader.engine_pid, signal.SIGSTOP)
    pending = [pool.submit(ask, answering, SHORT) for _ in readers]
    until(lambda: metric(answering, "rows_used") == 2)
    until(lambda: metric(answering, "num_requests_running") == 2)
    os.kill(readers[0].engine_pid, signal.SIGKILL)
    os.kill(readers[1].engine_pid, signal.SIGCONT)
    assert [choices(one) for one in pending] == [good, good]
    until_at_rest(answering, readers[1])
    until(lambda: httpx.get(f"{readers[0].url}/health", timeout=HANG_S).status_code == 200)  # its engine is back


def killed_after(pool: ThreadPoolExecutor, answering: ServerProcess, reader: ServerProcess, good: Answer) -> None:
    """An answer goes on when the server that read its prompt is gone: it has all that it needs."""
    before = metric(answering, "rows_received_total")
    pending = pool.submit(ask, answering, {**SHORT, "max_tokens": 900})
    until(lambda: metric(answering, "rows_received_total") > before)
    reader.process.kill()
    reader.process.wait(HANG_S)
    status, told = choices(pending)
    assert status == 200 and told[0]["text"].startswith(good[1][0]["text"])


def killed_before(answering: ServerProcess, reader: ServerProcess, good: Answer) -> None:
    """Nobody listens at the first address any more: the other server reads all."""
    assert not is_running(reader.pid)
    for _ in range(3):
        status, told = ask(answering, SHORT)
        assert (status, told["choices"]) == good


def answering_killed(pool: ThreadPoolExecutor, answering: ServerProcess, reader: ServerProcess) -> None:
    """What was being read for it is given up, and everything is free."""
    engine = reader.engine_pid
    os.kill(engine, signal.SIGSTOP)
    pending = [pool.submit(ask, answering, {**SHORT, "prompt": LONG}) for _ in range(MAX_ROWS + 1)]
    until(lambda: metric(answering, "rows_used") == MAX_ROWS)
    answering.process.kill()
    for one in pending:
        assert isinstance(one.exception(HANG_S), httpx.HTTPError)
    os.kill(engine, signal.SIGCONT)
    until_at_rest(reader)
    assert httpx.get(f"{reader.url}/health", timeout=HANG_S).status_code == 200
