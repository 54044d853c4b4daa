"""OpenAI's Responses, over the chat path of ``openai/``."""
