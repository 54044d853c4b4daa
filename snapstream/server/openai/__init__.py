"""OpenAI's Chat Completions and Completions, and the chat path that all APIs share."""
