"""This engine with a full cache. Option: ``EXECUTOR WEIGHTS``, for example ``looped int8``.

``fp8`` reads the checkpoint in the folder of that name within the job's.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.peers.work import Generate, Job, main
from snapstream.llm import LLM
from snapstream.types import SamplingParams


def start(job: Job, most: int) -> Generate:
    torch.set_num_threads(job.threads)
    executor, weights = job.option.split()
    llm = LLM(
        Path(job.folder) / "fp8" if weights == "fp8" else job.folder,
        budget="full",
        max_rows=most,
        max_model_len=job.prompt_len + job.new_tokens,
        executor=executor,
        weights="auto" if weights == "fp8" else weights,
        num_speculative_tokens=0,  # random weights repeat themselves more than text does
        progress=False,
    )

    def generate(prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True))
        return [output.token_ids for output in outputs], outputs[0].timings.first_token_ms / 1e3

    return generate


if __name__ == "__main__":
    main(start, lambda: {"snapstream": version("snapstream-llm"), "torch": version("torch")})
