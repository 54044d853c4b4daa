"""Which heads of a draft look at the sentence that answers the question.

    python -m evals.draft_heads --draft DIR --num-prompts 20

The published score is the maximum over layers and heads, so one head that finds the sentence is enough, and one that
stares elsewhere is enough to drown it. For every head, every layer and the maximum of all: in how many prompts the best
chunk (of 32 tokens) touches an answering sentence, and in how many the best sixteenth of the chunks covers them all.
Prints a table and, with ``--save``, appends it to ``evals/results/draft_heads.jsonl``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from evals import store
from evals.prompt_compression import FAMILIES
from evals.score import mean_and_error
from evals.tasks import TEMPLATE_TOKENS
from figures.machine import describe
from recipes.documents import make_document
from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import Document
from snapstream.spec_prefill.compressor import num_kept, ranked
from snapstream.spec_prefill.draft import Draft, Importance, chunk_means, visit_layers
from snapstream.spec_prefill.protection import chunk_spans
from snapstream.spec_prefill.settings import CHUNK_LEN, ScoringSettings

RESULTS = Path(__file__).parent / "results" / "draft_heads.jsonl"


@dataclass(kw_only=True)
class Hits:
    """Per prompt: was the best chunk right, did the best sixteenth hold all that is needed."""

    best: list[bool] = field(default_factory=list)
    sixteenth: list[bool] = field(default_factory=list)

    def add(self, scores: Tensor, gold: list[set[int]]) -> None:
        order = ranked(chunk_means(scores, CHUNK_LEN["text"]).tolist())
        self.best.append(any(order[0] in chunks for chunks in gold))
        self.sixteenth.append(set().union(*gold) <= set(order[: num_kept(len(order), 1 / 16)]))


def head_scores(
    draft: Draft, document: Document, settings: ScoringSettings
) -> tuple[dict[str, Tensor], list[set[int]]]:
    """Token scores of the document by each head, layer, and all; and the chunks that each answering sentence needs."""
    read = draft.read(document.text, after=f"\n\n{document.questions[0].text}", as_chat=True)
    group, found = draft.decoder.config.group_size, dict[str, Importance]()

    def vote(passage: int, layer: int, queries: Tensor, keys: Tensor, first: int) -> None:
        for head in range(queries.shape[1]):
            own = queries[:, head : head + 1], keys[head // group : head // group + 1]
            for name in (f"{layer}.{head}", f"{layer}", "all"):
                if name not in found:
                    found[name] = Importance(len(queries), keys.shape[1], keys.device)
                found[name].add(*own, first)

    visit_layers(draft.decoder, [read.ids], settings, vote)
    spans = chunk_spans(read.starts, len(document.text), CHUNK_LEN["text"])
    gold = [
        {i for i, (a, b) in enumerate(spans) if a < end and b > start} for start, end in document.questions[0].spans
    ]
    return {name: one.scores()[read.first : read.stop] for name, one in found.items()}, gold


def run(args: argparse.Namespace) -> dict[str, Any]:
    draft = Draft.load(args.draft)
    settings = ScoringSettings(look_ahead=args.look_ahead)
    table: dict[str, dict[str, Any]] = {}
    for family in args.families:
        hits: dict[str, Hits] = {}
        for index in range(args.num_prompts):
            document = make_document(family=family, seed=f"0/{index}", count_tokens=draft.count_tokens,
                                     target_tokens=args.prompt_len - TEMPLATE_TOKENS, num_questions=1)  # fmt: skip
            scores, gold = head_scores(draft, document, settings)
            for name, own in scores.items():
                hits.setdefault(name, Hits()).add(own, gold)
        table[family] = {
            name: {"best_chunk": mean_and_error(h.best)[0], "best_sixteenth": mean_and_error(h.sixteenth)[0]}
            for name, h in hits.items()
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, default=TINY_MODEL)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--look-ahead", type=int, default=8)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    table = run(args)
    names = list(next(iter(table.values())))
    print("best chunk / best sixteenth, %".ljust(16), *(f"{family:>14}" for family in table))
    for name in sorted(names, key=lambda n: (n != "all", n.count("."), n)):
        cells = (f"{own[name]['best_chunk']:.0f} / {own[name]['best_sixteenth']:.0f}" for own in table.values())
        print(name.ljust(30), *(f"{cell:>14}" for cell in cells))
    if args.save:
        settings = {"draft": args.draft.name, "prompt_len": args.prompt_len, "num_prompts": args.num_prompts,
                    "look_ahead": args.look_ahead}  # fmt: skip
        store.append(RESULTS, {"settings": settings, **describe(), "result": table})


if __name__ == "__main__":
    main()
