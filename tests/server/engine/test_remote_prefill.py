"""Who is asked to read a prompt, and asked again: by what the engine and the readers say, without either."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from snapstream.config import KVBudget
from snapstream.disaggregation.protocol import TransferSettings, digest_of, has_digest, proof_of
from snapstream.engine.core import TicketIssued
from snapstream.engine.worker import Reissue, ToEngine
from snapstream.server.app import make_app
from snapstream.server.engine.api import EngineDead, ModelMetadata
from snapstream.server.engine.remote_prefill import (
    MAX_RETRIES,
    PrefillFailed,
    PrefillServers,
    RemotePrefills,
    check_urls,
)
from snapstream.server.options import ServerSettings
from snapstream.step import KVTransferFailed
from snapstream.types import Request, RowTicket, SamplingParams
from tests.disaggregation.rows import SECRET
from tests.server.app_server import running_server
from tests.server.fake_engine import METADATA, FakeEngine


def request(name: str = "a") -> Request:
    return Request(request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams())


def ticket(number: int) -> RowTicket:
    return RowTicket(host="127.0.0.1", port=1, key=f"{number:032x}")


@dataclass
class Readers:
    """Names them in turn, first those that were not tried; ``read`` waits until the test says how it ends."""

    names: tuple[str, ...] = ("x", "y")
    asked: list[tuple[str, str]] = field(default_factory=list)  # reader, key
    ends: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # by key
    avoided: list[str] = field(default_factory=list)
    is_closed: bool = False

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        return min(self.names, key=lambda name: (name in tried, name))

    async def prefill(self, name: str, request: Request, ticket: RowTicket) -> None:
        self.asked.append((name, ticket.key))
        self.ends[ticket.key] = asyncio.get_running_loop().create_future()
        await self.ends[ticket.key]

    async def check(self) -> None: ...

    def avoid(self, name: str) -> None:
        self.avoided.append(name)

    async def close(self) -> None:
        self.is_closed = True


class Desk:
    """An ``RemotePrefills``, with what it said to the engine and to callers."""

    def __init__(self) -> None:
        self.readers = Readers()
        self.sent: list[ToEngine] = []
        self.failed: list[tuple[str, Exception]] = []
        self.elsewhere = RemotePrefills(self.readers, lambda name, error: self.failed.append((name, error)))

    async def issue(self, number: int, name: str = "a") -> None:
        self.elsewhere.deliver(TicketIssued(name, ticket(number)), self.sent.append)
        await settle()

    async def miss(self, number: int, name: str = "a") -> None:
        self.elsewhere.deliver(KVTransferFailed(name, ticket(number).key, "cut"), self.sent.append)
        await settle()

    async def fail(self, number: int) -> None:
        self.readers.ends[ticket(number).key].set_exception(PrefillFailed("it broke"))
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def played(scene: Callable[[Desk], Awaitable[None]]) -> Desk:
    async def main() -> Desk:
        desk = Desk()
        desk.elsewhere.begin(request())
        await scene(desk)
        await desk.elsewhere.close()
        await settle()
        return desk

    desk = asyncio.run(main())
    assert desk.readers.is_closed and all(end.done() for end in desk.readers.ends.values())
    return desk


def test_another_reader_is_asked_and_each_loss_counts_once() -> None:
    async def scene(desk: Desk) -> None:
        await desk.issue(1)
        await desk.fail(1)
        await desk.miss(1)  # the engine says the same a moment later
        await desk.issue(2)
        await desk.miss(2)  # a reader that hangs is not waited for
        assert desk.readers.ends[ticket(2).key].cancelled()
        await desk.issue(3)

    desk = played(scene)
    assert desk.sent == [Reissue("a", ticket(1).key), Reissue("a", ticket(2).key)]
    assert desk.readers.asked == [("x", ticket(1).key), ("y", ticket(2).key), ("x", ticket(3).key)]
    assert desk.readers.avoided == ["x", "y"]
    assert not desk.failed


def test_a_request_ends_when_its_row_is_lost_too_often() -> None:
    async def scene(desk: Desk) -> None:
        for number in range(MAX_RETRIES + 1):
            await desk.issue(number)
            await desk.fail(number)
        await desk.issue(9)  # so no row came

    desk = played(scene)
    assert len(desk.readers.asked) == MAX_RETRIES + 1 == 3
    ((name, error),) = desk.failed
    assert name == "a" and isinstance(error, EngineDead) and "it broke" in str(error) and not error.is_final


def test_the_engine_decides_whether_a_row_came() -> None:
    """The last reader says that it failed, but the row was whole: no ticket follows, and nothing fails."""

    async def scene(desk: Desk) -> None:
        for number in range(MAX_RETRIES + 1):
            await desk.issue(number)
            await desk.fail(number)

    desk = played(scene)
    assert not desk.failed and len(desk.sent) == MAX_RETRIES + 1


def test_a_request_that_ends_leaves_nobody_reading() -> None:
    async def scene(desk: Desk) -> None:
        await desk.issue(1)
        with pytest.raises(ValueError, match="is in use"):
            desk.elsewhere.begin(request())
        desk.elsewhere.end("a")
        await settle()
        assert desk.readers.ends[ticket(1).key].cancelled()
        await desk.miss(1)
        await desk.issue(2)
        desk.elsewhere.begin(request())  # the id is free

    desk = played(scene)
    assert not desk.sent and not desk.failed and len(desk.readers.asked) == 1


def test_a_reader_that_sent_a_row_is_heard_out() -> None:
    """The answer was short: it ended before the reader could say that the row had gone."""

    async def scene(desk: Desk) -> None:
        for number in range(3):
            await desk.issue(number)
            desk.elsewhere.end("a", has_row=True)
            await settle()
            assert not desk.readers.ends[ticket(number).key].done()
            desk.elsewhere.begin(request())
        desk.readers.ends[ticket(0).key].set_result(None)
        await desk.fail(1)  # of a request that is over: the next of that name has nothing to do with it

    desk = played(scene)
    assert desk.readers.ends[ticket(2).key].cancelled(), "by the end of the server"
    assert not desk.sent and not desk.failed and not desk.readers.avoided


ROWS = {"dtype": "float32", "version": "1"}


def metadata_of(max_model_len: int = 512, slots: int = 128, **rows: str) -> ModelMetadata:
    config = replace(METADATA.engine, max_model_len=max_model_len, budget=KVBudget.of(slots))
    return replace(METADATA, engine=config, transfer_fingerprint={**ROWS, **rows})


@contextmanager
def prefill_server(engine: FakeEngine | None = None) -> Iterator[str]:
    """Its address."""
    fields: dict[str, Any] = {"role": "prefill", "transfer_secret": SECRET, "metadata": metadata_of()}
    with running_server(engine=engine, **fields) as server:
        yield server.url.removesuffix("/v1")


def checked(*urls: str, metadata: ModelMetadata | None = None, secret: bytes = SECRET) -> str:
    """What a check of these servers says, and of which kind it is."""

    async def main() -> str:
        own = PrefillServers(urls, TransferSettings(secret=secret), lambda: metadata or metadata_of())
        try:
            await own.check()
        except (PrefillFailed, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            await own.close()
        return ""

    return asyncio.run(main())


def test_a_check_finds_what_would_fail_with_the_first_request() -> None:
    with prefill_server() as url, prefill_server(FakeEngine(is_ready=False)) as loading:
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with running_server() as both:
            other = both.url.removesuffix("/v1")
            assert checked(other) == f"ValueError: {other} is not a server with --role prefill, or runs another version"
        assert checked(url) == checked(nobody, url) == ""
        assert checked(url, metadata=metadata_of(max_model_len=256, slots=64)) == ""
        assert checked(nobody).startswith(f"PrefillFailed: {nobody}: ")
        assert checked(loading) == f"PrefillFailed: {loading} answered 503: the engine is loading"
        assert (
            checked(url, secret=b"another secret of thirty-two bytes")
            == f"ValueError: {url} has another transfer secret"
        )
        unlike = checked(url, metadata=metadata_of(dtype="bfloat16"))
        assert unlike == (
            f"ValueError: {url}: the engines differ: dtype is bfloat16 here and float32 at the prefill server"
        )
        assert "max_model_len is 1,024 here and 512 at" in checked(url, metadata=metadata_of(max_model_len=1024))
        assert "slots is 256 here and 128 at" in checked(url, metadata=metadata_of(slots=256))
        mixed = checked(url, nobody, metadata=metadata_of(dtype="bfloat16"))
        assert mixed.startswith("PrefillFailed: ") and "the engines differ" in mixed  # one may still come that fits


def test_readiness_asks_the_prefill_servers_and_liveness_does_not() -> None:
    async def main() -> None:
        engine = FakeEngine()
        app = make_app(engine, None, ServerSettings(), lambda: METADATA)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            for error in (None, PrefillFailed("http://10.0.0.7 is gone"), ValueError("http://10.0.0.7 differs"), None):
                engine.prefill_problem = error
                for path in ("/health", "/health/ready"):
                    answer = await http.get(path)
                    assert answer.status_code == (200 if error is None else 503)
                    assert "10.0.0.7" not in answer.text, "anybody may ask"
                assert (await http.get("/health/live")).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 413])
def test_what_no_prefill_server_would_take_is_the_callers_fault(status: int) -> None:
    with prefill_server(FakeEngine(refuse=ValueError("the prompt has 600 tokens"))) as url:

        async def main() -> None:
            own = PrefillServers([url], TransferSettings(secret=SECRET), metadata_of)
            long = replace(request(), prompt_token_ids=(1,) * (33 * 2**20 // 2 if status == 413 else 2))
            with pytest.raises(ValueError, match="600 tokens" if status == 400 else "body"):
                await own.prefill(url, long, ticket(1))
            await own.close()

        asyncio.run(main())


def test_a_request_that_nobody_can_be_asked_for_is_the_callers_fault() -> None:
    async def scene(desk: Desk) -> None:
        await desk.issue(1)
        desk.readers.ends[ticket(1).key].set_exception(ValueError("selector 'own' is not in SELECTORS"))
        await settle()

    desk = played(scene)
    assert [str(error) for _, error in desk.failed] == ["selector 'own' is not in SELECTORS"]


def test_addresses_of_servers() -> None:
    assert check_urls(["http://127.0.0.1:1/", "https://far:2"]) == ("http://127.0.0.1:1", "https://far:2")
    for wrong in ("far:1", "http://far", "HTTP://far", "https://user@far", "https://far/?a=1", "https://far:abc",
                  "https://far:99999", "https://far:80 01", "https://far#a"):  # fmt: skip
        with pytest.raises(ValueError, match="--prefill is"):
            check_urls([wrong])


def test_proofs_are_for_one_secret_path_and_body() -> None:
    proof = proof_of(b"secret", "/a", b"body")
    digest = digest_of(b"secret", "/a", proof)
    assert digest is not None and has_digest(b"body", digest) and not has_digest(b"other", digest)
    assert digest_of(b"other", "/a", proof) is None
    assert digest_of(b"secret", "/b", proof) is None
    for wrong in ("", ":", "ab", proof[:-1], "\u00e9:\u00e9"):
        assert digest_of(b"secret", "/a", wrong) is None
