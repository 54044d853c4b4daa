"""A stored cell says of every model how its engine rounds: a width whose name does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evals.rounded import WIDTHS, Width
from snapstream.assets import TINY_LATENT_MODEL, TINY_MODEL
from snapstream.config import EngineConfig, EngineOptions, KVBudget
from snapstream.models.registry import read_model_config
from snapstream.plan.widths import weight_forms

NEVER = ("auto", "bfloat16", "int8", "int4", "int4-everywhere")  # rounds decode, in any model


def config_of(folder: Path, width: Width) -> EngineConfig:
    """What an engine of such a width is decided to be, on a processor that multiplies bf16."""
    options = EngineOptions(weights=width.weights, activations=width.activations, dtype="float32", device="cpu")
    forms = weight_forms(read_model_config(folder), options, device="cpu", executor="eager")
    return EngineConfig(
        budget=KVBudget.full(64), max_model_len=64, weights=replace(forms, rounds_prefill=width.rounds_prefill)
    )


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_decode_of_latents_takes_inputs_as_they_are(bits: str) -> None:
    fits, other = WIDTHS[f"{bits}-prefill"], WIDTHS[f"{bits}-auto"]
    fits.check(config_of(TINY_LATENT_MODEL, fits))
    assert "activations" not in fits.settings and fits.settings["prefill_inputs"] == "bfloat16"
    with pytest.raises(ValueError, match=f"this width is for the former: '{bits}-auto'"):
        other.check(config_of(TINY_LATENT_MODEL, other))


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_decode_of_dense_models_rounds_by_itself(bits: str) -> None:
    fits, other = WIDTHS[f"{bits}-auto"], WIDTHS[f"{bits}-prefill"]
    fits.check(config_of(TINY_MODEL, fits))
    assert fits.settings["activations"] == "int8"
    with pytest.raises(ValueError, match=f"this width is for the latter: '{bits}-prefill'"):
        other.check(config_of(TINY_MODEL, other))


@pytest.mark.parametrize("name", NEVER)
@pytest.mark.parametrize("folder", [TINY_MODEL, TINY_LATENT_MODEL])
def test_widths_that_round_nothing_fit_every_model(name: str, folder: Path) -> None:
    WIDTHS[name].check(config_of(folder, WIDTHS[name]))


def test_every_width_has_cells_of_its_own() -> None:
    assert len({tuple(sorted(width.settings.items())) for width in WIDTHS.values()}) == len(WIDTHS)
