"""Why multi-hop questions fail under selection: which links of a chain are kept, layer by layer and head by head.

    python -m evals.chains --budget 1/4 --prompts 200

A question about variables names the first link of a chain; the answer walks it. For each link this reports the share of
its tokens that is still in the row after prefill, and how often chains of one, two and three links are answered right,
without hops and with them. Stored in ``results/chains.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from evals import cells, store
from evals.arms import NUM_HOPS
from evals.cells import weights_of
from evals.chat import Chat
from evals.tasks import TEMPLATE_TOKENS, document_of
from figures.machine import describe
from figures.markdown import table
from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import Question
from snapstream.config import KVBudget
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.types import RequestOutput, SamplingParams

Prompt = tuple[Question, list[int], list[list[int]]]  # question, prompt ids, tokens of each link


def make_prompts(chat: Chat, count: int, prompt_len: int) -> list[Prompt]:
    """Prompts of the task ``variable`` with the tokens of each link."""
    prompts = []
    for index in range(count):
        document = document_of(chat, "variable", f"0/{index}", prompt_len - TEMPLATE_TOKENS)
        question = document.questions[0]
        content = document.prompt(question)
        message = [{"role": "user", "content": content}]
        text = chat.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start = text.index(content)
        links = [
            [t for t, (a, b) in enumerate(encoded["offset_mapping"]) if a < start + end and b > start + begin]
            for begin, end in question.spans
        ]
        prompts.append((question, list(encoded["input_ids"]), links))
    return prompts


def report(prompts: Sequence[Prompt], outputs: Sequence[RequestOutput], budget: KVBudget) -> dict[str, Any]:
    """Accuracy by number of links; share of each link's tokens that is kept, by layer and kv head, in percent."""
    right: dict[int, list[bool]] = defaultdict(list)
    shares: dict[int, list[list[list[float]]]] = defaultdict(list)  # by link: [prompt][layer][head]
    for (question, ids, links), output in zip(prompts, outputs, strict=True):
        right[len(links)].append(question.answers[-1].lower() in output.text.lower())
        assert output.compression is not None and output.compression.kept_positions is not None
        always = {*range(budget.num_sink), *range(len(ids) - budget.num_window - budget.num_recent, len(ids))}
        for number, link in enumerate(links):
            layers = [[set(head) | always for head in layer] for layer in output.compression.kept_positions]
            shares[number].append([[sum(t in kept for t in link) / len(link) for kept in heads] for heads in layers])
    return {
        "accuracy_by_links": {n: round(100 * sum(own) / len(own), 1) for n, own in sorted(right.items())},
        "prompts_by_links": {n: len(own) for n, own in sorted(right.items())},
        "kept_by_link": {n: _mean(own) for n, own in sorted(shares.items())},
    }


def _mean(values: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Mean over the first axis, in percent."""
    count = len(values)
    return [
        [round(100 * sum(v[layer][head] for v in values) / count, 1) for head in range(len(values[0][layer]))]
        for layer in range(len(values[0]))
    ]


def chains_table() -> str:
    """docs: what is kept of each link of a chain, without hops and with them."""
    stored = list(store.read(cells.RESULTS / "chains.jsonl").values())
    if not stored:
        raise ValueError("not measured; run python -m evals.chains")
    record = stored[-1]
    settings, by_hops = record["settings"], record["result"]["hops"]
    rows, kept = [], []
    for hops, found in by_hops.items():
        rows.append([hops, *(f"{value:.1f}" for value in found["accuracy_by_links"].values())])
        for link, layers in found["kept_by_link"].items():
            kept.append([hops, str(int(link) + 1), *(" / ".join(f"{v:.0f}" for v in heads) for heads in layers)])
    counts = by_hops["0"]["prompts_by_links"]
    heads = ["hops", *(f"{n} link{'s' if n != '1' else ''} ({count} prompts)" for n, count in counts.items())]
    layers = [f"layer {i}" for i in range(len(kept[0]) - 2)]
    return (
        f"Accuracy in points by the length of the chain, {settings['slots']} of {settings['prompt_len']:,} slots:\n\n"
        f"{table(heads, rows)}\n\nTokens of each link that the row kept, in percent, by layer and kv head:\n\n"
        f"{table(['hops', 'link', *layers], kept)}\n\n"
        f"<sub>{record['device']}; torch {record['torch']}; commit {record['commit']}; `{record['command']}`</sub>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--budget", type=Fraction, default=Fraction(1, 4))
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=200)
    args = parser.parse_args()
    slots = int(args.prompt_len * args.budget)
    budget = KVBudget.of(slots)
    prompts = make_prompts(Chat(args.model), args.prompts, args.prompt_len)
    params = SamplingParams(max_tokens=32, temperature=0.0, return_kept=True)
    found = {}
    for hops in (0, NUM_HOPS):
        selector = Hops(num_hops=hops) if hops else SnapKV()
        with LLM(args.model, budget=budget, selector=selector, max_model_len=args.prompt_len + 32) as llm:
            found[hops] = report(prompts, llm.generate([ids for _, ids, _ in prompts], params), budget)
    settings = {"model": args.model.name, "weights": weights_of(args.model), "slots": slots,
                "prompt_len": args.prompt_len, "num_prompts": args.prompts}  # fmt: skip
    store.append(cells.RESULTS / "chains.jsonl", {"settings": settings, **describe(), "result": {"hops": found}})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
