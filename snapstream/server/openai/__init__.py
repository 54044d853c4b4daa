"""The OpenAI API: bodies of requests, prompts, sampling, tools, answers. Start at ``routes.py``."""
