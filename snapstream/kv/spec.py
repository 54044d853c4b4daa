"""Sizes of the KV cache in elements and bytes, per layer and per row. No torch.

A row is the sum of its layers' caches. ``Full`` layers hold the slots of the row's budget. ``Window`` layers
(sliding-window attention) hold a ring of the last tokens, all that the model attends to. ``Latent`` layers (DeepSeek)
hold one latent per slot for all heads; its first ``value_dim`` elements are the value. ``State`` layers (recurrent
layers, short convolutions) hold tensors of constant size and no slots; layers without attention or recurrence none.
A layer with attention and recurrence side by side (Falcon-H1) is ``Full`` and has such tensors too.
``Shared`` layers (Gemma 4) hold nothing: they attend to the slots of an earlier layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from snapstream.config import (
    DTYPE_BYTES,
    DType,
    KVBudget,
    KVDType,
    ModelConfig,
    RowFormat,
    row_formats,
)
from snapstream.config.values import check

SCALE_BYTES = STATE_BYTES = 4  # of a scale, and of a number of a recurrent state: fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """A key and a value per kv head for each token that the row's budget keeps."""

    num_kv_heads: int  # G
    key_dim: int  # elements of a key or query per head
    value_dim: int  # elements of a value per kv head
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of the state that it has besides slots, as ``State``

    def budget(self, row_budget: KVBudget) -> KVBudget:
        """Slots of each kv head of this layer in a row with ``row_budget``."""
        return row_budget

    @property
    def key_size(self) -> int:
        """Elements of one token's keys."""
        return self.num_kv_heads * self.key_dim

    @property
    def token_size(self) -> int:
        """Elements that are cached per token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def num_slots(self, capacity: int) -> int:
        """Slots of each kv head in a row of ``capacity`` slots."""
        return self.budget(KVBudget.full(capacity)).capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Full):
    """A key and a value per kv head for the last ``num_tokens`` tokens. The row's budget does not apply."""

    num_tokens: int
    is_chunked: bool = False  # those since the last multiple of num_tokens alone are seen (Llama 4)

    def budget(self, row_budget: KVBudget) -> KVBudget:
        """A ring of ``num_tokens`` slots, independent of ``row_budget``."""
        return KVBudget(num_sink=0, num_topk=0, num_recent=self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent(Full):
    """A latent for all heads (``num_kv_heads`` is 1); the value is its first ``value_dim`` elements."""

    expanded_dim: int = 0  # elements of an expanded key or value per query head, in staging

    @property
    def token_size(self) -> int:
        """Elements that are cached per token: values are among the keys."""
        return self.key_size


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Named fp32 tensors of constant size, whatever the number of tokens. No budget applies and nothing is lost."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    def num_slots(self, capacity: int) -> int:
        """None: a state is no slot."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Nothing: the layer attends to the keys and values of layer ``source``."""

    source: int

    def num_slots(self, capacity: int) -> int:
        """It has no slots."""
        return 0


LayerCache = Full | Window | Latent | State | Shared


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """The caches of all layers. Byte counts are totals over layers unless the name says otherwise."""

    layers: tuple[LayerCache, ...]
    num_heads: int  # H, query heads; where layers differ, the most
    dtype: DType = "float32"  # of staging
    kv_dtype: KVDType = "auto"  # of rows

    def __post_init__(self) -> None:
        with_slots = self._slot_layers
        has_latents = {isinstance(layer, Latent) for layer in with_slots}
        check(len(has_latents) == 1, "latents beside keys and values, or a model without any, are not supported")
        check(not has_latents.pop() or len(self._sizes) == 1, f"latents of several sizes: {sorted(self._sizes)}")

    @classmethod
    def of(cls, model: ModelConfig, dtype: DType, kv_dtype: KVDType = "auto") -> KVSpec:
        return cls(
            layers=tuple(_layer_cache(model, index) for index in range(model.num_layers)),
            num_heads=model.most_heads,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )

    def limited(self, max_model_len: int) -> KVSpec:
        """The same with windows of at most ``max_model_len`` slots."""
        layers = (
            replace(layer, num_tokens=min(layer.num_tokens, max_model_len)) if isinstance(layer, Window) else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @cached_property
    def _slot_layers(self) -> tuple[Full, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Full))

    @cached_property
    def _sizes(self) -> frozenset[tuple[int, int, int]]:
        return frozenset((layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in self._slot_layers)

    @property
    def is_uneven(self) -> bool:
        """Whether layers differ in the size of their heads, or share keys and values."""
        return len(self._sizes) > 1 or any(isinstance(layer, Shared) for layer in self.layers)

    def source(self, layer: int) -> int:
        """The layer whose slots a layer attends to."""
        own = self.layers[layer]
        return own.source if isinstance(own, Shared) else layer

    def slots_of(self, layer: int) -> Full:
        """The cache that a layer with slots, or that shares those of another, attends to."""
        found = self.layers[self.source(layer)]
        assert isinstance(found, Full)
        return found

    @cached_property
    def staging_places(self) -> tuple[int, ...]:
        """By layer, the first one with whose staging buffer it is staged. Layers of one size are staged one after the
        other in one buffer; those whose keys and values are shared have their own, since these are read again. Layers
        with states are staged nowhere.
        """
        shared = {layer.source for layer in self.layers if isinstance(layer, Shared)}
        first: dict[tuple[int, ...], int] = {}
        places = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, State):
                places.append(-1)
                continue
            own = self.slots_of(index)
            size = own.num_kv_heads, own.key_dim, own.value_dim
            key = (*size, self.source(index)) if self.source(index) in shared else size
            places.append(first.setdefault(key, index))
        return tuple(places)

    @property
    def num_prefill_layers(self) -> int:
        """Layers up to the last that keeps anything: of a prompt the others compute its last token alone."""
        return 1 + max(index for index, layer in enumerate(self.layers) if not isinstance(layer, Shared))

    @property
    def slot_layer_indices(self) -> tuple[int, ...]:
        """Indices of the layers that have slots, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer, Full))

    @property
    def budget_layers(self) -> tuple[int, ...]:
        """Indices of the layers to which a row's budget applies, ascending."""
        with_slots = self.slot_layer_indices
        return tuple(index for index in with_slots if not isinstance(self.layers[index], Window))

    @property
    def has_states(self) -> bool:
        """Whether any layer has a recurrent state."""
        return any(map(self.state_shapes, range(self.num_layers)))

    def state_shapes(self, layer: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The tensors of a layer's state by name; none of a layer without."""
        own = self.layers[layer]
        return () if isinstance(own, Shared) else own.shapes

    def layer_state_bytes(self, layer: int) -> int:
        """Bytes of the state of a row in a layer."""
        return STATE_BYTES * sum(prod(shape) for _, shape in self.state_shapes(layer))

    @property
    def state_bytes(self) -> int:
        return sum(map(self.layer_state_bytes, range(self.num_layers)))

    @property
    def num_kv_heads(self) -> int:
        """G; where layers differ, the most."""
        return max(layer.num_kv_heads for layer in self._slot_layers)

    @property
    def key_dim(self) -> int:
        """Elements of a key or query per head; where layers differ, the most."""
        return max(layer.key_dim for layer in self._slot_layers)

    @property
    def value_dim(self) -> int:
        """Elements of a value per kv head; where layers differ, the most."""
        return max(layer.value_dim for layer in self._slot_layers)

    @property
    def values_are_keys(self) -> bool:
        """Whether values are the first ``value_dim`` elements of the keys and take no memory."""
        return isinstance(self._slot_layers[0], Latent)

    @property
    def expanded_dim(self) -> int:
        """Elements of an expanded key or value per query head in staging; 0 without latents."""
        layer = self._slot_layers[0]
        return layer.expanded_dim if isinstance(layer, Latent) else 0

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(isinstance(layer, Window) for layer in self.layers)

    def describe(self) -> str:
        """Which layers have sliding windows or states, and which a budget applies to, in a line; empty without."""
        total, num_full = self.num_layers, len(self.budget_layers)
        states = [layer for layer in self.layers if isinstance(layer, State)]
        if self.has_states and not states:
            kept = "a state of constant size and slots, to which the budget applies"
            return f"recurrent states: each of {total} layers keeps {kept}"
        shared = sum(isinstance(layer, Shared) for layer in self.layers)
        windows, words = [layer for layer in self.layers if isinstance(layer, Window)], []
        if recurrent := sum(bool(layer.shapes) for layer in states):
            words.append(f"recurrent states: {recurrent} of {total} layers keep a state of constant size")
        if windows:
            sizes = " or ".join(f"{size:,}" for size in sorted({layer.num_tokens for layer in windows}))
            kind, kept = (
                ("chunked attention", "a chunk of") if windows[0].is_chunked else ("sliding windows", "the last")
            )
            words.append(f"{kind}: {len(windows)} of {total} layers keep {kept} {sizes} tokens")
        if not words:
            return ""
        is_rest = recurrent == len(states)  # no layer is an MLP alone
        others = f"{num_full}" if shared else f"the other {num_full}" if is_rest else f"the {num_full} of attention"
        applies = f"the budget applies to {others}" if num_full else "no budget applies"
        return "; ".join((*words, f"{shared} attend to keys and values of others, {applies}" if shared else applies))

    def budgets(self, row_budget: KVBudget) -> tuple[KVBudget, ...]:
        """Slots of each kv head, by layer that has slots."""
        return tuple(layer.budget(row_budget) for layer in self._slot_layers)

    @property
    def token_size(self) -> int:
        """Elements that one layer caches per token; where layers differ, the most."""
        return max(layer.token_size for layer in self._slot_layers)

    @property
    def key_size(self) -> int:
        """Elements of one token's keys in one layer; where layers differ, the most."""
        return max(layer.key_size for layer in self._slot_layers)

    @property
    def number_bytes(self) -> int:
        """Bytes of one staged element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def formats(self) -> tuple[RowFormat, RowFormat]:
        """How rows store K and V."""
        return row_formats(self.dtype, self.kv_dtype)

    def slot_bytes(self, layer: Full) -> int:
        """Bytes of one token in one layer of a row, including per-slot scales."""
        sizes = layer.key_size, layer.token_size - layer.key_size
        numbers = (form.num_bytes(size) for form, size in zip(self.formats, sizes, strict=True))
        return sum(numbers) + self._scales_bytes("slot", layer.num_kv_heads)

    def token_bytes(self) -> int:
        return sum(map(self.slot_bytes, self._slot_layers))

    def scale_bytes(self) -> int:
        """Bytes of a row's per-head scales; 0 for formats without."""
        return self.num_layers * self.head_scale_bytes(self.num_kv_heads)

    def head_scale_bytes(self, num_kv_heads: int) -> int:
        """Bytes of the per-head scales of so many heads of a layer."""
        return self._scales_bytes("head", num_kv_heads)

    def _scales_bytes(self, kind: str, num_kv_heads: int) -> int:
        """One scale per kv head of one layer, for each of K and V whose format has scales of that kind."""
        stored = self.formats[: 1 if self.values_are_keys else 2]
        return sum(form.scales == kind for form in stored) * num_kv_heads * SCALE_BYTES

    def row_bytes(self, capacity: int) -> int:
        """Bytes of a row of ``capacity`` slots, including windows, scales and states."""
        slots = sum(layer.num_slots(capacity) * self.slot_bytes(layer) for layer in self._slot_layers)
        return slots + self.scale_bytes() + self.state_bytes

    def max_slots(self, capacity: int) -> int:
        """Most slots per kv head of any layer in a row of ``capacity`` slots."""
        return max(layer.num_slots(capacity) for layer in self.layers)

    def visible_bytes(self, row_slots: int, num_tokens: int) -> int:
        """Bytes that attention reads after ``num_tokens`` tokens, and of the row's scales and states.

        ``row_slots``: of a kv head in each layer to which the row's budget applies. Slots that layers share count once.
        """
        slots = (_visible(layer, row_slots, num_tokens) * self.slot_bytes(layer) for layer in self._slot_layers)
        return sum(slots) + self.scale_bytes() + self.state_bytes

    def layer_bytes(self, num_tokens: int) -> int:
        """Bytes of ``num_tokens`` tokens of one layer in the staging dtype, without expanded keys and values; where
        layers differ, the most.
        """
        return num_tokens * self.token_size * self.number_bytes

    def expanded_bytes(self, num_tokens: int) -> int:
        """Bytes of the keys and values expanded from ``num_tokens`` latents of one layer; 0 without latents."""
        return 2 * num_tokens * self.num_heads * self.expanded_dim * self.number_bytes

    def staging_bytes(self, num_tokens: int) -> int:
        """Bytes of ``num_tokens`` staged tokens: one layer of each size, and those that others share."""
        sizes = sum(self.slots_of(index).token_size for index in set(self.staging_places) - {-1})
        return num_tokens * sizes * self.number_bytes + self.expanded_bytes(num_tokens)

    @property
    def prefix_token_bytes(self) -> int:
        """Bytes of one token in the prefix store: all layers in the staging dtype; latents are stored unexpanded."""
        return sum(layer.token_size for layer in self._slot_layers) * self.number_bytes

    def stored_token_bytes(self, snapshot_len: int) -> int:
        """The same with a token's part of the snapshots of states, two for each ``snapshot_len`` tokens."""
        return self.prefix_token_bytes - (-2 * self.state_bytes // snapshot_len)

    def query_bytes(self, num_tokens: int) -> int:
        """Bytes of the queries of ``num_tokens`` tokens of one layer, kept for selection."""
        return num_tokens * self.num_heads * self.key_dim * self.number_bytes


def _visible(layer: Full, row_slots: int, num_tokens: int) -> int:
    return min(num_tokens, layer.num_tokens) if isinstance(layer, Window) else row_slots


def _layer_cache(model: ModelConfig, index: int) -> LayerCache:
    latent, window = model.latent, model.layer_windows[index]
    if model.mlp_layers is not None and index in model.mlp_layers:
        return State(shapes=())
    if (source := model.source_of(index)) != index:
        return Shared(source=source)
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if index in model.recurrent_layers:
        assert model.recurrent is not None
        shapes = model.recurrent.state_shapes
        if not model.has_parallel_recurrence:
            return State(shapes=shapes)
    if latent is not None:
        return Latent(
            num_kv_heads=1, key_dim=latent.latent_dim, value_dim=latent.kv_rank, expanded_dim=latent.expanded_dim
        )
    heads, size, _ = model.heads_of(index)
    if window is None:
        return Full(num_kv_heads=heads, key_dim=size, value_dim=size, shapes=shapes)
    return Window(num_kv_heads=heads, key_dim=size, value_dim=size, num_tokens=window, is_chunked=model.has_chunks)
