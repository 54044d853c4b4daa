"""How a step runs: persistent row state, layer-wise prefill, decode executors, sampling. Start at ``runner.py``."""
