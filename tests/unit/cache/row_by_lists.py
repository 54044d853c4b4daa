"""The rule of a row as a list-based program: no tensors, no closed forms, written without looking at the package.

A row is a Python list of prompt positions. Whoever changes the rule must change both, and the tests compare them.
"""

from __future__ import annotations

import math


def votes(queries, keys, start, stop, over_row, group_max):
    """Scores ``[G][n]`` by explicit loops. ``queries[w][H][E]`` are the last prompt queries, ``keys[G][N][E]``."""
    num_queries, num_heads, width = len(queries), len(queries[0]), len(queries[0][0])
    num_kv_heads, num_keys = len(keys), len(keys[0])
    per_kv_head = num_heads // num_kv_heads
    scores = []
    for g in range(num_kv_heads):
        members = []
        for head in range(g * per_kv_head, (g + 1) * per_kv_head):
            total = [0.0] * (stop - start)
            for i in range(num_queries):
                own_position = num_keys - num_queries + i
                pool = range(num_keys) if over_row else range(start, stop)
                seen = [j for j in pool if j <= own_position]
                if not seen:
                    continue
                dots = [
                    sum(a * b for a, b in zip(queries[i][head], keys[g][j], strict=True)) / math.sqrt(width)
                    for j in seen
                ]
                top = max(dots)
                weights = [math.exp(d - top) for d in dots]
                for j, weight in zip(seen, weights, strict=True):
                    if start <= j < stop:
                        total[j - start] += weight / sum(weights)
            members.append(total)
        merge = max if group_max else sum
        scores.append([merge(column) for column in zip(*members, strict=True)])
    return scores


def pooled(scores, width, kind):
    """One list smoothed with a centred window; outside the list there are zeros (avg) or nothing (max)."""
    half = width // 2
    out = []
    for i in range(len(scores)):
        inside = [scores[j] for j in range(i - half, i + half + 1) if 0 <= j < len(scores)]
        out.append(max(inside) if kind == "max" else sum(inside) / width)
    return out


def best(scores, count):
    """Indices of the ``count`` highest, the lower index first among equals, returned ascending."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return sorted(order[:count])


def row_after_prefill(prompt_len, num_sink, num_topk, num_recent, selected):
    """Slots of a row after prefill; ``selected`` are the chosen positions, used only when the prompt does not fit."""
    capacity = num_sink + num_topk + num_recent
    row = [None] * capacity
    if prompt_len <= capacity:
        row[:prompt_len] = range(prompt_len)
        return row
    row[:num_sink] = range(num_sink)
    row[num_sink : num_sink + num_topk] = selected
    # The ring is whatever is left after the newest tokens have been fed one by one, oldest overwritten first.
    ring = num_sink + num_topk
    for position in range(ring, prompt_len):
        row[ring + (position - ring) % num_recent] = position
    return row


def feed(row, prompt_len, num_sink, num_topk, num_recent, count):
    """Feed ``count`` more tokens to a row; returns the row and, per token, the set of positions it sees."""
    row = list(row)
    frozen = num_sink + min(max(prompt_len - num_sink - num_recent, 0), num_topk)
    seen = []
    for position in range(prompt_len, prompt_len + count):
        if None in row:
            row[row.index(None)] = position
        else:
            oldest = min(range(frozen, len(row)), key=lambda slot: row[slot])
            row[oldest] = position
        seen.append({p for p in row if p is not None})
    return row, seen
