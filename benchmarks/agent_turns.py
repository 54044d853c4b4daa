"""A coding agent's transcript of ten turns through servers, with openai-python: how long does the whole take?

Every turn sends the conversation so far: a system prompt with the tools in JSON, a file of 400 lines, earlier answers,
and what a tool returned, in turns a JSON object and an edited piece of the file. The answers are the server's own, so
each server sees the conversation that it made. Our server runs with the prefix store and without; ``--peer NAME=URL``,
which may be repeated, adds an OpenAI-compatible server of the same checkpoint. Servers that wait use no time of the
others. ``--write DIR`` writes the checkpoint (Qwen3 of 100M parameters, random weights, the shipped tiny model's
tokenizer and template), also as a GGUF file, and ends:

    python -m benchmarks.agent_turns --write /tmp/agent
    vllm serve /tmp/agent --dtype bfloat16 --port 8001 --max-model-len 32768 --speculative-config \\
        '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}'    # its prefix cache is on
    .venv-peers/llama_cpp/bin/python -m benchmarks.peers.serve_llama_cpp /tmp/agent/model.gguf --port 8002
    python -m benchmarks.agent_turns --checkpoint /tmp/agent --peer vllm=http://127.0.0.1:8001/v1 \\
        --peer llama.cpp=http://127.0.0.1:8002/v1 --save
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import mean
from time import perf_counter, time_ns
from typing import Any

from benchmarks.machine import ceilings, report
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.server_process import served
from benchmarks.shapes import QWEN3_100M, random_checkpoint
from snapstream.assets import TINY_MODEL
from snapstream.models.tokenizer import load_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
NAMES = ("account", "budget", "cache", "draft", "entry", "filter", "group", "header", "index", "job", "key", "limit")
VERBS = ("add", "check", "close", "count", "drop", "find", "load", "merge", "read", "sort", "store", "write")
TOOLS = [
    {"name": name, "description": f"{name.replace('_', ' ')} in the working tree", "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}, "required": ["path"]}}
    for name in ("read_file", "write_file", "replace_lines", "run_tests", "search_text")
]  # fmt: skip


@contextmanager
def checkpoint(given: Path | None, layers: int) -> Iterator[Path]:
    """A folder with the 100M shape and the tiny model's tokenizer; the ``given`` one stays."""
    if given is not None and (given / "config.json").exists():
        yield given
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = given or Path(scratch)
        vocab = len(load_tokenizer(TINY_MODEL))
        random_checkpoint(folder, QWEN3_100M | {"vocab_size": vocab, "num_hidden_layers": layers})
        for name in TOKENIZER_FILES:
            shutil.copy(TINY_MODEL / name, folder)
        yield folder


def source_lines(count: int, seed: int) -> list[str]:
    """Lines of a made-up Python file; one in eight begins a function."""
    random, lines = Random(seed), []
    for number in range(count):
        verb, name, other = random.choice(VERBS), random.choice(NAMES), random.choice(NAMES)
        lines.append(
            f"def {verb}_{name}_{number}({other}, limit={random.randrange(100)}):"
            if number % 8 == 0
            else f"    {name} = {verb}_{other}({name}, {random.randrange(1000)})"
        )
    return lines


def tool_outputs(num_turns: int, num_lines: int, seed: int) -> list[str]:
    """The user's messages: a file to change, then in turns the result of a test run in JSON and an edited piece."""
    random, lines = Random(seed), source_lines(num_lines, seed)
    texts = ["This is main.py:\n" + "\n".join(lines)]
    for turn in range(1, num_turns):
        begin = random.randrange(max(num_lines - 12, 1))
        if turn % 2:
            failed = [{"test": f"test_{random.choice(NAMES)}", "line": begin + n, "took_ms": random.randrange(900)}
                      for n in range(3)]  # fmt: skip
            texts.append(json.dumps({"tool": "run_tests", "turn": turn, "exit_code": 1, "failed": failed}))
            continue
        for place in random.sample(range(begin, min(begin + 12, num_lines)), k=min(3, num_lines)):
            lines[place] = source_lines(1 + place, seed + turn)[place]
        texts.append(f"main.py, lines {begin} to {begin + 12}:\n" + "\n".join(lines[begin : begin + 12]))
    return texts


