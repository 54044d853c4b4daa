"""The OpenAI-compatible front: HTTP in one process, the engine in another."""
