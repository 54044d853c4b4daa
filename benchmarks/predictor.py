"""Predicted times of decode steps and prompts on a group of ranks, with every assumption here. None is measured.

A part of a step takes the longer of two times: its bytes at ``READ_SHARE`` of the memory's bandwidth, and its products
at ``PRODUCT_SHARE`` of what the device does in dense bf16. Parts run one after the other:

* weights: every matrix a rank stores is read once, of its experts those that the step's rows chose
  (``MoEConfig.num_read``: evenly, so no rank waits for one with more work);
* rows: the visible slots of a rank's rows. Latents of a row are read once for all heads, and multiplied with all of
  them: with 128 heads that is bound by products;
* collectives: two per layer, one for the embedding, one for the logits, each the latency of its ``Link`` and the time
  of its bytes. Two links bound what people have;
* ``HOST_S``: the scheduler, the launch of a captured step, sampling.

A prompt passes each layer in chunks: products of a chunk, or reading the layer's weights once more, whichever takes
longer; attention of all pairs; two collectives of a chunk's hidden states. Nothing is overlapped.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config import (
    DTYPE_BYTES,
    DType,
    EngineOptions,
    KVDType,
    ModelConfig,
    ParallelConfig,
    WeightFormats,
)
from snapstream.kv.spec import KVSpec, State, Window
from snapstream.models.registry import kv_spec_of, tensor_specs
from snapstream.models.sharding import (
    active_parameters,
    decode_weight_bytes,
    layer_parameters,
    rank_config,
    tensor_bytes,
)
from snapstream.plan.memory import split_heads

READ_SHARE = 0.8  # of the memory's bandwidth
PRODUCT_SHARE = 0.6  # of dense products in bf16
HOST_S = 0.6e-3


@dataclass(frozen=True, kw_only=True)
class Link:
    """Interconnect: seconds of a collective of no bytes, and bytes per second that a rank sends."""

    name: str
    latency_s: float
    bytes_per_s: float

    def all_gather_s(self, num_bytes: float, size: int) -> float:
        """Seconds to gather ``num_bytes`` in total: in a ring, every rank forwards all parts but one."""
        return 0.0 if size == 1 else self.latency_s + num_bytes * (size - 1) / size / self.bytes_per_s

    def all_reduce_s(self, num_bytes: float, size: int) -> float:
        """Seconds to reduce ``num_bytes`` on every rank: twice the bytes of a gather."""
        return 0.0 if size == 1 else self.latency_s + 2 * num_bytes * (size - 1) / size / self.bytes_per_s


# Latencies are assumed: 12 us is usual among GPUs on one switch of NVLink; 180 us follows from a report of two nodes at
# batch 1. Bandwidths are those on paper, in one direction: NVLink 4, and one port of 400 Gb/s per GPU.
LINKS = (Link(name="one switch", latency_s=12e-6, bytes_per_s=450e9),
         Link(name="two nodes", latency_s=180e-6, bytes_per_s=50e9))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One decode step, in seconds; of the rank that has most rows."""

    num_rows: int
    weights_s: float
    rows_s: float
    host_s: float
    num_collectives: int
    collectives_s: tuple[float, ...]  # over each of LINKS

    @property
    def seconds(self) -> tuple[float, ...]:
        """The whole step over each of LINKS."""
        return tuple(self.weights_s + self.rows_s + self.host_s + over for over in self.collectives_s)

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """Tokens per second of all rows, over each of LINKS."""
        return tuple(self.num_rows / seconds for seconds in self.seconds)


