"""Rows as a cache of transformers: ``model.generate(..., past_key_values=SnapStreamCache(model.config, budget=...))``.

After the attention of a layer over a prompt, the layer's keys and values shrink to a row of ``budget`` slots, selected
by the prompt's last queries (SnapStream, arXiv 2511.03092, section 3); from then on memory and shapes are constant.
Rows and tokens equal the engine's (``kv/layout.py``). Layers with sliding windows or recurrent states, to which no
budget applies, have the caches that ``DynamicCache`` gives them.

A cache sees keys and values, but no queries. So the constructor sets the config's attention to ``snapstream``:
PyTorch's ``sdpa``, which also passes a prompt's queries to the cache of the keys; with other caches it is just
``sdpa``.
Invariant: one cache holds one generation; ``reset`` prepares it for the next.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from snapstream.config import EngineConfig, KVBudget, ModelConfig, Selector, make_selector
from snapstream.kernels.interface import bind
from snapstream.kv import layout
from snapstream.kv.cache import slots_of
from snapstream.kv.compress import kept_positions
from snapstream.models.registry import kv_spec_of, model_config_from_dict
from snapstream.startup.resolve import resolve_budget

NAME = "snapstream"  # of the attention, as a config says it
PLAIN = ("sdpa", "eager", NAME)  # attentions that ours replaces
LAYER = "snapstream_layer"  # attribute of the keys that are passed to the attention


class SnapStreamCache(Cache):
    """A row per sequence of the batch and full layer, of constant size from the end of the prompt on."""

    def __init__(
        self, config: PreTrainedConfig, budget: int | KVBudget | None = None, *, selector: str | Selector = "snapkv"
    ) -> None:
        """``budget``: slots of a row. TypeError without one.

        ValueError for a model whose attention the engine does not have, or that runs another attention than ``sdpa`` or
        ``eager``; the config's attention is ``snapstream`` from now on.
        """
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(
                f"config is a {type(config).__name__}; give the model's config: SnapStreamCache(model.config, 4096)"
            )
        if budget is None:
            raise TypeError("budget is missing; give the slots of a row: SnapStreamCache(model.config, budget=4096)")
        model = _model_config(config)
        chosen = make_selector(selector)
        self.budget = resolve_budget(budget, model.max_position, chosen.observation_len)
        EngineConfig(budget=self.budget, max_model_len=model.max_position, selector=chosen)  # ValueError
        _attend_with_rows(config)
        layers = list(DynamicCache(config=config).layers)
        for index in kv_spec_of(model, "float32").budget_layers:
            layers[index] = SnapStreamLayer(self.budget, chosen, index)
        super().__init__(layers=layers)
        self._config = config

    def reset(self) -> None:
        """Forget all tokens. Other layers are made anew: windows of transformers 5.17 keep theirs at a reset."""
        for index, other in enumerate(DynamicCache(config=self._config).layers):
            if isinstance(own := self.layers[index], SnapStreamLayer):
                own.reset()
            else:
                self.layers[index] = other


class SnapStreamLayer(StaticLayer):
    """The rows of one layer: ``keys, values [B, G, C, E]``."""

    is_croppable = False

    def __init__(self, budget: KVBudget, selector: Selector, index: int) -> None:
        super().__init__(max_cache_len=budget.capacity)
        self._budget, self._selector, self._index = budget, selector, index
        self._has_prompt = self._awaits = False
        self._pads = self._ring = self._slots = torch.empty(0)  # [B] padding, [B] first slot of the ring, [C]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns a prompt unchanged, for ``attend`` to compress; writes a token to its slot, and returns the row."""
        if self._awaits:
            raise ValueError(
                f"the queries of the prompt did not reach the cache: the model runs another attention than {NAME!r}; "
                "make the cache of the config of the model that generates"
            )
        if self._has_prompt:
            if key_states.shape[2] != 1:
                raise ValueError(
                    f"{key_states.shape[2]} tokens were fed to a row whose prompt has ended; it takes one at a time: "
                    "leave prefill_chunk_size and an assistant model out, and reset() the cache before another prompt"
                )
            return self._write(key_states, value_states)
        if self.keys is None or self.keys.shape[:2] != key_states.shape[:2]:
            self.lazy_initialization(key_states, value_states)
            setattr(self.keys, LAYER, self)
        self._awaits = True
        setattr(key_states, LAYER, self)
        return key_states, value_states

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: Any) -> Any:
        """Attention of ``query [B, H, T, E]``; after a prompt's, its keys and values become the row."""
        if self._has_prompt:
            seen = torch.clamp(self.cumulative_length - self._pads, max=self.max_cache_len)  # [B]
            return sdpa_attention_forward(
                module, query, key, value, (self._slots < seen[:, None])[:, None, None], scaling=scale
            )
        out = sdpa_attention_forward(module, query, key, value, mask, scaling=scale)
        with torch.no_grad():
            size = query.shape[-1]  # selectors multiply scores with 1 / sqrt(size)
            self._compress(query if scale is None else query * (scale * size**0.5), key, value, mask)
        self._has_prompt, self._awaits = True, False
        return out

    def _compress(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Each prompt of the batch to its row: ``key [B, G, N, E]``, padded on the left."""
        num_tokens, pads = key.shape[2], _padding(key, mask)
        own_keys, own_values = self._stored()
        kernels = bind(key.device)
        for row, pad in enumerate(pads):
            keys, values = key[row, :, pad:], value[row, :, pad:]  # [G, n, E]
            own = num_tokens - pad
            if not layout.is_compressed(self._budget, own):
                for slot, part in layout.uncompressed_parts(self._budget, own):
                    own_keys[row, :, slot : slot + len(part)] = keys[:, part.start : part.stop]
                    own_values[row, :, slot : slot + len(part)] = values[:, part.start : part.stop]
                continue
            queries = query[row, :, -self._selector.num_queries(own) :].transpose(0, 1)  # [w, H, E]
            index = kept_positions(queries, keys, self._index, self._budget, self._selector, kernels)[..., None]
            own_keys[row] = keys.gather(1, index.expand(-1, -1, keys.shape[-1]))
            own_values[row] = values.gather(1, index.expand(-1, -1, values.shape[-1]))
        rings = [layout.ring_start(self._budget, num_tokens - pad) for pad in pads]
        self._pads, self._ring = (torch.tensor(one, device=key.device) for one in (pads, rings))
        self._slots = torch.arange(self.max_cache_len, device=key.device)
        self.cumulative_length.fill_(num_tokens)

    def _write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each row, ``[B, G, 1, E]``, into its slot; the rows."""
        own_keys, own_values = self._stored()
        slots = slots_of(self.cumulative_length - self._pads, self._ring, self.max_cache_len)[:, None, None, None]
        own_keys.scatter_(2, slots.expand_as(key), key)
        own_values.scatter_(2, slots.expand_as(value), value)
        self.cumulative_length.add_(1)
        return own_keys, own_values

    def _stored(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.max_cache_len if self._has_prompt else query_length), 0

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]  # as in StaticLayer
        """Tokens so far, with padding: for positions, not what the row holds."""
        return self.cumulative_length if self._has_prompt else 0

    def get_max_length(self) -> int:
        """-1: a row takes any number of tokens."""
        return -1

    def reset(self) -> None:
        super().reset()
        self._has_prompt = self._awaits = False

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise ValueError("a row cannot drop tokens: assisted generation needs another cache")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        raise ValueError("rows do not take part in beam search; leave num_beams at 1")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        raise ValueError("rows cannot be repeated after their prompt; ask for num_return_sequences instead")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        raise ValueError("rows of a batch stay together; contrastive and beam search need another cache")


