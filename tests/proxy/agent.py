"""A transcript as an agent's framework sends it: tools, calls, long outputs, several turns. Deterministic."""

from __future__ import annotations

import json
from random import Random
from typing import Any

WORDS = """
    config server cache token request module parser worker socket buffer signal thread record handler schema queue
    update failed loaded opened closed waiting retry timeout header region quiet river stone letter market
""".split()

SYSTEM = "You repair software. Use the tools, read before you write, and answer with the cause in one sentence."
TASK = "The nightly job of the billing service fails since Tuesday. Find out which setting is wrong."
AGAIN = "Good. And which port does the worker of the billing service listen on?"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, text, argument in (
        ("read_file", "Read a file of the repository.", "path"),
        ("search_logs", "Search the logs of the last week.", "query"),
    )
]


def output(number: int, num_lines: int = 40) -> str:
    """What a tool printed: lines of a log, different for each number, one of which matters."""
    draw = Random(number)
    lines = [f"{i:03} {' '.join(draw.choices(WORDS, k=8))}." for i in range(num_lines)]
    lines[num_lines // 2] = f"{num_lines // 2:03} billing worker: port {7000 + number} is set in billing.toml."
    return "\n".join(lines)


def call(number: int) -> dict[str, Any]:
    """The assistant's step before output ``number``."""
    arguments = json.dumps({"path": f"logs/{number}.txt"})
    function = {"name": "read_file", "arguments": arguments}
    return {
        "role": "assistant",
        "content": f"I will look at log {number}.",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def step(number: int) -> list[dict[str, Any]]:
    return [call(number), {"role": "tool", "tool_call_id": f"call_{number}", "content": output(number)}]


def transcript(num_steps: int, *, asks_again: bool = False) -> list[dict[str, Any]]:
    """After ``num_steps`` tool outputs; with ``asks_again`` the user has answered and one more output came."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    for number in range(num_steps):
        messages += step(number)
    if asks_again:
        messages += [{"role": "assistant", "content": "The retry limit is wrong."}, {"role": "user", "content": AGAIN}]
        messages += step(num_steps)
    return messages
