"""Two checkouts compared: every number by its place, in turn, and a benchmark that fails says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compile_kernels, pair, tables
from benchmarks import rank_share as command
from benchmarks.experts import ARMS, QUICK, forms_of, mixture_folder, step_bytes
from benchmarks.gpu_suite.device import Device
from benchmarks.gpu_suite.rank_share import measured, small_share
from benchmarks.gpu_suite.suite import Bench
from benchmarks.machine import RESULTS
from benchmarks.peers import arms, compare, work
from benchmarks.peers.__main__ import parse_args
from benchmarks.peers.arms import Arm, Unavailable, run_arm
from benchmarks.peers.compare import figures_of
from benchmarks.peers.gguf_file import write_gguf, write_random_gguf
from benchmarks.peers.llama_bench import SHAPES, fork_figures, joined, peer_figures
from benchmarks.peers.run_snapstream import start
from benchmarks.peers.work import Job, prompts_of
from benchmarks.shapes import GRANITE_H_TINY, LFM2_TINY, QWEN3_TINY, QWEN35_TINY, random_checkpoint
from snapstream.config import EngineOptions
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import decode_weight_bytes
from snapstream.models.weights import DecoderWeights
from snapstream.plan.fit import weight_formats

PROGRAM = """
import json, pathlib, sys
log = pathlib.Path(__file__).parents[2] / "log"
log.write_text((log.read_text() if log.exists() else "") + {side!r})
print("a line before")
arms = [{{"ms": {ms}, "name": "x"}}]
print(json.dumps({{"commit": {side!r}, "figures": {{"arms": arms, "same": 5, "size": sys.argv[1]}}}}))
"""


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    for side, ms in (("before", 4.0), ("here", 3.0)):
        folder = tmp_path / side / "benchmarks"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "steps.py").write_text(PROGRAM.format(side=side[0], ms=ms))
    monkeypatch.setattr(pair, "HERE", tmp_path / "here")
    return tmp_path / "before", tmp_path


def test_sides_take_turns_and_numbers_that_differ_are_compared(checkouts: tuple[Path, Path]) -> None:
    before, folder = checkouts
    found = pair.compare(before, ["steps", "--size"], repeats=3)
    assert (folder / "log").read_text() == "bhbhbh"
    assert found["commits"] == {"before": "b", "here": "h"} and found["benchmark"] == "steps --size"
    assert found["figures"] == [{"figure": "arms[0].ms", "before": 4.0, "here": 3.0, "ratio": 0.75}]
    json.dumps(found)


def test_a_benchmark_that_fails_shows_why(checkouts: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="benchmarks.other failed in .*before: .*No module named benchmarks.other"):
        pair.compare(checkouts[0], ["other"], repeats=1)


# The benchmark of a mixture of experts: bytes of a step, a GGUF file of experts, the table.

SHAPE = QUICK | {"hidden_size": 64, "num_experts": 4, "moe_intermediate_size": 32, "num_hidden_layers": 2,
                 "vocab_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip


def test_bytes_of_a_step() -> None:
    """With all experts it is everything that is stored, for every format; each expert weighs the same."""
    with mixture_folder(SHAPE) as folder:
        model = read_model_config(folder)
    for arm in ARMS:
        formats = forms_of(arm)
        most = step_bytes(model, formats, 4)
        assert most == decode_weight_bytes(model, "float32", formats, 10_000)
        if arm.module == "run_snapstream":
            assert most == DecoderWeights.empty(model, torch.float32, "cpu", formats).num_bytes
        expert = sum(formats.layers.num_bytes(shape) for shape in ((2 * 32, 64), (64, 32)))  # gate and up in one
        assert most - step_bytes(model, formats, 3) == pytest.approx(2 * expert)


def test_the_table() -> None:
    lines = [
        {"engine": "a", "batch": 1, "decode_tokens_per_s": 1234.5, "experts_chosen": 4.0, "share_of_read_rate": 0.5},
        {"engine": "a", "batch": 8, "decode_tokens_per_s": None, "experts_chosen": 12.25, "share_of_read_rate": None,
         "same_tokens": 0.75},
    ]  # fmt: skip
    figures = {"prompt_len": 64, "new_tokens": 49, "threads": 2, "arms": lines, "left_out": {"c": "not installed"},
               "versions": {"torch": "2"}}  # fmt: skip
    text = tables.experts(figures)
    assert "4.0 experts of each layer at batch 1, 12.2 experts of each layer at batch 8:" in text
    assert "| a | 1,234 |  | 50% |  |  | 75% |" in text
    assert text.endswith("Left out: c (not installed).\n\nVersions: torch 2.")


# The comparison with other engines: what is asked of them, what their seconds come to, what the table shows.

JOB = Job(folder="", option="", threads=1, vocab_size=1024, prompt_len=9, new_tokens=4, batches=[1, 2], repeats=2)


def test_no_call_sees_the_prompts_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def generate(prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
        assert all(len(prompt) == 9 and min(prompt) >= 3 and max(prompt) < 1024 for prompt in prompts)
        seen.extend(map(str, prompts))
        return [[7] * num_new for _ in prompts], 0.25

    for batch in JOB.batches:
        found = work.measure(generate, JOB, batch)
        assert len(found["first_s"]) == len(found["all_s"]) == 2 and found["tokens"] == [[7] * 4] * batch
        assert batch > 1 or found["first_s"] == [0.25, 0.25], "of one row, by the engine's clock"
    assert len(set(seen)) == len(seen) == 3 + 10
    assert prompts_of(JOB, 2, 1) == prompts_of(JOB, 2, 1)
    with pytest.raises(RuntimeError, match="1 of 1 answers have not 4 tokens but 1"):
        work.measure(lambda prompts, num_new: ([[7]], 0.0), JOB, 1)


def test_decode_is_what_the_other_tokens_take() -> None:
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = {"batches": [{"batch": 2, "first_s": [0.5, 0.3], "all_s": [0.9, 1.0], "tokens": tokens},
                         {"batch": 4, "first_s": [0.5], "all_s": [0.4], "tokens": []},
                         {"batch": 1, "first_s": [0.7, 0.4], "all_s": [1.0, 0.9], "tokens": []}]}  # fmt: skip
    first, second, one = figures_of("x", found, 4, {2: [[1, 2, 3, 9], [5, 6, 7, 8]]})
    assert first == {"engine": "x", "batch": 2, "first_token_s": 0.3, "output_tokens_per_s": round(8 / 0.9, 1),
                     "decode_tokens_per_s": 10.0, "same_tokens": 0.875}  # fmt: skip
    assert second["decode_tokens_per_s"] is None and "same_tokens" not in second
    assert one["decode_tokens_per_s"] == 10.0 and one["first_token_s"] == 0.4, "begin and end of one call"


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


MIXTURE = SHAPE | {"model_type": "qwen3_moe", "vocab_size": 1024}


@pytest.mark.parametrize(
    "shape", [QWEN3_TINY, MIXTURE, LFM2_TINY, QWEN35_TINY, GRANITE_H_TINY], ids=lambda own: own.get("model_type")
)
def test_a_file_for_llama_cpp_is_its_checkpoint(shape: dict[str, Any], tmp_path: Path) -> None:
    random_checkpoint(tmp_path, shape)
    write_gguf(tmp_path, tmp_path / "model.gguf", "f32")
    generate = [
        start(Job(**{**vars_of(JOB), "folder": str(path), "option": "eager float32"}), 2)
        for path in (tmp_path, tmp_path / "model.gguf")
    ]
    prompts = prompts_of(JOB, 2, 0)
    assert generate[0](prompts, 4)[0] == generate[1](prompts, 4)[0]


@pytest.mark.slow
def test_an_arm_of_our_own_runs_in_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_checkpoint(tmp_path, QWEN3_TINY)
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
        return lambda prompts, num_new: ([[0] * num_new for _ in prompts], 0.0)

    work.main(start, lambda: {"x": "1"})
    assert started == [(JOB, 2)]
    assert [own["batch"] for own in json.loads(done.read_text())["batches"]] == [1, 2]


def test_quick_changes_what_is_not_given() -> None:
    args = parse_args(["--quick", "--batches", "4"])
    assert (args.batches, args.prompt_len, args.new_tokens, args.repeats) == ([4], 64, 17, 2)
    assert parse_args([]).batches == [1, 4, 8, 32]


@pytest.mark.parametrize(
    ("shape", "kind", "own"),
    [
        ("tiny", "f16", set()),
        ("tiny", "q8_0", set()),
        ("tiny", "q4_0", {"q6_k"}),
        ("tiny", "q3_k_m", {"q3_k", "q4_k", "q5_k", "q6_k"}),
        ("tiny", "iq4_xs", {"iq4_xs", "q6_k"}),
        ("tiny", "q2_k", {"q2_k", "q3_k", "q6_k"}),
        ("tiny", "iq3_xxs", {"iq3_xxs", "iq2_s", "iq3_s", "q3_k", "q6_k"}),
        ("tiny-lfm2", "q4_0", {"q6_k"}),
        ("tiny-moe", "q4_k_m", {"q4_k", "q6_k"}),
    ],
)
def test_a_random_file_of_a_shape_is_read_as_it_is_stored(shape: str, kind: str, own: set[str], tmp_path: Path) -> None:
    write_random_gguf(SHAPES[shape], file := tmp_path / "model.gguf", kind)
    model = read_model_config(file)
    formats = weight_formats(model, EngineOptions(), device="cpu")
    assert model.stored.dequantized_in(formats) == (), model.stored
    assert {form.dtype for form in formats.own} == own


def test_rounds_of_an_engine_are_joined() -> None:
    rounds = [
        {"version": "1", "tokens_per_s": {"tg128": [rate]}, "quarter": {"tg128 @ 64": [rate + 1]},
         "read_gb_per_s": 10 * rate, "read_share": {"tg128": rate / 10}}
        for rate in (2.0, 4.0)
    ]  # fmt: skip
    assert joined(rounds) == {
        "version": "1", "tokens_per_s": {"tg128": [2.0, 4.0]}, "quarter": {"tg128 @ 64": [3.0, 5.0]},
        "read_gb_per_s": 30.0, "read_share": {"tg128": pytest.approx(0.3)},
    }  # fmt: skip
    assert joined([{"engine": "a", "tokens_per_s": {"pp512": [1.0, 2.0]}}])["tokens_per_s"] == {"pp512": [1.0, 2.0]}


def test_llama_benchs_own_names(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    tests = [
        {"n_prompt": 512, "n_gen": 0, "samples_ts": [3.0, 4.0]},
        {"n_prompt": 0, "n_gen": 128, "samples_ts": [2.0]},
        {"n_prompt": 64, "n_gen": 0, "samples_ts": [5.0]},
        {"n_prompt": 0, "n_gen": 128, "n_depth": 64, "samples_ts": [1.5]},
    ]
    about = {"build_number": 7, "build_commit": "abc"}
    program.write_text(f"#!/bin/sh\necho '{json.dumps([test | about for test in tests])}'\n")
    program.chmod(0o755)
    found = peer_figures(program, tmp_path / "model.gguf", 2, 1, [64])
    rates = {"pp512": [3.0, 4.0], "tg128": [2.0], "pp64": [5.0], "tg128 @ 64": [1.5]}
    assert found == {"engine": "llama-bench 7 (abc)", "tokens_per_s": rates}
    forks = [
        {"test": "pp512", "samples_ts": [3.0, 4.0]},
        {"test": "tg128", "samples_ts": [2.0]},
        {"test": "pp64", "samples_ts": [5.0]},
        {"test": "tg128@pp64", "samples_ts": [1.5]},
    ]
    program.write_text(f"#!/bin/sh\necho '{json.dumps([test | about for test in forks])}'\n")
    found = fork_figures(program, tmp_path / "model.gguf", 2, 1, [64])
    assert found == {"engine": "ik_llama.cpp 7 (abc)", "tokens_per_s": rates}
    program.write_text("#!/bin/sh\necho 'no such file' >&2\nexit 3\n")
    with pytest.raises(SystemExit, match="ended with 3: no such file"):
        peer_figures(program, tmp_path / "model.gguf", 2, 1, [])


def test_the_best_of_two_programs_counts() -> None:
    def engine(rate: float, name: str) -> dict[str, Any]:
        return {"engine": name, "tokens_per_s": {"pp512": [rate, rate]}, "read_share": {}}

    model = {"shape": "tiny", "kind": "q4_0", "file_bytes": 2e9, "snapstream": engine(6.0, ""),
             "llama_cpp": engine(3.0, "a 1")}  # fmt: skip
    text = tables.llama_bench({"threads": 2, "models": [model]})
    assert "| ratio |" in text and "| tiny q4_0, 2.00 GB | pp512 | 3.0 | 6.0 | 2.00x |  |" in text
    text = tables.llama_bench({"threads": 2, "models": [model | {"ik_llama_cpp": engine(4.0, "b 2")}]})
    assert "| to the best |" in text and "| 3.0 | 4.0 | 6.0 | 1.50x |" in text and "a 1, b 2, 2 threads." in text
    model["snapstream"] |= {"quarter": {"pp512": [9.0]}}
    assert "| pp512, a quarter | 3.0 | 9.0 | 3.00x |  |" in tables.llama_bench({"threads": 2, "models": [model]})


def test_the_table_of_peers() -> None:
    lines = [{"engine": "a", "batch": 1, "decode_tokens_per_s": 1234.5, "output_tokens_per_s": 99.6},
             {"engine": "a", "batch": 8, "decode_tokens_per_s": None, "output_tokens_per_s": 5.0},
             {"engine": "b", "batch": 8, "decode_tokens_per_s": 2.0, "output_tokens_per_s": 3.0}]  # fmt: skip
    figures = {"prompt_len": 128, "new_tokens": 65, "threads": 2, "arms": lines, "left_out": {"c": "not installed"},
               "versions": {"torch": "2"}}  # fmt: skip
    text = tables.peers_all(figures)
    assert "| decode alone | batch 1 | batch 8 |" in text and "| a | 1,234 |  |" in text and "| b |  | 2 |" in text
    assert text.endswith("Left out: c (not installed).\n\nVersions: torch 2.")


# One rank's share runs alone from end to end on a tiny shape, and the figures are what they say.


@torch.inference_mode()
def test_steps_and_layers_of_one_rank() -> None:
    share = small_share()
    *steps, prompt = measured(Bench(Device("cpu"), True), share)
    assert [step["batch"] for step in steps] == [1, 4] and [step["own_rows"] for step in steps] == [1, 2]
    for step in steps:
        assert 2 <= step["experts_read"] <= min(8, 2 * step["batch"])
        over = [step[f"node_ms, {name}"] - step["share_ms"] for name in ("one switch", "two nodes")]
        assert 0 < over[0] < over[1] and step["num_collectives"] == 2 * 3 + 2
        assert step["tokens_per_s, one switch"] == pytest.approx(1e3 * step["batch"] / step["node_ms, one switch"])
    assert steps[1]["experts_read"] > 2  # tokens are not all the same
    assert prompt["layers_measured"] == 1 and prompt["seconds_per_layer"] > 0
    assert prompt["prompt_s, two nodes"] > prompt["prompt_s, one switch"] > 3 * prompt["seconds_per_layer"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU only the tiny shape runs; the last line is the record."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["rank_share"])
        with pytest.raises(SystemExit, match="--smoke runs a tiny shape"):
            command.main()
    monkeypatch.setattr(sys, "argv", ["rank_share", "--smoke"])
    command.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["name"] == "rank_share" and record["figures"]["is_smoke"] and len(record["figures"]["arms"]) == 3


def test_the_record_of_triton_kernels_is_of_these_kernels() -> None:
    """Here and not with the other tests of Triton, which are slow: whoever changes a kernel learns it at once."""
    newest = max((RESULTS / "compile").glob("*_triton.json"))
    made_from = json.loads(newest.read_text())["sources"]
    assert made_from == compile_kernels.sources(), (
        f"{newest.name} was made from other kernels: run `python -m benchmarks.compile_kernels --save`"
    )
