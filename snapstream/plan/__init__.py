"""The costs of an engine before it is loaded: bytes, rows that fit, how prefill is cut, sizes in words. No torch."""
