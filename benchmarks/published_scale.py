"""Tables of what ``plan`` predicts for DeepSeek-R1 on many devices; ``python -m figures`` puts them into
docs/research/scale.md.

We measured nothing of it but what the last table says. Rows and bytes follow from config.json; times are those of
``predictor.py``; what others reported stands beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.machine import RESULTS
from benchmarks.predictor import Predictor, StepTime
from benchmarks.published_plan import DTYPE, SLOTS, published_models
from figures.markdown import table
from snapstream.config import EngineOptions, KVBudget, ModelConfig, ParallelConfig
from snapstream.models.registry import kv_spec_of
from snapstream.models.sharding import rank_config, tensor_bytes
from snapstream.plan.fit import engine_config, weight_formats
from snapstream.plan.memory import EngineMemory, engine_memory

PROMPT_LEN = 131_072
H200, SOCKET = 141 * 10**9, 64 * 10**9  # bytes; of the socket only the memory is used
BANDWIDTH, FLOP = 4.8e12, 989e12  # of an H200
HOST_COPY = 50e9  # bytes per second from a host to each of its devices
NODE = 8  # H200 that share a switch of NVLink in a machine that one can buy
LONG_CHUNK = 4096
USERS = 1_000_000
SMOOTH_S = 0.05  # a step that gives every user 20 tokens per second
# SnapStream, arXiv 2511.03092, table 5: rows; tokens per second, which the paper multiplies by an assumed 2.4 for
# multi-token prediction.
PAPER = {"128k": (16, 434 / 2.4), "32k": (64, 1832 / 2.4), "8k": (256, None)}
GROUPS = {
    "experts": ("experts_",),
    "attention": ("q", "kv", "o"),
    "shared experts": ("shared_",),
    "dense layers": ("gate_up", "down"),
    "embedding and head": ("embed", "lm_head"),
    "router and norms": ("router", "input_norm", "post_norm", "final_norm"),
}


@dataclass(frozen=True)
class Machine:
    """Devices of one engine."""

    name: str
    num_ranks: int
    memory_bytes: int
    attention: str

    @property
    def options(self) -> EngineOptions:
        """Of an engine on them."""
        return options(self.num_ranks, self.attention)


@dataclass(frozen=True)
class Workload:
    """What a user does: every so many seconds a prompt, of which the begin is stored, and an answer."""

    name: str
    prompt_len: int
    num_restored: int
    answer_len: int
    every_s: float
    slots: int = 8192


DEVICES = (("8 H200", 8, H200), ("16 H200", 16, H200), ("16 devices of 64 GB", 16, SOCKET))
MACHINES = [Machine(name, ranks, memory, way) for name, ranks, memory in DEVICES for way in ("dp", "tp")]
# Milliseconds per output token that others reported of DeepSeek-R1 in FP8 under SGLang, by rows: 8 H200, prompts and
# answers of 1,024 tokens (github.com/SemiAnalysisAI/InferenceX/issues/870); 16 H100 in two nodes over InfiniBand,
# prompts of 128 tokens (github.com/tenstorrent/tt-inference-server/issues/356).
REPORTED = {("8 H200", 8, 4.8e12, 1536): {8: 12.8, 16: 17.2, 32: 25.6, 64: 34.6},
            ("16 H100 in two nodes", 16, 3.35e12, 256): {1: 23.1}}  # fmt: skip
WORKLOADS = [
    Workload("chat: 4k of prompt, 400 tokens, every 5 min", 4096, 0, 400, 300),
    Workload("a new document: 32k, 500 tokens, every 10 min", 32_768, 0, 500, 600),
    Workload("agents: 128k of which 95 % are stored, 500 tokens, every min", PROMPT_LEN, 124_416, 500, 60),
    Workload("a new document: 128k, 500 tokens, every 10 min", PROMPT_LEN, 0, 500, 600),
]


def options(num_ranks: int, attention: str = "dp", experts: str = "tp") -> EngineOptions:
    """Of an engine of bf16 on so many ranks."""
    ways: dict[str, Any] = {"attention": attention, "experts": experts}
    return EngineOptions(dtype=DTYPE, tensor_parallel=num_ranks, **ways)


@cache
def model() -> ModelConfig:
    return published_models()["DeepSeek-V3, R1"]


@cache
def memory(machine: Machine, slots: int) -> EngineMemory:
    """Of an engine whose rows have so many slots and whose pool holds the long prompt."""
    budget = KVBudget.full(slots) if slots == PROMPT_LEN else KVBudget.of(slots)
    return engine_memory(model(), engine_config(model(), machine.options, budget, PROMPT_LEN, device="cuda"))


def rows_that_fit(machine: Machine, slots: int) -> int:
    return max(0, memory(machine, slots).rows_that_fit(machine.memory_bytes))


@cache
def predictor(num_ranks: int, attention: str = "dp") -> Predictor:
    formats = weight_formats(model(), options(num_ranks, attention), device="cuda")
    return Predictor.of(model(), options(num_ranks, attention), formats, BANDWIDTH, FLOP)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3g}" if num_bytes < 1e11 else f"{num_bytes / 1e9:,.0f}"


def _range(values: Iterable[float], digits: int = 3) -> str:
    """The two ends: ``19 - 43``."""
    texts = [f"{value:,.0f}" if value >= 100 else f"{value:.{digits}g}" for value in values]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} - {texts[-1]}"


def rows_table() -> str:
    """Bytes on each device and rows on all of them, by machine; the paper's node last."""
    lines = []
    for machine in MACHINES:
        found = memory(machine, SLOTS["32k"])
        others = found.staging_bytes + found.transient_bytes + found.dequantized_bytes + found.framework_bytes
        rows = [f"{rows_that_fit(machine, slots):,}" for slots in SLOTS.values()]
        sizes = (found.weight_bytes, others, found.state_bytes + found.batch_bytes)
        lines.append([machine.name, machine.attention, *(_gb(size) for size in sizes), *rows])
    paper = [f"{rows}" for rows, _ in PAPER.values()]
    lines.append(["the paper's 16 sockets of 64 GB", "projections tp, rows dp", "", "", "", *paper])
    titles = ["devices", "attention", "weights, GB", "staging and temporaries, GB", "a row's sampling on each, GB"]
    return table([*titles, *(f"rows of {name} slots" for name in SLOTS)], lines) + "\n"


