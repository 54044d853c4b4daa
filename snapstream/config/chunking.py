"""How prefill is cut into units, and how much of it a step holds while rows decode."""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config.values import set_counts


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """The decisions of ``plan/chunking.py`` for a model and a device; ``engine/pace.py`` cuts prompts by them.

    With ``step_work`` the units of a step in which rows decode are counted by their work, in query-key pairs; a token's
    matrix products weigh as ``token_keys`` keys, and long prompts are cut into units of down to ``least_chunk_len``
    tokens.
    """

    chunk_len: int = 512  # T: tokens of one unit
    short_len: int = 512  # prompts up to this length are packed together and may overtake longer ones
    prefill_quantum: int = 0  # units per step while rows decode; 0 means num_layers (one chunk through the model)
    step_work: int = 0  # 0: units are counted one by one, by the quantum
    token_keys: int = 0
    least_chunk_len: int = 0  # 0: all units have chunk_len tokens

    def __post_init__(self) -> None:
        set_counts(self, chunk_len=1, short_len=1, prefill_quantum=0, step_work=0, token_keys=0, least_chunk_len=0)
