"""Sockets that misbehave, byte by byte: silent, slow, not reading, ambiguous, too many.

Limits are short here, and nothing else runs: no test asks how fast anything is.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from benchmarks.serving import kept_alive_seconds
from snapstream.server.http.connections import ConnectionGuard, Connections, connections_for
from tests.server.app_server import Running, running_server
from tests.server.fake_engine import ANSWER, FakeEngine
from tests.waiting import HANG_S, until

BODY = {"prompt": "hi", "max_tokens": 64}
LONG = {"prompt": "hi", "max_tokens": 500, "logprobs": 5, "stream": True}  # hundreds of kilobytes


@contextmanager
def connected(server: Running, *, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as client:
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(HANG_S)
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1].removesuffix("/v1"))))
        yield client


def post(body: dict[str, Any], *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/{version}", "Host: t", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + data


def read_all(client: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_until(client: socket.socket, mark: bytes) -> bytes:
    read = b""
    while mark not in read:
        part = client.recv(65536)
        assert part, read
        read += part
    return read


def guard(
    head_timeout_s: float = HANG_S, write_timeout_s: float = HANG_S, most_per_address: int = 1000
) -> ConnectionGuard:
    return ConnectionGuard(
        head_timeout_s=head_timeout_s,
        write_timeout_s=write_timeout_s,
        connections=Connections(1000, most_per_address),
    )


class Watched(ConnectionGuard):
    """Notes what the server writes to its connections, piece by piece, and their sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.sockets: list[Any] = []

    def protocol(self) -> type[asyncio.Protocol]:
        watch = self

        class Transport:
            def __init__(self, inner: asyncio.Transport) -> None:
                self._inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def write(self, data: bytes) -> None:
                if data:
                    watch.writes.append(bytes(data))
                self._inner.write(data)

        class Bound(super().protocol()):  # type: ignore[misc]
            def connection_made(self, transport: asyncio.Transport) -> None:
                watch.sockets.append(transport.get_extra_info("socket"))
                super().connection_made(Transport(transport))

        return Bound


def test_responses_on_a_kept_alive_connection_wait_for_no_ack() -> None:
    """A second small write waits for the client's delayed ACK, 40 ms, unless TCP_NODELAY is set."""
    with running_server(guard=(own := Watched())) as server, connected(server) as client:
        for _ in range(2):
            client.sendall(post(BODY))
            assert ANSWER.encode() in read_until(client, b"}}")
        (peer,) = own.sockets
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert len(own.writes) == 2, "a head and its body are one write"
        own.writes.clear()
        client.sendall(post({**BODY, "stream": True}))
        read_until(client, b"\r\n0\r\n\r\n")
        assert own.writes[0].startswith(b"HTTP/1.1 200") and b"data: {" in own.writes[0]


def test_the_benchmark_measures_requests_on_one_connection() -> None:
    with (
        running_server(guard=(own := Watched())) as server,
        closing(HTTPConnection(urlsplit(server.url).netloc)) as connection,
    ):
        assert all(kept_alive_seconds(connection, [3, 4, 5], 2) > 0 for _ in range(3))
        assert len(own.sockets) == 1


