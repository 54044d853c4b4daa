"""How a step runs: persistent row state, layer-major prefill, static decode. See ``model_runner.py``."""
