"""Who runs next: the scheduler, the engine loop and the detokenizer. Start at ``core.py``."""
