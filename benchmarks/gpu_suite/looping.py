"""Section on kernel looping: what is left of a decode step's time when calls become one call (arXiv 2410.23668).

The same weights and rows five times, each captured, by CUDA events: B0 the graph of kernels, B1 a call of one kernel
per layer, B2 the kernel that loops over the layers, B3 the same with loads of weights under way across its barriers,
and B3 through a ring of asynchronous copies written in Gluon, with its variants (``ring_variants``). B1 against B3 is
the paper's quantity. Behind dense weights the same over int4 and int8 ones, each against the graph of kernels over the
same weights. The ring does not read them. Compiling takes most of the time: B1 and B2 only at a batch of 1, codes and
variants at fewer batches. Run as a module it only compiles, so that several processes fill Triton's cache at once:

    python -m benchmarks.gpu_suite.looping qwen3_06b 16
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.device import Device
from benchmarks.gpu_suite.models import config_of, decoder_of, engine_config
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.stand_ins import random_share
from snapstream.config import WeightFormats
from snapstream.exec.cuda_graph import no_collection
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.interface import has_triton
from snapstream.kernels.rows import RowPlaces
from snapstream.models.decoder import Decoder
from snapstream.models.sharding import Share, decode_weight_bytes

BATCHES = (1, 16, 4, 8, 2)
CODE_BATCHES = VARIANT_BATCHES = (1, 16)
SLOTS, CONTEXT = 2048, 8000
REPEATS = 30


def ladder(models: tuple[str, ...], widths: tuple[str, ...]) -> Callable[[Bench], Figures]:
    """Microseconds of a step without its sampling, GB/s of weights and rows, share of the measured read rate; over
    dense weights and over those of ``widths``.
    """

    def section(bench: Bench) -> Figures:
        if not bench.device.is_cuda or not has_triton():
            yield {"skipped": "needs a GPU and Triton"}
            return
        for model in models:
            yield from _steps(bench, model, decoder_of(bench, model), None)
        for model in models:
            bench.forget()
            for width in widths:
                formats = WeightFormats.of(width)
                decoder = decoder_in_codes(bench, model, formats)
                yield from _steps(bench, model, decoder, formats)
                del decoder
                bench.device.free()

    return section


def decoder_in_codes(bench: Bench, model: str, formats: WeightFormats) -> Decoder:
    config = config_of(bench, model)
    share = Share(whole=config, own=config)
    return Decoder(config, random_share(share, bench.device.dtype, bench.device.name, 0, formats))


def _steps(bench: Bench, model: str, decoder: Decoder, formats: WeightFormats | None) -> Figures:
    for batch in BATCHES if formats is None else CODE_BATCHES:
        engine = engine_config(bench, SLOTS, batch, CONTEXT + 256, 512)
        runner = ModelRunner(decoder, replace(engine, weights=formats))
        read = decode_weight_bytes(decoder.config, bench.device.dtype_name, formats, batch)
        read += batch * decoder.kv_spec().row_bytes(SLOTS)
        weights = bench.device.dtype_name if formats is None else formats.layers.dtype
        for way, call in ways(runner, decoder, batch):
            figure: dict[str, Any] = {"model": model, "weights": weights, "batch": batch, "slots": SLOTS, "way": way}
            seconds = _seconds(bench, call)
            figure |= {"us": seconds * 1e6, "gb_per_s": read / seconds / 1e9}
            if bench.ceilings:
                figure["share_of_read"] = figure["gb_per_s"] / bench.ceilings["read_gb_per_s"]
            yield figure
        del runner
        bench.device.free()


def ways(runner: ModelRunner, decoder: Decoder, batch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    from snapstream.exec.looped_gpu import looped_model
    from snapstream.kernels.triton.looped.launch import Looped, num_multiprocessors, register_launch, ring_variants

    rows = torch.arange(batch, device=decoder.device)
    positions = torch.full_like(rows, CONTEXT)
    places = RowPlaces(rows, torch.full_like(rows, SLOTS - 1), torch.full_like(rows, SLOTS))
    token_ids, rope = torch.ones_like(rows), decoder.rope(positions, positions + 1)
    cache = runner.cache
    model, num_programs = looped_model(decoder), num_multiprocessors(decoder.device)
    looped = Looped(model, cache.k, cache.v, batch, register_launch(model, num_programs, batch))
    plain = looped.without_loads_ahead()

    def by_kernels() -> Tensor:
        from snapstream.models.views import RowsView

        return decoder.run(token_ids, rope, RowsView(cache, rows, [places] * cache.spec.num_layers, decoder.kernels))

    yield "B0 graph of kernels", by_kernels
    if batch == 1:  # a kernel per layer is six to compile
        yield "B1 a call per layer", lambda: plain.run_layers(token_ids, places, rope)
        yield "B2 looped", lambda: plain.run(token_ids, places, rope)
    yield "B3 looped, loads ahead", lambda: looped.run(token_ids, places, rope)
    if not looped.model.has_codes:
        for name, launch in ring_variants(model, num_programs, batch).items():
            if name == "ring" or batch in VARIANT_BATCHES:
                ring = Looped(model, cache.k, cache.v, batch, launch)
                yield f"B3 gluon, {name}", partial(ring.run, token_ids, places, rope)


def _seconds(bench: Bench, call: Callable[[], object]) -> float:
    """Of one replay of the captured call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # inputs and counters are written there
    with torch.inference_mode(), torch.cuda.stream(stream):
        call()
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.inference_mode(), torch.cuda.graph(graph):
        call()
    return bench.device.seconds(graph.replay, REPEATS)


def compile_dense(model: str, batch: int) -> None:
    """Every way over dense weights, called once."""
    bench = Bench(Device("cuda"), is_smoke=False)
    with torch.inference_mode():
        decoder = decoder_of(bench, model)
        runner = ModelRunner(decoder, engine_config(bench, SLOTS, batch, CONTEXT + 256, 512))
        for _, call in ways(runner, decoder, batch):
            call()
    bench.device.sync()


if __name__ == "__main__":
    compile_dense(sys.argv[1], int(sys.argv[2]))
