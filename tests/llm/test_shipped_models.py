"""The model that ships retrieves, and a quarter of its cache is enough where StreamingLLM's quarter is not.

Small counts with wide margins: the measured shares, with standard errors, are in ``MODEL_CARD.md`` and ``evals``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from evals.chat import Chat
from evals.score import found
from evals.tasks import Item, make_items
from recipes.documents import FAMILIES, make_document
from snapstream import LLM, KVBudget, SamplingParams
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.cli.demo import FAMILIES as DEMO_FAMILIES
from snapstream.cli.demo import Arm, run_demo, strip

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


# The draft model that ships: an ordinary Qwen3 checkpoint with its own tokenizer, and it retrieves.

SHIPPED_DRAFT_COUNT, SHIPPED_DRAFT_PROMPT_LEN = 12, 1024


@pytest.fixture(scope="module")
def shipped_draft_llm() -> Iterator[LLM]:
    with LLM(
        TINY_DRAFT_MODEL, budget="full", max_rows=12, max_model_len=SHIPPED_DRAFT_PROMPT_LEN + 64, progress=False
    ) as engine:
        yield engine


def prompts(shipped_draft_llm: LLM, family: str) -> list[tuple[list[int], str]]:
    tokenizer = shipped_draft_llm.tokenizer
    assert tokenizer is not None
    made = []
    for seed in range(SHIPPED_DRAFT_COUNT):
        document = make_document(
            family=family,
            seed=f"draft/{seed}",
            count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            target_tokens=SHIPPED_DRAFT_PROMPT_LEN - 24,
        )
        messages = [{"role": "user", "content": document.prompt(document.questions[0])}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        made.append((list(ids), document.questions[0].value))
    return made


def test_greedy_tokens_equal_those_of_transformers(shipped_draft_llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_DRAFT_MODEL, dtype=torch.float32).eval()
    assert isinstance(model, Qwen3ForCausalLM)
    asked = prompts(shipped_draft_llm, "multi_number")[:4]
    outputs = shipped_draft_llm.generate([ids for ids, _ in asked], SamplingParams(max_tokens=24, temperature=0.0))
    for (ids, _), output in zip(asked, outputs, strict=True):
        with torch.inference_mode():
            expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)[0, len(ids) :].tolist()
        got = list(output.token_ids)
        assert got == expected[: len(got)] and expected[len(got) :] in ([], [model.config.eos_token_id])


@pytest.mark.parametrize("family", ["single_words", "multi_number", "kv"])
def test_it_retrieves(shipped_draft_llm: LLM, family: str) -> None:
    asked = prompts(shipped_draft_llm, family)
    outputs = shipped_draft_llm.generate([ids for ids, _ in asked], SamplingParams(max_tokens=24, temperature=0.0))
    right = sum(value in output.text for (_, value), output in zip(asked, outputs, strict=True))
    assert right >= SHIPPED_DRAFT_COUNT - 2
    assert all(output.finish_reason == "stop" for output in outputs)


def test_it_is_smaller_and_of_another_family_than_the_first() -> None:
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (TINY_MODEL, TINY_DRAFT_MODEL)]
    assert sizes[1] < 0.75 * sizes[0] < 4_000_000
    first, draft = (AutoTokenizer.from_pretrained(folder) for folder in (TINY_MODEL, TINY_DRAFT_MODEL))
    assert len(first) != len(draft)
    assert not set(first.all_special_tokens) & set(draft.all_special_tokens)
    messages = [{"role": "user", "content": "hi"}]
    rendered = draft.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\n hi<|im_end|>\n<|im_start|>assistant\n"
