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

from benchmarks.server_process import ServerProcess, is_running, served
from snapstream import LLM, SamplingParams
from snapstream.assets import TINY_MODEL
from snapstream.cli import main
from snapstream.disaggregation.protocol import SECRET_VARIABLE
from tests.disaggregation.servers import (
    MAX_ROWS,
    OPTIONS,
    SETTINGS,
    apart,
    metric,
    running,
    until_at_rest,
    write_secret,
)
from tests.server.local_engine import local_client
from tests.waiting import HANG_S, HTTP, until

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
            async with local_client(llm) as http:
                asked = [await http.post("/v1/completions", json=job, timeout=HANG_S) for job in (*JOBS, SHORT)]
        return [one.json() for one in asked]

    return asyncio.run(main())


def ask(server: ServerProcess, body: dict[str, Any]) -> Answer:
    response = HTTP.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S)
    return response.status_code, response.json()


def streamed(server: ServerProcess, body: dict[str, Any]) -> str:
    """The text of a stream, which must end well."""
    received = HTTP.post(f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=HANG_S).text
    *frames, done = [part.removeprefix("data: ") for part in received.split("\n\n")[:-1]]
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
            cached = other["usage"]["prompt_tokens_details"]  # what another prompt left in that reader's prefix store
            assert other["usage"] == {**own["usage"], "prompt_tokens_details": cached}
        assert streamed(answering, JOBS[0]) == wanted[0]["choices"][0]["text"]
        until_at_rest(answering, *readers)
        until(lambda: metric(answering, "rows_received_total") == len(JOBS) + 1)
        assert all(metric(reader, "rows_sent_total") > 0 for reader in readers), "both have read some"
        # Also those of answers that ended before the reader had said that it sent the row.
        until(lambda: sum(metric(reader, "rows_sent_total") for reader in readers) == len(JOBS) + 1)
        assert not any("status=499" in reader.log.read_text() for reader in readers)
        another_secret(readers, tmp_path)
        assert all(metric(reader, "generation_tokens_total") == 0 for reader in readers)
        assert metric(answering, "rows_lost_total") == 0
        strangers_are_refused(answering, readers[0])

        good = 200, short["choices"]
        killed_amid(pool, answering, readers, good)
        killed_after(pool, answering, readers[0], good)
        killed_before(answering, readers[0], good)
        out_of_reach(answering, readers[1])
        answering_killed(pool, answering, readers[1])


