"""The fixed-budget KV cache: slot arithmetic (layout), storage (kv_cache), selection (snapkv), the write (compress)."""
