"""Accuracy when a prompt is cut before its prefill, every arm with the same number of target tokens.

    python -m evals.prompt_compression --num-prompts 20 --families single_words kv     # a look
    python -m evals.prompt_compression                                                 # all families, 200 prompts

Arms (``cuts.py``): ``full`` (nothing is cut), ``truncation`` (the middle of the document), ``random`` (random chunks of
the draft's size), ``same_family`` (the target's own family as draft), ``cross_family`` (another architecture and
tokenizer). The target attends to everything it is given, so that only the cut is measured. Beside right answers every
cell counts how often the sentences that answer the question survived. Results are appended to
``results/prompt_compression.jsonl``; a stored cell is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from evals import store, tables
from evals.cuts import ARMS, PROTECTION, Cutters
from evals.score import mean_and_error
from evals.tasks import TEMPLATE_TOKENS
from figures.machine import describe
from figures.markdown import table
from recipes.documents import make_document
from snapstream import assets
from snapstream.assets.documents import Document
from snapstream.llm import LLM
from snapstream.spec_prefill.protection import Span
from snapstream.types import SamplingParams

RESULTS = Path(__file__).parent / "results" / "prompt_compression.jsonl"
# Documents whose answering sentences are known, and that the shipped model can answer (full attention >= 80 %).
FAMILIES = (
    "single_words", "multi_number", "kv", "multi_uuid", "passkey", "number_string", "paraphrase", "variable",
)  # fmt: skip
OTHERS = ("single_number", "multi_words", "single_uuid", "json", "multi_value", "multi_query")  # by name only
MAX_TOKENS = 32


def documents_of(llm: LLM, family: str, args: argparse.Namespace) -> list[Document]:
    """The same documents as ``evals.run`` asks about."""
    assert llm.tokenizer is not None
    tokenizer, known = llm.tokenizer, dict[str, int]()

    def count(text: str) -> int:
        if text not in known:
            known[text] = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        return known[text]

    return [
        make_document(family=family, seed=f"{args.seed}/{index}", count_tokens=count,
                      target_tokens=args.prompt_len - TEMPLATE_TOKENS, num_questions=1)
        for index in range(args.num_prompts)
    ]  # fmt: skip


def survives(document: Document, spans: tuple[Span, ...]) -> bool:
    """Whether every sentence that the answer needs is still whole."""
    return all(any(a <= start and end <= b for a, b in spans) for start, end in document.questions[0].spans)


def run_cell(llm: LLM, cutters: Cutters, settings: dict[str, Any], documents: list[Document]) -> dict[str, Any]:
    """One family, arm and ceiling."""
    began = perf_counter()
    cuts = [
        cutters.apply(settings["arm"], document, f"{settings['seed']}/{i}", settings["max_prompt_tokens"])
        for i, document in enumerate(documents)
    ]
    prompts = [[{"role": "user", "content": cut.content}] for cut in cuts]
    outputs = llm.chat(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    right = [d.questions[0].is_answered_by(o.text) for d, o in zip(documents, outputs, strict=True)]
    accuracy, error = mean_and_error(right)
    return {
        "settings": settings,
        **describe(),
        "seconds": round(perf_counter() - began, 1),
        "result": {
            "accuracy": accuracy,
            "standard_error": error,
            "gold_survives": mean_and_error([survives(d, c.spans) for d, c in zip(documents, cuts, strict=True)])[0],
            "mean_prompt_tokens": sum(len(o.prompt_token_ids) for o in outputs) / len(outputs),
            "mean_draft_ms": sum(cut.draft_ms for cut in cuts) / len(cuts),
        },
    }


def cells_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Settings of every cell, family by family: a draft's memory then serves all ceilings of a document."""
    shared = {
        "model": args.model.name, "same_draft": args.same_draft.name, "cross_draft": args.cross_draft.name,
        "prompt_len": args.prompt_len, "num_prompts": args.num_prompts, "seed": args.seed,
        "look_ahead": args.look_ahead, "context_len": args.context_len, "snap": args.snap,
        "chunk_len": args.chunk_len, "delimiter": args.delimiter,
        "max_tokens": MAX_TOKENS,
        "protection": asdict(PROTECTION),
    }  # fmt: skip
    sizes = [("full", 1)] if "full" in args.arms else []
    sizes += [(arm, part) for part in args.parts for arm in args.arms if arm != "full"]
    return [
        {**shared, "family": family, "arm": arm, "part": part, "max_prompt_tokens": args.prompt_len // part}
        for family in args.families
        for arm, part in sizes
    ]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells, stored or run now."""
    done, stored = [], store.read(RESULTS)
    with LLM(
        args.model, budget="full", max_rows=args.max_rows, max_model_len=args.prompt_len + MAX_TOKENS, progress=False
    ) as llm:
        cutters, documents = Cutters(llm, args), dict[str, list[Document]]()
        for settings in cells_of(args):
            family, cell = settings["family"], stored.get(store.key_of(settings))
            if cell is None:
                if family not in documents:
                    documents[family] = documents_of(llm, family, args)
                cell = run_cell(llm, cutters, settings, documents[family])
                store.append(RESULTS, cell)
            done.append(cell)
    return done


def table_of(cells: list[dict[str, Any]], title: str, show: Callable[[dict[str, Any]], str]) -> Table:
    """One line per arm and ceiling, one column per family."""
    families = list(dict.fromkeys(cell["settings"]["family"] for cell in cells))
    table = Table(title=title)
    for heading in ("arm", "tokens", *families):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for cell in cells:
        settings = cell["settings"]
        line = lines.setdefault((settings["arm"], settings["max_prompt_tokens"]), {})
        line[settings["family"]] = show(cell["result"])
    for (arm, tokens), line in lines.items():
        table.add_row(arm, f"{tokens:,}", *(line[family] for family in families))
    return table


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=assets.TINY_MODEL)
    parser.add_argument("--same-draft", type=Path, default=assets.TINY_MODEL)
    parser.add_argument("--cross-draft", type=Path, default=assets.TINY_DRAFT_MODEL)
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES, *OTHERS], default=list(FAMILIES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8, 16], help="tokens as parts of --prompt-len")
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--look-ahead", type=int, default=8)
    parser.add_argument("--context-len", type=int, default=0, help="what the draft reads at once; 0: the model's limit")
    parser.add_argument("--snap", choices=["none", "word", "line"], default=None)
    parser.add_argument("--chunk-len", type=int, default=0)
    parser.add_argument("--delimiter", default=" ... ", help="between pieces; tiny models have never seen a [...]")
    parser.add_argument("--max-rows", type=int, default=8)
    return parser.parse_args(argv)


# Tables for docs, of stored cells.

ARM_NAMES = {
    "full": "whole prompt", "cross_family": "draft of another family", "same_family": "the target as its own draft",
    "random": "random chunks", "truncation": "middle cut out",
}  # fmt: skip
DRAFTS = ("cross_family", "same_family")
VARIED = ("look_ahead", "chunk_len", "snap")  # what the table of settings varies
WANTED = 0.95  # of the whole prompt's accuracy

Cell = dict[str, Any]


def stored() -> list[Cell]:
    """Every cell; of the same measurement with different numbers of prompts, the one with the most."""
    best: dict[str, Cell] = {}
    for cell in store.read(RESULTS).values():
        key = store.key_of(cell["settings"] | {"num_prompts": 0})
        if key not in best or cell["settings"]["num_prompts"] > best[key]["settings"]["num_prompts"]:
            best[key] = cell
    if not best:
        raise ValueError("not measured; run python -m evals.prompt_compression")
    return list(best.values())


def usual_settings() -> dict[str, Any]:
    """Those of the first default cell, as they are stored."""
    found: dict[str, Any] = json.loads(store.key_of(cells_of(parse_args([]))[0]))
    return found


def cells() -> list[Cell]:
    """Cells of the default settings."""
    usual = usual_settings()
    kept = [key for key in usual if key not in ("num_prompts", "family", "arm", "part", "max_prompt_tokens")]
    found = [cell for cell in stored() if all(cell["settings"][key] == usual[key] for key in kept)]
    if not found:
        raise ValueError("not measured; run python -m evals.prompt_compression")
    return found


def whole_prompts() -> dict[str, Cell]:
    """The uncut arm of each family: the cell here, or that of ``evals.run``, whose prompts are the same, if larger."""
    best = {cell["settings"]["family"]: cell for cell in cells() if cell["settings"]["arm"] == "full"}
    usual = parse_args([])
    for cell in tables.arm_cells():
        own = cell["settings"]
        family, most = own["task"], best.get(own["task"])
        is_same = (own["arm"], own["prompt_len"], own["seed"]) == ("full", usual.prompt_len, usual.seed)
        if is_same and family in FAMILIES and (not most or own["num_prompts"] > most["settings"]["num_prompts"]):
            result = {key: cell["result"][key] for key in ("accuracy", "standard_error")}
            settings = {"family": family, "arm": "full", "max_prompt_tokens": own["prompt_len"]}
            settings["num_prompts"] = own["num_prompts"]
            best[family] = {"settings": settings, "result": result | {"gold_survives": 100.0}}
    return best


def below(cell: Cell, whole: dict[str, Cell]) -> bool:
    """Whether a draft's cell keeps less than ``WANTED`` of the whole prompt's accuracy."""
    own, family = cell["settings"]["arm"], cell["settings"]["family"]
    least = WANTED * whole[family]["result"]["accuracy"] if family in whole else 0.0
    return own in DRAFTS and bool(cell["result"]["accuracy"] < least)


def compression_table() -> str:
    """One line per arm and size: accuracy, and in brackets in how many prompts the answering sentences were left."""
    whole = whole_prompts()
    found = [*whole.values(), *(cell for cell in cells() if cell["settings"]["arm"] != "full")]
    families = [family for family in FAMILIES if any(cell["settings"]["family"] == family for cell in found)]
    most = max(cell["settings"]["num_prompts"] for cell in found)
    fewer = sorted({cell["settings"]["num_prompts"] for cell in found} - {most})
    lines: dict[tuple[int, int], dict[str, str]] = {}
    for cell in found:
        own, result = cell["settings"], cell["result"]
        value = f"{result['accuracy']:.1f}"
        value = f"**{value}**" if below(cell, whole) else value
        mark = "*" if own["num_prompts"] < most else ""
        key = (-own["max_prompt_tokens"], list(ARM_NAMES).index(own["arm"]))
        lines.setdefault(key, {})[own["family"]] = f"{value} ({result['gold_survives']:.0f}){mark}"
    rows = [
        [list(ARM_NAMES.values())[arm], f"{-tokens:,}", *(lines[tokens, arm].get(family, "") for family in families)]
        for tokens, arm in sorted(lines)
    ]
    first = cells()[0]
    widest = max(cell["result"]["standard_error"] for cell in found)
    note = (
        f"Accuracy in points, in brackets the share of prompts in which the answering sentences were left; {most} "
        f"prompts of {first['settings']['prompt_len']:,} tokens per cell"
        + (f" ({' or '.join(map(str, fewer))} where marked *)" if fewer else "")
        + f", full attention in the target, delimiter `{first['settings']['delimiter']}`; standard errors up to "
        f"{widest:.1f}. Bold: a draft keeps less than {WANTED:.0%} of the whole prompt's accuracy."
    )
    return f"{note}\n\n{table(['prompt', 'most tokens', *families], rows)}\n\n{source(cells())}"


def settings_table() -> str:
    """Other look-aheads, chunks or boundaries, and the default: a line per family, size and draft that has both."""
    usual = tuple(usual_settings()[key] for key in VARIED)
    lines: dict[tuple[int, int, int], dict[tuple[Any, ...], Cell]] = {}
    for cell in store.read(RESULTS).values():
        own = cell["settings"]
        if own["arm"] in DRAFTS:
            line = (FAMILIES.index(own["family"]), -own["max_prompt_tokens"], DRAFTS.index(own["arm"]))
            found, way = lines.setdefault(line, {}), tuple(own[key] for key in VARIED)
            if way not in found or own["num_prompts"] > found[way]["settings"]["num_prompts"]:
                found[way] = cell
    lines = {line: found for line, found in lines.items() if usual in found and len(found) > 1}
    if not lines:
        raise ValueError("not measured; run python -m evals.prompt_compression with --look-ahead or --chunk-len")
    shown = [cell for found in lines.values() for cell in found.values()]
    ways = sorted({way for found in lines.values() for way in found}, key=lambda way: (way != usual, str(way)))
    rows = []
    for (family, tokens, arm), found in sorted(lines.items()):
        values = [
            f"{found[way]['result']['accuracy']:.1f} ({found[way]['result']['gold_survives']:.0f})"
            if way in found
            else ""
            for way in ways
        ]
        rows.append([FAMILIES[family], f"{-tokens:,}", ARM_NAMES[DRAFTS[arm]], *values])
    heads = ["family", "most tokens", "prompt", *(_way(*way) for way in ways)]
    errors = max(cell["result"]["standard_error"] for cell in shown)
    prompts = sorted({cell["settings"]["num_prompts"] for cell in shown})
    note = f"As above, {' or '.join(map(str, prompts))} prompts per cell; standard errors up to {errors:.1f}."
    return f"{note}\n\n{table(heads, rows)}\n\n{source(shown)}"


def _way(look_ahead: int, chunk_len: int, snap: str | None) -> str:
    return f"chunks of {chunk_len or 32}, look-ahead {look_ahead}" + (f", whole {snap}s" if snap else "")


def source(found: Sequence[Cell]) -> str:
    """Where cells were measured: devices, versions and commits, each once."""
    parts = {key: ", ".join(sorted({str(cell[key]) for cell in found})) for key in ("device", "torch", "commit")}
    return f"<sub>{parts['device']}; torch {parts['torch']}; commit {parts['commit']}; `evals.prompt_compression`</sub>"


def main() -> None:
    cells = run(parse_args())
    console = Console(width=180)
    accuracy = "accuracy in points, +- one standard error"
    console.print(table_of(cells, accuracy, lambda r: f"{r['accuracy']:.1f} +-{r['standard_error']:.1f}"))
    console.print(table_of(cells, "answering sentences that survived, %", lambda r: f"{r['gold_survives']:.1f}"))


if __name__ == "__main__":
    main()
