"""Kernels for CPU tensors: the same meaning as ``kernels/reference.py``, without gathers and copies."""
