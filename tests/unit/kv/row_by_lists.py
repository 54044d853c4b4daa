"""The rule of a row as a list-based program: no tensors, no closed forms, written without looking at the package.

A row is a Python list of prompt positions. Whoever changes the rule must change both, and the tests compare them.
"""

from __future__ import annotations

import math


def votes(queries, keys, start, stop, over_row, group_max, sinks=None, cap=None):
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
                dots = dots if cap is None else [cap * math.tanh(d / cap) for d in dots]
                extra = [] if sinks is None else [sinks[head]]
                top = max(dots + extra)
                weights = [math.exp(d - top) for d in dots]
                whole = sum(weights) + sum(math.exp(d - top) for d in extra)
                for j, weight in zip(seen, weights, strict=True):
                    if start <= j < stop:
                        total[j - start] += weight / whole
            members.append(total)
        merge = max if group_max else sum
        scores.append([merge(column) for column in zip(*members, strict=True)])
    return scores


def hop(scores, queries, keys, start, num_voters, sinks=None, cap=None):
    """The next round: the candidates with most votes vote in turn, by explicit loops; ``scores[G][n]``, normalised.

    ``queries[N][H][E]`` and ``keys[G][N][E]`` are those of the whole prompt.
    """
    per_kv_head = len(queries[0]) // len(keys)
    out = []
    for g, own in enumerate(scores):
        total = [0.0] * len(own)
        for voter in best(own, num_voters):
            for head in range(g * per_kv_head, (g + 1) * per_kv_head):
                query = queries[start + voter][head]
                others = [j for j in range(len(own)) if j != voter]
                dots = [
                    sum(a * b for a, b in zip(query, keys[g][start + j], strict=True)) / math.sqrt(len(query))
                    for j in others
                ]
                dots = dots if cap is None else [cap * math.tanh(d / cap) for d in dots]
                extra = [] if sinks is None else [sinks[head]]
                weights = [math.exp(d - max(dots)) for d in dots]
                whole = sum(weights) + sum(math.exp(d - max(dots)) for d in extra)
                for j, weight in zip(others, weights, strict=True):
                    total[j] += own[voter] / per_kv_head * weight / whole
        out.append(normalised(total))
    return out


def best_with_hops(own, total, count):
    """Half of the choice, rounded up, by SnapKV's own scores, the rest by those with hops."""
    first = best(own, (count + 1) // 2)
    rest = [score if i not in first else -1.0 for i, score in enumerate(total)]
    return sorted(first + best(rest, count - len(first)))


def normalised(scores):
    """Scores that sum to 1, or zeros."""
    return [score / sum(scores) for score in scores] if sum(scores) else scores


def pooled(scores, width, kind, half_life):
    """One list smoothed over centred neighbours; outside the list there are zeros (avg) or nothing (max).

    Then every score lives on in the tokens after it, halved after each ``half_life`` of them (0: not at all).
    """
    half = width // 2
    out = []
    for i in range(len(scores)):
        inside = [scores[j] for j in range(i - half, i + half + 1) if 0 <= j < len(scores)]
        out.append(max(inside) if kind == "max" else sum(inside) / width)
    if half_life == 0:
        return out
    return [max(out[j] / 2 ** ((i - j) / half_life) for j in range(i + 1)) for i in range(len(out))]


def best(scores, count):
    """Indices of the ``count`` highest, the lower index first among equals, returned ascending."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return sorted(order[:count])


def frozen_positions(prompt_len, num_sink, num_topk, num_window, num_recent, selected):
    """Prompt positions that no later token may overwrite, in words: sinks, selected tokens, the end of the prompt.

    A prompt that fits has selected nothing: in the place of selected tokens stand those right after the sinks that the
    window and a full ring would leave over.
    """
    frozen = list(range(min(num_sink, prompt_len)))
    if prompt_len > num_sink + num_topk + num_window + num_recent:
        return frozen + list(selected) + list(range(prompt_len - num_window, prompt_len))
    spare = prompt_len - len(frozen) - num_window - num_recent
    frozen += range(len(frozen), len(frozen) + max(0, spare))
    return frozen + list(range(max(len(frozen), prompt_len - num_window), prompt_len))


def row_after_prefill(prompt_len, num_sink, num_topk, num_window, num_recent, selected):
    """Slots of a row after prefill; ``selected`` are the chosen positions, used only when the prompt does not fit."""
    capacity = num_sink + num_topk + num_window + num_recent
    frozen = frozen_positions(prompt_len, num_sink, num_topk, num_window, num_recent, selected)
    others = [p for p in range(prompt_len) if p not in frozen]
    if prompt_len <= capacity:
        return frozen + others + [None] * (capacity - prompt_len)
    # The ring is a circle: walk it so that after its newest token comes the slot whose turn it is, that of the oldest.
    others = others[-num_recent:]
    turn = (prompt_len - len(frozen)) % num_recent
    ring = [None] * num_recent
    for position in others:
        ring[turn] = position
        turn = (turn + 1) % num_recent
    return frozen + ring


def feed(row, frozen, prompt_len, count):
    """Feed ``count`` more tokens to a row; returns the row and, per token, the set of positions it sees."""
    row = list(row)
    seen = []
    for position in range(prompt_len, prompt_len + count):
        movable = [slot for slot in range(len(row)) if row[slot] is not None and row[slot] not in frozen]
        if None in row:
            row[row.index(None)] = position
        else:
            row[min(movable, key=lambda slot: row[slot])] = position
        seen.append({p for p in row if p is not None})
    return row, seen


def chance(layer, head, position):
    """The score of random selection: murmur3's finaliser of a mixture, upper 24 bits, in Python's own integers."""
    word = (position * 0x1E3779B1 + head * 0x05EBCA6B + (layer + 1) * 0x42B2AE35) % 2**32
    word = (word ^ word // 2**16) * 0x05EBCA6B % 2**32
    word = (word ^ word // 2**13) * 0x42B2AE35 % 2**32
    return ((word ^ word // 2**16) // 2**8) / 2**24
