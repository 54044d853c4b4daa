"""Markdown of what was measured over replicas of Ray Serve; ``tables.py`` has all others."""

from __future__ import annotations

from typing import Any

from figures.markdown import table


def ray_scale(figures: dict[str, Any]) -> str:
    """``snapstream serve`` beside one and two replicas, and what Ray adds to a token."""
    rows = [
        [name, f"{arm['requests_per_s']:.1f}", f"{arm['tokens_per_s']:,.0f}", f"{arm['first_token_ms']:.1f} ms",
         f"{arm['token_us_alone']:,.0f} µs", f"{arm['token_us_together']:,.0f} µs"]
        for name, arm in figures["arms"].items()
    ]  # fmt: skip
    heads = ["", "requests/s", "tokens/s", "first token, alone", "a token, one stream", "a token, all streams"]
    size = f"{figures['streams']} streams of {figures['max_tokens']} tokens after {figures['prompt_len']}-token prompts"
    added = (
        f"Ray adds {figures['ray_us_per_token_alone']:,.0f} µs to a token of a stream alone, "
        f"{figures['ray_us_per_token_together']:,.0f} µs to one of {figures['streams']} streams, and "
        f"{figures['ray_first_token_ms']:.0f} ms to the first. Two replicas answer "
        f"{figures['second_replica_throughput_ratio']:.2f} times as many requests as one: they share "
        f"{figures['cores']} cores."
    )
    return f"{size}:\n\n{table(heads, rows)}\n\n{added}"


def ray_soak(figures: dict[str, Any]) -> str:
    """What became of the requests of a soak in which engines, replicas and ingresses were killed."""
    outcomes = dict(figures["outcomes"])
    killed = ", ".join(f"{kind}s {count}" for kind, count in figures["kills"].items() if kind != "put off")
    rows = [
        ["right, compared with the engine alone", f"{outcomes.pop('right', 0):,}"],
        ["cancelled by the client", f"{outcomes.pop('cancelled', 0):,}"],
        ["repeated on another replica, unseen by the client", f"{figures['repeated']:,}"],
        *([name, f"{count:,}"] for name, count in outcomes.items()),
        ["wrong, lost, or a row still taken", f"{len(figures['failures']):,}"],
    ]
    size = f"{figures['seconds'] / 60:.0f} minutes, {figures['clients']} clients, {figures['replicas']} replicas of "
    size += f"{figures['max_rows']} rows; killed: {killed}"
    return f"{size}:\n\n{table(['', ''], rows)}"
