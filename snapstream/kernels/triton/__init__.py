"""Kernels for NVIDIA GPUs, written in Triton: one file each, the plain meaning in ``kernels/reference.py``.

Each file holds a kernel and the function that launches it. Nothing here but ``configs.py`` is imported until
``kernels/interface.py`` binds it, so Triton stays optional. Sizes that select machine code (tiles, splits) come from
``configs.py`` and depend on shapes that are constant for an engine, never on the batch: so nothing is compiled or tuned
while it serves, and a row's result does not know its neighbours.
"""
