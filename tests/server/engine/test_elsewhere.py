"""Who is asked to read a prompt, and asked again: by what the engine and the readers say, without either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from snapstream.engine.messages import Reissue, ToEngine
from snapstream.engine.transfers import RowMissed, TicketIssued
from snapstream.request import Request, RowTicket, SamplingParams
from snapstream.server.engine.api import EngineDead
from snapstream.server.engine.elsewhere import MAX_RETRIES, Elsewhere, ReadFailed
from snapstream.server.engine.prefill_servers import check_urls
from snapstream.transfer.proof import digest_of, has_digest, proof_of


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
    shunned: list[str] = field(default_factory=list)
    is_closed: bool = False

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        return min(self.names, key=lambda name: (name in tried, name))

    async def read(self, name: str, request: Request, ticket: RowTicket) -> None:
        self.asked.append((name, ticket.key))
        self.ends[ticket.key] = asyncio.get_running_loop().create_future()
        await self.ends[ticket.key]

    def shun(self, name: str) -> None:
        self.shunned.append(name)

    async def close(self) -> None:
        self.is_closed = True


class Desk:
    """An ``Elsewhere``, with what it said to the engine and to callers."""

    def __init__(self) -> None:
        self.readers = Readers()
        self.sent: list[ToEngine] = []
        self.failed: list[tuple[str, Exception]] = []
        self.elsewhere = Elsewhere(self.readers, lambda name, error: self.failed.append((name, error)))

    async def issue(self, number: int, name: str = "a") -> None:
        self.elsewhere.deliver(TicketIssued(name, ticket(number)), self.sent.append)
        await settle()

    async def miss(self, number: int, name: str = "a") -> None:
        self.elsewhere.deliver(RowMissed(name, ticket(number).key, "cut"), self.sent.append)
        await settle()

    async def fail(self, number: int) -> None:
        self.readers.ends[ticket(number).key].set_exception(ReadFailed("it broke"))
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
    assert desk.readers.shunned == ["x", "y"]
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


def test_a_request_that_nobody_can_be_asked_for_is_the_callers_fault() -> None:
    async def scene(desk: Desk) -> None:
        await desk.issue(1)
        desk.readers.ends[ticket(1).key].set_exception(ValueError("selector 'own' is not in SELECTORS"))
        await settle()

    desk = played(scene)
    assert [str(error) for _, error in desk.failed] == ["selector 'own' is not in SELECTORS"]


def test_addresses_of_servers() -> None:
    assert check_urls(["http://127.0.0.1:1/", "https://far:2"]) == ("http://127.0.0.1:1", "https://far:2")
    for wrong in ("far:1", "http://far", "https://user@far", "https://far/?a=1"):
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
