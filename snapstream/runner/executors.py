"""Builds the decode step of a device: plain calls, or static programs with what the user is told while they are made.

``decode_eager.py`` and ``decode_graph.py`` are the two; ``config.Executor`` names them.
"""

from __future__ import annotations

import logging
import sys
from hashlib import sha256
from time import perf_counter

from snapstream.cache.kv_cache import KVCache
from snapstream.config import EngineConfig
from snapstream.kernels.bound import bind
from snapstream.kernels.compile_cache import compile_folder
from snapstream.layers.sampling_state import SamplingState
from snapstream.models.decoder import Decoder
from snapstream.runner.decode_eager import EagerDecode
from snapstream.runner.decode_graph import GraphDecode, bucket_sizes
from snapstream.runner.programs import Capturer, Compiler, ProgramMaker
from snapstream.runner.rescoring import RecentQueries
from snapstream.runner.rows import Rows

logger = logging.getLogger(__name__)


def make_decode(
    decoder: Decoder, cache: KVCache, rows: Rows, sampling: SamplingState, config: EngineConfig, progress: bool,
    queries: RecentQueries | None = None,
) -> EagerDecode | GraphDecode:  # fmt: skip
    """The executor that ``config`` names, ready to run; ``progress`` shows on stderr what takes long."""
    if config.executor == "eager":
        return EagerDecode(decoder, cache, rows, sampling, queries=queries)
    is_cuda = decoder.device.type == "cuda"
    maker: ProgramMaker = Capturer() if is_cuda else Compiler()
    if not is_cuda:
        decoder = Decoder(decoder.config, decoder.weights, bind(decoder.device, "compiled_cpu"))
    eager = EagerDecode(decoder, cache, rows, sampling, queries)
    buckets = bucket_sizes(config.max_rows, decoder.device.type)
    graph = GraphDecode(eager, maker, buckets, cache.padding_row, decoder.config.vocab_size, decoder.device)
    _warm_up(graph, decoder, config, progress)
    return graph


def _warm_up(graph: GraphDecode, decoder: Decoder, config: EngineConfig, progress: bool) -> None:
    from tqdm import tqdm

    began = perf_counter()
    doing = "Capturing decode"
    marker = None
    if decoder.device.type == "cpu":
        settings = f"{decoder.config} {config.dtype} {config.kv_dtype} {config.max_rows} {config.budget.capacity}"
        if config.rescoring is not None:  # the step also keeps its queries
            settings += f" {config.rescoring.num_queries}"
        key = sha256(settings.encode()).hexdigest()[:16]
        marker = compile_folder() / f"{key}.done"
        doing = "Loading compiled decode" if marker.is_file() else "Compiling decode (first start only)"
        if not marker.is_file():
            logger.info(
                "compiling %d decode programs into %s; later starts load them", graph.num_programs, marker.parent
            )
    with tqdm(total=graph.num_programs, desc=doing, unit="program", disable=not progress, file=sys.stderr) as bar:
        graph.warm_up(bar.update)
    logger.info("%d decode programs are ready after %.1f s", graph.num_programs, perf_counter() - began)
    if marker is not None:
        marker.touch()
