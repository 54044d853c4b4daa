"""Per-head budgets without a file: the profile of a checkpoint that is known, or can be measured at the start.

Known are the profile that lies beside the weights (``heads.json``; the shipped models have one) and the one kept in the
user's cache folder by the checkpoint's fingerprint, where ``snapstream calibrate`` writes it too. Without either the
model is calibrated, if that takes at most ``LIMIT_S``; how long it would take otherwise is kept, so that the next
start need not find out. Invariant: no engine is refused or fails for it; wherever per-head budgets are not supported or
would cost too long a start, all heads are equal and a line says why.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snapstream.config import EngineConfig, EngineOptions, ModelConfig
from snapstream.config.kv import HeadProfile, read_profile
from snapstream.kernels.compile_cache import cache_root
from snapstream.models.config_json import fingerprint
from snapstream.models.registry import kv_spec_of
from snapstream.models.sharding import layer_parameters, weight_bytes
from snapstream.startup.measure import decide

FILE = "heads.json"  # beside the weights
LIMIT_S = 60.0  # that a start may spend on calibration
PROMPT_LEN = 2048  # tokens of its documents
THREAD_FLOPS = 5e10  # that a CPU thread does a second, about: a large model is refused before it is loaded
READ_RATE = 1e9  # bytes of weights a second, about, which calibration reads once more than the engine
ANSWER_LEN = 16  # tokens of a generated answer, about


def stored_profile(folder: Path) -> HeadProfile | None:
    """The profile of a checkpoint that is known already. A file of other weights or with damage counts as none."""
    own = fingerprint(folder)
    for path in ((folder if folder.is_dir() else folder.parent) / FILE, cached(own)):
        try:
            found = read_profile(path)
        except ValueError:
            continue
        if found.model == own:
            return found
    return None


def cached(own: str) -> Path:
    """Where the profile of a checkpoint of that fingerprint is kept."""
    return cache_root() / "heads" / f"{own}.json"


def store_profile(profile: HeadProfile) -> Path:
    """Keep a profile for the next start, whole or not at all. OSError where that cannot be written."""
    path = cached(profile.model)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    profile.write(part)
    part.replace(path)
    return path


def _seconds_file(own: str, device: str) -> Path:
    """What the shortest calibration would take, where a start has found that to be too long: with as many threads."""
    import torch

    where = f"cpu-{torch.get_num_threads()}" if device == "cpu" else device.partition(":")[0]
    return cached(own).with_suffix(f".{where}.seconds")


def _known_seconds(own: str, device: str) -> float:
    try:
        return float(_seconds_file(own, device).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0


def _keep_seconds(own: str, device: str, seconds: float) -> None:
    path = _seconds_file(own, device)
    with suppress(OSError):  # the next start finds out again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"{seconds:.1f}", encoding="utf-8")


def automatic_heads(
    folder: Path,
    model: ModelConfig,
    options: EngineOptions,
    *,
    progress: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> tuple[EngineOptions, str]:
    """The options with their heads, and a line that says which, empty where unasked and rows keep every token.

    ``on_stage`` hears of a wait. ValueError for options that no engine could have, whatever its heads.
    """
    equal = replace(options, heads="none")
    config = decide(model, equal)
    if config.budget.num_topk == 0 or config.budget.capacity >= config.max_model_len:
        return equal, "" if options.heads is None else "heads: equal, because rows keep every token or select none"
    if (problem := _why_equal(model, options, config)) is not None:
        return equal, f"heads: equal, because {problem}"
    profile, how = stored_profile(folder), ""
    if profile is None:
        least = max(least_seconds(model, config), _known_seconds(fingerprint(folder), config.device))
        if least > LIMIT_S:
            return equal, _too_slow(folder, least)
        prompt_len = min(PROMPT_LEN, model.max_position - PROMPT_LEN // 16)
        profile, how = _calibrated(folder, options, prompt_len, progress, on_stage)
    if profile is None:
        return equal, how
    return replace(options, heads=profile), f"heads: their own budgets, by {profile.made_by}{how} (--heads none: equal)"


def _why_equal(model: ModelConfig, options: EngineOptions, config: EngineConfig) -> str | None:
    """Why this engine cannot have per-head budgets; None if it can."""
    if config.parallel.ranks_here < config.parallel.size:
        return "ranks on other machines may have other profiles"
    layers, heads = max(_num_layers(model), 1), model.num_kv_heads
    shares = ((1 / (layers * heads),) * heads,) * layers
    try:
        decide(model, replace(options, heads=HeadProfile(shares=shares, model="")))
    except ValueError as error:
        return str(error).removeprefix("heads: ")
    return None


def _num_layers(model: ModelConfig) -> int:
    """Layers to which a budget applies."""
    return len(kv_spec_of(model, "float32").budget_layers)


def least_seconds(model: ModelConfig, config: EngineConfig) -> float:
    """What the shortest calibration takes, about; on a GPU only the reading of weights, the first document tells."""
    from snapstream.calibration.calibrate import FAMILIES

    reading = weight_bytes(model, config.dtype, config.weights) / READ_RATE
    if config.device != "cpu":
        return reading
    import torch

    copies = 1 + _num_layers(model) * model.num_kv_heads
    tokens = len(FAMILIES) * (PROMPT_LEN + copies * ANSWER_LEN)
    products = 2.0 * layer_parameters(model) * model.num_layers * tokens
    return reading + products / (torch.get_num_threads() * THREAD_FLOPS)


def _calibrated(
    folder: Path, options: EngineOptions, prompt_len: int, progress: bool, on_stage: Callable[[str], None]
) -> tuple[HeadProfile | None, str]:
    """A profile measured now and kept, and what to add to the line; None and the whole line where there is none."""
    from snapstream.calibration.calibrate import TooSlow, calibrate

    on_stage(f"calibrating kv heads, at most {LIMIT_S:.0f} s; --heads none skips it")
    try:
        found = calibrate(
            folder, prompt_len=prompt_len, dtype=options.dtype, device=options.device, progress=progress,
            limit_s=LIMIT_S,
        )  # fmt: skip
    except TooSlow as error:
        _keep_seconds(fingerprint(folder), options.device, error.seconds)
        return None, _too_slow(folder, error.seconds)
    except (ValueError, OSError, RuntimeError) as error:  # no tokenizer, a context without room, memory of a GPU
        why = str(error).partition("\n")[0]
        return None, f"heads: equal, because the model cannot be calibrated: {why}"
    finally:
        _release(options.device)
    try:
        return found, f", kept in {store_profile(found)}"
    except OSError as error:
        return found, f", not kept: {error}"


def _release(device: str) -> None:
    """Give the memory of the calibrated model back before what is free is measured for the engine."""
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


def _too_slow(folder: Path, seconds: float) -> str:
    return (
        f"heads: equal; calibration would take {seconds:,.0f} s or more, and a start waits at most {LIMIT_S:.0f} s "
        f"(once: snapstream calibrate {folder})"
    )