def strangers_are_refused(answering: ServerProcess, reader: ServerProcess) -> None:
    assert HTTP.get(f"{reader.url}/health", timeout=HANG_S).status_code == 200
    assert HTTP.post(f"{reader.url}/v1/completions", json={"prompt": "a"}, timeout=HANG_S).status_code == 404
    for proof in ("", "00:00", "\u00e9"):
        refused = HTTP.post(
            f"{reader.url}/internal/prefill",
            content=b"{}",
            headers={b"x-snapstream-proof": proof.encode()},
            timeout=HANG_S,
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_proof")
    assert HTTP.post(f"{answering.url}/internal/prefill", content=b"{}", timeout=HANG_S).status_code == 404
    assert HTTP.post(f"{answering.url}/reset_prefix_cache", timeout=HANG_S).status_code == 400


def another_secret(readers: list[ServerProcess], folder: Path) -> None:
    """The start of a decode server says so; else every request would."""
    secret = write_secret(folder / "readers", "another secret of thirty-two characters")
    options = [*OPTIONS, "--role", "decode", "--prefill", readers[0].url, *secret]
    with pytest.raises(RuntimeError, match="no prefill server can be used: .* has another transfer secret"):
        served(options, folder / "log-refused").__enter__()


def out_of_reach(answering: ServerProcess, reader: ServerProcess) -> None:
    """The only server that reads is stopped: requests would wait, so the one that answers is not ready."""

    def status(path: str = "/health") -> int:
        return HTTP.get(f"{answering.url}{path}", timeout=HANG_S).status_code

    assert status() == status("/health/ready") == status("/health/live") == 200
    os.kill(reader.pid, signal.SIGSTOP)
    until(lambda: status() == 503)
    assert status("/health/ready") == 503 and status("/health/live") == 200
    os.kill(reader.pid, signal.SIGCONT)
    until(lambda: status() == 200)


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
    until(lambda: HTTP.get(f"{readers[0].url}/health", timeout=HANG_S).status_code == 200)  # its engine is back


def killed_after(pool: ThreadPoolExecutor, answering: ServerProcess, reader: ServerProcess, good: Answer) -> None:
    """An answer goes on when the server that read its prompt is gone: it has all that it needs."""
    before = metric(answering, "rows_received_total")
    pending = pool.submit(ask, answering, {**SHORT, "max_tokens": 900})
    until(lambda: metric(answering, "rows_received_total") > before)
    reader.process.kill()
    reader.process.wait(HANG_S)
    status, answered = choices(pending)
    assert status == 200 and answered[0]["text"].startswith(good[1][0]["text"])


def killed_before(answering: ServerProcess, reader: ServerProcess, good: Answer) -> None:
    """Nobody listens at the first address any more: the other server reads all."""
    assert not is_running(reader.pid)
    for _ in range(3):
        status, answered = ask(answering, SHORT)
        assert (status, answered["choices"]) == good


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
    assert HTTP.get(f"{reader.url}/health", timeout=HANG_S).status_code == 200


# ``serve --role``: what does not fit together is refused before anything is loaded.

READER = ["--prefill", "http://127.0.0.1:1"]
DECODE = ["--role", "decode", *READER]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--role", "decode"], "--role decode needs --prefill URL"),
        (READER, "--prefill is for --role decode"),
        (["--transfer-host", "127.0.0.1"], "--transfer-host is for --role decode"),
        (["--transfer-secret-file", "x"], "are for --role prefill or decode"),
        (["--role", "prefill"], "holds no transfer secret"),
        (["--role", "decode", "--prefill", "http://192.0.2.1:1"], "prompts need https there"),
        (["--role", "decode", "--prefill", "ftp://127.0.0.1"], "must be an address like"),
        ([*DECODE, *READER], "names a server twice"),
        ([*DECODE, "--transfer-host", "192.0.2.1"], "this needs TLS"),
        ([*DECODE, "--transfer-host", "0.0.0.0"], "no sender can reach"),
        ([*DECODE, "--transfer-port", "99999"], "the transfer port is 99999"),
        ([*DECODE, "--transfer-ca", "/nowhere"], "is not a file"),
        (["--role", "prefill", "--transfer-ca", __file__], "certificates of authorities (PEM)"),
        ([*DECODE, "--tls-cert", __file__, "--tls-key", __file__], "are not a certificate and its key"),
        ([*DECODE, "--prefix-store", "1MiB"], "are for prefill servers"),
        (["--role", "prefill", "--host", "0.0.0.0"], "--role prefill needs --tls-cert and --tls-key"),
        (["--role", "prefill", "--draft", "x"], "give it to the servers with --role decode"),
    ],
    ids=lambda value: " ".join(value).replace(__file__, "a.py") if isinstance(value, list) else "",
)
def test_what_does_not_fit_together(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "holds no" in says:
        monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(SECRET_VARIABLE, "a secret of thirty-two characters")
    assert main(["serve", *options]) == 2
    printed = " ".join(word for word in capsys.readouterr().err.split() if word != "│")
    assert says in printed


# A server of two ranks reads prompts for another one of two ranks: answers are those of one device, whoever dies.

RANKS = ["--tensor-parallel", "2"]
APART_RANKS_PROMPTS = ["A key", "The harbour of the town has a lamp. " * 20]  # below the budget, and above it


def apart_ranks_ask(server: ServerProcess, prompt: str) -> tuple[int, Any]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0.8, "seed": 3, "n": 2, "ignore_eos": True}
    response = HTTP.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S)
    return response.status_code, [choice["text"] for choice in response.json().get("choices", [])]


def of_one_device() -> list[tuple[int, Any]]:
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=2, ignore_eos=True)
    with LLM(TINY_MODEL, progress=False, **SETTINGS) as llm:
        return [
            (200, [sample.text for sample in output.samples]) for output in llm.generate(APART_RANKS_PROMPTS, params)
        ]


def follower_of(server: ServerProcess) -> int:
    lists = Path(f"/proc/{server.engine_pid}/task").glob("*/children")  # of each thread that starts processes
    (found,) = (child for children in lists for child in children.read_text().split())
    return int(found)


def test_servers_of_two_ranks_each(tmp_path: Path) -> None:
    wanted, secret = of_one_device(), write_secret(tmp_path)
    with running([["--role", "prefill", *RANKS, *secret]], tmp_path / "reader") as (reader,):
        options = ["--role", "decode", *RANKS, "--prefill", reader.url, *secret]
        with running([options], tmp_path / "answering") as (answering,), ThreadPoolExecutor(1) as pool:
            assert [apart_ranks_ask(answering, prompt) for prompt in APART_RANKS_PROMPTS] == wanted
            until_at_rest(answering, reader)
            assert (
                metric(answering, "rows_received_total")
                == metric(reader, "rows_sent_total")
                == len(APART_RANKS_PROMPTS)
            )

            rank = follower_of(reader)  # dies while a prompt waits for it
            os.kill(rank, signal.SIGSTOP)
            pending = pool.submit(apart_ranks_ask, answering, APART_RANKS_PROMPTS[1])
            until(lambda: metric(answering, "rows_used") == 2)
            os.kill(rank, signal.SIGKILL)
            assert pending.result(HANG_S) in (wanted[1], (503, [])), "read again, or refused where nobody reads"
            until_at_rest(answering)
