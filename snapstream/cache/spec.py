"""The sizes of a cached token in a layer, as plain integers: the one place that knows them. No torch.

For grouped-query attention that is a key and a value per kv head. For latent attention (DeepSeek) it is one latent for
all heads: ``num_kv_heads`` is 1 and the values are the first ``value_dim`` numbers of the keys
(``values_are_keys``), so they take no bytes of their own. Storage (``kv_cache.py``), staging, compression, rescoring
and ``plan`` ask this object; nothing else multiplies heads by sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config import DTYPE_BYTES, DType, KVDType, ModelConfig, RescoringConfig, kv_dtype_bytes

SCALE_BYTES = 4  # fp32; one for K and one for V per layer, row and kv head of rows in FP8, of int8 also per slot


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Sizes of cached tokens; bytes are over all layers unless a name says otherwise."""

    num_layers: int  # L
    num_heads: int  # H, query heads that attend
    num_kv_heads: int  # G
    key_dim: int  # numbers of a key, and of a query, per head
    value_dim: int  # numbers of a value per kv head
    values_are_keys: bool = False  # values are the first value_dim numbers of the keys
    expanded_dim: int = 0  # numbers of a key, and of a value, that staging holds per query head beside latents
    dtype: DType = "float32"  # of staging
    kv_dtype: KVDType = "auto"  # of rows

    @classmethod
    def of(cls, model: ModelConfig, dtype: DType, kv_dtype: KVDType = "auto") -> KVSpec:
        """Keys and values per kv head, as grouped-query attention has them."""
        return cls(
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            key_dim=model.head_dim,
            value_dim=model.head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )

    @property
    def token_size(self) -> int:
        """Numbers that one layer keeps of one token."""
        return self.num_kv_heads * (self.key_dim + (0 if self.values_are_keys else self.value_dim))

    @property
    def key_size(self) -> int:
        """Numbers of one token's keys in one layer."""
        return self.num_kv_heads * self.key_dim

    @property
    def number_bytes(self) -> int:
        """Bytes of one staged number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def row_number_bytes(self) -> int:
        """Bytes of one number in a row, without scales."""
        return kv_dtype_bytes(self.dtype, self.kv_dtype)

    def token_bytes(self) -> int:
        """Bytes of one token in a row, with scales of its own if it has any."""
        scales = self._scales_bytes() if self.kv_dtype == "int8" else 0
        return self.num_layers * self.token_size * self.row_number_bytes + scales

    def scale_bytes(self) -> int:
        """Scales of a whole row; 0 unless rows are FP8."""
        return self._scales_bytes() if self.kv_dtype == "fp8" else 0

    def _scales_bytes(self) -> int:
        """A scale per layer and kv head, of K and of V."""
        return (1 if self.values_are_keys else 2) * self.num_layers * self.num_kv_heads * SCALE_BYTES

    def row_bytes(self, capacity: int) -> int:
        """A row of ``capacity`` slots with its scales."""
        return capacity * self.token_bytes() + self.scale_bytes()

    def layer_bytes(self, num_tokens: int) -> int:
        """``num_tokens`` tokens of one layer, in the dtype of staging."""
        return num_tokens * self.token_size * self.number_bytes

    def expanded_bytes(self, num_tokens: int) -> int:
        """Keys and values of every head that are made from ``num_tokens`` latents of one layer; 0 without latents."""
        return 2 * num_tokens * self.num_heads * self.expanded_dim * self.number_bytes

    def staging_bytes(self, num_tokens: int) -> int:
        """``num_tokens`` staged tokens of one layer."""
        return self.layer_bytes(num_tokens) + self.expanded_bytes(num_tokens)

    @property
    def prefix_token_bytes(self) -> int:
        """One token in the prefix store: all layers, as they are staged; what is expanded from latents is made anew."""
        return self.num_layers * self.layer_bytes(1)

    def query_bytes(self, num_tokens: int) -> int:
        """Queries of ``num_tokens`` tokens of one layer, as they are kept for selection or rescoring."""
        return num_tokens * self.num_heads * self.key_dim * self.number_bytes

    def rescoring_bytes(self, rescoring: RescoringConfig | None, capacity: int) -> int:
        """What rescoring keeps of one row beside its tokens: the last queries, and an fp32 vote per slot."""
        if rescoring is None:
            return 0
        return self.num_layers * (self.query_bytes(rescoring.num_queries) + 4 * self.num_kv_heads * capacity)

    def refresh_bytes(self, rescoring: RescoringConfig | None, capacity: int) -> int:
        """One layer of a row in the order of age, and the tokens that stay: what a refresh holds."""
        return 0 if rescoring is None else 2 * self.layer_bytes(capacity)
