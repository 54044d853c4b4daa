"""The sizes of a cached token, as plain integers. Nothing else multiplies heads by sizes. No torch.

With grouped-query attention a layer caches a key and a value per kv head. With latent attention (DeepSeek) it caches
one latent for all heads: ``num_kv_heads`` is 1, and the values are the first ``value_dim`` numbers of the keys
(``values_are_keys``), so they take no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config import DTYPE_BYTES, DType, KVDType, ModelConfig, ReselectionConfig, RowFormat, row_format

SCALE_BYTES = 4  # fp32


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
    def format(self) -> RowFormat:
        """Of rows."""
        return row_format(self.dtype, self.kv_dtype)

    def token_bytes(self) -> int:
        """Bytes of one token in a row, with its scales if the format has scales per slot."""
        scales = self._scales_bytes() if self.format.scales == "slot" else 0
        return self.num_layers * self.token_size * self.format.bits // 8 + scales

    def scale_bytes(self) -> int:
        """Scales per kv head of a whole row; 0 in formats without."""
        return self._scales_bytes() if self.format.scales == "head" else 0

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
        """Queries of ``num_tokens`` tokens of one layer, as they are kept for selection or KV re-selection."""
        return num_tokens * self.num_heads * self.key_dim * self.number_bytes

    def reselection_bytes(self, reselection: ReselectionConfig | None, capacity: int) -> int:
        """What KV re-selection keeps of one row beside its tokens: the last queries, and an fp32 vote per slot."""
        if reselection is None:
            return 0
        return self.num_layers * (self.query_bytes(reselection.num_queries) + 4 * self.num_kv_heads * capacity)

    def reselection_work_bytes(self, reselection: ReselectionConfig | None, capacity: int) -> int:
        """One layer of a row in the order of age, and the tokens that stay: what a re-selection holds."""
        return 0 if reselection is None else 2 * self.layer_bytes(capacity)
