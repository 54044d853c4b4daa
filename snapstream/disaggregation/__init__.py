"""Rows that travel from the engine that read a prompt to the one that answers it. Start at ``wire.py``."""
