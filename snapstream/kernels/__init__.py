"""Tensors in, tensors out: the reference of every kernel, faster versions, and the choice (``interface.bind``)."""
