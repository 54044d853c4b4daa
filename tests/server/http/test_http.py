"""Errors are counted once, by status and reason, whoever gives them; who is turned away leaves a line without a key."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from snapstream.server.http.errors import queue_full
from snapstream.server.http.lifecycle import TextFormatter
from snapstream.server.options import ServerSettings
from snapstream.types import QueueFull
from tests.server.app_client import CHAT, HI, JSON, TEXT, AppClient, call, client, error_of
from tests.server.app_server import running_server
from tests.server.fake_engine import FakeEngine
from tests.server.http.test_connections import LONG, guard, post, read_all
from tests.waiting import HANG_S, until

KEY = {"Authorization": "Bearer sesame"}
FAULTS_CHAT = "/v1/chat/completions"


async def faults(http: AppClient) -> dict[tuple[str, str], float]:
    """Those counted so far, by status and reason."""
    found = {}
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith("snapstream:http_errors_total{"):
            labels, value = line.removeprefix("snapstream:http_errors_total{").split("} ")
            named = dict(pair.split("=") for pair in labels.replace('"', "").split(","))
            if float(value):
                found[named["status"], named["reason"]] = float(value)
    return found


async def _post(http: AppClient, body: Mapping[str, Any], **headers: str) -> int:
    return (await http.post(FAULTS_CHAT, json={"messages": HI, **body}, headers={**KEY, **headers})).status_code


def test_health_polls_during_a_restart_are_no_errors() -> None:
    async def run() -> None:
        async with client(FakeEngine(is_ready=False)) as http:
            response = await http.get("/health")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
            assert response.headers["retry-after"]
            assert await faults(http) == {}
            assert await _post(http, {}) == 503
            assert await faults(http) == {("503", "engine_unavailable"): 1}

    asyncio.run(run())


def test_every_error_is_counted_by_its_reason() -> None:
    async def run() -> None:
        engine = FakeEngine()
        limits: dict[str, Any] = {"max_body_bytes": 2000, "max_open_body_bytes": 4000}
        async with client(engine, api_keys=("sesame",), allowed_hosts=("test",), **limits) as http:
            assert await _post(http, {}) == 200
            assert await faults(http) == {}
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/v1/models", headers={"Authorization": "Bearer no"})).status_code == 401
            assert (await http.get("/health", headers={"Host": "evil"})).status_code == 403
            assert (await http.get("/nowhere")).status_code == 404
            assert await _post(http, {"model": "none"}) == 404
            assert await _post(http, {"temperature": -1}) == 400
            assert await _post(http, {"user": "x" * 3000}) == 413
            assert await _post(http, {}, **{"Content-Type": "text/plain"}) == 400
            engine.refuse = QueueFull("full")
            assert await _post(http, {}) == 429
            engine.refuse = KeyError("a bug")
            assert await _post(http, {}) == 500
            engine.refuse, engine.fail_after = None, 3
            assert await _post(http, {}) == 503
            assert await _post(http, {"stream": True}) == 200, "its error comes within the stream"
            assert await faults(http) == {
                ("401", "invalid_api_key"): 2,
                ("403", "host_not_allowed"): 1,
                ("404", "invalid_request_error"): 1,
                ("404", "model_not_found"): 1,
                ("400", "invalid_request_error"): 1,
                ("413", "request_too_large"): 1,
                ("400", "invalid_content_type"): 1,
                ("429", "queue_full"): 1,
                ("500", "internal_error"): 1,
                ("503", "engine_unavailable"): 2,
            }

    asyncio.run(run())


def test_a_bug_outside_of_the_gate_is_counted_once() -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:

            def breaks() -> None:
                raise KeyError("a bug")

            def busy() -> None:
                raise queue_full("busy", 1)

            http.app.add_api_route("/boom", breaks)
            http.app.add_api_route("/busy", busy)
            assert (await http.get("/boom")).status_code == 500
            assert (await http.get("/busy")).status_code == 429
            assert await faults(http) == {("500", "internal_error"): 1, ("429", "queue_full"): 1}

    asyncio.run(run())


def test_who_is_turned_away_leaves_a_line_without_its_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    secret = "sk-very-secret"

    async def run() -> None:
        async with client(FakeEngine(), api_keys=("sesame",), allowed_hosts=("test",)) as http:
            for headers in ({"Authorization": f"Bearer {secret}"}, {"Authorization": secret}, {}):
                await http.post(FAULTS_CHAT, json={"messages": HI}, headers={**headers, "X-Request-Id": "mine"})
            await http.get("/v1/%0Aevil%20line", headers={"Authorization": f"Bearer {secret}"})
            await http.get("/v1/models", headers={"Host": "evil.example", **KEY})

    asyncio.run(run())
    lines = [TextFormatter().format(record) for record in caplog.records if record.levelno >= logging.WARNING]
    said = [line.split(" level=")[1].split(" request=")[0].removeprefix("WARNING ") for line in lines]
    assert said == [
        "a key was refused",
        *["a request without a key was refused"] * 2,  # one has something else in its place
        "a key was refused",
        "a host name was refused",
    ]
    assert "request=mine path=/v1/chat/completions client=127.0.0.1" in lines[0]
    assert f"path={json.dumps('/v1/' + chr(10) + 'evil line')}" in lines[3] and "\n" not in lines[3]
    assert not any(word in line for line in lines for word in (secret, "sesame", "hi"))


# Who is answered: keys, hosts, origins; and what every answer carries.


def test_bearer_keys_guard_v1_only() -> None:
    async def run() -> None:
        async with client(FakeEngine(), api_keys=("one", "two")) as http:
            for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}):
                response = await http.get("/v1/models", headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
            for key in ("one", "two"):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await http.get("/v1/models", headers=headers)).status_code == 200
                # Clients of Anthropic's API, which may send both.
                for headers in ({"x-api-key": key}, {"x-api-key": key, "Authorization": "Bearer none"}):
                    assert (await http.get("/v1/models", headers=headers)).status_code == 200
            assert (await http.get("/v1/models", headers={"x-api-key": "three"})).status_code == 401
            assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 401
            for path in ("/health", "/metrics", "/version", "/tokenizer_info"):
                assert (await http.get(path)).status_code == 200

    asyncio.run(run())


def test_errors_below_messages_have_anthropic_s_form() -> None:
    async def run() -> None:
        async with client(FakeEngine(), api_keys=("one",), allowed_hosts=("my.box",)) as http:
            host = {"Host": "my.box"}
            for headers, status, kind in (
                (host, 401, "authentication_error"),
                ({"Host": "evil.example"}, 403, "permission_error"),
                ({**host, "x-api-key": "one"}, 404, "not_found_error"),
            ):
                response = await http.get("/v1/messages/nothing", headers=headers)
                body = response.json()
                assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
                assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
                assert response.headers["request-id"] == response.headers["x-request-id"]

    asyncio.run(run())


def test_only_named_hosts_are_answered_where_names_are_given() -> None:
    async def run() -> None:
        async with client(FakeEngine(), allowed_hosts=("localhost", "my.box")) as http:
            for host in ("localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "my.box"):
                assert (await http.get("/v1/models", headers={"Host": host})).status_code == 200, host
            for host in (
                "evil.example",
                "evil.example:8000",
                "localhost.evil.example",
                "127.0.0.1.evil.example",
                "10.0.0.1",
            ):
                response = await http.get("/v1/models", headers={"Host": host})
                assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed"), host
        async with client(FakeEngine()) as http:
            assert (await http.get("/v1/models", headers={"Host": "evil.example"})).status_code == 200

    asyncio.run(run())


def test_cors_only_for_named_origins() -> None:
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }

    async def run() -> None:
        async with client(FakeEngine(), api_keys=("k",), cors_origins=("http://good",)) as http:
            response = await http.options("/v1/models", headers={"Origin": "http://good", **preflight})
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "http://good"
            allowed = response.headers["access-control-allow-headers"].lower()
            assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-lang"))
            response = await http.options("/v1/models", headers={"Origin": "http://evil", **preflight})
            assert "access-control-allow-origin" not in response.headers
            assert (response.status_code, response.json()["error"]["code"]) == (400, "cors_refused")
            private = {"Access-Control-Request-Private-Network": "true"}
            delete = {"Origin": "http://good", "Access-Control-Request-Method": "DELETE"}
            response = await http.options("/v1/responses/resp_1", headers={**delete, **private})
            assert response.status_code == 200, response.text
            assert response.headers["access-control-allow-private-network"] == "true"
            assert "DELETE" in response.headers["access-control-allow-methods"]
            put = {"Origin": "http://good", "Access-Control-Request-Method": "PUT"}
            error = (await http.options("/v1/models", headers=put)).json()["error"]["message"]
            assert "methods: GET" in error and "--cors-origin" not in error
            response = await http.get("/v1/models", headers={"Origin": "http://good"})  # errors are readable, too
            assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "http://good"
        async with client(FakeEngine()) as http:
            response = await http.get("/v1/models", headers={"Origin": "http://good"})
            assert "access-control-allow-origin" not in response.headers

    asyncio.run(run())


def test_head_is_get_without_a_body() -> None:
    """Health checks of proxies ask so."""

    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, api_keys=("k",)) as http:
            for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/nothing", 404)):
                answer = await http.head(path)
                assert (answer.status_code, answer.content) == (status, b""), path
                assert answer.headers["x-request-id"]
            models = {"url": "/v1/models", "headers": {"Authorization": "Bearer k"}}
            assert (await http.head(**models)).headers["content-length"] == str(len((await http.get(**models)).content))
            assert (await http.head("/tokenize")).status_code == 405
            engine.is_ready = False
            answer = await http.head("/health")
            assert (answer.status_code, answer.content) == (503, b"") and answer.headers["retry-after"]

    asyncio.run(run())


def test_settings_refuse_what_would_open_the_server() -> None:
    with pytest.raises(ValueError, match="CORS origin"):
        ServerSettings(cors_origins=("*",))
    with pytest.raises(ValueError, match="API key"):
        ServerSettings(api_keys=("",))


# Bodies: their type and form, and the bounds of one and of all together.


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"temperature": NaN}', b"\xff", b"[" * 10000]
)
def test_bodies_that_are_not_json_objects(body: bytes) -> None:
    error_of(call(TEXT, body), 400)


def test_other_content_types_are_refused() -> None:
    """A page may send these to any server without asking it first."""

    async def run() -> None:
        engine = FakeEngine()
        async with client(engine) as http:
            body = b'{"prompt": "a"}'
            for kind in ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", None):
                headers = {"Origin": "http://evil.example"} | ({"Content-Type": kind} if kind else {})
                for path in (TEXT, CHAT, "/tokenize"):
                    response = await http.post(path, content=body, headers=headers)
                    assert error_of(response, 400)["code"] == "invalid_content_type"
            assert engine.requests == []
            headers = {"Content-Type": "Application/JSON; charset=utf-8"}
            assert (await http.post(TEXT, content=body, headers=headers)).status_code == 200

    asyncio.run(run())


def test_body_limit_declared_and_chunked() -> None:
    big = {"prompt": "x" * 2000}
    error_of(call(TEXT, big, max_body_bytes=1000), 413)

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async def chunked() -> httpx.Response:
        async with client(FakeEngine(), max_body_bytes=1000) as http:
            return await http.post(TEXT, content=pieces(), headers=JSON)

    error_of(asyncio.run(chunked()), 413)


def test_requests_over_the_limit_are_refused_before_their_body_is_read() -> None:
    async def run() -> None:
        engine = FakeEngine(hang_after=1)
        async with client(engine, max_requests=2, retry_after_s=3) as http:
            body = {"prompt": "a", "stream": True}
            taken = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
            while engine.num_running < 2:
                await asyncio.sleep(0)

            async def unread() -> Any:
                raise AssertionError("the body was asked for")
                yield b""

            for path in ("/v1/completions", "/tokenize"):
                response = await http.post(path, content=unread(), headers=JSON)
                assert (response.status_code, response.headers["retry-after"]) == (429, "3")
            engine.released.set()
            assert [response.status_code for response in await asyncio.gather(*taken)] == [200, 200]
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())


def test_open_bodies_are_bounded_together() -> None:
    body = {"prompt": "a", "user": "u" * 600}

    async def run() -> None:
        engine = FakeEngine(hang_after=1)
        async with client(engine, max_body_bytes=1000, max_open_body_bytes=1000) as http:
            taken = asyncio.create_task(http.post("/v1/completions", json={**body, "stream": True}))
            await asyncio.wait_for(engine.hanging.wait(), HANG_S)
            open_requests = http.server.open_requests
            held = open_requests.num_bytes
            assert 600 < held < 1000
            response = await http.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert response.headers["retry-after"] == "1" and "1000 bytes" in response.json()["error"]["message"]
            assert open_requests.num_bytes == held, "what was refused holds nothing"
            engine.released.set()
            assert (await taken).status_code == 200 and open_requests.num_bytes == 0
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())


def test_a_body_that_trickles_is_given_up() -> None:
    async def trickle() -> Any:
        yield b"{"
        await asyncio.sleep(10 * HANG_S)

    async def run() -> None:
        async with client(FakeEngine(), body_timeout_s=0.05) as http:
            response = await asyncio.wait_for(http.post("/v1/completions", content=trickle(), headers=JSON), HANG_S)
            assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")
            assert http.server.open_requests.num_open == 0

    asyncio.run(run())


# One path for keys, routes and logs: with the prefix of a proxy or without it, with a slash at the end or not.

PATHS_KEY = {"Authorization": "Bearer k"}


def test_the_root_path_is_taken_off_once_and_keys_stay_asked_for() -> None:
    async def run() -> None:
        async with client(FakeEngine(), api_keys=("k",), root_path="/llm") as http:
            for path in ("/llm/v1/models", "/v1/models", "/llm/v1/models/", "/llm/v1/models/tiny"):
                assert (await http.get(path, headers=PATHS_KEY)).status_code == 200, path
                assert (await http.get(path)).status_code == 401, path
            for path in ("/llm/llm/v1/models", "/llmx/v1/models", "/LLM/v1/models", "/llm//v1/models"):
                assert (await http.get(path)).status_code in (401, 404), path
                assert (await http.get(path, headers=PATHS_KEY)).status_code == 404, path
            for path in ("/llm/health", "/health/", "/llm/", "/llm"):
                answer = await http.get(path)
                assert answer.status_code == 200 and not answer.history, path
            assert (await http.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]

    asyncio.run(run())


def test_without_one_nothing_is_taken_off() -> None:
    async def run() -> None:
        async with client(FakeEngine(), api_keys=("k",)) as http:
            assert (await http.get("/llm/v1/models", headers=PATHS_KEY)).status_code == 404
            assert (await http.get("/v1/models///", headers=PATHS_KEY)).status_code == 200
            assert (await http.get("/v1/models/")).status_code == 401
            assert "servers" not in (await http.get("/openapi.json")).json()

    asyncio.run(run())


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "/a?b", "/a//b", "/é", "/a%2fb"])
def test_what_no_path_begins_with_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="the root path is"):
        ServerSettings(root_path=path)


# Connection limits over TLS, with a certificate made for the test; skipped without openssl.


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_good_and_bad_clients_over_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        [*make.split(), "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=True, timeout=HANG_S
    )
    context = ssl.create_default_context(cafile=str(certificate))
    engine, own = FakeEngine(answer="many words " * 400), guard()
    with running_server(engine=engine, guard=own, tls=(certificate, key)) as server:
        port = int(server.url.split(":")[2][:-3])
        good = httpx.post(f"https://localhost:{port}/v1/completions", json=LONG, verify=context, timeout=HANG_S)
        assert good.status_code == 200 and good.text.endswith("data: [DONE]\n\n")
        own.write_timeout_s = 0.5
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(("127.0.0.1", port))
            with context.wrap_socket(raw, server_hostname="localhost") as deaf:
                deaf.sendall(post(LONG))
                until(lambda: engine.aborted)
        own.head_timeout_s, own.write_timeout_s = 0.5, HANG_S
        raw = socket.create_connection(("127.0.0.1", port), HANG_S)
        with context.wrap_socket(raw, server_hostname="localhost") as silent:
            assert read_all(silent) == b""
        assert (own.closed["not_reading"], own.closed["silent"], engine.num_running) == (1, 1, 0)
