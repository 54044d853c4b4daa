"""How near each Triton kernel comes to the bandwidth of the device, and which cut of the tunable ones is best.

    python -m benchmarks.kernels --device cuda [--tune] [--save]
    python -m benchmarks.kernels --smoke          (tiny sizes, interpreted on a CPU: shows that it runs)

Every call of a case reads other data, more than four times the L2 cache in all, and all calls are captured in one
graph whose replays are timed with events: the median, divided by the calls. GB/s count every input and output once.
``--tune`` times a grid of cuts; a cut may not depend on the batch (rows are isolated), so the best is the one with the
highest geometric mean over the batches of a shape. A person carries it into ``kernels/triton/configs.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.compile_kernels import LLAMA_8B, MODELS, Shape
from benchmarks.machine import RESULTS
from figures.machine import describe
from snapstream.kernels.rows import HeadNorm, LayerRows

Call = Callable[[], object]
_CACHE_BYTES = 256 * 2**20  # four times the L2 of an H200


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size; ``calls`` differ in the data they touch."""

    op: str
    shape: str
    size: dict[str, int]
    num_bytes: int  # of one call
    calls: list[Call]
    cut: dict[str, int] = field(default_factory=dict)


def seconds(calls: list[Call], device: str) -> float:
    """Median time of one call; on a CPU the calls are made once and the clock means nothing."""
    if device == "cpu":
        for call in calls:
            call()
        return math.nan
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # inputs, row indices among them, are made there
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[5:]) / len(calls)


def bandwidth(device: str) -> dict[str, float]:
    """GB/s of reading 4 GiB (a sum) and of copying them (read and written bytes)."""
    if device == "cpu":
        return {"read_gb_per_s": math.nan, "copy_gb_per_s": math.nan}
    data = torch.randn(2**30, device=device)
    other = torch.empty_like(data)
    found = {
        "read_gb_per_s": data.nbytes / seconds([lambda: data.sum()], device) / 1e9,
        "copy_gb_per_s": 2 * data.nbytes / seconds([lambda: other.copy_(data)], device) / 1e9,
    }
    found["read_gb_per_s"] = max(found.values())  # a sum can be slower than the memory
    return found


def copies(num_bytes: int, device: str) -> int:
    """How many data sets of ``num_bytes`` outgrow the cache."""
    return 2 if device == "cpu" else min(max(math.ceil(_CACHE_BYTES / num_bytes), 2), 64)


def decode_cases(
    shape: Shape, batch: int, capacity: int, dtype: torch.dtype, device: str, tune: bool
) -> Iterator[Case]:
    """Decode attention over full rows."""
    from snapstream.kernels.triton import attention, configs

    heads, groups, dim, item = shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype.itemsize
    num_bytes = batch * (2 * groups * capacity * dim + 2 * heads * dim) * item
    sets = copies(num_bytes, device)
    k, v = (torch.randn(1, sets * batch + 1, groups, capacity, dim, device=device, dtype=dtype) for _ in range(2))
    cache = LayerRows(k, v, 0)
    q = torch.randn(batch, heads, dim, device=device, dtype=dtype)
    lengths = torch.full((batch,), capacity, device=device)
    usual = configs.decode_launch(dim, item, capacity, groups)
    cuts = [usual]
    if tune:
        grid = product((32, 64, 128), (4, 8), (2, 3, 4), (132, 264, 528))  # each is compiled, per capacity
        for block, num_warps, num_stages, programs in grid:
            if (num_stages - 1) * 2 * block * configs.power_of_two(dim) * item <= 200 * 1024:
                launch = configs.Launch(block=block, num_warps=num_warps, num_stages=num_stages)
                cuts.append(configs.split_row(launch, capacity, groups, programs))

    def call(first: int, cut: configs.DecodeLaunch) -> Call:
        rows = torch.arange(first, first + batch, device=device)
        return lambda: attention.decode_attention(q, cache, rows, lengths, launch=cut)

    for cut in dict.fromkeys(cuts):
        calls = [call(i * batch, cut) for i in range(sets)]
        size = {"batch": batch, "capacity": capacity}
        yield Case(
            op="decode_attention", shape=shape.name, size=size, num_bytes=num_bytes, calls=calls, cut=asdict(cut)
        )


