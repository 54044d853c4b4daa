"""Predicts what running streams notice of a prefill on a GPU, from the engine's own rule for how it is cut. No GPU.

    python -m benchmarks.pace

A step lasts as long as its decode, which reads the weights once, and its prefill units, which are bound by arithmetic;
both at a share of what the device could do. Nothing here is a measurement: section ``streams`` of the GPU suite is.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_suite.models import FILES
from snapstream.engine.admission import LEAST_TOKENS, job_chunk_len
from snapstream.models.registry import model_config_from_dict
from snapstream.models.sharding import decode_weight_bytes
from snapstream.plan.fit import resolve_chunking


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Rates that are reached, not those of a data sheet."""

    flop_per_s: float = 0.55 * 989e12  # H200, bf16
    bytes_per_s: float = 0.8 * 4.8e12


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one prefill beside running streams of short context."""

    prompt_len: int
    chunk_len: int
    units: str  # per step
    idle_ms: float
    p99_ms: float
    alone_s: float  # the prefill without streams
    beside_s: float  # with them

    def line(self) -> str:
        """As in docs/research/gpu.md."""
        return (f"| {self.prompt_len:,} | {self.chunk_len:,} | {self.units} | {self.p99_ms:.1f} ms | "
                f"{self.p99_ms / self.idle_ms:.2f} | {self.alone_s:.1f} s | {self.beside_s:.1f} s |")  # fmt: skip


def predict(prompt_len: int, chunk_len: int = 0, quantum: int = 0, gpu: Gpu | None = None) -> Prediction:
    """For Llama-3.1-8B in bf16; ``chunk_len`` and ``quantum`` 0 are the engine's defaults on a GPU."""
    gpu = gpu or Gpu()
    model = model_config_from_dict(FILES["llama_8b"])
    cut = resolve_chunking(model, dtype="bfloat16", device="cuda")
    size = chunk_len or job_chunk_len(cut, prompt_len)
    seconds_per_pair = 4 * model.num_heads * model.head_dim / gpu.flop_per_s
    idle = decode_weight_bytes(model, "bfloat16") / gpu.bytes_per_s
    ends = [min(start + size, prompt_len) for start in range(0, prompt_len, size)]
    work = [max(end - i * size, LEAST_TOKENS) * (cut.token_keys + end) for i, end in enumerate(ends)] * model.num_layers
    steps: list[list[int]] = [[]]
    for unit in work:
        is_full = len(steps[-1]) == quantum if quantum else sum(steps[-1]) + unit > cut.step_work
        if steps[-1] and is_full:
            steps.append([])
        steps[-1].append(unit)
    times = sorted(idle + sum(step) * seconds_per_pair for step in steps)
    least, most = min(map(len, steps)), max(map(len, steps))
    return Prediction(
        prompt_len=prompt_len,
        chunk_len=size,
        units=f"{least}" if least == most else f"{least} to {most}",
        idle_ms=idle * 1e3,
        p99_ms=times[min(len(times) - 1, len(times) * 99 // 100)] * 1e3,
        alone_s=sum(work) * seconds_per_pair,
        beside_s=sum(times),
    )


def main() -> None:
    print(f"idle: {predict(64).idle_ms:.2f} ms between tokens")
    for prompt_len, chunk_len, quantum in [(131_072, 0, 0), (32_768, 0, 0), (8192, 0, 0), (64, 0, 0),
                                           (131_072, 512, 32), (131_072, 2048, 1)]:  # fmt: skip
        print(predict(prompt_len, chunk_len, quantum).line())


if __name__ == "__main__":
    main()
