"""The engine process, and the messages to and from it. Start at ``api.py``."""
