"""What ``plan`` counts of models that keep latents, at the sizes of published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.published import DEEPSEEK_V2_LITE, DEEPSEEK_V3, KIMI_K2
from snapstream.cli.__main__ import main
from snapstream.config import EngineOptions
from snapstream.models.families import kv_spec_of
from snapstream.models.registry import model_config_from_dict
from snapstream.models.shapes import num_parameters, weight_bytes
from snapstream.models.weights import DecoderWeights
from snapstream.plan.plan import make_plan

PUBLISHED = {"v3": DEEPSEEK_V3, "lite": DEEPSEEK_V2_LITE, "kimi": KIMI_K2}


def test_numbers_of_published_models() -> None:
    """DeepSeek-V3 has 671B parameters without its MTP layer, Kimi K2 1.03T, V2-Lite 15.7B; a token of V3 takes 70,272
    bytes.
    """
    v3, lite, kimi = (model_config_from_dict(settings) for settings in PUBLISHED.values())
    assert num_parameters(v3) == 671_026_419_200
    assert num_parameters(kimi) == pytest.approx(1.03e12, rel=0.01)
    assert num_parameters(lite) == 15_706_484_224
    assert [kv_spec_of(model, "bfloat16").token_bytes() for model in (v3, lite, kimi)] == [70_272, 31_104, 70_272]
    assert v3.latent is not None and v3.latent.softmax_scale == pytest.approx(0.13523, abs=1e-5)  # plain: 0.07217


@pytest.mark.parametrize("name", PUBLISHED)
def test_storage_has_the_counted_bytes(name: str) -> None:
    model = model_config_from_dict(PUBLISHED[name])
    assert DecoderWeights.empty(model, torch.bfloat16, "meta").num_bytes == weight_bytes(model, "bfloat16")


def test_the_papers_rows() -> None:
    """64 rows of 32k slots of R1 are 147 GB, and so are 16 of 128k and 256 of 8k: latents, not keys per head."""
    spec = kv_spec_of(model_config_from_dict(DEEPSEEK_V3), "bfloat16")
    assert 64 * spec.row_bytes(32_768) == 16 * spec.row_bytes(131_072) == 256 * spec.row_bytes(8192)
    assert 64 * spec.row_bytes(32_768) == pytest.approx(147.4e9, rel=1e-3)


def test_staging_counts_what_is_expanded() -> None:
    model = model_config_from_dict(DEEPSEEK_V2_LITE)
    plan = make_plan(model, EngineOptions(dtype="bfloat16"), budgets=[8192], prompt_len=32_768)
    assert plan.prefill.staging_bytes == 32_768 * 2 * (576 + 2 * 16 * 192)
    assert plan.token_bytes == 31_104 and plan.rows[1].row_bytes == 8192 * 31_104


def test_the_command_plans_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    assert main(["plan", str(tmp_path), "--json", "--prompt-len", "131072"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["token_bytes"] == 70_272 and told["rows"][0]["row_bytes"] == 131_072 * 70_272
    assert told["all_layers_staging_bytes"] == 61 * 131_072 * 1152
    assert main(["plan", str(tmp_path), "--json", "--prompt-len", "131072", "--kv-dtype", "fp8"]) == 0
    told = json.loads(capsys.readouterr().out)  # a scale per layer, for both parts of a latent
    assert told["token_bytes"] == 70_272 // 2 and told["rows"][0]["row_bytes"] == 131_072 * 70_272 // 2 + 61 * 4
