"""The comparison with other engines: what is asked of them, what their seconds come to, what the table shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.peers import arms, compare, work
from benchmarks.peers.__main__ import parse_args
from benchmarks.peers.arms import Arm, Unavailable, run_arm
from benchmarks.peers.compare import figures_of
from benchmarks.peers.gguf_file import gguf_name
from benchmarks.peers.work import Job, prompts_of
from benchmarks.shapes import QWEN3_TINY, qwen3_checkpoint

JOB = Job(folder="", option="", threads=1, vocab_size=1024, prompt_len=9, new_tokens=4, batches=[1, 2], repeats=2)


def test_no_call_sees_the_prompts_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def generate(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        assert all(len(prompt) == 9 and min(prompt) >= 3 and max(prompt) < 1024 for prompt in prompts)
        seen.extend(map(str, prompts))
        return [[7] * num_new for _ in prompts]

    for batch in JOB.batches:
        found = work.measure(generate, JOB, batch)
        assert len(found["first_s"]) == len(found["all_s"]) == 2 and found["tokens"] == [[7] * 4] * batch
    assert len(set(seen)) == len(seen) == 5 + 10
    assert prompts_of(JOB, 2, 1) == prompts_of(JOB, 2, 1)
    with pytest.raises(RuntimeError, match="1 of 1 answers have not 4 tokens but 1"):
        work.measure(lambda prompts, num_new: [[7]], JOB, 1)


def test_decode_is_what_the_other_tokens_take() -> None:
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = {"batches": [{"batch": 2, "first_s": [0.5, 0.3], "all_s": [0.9, 1.0], "tokens": tokens},
                         {"batch": 4, "first_s": [0.5], "all_s": [0.4], "tokens": []}]}  # fmt: skip
    first, second = figures_of("x", found, 4, {2: [[1, 2, 3, 9], [5, 6, 7, 8]]})
    assert first == {"engine": "x", "batch": 2, "first_token_s": 0.3, "output_tokens_per_s": round(8 / 0.9, 1),
                     "decode_tokens_per_s": 10.0, "same_tokens": 0.875}  # fmt: skip
    assert second["decode_tokens_per_s"] is None and "same_tokens" not in second


def test_arms_take_turns_and_what_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(arm: Arm, job: Job) -> dict[str, Any]:
        if arm.name == "absent":
            raise Unavailable("not installed")
        own = {"batch": 1, "first_s": [1.0], "all_s": [2.0], "tokens": [[len(arm.name)] * 4]}
        return {"versions": {arm.name: "1"}, "batches": [own]}

    monkeypatch.setattr(compare, "run_arm", found)
    some = [Arm(name, arms.OWN, "", "") for name in ("one", "absent", "other", "three")]
    all_of_them = compare.compare(some, JOB, ["o", "a"], lambda arm, line: {"twice": 2 * line["batch"], "of": arm.name})
    assert [(line["engine"], line["twice"], line["of"]) for line in all_of_them["arms"]] == [
        ("one", 2, "one"), ("other", 2, "other")
    ]  # fmt: skip
    assert [line.get("same_tokens") for line in all_of_them["arms"]] == [1.0, 0.0], (
        "the first is what others are held to"
    )
    assert all_of_them["left_out"] == {"absent": "not installed"} and all_of_them["versions"].keys() == {"one", "other"}


def test_names_of_tensors() -> None:
    assert gguf_name("model.layers.11.self_attn.q_norm.weight") == "blk.11.attn_q_norm.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.norm.weight") == "output_norm.weight"


def test_an_arm_of_our_own_runs_in_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen3_checkpoint(tmp_path, QWEN3_TINY)
    job = Job(**{**vars_of(JOB), "folder": str(tmp_path), "batches": [2], "repeats": 1})
    found = run_arm(Arm("eager", arms.OWN, "run_snapstream", "eager int8"), job)
    assert [own["batch"] for own in found["batches"]] == [2] and "torch" in found["versions"]
    with pytest.raises(Unavailable, match="exit code 1: .*executor is 'lazy'"):
        run_arm(Arm("lazy", arms.OWN, "run_snapstream", "lazy int8"), job)
    monkeypatch.setitem(arms.ENVIRONMENTS, "vllm", arms.ROOT / ".venv-peers" / "absent" / "bin" / "python")
    with pytest.raises(Unavailable, match="not installed; `make peers` installs it in .venv-peers/absent"):
        run_arm(Arm("vLLM", "vllm", "run_vllm", "float32"), job)


def vars_of(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in Job.__dataclass_fields__}


def test_a_job_goes_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo, done = tmp_path / "job.json", tmp_path / "done.json"
    work.write_job(JOB, todo)
    monkeypatch.setattr(sys, "argv", ["x", str(todo), str(done)])
    started: list[tuple[Job, int]] = []

    def start(job: Job, most: int) -> work.Generate:
        started.append((job, most))
        return lambda prompts, num_new: [[0] * num_new for _ in prompts]

    work.main(start, lambda: {"x": "1"})
    assert started == [(JOB, 2)]
    assert [own["batch"] for own in json.loads(done.read_text())["batches"]] == [1, 2]


def test_quick_changes_what_is_not_given() -> None:
    args = parse_args(["--quick", "--batches", "4"])
    assert (args.batches, args.prompt_len, args.new_tokens, args.repeats) == ([4], 64, 17, 2)
    assert parse_args([]).batches == [1, 4, 8, 32]


def test_the_table() -> None:
    lines = [{"engine": "a", "batch": 1, "decode_tokens_per_s": 1234.5, "output_tokens_per_s": 99.6},
             {"engine": "a", "batch": 8, "decode_tokens_per_s": None, "output_tokens_per_s": 5.0},
             {"engine": "b", "batch": 8, "decode_tokens_per_s": 2.0, "output_tokens_per_s": 3.0}]  # fmt: skip
    figures = {"prompt_len": 128, "new_tokens": 65, "threads": 2, "arms": lines, "left_out": {"c": "not installed"},
               "versions": {"torch": "2"}}  # fmt: skip
    text = tables.peers_all(figures)
    assert "| decode alone | batch 1 | batch 8 |" in text and "| a | 1,234 |  |" in text and "| b |  | 2 |" in text
    assert text.endswith("Left out: c (not installed).\n\nVersions: torch 2.")
