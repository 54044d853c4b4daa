"""Stored responses: gone on from, read, deleted, cancelled; bounded, and each key's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from snapstream.server.http.errors import ApiError
from snapstream.server.options import ServerSettings
from snapstream.server.responses.protocol import ResponseStore, RunningResponse
from tests.server.app_client import AppClient, error_of
from tests.server.fake_engine import ANSWER, FakeEngine
from tests.server.templates import named_events, prompt_of, template_client
from tests.waiting import until_async

PATH = "/v1/responses"


def run(
    work: Callable[[AppClient, FakeEngine], Awaitable[None]], engine: FakeEngine | None = None, **more: Any
) -> None:
    async def main() -> None:
        own = engine or FakeEngine()
        async with template_client(own, **{"responses_store": 8, **more}) as http:
            await work(http, own)

    asyncio.run(main())


async def create(http: AppClient, text: str, before: str | None = None, key: str = "", **body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    wish = {"input": text, "previous_response_id": before, **body}
    response = await http.post(PATH, json=wish, headers=headers)
    assert response.status_code == 200, response.text
    data: dict[str, Any] = response.json()
    return data


def test_a_conversation_goes_on_from_a_response() -> None:
    async def work(http: AppClient, engine: FakeEngine) -> None:
        first = await create(http, "one", instructions="Be brief.")
        assert first["store"] is True
        second = await create(http, "two", first["id"])
        assert second["previous_response_id"] == first["id"]
        await http.delete(f"{PATH}/{first['id']}")  # the second holds the whole conversation
        await create(http, "three", second["id"])
        want = f"user: one\nassistant: {ANSWER}\nuser: two\nassistant: {ANSWER}\nuser: three\nassistant:"
        assert prompt_of(engine) == want, "instructions are not carried over"

    run(work)


def test_stored_ones_are_read_and_deleted() -> None:
    async def work(http: AppClient, _: FakeEngine) -> None:
        streamed = (await http.post(PATH, json={"input": "hi", "stream": True})).text
        last = named_events(streamed)[-1]["response"]
        path = f"{PATH}/{last['id']}"
        assert (await http.get(path)).json() == last
        assert error_of(await http.get(path, params={"stream": "true"}), 400)["param"] == "stream"
        assert error_of(await http.post(f"{path}/cancel"), 400)["param"] == "response_id"
        assert (await http.delete(path)).json() == {"id": last["id"], "object": "response", "deleted": True}
        for again in (await http.get(path), await http.delete(path), await http.post(f"{path}/cancel")):
            assert error_of(again, 404)["code"] == "response_not_found"
        unstored = await create(http, "hi", store=False)
        assert unstored["store"] is False
        assert (await http.get(f"{PATH}/{unstored['id']}")).status_code == 404
        missing = await http.post(PATH, json={"input": "hi", "previous_response_id": last["id"]})
        assert error_of(missing, 400)["code"] == "previous_response_not_found"

    run(work)


def test_items_are_referred_to() -> None:
    """As the AI SDK does: every item of the assistant by its id, everything else in full."""

    async def work(http: AppClient, engine: FakeEngine) -> None:
        items: list[dict[str, Any]] = []
        lines = []
        for text in ("one", "two", "three"):
            items.append({"role": "user", "content": text})
            answer = await create(http, "", input=items)
            lines.append(f"user: {text}")
            assert prompt_of(engine) == "\n".join([*lines, "assistant:"])
            lines.append(f"assistant: {ANSWER}")
            items += [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]
        assert answer["store"] is True
        items[-1] = {"id": items[-1]["id"]}  # the type may be left out
        await create(http, "", input=[*items, {"role": "user", "content": "four"}])
        unstored = await create(http, "hi", store=False)
        for name in (unstored["output"][0]["id"], "msg_1", 3):
            wish = {"input": [{"type": "item_reference", "id": name}]}
            error = error_of(await http.post(PATH, json=wish), 400)
            assert (error["param"], error["code"]) == ("input", "item_not_found")

    run(work)


def test_the_input_of_a_response_is_listed() -> None:
    async def work(http: AppClient, _: FakeEngine) -> None:
        first = await create(http, "one")
        second = await create(http, "two", first["id"])
        path = f"{PATH}/{second['id']}/input_items"

        async def page(**query: str) -> dict[str, Any]:
            response = await http.get(path, params=query)
            assert response.status_code == 200, response.text
            data: dict[str, Any] = response.json()
            return data

        whole = await page(order="asc")
        assert [item["content"][0]["text"] for item in whole["data"]] == ["one", ANSWER, "two"]
        assert whole["data"][1] == first["output"][0] and whole["has_more"] is False
        names = [item["id"] for item in whole["data"]]
        assert len(set(names)) == 3 and (whole["first_id"], whole["last_id"]) == (names[0], names[2])
        assert [item["id"] for item in (await page())["data"]] == names[::-1], "the last first"
        some = await page(limit="1", after=names[2])
        assert (some["data"][0]["id"], some["has_more"]) == (names[1], True)
        for query in ({"limit": "0"}, {"limit": "9" * 5000}, {"order": "up"}, {"after": "x"}):
            assert error_of(await http.get(path, params=query), 400)["param"] == next(iter(query))
        assert error_of(await http.get(f"{PATH}/resp_1/input_items"), 404)["code"] == "response_not_found"

    run(work)


def test_a_running_response_is_cancelled() -> None:
    async def work(http: AppClient, engine: FakeEngine) -> None:
        streaming = asyncio.create_task(http.post(PATH, json={"input": "hi", "stream": True}))
        await engine.hanging.wait()
        response_id = engine.requests[0].request_id
        path = f"{PATH}/{response_id}"
        assert (await http.get(path)).json()["status"] == "in_progress"
        assert (await http.post(f"{path}/cancel")).json()["status"] == "cancelled"
        last = named_events((await streaming).text)[-1]
        assert last["type"] == "response.incomplete" and last["response"]["status"] == "cancelled"
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert engine.aborted == [response_id] and engine.num_running == 0
        assert (await http.get(path)).json() == last["response"]

    run(work, FakeEngine(hang_after=3))


def test_a_client_that_leaves_stores_nothing() -> None:
    async def work(http: AppClient, engine: FakeEngine) -> None:
        leaving = asyncio.create_task(http.post(PATH, json={"input": "hi"}))
        await engine.hanging.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until_async(lambda: engine.num_running == 0)
        assert (await http.get(f"{PATH}/{engine.requests[0].request_id}")).status_code == 404

    run(work, FakeEngine(hang_after=3))


def test_each_key_sees_its_own() -> None:
    async def work(http: AppClient, _: FakeEngine) -> None:
        mine = await create(http, "one", key="mine")
        path, others = f"{PATH}/{mine['id']}", {"x-api-key": "yours"}
        for response in (await http.get(path, headers=others), await http.delete(path, headers=others)):
            assert error_of(response, 404)["code"] == "response_not_found"
        wish = {"input": "x", "previous_response_id": mine["id"]}
        assert error_of(await http.post(PATH, json=wish, headers=others), 400)["param"] == "previous_response_id"
        assert (await http.get(path, headers={"x-api-key": "mine"})).status_code == 200

    run(work, api_keys=("mine", "yours"))


def test_the_store_is_bounded_in_number_and_bytes() -> None:
    def keep(store: ResponseStore, name: str, text: str, before: str | None = None, owner: bytes = b"") -> None:
        slot = RunningResponse(
            store, owner, store.before(before, owner), [{"role": "user", "content": text, "id": f"i_{name}"}]
        )
        slot.keep({"id": name, "output": []})

    def has_item(store: ResponseStore, name: str, owner: bytes = b"") -> bool:
        try:
            store.resolve([{"type": "item_reference", "id": f"i_{name}"}], owner)
        except ApiError:
            return False
        return True

    store = ResponseStore(2, 10_000)
    for name in ("a", "b", "c"):
        keep(store, name, "x")
    assert len(store) == 2 and store.get("c", b"")["id"] == "c"
    assert [has_item(store, name) for name in "abc"] == [False, True, True]
    keep(store, "c2", "x", "c")
    keep(store, "c3", "x", "c2")
    assert has_item(store, "c") and len(store) == 2, "an item stays as long as a conversation has it"
    keep(store, "y", "x" * 100, owner=b"you")
    assert len(store) == 3 and not has_item(store, "y"), "each key has a number of its own"
    keep(store, "d", "x" * 9_700)
    assert len(store) == 2 and store.num_bytes <= 10_000, "the oldest of the key with most bytes went"
    assert store.get("y", b"you")["id"] == "y" and has_item(store, "y", b"you")
    keep(store, "e", "x" * 400, "d")
    assert store.get("d", b"")["id"] == "d", "what is too large by itself is not kept"
    with pytest.raises(ValueError, match="responses_store is -1"):
        ServerSettings(responses_store=-1)