def roles_table() -> str:
    """Weights of one of 16 ranks, in groups of roles."""
    ways = (("tp", "tp"), ("dp", "tp"), ("dp", "ep"))
    formats = predictor(16).formats
    sizes = []
    for attention, experts in ways:
        parallel: ParallelConfig = options(16, attention, experts).parallel
        found = tensor_bytes(rank_config(model(), parallel, formats=formats), DTYPE, formats)
        sizes.append({name: _gb(sum(size for role, size in found.items() if _group(role) == name)) for name in GROUPS})
        sizes[-1]["together"] = _gb(sum(found.values()))
    lines = [[name, *(size[name] for size in sizes)] for name in (*GROUPS, "together")]
    titles = [f"attention {attention}, experts {experts}" for attention, experts in ways]
    return table(["GB on one of 16 ranks", *titles], lines) + "\n"


def _group(role: str) -> str:
    """The group that names the longest begin of a role."""
    found = [(len(begin), name) for name, begins in GROUPS.items() for begin in begins if role.startswith(begin)]
    return max(found)[1]


def steps_table() -> str:
    """Predicted steps at the paper's batches, beside what the paper says."""
    lines = []
    for num_ranks in (8, 16):
        for name, (rows, told) in PAPER.items():
            step = predictor(num_ranks).step(rows, SLOTS[name])
            paper = "" if told is None or num_ranks != 16 else f"{told:,.0f}"
            lines.append([f"{num_ranks} H200", name, f"{rows}", *_parts(step), paper])
    titles = ["devices", "slots", "rows", "weights, ms", "rows, ms", "collectives, ms", "step, ms", "tokens/s"]
    return table([*titles, "the paper's node, without its factor 2.4"], lines) + "\n"


def _parts(step: StepTime) -> list[str]:
    parts = [f"{1e3 * part:.3g}" for part in (step.weights_s, step.rows_s)]
    ranges = [_range(1e3 * part for part in over) for over in (step.collectives_s, step.seconds)]
    return [*parts, *ranges, _range(reversed(step.tokens_per_s))]


def largest_table() -> str:
    """Each cache at the most rows that fit, against full rows."""
    lines = []
    for machine in (MACHINES[0], MACHINES[2]):
        full: tuple[float, ...] = ()
        for name, slots in SLOTS.items():
            step = predictor(machine.num_ranks).step(rows_that_fit(machine, slots), slots)
            full = full or step.tokens_per_s
            gains = [found / of_full for found, of_full in zip(step.tokens_per_s, full, strict=True)]
            lines.append([machine.name, name, f"{step.num_rows:,}", *_parts(step), _range(sorted(gains), 2)])
    titles = ["devices", "slots", "rows that fit", "weights, ms", "rows, ms", "collectives, ms", "step, ms", "tokens/s"]
    return table([*titles, "of full rows"], lines) + "\n"


