"""lighteval against a running server, over rows at hand. It lives in an environment of its own
(docs/research/public-suites.md);
``LIGHTEVAL`` names that environment's folder.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import ServerProcess
from evals.lighteval_suites import write_local_task
from snapstream.assets.documents import make_document
from snapstream.llm import LLM
from tests.waiting import HANG_S

ENVIRONMENT = Path(os.environ.get("LIGHTEVAL", "/nonexistent"))
pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / "bin" / "lighteval").exists(), reason="LIGHTEVAL names no environment with lighteval"
)

# Scores an answer by the rule of each task in TASKS, as lighteval would; prints task, answer and score.
RULES = """
import json, sys
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.lighteval_task import LightevalTask
from lighteval.tasks.registry import Registry

if __name__ == "__main__":
    scores = []
    for definition, answers in json.load(open(sys.argv[1])):
        [config] = Registry.create_custom_tasks_module(definition).TASKS_TABLE
        doc = LightevalTask(config).eval_docs()[0]
        for answer in answers:
            response = ModelResponse(text=[answer])
            found = config.metrics[0].compute_sample(model_response=response, doc=doc)
            scores.append([config.name, float(next(iter(found.values())))])
    print("scores:", json.dumps(scores))
"""


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def run(command: list[str], folder: Path) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, cwd=folder, env=environment(folder)
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def written(folder: Path, task: str, rows: list[dict[str, Any]]) -> str:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return write_local_task(task, data, folder / "tasks")


def lookup(llm: LLM, seed: str) -> tuple[str, str]:
    """A question that the tiny model can answer with a number, and its answer."""
    tokenizer: Any = llm.tokenizer
    document = make_document(
        family="multi_number", seed=seed, target_tokens=150, num_questions=1,
        count_tokens=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )  # fmt: skip
    question = document.questions[0]
    return document.prompt(question), question.answers[0]


def test_aime24_over_http_scores_what_the_server_answers(server: ServerProcess, llm: LLM, tmp_path: Path) -> None:
    problems = [lookup(llm, f"lighteval/{i}") for i in range(4)]
    before = server.log.read_text().count("path=/v1/chat/completions status=200")
    # The model answers all of them; every other row wants something else.
    rows = [
        {"id": i, "problem": problem, "answer": answer if i % 2 else "17"}
        for i, (problem, answer) in enumerate(problems)
    ]
    name = written(tmp_path, "aime24", rows)
    model = (
        f"model_name=openai/tiny,base_url={server.url}/v1,api_key=none,max_model_length=8192,api_max_retry=1,"
        f"cache_dir={tmp_path}/cache,generation_parameters={{temperature:0.0,max_new_tokens:24}}"
    )
    run([str(ENVIRONMENT / "bin" / "lighteval"), "endpoint", "litellm", model, name, "--output-dir", "out",
         "--custom-tasks", f"tasks/{name}.py"], tmp_path)  # fmt: skip
    [results] = (tmp_path / "out").rglob("results_*.json")
    score = json.loads(results.read_text())["results"][f"{name}|0"]["pass@k:k=1"]
    assert score == 0.5
    asked = server.log.read_text().count("path=/v1/chat/completions status=200")
    assert asked - before == len(rows)  # nothing came out of the harness's cache


def test_the_rules_take_right_answers_and_no_others(tmp_path: Path) -> None:
    tests = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    hidden = [{"input": "40 2\n", "output": "42\n", "testtype": "stdin"}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(hidden)))).decode()
    code = {
        "question_content": "Add two numbers.", "starter_code": "", "metadata": "{}",
        "public_test_cases": json.dumps(tests), "private_test_cases": packed,
    }  # fmt: skip
    program = "```python\na, b = map(int, input().split())\nprint({})\n```"
    cases = [
        ("aime24", {"problem": "20 + 22?", "answer": "42"}, "So it is $\\boxed{42}$.", "So it is $\\boxed{43}$."),
        ("lcb:codegeneration", code, program.format("a + b"), program.format("3")),  # right on the public test only
    ]
    asked = []
    for task, row, right, wrong in cases:
        name = written(tmp_path, task, [row])
        asked.append([str(tmp_path / "tasks" / f"{name}.py"), [right, wrong]])
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "rules.py").write_text(RULES)
    output = run([str(ENVIRONMENT / "bin" / "python"), "rules.py", "asked.json"], tmp_path)
    [line] = [line for line in output.splitlines() if line.startswith("scores: ")]
    names = ["aime24_local"] * 2 + ["lcb_codegeneration_local"] * 2
    want = [[name, score] for name, score in zip(names, [1.0, 0.0] * 2, strict=True)]
    assert json.loads(line.removeprefix("scores: ")) == want
