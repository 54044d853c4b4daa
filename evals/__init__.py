"""Accuracy under compression: the same questions under every budget. Start with ``run.py``; see README.md."""
