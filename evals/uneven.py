"""Does it pay to give kv heads unlike numbers of slots? Every way to share them out, at equal slots in all.

    python -m evals.uneven --budget 1/4 --prompts 60

The profile is that of ``snapstream calibrate``: what the model loses with each head, on generated documents of the
training split; neither keys nor values of the questions that are asked here occur in it. Compared are equal heads,
shares within each layer, shares over all heads in proportion to the loss, and to its root, which is what the package
does; each with and without a share for keys unlike the rest.

A prompt is read once, and each rule decodes over tensors of its own (``HeadRows``), head by head, by the arithmetic of
``kv/layout.py`` and the choice of ``kv/compress.py``. No kernel of rows has a part in it, so it is also the twin
that ``tests/parity/test_heads.py`` holds the engine's rows to. Stored in ``results/uneven.jsonl``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from evals import store
from evals.cells import CHUNK_LEN, RESULTS, judge, weights_of
from evals.chat import Chat
from evals.tasks import TASKS, Item, make_items
from figures.machine import describe
from figures.markdown import table
from snapstream.assets import TINY_MODEL
from snapstream.calibration import damage, generated
from snapstream.config import KVBudget, Selector, make_selector
from snapstream.config.kv import HeadProfile
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.interface import CosSin, HeadNorm
from snapstream.kernels.reference import capped, sink_softmax
from snapstream.kv import layout
from snapstream.kv.compress import kept_positions
from snapstream.kv.selectors.diverse import Diverse
from snapstream.llm import LLM
from snapstream.models.prefill import LayerPass, PassTokens

FILE = RESULTS / "uneven.jsonl"
NUM_DOCUMENTS = 20  # that are calibrated on
TASKS_OF = {
    "tiny": ("kv", "multi_uuid", "paraphrase", "variable", "variable_dense", "second_kept", "second_dense"),
    "tiny_draft": (
        "multi_uuid", "multi_query", "recite", "variable", "variable_dense", "second_kept", "second_dense",
    ),
}  # fmt: skip
SHARES = (0.0, 0.25, 0.5)  # of the top-k slots, for keys unlike the rest
# name: power of the loss, and whether it is shared out within each layer; None: equal heads
SPLITS: dict[str, tuple[float, bool] | None] = {
    "equal heads": None,
    "within a layer, by the root": (0.5, True),
    "over all heads, by the loss": (1.0, False),
    "over all heads, by the root": (0.5, False),
}


@dataclass(frozen=True, kw_only=True)
class HeadRule:
    """What every head of a row keeps."""

    name: str
    budgets: tuple[tuple[KVBudget, ...], ...]  # by layer and kv head
    selector: Selector = field(default_factory=make_selector)

    @property
    def num_slots(self) -> int:
        return sum(budget.capacity for layer in self.budgets for budget in layer)


SelectorOf = Callable[[HeadRule, int], Selector]  # of a rule and a kv head
Rounding = Callable[[Tensor], Tensor]  # tokens [n, E] of a head, to what its row gives back of them
RoundingOf = Callable[[Tensor], Rounding]  # of a head's whole prompt [N, E]


def exact(prompt: Tensor) -> Rounding:
    """Rows in the dtype of the computation."""
    return lambda tokens: tokens


class HeadRows:
    """One prompt, and a row of it by every rule; a ``KVView`` of one new token for each of them."""

    def __init__(
        self,
        runner: ModelRunner,
        token_ids: Sequence[int],
        rules: Sequence[HeadRule],
        selector_of: SelectorOf = lambda rule, head: rule.selector,
        rounding_of: RoundingOf = exact,
        roundings: Sequence[tuple[RoundingOf, RoundingOf]] = (),
    ) -> None:
        """``roundings``: of keys and of values, by rule; empty: ``rounding_of`` of both in all."""
        self._decoder, self._rules, self._selector_of = runner.decoder, rules, selector_of
        self._roundings = roundings or [(rounding_of, rounding_of)] * len(rules)
        self.num_tokens = self.prompt_len = len(token_ids)
        self._stored: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # by rule, layer, head: [C, E] each
        self._rounding: dict[tuple[int, int, int], tuple[Rounding, Rounding]] = {}  # as above: of keys, of values
        tokens = PassTokens(
            token_ids=torch.tensor(token_ids),
            positions=torch.arange(self.prompt_len),
            seq_lens=torch.full((self.prompt_len,), self.prompt_len),
            prompt_lens=[self.prompt_len],
            num_queries=[max(rule.selector.num_queries(self.prompt_len) for rule in rules)],
        )
        reading = LayerPass(
            runner.decoder, runner.buffers, tokens, CHUNK_LEN, runner.prefill_attention, self._layer_done
        )
        for unit in range(reading.num_units):
            reading.run_unit(unit)
        self.first_logits = self._decoder.logits(reading.last_hidden())[0]  # [V], equal for all rules

    def feed(self, token_ids: Tensor) -> Tensor:
        """One token for every rule's row, ``[B]``: logits of the next ``[B, V]``."""
        positions = torch.full_like(token_ids, self.num_tokens)
        rope = self._decoder.rope(positions, positions + 1)
        view: Any = self  # of models without recurrent layers
        logits = self._decoder.run(token_ids, rope, view)
        self.num_tokens += 1
        return logits

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """``heads [B, H+2G, E]``: write a slot of every head, attend over what it has."""
        assert rope is not None
        num_kv_heads = self._decoder.config.num_kv_heads
        qk = self._decoder.kernels.norm_rope(heads, norm, rope, num_kv_heads)  # [B, H+G, E]
        q, k, v = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:], heads[:, -num_kv_heads:]
        group = q.shape[1] // num_kv_heads
        out = torch.empty_like(q)
        for (rule, own, head), (keys, values) in self._stored.items():
            if own != layer:
                continue
            budget = self._rules[rule].budgets[layer][head]
            start = layout.ring_start(budget, self.prompt_len)
            slot = layout.slot_of(self.num_tokens, start, budget.capacity)
            round_keys, round_values = self._rounding[rule, layer, head]
            keys[slot], values[slot] = round_keys(k[rule, head, None])[0], round_values(v[rule, head, None])[0]
            seen = layout.num_visible(self.num_tokens + 1, budget.capacity)
            mine = slice(head * group, (head + 1) * group)
            sinks = None if norm.sinks is None else norm.sinks[mine, None]
            scores = capped(q[rule, mine] @ keys[:seen].T * keys.shape[1] ** -0.5, norm.cap)  # [H / G, n]
            weights = sink_softmax(scores, sinks)
            out[rule, mine] = weights @ values[:seen]
        return out

    def _layer_done(self, prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
        assert queries is not None
        group = queries.shape[1] // keys.shape[0]
        for number, rule in enumerate(self._rules):
            keys_of, values_of = self._roundings[number]
            for head, budget in enumerate(rule.budgets[layer]):
                mine = slice(head, head + 1)
                kept = torch.arange(self.prompt_len)
                if layout.is_compressed(budget, self.prompt_len):
                    asked = queries[-rule.selector.num_queries(self.prompt_len) :, head * group : (head + 1) * group]
                    selector = self._selector_of(rule, head)
                    sinks = self._decoder.sinks(layer)
                    kernels = self._decoder.kernels.with_sinks(
                        None if sinks is None else sinks[head * group : (head + 1) * group]
                    )
                    kept = kept_positions(asked, keys[mine], layer, budget, selector, kernels)[0]
                rows = torch.zeros(2, budget.capacity, keys.shape[2])
                round_keys, round_values = keys_of(keys[head]), values_of(values[head])
                self._rounding[number, layer, head] = round_keys, round_values
                rows[0, : len(kept)] = round_keys(keys[head, kept])
                rows[1, : len(kept)] = round_values(values[head, kept])
                self._stored[number, layer, head] = rows[0], rows[1]


@torch.inference_mode()
def answers(
    runner: ModelRunner,
    item: Item,
    rules: Sequence[HeadRule],
    max_tokens: int,
    eos: set[int],
    selector_of: SelectorOf = lambda rule, head: rule.selector,
) -> list[Any]:
    """Greedy answers by rule, forced tokens left out; ``max_tokens`` counts those too, as in ``evals.cells``."""
    rows = HeadRows(runner, item.prompt_ids, rules, selector_of)
    latest = rows.first_logits.argmax().repeat(len(rules))  # [B]
    for token in item.forced_ids:
        latest = rows.feed(torch.full_like(latest, token)).argmax(-1)
    out: list[list[int]] = [[] for _ in rules]
    ended: set[int] = set()
    for _ in range(max_tokens - len(item.forced_ids)):
        for rule, token in enumerate(latest.tolist()):
            if rule not in ended:
                out[rule] += [] if token in eos else [token]
            if token in eos:
                ended.add(rule)
        if len(ended) == len(rules):
            break
        latest = rows.feed(latest).argmax(-1)
    return out


@torch.inference_mode()
def measured_losses(runner: ModelRunner, chat: Chat, budget: KVBudget, prompt_len: int) -> Tensor:
    """What ``snapstream calibrate`` measures, with the ring of ``budget``: ``[L, G]`` nats per token."""
    model = runner.decoder.config
    total, count = torch.zeros(model.num_layers, model.num_kv_heads), 0
    for prompt, answer in generated(chat.tokenizer, prompt_len, NUM_DOCUMENTS):
        own, num = damage(runner, prompt, answer, budget.num_sink, budget.num_recent)
        total, count = total + own, count + num
    return total / count


def profile_of(losses: Tensor, power: float, by_layer: bool) -> HeadProfile:
    """Shares in proportion to ``losses [L, G] ** power``, over all heads or within each layer."""
    weights = losses.double().clamp(min=1e-6) ** power
    shares = weights / weights.sum(1, keepdim=True) / len(weights) if by_layer else weights / weights.sum()
    return HeadProfile(shares=tuple(tuple(layer) for layer in shares.tolist()), model="")


def make_rules(losses: Tensor, slots: int, prompt_len: int) -> list[HeadRule]:
    """Full attention, and every split with every share for unlike keys."""
    budget, whole, (layers, heads) = KVBudget.of(slots), KVBudget.full(prompt_len + 128), losses.shape
    rules = [HeadRule(name="full", budgets=((whole,) * heads,) * layers)]
    for name, how in SPLITS.items():
        budgets: tuple[tuple[KVBudget, ...], ...] = ((budget,) * heads,) * layers
        if how is not None:
            budgets = profile_of(losses, *how).slots(budget, prompt_len).budgets
        rules += [
            HeadRule(name=f"{name}/{share:g}", budgets=budgets,
                     selector=Diverse(share=share, num_scored=0) if share else make_selector())
            for share in SHARES
        ]  # fmt: skip
    return rules


def uneven_table(model: Path) -> str:
    """docs: the stored runs of a model, a table per number of slots."""
    records = [one for one in store.read(FILE).values() if one["settings"]["model"] == model.name]
    if not records:
        raise ValueError("not measured; run python -m evals.uneven")
    parts, last = [], records[-1]
    for slots in sorted({one["settings"]["slots"] for one in records}, reverse=True):
        found = {one["settings"]["task"]: one for one in records if one["settings"]["slots"] == slots}
        tasks = [task for task in TASKS_OF[model.name] if task in found]
        rows = []
        for rule in found[tasks[0]]["result"]:
            name, _, share = rule.partition("/")
            cells = [found[task]["result"][rule] for task in tasks]
            rows.append([name, share, *(f"{one['accuracy']:.1f} ± {one['standard_error']:.1f}" for one in cells)])
        settings = found[tasks[0]]["settings"]
        parts.append(
            f"{slots} slots, {settings['num_prompts']} prompts of {settings['prompt_len']:,} tokens per cell:\n\n"
            + table(["slots of the heads", "for unlike keys", *tasks], rows)
        )
    where = f"{last['device']}; torch {last['torch']}; commit {last['commit']}; `python -m evals.uneven`"
    return "\n\n".join(parts) + f"\n\n<sub>{where}</sub>"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--budget", type=Fraction, default=Fraction(1, 4), help="slots as a part of the prompt")
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), metavar="TASK", help="default: those of the tables")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    slots, chat = int(args.prompt_len * args.budget), Chat(args.model)
    with LLM(args.model, budget="full", max_rows=1, max_model_len=args.prompt_len + 128, executor="eager",
             chunk_len=CHUNK_LEN, progress=False) as llm:  # fmt: skip
        runner = cast(ModelRunner, llm.engine.runner)
        eos = set(llm.model_config.eos_token_ids)
        losses = measured_losses(runner, chat, KVBudget.of(slots), args.prompt_len)
        rules = make_rules(losses, slots, args.prompt_len)
        topk = {rule.name: [[budget.num_topk for budget in layer] for layer in rule.budgets] for rule in rules}
        for name in args.tasks or TASKS_OF[args.model.name]:
            items = make_items(chat, name, args.prompts, args.prompt_len, args.seed)
            got = [answers(runner, item, rules, TASKS[name].max_tokens, eos) for item in items]
            result = {}
            for index, rule in enumerate(rules):
                own = judge(chat, items, [each[index] for each in got])
                result[rule.name] = {key: round(own[key], 2) for key in ("accuracy", "standard_error")}
                print(f"{name:16} {rule.name:32} {own['accuracy']:5.1f} +-{own['standard_error']:.1f}", flush=True)
            settings = {"model": args.model.name, "weights": weights_of(args.model), "slots": slots, "task": name,
                        "prompt_len": args.prompt_len, "num_prompts": args.prompts, "seed": args.seed}  # fmt: skip
            store.append(FILE, {"settings": settings, **describe(), "topk": topk, "result": result})


if __name__ == "__main__":
    main()
