"""Grammars through the public API, on random weights: whatever the model would say, the text is what was asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from snapstream import LLM, Grammar, KVBudget, SamplingParams
from snapstream.types import FinishReason

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/home"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {"home": {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"],
                       "additionalProperties": False}},
}  # fmt: skip
PERSON = Grammar.json_schema(SCHEMA)
CODE = Grammar.regex("[a-f]{2,6}(-[0-9]{3}){1,2}")
PROMPT = "The quick brown fox jumps over the lazy dog, and then some more, up to the end."
BUDGETS = ["full", KVBudget(num_sink=2, num_topk=8, num_recent=32)]


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "home"]
    assert re.fullmatch("[A-Z][a-z]{1,8}", value["name"]) and 0 <= value["age"] <= 120 and type(value["age"]) is int
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"red", "blue"}
    return set(value["home"]) == {"open"} and isinstance(value["home"]["open"], bool)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "extra",
    [{"temperature": 0.0}, {"temperature": 1.5, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.9, "top_k": 3},
     {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3}, {"ignore_eos": True},
     {"min_tokens": 140}, {"logit_bias": {60: 100.0}}],
)  # fmt: skip
def test_schema_whatever_the_sampling(llm: LLM, extra: dict[str, float], budget: KVBudget | str) -> None:
    params = SamplingParams(grammar=PERSON, max_tokens=150, seed=1, n=2, **extra)  # type: ignore[arg-type]
    output = llm.generate(PROMPT, params, budget=budget)[0]
    num_whole = 0
    for sample in output.samples:
        if sample.finish_reason is FinishReason.STOP:
            assert is_person(sample.text) and sample.stop_reason is None
            num_whole += 1
        else:  # white space took too many of the tokens
            assert sample.finish_reason is FinishReason.LENGTH and len(sample.token_ids) == 150
    assert num_whole


def test_samples_differ_and_the_same_seed_gives_the_same(llm: LLM) -> None:
    params = SamplingParams(grammar=CODE, n=4, seed=3, max_tokens=40)
    first, second = (llm.generate(PROMPT, params)[0] for _ in range(2))
    texts = [sample.text for sample in first.samples]
    assert len(set(texts)) > 1 and texts == [sample.text for sample in second.samples]
    assert all(re.fullmatch(CODE.text, text) for text in texts)


def test_a_complete_text_ends_with_its_last_token(llm: LLM) -> None:
    """Also where that is the last that max_tokens allows: it is whole, not cut."""
    for max_tokens, reason in ((20, "stop"), (6, "stop"), (5, "length")):
        output = llm.generate(PROMPT, SamplingParams(grammar=Grammar.regex("abc-[0-9]{2}"), max_tokens=max_tokens))[0]
        assert output.finish_reason == reason
        assert len(output.token_ids) == len(output.text) == min(6, max_tokens)  # a byte is a token here
    eos = llm.tokenizer.eos_token_id
    assert eos not in output.token_ids


def test_one_token_and_many_at_once(llm: LLM) -> None:
    """The end is seen in the first token, sampled by the prefill."""
    output = llm.generate(PROMPT, SamplingParams(grammar=Grammar.regex("x|y"), max_tokens=9, n=4))[0]
    assert {sample.text for sample in output.samples} <= {"x", "y"}
    assert {sample.finish_reason for sample in output.samples} == {FinishReason.STOP}


def test_stop_strings_and_stop_ids_still_end_it(llm: LLM) -> None:
    params = SamplingParams(grammar=Grammar.regex("[a-c]{30}=[a-c]{30}"), stop="=", max_tokens=80)
    output = llm.generate(PROMPT, params)[0]
    assert output.finish_reason is FinishReason.STOP
    assert output.samples[0].stop_reason == "=" and re.fullmatch("[a-c]{30}", output.text)


def test_a_stop_id_that_the_grammar_needs_does_not_wait_for_min_tokens(llm: LLM) -> None:
    comma = llm.tokenizer.convert_tokens_to_ids(",")
    params = SamplingParams(grammar=Grammar.regex("ab,cd,ef"), stop_token_ids=(comma,), min_tokens=4, max_tokens=20)
    output = llm.generate(PROMPT, params)[0]
    assert (output.text, output.finish_reason) == ("ab,cd", FinishReason.STOP)


def test_logprobs_are_of_the_raw_distribution(llm: LLM) -> None:
    free = llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, ignore_eos=True))[0]
    bound = llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, grammar=CODE))[0]
    assert free.logprobs and bound.logprobs
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].logprob <= free.logprobs[0].logprob


def test_neighbours_do_not_notice(llm: LLM) -> None:
    prompts = [PROMPT[: 10 + 9 * index] for index in range(6)]
    plain = [SamplingParams(max_tokens=30, seed=index, temperature=index % 2, ignore_eos=True) for index in range(6)]
    mixed = [
        SamplingParams(max_tokens=90, seed=index, grammar=PERSON if index == 2 else CODE) if index % 3 == 2 else params
        for index, params in enumerate(plain)
    ]
    alone = [llm.generate(prompt, params)[0].token_ids for prompt, params in zip(prompts, plain, strict=True)]
    bound = [llm.generate(prompt, params)[0].token_ids for prompt, params in zip(prompts, mixed, strict=True)]
    together = [output.token_ids for output in llm.generate(prompts, mixed)]
    for index in range(6):
        assert together[index] == (bound if index % 3 == 2 else alone)[index]


def test_a_stream_left_early_and_rows_used_again(llm: LLM) -> None:
    for _ in range(3):
        stream = llm.stream(PROMPT, SamplingParams(grammar=PERSON, max_tokens=100, seed=1))
        next(stream)
        stream.close()
        free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, n=4)
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))[0].token_ids
        assert [sample.token_ids for sample in llm.generate(PROMPT, free)[0].samples] == [expected] * 4


def test_refused_before_anything_runs(llm: LLM) -> None:
    good, bad = (
        SamplingParams(max_tokens=3),
        SamplingParams(grammar=Grammar.json_schema({"type": "nope"}), max_tokens=3),
    )
    with pytest.raises(ValueError, match="prompt 1: grammar: .*nope"):
        llm.generate(["a", "b"], [good, bad])
    with pytest.raises(ValueError, match="nope"):
        llm.stream("a", bad)
    assert not llm.engine.has_work


def test_a_grammar_that_becomes_too_costly_ends_its_own_sample(llm: LLM) -> None:
    """It compiles, and its first masks are cheap; then the library's limits are reached."""
    keys = {f"key{number:04}": {"type": "string"} for number in range(2500)}
    hard = Grammar.lark(f'start: "ok " %json {json.dumps({"type": "object", "properties": keys})}')
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([PROMPT, PROMPT], [SamplingParams(grammar=hard, max_tokens=60), free])
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert str(outputs[0].samples[0].stop_reason).startswith("grammar: ")
    assert outputs[1].token_ids == llm.generate(PROMPT, free)[0].token_ids


def test_a_checkpoint_without_a_tokenizer_refuses(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    with (
        LLM(tmp_path, max_model_len=64, max_rows=1, progress=False) as bare,
        pytest.raises(ValueError, match="tokenizer"),
    ):
        bare.generate([1, 2], SamplingParams(grammar=CODE, max_tokens=3))
