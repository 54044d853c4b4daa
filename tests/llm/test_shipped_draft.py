"""The draft model that ships: an ordinary Qwen3 checkpoint with its own tokenizer, and it retrieves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from snapstream import LLM, SamplingParams
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.assets.documents import make_document

COUNT, PROMPT_LEN = 12, 1024


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY_DRAFT_MODEL, budget="full", max_rows=12, max_model_len=PROMPT_LEN + 64, progress=False) as engine:
        yield engine


def prompts(llm: LLM, family: str) -> list[tuple[list[int], str]]:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    made = []
    for seed in range(COUNT):
        document = make_document(
            family=family,
            seed=f"draft/{seed}",
            count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            target_tokens=PROMPT_LEN - 24,
        )
        messages = [{"role": "user", "content": document.prompt(document.questions[0])}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        made.append((list(ids), document.questions[0].value))
    return made


def test_greedy_tokens_equal_those_of_transformers(llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_DRAFT_MODEL, dtype=torch.float32).eval()
    assert isinstance(model, Qwen3ForCausalLM)
    asked = prompts(llm, "multi_number")[:4]
    outputs = llm.generate([ids for ids, _ in asked], SamplingParams(max_tokens=24, temperature=0.0))
    for (ids, _), output in zip(asked, outputs, strict=True):
        with torch.inference_mode():
            expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)[0, len(ids) :].tolist()
        got = list(output.token_ids)
        assert got == expected[: len(got)] and expected[len(got) :] in ([], [model.config.eos_token_id])


@pytest.mark.parametrize("family", ["single_words", "multi_number", "kv"])
def test_it_retrieves(llm: LLM, family: str) -> None:
    asked = prompts(llm, family)
    outputs = llm.generate([ids for ids, _ in asked], SamplingParams(max_tokens=24, temperature=0.0))
    right = sum(value in output.text for (_, value), output in zip(asked, outputs, strict=True))
    assert right >= COUNT - 2
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
