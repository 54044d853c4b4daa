"""Every way of the section on looped decode on a GPU gives the same scores, over dense weights and over codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from snapstream.config import WeightFormats
from tests.kernels.triton.interpreter import interpreted

pytestmark = interpreted()
pytest.importorskip("triton")

from benchmarks.gpu_suite import looping  # noqa: E402
from benchmarks.gpu_suite.device import Device  # noqa: E402
from benchmarks.gpu_suite.models import engine_config  # noqa: E402
from benchmarks.gpu_suite.suite import Bench  # noqa: E402
from snapstream.exec.runner import ModelRunner  # noqa: E402


def test_every_way_over_int4_weights_gives_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "SLOTS", 64)
    bench, formats = Bench(Device("cpu"), True), WeightFormats.of("int4")
    decoder = looping.decoder_in_codes(bench, "llama_1b", formats)
    engine = engine_config(bench, looping.SLOTS, 1, looping.CONTEXT + 256, 64)
    runner = ModelRunner(decoder, replace(engine, weights=formats))
    runner.cache.k.normal_()
    runner.cache.v.normal_()
    with torch.inference_mode():
        found = {way: call() for way, call in looping.ways(runner, decoder, 1)}
    assert [way[:2] for way in found] == ["B0", "B1", "B2", "B3"]
    want = found.pop("B0 graph of kernels")
    for scores in found.values():
        torch.testing.assert_close(scores, want, rtol=1e-3, atol=1e-3)
