"""Adapters are models of all three APIs: listed with the base, answered in one batch, each in its own words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks.server_process import served
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.config import EngineOptions
from snapstream.llm import LLM
from snapstream.server.app import make_app
from snapstream.server.engine.api import ModelMetadata
from snapstream.server.options import ServeOptions, ServerSettings
from snapstream.server.run import prepare
from snapstream.spec_prefill.compressor import PromptCompressor
from snapstream.spec_prefill.settings import PromptCompression, Protection
from snapstream.types import Grammar, SamplingParams
from tests.parity.test_lora import write_adapter
from tests.server.app_client import AppClient
from tests.server.local_engine import LocalEngine
from tests.waiting import HTTP

NAMES = ("tiny", "poet", "org/lawyer")
ASKED = [{"role": "user", "content": "The code for amber"}]
SETTINGS: dict[str, Any] = {"budget": "full", "max_rows": 12, "max_model_len": 512, "progress": False}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    folder = tmp_path_factory.mktemp("loras")
    return {name: write_adapter(folder / str(seed), model, seed) for seed, name in enumerate(NAMES[1:])}


@pytest.fixture
def llm(adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(TINY_MODEL, loras=adapters, **SETTINGS) as own:
        yield own


def test_all_apis(llm: LLM) -> None:
    """Nine requests at once: three models in each of three APIs, and completions too."""
    params = SamplingParams(max_tokens=12, temperature=0.0)
    chats = {name: llm.chat(ASKED, params, lora="" if name == "tiny" else name)[0].text for name in NAMES}
    texts = {name: llm.generate(["amber"], params, lora="" if name == "tiny" else name)[0].text for name in NAMES}
    assert len(set(chats.values())) == len(set(texts.values())) == 3
    common: dict[str, Any] = {"temperature": 0}

    async def run() -> None:
        engine = LocalEngine(llm)
        facts = ModelMetadata(model="tiny", names=("tiny",), architecture=llm.model_config, engine=llm.config, pid=1)
        async with AppClient(make_app(engine, llm.tokenizer, ServerSettings(), lambda: facts)) as http:
            bodies = [
                (path, common | body | {"model": name})
                for name in NAMES
                for path, body in (
                    ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 12}),
                    ("/v1/completions", {"prompt": "amber", "max_tokens": 12}),
                    ("/v1/responses", {"input": ASKED, "max_output_tokens": 12}),
                    ("/v1/messages", {"messages": ASKED, "max_tokens": 12}),
                )
            ]
            answers = await asyncio.gather(*(http.post(path, json=body) for path, body in bodies))
            for (path, body), answer in zip(bodies, answers, strict=True):
                own, name = answer.json(), body["model"]
                assert answer.status_code == 200 and own["model"] == name, answer.text
                match path:
                    case "/v1/chat/completions":
                        assert own["choices"][0]["message"]["content"] == chats[name]
                    case "/v1/completions":
                        assert own["choices"][0]["text"] == texts[name]
                    case "/v1/responses":
                        assert own["output"][0]["content"][0]["text"] == chats[name]
                    case _:
                        assert own["content"][0]["text"] == chats[name]
            listed = (await http.get("/v1/models")).json()
            assert [(own["id"], own["parent"]) for own in listed["data"]] == [
                ("tiny", None), ("poet", "tiny"), ("org/lawyer", "tiny"),
            ]  # fmt: skip
            assert listed["last_id"] == "org/lawyer"
            assert (await http.get("/v1/models/org/lawyer")).json() == listed["data"][2]
            for path, body in bodies[:4]:
                unknown = await http.post(path, json=body | {"model": "cook"})
                assert unknown.status_code == 404 and "'cook' does not exist" in unknown.text
            http.server.close()
        await engine.shutdown(0)

    asyncio.run(run())


def test_grammars(llm: LLM) -> None:
    """In one batch with free text, each with its adapter."""
    free = SamplingParams(max_tokens=12, temperature=0.0)
    chosen = replace(free, grammar=Grammar.choice(["amber", "granite"]), logprobs=0)
    asked = [(params, lora) for lora in ("", *NAMES[1:]) for params in (free, chosen)]
    requests = [llm.requests(["The code is"], params, lora=lora)[0] for params, lora in asked]
    outputs = llm.answer(requests)
    alone = [llm.generate(["The code is"], params, lora=lora)[0] for params, lora in asked]
    assert [own.token_ids for own in outputs] == [own.token_ids for own in alone]
    assert all(own.text in ("amber", "granite") for own in outputs[1::2])
    assert len({str(own.logprobs) for own in outputs[1::2]}) == 3


def test_the_command(adapters: dict[str, Path], tmp_path: Path) -> None:
    """The engine process has the adapters, too."""
    options = [word for name, folder in adapters.items() for word in ("--lora", f"{name}={folder}")]
    body = {"prompt": "amber", "max_tokens": 8, "temperature": 0}
    with served([*options, "--max-rows", "2", "--served-model-name", "tiny"], tmp_path / "log") as server:
        answers = [HTTP.post(f"{server.url}/v1/completions", json=body | {"model": name}).json() for name in NAMES]
        assert len({own["choices"][0]["text"] for own in answers}) == 3
        assert "LoRA adapters: poet, org/lawyer" in server.log.read_text()


def test_prompt_compression(adapters: dict[str, Path]) -> None:
    """A compressed prompt is answered with the adapter, and what it finds stored is its own."""
    draft = PromptCompressor(TINY_DRAFT_MODEL, protection=Protection(threshold=20, last_user_limit=20))
    how, params = PromptCompression(keep=0.5), SamplingParams(max_tokens=8, temperature=0.0)
    text = "The quiet river runs by the old mill. " * 20
    with LLM(TINY_MODEL, loras=adapters, draft=draft, prefix_store="64MiB", **SETTINGS) as llm:
        given = llm.generate([text], params, lora="poet", prompt_compression=how)[0]
        assert given.prompt_compression is not None and given.prompt_compression.dropped_tokens > 0
        assert llm.generate([list(given.prompt_token_ids)], params, lora="poet")[0].text == given.text
        llm.generate([text], params, lora="org/lawyer")
        for lora, is_whole in (("org/lawyer", True), ("poet", False), ("", False)):
            report = llm.requests([text], params, lora=lora, prompt_compression=how)[0].prompt_compression
            assert report is not None and (report.dropped_tokens == 0) == is_whole


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"served_model_name": ("poet",)}, "the model is served under that name"),
        ({"role": "prefill", "transfer_secret_file": Path("key")}, "engines that transfer KV have no adapters"),
    ],
)
def test_servers_that_do_not_start(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prepare(TINY_MODEL, EngineOptions(loras=("poet=some/folder",)), ServeOptions(**options))
