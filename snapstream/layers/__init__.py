"""Pieces of a decoder layer: tensors in, tensors out, no state beyond a rope table."""
