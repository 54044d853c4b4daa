"""Rows over real text: facts planted inside prose and code, and how well a continuation is foreseen.

    python -m recipes.corpus --output build/prose/corpus
    python -m evals.prose --model build/prose/model --corpus build/prose/corpus --prompt-len 8192 --prompts 40

Held-out files of the machine's own Python packages (``recipes/corpus.py``), which no training sequence was made of.
*Retrieval*: a question about a fact that stands among real lines (``recipes/planted.py``), held-out names and values.
*Perplexity*: a window of one file is the prompt, and the tokens after it are fed as they stand; the first of them comes
out of the prefill and is left out. A kind of text that has no file of that length is left out, too. Every arm of
``arms.py``, 1/2 to 1/16 of the slots, on one prefill of each prompt (``uneven.HeadRows``); truncation has a prefill of
its own. Stored in ``results/prose.jsonl``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import torch

from evals import store
from evals.arms import make_arm
from evals.cells import CHUNK_LEN, RESULTS, judge, weights_of
from evals.chat import Chat
from evals.store import Record
from evals.tasks import TEMPLATE_TOKENS, Item
from evals.uneven import HeadRows, HeadRule, answers
from figures.machine import describe
from figures.markdown import table
from recipes.corpus import Corpus, Kind
from recipes.planted import CHARS_PER_TOKEN, FAMILIES, make_planted
from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget
from snapstream.exec.runner import ModelRunner
from snapstream.kv.selectors.diverse import Diverse
from snapstream.llm import LLM

FILE = RESULTS / "prose.jsonl"
ARMS = ("streaming", "random", "snapkv", "snapstream", "hops")  # and full, truncation, diverse
PARTS = (2, 4, 8, 16)
MAX_ANSWER = 32
KINDS: tuple[Kind, ...] = ("prose", "code")
TRUNCATION = "truncation"


def make_rules(runner: ModelRunner, prompt_len: int, longest: int) -> list[HeadRule]:
    """Every arm at every part of the prompt, as ``arm/part``; ``longest``: tokens that are fed after the prompt."""
    config = runner.decoder.config

    def rule(name: str, budget: KVBudget, **more: Any) -> HeadRule:
        return HeadRule(name=name, budgets=((budget,) * config.num_kv_heads,) * config.num_layers, **more)

    rules = [rule("full/1", KVBudget.full(prompt_len + longest + 1))]
    for part in PARTS:
        slots = prompt_len // part
        for name in ARMS:
            try:
                arm = make_arm(name, slots, prompt_len + longest, longest)
            except ValueError:  # too few slots: SnapKV as published has a ring that holds all that is fed
                continue
            rules.append(rule(f"{name}/{part}", arm.budget, selector=arm.selector))
            if name == "snapstream":
                rules.append(rule(f"diverse/{part}", arm.budget, selector=Diverse(share=0.5, num_scored=0)))
    return rules


def planted_items(chat: Chat, corpus: Corpus, family: str, count: int, prompt_len: int) -> list[Item]:
    """Questions about facts among real lines, held-out names and values."""
    items = []
    for index in range(count):
        document = make_planted(
            corpus, family=family, seed=f"prose/{index}", count_tokens=chat.count_tokens,
            target_tokens=prompt_len - TEMPLATE_TOKENS, num_questions=1,
        )  # fmt: skip
        question = document.questions[0]
        content = document.prompt(question)
        ids = chat.chat_token_ids([{"role": "user", "content": content}])
        items.append(Item(prompt_ids=ids, references=question.answers))
    return items


def windows(chat: Chat, corpus: Corpus, kind: Kind, count: int, num_tokens: int) -> Iterator[list[int]]:
    """Token ids of ``count`` windows of single files of that kind; ValueError where files are too short."""
    rng = Random(f"windows/{kind}")
    for _ in range(count):
        for _ in range(2000):
            text, found = corpus.window(rng, int(2 * num_tokens * CHARS_PER_TOKEN))
            if found == kind and len(ids := chat.token_ids(text)) >= num_tokens:
                yield ids[:num_tokens]
                break
        else:
            raise ValueError(f"no {kind} of {num_tokens} tokens was found in the corpus; lower --prompt-len")


@torch.inference_mode()
def losses(runner: ModelRunner, prompt: Sequence[int], after: Sequence[int], rules: Sequence[HeadRule]) -> list[float]:
    """Nats of the tokens of ``after`` but the first, summed, by rule."""
    rows = HeadRows(runner, prompt, rules)
    total = torch.zeros(len(rules))
    for token, following in zip(after[:-1], after[1:], strict=True):
        total -= rows.feed(torch.full((len(rules),), token)).log_softmax(-1)[:, following]
    return [float(own) for own in total]


def truncated(ids: Sequence[int], slots: int, longest: int) -> list[int]:
    """Both ends of a prompt: what fits the slots beside the tokens that are fed."""
    return make_arm(TRUNCATION, slots, len(ids) + longest, longest).prompt(ids, longest)


def perplexities(
    runner: ModelRunner, texts: Sequence[list[int]], prompt_len: int, rules: Sequence[HeadRule]
) -> dict[str, float]:
    """Of what follows the prompt, by rule, and by ``truncation/part``."""
    longest = len(texts[0]) - prompt_len
    total = {rule.name: 0.0 for rule in rules}
    for ids in texts:
        prompt, after = ids[:prompt_len], ids[prompt_len:]
        for rule, nats in zip(rules, losses(runner, prompt, after, rules), strict=True):
            total[rule.name] += nats
        for part in PARTS:
            name = f"{TRUNCATION}/{part}"
            if prompt_len // part - longest < 2:
                continue
            (nats,) = losses(runner, truncated(prompt, prompt_len // part, longest), after, rules[:1])
            total[name] = total.get(name, 0.0) + nats
    return {name: math.exp(nats / (len(texts) * (longest - 1))) for name, nats in total.items()}


def retrieval(
    runner: ModelRunner, chat: Chat, items: list[Item], rules: Sequence[HeadRule], eos: set[int]
) -> dict[str, float]:
    """Accuracy in points, by rule and by ``truncation/part``."""
    got = [answers(runner, item, rules, MAX_ANSWER, eos) for item in items]
    found = {rule.name: judge(chat, items, [own[index] for own in got])["accuracy"] for index, rule in enumerate(rules)}
    for part in PARTS:
        if min(len(item.prompt_ids) for item in items) // part - MAX_ANSWER < 2:
            continue
        short = []
        for item in items:
            slots = len(item.prompt_ids) // part
            cut = Item(prompt_ids=truncated(item.prompt_ids, slots, MAX_ANSWER), references=item.references)
            short.append(answers(runner, cut, rules[:1], MAX_ANSWER, eos)[0])
        found[f"{TRUNCATION}/{part}"] = judge(chat, items, short)["accuracy"]
    return found


def as_table(result: dict[str, dict[str, float]]) -> str:
    """A line per arm and part, a column per family and kind."""
    names = list(dict.fromkeys(name for own in result.values() for name in own))
    rows = [
        [name.partition("/")[0], f"1/{name.partition('/')[2]}".replace("1/1", "all") if name == "full/1" else
         f"1/{name.partition('/')[2]}", *(f"{own[name]:.1f}" if name in own else "" for own in result.values())]
        for name in names
    ]  # fmt: skip
    return table(["arm", "slots", *result], rows)


# Tables for docs. A stored run has retrieval, perplexity or both; runs that differ in the number of tokens that follow
# a window stand side by side.

ARM_NAMES = {
    "full": "full attention", "hops": "SnapStream, 4 hops", "diverse": "SnapStream, half for unlike keys",
    "snapstream": "SnapStream", "snapkv": "SnapKV as published", "streaming": "StreamingLLM",
    "truncation": "both ends of the prompt", "random": "random tokens",
}  # fmt: skip
PERPLEXITY = "perplexity, "
Column = tuple[str, dict[str, float]]


def retrieval_table() -> str:
    """Accuracy in points, a column per family of planted facts, and their mean."""
    record = max(_records(), key=lambda one: len(_families(one)))
    families = _families(record)
    if not families:
        raise ValueError("no retrieval was measured; run python -m evals.prose")
    columns: list[Column] = [(name, record["result"][name]) for name in families]
    common = set.intersection(*(set(cells) for _, cells in columns))
    mean = {name: sum(cells[name] for _, cells in columns) / len(columns) for name in common}
    settings = record["settings"]
    text = f"Points, {settings['num_prompts']} prompts of {settings['prompt_len']:,} tokens per cell, greedy:"
    return f"{text}\n\n{_lines([*columns, ('mean', mean)], '.1f')}\n\n{_source([record])}"


def perplexity_table() -> str:
    """Of what follows a window of held-out text, a column per kind of text and number of tokens."""
    columns: list[Column] = []
    records = sorted(_records(), key=lambda one: int(one["settings"]["continuation"]))
    for record in records:
        for name, cells in record["result"].items():
            if name.startswith(PERPLEXITY):
                tokens = record["settings"]["continuation"] - 1
                columns.append((f"{name.removeprefix(PERPLEXITY)}, {tokens:,} tokens", cells))
    windows = " or ".join(map(str, sorted({record["settings"]["num_prompts"] for record in records})))
    text = f"Perplexity per token of what follows {windows} windows of {records[0]['settings']['prompt_len']:,} tokens:"
    return f"{text}\n\n{_lines(columns, '.2f')}\n\n{_source(records)}"


def _records() -> list[Record]:
    found = list(store.read(FILE).values())
    if not found:
        raise ValueError("not measured; run python -m evals.prose")
    return found


def _families(record: Record) -> list[str]:
    return [name for name in record["result"] if not name.startswith(PERPLEXITY)]


def _lines(columns: list[Column], form: str) -> str:
    """A line for full attention, then one per part of the slots and arm; empty where an arm does not fit."""
    lines = ["full/1", *(f"{arm}/{part}" for part in PARTS for arm in ARM_NAMES if arm != "full")]
    rows = []
    for line in lines:
        cells = [format(own[line], form) if line in own else "" for _, own in columns]
        if any(cells):
            arm, _, part = line.partition("/")
            rows.append(["all" if arm == "full" else f"1/{part}", ARM_NAMES[arm], *cells])
    return table(["slots", "cache", *(name for name, _ in columns)], rows)


def _source(records: list[Record]) -> str:
    last = records[-1]
    commits = ", ".join(sorted({record["commit"] for record in records}))
    return f"<sub>{last['device']}; torch {last['torch']}; commit {commits}; `python -m evals.prose`</sub>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of python -m recipes.corpus")
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=40, help="per family, and windows per kind")
    parser.add_argument("--continuation", type=int, default=129, help="tokens that follow a window")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES), help="none: perplexity only")
    args = parser.parse_args()
    corpus, chat = Corpus.load(args.corpus, "heldout"), Chat(args.model)
    longest = max(args.continuation, MAX_ANSWER)
    with LLM(args.model, budget="full", max_rows=1, max_model_len=args.prompt_len + longest + 1, executor="eager",
             chunk_len=CHUNK_LEN, progress=False) as llm:  # fmt: skip
        runner, eos = cast(ModelRunner, llm.engine.runner), set(llm.model_config.eos_token_ids)
        result: dict[str, dict[str, float]] = {}
        for family in args.families:
            items = planted_items(chat, corpus, family, args.prompts, args.prompt_len)
            result[family] = retrieval(runner, chat, items, make_rules(runner, args.prompt_len, MAX_ANSWER), eos)
            print(f"{family}: {result[family]}", flush=True)
        for kind in KINDS:
            try:
                texts = list(windows(chat, corpus, kind, args.prompts, args.prompt_len + args.continuation))
            except ValueError as error:  # what was measured before it is kept
                print(f"left out: {error}", flush=True)
                continue
            rules = make_rules(runner, args.prompt_len, args.continuation)
            result[f"perplexity, {kind}"] = perplexities(runner, texts, args.prompt_len, rules)
            print(f"perplexity, {kind}: {result[f'perplexity, {kind}']}", flush=True)
    print(as_table(result))
    settings = {"model": args.model.name, "weights": weights_of(args.model), "prompt_len": args.prompt_len,
                "num_prompts": args.prompts, "continuation": args.continuation}  # fmt: skip
    store.append(FILE, {"settings": settings, **describe(), "result": result})


if __name__ == "__main__":
    main()
