"""Kernels for CPU tensors. Reference: ``kernels/reference.py``."""
