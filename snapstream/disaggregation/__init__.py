"""Disaggregated prefill: KV transfer from the engine that prefills a prompt to the one that decodes."""
