"""Kernels for NVIDIA GPUs, written in Triton: one file each, the plain meaning in ``kernels/reference.py``.

Each file holds a kernel, its launch, and the operator ``snapstream::*`` that ``torch.compile`` sees as one node (no
graph break, nothing to recompile) and a captured graph as its launches. Nothing here is imported until
``kernels/interface.py`` binds it, so Triton stays optional. Sizes that select machine code (tiles, splits) come from
``configs.py`` and depend on shapes that are constant for an engine, never on the batch: so nothing is compiled or tuned
while it serves, and a row's result does not know its neighbours.
"""
