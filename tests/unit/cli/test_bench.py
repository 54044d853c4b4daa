"""``snapstream bench``: which tests it makes of its flags, what it counts, and the whole on the shipped model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from snapstream.assets import TINY_LATENT_MODEL, TINY_MODEL
from snapstream.cli import main
from snapstream.cli.bench import BenchFlags, Result, line_of, make_tests, step_bytes
from snapstream.config import EngineConfig, KVBudget, ParallelConfig, WeightFormats
from snapstream.kv.spec import KVSpec
from snapstream.models.registry import read_model_config, tensor_specs
from snapstream.models.sharding import decode_weight_bytes, rank_config
from snapstream.models.weights import DecoderWeights


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (BenchFlags(), ["pp512", "tg128"]),
        (BenchFlags(n_prompt="0", n_gen="8,16", n_depth="0,64"), ["tg8", "tg16", "tg8 @ 64", "tg16 @ 64"]),
        (BenchFlags(n_prompt="64", n_depth="64", n_gen="8"), ["pp64", "tg8 @ 64"]),
        (BenchFlags(n_gen="0", n_depth="64"), ["pp512"]),
    ],
)
def test_tests_are_named_as_llama_bench_names_them(flags: BenchFlags, names: list[str]) -> None:
    assert [test.name for test in make_tests(flags)] == names
    of_rows = [test.name for test in make_tests(flags, 2)]  # whose prompt is written to two rows before they decode
    assert set(of_rows) - set(names) == (
        {"pp64"} - set(names) if flags.n_depth != "0" and flags.n_gen != "0" else set()
    )


def test_a_step_reads_weights_once_and_every_row() -> None:
    model = read_model_config(TINY_MODEL)
    config = EngineConfig(budget=KVBudget.of(64), max_model_len=512)
    weights = decode_weight_bytes(model, "float32")
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    assert step_bytes(model, config, 3, 10) == weights + 3 * 10 * token
    assert step_bytes(model, config, 3, 400) == weights + 3 * 64 * token


def test_a_rank_reads_the_rows_that_it_has() -> None:
    """With data-parallel attention two ranks read two of four rows each, and of three the busier one reads two."""
    model = read_model_config(TINY_LATENT_MODEL)
    config = EngineConfig(budget=KVBudget.of(64), max_model_len=512, parallel=ParallelConfig(size=2, attention="dp"))
    rows = {num: step_bytes(model, config, num, 10) for num in (2, 3, 4, 6)}
    visible = KVSpec.of(model, "float32").visible_bytes(10, 10)
    own = rank_config(model, config.parallel)
    for num, of_rank in ((2, 1), (3, 2), (4, 2), (6, 3)):
        assert rows[num] == decode_weight_bytes(own, "float32", None, num) + of_rank * visible


def test_a_line_of_the_table() -> None:
    result = Result(test="tg8", num_prompt=1, num_new=8, rows=2, tokens_per_s=[1.0], mean=1234.5, spread=1.25)
    assert line_of(result).split() == ["tg8", "2", "1,234.50", "±", "1.25"]


def test_bench_on_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-p", "32", "-n", "8", "-d", "0,48", "-r", "2", "-np", "3"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines()]
    assert rows[-4:] == ["pp32", "tg8", "pp48", "tg8"] and "tg8 @ 48" in out
    for word in ("executor: ", "weights: float32", "KV dtype float32", "GB/s", "1.2M parameters"):
        assert word in out


def test_bench_of_random_weights_reads_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(TINY_MODEL / "config.json", tmp_path / "config.json")
    flags = ["--random", "-p", "40", "-n", "8", "-r", "2", "--weights", "int8", "--json"]
    assert main(["bench", str(tmp_path / "config.json"), *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [test["test"] for test in printed["tests"]] == ["pp40", "tg8"]
    assert [len(test["tokens_per_s"]) for test in printed["tests"]] == [2, 2]
    prefill, decode = printed["tests"]
    assert prefill["read_share"] is None and decode["read_share"] > 0 and printed["read_bytes_per_s"] > 0
    assert printed["weights"].startswith("int8") and printed["model"].endswith("random weights")


def test_random_weights_of_a_hub_id_fetch_its_settings_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def folder_of(model: Path, *, config_only: bool = False, progress: bool = True) -> Path:
        asked.append((str(model), config_only))
        return TINY_MODEL

    monkeypatch.setattr("snapstream.models.hub.local_folder", folder_of)
    assert main(["bench", "some/model", "--random", "-p", "8", "-n", "0", "-r", "1"]) == 0
    assert asked[0] == ("some/model", True)
    assert all(
        name == str(TINY_MODEL) for name, _ in asked[1:]
    )  # the folder that was found, where llm.py sees this too
    assert "model: some/model, 1.2M parameters, random weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-p", "many"], "n_prompt is 'many'; it must be like 512 or 0,4096"),
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-r", "0"], "repetitions is 0"),
        (["--max-rows", "auto"], "max_rows is 'auto'"),
        (["--max-model-len", "600"], "max_model_len is 600; the longest test needs 641 tokens"),
        (["--random", "--tensor-parallel", "2"], "--random supports one rank"),
    ],
)
def test_bench_refuses(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-d", "512", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("formats", [None, WeightFormats.of("int8")])
def test_random_weights_are_all_filled(formats: WeightFormats | None) -> None:
    model = read_model_config(TINY_MODEL)
    made = []
    for _ in range(2):
        weights = DecoderWeights.empty(model, torch.float32, "cpu", formats)
        weights.fill_randomly(7, num_drawn=1000)
        made.append(weights.stored())
    for name, spec in tensor_specs(model).items():
        numbers = made[0][name]
        assert torch.equal(numbers, made[1][name]), name
        assert numbers.isfinite().all() and (numbers.abs().amax(-1) > 0).all() or name.endswith("bias"), name
        assert not spec.is_matrix or numbers.std() > 0.1 * spec.shape[-1] ** -0.5, name