def prompts_table() -> str:
    """Seconds of one prompt alone, by chunk."""
    lines = []
    for num_ranks in (8, 16):
        for length, restored in ((32_768, 0), (PROMPT_LEN, 0), (PROMPT_LEN, 124_416)):
            for chunk in (512, LONG_CHUNK):
                time = predictor(num_ranks).prompt(length, chunk, restored)
                stored = f" of which {restored:,} are stored" if restored else ""
                copy = _copy_s(restored)
                own = f"{time.layers_s:.2g}", f"{time.attention_s:.2g}", f"{copy:.2g}" if copy else ""
                ranges = _range(time.collectives_s, 2), _range((part + copy for part in time.seconds), 2)
                lines.append([f"{num_ranks} H200", f"{length:,}{stored}", f"{chunk:,}", *own, *ranges])
    titles = ["devices", "prompt", "chunk", "products or weights, s", "attention, s", "stored latents, s",
              "collectives, s", "prompt, s"]  # fmt: skip
    return table(titles, lines) + "\n"


def _smooth_rows(workload: Workload) -> int:
    """The most rows of 8 H200 on one switch that every user can read along with, in whole rounds of ranks."""
    machine = MACHINES[0]
    most, slots = rows_that_fit(machine, workload.slots), min(workload.slots, workload.prompt_len)
    rows = machine.num_ranks
    while rows + machine.num_ranks <= most and predictor(NODE).step(rows + NODE, slots).seconds[0] <= SMOOTH_S:
        rows += machine.num_ranks
    return rows


def _copy_s(num_restored: int) -> float:
    """Seconds in which every rank copies stored latents of so many tokens from its host."""
    return num_restored * kv_spec_of(model(), DTYPE).row_bytes(1) / HOST_COPY


def reports_table() -> str:
    """Predicted steps with the heads split, beside what others measured of another engine that splits them so."""
    lines = []
    for (name, ranks, bandwidth, slots), told in REPORTED.items():
        heads = replace(predictor(ranks, "tp"), bandwidth_bytes_per_s=bandwidth)
        for rows, reported in told.items():
            step = heads.step(rows, slots)
            quotients = [1e-3 * reported / seconds for seconds in reversed(step.seconds)]
            lines.append([name, f"{rows}", _range(1e3 * seconds for seconds in step.seconds), f"{reported}",
                          _range(quotients, 2)])  # fmt: skip
    return table(["devices", "rows", "step, ms, predicted", "ms per token, reported", "quotient"], lines) + "\n"


def users_table() -> str:
    """Nodes of 8 H200 for a million users, by what they do. All collectives go over one switch."""
    lines = []
    for load in WORKLOADS:
        slots = min(load.slots, load.prompt_len)
        rows = _smooth_rows(load)
        step = predictor(NODE).step(rows, slots)
        requests = USERS / load.every_s
        decode = requests * load.answer_len / step.tokens_per_s[0]
        prompt = predictor(NODE).prompt(load.prompt_len, LONG_CHUNK, load.num_restored)
        prefill = requests * (prompt.seconds[0] + _copy_s(load.num_restored))
        moved = requests / decode * kv_spec_of(model(), DTYPE).row_bytes(slots)
        lines.append([load.name, f"{requests:,.0f}", f"{requests * load.answer_len:,.0f}", f"{rows:,}",
                      _range([decode]), _range([prefill]), f"{_gb(moved)} GB/s",
                      f"{USERS * 100 / decode:,.0f}"])  # fmt: skip
    titles = ["a million users", "requests/s", "tokens/s", "rows of a node", "decode nodes", "prefill nodes",
              "rows sent to a decode node", "users of 100 decode nodes"]  # fmt: skip
    return table(titles, lines) + "\n"


def fronts_table() -> str:
    """What the host's part costs, measured on a CPU with the tiny model, and what follows for a million users."""
    newest = sorted((RESULTS / "cpu").glob("????-??-??_serving.json"))
    if not newest:
        return "(not measured; run python -m benchmarks.serving --save)\n"
    result = json.loads(newest[-1].read_text())
    found = result["figures"]
    front, engine = found["front_cpu_us_per_token"], found["server_engine_cpu_us_per_token"]
    lines = []
    for load in WORKLOADS:
        tokens = USERS / load.every_s * load.answer_len
        lines.append([load.name, f"{tokens:,.0f}", f"{tokens * front / 1e6:,.0f}", f"{1e6 / front:,.0f}",
                      f"{1e6 / engine:,.0f}"])  # fmt: skip
    titles = ["a million users", "tokens/s", "cores of HTTP fronts", "tokens/s of one front",
              "tokens/s of one engine process, the tiny model's own work included"]  # fmt: skip
    source = f"Measured per token: {front:.0f} µs in the front, {engine:.0f} µs in the engine's process"
    return f"{table(titles, lines)}\n\n{source} ({newest[-1].name}, {result['device']}).\n"


TABLES: dict[str, Callable[[], str]] = {
    "scale_rows": rows_table,
    "scale_roles": roles_table,
    "scale_steps": steps_table,
    "scale_reports": reports_table,
    "scale_largest": largest_table,
    "scale_prompts": prompts_table,
    "scale_users": users_table,
    "scale_fronts": fronts_table,
}
