"""The public API on a checkpoint with a tokenizer: what every option does to an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from snapstream import LLM, KVBudget, SamplingParams
from snapstream.types import FinishReason

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPT = "The quick brown fox jumps over the lazy dog."


def raw_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_text_and_ids_are_two_ways_to_say_the_same(llm: LLM) -> None:
    ids = llm.tokenizer(PROMPT)["input_ids"]
    by_text, by_ids = llm.generate(PROMPT, GREEDY)[0], llm.generate(ids, GREEDY)[0]
    assert by_text.token_ids == by_ids.token_ids and by_text.text == by_ids.text
    assert by_text.prompt == PROMPT and by_text.prompt_token_ids == tuple(ids)
    assert by_text.finish_reason is FinishReason.LENGTH and len(by_text.token_ids) == 20
    assert by_text.text == llm.tokenizer.decode(by_text.token_ids, skip_special_tokens=True).rstrip("\ufffd")


def test_logprobs_are_those_of_the_model(llm: LLM, theirs: Any) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=1, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    output = llm.generate(PROMPT, params)[0]
    ids = [*output.prompt_token_ids, *output.token_ids]
    want = raw_logprobs(theirs, ids)
    count = len(output.prompt_token_ids)
    assert output.logprobs is not None and len(output.logprobs) == 6
    for i, entry in enumerate(output.logprobs):
        row = want[count - 1 + i]
        assert entry.token_id == output.token_ids[i]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    prompt = output.prompt_logprobs
    assert prompt is not None and len(prompt) == count and prompt[0] is None
    for i, entry in enumerate(prompt[1:], start=1):
        assert entry is not None and entry.token_id == ids[i] and len(entry.top) == 2
        assert entry.logprob == pytest.approx(float(want[i - 1][ids[i]]), abs=1e-4)


def test_prompt_logprobs_come_from_the_uncompressed_prefill(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    full = llm.generate(PROMPT * 3, params)[0]
    small = llm.generate(PROMPT * 3, params, budget=KVBudget(num_sink=2, num_topk=0, num_recent=6))[0]
    assert small.compression is not None and small.compression.evicted_tokens > 100
    assert [e.logprob for e in small.prompt_logprobs[1:]] == [e.logprob for e in full.prompt_logprobs[1:]]  # type: ignore[index,union-attr]


def test_a_seed_repeats_and_different_seeds_differ(llm: LLM) -> None:
    def texts(seed: int | None) -> list[int]:
        params = SamplingParams(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)
        return llm.generate(PROMPT, params)[0].token_ids

    assert texts(5) == texts(5) != texts(6)
    assert texts(None) != texts(None)


def test_stop_strings_stop_ids_and_min_tokens(llm: LLM) -> None:
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True))[0]
    stop = plain.text[5:8]
    cut = SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True, stop=stop)
    output = llm.generate(PROMPT, cut)[0]
    assert output.text == plain.text[: plain.text.index(stop)]
    assert output.finish_reason is FinishReason.STOP and output.samples[0].stop_reason == stop
    kept = SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True, stop=stop, include_stop=True)
    assert llm.generate(PROMPT, kept)[0].text == output.text + stop

    token = plain.token_ids[4]
    first = plain.token_ids.index(token)
    by_id = SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True, stop_token_ids=[token])
    output = llm.generate(PROMPT, by_id)[0]
    assert output.token_ids == plain.token_ids[: first + 1] and output.samples[0].stop_reason == token
    late = SamplingParams(
        max_tokens=40, temperature=1.0, seed=2, ignore_eos=True, stop_token_ids=[token], min_tokens=12
    )
    output = llm.generate(PROMPT, late)[0]
    assert len(output.token_ids) >= 12 and token not in output.token_ids[:11]


def test_penalties_and_bias_change_what_is_drawn(llm: LLM) -> None:
    plain = llm.generate(PROMPT, GREEDY)[0].token_ids
    banned = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logit_bias={plain[0]: -100.0})
    assert plain[0] not in llm.generate(PROMPT, banned)[0].token_ids
    forced = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logit_bias={70: 100.0})
    assert llm.generate(PROMPT, forced)[0].token_ids == [70] * 5
    once = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logit_bias={70: 1.0}, presence_penalty=2.0,
                          frequency_penalty=2.0, repetition_penalty=50.0)  # fmt: skip
    assert len(set(llm.generate(PROMPT, once)[0].token_ids)) == 5


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 5, 9)]
    outputs = llm.generate([PROMPT, PROMPT, "Hello"], params)
    assert [len(output.token_ids) for output in outputs] == [1, 5, 9]
    assert outputs[1].token_ids[:1] == outputs[0].token_ids


def test_timings_and_compression_are_reported(llm: LLM) -> None:
    output = llm.generate(PROMPT * 2, GREEDY, budget=KVBudget(num_sink=4, num_topk=0, num_recent=36))[0]
    timings, compression = output.timings, output.compression
    assert compression is not None
    assert compression.kept_tokens == 40 and compression.evicted_tokens == len(PROMPT) * 2 - 40
    assert compression.row_bytes * len(PROMPT) * 2 == compression.full_bytes * 40
    assert timings.first_token_ms == pytest.approx(timings.queue_ms + timings.prefill_ms)
    assert 0 < timings.prefill_ms < timings.total_ms
    assert timings.per_token_ms == pytest.approx(timings.decode_ms / 19)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, GREEDY)[0]
    text = "<bos>user: Hi\nassistant:"
    assert llm.tokenizer.decode(list(output.prompt_token_ids)) == text
    both = llm.chat([messages, messages], GREEDY)
    assert [o.token_ids for o in both] == [output.token_ids] * 2


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], {}, "the prompt has 0 tokens"),
        (["ok", [5, 259]], {}, r"prompt 1: prompt token id 259 is outside the vocabulary \(0 to 258\)"),
        (["a" * 300], {}, "a prompt of 300 tokens and max_tokens 20 make 320; the limit is 256"),
        (["ok"], {"n": 5}, "n is 5; each sample needs a row and the engine has 4"),
        (["ok"], {"logit_bias": {999: 1.0}}, "logit_bias token id 999"),
    ],
)
def test_wrong_requests_name_value_and_limit(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, SamplingParams(max_tokens=20, **params))
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", float("nan")), ("top_k", -2),
     ("min_p", 1.5), ("max_tokens", 0), ("min_tokens", 257), ("n", 0), ("presence_penalty", 3.0),
     ("frequency_penalty", float("inf")), ("repetition_penalty", 0.0), ("logprobs", 21), ("prompt_logprobs", -1),
     ("temperature", 10**400), ("temperature", True), ("temperature", "1"), ("ignore_eos", "no"), ("max_tokens", 2.5),
     ("seed", 2**63), ("stop", 5), ("stop_token_ids", 2), ("logit_bias", [1, 2]), ("stop", [""]),
     ("stop", ["x"] * 17), ("stop_token_ids", [-1]), ("logit_bias", {1: 200.0})],
)  # fmt: skip
def test_wrong_sampling_values_are_refused(field: str, value: Any) -> None:
    name = "stop" if field == "stop_token_ids" else field
    with pytest.raises(ValueError, match=rf"\b{name}(_token_ids)?\b.*(must|limit|not a)"):
        SamplingParams(**{field: value})


def test_a_smaller_budget_than_a_row_is_allowed_a_larger_one_is_not(checkpoint: Path) -> None:
    with LLM(checkpoint, budget=64, max_rows=1, max_model_len=256, progress=False) as llm:
        with pytest.raises(ValueError, match="a budget of 128 slots is larger than a row of this engine \\(64\\)"):
            llm.generate(PROMPT, GREEDY, budget=128)
        with pytest.raises(ValueError, match="a budget of 30 slots is smaller than sinks"):
            llm.generate(PROMPT, GREEDY, budget=30)
        assert llm.generate(PROMPT, GREEDY, budget=48)[0].compression is not None


def test_arrays_and_tensors_of_ids_are_prompts(llm: LLM) -> None:
    ids = [70, 71, 72]
    want = llm.generate(ids, GREEDY)[0].token_ids
    for prompt in (np.array(ids), torch.tensor(ids), torch.tensor([ids]), [np.int64(i) for i in ids], tuple(ids)):
        assert [o.token_ids for o in llm.generate(prompt, GREEDY)] == [want]
    numpy_values = SamplingParams(max_tokens=np.int64(20), temperature=np.float32(0.0), ignore_eos=True)
    assert llm.generate([ids, ids], numpy_values)[1].token_ids == want
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"prompt": "Hi"}, "prompts is dict"),
        (b"Hi", "prompts is bytes"),
        (None, "prompts is NoneType"),
        ([None], "prompt: token id is None"),
        ([[True, False]], "prompt 0: token id is True"),
        (["a", 5], "prompt 1 is int 5"),
        (["a", b"b"], "prompt 1 is bytes"),
    ],
)
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [{"max_tokens": 5}, [None], "fast"])
def test_what_is_no_sampling_params_is_named(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match="params is"):
        llm.generate("x", params)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages is str"),
        ([], "messages is list"),
        ({"role": "user", "content": "x"}, "messages is dict"),
        ([{"role": "usr", "content": "x"}], "role 'usr'"),
        ([{"role": "user"}], "content of a user message is NoneType"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\] has the type 'image_url'",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "belongs to the assistant"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not valid JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], "a JSON object"),
    ],
)
def test_what_is_no_conversation_is_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY)


def test_text_parts_are_joined_by_newlines(llm: LLM) -> None:
    """As the server does, and others: the same messages shall be the same tokens wherever they are sent."""
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    assert llm.chat_token_ids([{"role": "user", "content": parts}]) == llm.chat_token_ids(
        [{"role": "user", "content": "He\nllo"}]
    )


def test_developer_is_system_where_a_template_does_not_know_it(llm: LLM) -> None:
    ids = [llm.chat_token_ids([{"role": role, "content": "Be brief."}]) for role in ("developer", "system", "user")]
    assert ids[0] == ids[1] != ids[2]


def test_settings_that_cannot_work_are_refused_at_start(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len is 9999; the model's context is 512"):
        LLM(checkpoint, max_model_len=9999)
    with pytest.raises(ValueError, match=r"20 slots is smaller than sinks \+ observation_len \(4 \+ 32 = 36\)"):
        LLM(checkpoint, budget=20)
    with pytest.raises(ValueError, match="executor is 'spiral'"):
        LLM(checkpoint, executor="spiral")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        LLM(checkpoint, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of weights, 100000000 "):
        LLM(checkpoint, budget="full", max_rows=100_000_000)
    for name, value in (("max_rows", 0), ("max_rows", 2.0), ("max_rows", "2"), ("chunk_len", None)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be a whole number >= 1"):
            LLM(checkpoint, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_model_len is 0"):
        LLM(checkpoint, max_model_len=0)
    for budget in (10.0, "ful", True):
        with pytest.raises(ValueError, match=f"budget is {budget!r}"):
            LLM(checkpoint, budget=budget)  # type: ignore[arg-type]
    for device in ("meta", "cuda:99", 3):
        with pytest.raises(ValueError, match="device"):
            LLM(checkpoint, device=device)  # type: ignore[arg-type]


def test_half_precision_runs(checkpoint: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        with LLM(checkpoint, budget=64, dtype=dtype, max_model_len=256, progress=False) as llm:  # type: ignore[arg-type]
            output = llm.generate(PROMPT * 3, GREEDY)[0]
            assert len(output.token_ids) == 20 and output.compression.row_bytes * 2 == 64 * 3 * 2 * 2 * 12 * 4  # type: ignore[union-attr]
