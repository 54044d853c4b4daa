"""KVzip (arXiv 2505.23416) keeps what a model looks at when it repeats its prompt. Does that serve later questions?

    python -m evals.reconstruction --tasks variable_dense --prompts 40

After a prompt has been read, the model is asked in the chat's own format to repeat it, chunk by chunk; each chunk after
the first is announced by the tokens before it, and is fed as it stands (teacher forcing). A token's score in a kv head
is the largest weight that any of these queries of the head's group gives it, where the softmax runs over the sinks, the
chunk and what the request to repeat has of its own, as published. That is a second prefill in operations, whoever asks
later; so nothing here is an option of the package (docs/research/accuracy.md has what it would gain).

Compared at equal slots in all with SnapKV, with a share for unlike keys, and with mixtures, over equal heads
and over those of the profile that ``evals.uneven`` measured. Stored in ``results/reconstruction.jsonl``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from evals import store, uneven
from evals.cells import CHUNK_LEN, RESULTS, judge, weights_of
from evals.chat import Chat
from evals.tasks import TASKS, Item, make_items
from evals.uneven import HeadRule
from figures.machine import describe
from figures.markdown import table
from snapstream.assets import TINY_MODEL
from snapstream.config import DEFAULT_SINK, KVBudget, Selector
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.interface import CosSin, HeadNorm, Kernels
from snapstream.kv.selectors.diverse import Diverse
from snapstream.kv.selectors.scoring import pool_max, select_topk
from snapstream.kv.selectors.snapkv import POOL_WIDTH, SnapKV
from snapstream.llm import LLM
from snapstream.models.prefill import LayerPass, PassTokens

FILE = RESULTS / "reconstruction.jsonl"
FIRST = "Repeat the previous context:"
NEXT = "Repeat the part of the previous context starting with:"
NUM_BEFORE = 8  # tokens before a chunk that say where it begins
PROFILE = "over all heads, by the root/0"  # of evals.uneven: what the package does
TASKS_OF = {
    "tiny": ("multi_uuid", "variable_dense", "second_dense"),
    "tiny_draft": ("multi_uuid", "recite", "variable_dense", "second_dense"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Repeated(SnapKV):
    """SnapKV for ``1 - share`` of the slots, the best scores of repeating for the rest."""

    name: ClassVar[str] = "repeated"
    share: float = 1.0
    pool_width: int = 1  # of the scores; KVzip pools nothing
    repeat_scores: tuple[Tensor, ...] = ()  # of one prompt and kv head, by layer: [1, N]

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        own = pool_max(self.repeat_scores[layer][:, candidates.start : candidates.stop], self.pool_width)  # [1, n]
        snapkv = self.pool(self.scores(queries[-self.observation_len :], keys, candidates, kernels))
        return _with_rest(snapkv, own, num_topk, self.share) + candidates.start


@dataclass(frozen=True, kw_only=True)
class DiverseAhead(Diverse):
    """The share for unlike keys, carried ahead as SnapKV's scores are, so that a long value stays with its key."""

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        snapkv = self.pool(self.scores(queries[-self.observation_len :], keys, candidates, kernels))  # [G, n]
        unlike = 1 + kernels.key_diversity(keys, candidates.start, candidates.stop)  # carrying ahead wants them >= 0
        return _with_rest(snapkv, self.pool(unlike), num_topk, self.share) + candidates.start


def _with_rest(snapkv: Tensor, scores: Tensor, num_topk: int, share: float) -> Tensor:
    """Indices ``[G, K]``: the best of ``snapkv`` for ``1 - share`` of the slots, then the best of ``scores``."""
    first = select_topk(snapkv, min(num_topk, math.ceil((1 - share) * num_topk)))
    return select_topk(scores.scatter(1, first, float("inf")), num_topk)


SELECTORS: dict[str, Selector] = {
    "SnapKV": SnapKV(),
    "half for unlike keys": Diverse(share=0.5, num_scored=0),
    "half for unlike keys, carried ahead": DiverseAhead(share=0.5),
    "KVzip": Repeated(),
    "KVzip, pooled": Repeated(pool_width=POOL_WIDTH),
    "half KVzip, pooled": Repeated(share=0.5, pool_width=POOL_WIDTH),
}


