"""Shapes of layers with a recurrent state in the place of keys and values. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from snapstream.config.values import MAX_DIM, check


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """Gated short convolution in place of attention (LFM2): a causal depthwise convolution over the last ``kernel``
    tokens, between two gates.
    """

    channels: int
    kernel: int
    has_bias: bool = False  # of the projections and of the convolution

    def __post_init__(self) -> None:
        check(2 <= self.kernel <= 64, f"a convolution over {self.kernel} tokens is not supported; 2 to 64 are")

    @property
    def state_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What a sequence keeps in such a layer, fp32: the last inputs of the convolution."""
        return (("inputs", (self.kernel - 1, self.channels)),)

    def of_rank(self, num_ranks: int) -> ShortConv:
        """What each of several ranks computes: its channels."""
        _check_split("channels of the convolutions", self.channels, num_ranks)
        return replace(self, channels=self.channels // num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Gated DeltaNet in place of attention (Yang et al., arXiv 2412.06464): a matrix per value head, which a short
    convolution feeds. A key head serves ``value_heads / key_heads`` adjacent value heads.

    With a ``gate_rank`` Kimi delta attention (KDA, arXiv 2510.26692): a decay per element of a key in place of one per
    head, and sigmoid gates of outputs in place of SiLU, both products of two matrices of that rank.
    """

    key_heads: int
    value_heads: int
    key_dim: int  # elements of a key or query
    value_dim: int
    kernel: int  # tokens of the convolution
    gate_rank: int = 0
    has_full_gates: bool = False  # of KDA: each is one product, and gate_rank its numbers (Ling 3.0)
    decay_floor: float | None = None  # of KDA: decays are e to this times a sigmoid
    most_beta: float = 1.0  # by which the sigmoid of beta is multiplied; 2: negative eigenvalues (arXiv 2411.12537)
    norm_eps: float | None = None  # of the norms of outputs; None: rms_norm_eps

    def __post_init__(self) -> None:
        check(0 <= self.gate_rank <= MAX_DIM, f"gate_rank is {self.gate_rank}; it must be 0 to {MAX_DIM}")
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            check(1 <= getattr(self, name) <= MAX_DIM, f"{name} is {getattr(self, name)}; it must be 1 to {MAX_DIM}")
        check(2 <= self.kernel <= 64, f"a convolution over {self.kernel} tokens is not supported; 2 to 64 are")
        check(
            self.value_heads % self.key_heads == 0,
            f"{self.value_heads} value heads are no multiple of {self.key_heads} key heads",
        )

    @property
    def key_size(self) -> int:
        """Elements of a token's keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of a token's values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def projected(self) -> int:
        """Elements that a token is projected to: channels, and gates or the inputs of decays and gates."""
        return self.channels + (2 * self.gate_rank or self.value_size)

    @property
    def state_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What a sequence keeps in such a layer, fp32: the last inputs of the convolution, a matrix per value head."""
        return (
            ("inputs", (self.kernel - 1, self.channels)),
            ("memory", (self.value_heads, self.key_dim, self.value_dim)),
        )

    def of_rank(self, num_ranks: int) -> DeltaNet:
        """What each of several ranks computes: its key heads with their value heads."""
        _check_split("key heads of recurrent layers", self.key_heads, num_ranks)
        own = replace(self, key_heads=self.key_heads // num_ranks, value_heads=self.value_heads // num_ranks)
        return replace(own, gate_rank=own.key_size) if self.has_full_gates else own


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba-2 in place of attention (Dao and Gu, arXiv 2405.21060): a matrix per head that decays and takes in every
    token, fed by a short convolution. A group serves ``heads / groups`` adjacent heads.
    """

    heads: int
    head_dim: int
    groups: int  # of inputs B and outputs C of the state
    state_dim: int  # elements of B and C
    kernel: int  # tokens of the convolution
    has_conv_bias: bool = True
    has_bias: bool = False  # of the projections
    has_norm: bool = True  # of each group of the output
    in_multipliers: tuple[float, ...] = ()  # of gates, inputs, B, C and steps as projected (Falcon-H1)
    ranks_of_group: int = 1  # that have some heads of it each

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "groups", "state_dim"):
            check(1 <= getattr(self, name) <= MAX_DIM, f"{name} is {getattr(self, name)}; it must be 1 to {MAX_DIM}")
        check(2 <= self.kernel <= 64, f"a convolution over {self.kernel} tokens is not supported; 2 to 64 are")
        check(self.heads % self.groups == 0, f"{self.heads} heads are no multiple of {self.groups} groups")
        check(
            len(self.in_multipliers) in (0, 5) and not (self.in_multipliers and self.has_bias),
            f"multipliers of Mamba-2 are {self.in_multipliers}; there must be five, and no biases of projections",
        )

    @property
    def projected(self) -> tuple[int, ...]:
        """Numbers that a token is projected to: gates, inputs, B, C, steps."""
        return self.inner, self.inner, *(2 * (self.groups * self.state_dim,)), self.heads

    @property
    def inner(self) -> int:
        """Elements of a token's heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: heads, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What a sequence keeps in such a layer, fp32: the last inputs of the convolution, a matrix per head."""
        return (("inputs", (self.kernel - 1, self.channels)), ("memory", (self.heads, self.state_dim, self.head_dim)))

    def of_rank(self, num_ranks: int) -> Mamba2:
        """What each of several ranks computes: its groups with their heads, or some heads of one group."""
        _check_split("heads of Mamba-2", self.heads, num_ranks)
        check(
            self.groups % num_ranks == 0 or num_ranks % self.groups == 0,
            f"{self.groups} groups of Mamba-2 cannot be split over {num_ranks} ranks",
        )
        return replace(
            self, heads=self.heads // num_ranks, groups=max(self.groups // num_ranks, 1),
            ranks_of_group=max(num_ranks // self.groups, 1),
        )  # fmt: skip


Recurrent = ShortConv | DeltaNet | Mamba2


def _check_split(what: str, count: int, num_ranks: int) -> None:
    check(count % num_ranks == 0, f"{count} {what} cannot be split over {num_ranks} ranks")
