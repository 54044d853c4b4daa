"""What the proxy must not change on the way, and what must not get through it, byte by byte on real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tests.proxy.test_proxy import LONG, chat, post
from tests.proxy.upstream import Chain, chain
from tests.waiting import HANG_S, until

NOTE = "schön ✓".encode()  # UTF-8, and no Latin-1


@dataclass
class Plain:
    """An upstream that answers everything alike, and remembers what it was asked."""

    targets: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        query = scope["query_string"].decode()
        self.targets.append(scope["raw_path"].decode() + (f"?{query}" if query else ""))
        self.methods.append(scope["method"])
        self.headers.append(dict(scope["headers"]))
        headers = [
            (b"content-type", b"text/plain"),
            (b"content-length", b"2"),
            (b"x-note", NOTE),
            (b"set-cookie", b"who=me"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[Chain, Plain]]:
    upstream = Plain()
    with chain(upstream_app=upstream, upstream_key="theirs", prefix="/tenant/v1") as links:
        yield links, upstream


def ask(
    url: str, method: str, target: str, headers: dict[str, str | bytes] | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """A request whose target and headers are sent as they are."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=HANG_S)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "target",
    ["/v1/../../metrics", "/v1/%2e%2e/%2E%2E/metrics", "/v1/..%2f..%2fmetrics", "/v1/%252e%252e/x", "/v1/..;/x",
     "/v1/a%5C..%5Cx", "/v1/./models", "/v1/.."],
)  # fmt: skip
def test_no_path_leads_out_of_v1(plain: tuple[Chain, Plain], target: str) -> None:
    links, upstream = plain
    upstream.targets.clear()
    answer, body = ask(links.url, "GET", target)
    assert answer.status == 400 and json.loads(body)["error"]["code"] == "invalid_path"
    assert not upstream.targets


@pytest.mark.parametrize(
    "target",
    ["/v1/models/a%3Fb%2Fc", "/v1/models/a%23b?x=%2F..&y={}", "/v1/files//a..b/.c", "/v1/models/%C3%A4%25?q='"],
)
def test_paths_and_queries_travel_as_they_were_written(plain: tuple[Chain, Plain], target: str) -> None:
    links, upstream = plain
    assert ask(links.url, "GET", target)[0].status == 200
    assert upstream.targets[-1] == f"/tenant{target}"
    assert upstream.headers[-1][b"authorization"] == b"Bearer theirs"


@pytest.mark.parametrize("value", [NOTE, "schön".encode("latin-1")])
def test_header_values_are_bytes_in_both_directions(plain: tuple[Chain, Plain], value: bytes) -> None:
    links, upstream = plain
    answer, _ = ask(links.url, "GET", "/v1/models", {"x-mine": value})
    assert answer.status == 200 and upstream.headers[-1][b"x-mine"] == value
    assert answer.headers["x-note"].encode("latin-1", "surrogateescape") == NOTE


def test_the_proxy_asks_for_nothing_that_the_client_did_not(plain: tuple[Chain, Plain]) -> None:
    links, upstream = plain
    ask(links.url, "GET", "/v1/models")
    assert not {b"accept", b"accept-encoding", b"user-agent"} & set(upstream.headers[-1])
    ask(links.url, "GET", "/v1/models", {"accept-encoding": "br", "user-agent": "me"})
    assert (upstream.headers[-1][b"accept-encoding"], upstream.headers[-1][b"user-agent"]) == (b"br", b"me")


def test_cookies_of_one_client_are_not_sent_for_another(plain: tuple[Chain, Plain]) -> None:
    links, upstream = plain
    assert ask(links.url, "GET", "/v1/models")[0].headers["set-cookie"] == "who=me"
    ask(links.url, "GET", "/v1/models")
    assert b"cookie" not in upstream.headers[-1]
    ask(links.url, "GET", "/v1/models", {"cookie": "a=b"})
    assert upstream.headers[-1][b"cookie"] == b"a=b"


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_head_and_options_are_passed_on(plain: tuple[Chain, Plain], method: str) -> None:
    links, upstream = plain
    answer, body = ask(links.url, method, "/v1/models")
    assert answer.status == 200 and upstream.methods[-1] == method
    assert answer.headers["content-length"] == "2" and body == (b"" if method == "HEAD" else b"ok")


def test_an_answer_has_one_date(plain: tuple[Chain, Plain]) -> None:
    links, _ = plain
    assert len(ask(links.url, "GET", "/v1/models")[0].headers.get_all("date") or ()) == 1


def test_bodies_are_bounded_together() -> None:
    with chain(max_body_bytes=1000, max_open_body_bytes=1000) as links:
        links.draft.gate.clear()
        first = threading.Thread(target=post, args=(links, chat(LONG)))
        first.start()
        until(lambda: links.draft.num_calls == 1)
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            answer = post(links, {"input": "x" * 900}, path)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        links.draft.gate.set()
        first.join(HANG_S)
        until(lambda: links.app.state.proxy.open_requests.num_open == 0)
        assert post(links, {"input": "x" * 900}, "/v1/embeddings").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_a_body_that_does_not_come_is_not_waited_for(path: str) -> None:
    with chain(body_timeout_s=0.3) as links:
        host, _, port = urlsplit(links.url).netloc.partition(":")
        with socket.create_connection((host, int(port)), timeout=HANG_S) as trickling:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n["
            )
            trickling.sendall(head.encode())
            assert trickling.recv(4096).startswith(b"HTTP/1.1 408")
        until(lambda: links.app.state.proxy.open_requests.num_open == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_a_body_beyond_its_own_limit_is_refused(path: str) -> None:
    with chain(max_body_bytes=100) as links:
        assert post(links, chat("x" * 200), path).status_code == 413
        answer = httpx.post(
            links.url + path, content=iter([b" " * 200]), headers={"content-type": "application/json"}, timeout=HANG_S
        )
        assert answer.status_code == 413 and not links.seen.bodies