class Repeating:
    """One prompt, read; a ``KVView`` of tokens that follow it and see all of it, which notes whom they look at."""

    def __init__(self, runner: ModelRunner, token_ids: Sequence[int]) -> None:
        self._decoder, self._ids = runner.decoder, list(token_ids)
        self._prompt: list[tuple[Tensor, Tensor]] = []  # by layer: keys and values [G, N, E]
        self._chunk = range(0)
        tokens = PassTokens(
            token_ids=torch.tensor(self._ids),
            positions=torch.arange(len(self._ids)),
            seq_lens=torch.full((len(self._ids),), len(self._ids)),
            prompt_lens=[len(self._ids)],
            num_queries=[0],
        )
        LayerPass(
            runner.decoder, runner.buffers, tokens, CHUNK_LEN, runner.prefill_attention, self._layer_done, "none"
        ).run()
        self._scores = [torch.zeros(keys.shape[:2]) for keys, _ in self._prompt]

    def scores(self, chat: Chat, chunk_len: int) -> list[Tensor]:
        """The largest weight of every prompt token when the prompt is repeated, by layer: ``[G, N]`` fp32."""
        num_tokens = len(self._ids)
        for asked, chunk in requests_to_repeat(chat, self._ids, chunk_len):
            self._chunk = chunk
            ids = torch.tensor([*asked, *self._ids[chunk.start : chunk.stop]])
            positions = torch.arange(num_tokens, num_tokens + len(ids))
            self._decoder.run(ids, self._decoder.rope(positions, positions + 1), self)
        return self._scores

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """``heads [T, H+2G, E]`` -> ``[T, H, E]``: attention over the prompt and, causally, over the T tokens."""
        assert rope is not None, "a model of latents has no heads to tell apart"
        groups = self._decoder.config.num_kv_heads
        qk = self._decoder.kernels.norm_rope(heads, norm, rope, groups)  # [T, H+G, E]
        keys, values = self._prompt[layer]
        own_keys, own_values = (own.transpose(0, 1)[:, None] for own in (qk[:, -groups:], heads[:, -groups:]))
        q = qk[:, :-groups].unflatten(1, (groups, -1)).permute(1, 2, 0, 3) * qk.shape[-1] ** -0.5  # [G, r, T, E]
        before = q @ keys[:, None].transpose(2, 3)  # [G, r, T, N]
        own = q @ own_keys.transpose(2, 3)  # [G, r, T, T]
        own.masked_fill_(torch.ones(own.shape[2:], dtype=torch.bool).triu(1), float("-inf"))
        self._note(layer, before, own)
        weights = torch.cat([before, own], dim=-1).softmax(-1)
        num_before = keys.shape[1]
        out = weights[..., :num_before] @ values[:, None] + weights[..., num_before:] @ own_values
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _note(self, layer: int, before: Tensor, own: Tensor) -> None:
        start, stop = max(self._chunk.start, DEFAULT_SINK), self._chunk.stop
        seen = torch.cat([before[..., :DEFAULT_SINK], before[..., start:stop], own], dim=-1).softmax(-1)
        self._scores[layer][:, start:stop] = seen[..., DEFAULT_SINK : DEFAULT_SINK + stop - start].amax((1, 2))

    def _layer_done(self, prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
        self._prompt.append((keys.clone(), values.clone()))


def requests_to_repeat(chat: Chat, ids: Sequence[int], chunk_len: int) -> Iterator[tuple[list[int], range]]:
    """What is said after the prompt before each chunk, as token ids, and the chunk."""
    for start in range(0, len(ids), chunk_len):
        chunk = range(start, min(start + chunk_len, len(ids)))
        if start == 0:
            yield chat.token_ids(_turn(chat, FIRST)), chunk
            continue
        head, tail = _turn(chat, NEXT + "\0").split("\0")
        yield [*chat.token_ids(head), *ids[start - NUM_BEFORE : start], *chat.token_ids(tail)], chunk


def _turn(chat: Chat, text: str) -> str:
    """What the chat template puts behind a first message and an empty answer, for a second message."""
    first = {"role": "user", "content": "."}
    messages = [first, {"role": "assistant", "content": ""}, {"role": "user", "content": text}]
    before, whole = (
        str(chat.tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=True))
        for some in ([first], messages)
    )
    if not whole.startswith(before):
        raise ValueError("this model's chat template rewrites earlier turns; nothing can be asked behind a prompt")
    return whole[len(before) :].lstrip(" ")