def play(url: str, model: str, said: Sequence[str], answer_tokens: int, session: int) -> list[dict[str, Any]]:
    """One transcript; by turn seconds to the first token and to the last, and what ``usage`` says.

    The prompt begins with the session, so that no server has it from an earlier one.
    """
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", timeout=3600, max_retries=0)
    system = f"Session {session}. You are a coding agent. Your tools: {json.dumps(TOOLS)}"
    messages: list[Any] = [{"role": "system", "content": system}]
    turns = []
    for text in said:
        messages.append({"role": "user", "content": text})
        began = perf_counter()
        first, parts, usage = 0.0, [], None
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=answer_tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or perf_counter() - began
                parts.append(chunk.choices[0].delta.content)
        assert usage is not None, "the server sent no usage"
        prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
        turns.append(
            {
                "first_token_s": first,
                "total_s": perf_counter() - began,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": None if prompt is None else prompt.cached_tokens,
                "accepted_tokens": None if completion is None else completion.accepted_prediction_tokens,
            }
        )
        messages.append({"role": "assistant", "content": "".join(parts)})
    return turns


def summary(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    later = turns[1:]
    return {
        "total_s": sum(turn["total_s"] for turn in turns),
        "first_turn_s": turns[0]["total_s"],
        "later_first_token_s": mean(turn["first_token_s"] for turn in later) if later else None,
        "turns": list(turns),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    said = [tool_outputs(args.turns, args.lines, seed) for seed in range(args.rounds)]
    options = ["--budget", str(args.slots), "--max-rows", "2", "--no-page", "--weights", args.weights]
    peers = dict(text.split("=", 1) for text in args.peer)
    found: dict[str, list[dict[str, Any]]] = {}
    began = time_ns() // 10**9 * 100
    with checkpoint(args.checkpoint, args.layers) as folder, tempfile.TemporaryDirectory() as logs:

        def add(side: str, url: str, model: str, number: int) -> None:
            play(url, model, tool_outputs(1, 8, 99), 4, began + 99 - number)  # touches what is new
            found.setdefault(side, []).append(summary(play(url, model, said[number], args.answer, began + number)))
            print(side, found[side][-1]["total_s"], flush=True)

        for number in range(args.rounds):  # side by side, so that all meet the same machine
            for side, size in {"store": "4GiB", "no_store": "0"}.items():
                with served([str(folder), *options, "--prefix-store", size], Path(logs) / f"{side}{number}") as server:
                    add(side, f"{server.url}/v1", folder.name, number)
            for name, url in peers.items():
                add(name, url, args.peer_model or str(folder), number)
    totals = {side: mean(run["total_s"] for run in runs) for side, runs in found.items()}
    return {
        "model": f"random Qwen3 of 100M, {args.weights}, tokenizer of the tiny model", "layers": args.layers,
        "turns": args.turns, "lines": args.lines, "answer": args.answer, "slots": args.slots,
        "prompt_tokens": [turn["prompt_tokens"] for turn in found["store"][0]["turns"]],
        "against": {side: totals["store"] / total for side, total in totals.items() if side != "store"},
        "sides": found,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--lines", type=int, default=400, help="lines of the file of the first turn")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--weights", default="bfloat16", help="of our server")
    parser.add_argument("--checkpoint", type=Path, help="folder of --write; by default one is made for this run")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the checkpoint and model.gguf there, and end")
    parser.add_argument("--kind", default="f16", help="of the GGUF file: f32, f16, bf16, q8_0 or q4_0")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another server")
    parser.add_argument("--peer-model", help="the name they serve it by; default: the folder")
    parser.add_argument("--quick", action="store_true", help="one round, a file of 100 lines")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        with checkpoint(args.write, args.layers) as folder:
            write_gguf(folder, folder / "model.gguf", args.kind)
            print(folder)
        return
    if args.quick:
        args.rounds, args.lines = 1, min(args.lines, 100)
    ceiling = ceilings()
    report("agent_turns", ceiling, measure(args), save=args.save)


if __name__ == "__main__":
    main()
