"""The command ``snapstream serve`` as a process, with the tiny model and its engine process: answer, drain, end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from snapstream.cli import main
from tests.server.front_client import frames

START_S = 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    log = tmp_path / "log"
    options = ["--port", "0", "--max-rows", "3", "--budget", "128", "--drain-timeout", "4"]
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "snapstream.cli", "serve", *options],
            stderr=err,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"serving tiny at (http://\S+)/v1", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def test_answer_then_drain(server: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = server
    assert httpx.get(f"{url}/health").status_code == 200
    body = {"prompt": "word " * 300, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"
    facts = answer["snapstream"]["prompts"][0]["compression"]
    assert facts["kept_tokens"] == 128 < facts["prompt_tokens"] == answer["usage"]["prompt_tokens"]

    streams = {count: _stream(url, count) for count in (100, 15_000)}
    for _, started, _ in streams.values():
        assert started.wait(30)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 3
    while (status := httpx.get(f"{url}/health").status_code) == 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status == 503
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
    for thread, _, _ in streams.values():
        thread.join(30)
    done, cut = (frames(b"".join(streams[count][2]).decode()) for count in (100, 15_000))
    assert done[-1]["choices"][0]["finish_reason"] == "length"  # ended within the timeout
    assert cut[-1]["error"]["code"] == "engine_unavailable"
    assert process.wait(20) == 0


def _stream(url: str, max_tokens: int) -> tuple[threading.Thread, threading.Event, list[bytes]]:
    started, parts = threading.Event(), []

    def read() -> None:
        body: dict[str, Any] = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for part in response.iter_raw():
                parts.append(part)
                started.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, started, parts


def test_a_taken_port_and_bad_options_end_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    for options in (["--tls-cert", "x"], ["--port", "70000"], ["--cors-origin", "*"], ["--budget", "half"]):
        assert main(["serve", *options]) == 2, options
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