def make_rules(model: str, budgets: Sequence[int], prompt_len: int) -> list[HeadRule]:
    """Full attention; every selector over equal heads, and over those of the profile, at each number of slots."""
    stored = {one["settings"]["slots"]: one for one in store.read(uneven.FILE).values()
              if one["settings"]["model"] == model}  # fmt: skip
    rules = []
    for slots in budgets:
        if slots not in stored:
            raise ValueError(f"{slots} slots: evals.uneven has not measured the heads of {model} there")
        topk, mean = stored[slots]["topk"][PROFILE], KVBudget.of(slots)
        if not rules:
            whole = KVBudget.full(prompt_len + 128)
            rules.append(HeadRule(name="full//", budgets=tuple((whole,) * len(layer) for layer in topk)))
        ways = {
            "equal": tuple((mean,) * len(layer) for layer in topk),
            "profile": tuple(tuple(replace(mean, num_topk=num) for num in layer) for layer in topk),
        }
        rules += [
            HeadRule(name=f"{slots}/{heads}/{name}", budgets=own, selector=selector)
            for heads, own in ways.items()
            for name, selector in SELECTORS.items()
        ]
    return rules


def answers(runner: ModelRunner, chat: Chat, item: Item, rules: Sequence[HeadRule], max_tokens: int) -> list[Any]:
    """Greedy answers by rule, as ``evals.uneven`` gives them."""
    scores = Repeating(runner, item.prompt_ids).scores(chat, CHUNK_LEN)

    def of_head(rule: HeadRule, head: int) -> Selector:
        if not isinstance(rule.selector, Repeated):
            return rule.selector
        return replace(rule.selector, repeat_scores=tuple(layer[head : head + 1] for layer in scores))

    eos = set(runner.decoder.config.eos_token_ids)
    return uneven.answers(runner, item, rules, max_tokens, eos, of_head)


def reconstruction_table(model: Path) -> str:
    """docs: the stored runs of a model, tasks side by side."""
    records = {one["settings"]["task"]: one for one in store.read(FILE).values()
               if one["settings"]["model"] == model.name}  # fmt: skip
    if not records:
        raise ValueError("not measured; run python -m evals.reconstruction")
    tasks = [task for task in TASKS_OF[model.name] if task in records]
    rows = []
    for rule in records[tasks[0]]["result"]:
        cells = [records[task]["result"][rule] for task in tasks]
        slots, heads, name = rule.split("/")
        head = ["all", "", "full attention"] if slots == "full" else [slots, heads, name]
        rows.append(head + [f"{one['accuracy']:.1f} ± {one['standard_error']:.1f}" for one in cells])
    last = records[tasks[-1]]
    counts = sorted({records[task]["settings"]["num_prompts"] for task in tasks})
    text = f"{' or '.join(map(str, counts))} prompts of {last['settings']['prompt_len']:,} tokens per cell:\n\n"
    commits = ", ".join(sorted({records[task]["commit"] for task in tasks}))
    where = f"{last['device']}; torch {last['torch']}; commit {commits}; `python -m evals.reconstruction`"
    return f"{text}{table(['slots', 'heads', 'kept by', *tasks], rows)}\n\n<sub>{where}</sub>"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--budgets", type=Fraction, nargs="+", default=[Fraction(1, 4), Fraction(1, 8)])
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), metavar="TASK", help="default: those of the tables")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = parse_args()
    budgets, chat = [int(args.prompt_len * part) for part in args.budgets], Chat(args.model)
    rules = make_rules(args.model.name, budgets, args.prompt_len)
    with LLM(args.model, budget="full", max_rows=1, max_model_len=args.prompt_len + 128, executor="eager",
             chunk_len=CHUNK_LEN, progress=False) as llm:  # fmt: skip
        runner = cast(ModelRunner, llm.engine.runner)
        for name in args.tasks or TASKS_OF[args.model.name]:
            items = make_items(chat, name, args.prompts, args.prompt_len, args.seed)
            got = [answers(runner, chat, item, rules, TASKS[name].max_tokens) for item in items]
            result = {}
            for index, rule in enumerate(rules):
                own = judge(chat, items, [each[index] for each in got])
                result[rule.name] = {key: round(own[key], 2) for key in ("accuracy", "standard_error")}
                print(f"{name:16} {rule.name:50} {own['accuracy']:5.1f} +-{own['standard_error']:.1f}", flush=True)
            settings = {"model": args.model.name, "weights": weights_of(args.model), "slots": budgets, "task": name,
                        "prompt_len": args.prompt_len, "num_prompts": args.prompts, "seed": args.seed}  # fmt: skip
            store.append(FILE, {"settings": settings, **describe(), "result": result})


if __name__ == "__main__":
    main()
