"""The model that ships retrieves, and a quarter of its cache is enough where StreamingLLM's quarter is not.

Small counts with wide margins: the measured shares, with standard errors, are in ``MODEL_CARD.md`` and ``evals``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evals.chat import Chat
from evals.score import found
from evals.tasks import Item, make_items
from snapstream import LLM, KVBudget, SamplingParams
from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import FAMILIES
from snapstream.demo import FAMILIES as DEMO_FAMILIES
from snapstream.demo import Arm, run_demo, strip

PROMPT_LEN, COUNT = 1024, 12
ANSWER = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY_MODEL, budget="full", max_rows=12, max_model_len=PROMPT_LEN + 32, progress=False) as engine:
        yield engine


def right(llm: LLM, items: list[Item], budget: KVBudget | None = None) -> int:
    outputs = llm.generate([item.prompt_ids for item in items], ANSWER, budget=budget)
    return sum(all(found(o.text, item.references)) for o, item in zip(outputs, items, strict=True))


@pytest.mark.parametrize("family", ["single_words", "multi_number"])
def test_it_retrieves_and_selection_keeps_what_is_asked(llm: LLM, family: str) -> None:
    items = make_items(Chat(TINY_MODEL), family, COUNT, PROMPT_LEN, seed=7)
    full = right(llm, items)
    assert full >= COUNT - 1
    assert right(llm, items, KVBudget.of(PROMPT_LEN // 4)) >= full - 2
    assert right(llm, items, KVBudget.streaming(PROMPT_LEN // 4)) <= COUNT // 2


def test_answers_end_by_themselves_and_text_round_trips(llm: LLM) -> None:
    item = make_items(Chat(TINY_MODEL), "single_number", 1, 256, seed=1)[0]
    output = llm.generate([item.prompt_ids], ANSWER)[0]
    assert output.finish_reason == "stop" and "<|" not in output.text
    text = "Grüße, 世界 🙂 \\ {}"
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_demo_prints_its_tables_and_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    arms: list[Arm] = run_demo(num_tokens=512, num_questions=3)
    printed = capsys.readouterr().out
    assert [arm.name for arm in arms] == ["full attention", "StreamingLLM 1/4", "SnapStream 1/4", "SnapStream 1/8"]
    for text in ("KV per row", "decode tokens/s", "of 3", "sinks | ", "^"):
        assert text in printed
    assert arms[0].outputs[0].compression is not None and arms[0].outputs[0].compression.evicted_tokens == 0
    assert all(arm.outputs[0].compression.evicted_tokens > 100 for arm in arms[1:])  # type: ignore[union-attr]


def test_strip_is_as_long_as_it_says_and_marks_the_fact() -> None:
    lines = list(strip([0.0] * 500 + [1.0] * 500, range(990, 1000)))
    shaded = [line for line in lines if "|" in line]
    assert len(shaded) == 4 and {len(line) for line in shaded} == {76}
    assert "█" not in shaded[0] and " " not in shaded[3][3:-1] and lines[-1].rstrip().endswith("^")


def test_families_of_the_demo_exist() -> None:
    assert set(DEMO_FAMILIES) <= set(FAMILIES)
