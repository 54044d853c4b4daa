"""Servers of the tiny model that share their work: some read prompts, one answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.server_process import ServerProcess, served
from tests.waiting import HANG_S, HTTP, until

MAX_ROWS = 4
SETTINGS: dict[str, Any] = {
    "budget": 128, "max_rows": MAX_ROWS, "max_model_len": 2048, "executor": "eager", "heads": "none",
}  # fmt: skip
OPTIONS = [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def write_secret(folder: Path, text: str = "a secret of thirty-two characters") -> list[str]:
    """A secret's file, as options of a server."""
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(text)
    return ["--transfer-secret-file", str(file)]


@contextmanager
def running(options: Sequence[Sequence[str]], folder: Path) -> Iterator[list[ServerProcess]]:
    """A server each, started side by side."""
    folder.mkdir()
    with ExitStack() as stack, ThreadPoolExecutor(len(options)) as pool:
        made = [served([*OPTIONS, *own], folder / f"log-{number}") for number, own in enumerate(options)]
        for one in made:
            stack.push(one.__exit__)
        yield list(pool.map(lambda one: one.__enter__(), made))


@contextmanager
def apart(folder: Path) -> Iterator[tuple[ServerProcess, list[ServerProcess]]]:
    """The server that answers, and two that read for it."""
    secret = write_secret(folder)
    with running([["--role", "prefill", *secret]] * 2, folder / "readers") as readers:
        urls = ",".join(reader.url for reader in readers)
        with running([["--role", "decode", "--prefill", urls, *secret]], folder / "answering") as (answering,):
            yield answering, readers


def metric(server: ServerProcess, name: str) -> float:
    lines = HTTP.get(f"{server.url}/metrics", timeout=HANG_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"snapstream:{name}{{"))


def until_at_rest(*servers: ServerProcess) -> None:
    """Every row is free and nobody waits."""
    for server in servers:
        for name in ("num_requests_running", "num_requests_waiting", "rows_used"):
            until(lambda server=server, name=name: metric(server, name) == 0)
        assert metric(server, "rows_free") == MAX_ROWS
