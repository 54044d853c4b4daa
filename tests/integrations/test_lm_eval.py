"""The lm-evaluation-harness adapter: the harness's own calls, against transformers and against ``LLM``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.types import SamplingParams

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra: clients)")

TEXT = "The ticket of dense arrow is 5024160. The number of golden oar is 6517328. "


def ask(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    from snapstream.integrations.lm_eval import SnapstreamLM

    yield SnapstreamLM(str(TINY_MODEL), max_model_len=512, max_rows=4)


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)


def test_log_likelihoods_are_those_of_transformers(model: Any, reference: Any) -> None:
    pairs = [(TEXT, " What is it?"), ("", "The ticket"), (TEXT + "The number of golden oar is ", "6517328")]
    got = model.loglikelihood([ask(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (value, is_greedy) in zip(pairs, got, strict=True):
        if context:  # spaces at its end belong to the continuation, whose tokens follow those of the context alone
            before = model.tok_encode(context.rstrip())
            after = model.tok_encode(context + continuation)[len(before) :]
        else:
            before, after = [model.prefix_token_id], model.tok_encode(continuation, add_special_tokens=False)
        logits = reference(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].float().log_softmax(-1)
        expected = logits.gather(1, torch.tensor(after)[:, None]).sum().item()
        assert value == pytest.approx(expected, abs=1e-3)
        assert is_greedy == (logits.argmax(-1).tolist() == after)


def test_a_rolling_text_beyond_max_model_len_is_scored_once_per_token(model: Any, reference: Any) -> None:
    text = TEXT * 30
    ids = model.tok_encode(text, add_special_tokens=False)
    assert len(ids) > model.max_length
    (value,) = model.loglikelihood_rolling([ask(text)])
    room, expected, done = model.max_length - 2, 0.0, 0
    while done < len(ids):
        own = ids[done : done + room]
        # The first piece is conditioned on the prefix, a later one on the last token of the one before; the last
        # piece reaches back so that it is full.
        if len(own) < room and done:
            context = ids[len(ids) - room - 1 : done]
        else:
            context = [ids[done - 1]] if done else [model.prefix_token_id]
        logits = reference(torch.tensor([context + own])).logits[0, len(context) - 1 : -1].float().log_softmax(-1)
        expected += logits.gather(1, torch.tensor(own)[:, None]).sum().item()
        done += len(own)
    assert value == pytest.approx(expected, rel=1e-4)


def test_generation_is_the_engines_and_stops_where_the_task_says(model: Any) -> None:
    prompt = TEXT + "The number of golden oar is"
    (whole,) = model.generate_until([ask(prompt, {"until": [], "max_gen_toks": 12})])
    with LLM(TINY_MODEL, budget="full", max_model_len=512, progress=False) as llm:
        (output,) = llm.generate(model.tok_encode(prompt), SamplingParams(max_tokens=12, temperature=0.0))
    assert whole == output.text and len(whole) > 2
    (cut,) = model.generate_until([ask(prompt, {"until": [whole[2]], "max_gen_toks": 12, "do_sample": False})])
    assert cut == whole[: whole.index(whole[2])]


def test_settings_that_would_change_the_result_unseen_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="typical_p"):
        model.generate_until([ask("a", {"until": [], "typical_p": 0.5})])


def test_what_does_not_fit_is_refused_or_loses_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapstream.integrations.lm_eval import SnapstreamLM

    long = TEXT * 30
    strict = SnapstreamLM(str(TINY_MODEL), max_model_len=128)
    with pytest.raises(ValueError, match="max_model_len 128"):
        strict.generate_until([ask(long, {"until": [], "max_gen_toks": 8})])
    lenient = SnapstreamLM(str(TINY_MODEL), max_model_len=128, too_long="middle")
    ids = lenient.tok_encode(long)
    handed: list[Any] = []
    generate = LLM.generate

    def hand_over(own: LLM, prompts: Any, *rest: Any, **options: Any) -> Any:
        handed.extend(prompts)
        return generate(own, prompts, *rest, **options)

    monkeypatch.setattr(LLM, "generate", hand_over)
    assert len(lenient.generate_until([ask(long, {"until": [], "max_gen_toks": 8})])) == 1
    assert handed == [ids[:60] + ids[-60:]]
    with pytest.raises(ValueError, match="too_long"):
        SnapstreamLM(str(TINY_MODEL), too_long="left")


def test_the_harness_runs_a_local_task(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    import snapstream.integrations.lm_eval  # noqa: F401  registers the model

    rows = [
        {"text": f"The ticket of dense arrow is {n}. The number of oar is 1234567.", "answer": str(n)}
        for n in (5024160, 7712345, 3012894)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(
        f"""
task: snapstream_local
dataset_path: json
dataset_kwargs: {{data_files: "{tmp_path / "rows.jsonl"}"}}
test_split: train
output_type: generate_until
doc_to_text: "{{{{text}}}}\\n\\nWhat is the ticket of dense arrow?"
doc_to_target: " {{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 16}}
metric_list: [{{metric: exact_match}}]
"""
    )
    results = lm_eval.simple_evaluate(
        model="snapstream",
        model_args={"pretrained": str(TINY_MODEL), "budget": 256},
        device="cpu",
        tasks=["snapstream_local"],
        task_manager=TaskManager(include_path=str(tmp_path)),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert results["results"]["snapstream_local"]["exact_match,none"] >= 2 / 3
