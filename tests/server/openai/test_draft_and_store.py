"""A draft beside the prefix store, with the models that ship: look up first, trim second, and sticky cuts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.assets.documents import Document, make_document
from snapstream.config import PrefixStoreConfig
from snapstream.llm import LLM
from snapstream.request import SamplingParams
from snapstream.server.app import make_app
from snapstream.server.engine.local import LocalEngine
from snapstream.server.settings import ModelFacts, ServerSettings
from snapstream.spec_prefill.settings import PromptCompression, Protection
from snapstream.spec_prefill.sticky import StickyTrimmer
from snapstream.spec_prefill.text_trimmer import TextTrimmer
from tests.server.fake_engine import FakeEngine
from tests.server.front_client import HI, AppClient, client

STORE = PrefixStoreConfig(num_bytes=2**28, block_len=32, min_tokens=64)
KEEP = {"keep": 0.4}
STICKY = {**KEEP, "sticky": True}
SETTINGS: dict[str, Any] = {
    "budget": "full", "max_rows": 2, "max_model_len": 2048, "chunk_len": 32, "executor": "eager", "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def trimmer() -> TextTrimmer:
    return TextTrimmer(TINY_DRAFT_MODEL, protection=Protection(threshold=300, last_user_limit=200))


@pytest.fixture(scope="module")
def document(trimmer: TextTrimmer) -> Document:
    return make_document(
        family="multi_number", seed="store", count_tokens=trimmer.draft.count_tokens, target_tokens=900,
        num_questions=2,
    )  # fmt: skip


@asynccontextmanager
async def serving(trimmer: TextTrimmer, *keys: str, admin_key: str = "") -> AsyncIterator[AppClient]:
    with LLM(TINY_MODEL, prefix_store=STORE, **SETTINGS) as llm:
        engine = LocalEngine(llm)
        facts = ModelFacts(names=("tiny",), vocab_size=llm.model_config.vocab_size, engine=llm.config)
        settings = ServerSettings(api_keys=keys, admin_key=admin_key)
        async with AppClient(make_app(engine, llm.tokenizer, settings, lambda: facts, trimmer)) as http:
            yield http
            http.front.close()
        await engine.shutdown(0)


async def ask(http: AppClient, messages: list[dict[str, str]], wish: Any, key: str = "") -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "prompt_compression": wish}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def turn_two(messages: list[dict[str, str]], answer: dict[str, Any], document: Document) -> list[dict[str, str]]:
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    return [*messages, said, {"role": "user", "content": document.questions[1].text}]


def test_turn_two_of_a_trimmed_conversation_is_found(trimmer: TextTrimmer, document: Document) -> None:
    """And answered as an engine without a store answers the same trimmed conversation."""
    first = [{"role": "user", "content": document.prompt(document.questions[0])}]

    async def run() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        async with serving(trimmer) as http:
            one = await ask(http, first, STICKY)
            two = await ask(http, turn_two(first, one, document), STICKY)
            return one, two, await ask(http, turn_two(first, one, document), {"keep": 0.41})

    one, two, anew = asyncio.run(run())
    trims = [answer["snapstream"]["prompts"][0]["trim"] for answer in (one, two, anew)]
    assert all(trim["applied"] for trim in trims) and one["snapstream"]["prompt_compression"] == STICKY
    assert cached(one) == 0 and cached(two) > 0.8 * trims[0]["tokens_after"] - 32
    assert cached(anew) < cached(two), "cut anew, hardly anything is found"
    sticky, how = StickyTrimmer(trimmer), PromptCompression(keep=0.4, sticky=True)
    with LLM(TINY_MODEL, **SETTINGS) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        messages = first
        for answer in (one, two):
            short = sticky.trim(messages, how, llm.tokenizer).messages
            assert short is not None
            assert llm.chat(list(short), params)[0].text == answer["choices"][0]["message"]["content"]
            messages = turn_two(first, answer, document)


def test_what_is_stored_is_not_trimmed(trimmer: TextTrimmer, document: Document) -> None:
    messages = [{"role": "user", "content": document.prompt(document.questions[0])}]

    async def run() -> list[dict[str, Any]]:
        async with serving(trimmer, "alice", "bob") as http:
            whole = await ask(http, messages, "off", "alice")
            again = await ask(http, messages, KEEP, "alice")
            other = await ask(http, messages, KEEP, "bob")
            limited = await ask(http, messages, {"max_tokens": 500}, "alice")
            return [whole, again, other, limited]

    whole, again, other, limited = asyncio.run(run())
    trim = again["snapstream"]["prompts"][0]["trim"]
    assert not trim["applied"] and "tokens are in the prefix store" in trim["reason"]
    assert cached(again) > 600 and again["choices"] == whole["choices"]
    assert other["snapstream"]["prompts"][0]["trim"]["applied"], "another key's prompts are not looked at"
    assert limited["snapstream"]["prompts"][0]["trim"]["tokens_after"] <= 500, "a ceiling holds"


def test_sticky_cuts_are_not_shared_between_keys(trimmer: TextTrimmer, document: Document) -> None:
    first = [{"role": "user", "content": document.prompt(document.questions[0])}]
    fresh = TextTrimmer(trimmer.draft, protection=trimmer.protection)  # that remembers no scores of other tests

    async def run() -> tuple[Any, Any]:
        async with serving(fresh, "alice", "bob") as http:
            one = await ask(http, first, STICKY, "alice")
            second = turn_two(first, one, document)
            mine, theirs = [await ask(http, second, STICKY, key) for key in ("alice", "bob")]
            return mine["snapstream"]["prompts"][0]["trim"], theirs["snapstream"]["prompts"][0]["trim"]

    mine, theirs = asyncio.run(run())
    assert mine["draft_ms"] == 0 < theirs["draft_ms"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "some text", "prompt_compression": STICKY}, "sticky is for conversations"),
        ("/v1/chat/completions", {"messages": HI, "prompt_compression": {**KEEP, "sticky": 1}}, "sticky is 1"),
        ("/v1/chat/completions", {"messages": HI, "prompt_compression": {"sticky": True}}, "give exactly one"),
    ],
)
def test_wrong_wishes_are_refused(trimmer: TextTrimmer, path: str, body: dict[str, Any], message: str) -> None:
    async def run() -> Any:
        async with client(FakeEngine(), trimmer) as http:
            return await http.post(path, json=body)

    response = asyncio.run(run())
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "prompt_compression"


def test_the_admin_key_empties_the_store_of_all(trimmer: TextTrimmer, document: Document) -> None:
    messages = [{"role": "user", "content": document.prompt(document.questions[0])}]

    async def run() -> tuple[list[int], list[int]]:
        async with serving(trimmer, "alice", "bob", admin_key="root") as http:
            given = {"Authorization": "Bearer root"}
            found = []
            for _ in range(2):
                found += [cached(await ask(http, messages, "off", key)) for key in ("alice", "bob")]
            codes = [(await http.get("/v1/models", headers=given)).status_code]
            codes += [(await http.post("/reset_prefix_cache", headers={"x-api-key": "roo"})).status_code]
            codes += [(await http.post("/reset_prefix_cache", headers=given)).status_code]
            found += [cached(await ask(http, messages, "off", key)) for key in ("alice", "bob")]
            return found, codes

    found, codes = asyncio.run(run())
    assert codes == [401, 401, 200], "the admin's key opens nothing else"
    assert found[:2] == found[4:] == [0, 0] and min(found[2:4]) > 600


def test_an_admin_key_without_other_keys() -> None:
    async def run() -> FakeEngine:
        engine = FakeEngine()
        async with client(engine, None, admin_key="root") as http:
            assert (await http.post("/reset_prefix_cache")).status_code == 200
            assert (await http.post("/reset_prefix_cache", headers={"x-api-key": "root"})).status_code == 200
        return engine

    one, all_of_them = asyncio.run(run()).resets
    assert one is not None and all_of_them is None
    for wrong in (" root", "a\nb"):
        with pytest.raises(ValueError, match="not printable|has spaces"):
            ServerSettings(admin_key=wrong)
    with pytest.raises(ValueError, match="the admin key is an API key, too"):
        ServerSettings(api_keys=("a", "b"), admin_key="a")
