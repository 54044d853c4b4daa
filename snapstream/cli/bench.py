"""``snapstream bench``: tokens per second of prefill and decode, named as llama-bench names them.

``pp512`` is a prompt of 512 tokens, ``tg128`` 128 tokens after a prompt of one, ``tg128 @ 4096`` after one of 4096,
whose prefill is ``pp4096``. Decode is also compared with reading memory: a step reads every weight and the visible part
of every row once, and the share is those bytes per second over the read rate, measured in the same run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated

import typer

from snapstream.assets import TINY_MODEL
from snapstream.cli.flags import ENGINE_ALIASES, Flags
from snapstream.config import EngineConfig, EngineOptions, ModelConfig
from snapstream.config.engine import setting
from snapstream.config.values import as_count, check, format_bytes, num_cores
from snapstream.types import SamplingParams
from snapstream.version import __version__

if TYPE_CHECKING:
    from snapstream.llm import LLM

HELP = """Measure prefill and decode: tokens per second, their spread, the share of the read rate that decode uses.

MODEL is a checkpoint folder, a hub id, or with --random a config.json alone; without it the tiny model is measured.

\b
Examples:
  snapstream bench Qwen3-0.6B/
  snapstream bench Qwen3-0.6B/ -p 512,4096 -n 64 -d 0,4096,32768 --budget 4096 --max-rows 8
  snapstream bench Qwen/Qwen3-8B --random --weights int4 --json
"""

ENGINE = Flags(
    defaults={"max_rows": 1},
    words={
        "max_rows": "Rows decoded together, all of one prompt.",
        "max_model_len": "Prompt and output tokens. Default: what the tests need.",
        "budget": "Slots of a row, or 'full'. At most max_model_len.",
    },
    without=("max_waiting", "local_ranks", "master_addr", "prefix_store", "prefix_dir", "prefix_disk", "loras"),
    aliases=ENGINE_ALIASES,
)
TESTS = Flags(
    aliases={"n_prompt": ("-p",), "n_gen": ("-n",), "n_depth": ("-d",), "repetitions": ("-r",), "seed": ("-s",)}
)


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """What is measured, by the names of llama-bench."""

    n_prompt: str = setting("512", "Prompt tokens of a prefill test; several with commas, 0: none.", metavar="N,...")
    n_gen: str = setting("128", "Tokens of a decode test; several with commas, 0: none.", metavar="N,...")
    n_depth: str = setting("0", "Prompt tokens before a decode test; several with commas.", metavar="N,...")
    repetitions: int = setting(5, "Measurements of each test, after one warm-up.")
    seed: int = setting(0, "Seed of prompts and random weights.")
    is_random: bool = setting(False, "Random weights: no checkpoint is read.", flag="--random")
    as_json: bool = setting(False, "Print one JSON object at the end.", flag="--json")


@dataclass(frozen=True, slots=True)
class Test:
    """``num_prompt`` tokens in, ``num_new`` tokens out; without new tokens a prefill test."""

    num_prompt: int
    num_new: int = 0

    @property
    def name(self) -> str:
        """As llama-bench has it."""
        if not self.num_new:
            return f"pp{self.num_prompt}"
        return f"tg{self.num_new}" + (f" @ {self.num_prompt}" if self.num_prompt > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One test, over its repetitions."""

    test: str
    num_prompt: int
    num_new: int
    rows: int
    tokens_per_s: list[float]
    mean: float
    spread: float  # standard deviation; 0 of one repetition
    read_share: float | None = None  # of the measured read rate; of decode

    @classmethod
    def of(cls, test: Test, rows: int, rates: list[float], read: float | None = None) -> Result:
        """``read``: seconds that reading takes, per token."""
        mean = fmean(rates)
        return cls(
            test=test.name,
            num_prompt=test.num_prompt,
            num_new=test.num_new,
            rows=rows,
            tokens_per_s=rates,
            mean=mean,
            spread=stdev(rates) if len(rates) > 1 else 0.0,
            read_share=None if read is None else read * mean,
        )


def bench(
    flags: Annotated[BenchFlags, TESTS],
    engine: Annotated[EngineOptions, ENGINE],
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder, hub id or config.json. Default: the shipped tiny one.", show_default=False),
    ] = None,
) -> None:
    as_count("repetitions", flags.repetitions, 1)
    rows = as_count("max_rows", engine.max_rows, 1)
    tests = make_tests(flags, rows)
    if flags.is_random:
        check(engine.tensor_parallel == 1, f"--random supports one rank; tensor_parallel is {engine.tensor_parallel}")
    longest = max(test.num_prompt + test.num_new + 1 for test in tests)
    if engine.max_model_len is None:
        engine = replace(engine, max_model_len=longest)
    check(
        longest <= (engine.max_model_len or 0),
        f"max_model_len is {engine.max_model_len}; the longest test needs {longest} tokens",
    )
    engine = replace(engine, num_speculative_tokens=0)  # random prompts and weights repeat themselves more than text
    from snapstream.llm import LLM
    from snapstream.models.hub import local_folder
    from snapstream.startup.build import build_random, build_ranks
    from snapstream.startup.measure import read_bandwidth

    folder = TINY_MODEL if model is None else local_folder(model, config_only=flags.is_random)
    make = build_random(flags.seed) if flags.is_random else build_ranks
    with LLM(folder, engine, make_runner=make, progress=sys.stderr.isatty()) as llm:
        read_rate = read_bandwidth(llm.config.device)
        about = describe(TINY_MODEL if model is None else model, llm, read_rate, is_random=flags.is_random)
        if not flags.as_json:
            print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
            print(HEADING)
        results = []
        for result in measure(llm, tests, rows, read_rate, flags):
            results.append(result)
            if not flags.as_json:
                print(line_of(result), flush=True)
    if flags.as_json:
        figures = {"read_bytes_per_s": read_rate, "tests": [asdict(result) for result in results]}
        print(json.dumps({**about, **figures}))


