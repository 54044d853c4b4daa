"""What the page asks of the server and the files it consists of; ``test_browser.py`` has its tests in a browser.

No test here may open a browser: while Playwright's synchronous interface is open, ``asyncio.run`` fails.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from snapstream.assets import TINY_MODEL
from snapstream.cli import main
from snapstream.server.page import FOLDER, INDEX, page_files
from tests.server import app_client
from tests.server.app_client import client, frames
from tests.server.fake_engine import METADATA, FakeEngine, tokenizer
from tests.server.tiny_server import TinyServer, tiny_server
from tests.waiting import HANG_S, HTTP

PROMPT = [3 + (7 * i + i * i % 13) % 250 for i in range(203)]


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with tiny_server({"budget": "full", "max_rows": 2, "max_model_len": 1024}) as running:
        yield running


def ask(server: TinyServer, kept: Any, *, budget: int = 64, stream: bool = False) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": stream}
    body["kv_cache"] = {"budget": budget} if kept is None else {"budget": budget, "return_kept": kept}
    return HTTP.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S)


def compression(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["snapstream"]["prompts"][0]["compression"])


def test_bits_and_positions_tell_the_same(server: TinyServer) -> None:
    answer = ask(server, "bitmap").json()
    cache, report = answer["snapstream"]["kv_cache"], compression(answer)
    assert "kept_positions" not in report and report["kept_tokens"] == 64
    bitmap = report["kept_bitmap"]
    assert {name: bitmap[name] for name in ("num_layers", "num_kv_heads", "num_tokens")} == {
        "num_layers": 4, "num_kv_heads": 2, "num_tokens": 203,
    }  # fmt: skip
    bits, width = b64decode(bitmap["bits"]), (203 + 7) // 8
    assert len(bits) == 8 * width
    positions = compression(ask(server, True).json())["kept_positions"]
    ends = [*range(cache["num_sink"]), *range(203 - cache["num_recent"], 203)]
    for index, head in enumerate(head for layer in positions for head in layer):
        part = bits[index * width : (index + 1) * width]
        assert [t for t in range(203) if part[t // 8] >> (t % 8) & 1] == sorted([*ends, *head])


def test_a_stream_tells_it_once_at_the_end(server: TinyServer) -> None:
    chunks = frames(ask(server, "bitmap", stream=True).text)
    assert ["snapstream" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert compression(chunks[-1])["kept_bitmap"] == compression(ask(server, "bitmap").json())["kept_bitmap"]


@pytest.mark.parametrize(("kept", "budget"), [(None, 64), (False, 64), ("bitmap", 256), (True, 256)])
def test_it_is_there_only_if_asked_for_and_something_was_evicted(kept: Any, budget: int, server: TinyServer) -> None:
    assert not {"kept_bitmap", "kept_positions"} & compression(ask(server, kept, budget=budget).json()).keys()


# The chat page's files and what they are served with.

FILES = [path for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py"]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in FILES}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}


def visit(look: Callable[[httpx.AsyncClient], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with client(FakeEngine(), **settings) as http:
            await look(http)

    asyncio.run(run())


def test_the_page_gets_along_with_this_server_alone() -> None:
    async def look(http: httpx.AsyncClient) -> None:
        for path in ("/", *(f"/page/{name}" for name in page_files())):
            response = await http.get(path)
            assert response.status_code == 200, path
            policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
            assert policy.pop("default-src") == "'none'" and policy["frame-ancestors"] == "'none'"
            assert policy.pop("require-trusted-types-for") == "'script'"
            assert set(policy.values()) <= {"'self'", "'none'"}
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
        assert (await http.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await http.get("/page/app.js")).headers["content-type"] == "text/javascript; charset=utf-8"

    visit(look)


def test_files_are_asked_for_again_but_sent_once() -> None:
    async def look(http: httpx.AsyncClient) -> None:
        for path in ("/", "/page/style.css"):
            first = await http.get(path)
            assert first.headers["cache-control"] == "no-cache"
            etag = first.headers["etag"]
            for known in (etag, f"W/{etag}", f'"other", {etag}'):
                again = await http.get(path, headers={"If-None-Match": known})
                assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == etag
            assert (await http.get(path, headers={"If-None-Match": '"other"'})).status_code == 200
            head = await http.head(path)
            assert head.status_code == 200 and head.headers["etag"] == etag

    visit(look)


def test_nothing_else_lies_under_the_page() -> None:
    async def look(http: httpx.AsyncClient) -> None:
        for path in (
            "/page/",
            "/page/other.js",
            "/page/routes.py",
            "/page/..%2Fapp.py",
            "/page/%2e%2e/app.py",
            "/index.html",
        ):
            response = await http.get(path)
            assert response.status_code == 404 and response.json()["error"], path

    visit(look)


def test_the_page_is_open_and_what_computes_is_not() -> None:
    async def look(http: httpx.AsyncClient) -> None:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/page/app.js")).status_code == 200
        assert (await http.get("/v1/page/example")).status_code == 401
        assert (await http.get("/v1/models")).status_code == 401

    visit(look, api_keys=("secret",))


def test_the_page_can_be_left_out() -> None:
    async def look(http: httpx.AsyncClient) -> None:
        for path in ("/", "/page/app.js", "/v1/page/example"):
            assert (await http.get(path)).status_code == 404, path

    visit(look, has_page=False)


def test_the_command_can_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("snapstream.server.run.serve", lambda _, settings, __: seen.append(settings.has_page))
    assert main(["serve"]) == 0 and main(["serve", "--no-page"]) == 0
    assert seen == [True, False]


def test_no_file_names_another_host_or_makes_html_of_text() -> None:
    assert {INDEX, "app.js", "style.css"} <= TEXTS.keys() == page_files().keys()
    namespaces = "http://www.w3.org/2000/svg"
    for name, text in TEXTS.items():
        assert not re.search(r"(https?:)?//[a-z0-9]", text.replace(namespaces, "").replace("// ", ""), re.I), name
        assert not re.search(r"@import|url\(", text), name
    for name, text in SCRIPTS.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text
        ), name
        assert "localStorage" not in text and "sessionStorage" not in text and "cookie" not in text, name
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert module in TEXTS, (name, module)
    page = TEXTS[INDEX]
    assert not re.search(r"\son[a-z]+=|\sstyle=|<script(?![^>]*src=)", page)
    for file in re.findall(r'(?:href|src)="(page/[^"]+)"', page):
        assert file.removeprefix("page/") in TEXTS, file


def test_everything_that_takes_input_has_a_name() -> None:
    """Each field stands in a label, or has one of its own."""
    page = TEXTS[INDEX]
    labels = " ".join(re.findall(r"<label.*?</label>", page, re.DOTALL))
    fields = re.findall(r"<(?:input|textarea|select)\b[^>]*>", page)
    assert len(fields) > 10
    for field in fields:
        assert "aria-label=" in field or field in labels, field
    names = set(re.findall(r'id="([^"]+)"', page))
    asked = {name for text in SCRIPTS.values() for name in re.findall(r'(?:\$|getElementById)\("([^"]+)"\)', text)}
    assert asked and asked <= names


def test_the_files_are_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "server/page/*" in project["tool"]["setuptools"]["package-data"]["snapstream"]


def test_limits_for_a_choice_of_budget() -> None:
    async def look(http: httpx.AsyncClient) -> None:
        for path in ("/v1/models", "/v1/models/tiny"):
            answer = (await http.get(path)).json()
            limits = answer.get("data", [answer])[0]["snapstream"]
            assert limits["max_budget"] == 128 and limits["max_rows"] == 4 and limits["has_chat_template"]
            assert limits["max_kept_bits"] == 77 and not limits["has_examples"]
            body = {"prompt": [5] * 200, "kv_cache": {"budget": limits["min_budget"]}}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            body["kv_cache"] = {"budget": limits["min_budget"] - 1}
            assert (await http.post("/v1/completions", json=body)).status_code == 400

    visit(look, max_kept_bits=77)


def test_an_example_is_a_document_with_a_question_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_client, "METADATA", replace(METADATA, model=str(TINY_MODEL)))

    async def look(http: httpx.AsyncClient) -> None:
        seen = set()
        for seed in range(4):
            example = (await http.get("/v1/page/example", params={"tokens": 400, "seed": seed})).json()
            assert example == (await http.get("/v1/page/example", params={"tokens": 400, "seed": seed})).json()
            assert example["fact"] in example["document"] and example["expected"] in example["fact"]
            count = len(tokenizer()(example["document"] + "\n\n" + example["question"])["input_ids"])
            assert 300 < count <= 400
            seen.add(example["document"])
        assert len(seen) == 4
        for query in ("tokens=255", "tokens=513", "tokens=x", "tokens=300&seed=-1", "seed=1000"):
            response = await http.get(f"/v1/page/example?{query}")
            assert response.status_code == 400 and response.json()["error"], query

    visit(look)


def test_an_example_needs_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_client, "METADATA", replace(METADATA, model=str(TINY_MODEL)))

    async def run() -> None:
        async with client(FakeEngine(), max_requests=1) as http:
            server = http.server
            asked = {"tokens": 400}
            server.open_requests.enter()
            response = await http.get("/v1/page/example", params=asked)
            assert response.status_code == 429 and response.headers["retry-after"]
            server.open_requests.leave()
            assert (await http.get("/v1/page/example", params=asked)).status_code == 200
            assert server.open_requests.num_open == 0
            server.is_draining = True
            assert (await http.get("/v1/page/example", params=asked)).status_code == 503

    asyncio.run(run())


def test_other_models_have_no_examples() -> None:
    async def look(http: httpx.AsyncClient) -> None:
        response = await http.get("/v1/page/example", params={"tokens": 400})
        assert response.status_code == 400 and "documents" in response.json()["error"]["message"]

    visit(look)


def test_token_texts_join_to_the_prompt() -> None:
    text = "A 😀 wörld\n\tof <|end|> tokens 1234567."

    async def look(http: httpx.AsyncClient) -> None:
        asked = {"prompt": text, "return_token_texts": True}
        answer = (await http.post("/tokenize", json=asked)).json()
        assert len(answer["token_texts"]) == answer["count"] == len(answer["tokens"])
        assert "".join(answer["token_texts"]) == tokenizer().decode(answer["tokens"]) and text in "".join(
            answer["token_texts"]
        )
        assert "" in answer["token_texts"]  # parts of the emoji, which comes with its last token
        assert "token_texts" not in (await http.post("/tokenize", json={"prompt": text})).json()
        messages = {"messages": [{"role": "user", "content": text}], "return_token_texts": True}
        chat = (await http.post("/tokenize", json=messages)).json()
        assert text in "".join(chat["token_texts"]) and chat["token_texts"][1] == "<|user|>"

    visit(look)
