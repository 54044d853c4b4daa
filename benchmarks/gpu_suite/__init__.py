"""Everything that is measured on a GPU, in one command of less than nine minutes that writes one JSON.

Each section runs in a process of its own (``apart.py``), so that one that hangs or dies costs only itself; the same
command again runs the sections that are left. Sections stand in the order of their value and are cut by time: what
comes first is there even if the rest is not. A section that fails leaves its traceback and the figures it had; the next
one runs. Weights are random and are made on the device. Needs torch, transformers, safetensors, numpy and, for the
kernels, triton.

    python -m benchmarks.gpu_suite --out gpu.json [--only decode_8b prefill_8b] [--budget-s 520] [--smoke]
    python -m benchmarks.gpu_tables gpu.json     (no GPU: keeps the JSON and writes docs/research/gpu-results.md)

Names of figures end with their unit; every section says in the JSON what its figures are.
"""
