"""The executors of the decode step, by the names of ``config.EXECUTORS``.

``decode_eager.py`` runs plain PyTorch, ``decode_looped.py`` one native call on a CPU, ``looped_kernel.py`` one Triton
kernel on a GPU, ``decode_graph.py`` captured CUDA graphs.
"""

from __future__ import annotations

from snapstream.exec.cuda_graph import SAMPLERS, Capturer, GraphDecode, ProgramMaker, Programs, bucket_sizes
from snapstream.exec.eager import DecodeStep, EagerDecode, StepParts
from snapstream.exec.sampling_state import SamplingNeeds


def make_eager(parts: StepParts) -> DecodeStep:
    """Plain PyTorch."""
    return EagerDecode(parts)


def make_looped(parts: StepParts) -> DecodeStep:
    """One native call on a CPU, one kernel on a GPU."""
    if parts.decoder.device.type == "cuda":
        return make_looped_kernel(parts, Capturer(), SAMPLERS)
    from snapstream.exec.looped_cpu import LoopedDecode

    return LoopedDecode(parts)


def make_looped_kernel(parts: StepParts, maker: ProgramMaker, samplers: tuple[SamplingNeeds, ...]) -> DecodeStep:
    """Programs of one kernel and a sampler; batches are padded to powers of two, each a kernel of its own."""
    from snapstream.exec.looped_gpu import LoopedHalves

    most = parts.config.max_rows
    buckets = (*(size for size in (1, 2, 4, 8) if size < most), most)
    programs = Programs(maker, buckets, samplers, "Compiling and capturing looped decode")
    return GraphDecode(parts, programs, LoopedHalves(parts, most))


def make_graph(
    parts: StepParts,
    maker: ProgramMaker | None = None,
    buckets: tuple[int, ...] | None = None,
    samplers: tuple[SamplingNeeds, ...] = SAMPLERS,
) -> DecodeStep:
    """CUDA graphs for every batch size. What no sampler covers is drawn eagerly.

    ``maker`` is for tests without a GPU.
    """
    buckets = buckets or bucket_sizes(parts.config.max_rows)
    return GraphDecode(parts, Programs(maker or Capturer(), buckets, samplers, "Capturing decode"))
