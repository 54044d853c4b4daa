"""Per-head budgets without a file: which profile an engine gets, when it is measured, and who must do without."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream import calibration as automatic
from snapstream.assets import TINY_DRAFT_MODEL, TINY_LATENT_MODEL, TINY_MODEL
from snapstream.calibration import FILE, TooSlow, automatic_heads, cached, calibrate, stored_profile
from snapstream.cli.app import main
from snapstream.config import EngineOptions, KVBudget
from snapstream.config.kv import HeadProfile, as_heads, read_profile
from snapstream.disaggregation.protocol import TransferSettings
from snapstream.llm import LLM
from snapstream.models.config_json import fingerprint
from snapstream.models.registry import read_model_config
from snapstream.server.engine.api import EngineSpec
from snapstream.server.engine.process import build
from snapstream.types import SamplingParams

SMALL: dict[str, Any] = {"budget": 128, "max_model_len": 600, "max_rows": 2}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model without its profile, and an empty cache folder."""
    monkeypatch.setattr("snapstream.calibration.cache_root", lambda: tmp_path / "cache")
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder)
    (folder / FILE).unlink()
    return folder


def heads_of(folder: Path, **fields: Any) -> tuple[EngineOptions, str]:
    options = EngineOptions.of(None, {**SMALL, "heads": "auto"} | fields)
    return automatic_heads(folder, read_model_config(folder), options)


@pytest.mark.parametrize("model", [TINY_MODEL, TINY_DRAFT_MODEL])
def test_the_shipped_models_have_their_profiles(model: Path) -> None:
    found = stored_profile(model)
    assert found is not None and found.model == fingerprint(model)


@pytest.mark.parametrize(
    ("fields", "is_automatic"),
    [
        ({}, True),
        ({"heads": "auto", "selector": "snapkv"}, True),
        ({"heads": "auto", "device": "cuda"}, True),
        ({"heads": "none"}, False),
        ({"selector": "diverse"}, False),
        ({"device": "cuda"}, False),
        ({"heads": TINY_MODEL / FILE}, False),
    ],
)
def test_who_gets_them_unasked(fields: dict[str, Any], is_automatic: bool) -> None:
    assert EngineOptions.of(None, fields).has_automatic_heads is is_automatic


def test_a_row_that_keeps_every_token_is_not_mentioned_unasked() -> None:
    assert heads_of(TINY_MODEL, heads=None, budget="full")[1] == ""


@pytest.mark.parametrize("fields", [{}, {"heads": "auto", "selector": "diverse"}])
def test_an_llm_takes_the_profile_and_says_so(fields: dict[str, Any]) -> None:
    with LLM(TINY_MODEL, executor="eager", progress=False, **SMALL, **fields) as llm:
        assert llm.config.heads is not None and llm.config.heads.row_slots == 8 * 128
        assert llm.notes[0].startswith("heads: per-head budgets from 20 generated documents")
        assert llm.generate([list(range(10, 300))], SamplingParams(max_tokens=2, temperature=0.0))


def test_a_model_is_measured_once(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "PROMPT_LEN", 256)
    monkeypatch.setattr(automatic, "LIMIT_S", 1e6)
    stages: list[str] = []
    options = EngineOptions.of(None, {**SMALL, "heads": "auto"})
    first, line = automatic_heads(bare, read_model_config(bare), options, on_stage=stages.append)
    assert isinstance(first.heads, HeadProfile) and str(cached(fingerprint(bare))) in line
    assert len(stages) == 1 and "calibrating" in stages[0]
    monkeypatch.setattr("snapstream.calibration.calibrate", None)  # not called again
    again, _ = heads_of(bare)
    assert again.heads == first.heads == read_profile(cached(fingerprint(bare)))


def test_a_model_that_takes_too_long_has_equal_heads(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooSlow, match="calibration would take"):  # found after the first document
        calibrate(bare, prompt_len=256, progress=False, limit_s=1e-9)
    monkeypatch.setattr(automatic, "LIMIT_S", 1e-9)
    for flops, rate in ((1.0, 1e30), (1e30, 1.0)):  # found before loading
        monkeypatch.setattr(automatic, "THREAD_FLOPS", flops)
        monkeypatch.setattr(automatic, "READ_RATE", rate)
        options, line = heads_of(bare)
        assert options.heads == "none" and "calibration would take" in line and "snapstream calibrate" in line
    monkeypatch.setattr(automatic, "READ_RATE", 1e30)
    assert heads_of(bare)[0].heads == "none"  # found after the first document
    monkeypatch.setattr("snapstream.calibration.calibrate", None)
    assert heads_of(bare)[0].heads == "none"  # known
    assert not cached(fingerprint(bare)).exists()


def test_a_device_without_memory_for_it_has_equal_heads(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")

    monkeypatch.setattr("snapstream.calibration.calibrate", out_of_memory)
    options, line = heads_of(bare)
    assert options.heads == "none" and line.endswith("cannot be calibrated: CUDA out of memory.")


def test_a_short_limit_reads_fewer_documents(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.0, 1.0))  # at the start and after the first document
    monkeypatch.setattr("snapstream.calibration.perf_counter", lambda: next(seconds))
    assert calibrate(bare, prompt_len=256, progress=False, limit_s=6.5).made_by.startswith("6 generated documents")


def damaged(path: Path) -> None:
    path.write_text("{")


def of_other_weights(path: Path) -> None:
    shutil.copy(TINY_DRAFT_MODEL / FILE, path)


@pytest.mark.parametrize("spoil", [damaged, of_other_weights])
def test_a_file_that_is_not_this_models_counts_as_none(bare: Path, spoil: Callable[[Path], None]) -> None:
    spoil(bare / FILE)
    assert stored_profile(bare) is None
    shutil.copy(TINY_MODEL / FILE, bare / FILE)
    assert stored_profile(bare) is not None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"budget": "full"}, "keep every token"),
        ({"budget": KVBudget.streaming(128)}, "select none"),
        ({"budget": KVBudget.of(128, num_window=8)}, "num_window 8"),
        ({"tensor_parallel": 2, "local_ranks": 1, "master_addr": "127.0.0.1:1"}, "other machines"),
    ],
)
def test_what_does_not_combine_has_equal_heads(fields: dict[str, Any], reason: str) -> None:
    options, line = heads_of(TINY_MODEL, **fields)
    assert options.heads == "none" and line.startswith("heads: equal, because") and reason in line


def test_latents_have_equal_heads() -> None:
    options, line = heads_of(TINY_LATENT_MODEL)
    assert options.heads == "none" and "latents" in line


def test_engines_that_transfer_rows_have_equal_heads() -> None:
    spec = EngineSpec(
        model=str(TINY_MODEL), options=EngineOptions.of(None, {**SMALL, "heads": "auto"}),
        transfer=TransferSettings(secret=b"0123456789abcdef" * 4),
    )  # fmt: skip
    with build(spec) as llm:
        assert llm.config.heads is None and "need the same profile" in llm.notes[0]


def test_an_impossible_engine_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="max_model_len is 1000000"):
        heads_of(TINY_MODEL, max_model_len=1_000_000)


def test_how_heads_are_named() -> None:
    assert as_heads("none") == "none" and as_heads(None) is None and as_heads("auto") == "auto"
    with pytest.raises(ValueError, match="holds no profile"):
        as_heads("automatic")


def test_the_command_keeps_a_profile_where_auto_looks(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(bare), "--prompt-len", "256", "--texts", "5"]) == 0
    path = cached(fingerprint(bare))
    assert str(path) in capsys.readouterr().out and stored_profile(bare) == read_profile(path)
