"""An OpenAI-compatible proxy that trims long prompts with a small draft before any server sees them."""
