"""Tensors in, tensors out: the plain meaning of every kernel (reference), faster versions, the choice (bound)."""
