"""Rotary position embedding: the frequencies of each kind of stretching, and the angles.

Conventions of ``transformers``: the two halves of a head form the rotated pairs, angles are fp32.
``Rope.angles`` is called once per decode step or prefill unit; the kernels turn the heads of each layer.
Invariant: an angle depends on the token's position only, and with dynamic stretching also on the length its
sequence had when it was fed; keys that are already stored are never rotated again.
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
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    plain = _default_frequencies(rope.theta, head_dim)
    turns = rope.original_max_position * plain / (2 * math.pi)  # rotations within the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)  # how much of the plain frequency is kept
    return (1 - share) * plain / rope.factor + share * plain


def _yarn_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often keep their frequency, slow ones are interpolated (YaRN, arXiv 2309.00071)."""

    def pair_of(turns: float) -> float:  # index of the pair that turns so often in the original context
        wavelength = rope.original_max_position / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    plain = _default_frequencies(rope.theta, head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def growth(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, ``[E/2]`` fp32; for dynamic stretching, inside the original context."""
    match rope.kind:
        case "default" | "dynamic":
            return _default_frequencies(rope.theta, head_dim)
        case "linear":
            return _default_frequencies(rope.theta, head_dim) / rope.factor
        case "llama3":
            return _llama3_frequencies(rope, head_dim)
        case "yarn":
            return _yarn_frequencies(rope, head_dim)


class Rope:
    """Turns positions into the cosines and sines that kernels take.

    Where only part of a head is rotated, the other pairs get the angle 0 (``models/tensors.py`` stores the rows of
    a head so that the rotated pairs are its first).
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        """ValueError where dynamic stretching has no base: r = 2 rotated numbers, a power of r / (r - 2)."""
        self.config = rope
        self.head_dim = head_dim
        self.scale = _yarn_attention_factor(rope) if rope.kind == "yarn" else 1.0
        self._rotated = rope.rotary_dim(head_dim)
        if rope.kind == "dynamic" and self._rotated == 2:
            raise ValueError("dynamic rope rotates 2 numbers of a head; it needs 4 or more")
        self._num_still = (head_dim - self._rotated) // 2  # pairs
        self.frequencies = rope_frequencies(rope, self._rotated).to(device)  # [r/2]
        self._exponents = (torch.arange(0, self._rotated, 2, dtype=torch.float32) / self._rotated).to(device)  # [r/2]

    def angles(self, positions: Tensor, seq_lens: Tensor) -> CosSin:
        """Cosine and signed sine, each ``[T, 1, E]`` fp32, of ``positions [T]`` in sequences of ``seq_lens``.

        The length of a sequence counts the tokens it has when this one is fed: the whole prompt for every
        prompt token, position + 1 in decode. Only dynamic stretching looks at it.
        """
        is_dynamic = self.config.kind == "dynamic"
        frequencies = self._dynamic_frequencies(seq_lens) if is_dynamic else self.frequencies
        angle = positions.to(torch.float32)[:, None] * frequencies  # [T, r/2]
        cos, sin = angle.cos(), angle.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        if self._num_still:
            cos, sin = F.pad(cos, (0, self._num_still), value=1.0), F.pad(sin, (0, self._num_still))  # [T, E/2]
        # the minus of the rotation is folded into the sine, so that the rotation is one roll and one multiply-add
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

    def _dynamic_frequencies(self, seq_lens: Tensor) -> Tensor:
        """NTK-aware base that grows with the sequence, plain within the original context: ``[T, r/2]``."""
        factor, original = self.config.factor, self.config.original_max_position
        lengths = seq_lens.to(torch.float32).clamp(min=original)
        growth = factor * lengths / original - (factor - 1)
        base = self.config.theta * growth ** (self._rotated / (self._rotated - 2))
        return 1.0 / base[:, None] ** self._exponents