def score_cases(shape: Shape, prompt: int, dtype: torch.dtype, device: str, tune: bool) -> Iterator[Case]:
    """SnapKV scores of a prompt; the keys count twice, because two passes read them."""
    from snapstream.kernels.triton import configs, scores

    num_queries = min(32, prompt // 4)
    num_bytes = 2 * shape.num_kv_heads * prompt * shape.head_dim * dtype.itemsize + 4 * shape.num_kv_heads * prompt
    sets = copies(num_bytes, device)
    keys = torch.randn(sets, shape.num_kv_heads, prompt, shape.head_dim, device=device, dtype=dtype)
    queries = torch.randn(num_queries, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
    cuts = [configs.score_launch(shape.head_dim, dtype.itemsize)]
    if tune:
        for block, num_warps, num_stages in product((32, 64, 128), (4, 8), (1, 2, 3)):
            cuts.append(replace(cuts[0], block=block, num_warps=num_warps, num_stages=num_stages))

    def call(own: Tensor, cut: configs.ScoreLaunch) -> Call:
        return lambda: scores.snapkv_scores(
            queries, own, prompt - num_queries, 4, prompt - num_queries, over_row=False, group_max=False, launch=cut
        )

    for cut in dict.fromkeys(cuts):
        calls = [call(own, cut) for own in keys]
        size = {"prompt": prompt}
        yield Case(op="snapkv_scores", shape=shape.name, size=size, num_bytes=num_bytes, calls=calls, cut=asdict(cut))


def small_cases(shape: Shape, tokens: int, capacity: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """The kernels around attention, for ``tokens`` tokens, and the gather of one row."""
    from snapstream.kernels.triton import dense
    from snapstream.kernels.triton import rows as gather
    from snapstream.kernels.triton import rows as rope_write

    heads, groups, dim, item = shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype.itemsize

    def data(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.float32).to(dtype)

    def case(op: str, num_bytes: int, make: Callable[[], Call]) -> Case:
        calls = [make() for _ in range(copies(num_bytes, device))]
        return Case(op=op, shape=shape.name, size={"tokens": tokens}, num_bytes=num_bytes, calls=calls)

    cache = LayerRows(data(1, tokens + 1, groups, 64, dim), data(1, tokens + 1, groups, 64, dim), 0)
    rows, slots = torch.arange(tokens, device=device), torch.arange(tokens, device=device) % 64
    angles = torch.randn(tokens, 1, dim, device=device), torch.randn(tokens, 1, dim, device=device)
    head_norm = HeadNorm(data(heads + groups, dim) if shape.has_norm else None, 1e-6)
    projected = tokens * (heads + 2 * groups) * dim * item

    def rope() -> Call:
        own = data(tokens, heads + 2 * groups, dim)
        return lambda: rope_write.norm_rope_write(own, head_norm, angles, cache, rows, slots)

    def normed() -> Call:
        x, residual, w = data(tokens, shape.hidden_size), data(tokens, shape.hidden_size), data(shape.hidden_size)
        return lambda: dense.launch_rms_norm(x, residual, w, 1e-6)

    def gated() -> Call:
        x = data(tokens, 2 * shape.intermediate_size)
        return lambda: dense.swiglu(x)

    def gathered() -> Call:
        keys, values = data(groups, 4 * capacity, dim), data(groups, 4 * capacity, dim)
        row = LayerRows(data(1, 1, groups, capacity, dim), data(1, 1, groups, capacity, dim), 0)
        index = torch.arange(capacity, device=device).mul(4).expand(groups, -1).contiguous()
        return lambda: gather.gather_rows(row, [0], keys, values, index)

    yield case("norm_rope_write", 2 * projected + tokens * dim * 8, rope)
    yield case("add_rms_norm", 4 * tokens * shape.hidden_size * item, normed)
    yield case("swiglu", 3 * tokens * shape.intermediate_size * item, gated)
    yield case("gather_rows", 4 * groups * capacity * dim * item + 8 * groups * capacity, gathered)


def cases(device: str, tune: bool) -> Iterator[Case]:
    """Every case, one at a time: their data does not fit together."""
    if device == "cpu":
        tiny = Shape(name="tiny", num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, intermediate_size=96)
        yield from decode_cases(tiny, 2, 200, torch.float32, device, False)
        yield from score_cases(tiny, 128, torch.float32, device, False)
        yield from small_cases(tiny, 4, 40, torch.float32, device)
        return
    bf16 = torch.bfloat16
    for shape in [LLAMA_8B] if tune else MODELS:
        for capacity, batch in [(8192, 1), (8192, 8), (8192, 64), (8192, 256), (32768, 1), (32768, 16), (131072, 1)]:
            yield from decode_cases(shape, batch, capacity, bf16, device, tune)
        for prompt in (8192, 131072):
            yield from score_cases(shape, prompt, bf16, device, tune)
        if not tune:
            for tokens in (1, 64, 512, 8192):
                yield from small_cases(shape, tokens, 8192, bf16, device)


def best_cuts(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cut with the highest geometric mean of GB/s over the batches of an (op, shape, capacity or prompt)."""
    rates: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for entry in (entry for entry in entries if entry["cut"] and "gb_per_s" in entry):
        fixed = {name: value for name, value in entry["size"].items() if name != "batch"}
        key = (entry["op"], entry["shape"], json.dumps(fixed))
        rates.setdefault(key, {}).setdefault(json.dumps(entry["cut"]), []).append(entry["gb_per_s"])
    table = []
    for (op, shape, fixed), cuts in rates.items():
        full = max(len(values) for values in cuts.values())
        mean = {cut: statistics.geometric_mean(values) for cut, values in cuts.items() if len(values) == full}
        cut = max(mean, key=lambda name: mean[name])
        table.append({"op": op, "shape": shape, **json.loads(fixed), "gb_per_s": mean[cut], "cut": json.loads(cut)})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda"])
    parser.add_argument("--tune", action="store_true", help="time a grid of cuts for Llama-3.1-8B and print the best")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes under Triton's interpreter, on a CPU")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/<date>_kernels.json")
    args = parser.parse_args()
    device = "cpu" if args.smoke else args.device
    if args.smoke:
        from tests.kernels.triton import interpreter

        interpreter.switch_on()
        if reason := interpreter.why_not():
            sys.exit(f"error: {reason}")
        interpreter.mend()
    elif not torch.cuda.is_available():
        sys.exit("error: torch sees no GPU; --smoke runs without one")
    ceiling = bandwidth(device)
    entries: list[dict[str, Any]] = []
    for case in cases(device, args.tune):
        entry: dict[str, Any] = {"op": case.op, "shape": case.shape, "size": case.size, "cut": case.cut}
        try:
            time = seconds(case.calls, device)
        except Exception as error:  # a cut that asks for too much shared memory must not end the run
            entry["error"] = f"{type(error).__name__}: {error}"[:200]
        else:
            rate = case.num_bytes / time / 1e9
            entry |= {"us": time * 1e6, "gb_per_s": rate, "share_of_read": rate / ceiling["read_gb_per_s"]}
        entries.append(entry)
        if not args.tune or "error" in entry:
            print({key: value for key, value in entry.items() if key != "cut"}, file=sys.stderr, flush=True)
    figures = {"cases": entries, "best_cuts": best_cuts(entries)}
    where = "cpu" if args.smoke else torch.cuda.get_device_name()
    result = {"name": "kernels", **describe(), "device": where, "ceiling": ceiling, "figures": figures}
    if args.save and not args.smoke:
        folder = RESULTS / where.lower().replace("nvidia", "").strip().replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{result['date']}_kernels{'_tuned' if args.tune else ''}.json"
        (folder / name).write_text(json.dumps(result, indent=1) + "\n")
    for best in figures["best_cuts"]:
        print(best, file=sys.stderr)
    if any("error" in entry for entry in entries) and args.smoke:
        sys.exit("error: a case failed")
    print(f"{len(entries)} cases" if args.tune else json.dumps(result))


if __name__ == "__main__":
    main()
