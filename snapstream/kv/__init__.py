"""The fixed-budget KV cache: sizes, slot arithmetic, storage, selectors, compression, prefix store."""
