"""One rank's share runs alone from end to end on a tiny shape, and the figures are what they say."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import rank_share as command
from benchmarks.gpu_suite.device import Device
from benchmarks.gpu_suite.rank_share import measured, small_share
from benchmarks.gpu_suite.suite import Bench


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
