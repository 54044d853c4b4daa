"""The command ``snapstream serve`` as a process, with the tiny model and its engine process: answer, drain, end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from benchmarks.server_process import ServerProcess, is_running, served
from snapstream.assets import TINY_MODEL
from snapstream.cli import main
from snapstream.config import EngineOptions
from snapstream.server.engine.api import EngineDead, EngineSpec, EngineStats
from snapstream.server.engine.process import EngineProcess
from snapstream.server.http.lifecycle import StartupApp
from snapstream.server.options import ServeOptions, ServerSettings
from snapstream.server.run import serve
from snapstream.server.telemetry import Metrics
from tests.server.app_client import frames
from tests.waiting import HANG_S, HTTP, until

OPTIONS = ["--max-rows", "3", "--budget", "128"]
ENDLESS = 15_000  # tokens


def health(url: str, **headers: str) -> int:
    return HTTP.get(f"{url}/health", headers=headers, timeout=HANG_S).status_code


def test_answer_then_drain(tmp_path: Path) -> None:
    with served([*OPTIONS, "--drain-timeout", str(HANG_S)], tmp_path / "log") as server:
        _answer_then_drain(server)
        text = server.log.read_text()
        assert "loading " in text and "serving tiny at " in text and f"chat page: {server.url}/\n" in text


def _answer_then_drain(server: ServerProcess) -> None:
    url = server.url
    assert health(url, Host="evil.example") == 403  # bound to loopback
    assert health(url) == 200
    body = {"prompt": "word " * 300, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = HTTP.post(f"{url}/v1/completions", json=body, timeout=HANG_S).json()
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"
    report = answer["snapstream"]["prompts"][0]["compression"]
    assert report["kept_tokens"] == 128 < report["prompt_tokens"] == answer["usage"]["prompt_tokens"]

    thread, started, parts = _stream(url, 2000)
    assert started.wait(HANG_S)
    os.kill(server.engine_pid, signal.SIGSTOP)  # the stream goes on when everything else was seen
    server.process.send_signal(signal.SIGTERM)
    until(lambda: health(url) == 503)
    assert HTTP.post(f"{url}/v1/completions", json=body, timeout=HANG_S).status_code == 503
    os.kill(server.engine_pid, signal.SIGCONT)
    thread.join(HANG_S)
    chunks = frames(b"".join(parts).decode())
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(HANG_S) == 0


def test_a_second_signal_ends_at_once_and_in_order(tmp_path: Path) -> None:
    with served([*OPTIONS, "--drain-timeout", str(2 * HANG_S)], tmp_path / "log") as server:
        _, started, parts = _stream(server.url, ENDLESS)
        assert started.wait(HANG_S)
        os.kill(server.engine_pid, signal.SIGSTOP)  # so that the stream cannot end by itself
        server.process.send_signal(signal.SIGTERM)
        until(lambda: health(server.url) == 503)
        server.process.send_signal(signal.SIGTERM)
        os.kill(server.engine_pid, signal.SIGCONT)
        # Not ended by the signal itself, which would skip the engine's shutdown.
        assert server.process.wait(HANG_S) == 0
        assert not is_running(server.engine_pid)


def _stream(url: str, max_tokens: int) -> tuple[threading.Thread, threading.Event, list[bytes]]:
    started, parts = threading.Event(), []

    def read() -> None:
        body: dict[str, Any] = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body, timeout=HANG_S) as response:
            for part in response.iter_raw():
                parts.append(part)
                started.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, started, parts


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_key_is_refused(
    blank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("snapstream.server.run.serve", _must_not_serve)
    assert main(["serve", "--api-key", blank]) == 2
    assert "API key" in capsys.readouterr().err
    monkeypatch.setenv("SNAPSTREAM_API_KEY", blank)
    assert main(["serve"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: SNAPSTREAM_API_KEY is set but blank") and err.count("\n") == 1


def test_keys_of_flags_file_and_environment_add_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[ServerSettings] = []
    monkeypatch.setattr("snapstream.server.run.serve", lambda _, settings, __: given.append(settings))
    file, empty, binary = tmp_path / "keys", tmp_path / "empty", tmp_path / "binary"
    file.write_text("three\n\n four \n")
    empty.write_text("\n")
    monkeypatch.setenv("SNAPSTREAM_API_KEY", "five one")
    assert main(["serve", "--api-key", "one", "--api-key", "two", "--api-key-file", str(file)]) == 0
    assert given[0].api_keys == ("one", "two", "three", "four", "five")
    binary.write_bytes(b"\x89PNG")
    for wrong in (empty, binary, tmp_path / "missing"):
        assert main(["serve", "--api-key-file", str(wrong)]) == 2
        assert str(wrong) in capsys.readouterr().err
    monkeypatch.delenv("SNAPSTREAM_API_KEY")
    assert main(["serve"]) == 0 and given[1].api_keys == ()


def test_a_model_that_cannot_be_loaded_ends_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And before the server says anything else."""
    (tmp_path / "config.json").write_text('{"architectures": ["Other"], "model_type": "other"}')
    for arguments in (["/no/such/folder"], [str(tmp_path)], ["--draft", str(tmp_path / "none")]):
        assert main(["serve", "--port", "0", *arguments]) == 1
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ")


def test_weights_that_cannot_be_loaded_end_the_server_with_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Path(copytree(TINY_MODEL, tmp_path / "tiny"))
    (model / "model.safetensors").write_bytes(b"no weights")
    assert main(["serve", "--port", "0", str(model)]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("time=")] == [lines[-1]] and lines[-1].startswith("error: ")


def _must_not_serve(*_: Any) -> None:
    raise AssertionError("the server was started")


