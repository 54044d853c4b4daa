"""Anthropic's Messages, over the chat path of ``openai/``."""
