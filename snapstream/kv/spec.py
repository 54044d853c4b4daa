"""What a layer caches of a sequence, in plain integers. Nothing else multiplies heads by sizes. No torch.

A row is the sum of its layers' caches. ``Full`` layers hold the slots of the row's budget; ``Window`` layers
(sliding-window attention) hold a ring of the last tokens, which is all that the model sees of them; ``Latent`` layers
(DeepSeek) hold one latent per slot for all heads, whose first ``value_dim`` numbers are the value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from snapstream.config import (
    DTYPE_BYTES,
    DType,
    KVBudget,
    KVDType,
    ModelConfig,
    ReselectionConfig,
    RowFormat,
    row_format,
)
from snapstream.config.values import check

SCALE_BYTES = 4  # fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """A key and a value per kv head, of the tokens that the row's budget keeps."""

    num_kv_heads: int  # G
    key_dim: int  # numbers of a key, and of a query, per head
    value_dim: int  # numbers of a value per kv head

    def budget(self, of_row: KVBudget) -> KVBudget:
        """The slots of each kv head, where those of the row are ``of_row``."""
        return of_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Full):
    """A key and a value per kv head, of the last ``num_tokens`` tokens. A row's budget does not apply."""

    num_tokens: int

    def budget(self, of_row: KVBudget) -> KVBudget:
        """See ``Full.budget``: a ring, whatever the row has."""
        return KVBudget(num_sink=0, num_topk=0, num_recent=self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent(Full):
    """A latent for all heads (``num_kv_heads`` is 1); the value is its first ``value_dim`` numbers."""

    expanded_dim: int = 0  # numbers of a key, and of a value, that staging holds per query head


LayerCache = Full | Window | Latent


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The caches of all layers. Bytes are over all layers unless a name says otherwise."""

    layers: tuple[LayerCache, ...]
    num_heads: int  # H, query heads that attend
    dtype: DType = "float32"  # of staging
    kv_dtype: KVDType = "auto"  # of rows

    def __post_init__(self) -> None:
        sizes = {(layer.num_kv_heads, layer.key_dim, layer.value_dim, type(layer) is Latent) for layer in self.layers}
        check(len(sizes) == 1, f"layers whose keys and values differ in size are not supported: {sorted(sizes)}")

    @classmethod
    def of(cls, model: ModelConfig, dtype: DType, kv_dtype: KVDType = "auto") -> KVSpec:
        """The caches of a model whose layers are those of its recipe."""
        return cls(
            layers=tuple(_layer_cache(model, window) for window in model.layer_windows),
            num_heads=model.num_heads,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )

    def limited(self, max_model_len: int) -> KVSpec:
        """The same for sequences of at most ``max_model_len`` tokens: no window has more slots."""
        layers = (
            replace(own, num_tokens=min(own.num_tokens, max_model_len)) if isinstance(own, Window) else own
            for own in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """G."""
        return self.layers[0].num_kv_heads

    @property
    def key_dim(self) -> int:
        """Numbers of a key, and of a query, per head."""
        return self.layers[0].key_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a value per kv head."""
        return self.layers[0].value_dim

    @property
    def values_are_keys(self) -> bool:
        """Whether values are the first ``value_dim`` numbers of the keys and take no bytes."""
        return isinstance(self.layers[0], Latent)

    @property
    def expanded_dim(self) -> int:
        """Numbers of a key, and of a value, that staging holds per query head in addition to latents; 0 without."""
        layer = self.layers[0]
        return layer.expanded_dim if isinstance(layer, Latent) else 0

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(isinstance(layer, Window) for layer in self.layers)

    def budgets(self, of_row: KVBudget) -> tuple[KVBudget, ...]:
        """By layer, the slots of each kv head."""
        return tuple(layer.budget(of_row) for layer in self.layers)

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

    def slot_bytes(self) -> int:
        """Bytes of one token in one layer of a row, with its scales if the format has scales per slot."""
        scales = self._scales_bytes() if self.format.scales == "slot" else 0
        return self.token_size * self.format.bits // 8 + scales

    def token_bytes(self) -> int:
        """Bytes of one token in a row that holds it in every layer."""
        return self.num_layers * self.slot_bytes()

    def scale_bytes(self) -> int:
        """Scales per kv head of a whole row; 0 in formats without."""
        return self.num_layers * self._scales_bytes() if self.format.scales == "head" else 0

    def _scales_bytes(self) -> int:
        """A scale per kv head of one layer, of K and of V."""
        return (1 if self.values_are_keys else 2) * self.num_kv_heads * SCALE_BYTES

    def row_bytes(self, capacity: int) -> int:
        """A row of ``capacity`` slots, with its windows and scales."""
        slots = sum(own.capacity for own in self.budgets(KVBudget.full(capacity)))
        return slots * self.slot_bytes() + self.scale_bytes()

    def most_slots(self, capacity: int) -> int:
        """Slots of a kv head in the layer that has most, in a row of ``capacity`` slots."""
        return max(own.capacity for own in self.budgets(KVBudget.full(capacity)))

    def visible_slots(self, of_row: int, num_tokens: int) -> int:
        """Slots of a kv head that attention reads after ``num_tokens`` tokens, summed over layers: ``of_row`` where the
        row's budget applies.
        """
        return sum(min(num_tokens, own.num_tokens) if isinstance(own, Window) else of_row for own in self.layers)

    def visible_bytes(self, of_row: int, num_tokens: int) -> int:
        """Bytes of these slots of all heads, and of the row's scales."""
        return self.visible_slots(of_row, num_tokens) * self.slot_bytes() + self.scale_bytes()

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
        """What KV re-selection keeps of a row with its tokens: the last queries, and an fp32 vote per slot."""
        if reselection is None:
            return 0
        return self.num_layers * (self.query_bytes(reselection.num_queries) + 4 * self.num_kv_heads * capacity)

    def reselection_work_bytes(self, reselection: ReselectionConfig | None, capacity: int) -> int:
        """One layer of a row in the order of age, and the tokens that stay: what a re-selection holds."""
        return 0 if reselection is None else 2 * self.layer_bytes(capacity)


def _layer_cache(model: ModelConfig, window: int | None) -> LayerCache:
    latent = model.latent
    if latent is not None:
        return Latent(
            num_kv_heads=1, key_dim=latent.latent_dim, value_dim=latent.kv_rank, expanded_dim=latent.expanded_dim
        )
    heads, size = model.num_kv_heads, model.head_dim
    if window is None:
        return Full(num_kv_heads=heads, key_dim=size, value_dim=size)
    return Window(num_kv_heads=heads, key_dim=size, value_dim=size, num_tokens=window)
