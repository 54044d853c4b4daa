"""Attention of a prefill chunk: the kernels a machine may have (versions), which is taken (choice), by which table."""
