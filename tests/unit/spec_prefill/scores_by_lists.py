"""SpecPrefill's scores as a list-based program over transformers' own layers, written without the package.

Queries and keys come from a transformers model (hidden states, its projections, its rotation); the rest are loops.
"""

from __future__ import annotations

import math
from importlib import import_module

import torch


def rotated(model, layer, hidden, position_ids):
    """Queries ``[H][n][E]`` and keys ``[G][n][E]`` of one layer from the hidden states that enter it."""
    block = model.model.layers[layer]
    attention = block.self_attn
    modeling = import_module(type(model).__module__)
    normed = block.input_layernorm(hidden)
    width = attention.head_dim
    q = attention.q_proj(normed).view(1, hidden.shape[1], -1, width)
    k = attention.k_proj(normed).view(1, hidden.shape[1], -1, width)
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    cos, sin = model.model.rotary_emb(hidden, position_ids)
    q, k = modeling.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q[0].tolist(), k[0].tolist()


@torch.no_grad()
def drawn_tokens(model, prompt, count, ends):
    """Greedy tokens after the prompt, the whole sequence read anew each time."""
    ids, drawn = list(prompt), []
    while len(drawn) < count:
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        drawn.append(token)
        if token in ends:
            break
        ids.append(token)
    return drawn


@torch.no_grad()
def token_scores(model, prompt, *, look_ahead, own_queries=8, width=13, ends=()):
    """Score per prompt token."""
    n = len(prompt)
    if look_ahead:
        drawn = drawn_tokens(model, prompt, look_ahead, ends)
        fed = [*prompt, *drawn[:-1]]
        voters = range(n - 1, n - 1 + len(drawn))
    else:
        fed = list(prompt)
        voters = range(max(0, n - own_queries), n)
    states = model(torch.tensor([fed]), output_hidden_states=True).hidden_states
    position_ids = torch.arange(len(fed))[None]
    best = [[0.0] * n for _ in voters]
    for layer in range(len(model.model.layers)):
        queries, keys = rotated(model, layer, states[layer], position_ids)
        group = len(queries) // len(keys)
        sinks = getattr(model.model.layers[layer].self_attn, "sinks", None)  # learned, of gpt-oss
        cap = getattr(model.config, "attn_logit_softcapping", None)  # of Gemma 2
        for head, own in enumerate(queries):
            for row, voter in enumerate(voters):
                q = own[voter]
                seen = [k for j, k in enumerate(keys[head // group][:n]) if j <= voter]
                dots = [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q)) for k in seen]
                dots = dots if cap is None else [cap * math.tanh(d / cap) for d in dots]
                extra = [] if sinks is None else [float(sinks[head])]
                top = max(dots + extra)
                powers = [math.exp(d - top) for d in dots]
                whole = sum(powers) + sum(math.exp(d - top) for d in extra)
                weights = [p / whole for p in powers] + [0.0] * (n - len(seen))
                for j in range(n):
                    near = [weights[i] for i in range(j - width // 2, j + width // 2 + 1) if 0 <= i < n]
                    best[row][j] = max(best[row][j], sum(near) / width)
    return [sum(column) / len(best) for column in zip(*best, strict=True)]


def chunk_means(scores, size):
    return [sum(scores[i : i + size]) / len(scores[i : i + size]) for i in range(0, len(scores), size)]
