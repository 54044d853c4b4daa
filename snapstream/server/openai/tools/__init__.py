"""Tool calls: what a request may ask for, how models write them, and the answers read back. Start at ``formats.py``."""
