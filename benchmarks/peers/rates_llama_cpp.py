"""Prefill and decode of a GGUF file in llama.cpp (xllamacpp), by its own clock: FILE THREADS REPETITIONS DEPTH...

Prints the tests of ``llama_bench.py`` as JSON, where llama.cpp's own program is not at hand. Standard library and
xllamacpp only.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from random import Random
from typing import Any


def build() -> str:
    """Version and instructions of xllamacpp: its wheel has fewer than many processors, one built here all."""
    import xllamacpp

    found = [part.split(" = ") for part in xllamacpp.get_system_info().split(" : ")[-1].split(" | ") if " = " in part]
    wide = [name for name, value in found if value == "1" and name.startswith(("AVX", "AMX", "NEON", "DOTPROD", "SVE"))]
    return f"{version('xllamacpp')} ({', '.join(wide)})"


def main() -> None:
    import xllamacpp

    file, threads, repetitions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    depths = [int(depth) for depth in sys.argv[4:]]
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx, params.port = 1, max([512, *depths]) + 512, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt, params.cache_ram_mib = False, 0
    printed = os.dup(1)
    os.dup2(2, 1)  # what the library prints is no JSON
    server, random = xllamacpp.Server(params), Random(0)

    def timings(prompt_len: int, num_new: int) -> dict[str, float]:
        prompt = [random.randrange(3, 1000) for _ in range(prompt_len)]
        answer: Any = server.handle_completions(
            {"prompt": prompt, "n_predict": num_new, "temperature": 0.0, "top_k": 1, "ignore_eos": True,
             "cache_prompt": False}
        )  # fmt: skip
        found: dict[str, float] = answer["timings"]
        return found

    rates: dict[str, list[float]] = {}
    for repetition in range(repetitions + 1):
        for length, num_new in [(512, 1), *((depth, 129) for depth in (1, *(depths if repetition else ())))]:
            found = timings(length, num_new)
            if repetition and length > 1:
                rates.setdefault(f"pp{length}", []).append(found["prompt_n"] / found["prompt_ms"] * 1e3)
            if repetition and num_new > 1:  # the first token is prefill's
                name = "tg128" + f" @ {length}" * (length > 1)
                rates.setdefault(name, []).append((found["predicted_n"] - 1) / found["predicted_ms"] * 1e3)
    with os.fdopen(printed, "w") as out:
        out.write(json.dumps({"engine": f"xllamacpp {build()}", "tokens_per_s": rates}))


if __name__ == "__main__":
    main()
