"""Public suites over small files of their schema: the harness's scoring rules, and the engine run through each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals.public_suites import definition_of, write_local_task
from snapstream.assets import TINY_MODEL

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra: clients)")

INFINITE = {"id": 0, "context": "The pass key is 71432. Remember it. " * 5, "input": "What is the pass key?"}
OPTIONS = ["load", "save", "parse", "run"]
# One row of each suite, an answer that its rule takes, and one that it does not.
SUITES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "aime24": ({"Problem": "What is 20 + 22?", "Answer": "42"}, "So it is $\\boxed{42}$.", "It is 43.", "exact_match"),
    "infinitebench_passkey": (
        {**INFINITE, "answer": ["71432"], "options": []}, "It is 71432, not 1.", "1 or 71432", "score",
    ),
    "infinitebench_kv_retrieval": (
        {**INFINITE, "answer": ["ab-12"], "options": []}, 'The value is "ab-12".', "ab-123", "score",
    ),
    "infinitebench_code_debug": (
        {**INFINITE, "answer": ["parse"], "options": OPTIONS}, "C", "A", "score",
    ),
}  # fmt: skip


def local_task(folder: Path, name: str, row: dict[str, Any]) -> tuple[str, Any]:
    from lm_eval.tasks import TaskManager

    data = folder / f"{name}.jsonl"
    data.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    return write_local_task(name, data, folder / "tasks"), TaskManager(include_path=str(folder / "tasks"))


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_runs_on_rows_of_its_schema_and_scores_by_its_own_rule(name: str, tmp_path: Path) -> None:
    import snapstream.integrations.lm_eval  # noqa: F401  registers the model

    row, right, wrong, metric = SUITES[name]
    task_name, manager = local_task(tmp_path, name, row)
    model = {"pretrained": str(TINY_MODEL), "budget": 64, "max_rows": 2}
    results = lm_eval.simple_evaluate(
        model="snapstream", model_args=model, device="cpu", tasks=[task_name], task_manager=manager,
        gen_kwargs="max_gen_toks=4", bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    assert len(results["samples"][task_name]) == 2
    assert f"{metric},none" in results["results"][task_name]
    task = results_task(manager, task_name)
    (doc, *_) = task.test_docs()
    assert task.process_results(doc, [right])[metric] == 1.0
    assert task.process_results(doc, [wrong])[metric] < 1.0


def results_task(manager: Any, name: str) -> Any:
    loaded = manager.load([name])
    tasks = loaded.get("tasks", loaded)
    return tasks[name]


def test_a_multiple_choice_suite_reads_likelihoods(tmp_path: Path) -> None:
    import snapstream.integrations.lm_eval  # noqa: F401  registers the model

    row = {"context": "The ticket of dense arrow is B. " * 9, "question": "Which ticket?", "answer": "B",
           "choices": ["one", "two", "three", "four"]}  # fmt: skip
    task_name, manager = local_task(tmp_path, "longbench2_graph", row)
    results = lm_eval.simple_evaluate(
        model="snapstream", model_args={"pretrained": str(TINY_MODEL), "budget": 64}, device="cpu",
        tasks=[task_name], task_manager=manager, bootstrap_iters=0,
    )  # fmt: skip
    assert results["results"][task_name]["acc,none"] in (0.0, 1.0)  # both rows are the same


def test_ruler_is_generated_and_scored_offline() -> None:
    pytest.importorskip("wonderwords", reason="wonderwords is not installed (lm-eval's extra: ruler)")
    pytest.importorskip("nltk", reason="nltk is not installed (lm-eval's extra: ruler)")
    import snapstream.integrations.lm_eval  # noqa: F401  registers the model

    results = lm_eval.simple_evaluate(
        model="snapstream", model_args={"pretrained": str(TINY_MODEL), "budget": 256}, device="cpu",
        tasks=["niah_single_1"], limit=2, gen_kwargs="max_gen_toks=4", bootstrap_iters=0,
        metadata={"max_seq_lengths": [512], "tokenizer": str(TINY_MODEL)},
    )  # fmt: skip
    assert 0.0 <= results["results"]["niah_single_1"]["512,none"] <= 1.0


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such_task"):
        definition_of("no_such_task")
    with pytest.raises(ValueError, match="rows.txt"):
        write_local_task("aime24", tmp_path / "rows.txt", tmp_path)
