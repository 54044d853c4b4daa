"""The fixed-budget KV cache: sizes (spec), slot arithmetic (layout), storage (cache), selectors/, the write (compress),
KV re-selection, and the blocks of the prefix store."""