def rows_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """The attention named ``snapstream``. ``others``: what the interface of transformers has besides."""
    layer = getattr(key, LAYER, None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    if others.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ValueError(
            "output_attentions is True; SnapStreamCache attends with sdpa, which returns no attention weights"
        )
    return layer.attend(module, query, key, value, attention_mask, others.get("scaling"))


def _attend_with_rows(config: PreTrainedConfig) -> None:
    before = config._attn_implementation or "sdpa"
    if before not in PLAIN:
        raise ValueError(f"the model runs the attention {before!r}; load it with attn_implementation='sdpa'")
    AttentionInterface.register(NAME, rows_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation = NAME


def _model_config(config: PreTrainedConfig) -> ModelConfig:
    """What the engine makes of the config; ValueError, with all reasons, if it cannot run such a model."""
    settings = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    if not settings.get("architectures"):
        settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)]
    model = model_config_from_dict(settings)
    spec = kv_spec_of(model, "float32")
    unsupported = "which SnapStreamCache does not support"
    for is_so, problem in (
        (not spec.budget_layers, "has sliding windows in all layers, to which no budget applies; use DynamicCache"),
        (
            model.rope.kind == "longrope",
            "has longrope, and transformers drops its cache where a text outgrows the original context; "
            "SnapStreamCache does not support it",
        ),
        (model.has_uneven_layers, f"has layers that differ in their heads, {unsupported}"),
        (model.has_parallel_recurrence, f"has attention and recurrence side by side in a layer, {unsupported}"),
        (model.has_chunks, f"has chunked attention, {unsupported}"),
        (model.index_topk is not None, f"has an indexer of sparse attention, {unsupported}"),
        (model.has_sinks, f"has learned attention sinks, {unsupported}"),
        (model.value_dim is not None, f"has values smaller than keys, {unsupported}"),
        (model.score_cap is not None, f"has a cap of attention scores, {unsupported}"),
        (spec.values_are_keys, "keeps latents in the engine, which a cache of transformers does not see"),
    ):
        if is_so:
            raise ValueError(f"{model.architecture} {problem}")
    return model


def _padding(key: Tensor, mask: Tensor | None) -> list[int]:
    """Padded tokens before each prompt, from the mask of the attention, ``[B, 1, N, N]``."""
    if mask is None:
        return [0] * key.shape[0]
    last = mask[:, 0, -1, : key.shape[2]]
    real = last if last.dtype == torch.bool else last == 0  # [B, N]
    pads = key.shape[2] - real.sum(-1)
    expected = torch.arange(key.shape[2], device=key.device) >= pads[:, None]
    if not bool((real == expected).all()):
        raise ValueError("prompts of a batch must be padded on the left (padding_side='left')")
    return [int(pad) for pad in pads.expand(key.shape[0])]
