"""Shape of a model; ``models/registry.py`` reads it off a checkpoint's ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from snapstream.config.latent import LatentConfig
from snapstream.config.moe import MoEConfig
from snapstream.config.values import check
from snapstream.config.weights import StoredWeights

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched. Field names follow ``transformers``."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # max_position before stretching; 0 where the kind does not use it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn: scale of cos and sin; None means the formula of the paper
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn (DeepSeek variant)
    mscale_all_dim: float | None = None  # yarn (DeepSeek variant)
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    partial_rotary_factor: float = 1.0  # share of a head that is rotated; the rest passes

    def rotary_dim(self, head_dim: int) -> int:
        """Numbers of a head that are rotated."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder: all that the engine needs to know of a checkpoint without its weights."""

    architecture: str  # as in config.json, e.g. "LlamaForCausalLM"
    vocab_size: int  # V
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # G
    head_dim: int  # E
    intermediate_size: int  # I, of layers without experts
    max_position: int  # tokens of the context, after rope stretching
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    latent: LatentConfig | None = None  # of latent attention, where a latent is the head of the one kv head
    num_mtp_layers: int = 0  # layers behind the last, which predict further tokens; they are not loaded
    qk_norm: bool = False  # RMSNorm over each head of q and k before the rotation (Qwen3)
    moe: MoEConfig | None = None  # None: every layer has one MLP
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored: StoredWeights = field(default_factory=StoredWeights)
    table_lines: int | None = (
        None  # of the vocabulary that lie on this rank, the last rank's padding among them; None: V
    )

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_position"):  # fmt: skip
            check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be >= 1")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        check(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}; rotary embedding needs an even size")
        rotated = self.rope.rotary_dim(self.head_dim)
        check(
            rotated % 2 == 0 and 2 <= rotated <= self.head_dim,
            f"partial_rotary_factor {self.rope.partial_rotary_factor} rotates {rotated} of the {self.head_dim} numbers "
            "of a head; it must rotate an even number of them",
        )

    @property
    def own_vocab(self) -> int:
        """Lines of the embedding tables that are stored."""
        return self.vocab_size if self.table_lines is None else self.table_lines

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that have angles, some of which may be 0."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads
