"""transformers' ``generate`` on a static batch of equal lengths, the kindest case for it. Option: a dtype, and for
mixtures of experts an implementation: ``float32 grouped_mm``.
"""

from __future__ import annotations

from importlib.metadata import version
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.work import Generate, Job, main


def start(job: Job, most: int) -> Generate:
    torch.set_num_threads(job.threads)
    dtype, _, experts = job.option.partition(" ")
    settings = {"dtype": getattr(torch, dtype)} | ({"experts_implementation": experts} if experts else {})
    model = AutoModelForCausalLM.from_pretrained(job.folder, trust_remote_code=False, **settings).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
        began, times = perf_counter(), []

        def is_done(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # called once per token
            times.append(perf_counter() - began)
            return torch.zeros(len(tokens), dtype=torch.bool)

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False,
                                 pad_token_id=0, stopping_criteria=[is_done])  # fmt: skip
        return [list(map(int, line)) for line in out[:, ids.shape[1] :]], times[0]

    return generate


if __name__ == "__main__":
    main(start, lambda: {name: version(name) for name in ("transformers", "torch")})
