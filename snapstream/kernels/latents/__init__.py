"""Decode attention over rows of latents on a GPU: the kernels that can serve, and which of them does."""
