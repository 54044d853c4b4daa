"""Runs sections within a time budget and writes the result after each of them; see ``__init__.py``."""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu_suite.device import Device
from snapstream.config import ModelConfig
from snapstream.models.decoder import Decoder
from snapstream.models.weights import DecoderWeights

Figures = Iterator[dict[str, Any]]


@dataclass
class Bench:
    """What a section gets: the device, its measured ceilings, and decoders with random weights."""

    device: Device
    is_smoke: bool
    ceilings: dict[str, float] = field(default_factory=dict)  # read_gb_per_s, tflop_per_s
    _decoders: dict[str, Decoder] = field(default_factory=dict)  # the last one only

    def decoder(self, name: str, config: ModelConfig) -> Decoder:
        """The decoder of that name; making another one frees it."""
        if name not in self._decoders:
            self._decoders.clear()
            self.device.free()
            weights = DecoderWeights.random(config, self.device.dtype, self.device.name, seed=0)
            self._decoders[name] = Decoder(config, weights)
        return self._decoders[name]

    def forget(self) -> None:
        self._decoders.clear()
        self.device.free()


@dataclass(frozen=True)
class Section:
    """A named generator of figures, and the most seconds it may take; with less than half of them it does not start."""

    name: str
    run: Callable[[Bench], Figures]
    limit_s: float


def run(sections: list[Section], bench: Bench, budget_s: float, out: Path, head: dict[str, Any]) -> dict[str, Any]:
    """Run what fits; the file is whole after every figure."""
    began = perf_counter()
    result: dict[str, Any] = {**head, "ceilings": bench.ceilings, "sections": {}}
    for section in sections:
        left = budget_s - (perf_counter() - began)
        entry: dict[str, Any] = {"figures": [], "error": None, "is_cut": False, "seconds": 0.0}
        result["sections"][section.name] = entry
        if left <= max(5.0, section.limit_s / 2):  # a figure that has begun cannot be cut
            entry["is_cut"] = True
            _write(out, result)
            continue
        print(f"== {section.name} (at most {min(left, section.limit_s):.0f} s)", flush=True)
        _run_one(section, bench, min(left, section.limit_s), entry, lambda: _write(out, result))
        bench.device.free()
        result["seconds"] = perf_counter() - began
        _write(out, result)
    return result


def _run_one(section: Section, bench: Bench, limit_s: float, entry: dict[str, Any], save: Callable[[], None]) -> None:
    began = perf_counter()
    try:
        with torch.inference_mode():
            for figure in section.run(bench):
                entry["figures"].append(figure)
                entry["seconds"] = perf_counter() - began
                print(
                    json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figure.items()}), flush=True
                )
                save()
                if entry["seconds"] > limit_s:
                    entry["is_cut"] = True
                    break
    except Exception:  # the next section may still work
        entry["error"] = traceback.format_exc()
        print(entry["error"], flush=True)
        bench.forget()
    entry["seconds"] = perf_counter() - began
    gc.collect()


def _write(out: Path, result: dict[str, Any]) -> None:
    part = out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(out)
