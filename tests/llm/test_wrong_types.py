"""Wrong Python types are refused by us, with the value and what is expected; arrays and tensors are lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from snapstream.config import EngineConfig, KVBudget
from snapstream.llm import LLM
from snapstream.spec_prefill.compressor import PromptCompressor
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.types import Grammar, SamplingParams

SHORT = SamplingParams(max_tokens=2, temperature=0.0)
HALF = "a\ud800b"
HI = {"role": "user", "content": "hi"}

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"selector": 5}, "selector is 5; it must be a Selector or one of snapkv, hops"),
    ({"selector": "snap"}, "selector is 'snap'; it must be one of snapkv, hops"),
    ({"snapkv": 5}, "snapkv is not a setting of an engine; the settings are"),
    ({"draft_memory": 5}, "draft_memory is 5; it must be a DraftMemory"),
    ({"max_rows": "x"}, "max_rows is 'x'; it must be a whole number"),
    ({"budget": 5.0}, "budget is 5.0; it must be a whole number"),
    ({"budget": None}, "budget is None; it must be a whole number"),
    ({"chunk_len": "x"}, "chunk_len is 'x'; it must be a whole number"),
    ({"device": 5}, "device is 5; it must be 'cpu' or 'cuda'"),
    ({"dtype": []}, r"dtype is \[\]; it must be one of"),
    ({"executor": []}, r"executor is \[\]; it must be"),
    ({"draft": 5}, "the draft's folder is 5; it must be a path"),
    ({"model": 5}, "the model's folder is 5; it must be a path"),
    ({"model": b"x"}, "the model's folder is b'x'; it must be a path"),
    ({"model": "a\0b"}, "no path has a null character"),
]


@pytest.mark.parametrize(("settings", "reason"), SETTINGS, ids=[reason[:30] for _, reason in SETTINGS])
def test_settings(settings: dict[str, Any], reason: str, checkpoint: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        LLM(**{"model": checkpoint, "progress": False, "max_model_len": 64, **settings})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: EngineConfig(budget=5, max_model_len=5), "budget is 5; it must be a KVBudget"),  # type: ignore[arg-type]
        (lambda: KVBudget.of(100, num_sink="x"), "num_sink is 'x'"),  # type: ignore[arg-type]
        (lambda: KVBudget.streaming(100, num_sink="x"), "num_sink is 'x'"),  # type: ignore[arg-type]
        (lambda: Grammar.regex(5), "grammar text is 5; it must be a string"),  # type: ignore[arg-type]
        (lambda: SamplingParams(logit_bias=np.array([5, 6])), r"logit_bias is array\(\[5, 6\]\); it must map"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=b"x"), "stop is b'x'; it must be a list"),  # type: ignore[arg-type]
        (lambda: PromptCompression(keep="x"), "keep is 'x'; it must be a number"),  # type: ignore[arg-type]
    ],
)
def test_parameters(make: Callable[[], object], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        make()


CALLS: list[tuple[Callable[[LLM], object], str]] = [
    (lambda llm: llm.generate(5), "prompts is int 5; it must be a string"),  # type: ignore[arg-type]
    (lambda llm: llm.generate(b"abc"), "prompts is bytes b'abc'"),
    (lambda llm: llm.generate([b"abc"]), "token id is b'abc'"),
    (lambda llm: llm.generate({5}), r"prompts is set \{5\}"),  # type: ignore[arg-type]
    (lambda llm: llm.generate(np.array([5.5])), "token id is 5.5"),  # type: ignore[arg-type]
    (lambda llm: llm.generate(torch.tensor(5)), "prompts is int 5"),  # type: ignore[arg-type]
    (lambda llm: llm.generate(torch.tensor([True])), "token id is True"),  # type: ignore[arg-type]
    (lambda llm: llm.generate(HALF), "prompt holds the lone surrogate '.ud800' at character 1"),
    (lambda llm: llm.generate(["x", HALF]), "prompt 1 holds the lone surrogate"),
    (lambda llm: llm.generate("x", 5), "params is int 5; it must be a SamplingParams"),  # type: ignore[arg-type]
    (lambda llm: llm.generate("x", [5]), r"params is list \[5\]"),  # type: ignore[list-item]
    (lambda llm: llm.generate("x", SHORT, prompt_compression=0.25), "prompt_compression is 0.25; it must be a Prompt"),  # type: ignore[arg-type]
    (lambda llm: llm.chat([HI], SHORT, prompt_compression=0.25), "prompt_compression is 0.25; it must be a Prompt"),  # type: ignore[arg-type]
    (lambda llm: llm.stream("x", SHORT, prompt_compression=5), "prompt_compression is 5"),  # type: ignore[arg-type]
    (lambda llm: llm.generate("x", SHORT, budget=[]), r"budget is \[\]"),  # type: ignore[arg-type]
    (lambda llm: llm.stream(5), "prompts is int 5"),  # type: ignore[arg-type]
    (lambda llm: llm.chat([5]), r"messages\[0\] is int 5; it must be a message with role and content"),  # type: ignore[list-item]
    (lambda llm: llm.chat(["hi"]), r"messages\[0\] is str 'hi'; it must be a message"),  # type: ignore[list-item]
    (lambda llm: llm.chat([HI, 5]), r"messages\[1\] is int 5"),  # type: ignore[list-item]
    (lambda llm: llm.chat([[HI], []]), r"messages\[1\] is list \[\]"),
    (lambda llm: llm.chat([{"role": "user", "content": HALF}]), r"messages\[0\].content holds the lone surrogate"),
    (lambda llm: llm.chat([{**HI, "name": HALF}]), r"messages\[0\].name holds the lone surrogate"),
    (lambda llm: llm.chat_token_ids([[HI], [HI]]), "2 conversations were given; this takes one"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("call", "reason"), CALLS, ids=[re.sub(r"\W+", " ", reason)[:40] for _, reason in CALLS])
def test_calls(call: Callable[[LLM], object], reason: str, llm: LLM) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        call(llm)
    assert not llm.engine.has_work


def test_arrays_and_tensors_are_lists_of_ids(llm: LLM) -> None:
    ids = [40, 50, 60]
    want = llm.generate(ids, SHORT)[0].token_ids
    same: list[Any] = [
        np.array(ids), torch.tensor(ids), tuple(ids), np.array(ids, dtype=np.uint8), [np.int64(i) for i in ids],
        [torch.tensor(i) for i in ids], range(40, 61, 10),
    ]  # fmt: skip
    for prompt in same:
        assert llm.generate(prompt, SHORT)[0].token_ids == want
    for prompts in (np.array([ids, ids]), torch.tensor([ids, ids]), [np.array(ids), torch.tensor(ids)]):
        assert [output.token_ids for output in llm.generate(prompts, SHORT)] == [want] * 2  # type: ignore[arg-type]
    assert next(llm.stream(torch.tensor(ids), SHORT)).prompt_token_ids == tuple(ids)  # type: ignore[arg-type]


def test_arrays_and_tensors_in_parameters() -> None:
    for ids in (np.array([5, 6]), torch.tensor([5, 6]), [torch.tensor(5), np.int32(6)]):
        params = SamplingParams(stop_token_ids=ids)  # type: ignore[arg-type]
        assert params.stop_token_ids == (5, 6) and {type(token) for token in params.stop_token_ids} == {int}
    assert SamplingParams(stop=np.array(["a"])).stop == ("a",)  # type: ignore[arg-type]


DRAFT_CALLS: list[tuple[Callable[[PromptCompressor], object], str]] = [
    (lambda draft: draft.compress(5, keep=0.5), "prompt is int 5; it must be a string"),  # type: ignore[arg-type]
    (lambda draft: draft.compress([5], keep=0.5), r"prompt is list \[5\]"),  # type: ignore[list-item]
    (lambda draft: draft.compress(b"x", keep=0.5), "prompt is bytes"),  # type: ignore[arg-type]
    (lambda draft: draft.compress(HALF, keep=0.5), "prompt holds the lone surrogate"),
    (lambda draft: draft.compress([{**HI, "content": HALF}], keep=0.5), r"messages\[0\].content holds the lone"),
    (lambda draft: draft.compress("x", keep=0.5, query=5), "query is int 5; it must be text"),  # type: ignore[arg-type]
    (lambda draft: draft.compress("x", keep=0.5, target_tokenizer=5), "target_tokenizer is int 5"),  # type: ignore[arg-type]
    (lambda draft: PromptCompressor(5), "the draft's folder is 5"),  # type: ignore[arg-type]
    (lambda draft: PromptCompressor(draft.draft, scoring=5), "scoring is 5; it must be a ScoringSettings"),  # type: ignore[arg-type]
    (lambda draft: PromptCompressor(draft.draft, chunks=5), "chunks is 5; it must be a ChunkSettings"),  # type: ignore[arg-type]
    (lambda draft: PromptCompressor(draft.draft, cache_size="x"), "cache_size is 'x'"),  # type: ignore[arg-type]
]


@pytest.fixture(scope="module")
def draft(checkpoint: Path) -> PromptCompressor:
    return PromptCompressor(checkpoint)


@pytest.mark.parametrize(("call", "reason"), DRAFT_CALLS, ids=[reason[:30] for _, reason in DRAFT_CALLS])
def test_calls_of_a_draft(call: Callable[[PromptCompressor], object], reason: str, draft: PromptCompressor) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        call(draft)


@pytest.mark.parametrize("device", ["nowhere", 5])
def test_a_draft_on_no_device(device: Any, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=f"device {device!r} cannot be used"):
        PromptCompressor(checkpoint, device=device)
