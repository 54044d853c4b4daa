"""Speculative prefill: a small draft model says which parts of a long prompt matter. Start at ``compressor.py``."""
