"""Stored responses that later requests continue: in memory, bounded, separate for each API key.

A ``RunningResponse`` is one that has not ended. Invariant: never more than ``limit`` responses of one key, nor
``max_bytes`` of conversations of all keys; the oldest of a key are evicted first, for bytes those of the key that has
most. A response holds the whole conversation up to it, so it does not depend on earlier ones. Used on the event loop
only.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.responses.protocol import Item


@dataclass(frozen=True, slots=True)
class Stored:
    response: dict[str, Any]
    items: tuple[Item, ...]  # the conversation with its output
    num_bytes: int  # of the conversation, also what it shares with others


@dataclass(slots=True)
class _KeyStore:
    """The responses of one key."""

    responses: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    items: dict[str, Item] = field(default_factory=dict)  # by id, of all its conversations
    uses: Counter[str] = field(default_factory=Counter)  # how many conversations have an item of that id
    num_bytes: int = 0

    def put(self, response_id: str, stored: Stored) -> None:
        self.responses[response_id] = stored
        self.num_bytes += stored.num_bytes
        for name, item in _named(stored.items):
            self.items.setdefault(name, item)
            self.uses[name] += 1

    def drop(self, response_id: str) -> None:
        stored = self.responses.pop(response_id)
        self.num_bytes -= stored.num_bytes
        for name, _ in _named(stored.items):
            self.uses[name] -= 1
            if not self.uses[name]:
                del self.uses[name], self.items[name]


def _named(items: Sequence[Item]) -> list[tuple[str, Item]]:
    return [(item["id"], item) for item in items if isinstance(item.get("id"), str)]


class RunningResponse:
    """A response from its start: it can be retrieved and cancelled, and is stored at its end."""

    def __init__(self, store: ResponseStore, owner: bytes, before: Stored | None, own: Sequence[Item]) -> None:
        """``own``: the items of the request itself."""
        self._store = store
        self._id = ""
        self._num_bytes = before.num_bytes if before else 0
        self._own = own
        self.inputs = (*(before.items if before else ()), *own)
        self.owner = owner
        self.cancelled = asyncio.Event()
        self.current: Callable[[], dict[str, Any]] = dict

    def open(self, response_id: str, current: Callable[[], dict[str, Any]]) -> None:
        """It has started; ``current`` returns its present state."""
        self._id, self.current = response_id, current
        self._store.add_running(response_id, self)

    def keep(self, response: Mapping[str, Any]) -> None:
        """Store it; it has ended."""
        output = response["output"]
        size = self._num_bytes + len(to_json([*self._own, *output]))
        self._store.put(response, self.owner, Stored(dict(response), (*self.inputs, *output), size))

    def close(self) -> None:
        """It no longer runs, however it ended."""
        self._store.drop_running(self._id)


class ResponseStore:
    """``limit`` 0: nothing is stored."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit, self._max_bytes = limit, max_bytes
        self._by_key: defaultdict[bytes, _KeyStore] = defaultdict(_KeyStore)  # by digest of the key
        self._running: dict[str, RunningResponse] = {}

    @property
    def is_on(self) -> bool:
        return self._limit > 0

    @property
    def num_bytes(self) -> int:
        return sum(own.num_bytes for own in self._by_key.values())

    def __len__(self) -> int:
        return sum(len(own.responses) for own in self._by_key.values())

    def before(self, response_id: str | None, owner: bytes) -> Stored | None:
        """The response that a request continues; 400 if it is not stored."""
        if response_id is None:
            return None
        if not self.is_on:
            message = "previous_response_id needs stored responses, and this server stores none (--responses-store 0)"
            raise bad_value(message, "previous_response_id", "unsupported_parameter")
        found = self._own(response_id, owner)
        if found is None:
            message = f"Previous response with id {response_id!r} not found; the server keeps the last {self._limit}."
            raise bad_value(message, "previous_response_id", "previous_response_not_found")
        return found

    def resolve(self, items: Sequence[Item], owner: bytes) -> list[Item]:
        """Items, with references by id replaced by the stored items; 400 for one that is not stored."""
        return [self._referred(item, index, owner) if _is_reference(item) else item for index, item in enumerate(items)]

    def get(self, response_id: str, owner: bytes) -> dict[str, Any]:
        """Its present state; 404 for one that is unknown, or another key's."""
        running = self._own_running(response_id, owner)
        return self._need(response_id, owner).response if running is None else running.current()

    def inputs(self, response_id: str, owner: bytes) -> tuple[Item, ...]:
        """The conversation that a response answers."""
        running = self._own_running(response_id, owner)
        if running is not None:
            return running.inputs
        found = self._need(response_id, owner)
        return found.items[: len(found.items) - len(found.response["output"])]

    def delete(self, response_id: str, owner: bytes) -> None:
        self._need(response_id, owner)
        self._drop(response_id, owner)

    def put(self, response: Mapping[str, Any], owner: bytes, stored: Stored) -> None:
        if stored.num_bytes > self._max_bytes:  # it would evict all others
            return
        own = self._by_key[owner]
        own.put(response["id"], stored)
        if len(own.responses) > self._limit:
            self._drop(next(iter(own.responses)), owner)
        while self.num_bytes > self._max_bytes:
            most = max(self._by_key, key=lambda name: self._by_key[name].num_bytes)
            self._drop(next(iter(self._by_key[most].responses)), most)

    def add_running(self, response_id: str, running: RunningResponse) -> None:
        self._running[response_id] = running

    def drop_running(self, response_id: str) -> None:
        self._running.pop(response_id, None)

    def cancel(self, response_id: str, owner: bytes) -> dict[str, Any]:
        """Stop a running response. 400 if it has ended, 404 if it is unknown."""
        response, running = self.get(response_id, owner), self._running.get(response_id)
        if running is None:
            raise bad_value(f"Response {response_id!r} has ended; there is nothing to cancel.", "response_id")
        running.cancelled.set()
        return {**response, "status": "cancelled"}

    def _own(self, response_id: str, owner: bytes) -> Stored | None:
        own = self._by_key.get(owner)
        return None if own is None else own.responses.get(response_id)

    def _own_running(self, response_id: str, owner: bytes) -> RunningResponse | None:
        running = self._running.get(response_id)
        return running if running is not None and running.owner == owner else None

    def _need(self, response_id: str, owner: bytes) -> Stored:
        found = self._own(response_id, owner)
        if found is None:
            message = f"Response with id {response_id!r} not found."
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return found

    def _referred(self, item: Item, index: int, owner: bytes) -> Item:
        own, name = self._by_key.get(owner), item.get("id")
        found = own.items.get(name) if own is not None and isinstance(name, str) else None
        if found is None:
            kept = f"the server keeps the last {self._limit} responses" if self.is_on else "the server stores none"
            raise bad_value(f"input[{index}]: item with id {name!r} not found; {kept}", "input", "item_not_found")
        return found

    def _drop(self, response_id: str, owner: bytes) -> None:
        own = self._by_key[owner]
        own.drop(response_id)
        if not own.responses:
            del self._by_key[owner]


def _is_reference(item: Item) -> bool:
    """The type may be omitted."""
    return item.get("type") == "item_reference" or (item.get("type") is None and set(item) == {"id"})