@dataclass(frozen=True, kw_only=True)
class PromptTime:
    """The prefill of one prompt, in seconds."""

    num_tokens: int
    layers_s: float  # matrix products of all tokens, or reading the weights once per chunk
    attention_s: float
    collectives_s: tuple[float, ...]  # over each of LINKS

    @property
    def seconds(self) -> tuple[float, ...]:
        """The whole prompt over each of LINKS."""
        return tuple(self.layers_s + self.attention_s + over for over in self.collectives_s)


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A model on ranks of one kind of device."""

    model: ModelConfig  # the whole one
    parallel: ParallelConfig
    formats: WeightFormats | None
    dtype: DType
    kv_dtype: KVDType = "auto"
    bandwidth_bytes_per_s: float
    flop_per_s: float

    @classmethod
    def of(
        cls, model: ModelConfig, options: EngineOptions, formats: WeightFormats, bandwidth: float, flop_per_s: float
    ) -> Predictor:
        """Predictor of an engine with these options, on devices of ``bandwidth`` bytes per second."""
        return cls(
            model=model,
            parallel=options.parallel,
            formats=formats,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            bandwidth_bytes_per_s=bandwidth,
            flop_per_s=flop_per_s,
        )

    def step(self, num_rows: int, visible_slots: int, num_tokens: int | None = None) -> StepTime:
        """A step of so many rows, each of which reads ``visible_slots`` in layers without a sliding window;
        ``num_tokens`` were fed to it, by default as many.
        """
        stored, own, size = self._stored, self._own, self.parallel.size
        weights = decode_weight_bytes(stored, self.dtype, self.formats, num_rows)
        is_dp = self.parallel.dp_size > 1
        spec = kv_spec_of(stored if is_dp else own, self.dtype, self.kv_dtype)
        rows = -(-num_rows // self.parallel.dp_size)
        num_tokens = visible_slots if num_tokens is None else num_tokens
        flop = rows * attention_flop(spec, visible_slots, num_tokens)
        hidden = num_rows * self.model.hidden_size * DTYPE_BYTES[self.dtype]
        logits = num_rows * self.model.vocab_size * DTYPE_BYTES[self.dtype]
        layers = self.model.num_layers
        return StepTime(
            num_rows=num_rows,
            weights_s=self._longer(weights, 2 * num_rows * active_parameters(own)),
            rows_s=self._longer(rows * spec.visible_bytes(visible_slots, num_tokens), flop),
            host_s=HOST_S,
            num_collectives=2 * layers + 2 if size > 1 else 0,
            collectives_s=tuple(
                (layers + 1) * link.all_reduce_s(hidden, size)
                + layers * (link.all_gather_s if is_dp else link.all_reduce_s)(hidden, size)
                + link.all_gather_s(logits, size)
                for link in LINKS
            ),
        )

    def prompt(self, num_tokens: int, chunk_len: int, num_restored: int = 0) -> PromptTime:
        """One prompt alone, in chunks of ``chunk_len`` tokens; attention computes what the engine's does.

        ``num_restored`` tokens at its begin come from the prefix store, and are attended to.
        """
        own, size, layers = self._own, self.parallel.size, self.model.num_layers
        num_new = num_tokens - num_restored
        chunk = min(chunk_len, num_new)
        num_chunks = -(-num_new // chunk)
        weights = layers_read_bytes(own, self.dtype, self.formats, chunk) / layers
        spec = kv_spec_of(own, self.dtype)
        flop = 0.0
        for layer in range(spec.num_prefill_layers):
            if isinstance(spec.layers[layer], State):
                continue
            window = own.layer_windows[layer] or num_tokens
            pairs = _num_pairs(num_tokens, window) - _num_pairs(num_restored, window)
            flop += pairs * (4 * spec.num_heads * spec.expanded_dim or pair_flop(spec, layer))
        hidden = chunk * self.model.hidden_size * DTYPE_BYTES[self.dtype]
        return PromptTime(
            num_tokens=num_tokens,
            layers_s=spec.num_prefill_layers * num_chunks * self._longer(weights, 2 * chunk * layer_parameters(own)),
            attention_s=self._longer(0, flop),
            collectives_s=tuple((2 * layers + 1) * num_chunks * link.all_reduce_s(hidden, size) for link in LINKS),
        )

    @property
    def _stored(self) -> ModelConfig:
        return rank_config(self.model, self.parallel, formats=self.formats)

    @property
    def _own(self) -> ModelConfig:
        """What a rank computes: its heads, with ``attention="dp"`` as much work as these."""
        return rank_config(self.model, split_heads(self.parallel), formats=self.formats)

    def _longer(self, num_bytes: float, flop: float) -> float:
        """Seconds of what is bound by the slower of memory and products."""
        return max(num_bytes / (READ_SHARE * self.bandwidth_bytes_per_s), flop / (PRODUCT_SHARE * self.flop_per_s))


def _num_pairs(num_tokens: int, window: int) -> float:
    """Queries of a prompt and the keys that each sees, at most ``window``, in one layer."""
    seen = min(num_tokens, window)
    return seen * (seen + 1) / 2 + (num_tokens - seen) * seen


def pair_flop(spec: KVSpec, layer: int) -> int:
    """Products of all query heads with one cached token of a layer, and with its value."""
    own = spec.slots_of(layer)
    return 2 * spec.num_heads * (own.key_dim + own.value_dim)


def attention_flop(spec: KVSpec, row_slots: int, num_tokens: int) -> int:
    """Products of one token's attention in all layers after ``num_tokens`` tokens, see ``KVSpec.visible_bytes``."""
    total = 0
    for index, layer in enumerate(spec.layers):
        if not isinstance(layer, State):
            own = spec.slots_of(index)
            total += (min(num_tokens, own.num_tokens) if isinstance(own, Window) else row_slots) * pair_flop(
                spec, index
            )
    return total


def layers_read_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None, num_tokens: int) -> int:
    """As ``decode_weight_bytes``, of the layers alone: what a chunk of a prompt reads."""
    sizes = tensor_bytes(config, dtype, formats)
    others = sum(
        sizes[name]
        for name, spec in tensor_specs(config).items()
        if not (spec.per_layer or spec.is_table) and (name != "embed" or config.tie_word_embeddings)
    )
    return decode_weight_bytes(config, dtype, formats, num_tokens) - others
