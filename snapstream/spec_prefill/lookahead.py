"""The draft reads a prompt layer by layer, looks a few greedy tokens ahead, and scores every prompt token.

Three ways, one meaning (``importance.py``); N prompt tokens, L layers:

- ``look_ahead=0``: the prompt's own last queries vote while their layer's keys are staged. One pass, one layer of K
  and V. The last layer stops after its keys and queries: nothing reads its output.
- ``keys="all_layers"``: the prefill keeps K and V of all layers for the decode steps, ``2 L G E`` numbers per prompt
  token in the draft's dtype. Exact; the memory is bounded by the draft's window (``window_len``), not by the text.
- ``keys="one_layer"``: the first pass fills a compressed row (``cache/compress.py``) that the greedy tokens are decoded
  from; the second reads prompt and tokens together, one layer at a time. Twice the time, one layer of K and V; exact
  as long as the row leads to the same greedy tokens.

Greedy tokens make the scores deterministic: the same draft, text and settings give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from snapstream.cache import layout
from snapstream.cache.compress import write_rows
from snapstream.cache.kv_cache import KVCache
from snapstream.config import KVBudget, SnapKVConfig
from snapstream.kernels import dispatch
from snapstream.layers.sampler import NO_TOKEN
from snapstream.models.decoder import Decoder
from snapstream.spec_prefill.importance import Importance
from snapstream.spec_prefill.settings import ROW_SLOTS, ScoringSettings

ROW = KVBudget.of(ROW_SLOTS)  # keys="one_layer": the row that the greedy tokens are decoded from

Staged = Callable[[int, Tensor, Tensor, Tensor], None]  # layer, last queries [w, H, E], keys and values [G, N, E]


@torch.inference_mode()
def token_scores(decoder: Decoder, token_ids: Sequence[int], settings: ScoringSettings) -> Tensor:
    """Score of every token of a prompt that fits the draft's window: ``[N]`` fp32."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=decoder.device)
    if settings.look_ahead == 0:
        return _score_in_pass(decoder, ids, len(ids), min(settings.num_own_queries, len(ids)), settings)
    if settings.keys == "one_layer":
        drawn = draw_from_row(decoder, ids, settings)
        fed = torch.cat((ids, ids.new_tensor(drawn[:-1])))
        return _score_in_pass(decoder, fed, len(ids), len(drawn), settings)
    return _score_from_all_layers(decoder, [ids], settings)[0]


@torch.inference_mode()
def scores_of_windows(
    decoder: Decoder, windows: Sequence[Sequence[int]], settings: ScoringSettings
) -> Iterator[Tensor]:
    """``token_scores`` of prompts of one length; some of them look ahead together, a decode step for all of them."""
    if settings.look_ahead == 0 or settings.keys == "one_layer":
        for token_ids in windows:
            yield token_scores(decoder, token_ids, settings)
        return
    size = settings.num_windows(decoder.device.type)
    for first in range(0, len(windows), size):
        group = [torch.tensor(ids, dtype=torch.int64, device=decoder.device) for ids in windows[first : first + size]]
        yield from _score_from_all_layers(decoder, group, settings)


