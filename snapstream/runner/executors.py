"""The executors of the decode step: plain calls, one native call, or static programs and the line shown meanwhile.

``config.EXECUTORS`` names these functions; ``decode_eager.py``, ``decode_looped.py`` and ``decode_graph.py`` are
what they make.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from snapstream.kernels.bound import bind
from snapstream.kernels.compile_cache import compile_folder
from snapstream.layers.sampling_state import SamplingNeeds
from snapstream.runner.decode_eager import EagerDecode
from snapstream.runner.decode_graph import SAMPLERS, GraphDecode, Programs, bucket_sizes
from snapstream.runner.decode_step import DecodeStep, StepParts
from snapstream.runner.programs import Capturer, Compiler, ProgramMaker


def make_eager(parts: StepParts) -> DecodeStep:
    """Plain calls."""
    return EagerDecode(parts)


def make_looped(parts: StepParts) -> DecodeStep:
    """One native call on a CPU, one kernel on a GPU."""
    if parts.decoder.device.type == "cuda":
        return make_looped_kernel(parts, Capturer(), SAMPLERS["cuda"])
    from snapstream.runner.decode_looped import LoopedDecode

    return LoopedDecode(parts)


def make_looped_kernel(parts: StepParts, maker: ProgramMaker, samplers: tuple[SamplingNeeds, ...]) -> DecodeStep:
    """Programs of one kernel and a sampler; batches are padded to powers of two, each a kernel of its own."""
    from snapstream.runner.looped_kernel import LoopedHalves

    most = parts.config.max_rows
    buckets = (*(size for size in (1, 2, 4, 8) if size < most), most)
    programs = Programs(maker, buckets, samplers, "Compiling and capturing looped decode")
    return GraphDecode(parts, programs, LoopedHalves(parts, most))


def make_graph(
    parts: StepParts,
    maker: ProgramMaker | None = None,
    buckets: tuple[int, ...] | None = None,
    samplers: tuple[SamplingNeeds, ...] | None = None,
) -> DecodeStep:
    """Programs for every batch size: captured on a GPU, compiled on a CPU.

    ``maker``, batch sizes and ``samplers`` are those of the device unless given; what no sampler covers is drawn by
    plain calls.
    """
    device = parts.decoder.device
    buckets = buckets or bucket_sizes(parts.config.max_rows, device.type)
    samplers = SAMPLERS[device.type] if samplers is None else samplers
    if device.type == "cuda":
        return GraphDecode(parts, Programs(maker or Capturer(), buckets, samplers, "Capturing decode"))
    compiled = replace(parts, decoder=parts.decoder.with_kernels(bind(device, "compiled_cpu")))
    marker = compile_folder() / f"{_key(parts)}.done"
    doing = "Loading compiled decode" if marker.is_file() else "Compiling decode (first start only)"
    return GraphDecode(compiled, Programs(maker or Compiler(), buckets, samplers, doing, marker))


def _key(parts: StepParts) -> str:
    """Names what is compiled, so that a later start knows that it is there."""
    config = parts.config
    settings = f"{parts.decoder.config} {config.dtype} {config.kv_dtype} {config.max_rows} {config.budget.capacity}"
    if config.heads is not None:
        settings += f" {config.heads.topk}"
    if config.rescoring is not None:  # the step also keeps its queries
        settings += f" {config.rescoring.num_queries}"
    return sha256(settings.encode()).hexdigest()[:16]
