"""The model: a checkpoint folder becomes a decoder that leaves attention to a KV view."""
