"""The decode step as one persistent kernel that loops over the layers (kernel looping, arXiv 2410.23668, on a GPU).

Two forms of the same loop: ``kernel.py`` loads weights, also quantized ones, through registers; ``ring.py``, in Gluon,
copies dense weights through a ring in shared memory. ``blocks.py`` has the barrier, the attention and the products that
they share; ``launch.py`` chooses tile sizes and launches. Nothing here has run on a GPU yet (docs/research/gpu.md).
"""