def make_tests(flags: BenchFlags, rows: int = 1) -> list[Test]:
    """The tests in order, without repeats; ValueError for invalid lengths. The prefill of one row is in its decode."""
    prompts, outputs, depths = (
        numbers(name, getattr(flags, name)) for name in ("n_prompt", "n_gen", "n_depth")
    )  # fmt: skip
    found = [Test(length) for length in prompts if length]
    for depth in depths:
        found += [Test(depth)] * (depth > 0 and rows > 1 and any(outputs))
        found += [Test(max(depth, 1), length) for length in outputs if length]
    check(bool(found), "nothing to measure: n_prompt and n_gen are 0")
    return list(dict.fromkeys(found))


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers with commas between them."""
    parts = text.split(",")
    check(all(part.strip().isdecimal() for part in parts), f"{name} is {text!r}; it must be like 512 or 0,4096")
    return [int(part) for part in parts]


def measure(llm: LLM, tests: list[Test], rows: int, read_rate: float, flags: BenchFlags) -> Iterator[Result]:
    """Run every test once unmeasured, then ``repetitions`` times. A decode test of one row is a prefill test, too."""
    random = Random(flags.seed)
    seen = set(tests)
    for test in tests:
        samples = rows if test.num_new else 1
        params = SamplingParams(n=samples, max_tokens=test.num_new + 1, temperature=0.0, ignore_eos=True)
        timings = []
        for _ in range(flags.repetitions + 1):
            prompt = [random.randrange(llm.model_config.vocab_size) for _ in range(test.num_prompt)]
            timings.append(llm.generate([prompt], params)[0].timings)
        if (prefill := Test(test.num_prompt)) == test or (samples == 1 < test.num_prompt and prefill not in seen):
            seen.add(prefill)
            yield Result.of(prefill, 1, [test.num_prompt / found.prefill_ms * 1e3 for found in timings[1:]])
        if test.num_new:
            read = step_bytes(llm.model_config, llm.config, samples, test.num_prompt + test.num_new // 2)
            rates = [samples * test.num_new / found.decode_ms * 1e3 for found in timings[1:]]
            yield Result.of(test, samples, rates, read / samples / read_rate)


def step_bytes(model: ModelConfig, config: EngineConfig, num_rows: int, num_tokens: int) -> int:
    """Bytes that one rank reads in a decode step of ``num_rows`` rows of ``num_tokens`` tokens."""
    from snapstream.models.registry import kv_spec_of
    from snapstream.models.sharding import decode_weight_bytes, rank_config

    own = rank_config(model, config.parallel, formats=config.weights)
    spec = kv_spec_of(own, config.dtype, config.kv_dtype).limited(config.max_model_len)
    visible = spec.visible_bytes(min(num_tokens, config.budget.capacity), num_tokens)
    num_own = -(-num_rows // config.parallel.dp_size)
    return decode_weight_bytes(own, config.dtype, config.weights, num_rows) + num_own * visible


def describe(model: Path, llm: LLM, read_rate: float, *, is_random: bool) -> dict[str, str]:
    """What was measured, and on what; ``model`` as it was given."""
    from snapstream.kernels.cpu.looped.build import instruction_sets
    from snapstream.models.sharding import num_parameters, weight_bytes
    from snapstream.startup.measure import machine_name

    own, config = llm.model_config, llm.config
    size = format_bytes(weight_bytes(own, config.dtype, config.weights))
    name = (model.resolve().parent if model.is_file() else model.resolve()).name if model.exists() else str(model)
    threads = os.environ.get("OMP_NUM_THREADS") or str(num_cores())
    where = f", {instruction_sets()[0]}, {threads} threads" * config.device.startswith("cpu")
    return {
        "version": __version__,
        "model": f"{name}, {num_parameters(own) / 1e6:,.1f}M parameters" + ", random weights" * is_random,
        "machine": f"{machine_name(config.device)}{where}, reads {read_rate / 1e9:,.1f} GB/s",
        "executor": config.executor + f", {config.parallel.size} ranks" * (config.parallel.size > 1),
        "weights": f"{'dtype' if config.weights is None else config.weights.describe()}, {size}",
        "rows": f"{config.max_rows} of {config.budget.capacity:,} slots, KV dtype "
        f"{config.dtype if config.kv_dtype == 'auto' else config.kv_dtype}, computed in {config.dtype}",
    }


HEADING = f"{'test':<22} {'rows':>5} {'tokens/s':>24} {'of read rate':>13}"


def line_of(result: Result) -> str:
    rate = f"{result.mean:,.2f} ± {result.spread:,.2f}"
    share = "" if result.read_share is None else f"{result.read_share:.0%}"
    return f"{result.test:<22} {result.rows:>5} {rate:>24} {share:>13}".rstrip()