def test_the_head_of_a_stream_does_not_wait_for_its_body() -> None:
    async def late(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def main() -> bytes:
        make = ConnectionGuard().protocol()
        config, state = uvicorn.Config(late, lifespan="off", log_config=None), ServerState()
        async with await asyncio.get_running_loop().create_server(lambda: make(config, state, {}), "127.0.0.1") as own:
            reader, writer = await asyncio.open_connection(*own.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
            writer.transport.abort()
            for task in state.tasks:
                task.cancel()
            return head

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200")


def test_a_silent_and_a_slow_head_end_the_connection() -> None:
    with running_server(guard=(own := guard(head_timeout_s=0.2))) as server:
        with connected(server) as silent:
            assert read_all(silent) == b""
        assert own.closed["silent"] == 1
        with connected(server) as slow:
            trickle(slow, b"GET /health HTTP/1.1\r\nHost: t\r\nX: ")
        own.head_timeout_s = HANG_S  # for a first request, however late this thread is with it
        with connected(server) as second:
            second.sendall(b"GET /version HTTP/1.1\r\nHost: t\r\n\r\n")
            assert read_until(second, b"}").startswith(b"HTTP/1.1 200")
            own.head_timeout_s = 0.2  # the next request of a connection has the limit, too
            second.sendall(b"GET /version HT")
            assert read_all(second) == b""
        assert own.closed["slow_head"] >= 1 and own.closed["slow_head"] + own.closed["silent"] == 3
        until(lambda: len(own.connections) == 0)


def trickle(client: socket.socket, beginning: bytes) -> None:
    """Byte by byte, for far longer than any limit here: only the server can end this."""
    with pytest.raises(OSError):
        client.sendall(beginning)
        for _ in range(10_000):
            client.sendall(b"x")
            time.sleep(0.02)


def test_a_body_that_nobody_wants_does_not_trickle_on() -> None:
    with running_server("key", guard=(own := guard())) as server, connected(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000\r\n\r\nx")
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 401")
        own.head_timeout_s = 0.2
        trickle(client, b"x")
        assert own.closed["slow_head"] == 1


def test_a_request_that_takes_its_time_is_not_silent() -> None:
    """The limit is on the head, not on the answer."""
    engine = FakeEngine(hang_after=2)
    with running_server(engine=engine, guard=guard(head_timeout_s=0.5)) as server:
        while True:  # until a request came in time
            with connected(server) as client:
                try:
                    client.sendall(post({**BODY, "stream": True}, "Connection: close"))
                    read_until(client, b"data: ")
                except (AssertionError, OSError):
                    continue
                until(engine.hanging.is_set)
                with connected(server) as silent:  # one that came later ends by the limit
                    assert read_all(silent) == b""
                engine.released.set()
                assert read_all(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                return


def test_who_never_reads_loses_the_connection_and_the_row() -> None:
    engine = FakeEngine(answer="many words " * 400)
    with (
        running_server(engine=engine, guard=(short := guard(write_timeout_s=0.3))) as server,
        connected(server, receive_bytes=4096) as client,
    ):
        client.sendall(post(LONG))
        until(lambda: engine.aborted)
        assert engine.num_running == 0 and short.closed["not_reading"] == 1
        assert engine.generated < 500, "it ended long before the answer did"


def test_who_reads_slowly_is_served() -> None:
    engine = FakeEngine(answer="many words " * 400)
    with (
        running_server(engine=engine, guard=(short := guard(write_timeout_s=HANG_S))) as server,
        connected(server, receive_bytes=4096) as client,
    ):
        client.sendall(post(LONG, "Connection: close"))
        until(lambda: engine.generated > 100)
        assert read_all(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert short.closed["not_reading"] == 0 and engine.aborted == []


def test_who_closes_a_half_has_left() -> None:
    engine = FakeEngine(hang_after=3)  # nothing is sent that could fail
    with running_server(engine=engine) as server, connected(server) as client:
        client.sendall(post({**BODY, "stream": True}))
        until(engine.hanging.is_set)
        read_until(client, b"data: ")
        client.shutdown(socket.SHUT_WR)
        until(lambda: engine.aborted)
        assert engine.num_running == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_left_altogether_frees_its_row(stream: bool, version: str) -> None:
    engine = FakeEngine(hang_after=0)  # before the first byte of an answer: nothing is sent that could fail
    with running_server(engine=engine) as server:
        with connected(server) as client:
            client.sendall(post({**BODY, "stream": stream}, version=version))
            until(engine.hanging.is_set)
        until(lambda: engine.aborted)
        assert engine.num_running == 0


def test_two_lengths_are_refused_and_nothing_is_smuggled() -> None:
    with running_server() as server, connected(server) as client:
        smuggled = b"GET /version HTTP/1.1\r\nHost: t\r\n\r\n"
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
            b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled
        )
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 400") and b'"ambiguous_length"' in answer
        assert answer.count(b"HTTP/1.1") == 1 and b'"version"' not in answer


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9.9 x\r\n\r\n", b"hello\r\n\r\n"])
def test_what_is_no_http_is_refused_in_the_shape_of_errors(junk: bytes) -> None:
    with running_server(guard=(own := guard())) as server, connected(server) as client:
        client.sendall(junk)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "malformed_http"
        assert own.num_malformed == 1


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/v1/models/tiny/"])
def test_trailing_slashes_are_answered(path: str) -> None:
    with running_server() as server, connected(server) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 200") and b"location" not in answer


@pytest.mark.parametrize(("host", "status"), [("", b"200"), ("Host: evil.example\r\n", b"403"), ("Host:\r\n", b"403")])
def test_http_1_0_needs_no_host(host: str, status: bytes) -> None:
    with running_server(allowed_hosts=("localhost",)) as server, connected(server) as client:
        client.sendall(f"GET /health HTTP/1.0\r\n{host}\r\n".encode())
        assert read_all(client).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_offered_upgrade_is_answered_and_logs_no_warning(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    with running_server() as server, connected(server) as client:
        client.sendall(post(BODY, "Connection: Upgrade, close", f"Upgrade: {protocol}"))
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 200") and ANSWER.encode() in answer
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_silence_keeps_nobody_out() -> None:
    """More connections than one address may have, all of it silent, and the next one is answered."""
    with running_server(guard=(own := guard(most_per_address=4))) as server:
        silent = [socket.create_connection(("127.0.0.1", int(server.url.split(":")[2][:-3]))) for _ in range(12)]
        with connected(server) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
            assert read_all(client).startswith(b"HTTP/1.1 200")
        assert own.closed["crowded_out"] >= 8 and own.closed["too_many"] == 0
        for one in silent:
            one.close()
        until(lambda: len(own.connections) == 0)


def test_many_bad_sockets_beside_good_streams() -> None:
    """The soak of ``benchmarks/bad_sockets.py``, short."""
    engine = FakeEngine(answer="many words " * 400)
    with running_server(engine=engine, guard=(own := guard(head_timeout_s=2.0, write_timeout_s=1.0))) as server:
        port = int(server.url.split(":")[2][:-3])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        deaf = []
        for _ in range(40):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", port))
            one.sendall(post(LONG))
            deaf.append(one)
        client = server.client(max_retries=9)  # this thread may be late with a request
        streams = [
            client.completions.create(model="tiny", prompt="hi", max_tokens=200, stream=True, temperature=0)
            for _ in range(4)
        ]
        texts = ["".join(chunk.choices[0].text for chunk in stream if chunk.choices) for stream in streams]
        assert len(set(texts)) == 1 and len(texts[0]) > 200
        until(lambda: engine.num_running == 0)
        until(lambda: own.closed["silent"] >= 40)
        assert own.closed["not_reading"] == len(engine.aborted) == 40
        for one in (*silent, *deaf):
            one.close()
        assert client.models.list().data, "and the server goes on"


class Fake:
    def __init__(self, address: str) -> None:
        self.address, self.is_out = address, False

    def evict(self) -> None:
        self.is_out = True


def test_who_goes_when_there_are_too_many() -> None:
    table = Connections(most=4, most_per_address=2)
    a1, a2, a3, b1, b2, c1 = (Fake(name) for name in "aaabbc")
    assert table.enter(a1) and table.enter(a2)
    table.set_busy(a1)
    assert table.enter(a3) and a2.is_out and not a1.is_out, "the silent one of the same address"
    table.set_busy(a3)
    assert not table.enter(Fake("a")), "all of its address are being answered"
    assert table.enter(b1) and table.enter(b2) and len(table) == 4
    assert table.enter(c1) and b1.is_out, "the one that has been silent the longest, of any address"
    table.set_busy(b2), table.set_busy(c1)
    assert not table.enter(Fake("d"))
    table.set_silent(a1)
    assert table.enter(Fake("d")) and a1.is_out
    for one in (a1, a1, a3, b2, c1):
        table.leave(one)
    assert len(table) == 1


def test_as_many_as_the_files_allow() -> None:
    assert all(connections_for(count).enter(Fake("a")) for count in (1, 64, 256, 65536))
