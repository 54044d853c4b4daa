"""Runs sections within a time budget and writes the result after each of them; see ``__init__.py``."""

from __future__ import annotations

import gc
import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu_suite.device import Device
from benchmarks.stand_ins import random_weights
from snapstream.config import ModelConfig
from snapstream.models.decoder import Decoder

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
            weights = random_weights(config, self.device.dtype, self.device.name, seed=0)
            self._decoders[name] = Decoder(config, weights)
        return self._decoders[name]

    def forget(self) -> None:
        self._decoders.clear()
        self.device.free()


@dataclass(frozen=True)
class Section:
    """A named generator of figures, the most seconds it may take, and what its figures are, for the JSON.

    With less than half of its seconds left it does not start.
    """

    name: str
    run: Callable[[Bench], Figures]
    limit_s: float
    about: str = ""


class Watchdog:
    """Ends the process when a figure does not come back in time: the file holds all that came before."""

    def __init__(self, seconds: float, save: Callable[[], None]) -> None:
        self._save = save
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        try:
            self._save()
            print("time is over; what was running is cut", flush=True)
        finally:  # the file of the last figure is whole, whatever happens here
            os._exit(1)


def run(
    sections: list[Section], bench: Bench, budget_s: float, out: Path, head: dict[str, Any], grace_s: float = 0.0
) -> dict[str, Any]:
    """Run what fits; the file is whole after every figure. With ``grace_s`` a figure may be late by that much."""
    began = perf_counter()
    result: dict[str, Any] = {**head, "ceilings": bench.ceilings, "seconds": 0.0, "sections": {}}

    def cut() -> None:
        for entry in result["sections"].values():
            entry["is_cut"] |= entry["is_running"]
        result["seconds"] = perf_counter() - began
        _write(out, result)

    with Watchdog(budget_s + grace_s, cut) if grace_s else nullcontext():
        for section in sections:
            left = budget_s - (perf_counter() - began)
            entry: dict[str, Any] = {"about": section.about, "figures": [], "error": None, "is_cut": False,
                                     "is_running": False, "seconds": 0.0}  # fmt: skip
            result["sections"][section.name] = entry
            if left <= max(5.0, section.limit_s / 2):
                entry["is_cut"] = True
                _write(out, result)
                continue
            print(f"== {section.name} (at most {min(left, section.limit_s):.0f} s)", flush=True)
            entry["is_running"] = True
            _run_one(section, bench, min(left, section.limit_s), entry, lambda: _write(out, result))
            entry["is_running"] = False
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
    part = out.with_suffix(f".part{threading.get_ident()}")  # the watchdog may write beside the section
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(out)
