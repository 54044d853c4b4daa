"""The decode step as one persistent kernel that loops over the layers (kernel looping, arXiv 2410.23668, on a GPU).

``kernel.py`` is the loop; ``parts.py`` what its stages share; ``attend.py`` the stage between the products;
``barrier.py`` what stands between stages; ``launch.py`` cuts and launches it. ``kernel.py`` loads weights through
registers and reads codes; ``ring_kernel.py``, in Gluon, copies dense weights through a ring in shared memory
(``ring.py``, ``stream.py``). Nothing here has run on a GPU yet (docs/research/gpu.md).
"""
