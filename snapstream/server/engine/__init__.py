"""The engine behind the front: a process of its own, and the messages to and from it. Start at ``api.py``."""
