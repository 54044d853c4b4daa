"""An OpenAI-compatible proxy that compresses long prompts with a small draft before any server sees them."""
