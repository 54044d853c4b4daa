"""Rotary position embedding: frequencies of each kind of context extension, and the angles.

Conventions of ``transformers``: the two halves of a head form the rotated pairs; angles are fp32. ``Rope.angles`` is
called once per decode step or prefill unit; kernels rotate the heads of each layer. Invariant: an angle depends on the
token's position only, with dynamic scaling and longrope also on the length of its sequence when it was fed; stored keys
are never rotated again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import RopeConfig
from snapstream.kernels.interface import CosSin


def _default_frequencies(theta: float, head_dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [E/2]


def _llama3_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated (Llama 3.1)."""
    plain = _default_frequencies(rope.theta, head_dim)
    turns = rope.original_max_position * plain / (2 * math.pi)  # rotations within the original context
    weight = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor or 1e-30)
    weight = weight.clamp(0.0, 1.0)  # of the plain frequency
    return (1 - weight) * plain / rope.factor + weight * plain


def _yarn_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """High frequencies are kept, low ones interpolated (YaRN, arXiv 2309.00071)."""

    def pair_of(turns: float) -> float:  # index of the pair with this many rotations in the original context
        wavelength = rope.original_max_position / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids dividing by zero
    plain = _default_frequencies(rope.theta, head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def growth(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """Of LongRoPE (arXiv 2402.13753, section 3.4), from how far the context is stretched."""
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


def attention_factor(rope: RopeConfig) -> float:
    """What scaling multiplies cosines and sines with."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    match rope.kind:
        case "yarn":
            return _yarn_attention_factor(rope)
        case "longrope":
            return _longrope_attention_factor(rope)
        case _:
            return 1.0


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, ``[E/2]`` fp32; for dynamic and longrope, inside the original context."""
    match rope.kind:
        case "default" | "dynamic":
            return _default_frequencies(rope.theta, head_dim)
        case "linear":
            return _default_frequencies(rope.theta, head_dim) / rope.factor
        case "llama3":
            return _llama3_frequencies(rope, head_dim)
        case "proportional":  # of a whole head, those of its last pairs 0
            plain = _default_frequencies(rope.theta, head_dim) / rope.factor
            return plain.masked_fill_(torch.arange(head_dim // 2) >= int(rope.share * head_dim // 2), 0.0)
        case "yarn":
            return _yarn_frequencies(rope, head_dim)
        case "longrope":
            return _default_frequencies(rope.theta, head_dim) / torch.tensor(rope.short_factors)


class Rope:
    """Maps positions to the cosines and sines that kernels take.

    If only part of a head is rotated, the other pairs get the angle 0 (``models/tensors.py`` orders the rows of a head
    so that the rotated pairs come first).
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, device: torch.device | str, score_multiplier: float = 1.0
    ) -> None:
        """``score_multiplier``: of products of queries and keys. Both are multiplied by its root as they are rotated.

        ValueError for dynamic scaling of r = 2 rotated elements: its base is a power of r / (r - 2)."""
        self.config = rope
        self.head_dim = head_dim
        self.scale = attention_factor(rope) * math.sqrt(score_multiplier)
        self._rotated = rope.rotary_dim(head_dim)
        if rope.kind == "dynamic" and self._rotated == 2:
            raise ValueError("dynamic rope rotates 2 numbers of a head; it needs 4 or more")
        self._num_unrotated = (head_dim - self._rotated) // 2  # pairs
        self.frequencies = rope_frequencies(rope, self._rotated).to(device)  # [r/2]
        self.long_frequencies: Tensor | None = None  # [r/2], beyond the original context
        if rope.kind == "longrope" and rope.depends_on_length:
            self.long_frequencies = _default_frequencies(rope.theta, self._rotated) / torch.tensor(rope.long_factors)
            self.long_frequencies = self.long_frequencies.to(device)
        # Of the whole head, so that cosines and sines are the result without another call: negative ones first, whose
        # sines have the minus of the rotation. Pairs that are not rotated have the angle 0 and the scale 1.
        self._signed = self._signed_halves(self.frequencies)  # [E]
        if self.long_frequencies is not None:
            self._long_signed = self._signed_halves(self.long_frequencies)
        scales = F.pad(torch.full((self._rotated // 2,), self.scale), (0, self._num_unrotated), value=1.0)
        self._scales = torch.cat((scales, scales)).to(device)  # [E]
        self._exponents = (torch.arange(0, self._rotated, 2, dtype=torch.float32) / self._rotated).to(device)  # [r/2]

    def angles(self, positions: Tensor, seq_lens: Tensor) -> CosSin:
        """Cosine and signed sine, each ``[T, 1, E]`` fp32, of ``positions [T]`` in sequences of ``seq_lens``.

        The length counts the tokens of the sequence when this one is fed: the whole prompt in prefill, position + 1 in
        decode. Only dynamic scaling and longrope read it.
        """
        frequencies = self._signed
        if self.config.kind == "dynamic":
            frequencies = self._signed_halves(self._dynamic_frequencies(seq_lens))
        elif self.long_frequencies is not None:
            is_long = seq_lens[:, None] > self.config.original_max_position
            frequencies = torch.where(is_long, self._long_signed, frequencies)  # [T, E]
        angle = (positions.to(torch.float32)[:, None] * frequencies)[:, None]  # [T, 1, E]
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self.scale == 1.0 else (cos * self._scales, sin * self._scales)

    def _signed_halves(self, frequencies: Tensor) -> Tensor:
        """``[.., r/2]`` to ``[.., E]``: both halves of a head."""
        padded = F.pad(frequencies, (0, self._num_unrotated))
        return torch.cat((-padded, padded), dim=-1)

    def _dynamic_frequencies(self, seq_lens: Tensor) -> Tensor:
        """NTK-aware base that grows with the sequence, unscaled within the original context: ``[T, r/2]``."""
        factor, original = self.config.factor, self.config.original_max_position
        lengths = seq_lens.to(torch.float32).clamp(min=original)
        growth = factor * lengths / original - (factor - 1)
        base = self.config.theta * growth ** (self._rotated / (self._rotated - 2))
        return 1.0 / base[:, None] ** self._exponents
