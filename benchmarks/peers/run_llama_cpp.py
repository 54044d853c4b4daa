"""llama.cpp's server in this process (xllamacpp), a slot per prompt. Option: the format of a GGUF file."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.rates_llama_cpp import build
from benchmarks.peers.work import Generate, Job, main


def start(job: Job, most: int) -> Generate:
    import xllamacpp

    file = Path(job.folder) / f"{job.option}.gguf"
    if not file.exists():
        write_gguf(Path(job.folder), file, job.option)
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel = most
    params.n_ctx = most * (job.prompt_len + job.new_tokens + 8)  # shared by the slots
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.port = 0
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(most)

    def one(prompt: list[int], num_new: int) -> tuple[list[int], float]:
        answer: Any = server.handle_completions(
            {"prompt": prompt, "n_predict": num_new, "temperature": 0.0, "top_k": 1, "ignore_eos": True,
             "cache_prompt": False}
        )  # fmt: skip
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp answered {answer}")
        words = re.findall(r"w(\d+)", answer["choices"][0]["text"])  # of gguf_file.py
        return [int(number) for number in words], answer["timings"]["prompt_ms"] / 1e3

    def generate(prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
        answers = list(pool.map(lambda prompt: one(prompt, num_new), prompts))
        return [tokens for tokens, _ in answers], answers[0][1]

    return generate


if __name__ == "__main__":
    main(start, lambda: {"xllamacpp": build(), "gguf": version("gguf")})