def _score_in_pass(
    decoder: Decoder, ids: Tensor, prompt_len: int, num_queries: int, settings: ScoringSettings
) -> Tensor:
    """The last ``num_queries`` tokens of ``ids`` vote on the first ``prompt_len``, layer by layer."""
    importance = Importance(num_queries, prompt_len, settings.pool_kernel, decoder.device)
    first_query = len(ids) - num_queries

    def score(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        importance.add(queries, keys[:, :prompt_len], first_query)

    voting_pass(decoder, ids, prompt_len, num_queries, settings, score)
    return importance.scores()


def voting_pass(
    decoder: Decoder, ids: Tensor, prompt_len: int, num_queries: int, settings: ScoringSettings, vote: Staged
) -> None:
    """Read ``ids [n]``, the prompt and look-ahead tokens after it, one layer at a time; ``vote`` sees each layer."""
    storage = _one_layer(decoder, len(ids))
    _prefill(decoder, ids, prompt_len, lambda layer: storage, num_queries, vote, settings, wants_output=False)


def _score_from_all_layers(decoder: Decoder, windows: Sequence[Tensor], settings: ScoringSettings) -> list[Tensor]:
    """Prefill each of ``windows [N]``, decode after all of them at once, then every layer's queries on its keys."""
    config, prompt_len, ahead, num = decoder.config, len(windows[0]), settings.look_ahead, len(windows)
    cache = KVCache(config, num - 1, prompt_len + ahead, decoder.dtype, decoder.device)  # the padding row is the last
    queries = torch.empty(
        (config.num_layers, num, ahead, config.num_heads, config.head_dim), dtype=decoder.dtype, device=decoder.device
    )
    hidden = []
    for row, ids in enumerate(windows):

        def storage(layer: int, row: int = row) -> tuple[Tensor, Tensor]:
            return cache.k[layer, row], cache.v[layer, row]

        def keep_query(layer: int, last: Tensor, keys: Tensor, values: Tensor, row: int = row) -> None:
            queries[layer, row, 0] = last[-1]

        hidden.append(_prefill(decoder, ids, prompt_len, storage, 1, keep_query, settings))
    drawn = _decode(decoder, cache, torch.cat(hidden), prompt_len, 0, cache.capacity, settings, queries)
    scores = []
    for row, tokens in enumerate(drawn):
        importance = Importance(len(tokens), prompt_len, settings.pool_kernel, decoder.device)
        for layer in range(config.num_layers):
            importance.add(queries[layer, row, : len(tokens)], cache.k[layer, row, :, :prompt_len], prompt_len - 1)
        scores.append(importance.scores())
    return scores


def draw_from_row(decoder: Decoder, ids: Tensor, settings: ScoringSettings) -> list[int]:
    """Greedy tokens after the prompt, decoded from a compressed row."""
    prompt_len, snapkv = len(ids), SnapKVConfig()
    cache = KVCache(decoder.config, 0, ROW.capacity, decoder.dtype, decoder.device)

    def compress(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        write_rows(cache, layer, (0,), keys, values, queries, ROW, snapkv)

    storage = _one_layer(decoder, prompt_len)
    window = min(snapkv.window_len, prompt_len)
    hidden = _prefill(decoder, ids, prompt_len, lambda layer: storage, window, compress, settings)
    return _decode(decoder, cache, hidden, prompt_len, layout.ring_start(ROW, prompt_len), ROW.capacity, settings)[0]


def _one_layer(decoder: Decoder, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Staging for K and V of one layer, ``[G, N, E]`` each."""
    shape = (decoder.config.num_kv_heads, num_tokens, decoder.config.head_dim)
    return (
        torch.empty(shape, dtype=decoder.dtype, device=decoder.device),
        torch.empty(shape, dtype=decoder.dtype, device=decoder.device),
    )


def _prefill(
    decoder: Decoder,
    ids: Tensor,
    prompt_len: int,
    storage: Callable[[int], tuple[Tensor, Tensor]],
    num_queries: int,
    staged: Staged,
    settings: ScoringSettings,
    *,
    wants_output: bool = True,
) -> Tensor:
    """Run ``ids [N]`` layer by layer; calls ``staged`` after each layer. Returns the last token's output ``[1, D]``.

    Tokens from ``prompt_len`` on are look-ahead tokens: their sequence was as long as their position + 1 (dynamic
    RoPE). Without ``wants_output`` the last layer ends with its keys and queries, and nothing is returned but zeros.
    """
    num_tokens, device = len(ids), decoder.device
    step = settings.num_prefill_tokens(device.type)
    positions = torch.arange(num_tokens, device=device)
    seq_lens = (positions + 1).clamp(min=prompt_len)
    hidden = torch.empty(num_tokens, decoder.config.hidden_size, dtype=decoder.dtype, device=device)  # [N, D]
    output = torch.zeros(1, decoder.config.hidden_size, dtype=decoder.dtype, device=device)
    last_layer = decoder.config.num_layers - 1
    for layer in range(last_layer + 1):
        keys, values = storage(layer)
        tail: list[Tensor] = []
        for start in range(0, num_tokens, step):
            stop = min(start + step, num_tokens)
            own = slice(start, stop)
            entering = decoder.embed(ids[own]) if layer == 0 else hidden[own]  # [T, D]
            q, k, v = decoder.project(layer, entering, decoder.rope(positions[own], seq_lens[own]))
            keys[:, own], values[:, own] = k.transpose(0, 1), v.transpose(0, 1)
            if stop > num_tokens - num_queries:
                tail.append(q[max(0, num_tokens - num_queries - start) :].clone())
            if layer < last_layer:
                attended = dispatch.prefill_attention(q, keys[:, :stop], values[:, :stop])
                hidden[own] = decoder.finish(layer, entering, attended)
            elif wants_output and stop == num_tokens:
                attended = dispatch.prefill_attention(q[-1:], keys[:, :stop], values[:, :stop])
                output = decoder.finish(layer, entering[-1:], attended)
        staged(layer, torch.cat(tail), keys[:, :num_tokens], values[:, :num_tokens])
    return output


def _decode(
    decoder: Decoder,
    cache: KVCache,
    hidden: Tensor,
    prompt_len: int,
    ring_start: int,
    capacity: int,
    settings: ScoringSettings,
    queries: Tensor | None = None,
) -> list[list[int]]:
    """Greedy tokens after the prompts in rows ``0 .. B - 1``, ``look_ahead`` of each, fewer where the draft ends.

    ``hidden [B, D]`` is the output of the last prompt tokens; all prompts have ``prompt_len`` tokens. All but the last
    token are fed; the query of token ``t`` goes to ``queries [L, B, look_ahead, H, E]`` at ``t + 1``. A row that has
    ended is fed on with the others, to no effect. RuntimeError where logits are not finite.
    """
    device, ends = decoder.device, () if settings.ignore_eos else decoder.config.eos_token_ids
    rows = torch.arange(len(hidden), dtype=torch.int64, device=device)
    drawn: list[list[int]] = [[] for _ in rows]
    for ahead in range(1, settings.look_ahead + 1):
        logits = decoder.logits(hidden)  # [B, V]
        tokens = logits.argmax(-1).masked_fill_(~logits.amax(-1).isfinite(), NO_TOKEN)  # [B]
        for own, token in zip(drawn, tokens.tolist(), strict=True):
            if token == NO_TOKEN:
                raise RuntimeError("the draft's logits are not finite; it cannot say what matters")
            if not own or own[-1] not in ends:
                own.append(token)
        if ahead == settings.look_ahead or all(own[-1] in ends for own in drawn):
            break
        position = prompt_len + ahead - 1
        slots = torch.full_like(rows, layout.slot_of(position, ring_start, capacity))
        lengths = torch.full_like(rows, layout.num_visible(position + 1, capacity))
        rope = decoder.rope(torch.full_like(rows, position), torch.full_like(rows, position + 1))
        hidden = decoder.embed(tokens)
        for layer in range(decoder.config.num_layers):
            q, k, v = decoder.project(layer, hidden, rope)
            if queries is not None:
                queries[layer, :, ahead] = q
            dispatch.write_slots(cache.k[layer], cache.v[layer], k, v, rows, slots)
            attended = dispatch.decode_attention(q, cache.k[layer], cache.v[layer], rows, lengths)
            hidden = decoder.finish(layer, hidden, attended)
    return drawn
