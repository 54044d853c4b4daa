"""Stored prefixes as callers of the server see them: counted in every form of answer, and never another caller's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.assets.documents import Document, make_document
from snapstream.config import PrefixStoreConfig
from snapstream.llm import LLM
from snapstream.server.http.middleware import Namespaces
from snapstream.server.options import ServerSettings
from snapstream.spec_prefill.compressor import PromptCompressor, StickyCompressor
from snapstream.spec_prefill.settings import PromptCompression, Protection
from snapstream.types import SamplingParams
from tests.server.app_client import HI, AppClient, client, frames, samples
from tests.server.fake_engine import FakeEngine
from tests.server.local_engine import local_client

# A draft beside the prefix store, with the models that ship: look up first, compress second, and sticky cuts.

STORE = PrefixStoreConfig(num_bytes=2**28, block_len=32, min_tokens=64)
KEEP = {"keep": 0.4}
STICKY = {**KEEP, "sticky": True}
SETTINGS: dict[str, Any] = {
    "budget": "full", "max_rows": 2, "max_model_len": 2048, "chunk_len": 32, "executor": "eager", "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def compressor() -> PromptCompressor:
    return PromptCompressor(TINY_DRAFT_MODEL, protection=Protection(threshold=300, last_user_limit=200))


@pytest.fixture(scope="module")
def document(compressor: PromptCompressor) -> Document:
    return make_document(
        family="multi_number", seed="store", count_tokens=compressor.draft.count_tokens, target_tokens=900,
        num_questions=2,
    )  # fmt: skip


@asynccontextmanager
async def serving(compressor: PromptCompressor, *keys: str, admin_key: str = "") -> AsyncIterator[AppClient]:
    with LLM(TINY_MODEL, prefix_store=STORE, **SETTINGS) as llm:
        async with local_client(llm, compressor, api_keys=keys, admin_key=admin_key) as http:
            yield http


async def ask(http: AppClient, messages: list[dict[str, str]], compression: Any, key: str = "") -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "prompt_compression": compression}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def turn_two(messages: list[dict[str, str]], answer: dict[str, Any], document: Document) -> list[dict[str, str]]:
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    return [*messages, said, {"role": "user", "content": document.questions[1].text}]


def test_turn_two_of_a_compressed_conversation_is_found(compressor: PromptCompressor, document: Document) -> None:
    """And answered as an engine without a store answers the same compressed conversation."""
    first = [{"role": "user", "content": document.prompt(document.questions[0])}]

    async def run() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        async with serving(compressor) as http:
            one = await ask(http, first, STICKY)
            two = await ask(http, turn_two(first, one, document), STICKY)
            return one, two, await ask(http, turn_two(first, one, document), {"keep": 0.41})

    one, two, anew = asyncio.run(run())
    reports = [answer["snapstream"]["prompts"][0]["prompt_compression"] for answer in (one, two, anew)]
    assert all(report["applied"] for report in reports) and one["snapstream"]["prompt_compression"] == STICKY
    assert cached(one) == 0 and cached(two) > 0.8 * reports[0]["tokens_after"] - 32
    assert cached(anew) < cached(two), "cut anew, hardly anything is found"
    sticky, how = StickyCompressor(compressor), PromptCompression(keep=0.4, sticky=True)
    with LLM(TINY_MODEL, **SETTINGS) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        messages = first
        for answer in (one, two):
            short = sticky.compress(messages, how, llm.tokenizer).messages
            assert short is not None
            assert llm.chat(list(short), params)[0].text == answer["choices"][0]["message"]["content"]
            messages = turn_two(first, answer, document)


def test_what_is_stored_is_not_compressed(compressor: PromptCompressor, document: Document) -> None:
    messages = [{"role": "user", "content": document.prompt(document.questions[0])}]

    async def run() -> list[dict[str, Any]]:
        async with serving(compressor, "alice", "bob") as http:
            whole = await ask(http, messages, "off", "alice")
            again = await ask(http, messages, KEEP, "alice")
            other = await ask(http, messages, KEEP, "bob")
            limited = await ask(http, messages, {"max_tokens": 500}, "alice")
            return [whole, again, other, limited]

    whole, again, other, limited = asyncio.run(run())
    report = again["snapstream"]["prompts"][0]["prompt_compression"]
    assert not report["applied"] and "tokens are in the prefix store" in report["reason"]
    assert cached(again) > 600 and again["choices"] == whole["choices"]
    assert other["snapstream"]["prompts"][0]["prompt_compression"]["applied"], "another key's prompts are not looked at"
    assert limited["snapstream"]["prompts"][0]["prompt_compression"]["tokens_after"] <= 500, "a ceiling holds"


def test_sticky_cuts_are_not_shared_between_keys(compressor: PromptCompressor, document: Document) -> None:
    first = [{"role": "user", "content": document.prompt(document.questions[0])}]
    fresh = PromptCompressor(
        compressor.draft, protection=compressor.protection
    )  # that remembers no scores of other tests

    async def run() -> tuple[Any, Any]:
        async with serving(fresh, "alice", "bob") as http:
            one = await ask(http, first, STICKY, "alice")
            second = turn_two(first, one, document)
            mine, theirs = [await ask(http, second, STICKY, key) for key in ("alice", "bob")]
            return mine["snapstream"]["prompts"][0]["prompt_compression"], theirs["snapstream"]["prompts"][0][
                "prompt_compression"
            ]

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
def test_wrong_options_are_refused(compressor: PromptCompressor, path: str, body: dict[str, Any], message: str) -> None:
    async def run() -> Any:
        async with client(FakeEngine(), compressor) as http:
            return await http.post(path, json=body)

    response = asyncio.run(run())
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "prompt_compression"


def test_the_admin_key_empties_the_store_of_all(compressor: PromptCompressor, document: Document) -> None:
    messages = [{"role": "user", "content": document.prompt(document.questions[0])}]

    async def run() -> tuple[list[int], list[int]]:
        async with serving(compressor, "alice", "bob", admin_key="root") as http:
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
    with pytest.raises(ValueError, match="the admin key is also an API key"):
        ServerSettings(api_keys=("a", "b"), admin_key="a")


DOCUMENT = list(range(40, 240)) * 2  # token ids
CHAT = [{"role": "user", "content": "word " * 300}]
PREFIX_STORE_STORE = PrefixStoreConfig(num_bytes=64 * 2**20, block_len=32, min_tokens=64)


@asynccontextmanager
async def prefix_store_serving(*keys: str) -> AsyncIterator[AppClient]:
    with LLM(TINY_MODEL, budget=128, max_rows=2, max_model_len=1024, chunk_len=32, prefix_store=PREFIX_STORE_STORE,
             progress=False) as llm:  # fmt: skip
        async with local_client(llm, api_keys=keys) as http:
            yield http


def asked(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}


async def prefix_store_cached(http: httpx.AsyncClient, key: str = "", **fields: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await http.post("/v1/completions", json=asked(DOCUMENT, **fields), headers=headers)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_every_form_of_answer_tells_what_was_cached() -> None:
    async def run() -> None:
        async with prefix_store_serving() as http:
            wanted = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            for path, body in (
                ("/v1/completions", asked(DOCUMENT)),
                ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "temperature": 0}),
            ):
                cold = (await http.post(path, json=body)).json()
                warm = (await http.post(path, json=body)).json()
                streamed = frames((await http.post(path, json=body | wanted)).text)
                assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
                expected = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert expected >= 288 and expected % 32 == 0
                assert warm["usage"]["prompt_tokens"] == cold["usage"]["prompt_tokens"]
                assert warm["choices"] == cold["choices"]
                assert warm["snapstream"]["prefix"] == {"cached": expected, "diverged_at": None}
                assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in streamed] == [expected] * 2
            edited = DOCUMENT[:200] + [5] + DOCUMENT[201:]
            two = (await http.post("/v1/completions", json=asked([edited, DOCUMENT]))).json()  # type: ignore[arg-type]
            assert two["usage"]["prompt_tokens_details"]["cached_tokens"] == 192 + 352
            assert two["snapstream"]["prefix"] == {"cached": 192 + 352, "diverged_at": 200}
            totals = samples((await http.get("/metrics")).text)
            for name in ("snapstream", "vllm"):
                queries = totals[f'{name}:prefix_cache_queries_total{{model_name="tiny"}}']
                hits = totals[f'{name}:prefix_cache_hits_total{{model_name="tiny"}}']
                assert queries > hits > 1000
            assert totals['snapstream:prefix_store_blocks_used{model_name="tiny"}'] > 20
            by_origin = {origin: totals[f'snapstream:prefix_hits_total{{model_name="tiny",origin="{origin}"}}']
                         for origin in ("prompt", "answer", "idle")}  # fmt: skip
            assert by_origin == {"prompt": hits, "answer": 0, "idle": 0}

    asyncio.run(run())


def test_keys_and_salts_part_callers() -> None:
    """Pairwise: every one finds its own prompt again, and none that of another."""

    async def run() -> None:
        async with prefix_store_serving("alice", "bob") as http:
            callers: list[dict[str, Any]] = [
                {"key": "alice"},
                {"key": "bob"},
                {"key": "alice", "cache_salt": "s"},
                {"key": "bob", "cache_salt": "s"},
                {"key": "alice", "cache_salt": "ä / \x00"},
                {"key": "alice", "cache_salt": "bob"},
            ]
            assert [await prefix_store_cached(http, **caller) for caller in callers] == [0] * 6
            assert [await prefix_store_cached(http, **caller) for caller in callers] == [352] * 6
            given = {"Authorization": "Bearer alice"}
            assert (await http.post("/reset_prefix_cache")).status_code == 401
            assert (await http.post("/reset_prefix_cache", headers=given)).status_code == 200
            after = [await prefix_store_cached(http, **caller) for caller in callers]
            assert after == [0, 352, 0, 352, 0, 0], "a reset empties the caller's namespaces, and no other"

    asyncio.run(run())


@pytest.mark.parametrize("salt", ["", 3, ["a"], "x" * 5000, True])
def test_wrong_salts_are_refused(salt: Any) -> None:
    async def run() -> httpx.Response:
        async with client(FakeEngine()) as http:
            return await http.post("/v1/chat/completions", json={"messages": HI, "cache_salt": salt})

    response = asyncio.run(run())
    assert response.status_code == 400 and response.json()["error"]["param"] == "cache_salt"


def test_namespaces_are_keyed() -> None:
    """A namespace shows neither key nor salt, and another process has others."""
    names = Namespaces()
    all_of_them = {names.of(b"a"), names.of(b"b"), names.of(b""), names.of(b"a", "x"), names.of(b"b", "x")}
    assert len(all_of_them) == 5 and not any(each == "a" or each == "x" for each in all_of_them)
    assert names.of(b"a", "x").startswith(names.of(b"a") + "/")
    assert names.of(b"a") == names.of(b"a") != Namespaces().of(b"a")
    assert Namespaces(b"s" * 32).of(b"a") == Namespaces(b"s" * 32).of(b"a")


def test_the_log_tells_what_was_cached_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with prefix_store_serving("secret-key") as http:
            given = {"Authorization": "Bearer secret-key"}
            for _ in range(2):
                body = {"messages": CHAT, "max_tokens": 1, "cache_salt": "pepper"}
                assert (await http.post("/v1/chat/completions", json=body, headers=given)).status_code == 200

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    lines = list(answered(caplog.records))
    assert [line["cached_tokens"] > 0 for line in lines] == [False, True]
    assert [line["diverged_at"] for line in lines] == [None, None]
    logged = caplog.text + json.dumps(lines)
    assert not any(word in logged for word in ("word word", "secret-key", "pepper"))


def answered(records: list[logging.LogRecord]) -> Iterator[dict[str, Any]]:
    return (vars(record)["fields"] for record in records if record.getMessage() == "answered")
