"""lm-eval over HTTP: its generations and log-likelihoods are those of the engine in-process."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from benchmarks.server_process import ServerProcess
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.types import SamplingParams

REASON = "the extra `clients` is not installed"
DOCS = [
    {"question": "The key of the door is", "answer": "red", "choices": ["red", "blue and green", "seven"], "label": 0},
    {"question": "Once upon a time there was", "answer": "x", "choices": ["a king", "an ünusual 😀"], "label": 1},
    {"question": "word " * 700 + "and", "answer": "end", "choices": ["so on", "word"], "label": 1},
]
GENERATE = """
task: local_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, temperature: 0.0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield pytest.importorskip("lm_eval", reason=REASON)


@pytest.fixture(scope="module")
def tasks(lm_eval: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS), encoding="utf-8")
    for name, text in (("generate", GENERATE), ("choice", CHOICE)):
        (folder / f"{name}.yaml").write_text(text.format(file=folder / "docs.jsonl"))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(
    lm_eval: Any, tasks: Any, server: ServerProcess, task: str, backend: str, model: str = "local-completions"
) -> list[dict[str, Any]]:
    """What the harness logged of each document."""
    is_chat = model == "local-chat-completions"
    arguments: dict[str, Any] = {
        "model": "tiny", "num_concurrent": 2, "max_retries": 1, "max_length": 8192,
        "base_url": f"{server.url}/v1/{'chat/completions' if is_chat else 'completions'}",
    }  # fmt: skip
    if backend != "none":
        arguments |= {"tokenizer_backend": backend, "tokenizer": str(TINY_MODEL)}
    results = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0,
        apply_chat_template=is_chat,
    )  # fmt: skip
    samples: list[dict[str, Any]] = results["samples"][task]
    return sorted(samples, key=lambda sample: int(sample["doc_id"]))


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_generations(lm_eval: Any, tasks: Any, server: ServerProcess, llm: LLM, backend: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, stop=(".", "<|end|>"))
    want = [llm.generate(doc["question"], params)[0].text for doc in DOCS]
    samples = evaluate(lm_eval, tasks, server, "local_generate", backend)
    assert [sample["resps"][0][0] for sample in samples] == want


def test_chat_generations(lm_eval: Any, tasks: Any, server: ServerProcess, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, stop=(".",))
    want = [llm.chat([{"role": "user", "content": doc["question"]}], params)[0].text for doc in DOCS]
    samples = evaluate(lm_eval, tasks, server, "local_generate", "none", "local-chat-completions")
    assert [sample["resps"][0][0] for sample in samples] == want


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_log_likelihoods(lm_eval: Any, tasks: Any, server: ServerProcess, llm: LLM, backend: str) -> None:
    samples = evaluate(lm_eval, tasks, server, "local_choice", backend)
    assert len(samples) == len(DOCS)
    for sample, doc in zip(samples, DOCS, strict=True):
        for choice, [answer] in zip(doc["choices"], sample["resps"], strict=True):  # type: ignore[call-overload]
            likelihood, is_greedy = answer
            want, want_greedy = in_process(llm, str(doc["question"]), f" {choice}")
            assert float(likelihood) == pytest.approx(want, abs=1e-4)
            assert str(is_greedy) == str(want_greedy)


def in_process(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    tokenizer: Any = llm.tokenizer
    ids = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    start = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    [output] = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    scored = [one for one in output.prompt_logprobs[start:] if one is not None]
    assert len(scored) == len(ids) - start > 0
    return sum(one.logprob for one in scored), all(one.top[0][0] == one.token_id for one in scored)


def test_nothing_was_a_server_error(server: ServerProcess) -> None:
    logging.getLogger(__name__).info("the log is %s", server.log)
    assert " status=5" not in server.log.read_text()
