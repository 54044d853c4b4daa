"""The engine behind the front: a process of its own, and what crosses the border to it. Start at ``api.py``."""
