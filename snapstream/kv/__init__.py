"""The fixed-budget KV cache: sizes, slot arithmetic, storage, selectors, compression, re-selection, prefix store."""