def test_what_follows_from_the_address_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ServerSettings] = []
    monkeypatch.setattr("snapstream.server.run.serve", lambda _, settings, __: given.append(settings))
    for options in ([], ["--host", "0.0.0.0"], ["--host", "::1", "--allowed-host", "my.box"]):
        assert main(["serve", *options]) == 0
    assert [settings.allowed_hosts for settings in given] == [("localhost",), (), ("localhost", "my.box")]
    given.clear()
    for rows, waiting in (("3", "10"), ("3", "0"), ("auto", "10")):
        assert main(["serve", "--max-rows", rows, "--max-waiting", waiting]) == 0
    assert [settings.max_requests > least for settings, least in zip(given, (13, 1000, 256), strict=True)] == [True] * 3


def test_no_vllm_names_reaches_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[ServerSettings] = []
    monkeypatch.setattr("snapstream.server.run.serve", lambda _, given, __: settings.append(given))
    assert main(["serve"]) == main(["serve", "--no-vllm-names"]) == 0
    pages = [Metrics(lambda: "m", EngineStats, has_vllm_names=one.has_vllm_names).render() for one in settings]
    assert [b"\nvllm:" in page for page in pages] == [True, False]
    assert all(b"\nsnapstream:num_requests_running{" in page for page in pages)


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[EngineSpec] = []
    monkeypatch.setattr("snapstream.server.run.serve", lambda spec, *_: specs.append(spec))
    assert main(["serve", "--max-rows", "auto", "--prefill-attention", "reference"]) == 0
    assert main(["serve"]) == 0
    own: dict[str, Any] = {"max_waiting": 128, "prefix_store": "auto"}
    said = EngineOptions(max_rows="auto", prefill_attention="reference", **own)
    assert [spec.options for spec in specs] == [said, EngineOptions(**own)]
    assert main(["serve", "--max-rows", "most"]) == 2


@pytest.mark.parametrize(("host", "keys", "count"), [("0.0.0.0", (), 1), ("0.0.0.0", ("k",), 0), ("127.0.0.1", (), 0)])
def test_an_open_server_on_a_network_is_warned_about(
    host: str,
    keys: tuple[str, ...],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def start(self: EngineProcess) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(EngineProcess, "start", start)
    spec = EngineSpec(model=str(tmp_path))  # without a tokenizer
    with pytest.raises(ValueError, match="no such model"):
        serve(spec, ServerSettings(api_keys=keys), ServeOptions(host=host, port=0))
    assert len([record for record in caplog.records if "no API key" in record.getMessage()]) == count


def test_503_while_anything_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also before the tokenizer, or a draft, has been read: nobody is left to wait for an answer."""
    may_go, ended = threading.Event(), []

    async def start(self: EngineProcess) -> None:
        """Loaded at once."""

    def load(folder: Path) -> None:
        assert may_go.wait(HANG_S)
        raise ValueError("the tokenizer is broken")

    monkeypatch.setattr(EngineProcess, "start", start)
    monkeypatch.setattr("snapstream.server.run.find_tokenizer", load)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def run() -> None:
        spec = EngineSpec(model=str(tmp_path))
        try:
            serve(spec, ServerSettings(), ServeOptions(port=port))
        except ValueError as error:
            ended.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    until(lambda: _listens(port))
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics")):
        answer = httpx.request(method, url + path, timeout=HANG_S)
        assert answer.status_code == 503 and answer.headers["retry-after"] and answer.headers["x-request-id"]
        assert answer.json()["error"]["message"] == "the server is loading"
    for path in ("/health/live", "/health/live/"):  # else a probe would restart what loads
        assert HTTP.get(url + path, timeout=HANG_S).status_code == 200
    assert HTTP.get(url + "/health/ready", timeout=HANG_S).status_code == 503
    may_go.set()
    thread.join(HANG_S)
    assert ended == ["the tokenizer is broken"]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_signal_while_loading_is_kept_for_the_application() -> None:
    class App:
        is_draining = False

    startup, app = StartupApp(1), App()
    asyncio.run(startup.drain(HANG_S))  # nothing runs yet
    startup.is_draining = True
    startup.start(app, app)  # type: ignore[arg-type]
    assert app.is_draining


def test_an_engine_that_dies_while_it_loads_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def start(self: EngineProcess) -> None:
        raise EngineDead("the engine process was killed by SIGKILL")

    monkeypatch.setattr(EngineProcess, "start", start)
    assert main(["serve", "--port", "0"]) == 1
    err = capfd.readouterr().err
    assert [line for line in err.splitlines() if not line.startswith("time=")] == [
        "error: the engine process was killed by SIGKILL"
    ]


def test_a_taken_port_and_bad_options_end_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
        port = taken.getsockname()[1]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: cannot listen at 127.0.0.1 port {port}: the port is in use; choose another with --port"
    )
    assert main(["serve", "--host", "192.0.2.1"]) == 2  # nobody's address
    assert "error: cannot listen at 192.0.2.1 port 8000: Cannot assign" in capsys.readouterr().err
    assert main(["serve", "--host", "no host"]) == 2
    assert "Unknown error" not in (err := capsys.readouterr().err) and "while attempting" not in err
    assert "error: cannot listen at no host port 8000: " in err
    assert main(["serve", "--port", "0", "--tls-cert", __file__, "--tls-key", __file__]) == 2
    assert f"error: --tls-cert {__file__} and --tls-key {__file__} are not a cert" in capsys.readouterr().err
    for options in (
        ["--tls-cert", "x"],
        ["--served-model-name", ""],
        ["--port", "70000"],
        ["--cors-origin", "*"],
        ["--budget", "half"],
        ["--tool-parser", "gpt"],
        ["--chat-template", str(tmp_path / "nowhere")],
    ):
        assert main(["serve", *options]) == 2, options
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
