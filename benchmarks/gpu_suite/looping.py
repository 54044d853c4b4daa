"""Section on kernel looping: what is left of a decode step's time when calls become one call (arXiv 2410.23668).

The same weights and rows five times, each captured, by CUDA events: B0 the graph of kernels, B1 a call of one kernel
per layer, B2 the kernel that loops over the layers, B3 the same with loads of weights under way across its barriers,
and B3 in its second form, a ring of asynchronous copies written in Gluon. B1 against B3 is the paper's quantity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.models import decoder_of, make_runner
from benchmarks.gpu_suite.suite import Bench, Figures
from snapstream.kernels.bound import has_triton
from snapstream.kernels.rows import RowPlaces
from snapstream.models.decoder import Decoder
from snapstream.models.shapes import decode_weight_bytes
from snapstream.runner.model_runner import ModelRunner

BATCHES = (1, 2, 4, 8, 16)
SLOTS, CONTEXT = 2048, 8000
REPEATS = 30


def ladder(models: tuple[str, ...]) -> Callable[[Bench], Figures]:
    """Microseconds of a step without its sampling, GB/s of weights and rows, share of the measured read rate."""

    def section(bench: Bench) -> Figures:
        if not bench.device.is_cuda or not has_triton():
            yield {"skipped": "needs a GPU and Triton"}
            return
        for model in models:
            decoder = decoder_of(bench, model)
            for batch in BATCHES:
                runner = make_runner(bench, decoder, SLOTS, batch, CONTEXT + 256, 512)
                read = decode_weight_bytes(decoder.config, bench.device.dtype_name)
                read += batch * decoder.kv_spec().row_bytes(SLOTS)
                for way, call in _ways(runner, decoder, batch):
                    figure: dict[str, Any] = {"model": model, "batch": batch, "slots": SLOTS, "way": way}
                    seconds = _seconds(bench, call)
                    figure |= {"us": seconds * 1e6, "gb_per_s": read / seconds / 1e9}
                    if bench.ceilings:
                        figure["share_of_read"] = figure["gb_per_s"] / bench.ceilings["read_gb_per_s"]
                    yield figure
                del runner
                bench.device.free()

    return section


def _ways(runner: ModelRunner, decoder: Decoder, batch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    from snapstream.kernels.triton.looped.launch import Looped, ring_launch
    from snapstream.runner.looped_kernel import looped_model

    rows = torch.arange(batch, device=decoder.device)
    positions = torch.full_like(rows, CONTEXT)
    places = RowPlaces(rows, torch.full_like(rows, SLOTS - 1), torch.full_like(rows, SLOTS))
    token_ids, rope = torch.ones_like(rows), decoder.rope(positions, positions + 1)
    cache = runner.cache
    looped = Looped(looped_model(decoder), cache.k, cache.v, batch)
    plain = looped.without_loads_ahead()
    cut = ring_launch(looped.model, looped.launch.num_programs, batch)
    ring = Looped(looped.model, cache.k, cache.v, batch, cut)

    def by_kernels() -> Tensor:
        from snapstream.models.views import RowsView

        return decoder.run(decoder.embed(token_ids), rope, RowsView(cache, places, decoder.kernels))

    yield "B0 graph of kernels", by_kernels
    yield "B1 a call per layer", lambda: plain.run_layers(token_ids, places, rope)
    yield "B2 looped", lambda: plain.run(token_ids, places, rope)
    yield "B3 looped, loads ahead", lambda: looped.run(token_ids, places, rope)
    yield "B3 gluon, ring", lambda: ring.run(token_ids, places, rope)


def _seconds(bench: Bench, call: Callable[[], object]) -> float:
    """Of one replay of the captured call."""
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        call()
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        call()
    return bench.device.seconds(graph.replay, REPEATS)
