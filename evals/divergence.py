"""How far rows move the next token's distribution from that of full attention: a finer measure than accuracy.

    python -m evals.divergence --prompts 20

Full attention's greedy answer to a question is fed to every row. At each of its tokens but the first, which comes out
of the prefill, two numbers are taken: the Kullback-Leibler divergence of the row's distribution from full attention's,
and whether both have the same likeliest token. Rows have the default split at 1, 1/2, 1/4 and 1/8 of the slots; each is
stored exactly, in int8, in int4, and with keys alone or values alone in int4 (``uneven.HeadRows``: no kernel has a part
in it). Stored in ``results/divergence.jsonl``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from evals import store
from evals.cells import CHUNK_LEN, RESULTS, weights_of
from evals.chat import Chat
from evals.tasks import TASKS, Item, make_items
from evals.uneven import HeadRows, HeadRule, Rounding, RoundingOf, exact
from figures.machine import describe
from figures.markdown import table
from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.formats import ENCODINGS
from snapstream.llm import LLM

FILE = RESULTS / "divergence.jsonl"
PARTS = (1, 2, 4, 8)
TASKS_OF = {
    "tiny": ("multi_uuid", "kv", "variable", "paraphrase"),
    "tiny_draft": ("multi_uuid", "multi_query", "recite", "variable"),
}


def as_stored(name: str) -> RoundingOf:
    """What rows of a format without scales per head give back of a token."""
    encoding = ENCODINGS[name]

    def there_and_back(tokens: Tensor) -> Tensor:
        own = tokens[None]
        scale = encoding.scale_of(own) if encoding.format.scales else None
        return encoding.decode(encoding.encode(own, scale), scale)[0]

    def of_prompt(prompt: Tensor) -> Rounding:
        return there_and_back

    return of_prompt


FORMATS: dict[str, tuple[RoundingOf, RoundingOf]] = {  # of keys and of values
    "float32": (exact, exact),
    "int8": (as_stored("int8"), as_stored("int8")),
    "int8/int4": (as_stored("int8"), as_stored("int4")),
    "int4": (as_stored("int4"), as_stored("int4")),
    "int4 keys": (as_stored("int4"), exact),
    "int4 values": (exact, as_stored("int4")),
}


def make_rules(runner: ModelRunner, prompt_len: int, longest: int) -> list[HeadRule]:
    """Every format at every part, as ``format/part``; the first is full attention."""
    config = runner.decoder.config
    rules = []
    for part in PARTS:
        budget = KVBudget.full(prompt_len + longest) if part == 1 else KVBudget.of(prompt_len // part)
        budgets = ((budget,) * config.num_kv_heads,) * config.num_layers
        rules += [HeadRule(name=f"{name}/{part}", budgets=budgets) for name in FORMATS]
    return rules


@torch.inference_mode()
def diverge(
    runner: ModelRunner, item: Item, rules: Sequence[HeadRule], max_tokens: int, eos: set[int]
) -> tuple[Tensor, Tensor, int]:
    """Nats and equal likeliest tokens by rule, each summed ``[B]`` over the answer's tokens but one; their count."""
    rows = HeadRows(runner, item.prompt_ids, rules, roundings=[FORMATS[rule.name.rpartition("/")[0]] for rule in rules])
    token = int(rows.first_logits.argmax())
    for forced in item.forced_ids:
        token = int(rows.feed(torch.full((len(rules),), forced))[0].argmax())
    nats, same, count = torch.zeros(len(rules)), torch.zeros(len(rules)), 0
    while token not in eos and count < max_tokens - len(item.forced_ids) - 1:
        found = rows.feed(torch.full((len(rules),), token)).log_softmax(-1)  # [B, V]
        nats += (found[0].exp() * (found[0] - found)).sum(-1)
        same += found.argmax(-1) == found[0].argmax()
        token, count = int(found[0].argmax()), count + 1
    return nats, same, count


def divergence_table(model: Path) -> str:
    """docs: a line per part and format, a column per task."""
    records = [one for one in store.read(FILE).values() if one["settings"]["model"] == model.name]
    if not records:
        raise ValueError("not measured; run python -m evals.divergence")
    settings, last = records[-1]["settings"], records[-1]
    rows = []
    for name in records[0]["result"]:
        form, _, part = name.rpartition("/")
        cells = [one["result"][name] for one in records]
        rows.append([
            "all" if part == "1" else f"1/{part}", form,
            *(f"{cell['nats']:.4f} · {cell['same']:.1f}" for cell in cells),
        ])  # fmt: skip
    tasks = [one["settings"]["task"] for one in records]
    text = (
        f"Nats per token · points of equal likeliest tokens, {settings['num_prompts']} prompts of "
        f"{settings['prompt_len']:,} tokens per task:"
    )
    where = f"{last['device']}; torch {last['torch']}; commit {last['commit']}; `python -m evals.divergence`"
    return f"{text}\n\n{table(['slots', 'rows', *tasks], rows)}\n\n<sub>{where}</sub>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), metavar="TASK", help="default: those of the tables")
    args = parser.parse_args()
    chat, longest = Chat(args.model), max(task.max_tokens for task in TASKS.values())
    with LLM(args.model, budget="full", max_rows=1, max_model_len=args.prompt_len + longest, executor="eager",
             chunk_len=CHUNK_LEN, progress=False) as llm:  # fmt: skip
        runner, eos = cast(ModelRunner, llm.engine.runner), set(llm.model_config.eos_token_ids)
        rules = make_rules(runner, args.prompt_len, longest)
        for name in args.tasks or TASKS_OF[args.model.name]:
            items = make_items(chat, name, args.prompts, args.prompt_len)
            found = [diverge(runner, item, rules, TASKS[name].max_tokens, eos) for item in items]
            count = sum(own for *_, own in found)
            nats, same = (torch.stack([own[index] for own in found]).sum(0) / count for index in (0, 1))
            result = {
                rule.name: {"nats": round(float(nats[index]), 5), "same": round(100 * float(same[index]), 2)}
                for index, rule in enumerate(rules)
            }
            print(f"{name}, {count} tokens: {result}", flush=True)
            settings = {"model": args.model.name, "weights": weights_of(args.model), "task": name,
                        "prompt_len": args.prompt_len, "num_prompts": args.prompts}  # fmt: skip
            store.append(FILE, {"settings": settings, **describe(), "num_tokens": count, "result": result})


if __name__ == "__main__":
    main()
