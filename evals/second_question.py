"""A second question over a document, through the prefix store: is it as good as full attention, and as a cold prefill?

    python -m evals.second_question --prompts 20

Turn 1 asks about a document and fills the store. Turn 2 is the whole conversation with another question, for rows of
every size: once out of the store, once on an engine that has none. Each answer of the first kind must be that of the
second; both are scored. ``dense``: four times as many facts, more than a quarter of the slots can hold. For the same
question fed to the row of turn 1, see the tasks ``second_kept`` and ``second_dense`` of ``evals.run``. Stored in
``results/second_question.jsonl``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals import store
from evals.cells import RESULTS, weights_of
from evals.chat import Chat
from evals.score import found, mean_and_error
from evals.tasks import DENSE_FACTS, conversation
from figures.machine import describe
from figures.markdown import table
from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget, PrefixStoreConfig
from snapstream.llm import LLM
from snapstream.types import RequestOutput, SamplingParams

FILE = RESULTS / "second_question.jsonl"
FAMILIES = {"sparse": None, "dense": DENSE_FACTS}
PARTS = (1, 2, 4, 8, 16)  # slots as parts of the prompt; 1 is full attention
MAX_TOKENS = 32
STORE = PrefixStoreConfig(num_bytes=2**28)
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)


def ask(llm: LLM, prompts: Sequence[list[int]], slots: int) -> list[RequestOutput]:
    """One after the other: a batch would be packed and rounded otherwise."""
    budget = KVBudget.of(slots) if slots else "full"
    return [llm.generate([prompt], GREEDY, budget=budget)[0] for prompt in prompts]


def _share(output: RequestOutput, references: Sequence[str]) -> float:
    right = found(output.text, references)
    return sum(right) / len(right)


def run(model: Path, num_prompts: int, prompt_len: int) -> dict[str, Any]:
    """Points and standard errors by family and part, and how many answers differ from those of a cold prefill."""
    chat, results = Chat(model), {}
    settings = {"budget": "full", "max_rows": 1, "max_model_len": prompt_len + MAX_TOKENS, "progress": False}
    for family, num_facts in FAMILIES.items():
        talks = [conversation(chat, f"0/{index}", prompt_len, num_facts) for index in range(num_prompts)]
        first = [chat.chat_token_ids(messages[:1]) for messages, _ in talks]
        second = [chat.chat_token_ids(messages) for messages, _ in talks]
        lines = {}
        with LLM(model, prefix_store=STORE, **settings) as warm, LLM(model, **settings) as cold:  # type: ignore[arg-type]
            warm.generate(first, GREEDY)
            for part in PARTS:
                slots = 0 if part == 1 else prompt_len // part
                stored, anew = ask(warm, second, slots), ask(cold, second, slots)
                scores = [_share(o, references) for o, (_, references) in zip(stored, talks, strict=True)]
                accuracy, error = mean_and_error(scores)
                lines[part] = {
                    "accuracy": accuracy,
                    "standard_error": error,
                    "num_unlike_cold": sum(a.token_ids != b.token_ids for a, b in zip(stored, anew, strict=True)),
                    "cached_share": sum(o.cached_tokens for o in stored) / sum(map(len, second)),
                }
                print(family, part, lines[part], flush=True)
                warm.reset_prefix_store()  # or the next part would find this one's question, too
                warm.generate(first, GREEDY)
        results[family] = lines
    return results


def second_question_table() -> str:
    """docs: the last stored run."""
    stored = list(store.read(FILE).values())
    if not stored:
        raise ValueError("not measured; run python -m evals.second_question")
    record = stored[-1]
    settings, families = record["settings"], record["result"]
    rows = []
    for part in next(iter(families.values())):
        cells = [f"{own[part]['accuracy']:.1f} ± {own[part]['standard_error']:.1f}" for own in families.values()]
        unlike = sum(own[part]["num_unlike_cold"] for own in families.values())
        rows.append(["all" if part == "1" else f"1/{part}", *cells, str(unlike)])
    heads = ["slots", *families, "answers unlike a cold prefill's"]
    where = f"{record['device']}; torch {record['torch']}; commit {record['commit']}; `{record['command']}`"
    return (
        f"Accuracy in points, {settings['num_prompts']} prompts of {settings['prompt_len']:,} tokens per cell, greedy:"
        f"\n\n{table(heads, rows)}\n\n<sub>{where}</sub>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=20)
    args = parser.parse_args()
    results = run(args.model, args.prompts, args.prompt_len)
    settings = {"model": args.model.name, "weights": weights_of(args.model), "prompt_len": args.prompt_len,
                "num_prompts": args.prompts}  # fmt: skip
    store.append(FILE, {"settings": settings, **describe(), "result": results})


if __name__ == "__main__":
    main()
