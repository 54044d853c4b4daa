"""The arms of ``evals.prompt_compression`` at equal tokens, and the tables made of stored cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals import prompt_compression, store, tables
from evals import prompt_compression as measured
from evals.chat import Chat
from evals.cuts import Cutters
from evals.tasks import make_items
from snapstream.llm import LLM

ARGS = measured.parse_args(["--num-prompts", "2", "--prompt-len", "512"])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(ARGS.model, budget="full", max_rows=1, max_model_len=600, progress=False) as made:
        yield made


def test_every_arm_stays_below_the_ceiling_and_leaves_what_it_says(llm: LLM) -> None:
    cutters = Cutters(llm, ARGS)
    for family in ("variable", "kv"):
        (document, other) = measured.documents_of(llm, family, ARGS)
        question = f"\n\n{document.questions[0].text}"
        assert document.text != other.text
        for arm in ("truncation", "random", "same_family", "cross_family"):
            for ceiling in (256, 128):
                cut = cutters.apply(arm, document, "0/0", ceiling)
                assert cutters.count(cut.content) <= ceiling, arm
                assert cutters.count(cut.content) > ceiling / 2, "the ceiling was not used"
                delimiter = "" if arm == "truncation" else ARGS.delimiter
                pieces = delimiter.join((document.text + question)[a:b] for a, b in cut.spans)
                assert cut.content in (pieces, pieces + question, pieces + delimiter + question)
                assert cut.content.endswith(question)
                assert (cut.draft_ms > 0) == arm.endswith("family")
        again = cutters.apply("cross_family", document, "0/0", 128)
        assert again == cut, "the same reading serves every ceiling"
        assert cutters.apply("random", document, "0/1", 128) != cutters.apply("random", document, "0/0", 128)
        assert measured.survives(document, cutters.apply("full", document, "0/0", 512).spans)
        start, end = document.questions[0].spans[-1]
        assert not measured.survives(document, ((0, end - 1),)) and not measured.survives(document, ((start + 1, end),))


def test_the_whole_prompts_are_those_of_the_main_table(llm: LLM) -> None:
    """So that its cells can stand for this arm."""
    assert llm.tokenizer is not None
    for family in ("passkey", "paraphrase"):
        documents = measured.documents_of(llm, family, ARGS)
        cuts = [Cutters(llm, ARGS).apply("full", document, "", 512) for document in documents]
        ids = [llm.chat_token_ids([{"role": "user", "content": cut.content}]) for cut in cuts]
        assert ids == [item.prompt_ids for item in make_items(Chat(ARGS.model), family, 2, 512)]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(prompt_compression, "RESULTS", tmp_path / "cells.jsonl")
    monkeypatch.setattr(tables, "arm_cells", lambda: [])

    def add(arm: str, accuracy: float, num_prompts: int = 200, family: str = "kv", **changes: Any) -> None:
        args = measured.parse_args(["--families", family, "--arms", arm, "--parts", "16"])
        args.num_prompts = num_prompts
        (settings,) = measured.cells_of(args)
        settings |= changes
        result = {"accuracy": accuracy, "standard_error": 1.0, "gold_survives": 50.0}
        head = {"device": "d", "torch": "t", "commit": f"c{num_prompts}"}
        store.append(tmp_path / "cells.jsonl", {"settings": settings, **head, "result": result})

    return add


def test_most_prompts_win_fewer_are_marked_and_failing_is_bold(put: Any) -> None:
    put("full", 100.0)
    put("cross_family", 40.0, num_prompts=100)
    put("cross_family", 96.0)
    put("same_family", 94.0, num_prompts=100)
    put("random", 3.0)
    put("cross_family", 11.0, chunk_len=16)  # another setting: not in this table
    text = prompt_compression.compression_table()
    assert "| draft of another family | 128 | 96.0 (50) |" in text and "40.0" not in text and "11.0" not in text
    assert "| the target as its own draft | 128 | **94.0** (50)* |" in text and "(100 where marked *)" in text
    assert "| random chunks | 128 | 3.0 (50) |" in text, "only drafts can fail"
    assert "commit c100, c200" in text


def test_the_table_of_settings_shows_the_default_beside_them(put: Any) -> None:
    put("cross_family", 73.0, family="variable")
    put("cross_family", 99.0, family="kv")  # no other setting of it was measured
    with pytest.raises(ValueError, match="not measured"):
        prompt_compression.settings_table()
    put("cross_family", 98.0, num_prompts=100, family="variable", chunk_len=8)
    text = prompt_compression.settings_table()
    assert "| family | most tokens | prompt | chunks of 32, look-ahead 8 | chunks of 8, look-ahead 8 |" in text
    assert "| variable | 128 | draft of another family | 73.0 (50) | 98.0 (50) |" in text and "kv" not in text
