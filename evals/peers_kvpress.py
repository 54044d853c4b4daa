"""The same prompts and scores for presses of kvpress, in an environment of its own (see README.md).

    python -m evals.peers_kvpress --families kv variable --budgets 1/4 1/8 --prompts 200

kvpress prunes the cache of the prompt and lets it grow by the answer. For equal slots it keeps ``slots - longest
answer`` prompt tokens, so that both engines hold at most ``slots`` tokens. The whole prompt is pruned, the question in
it, as here. Every press runs with the settings that it ships with.

A prompt is prefilled once for all presses. A press is a hook that prunes a layer's cache after the layer has attended,
so what the layers compute does not depend on it: the hook's arguments are recorded, and every press's own hook is
called with them and a copy of the cache. A test holds the answers equal to those under ``with press(model)``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import copy
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from evals.arms import Arm, make_arm
from evals.cells import Cell, group, items_of, judge, not_stored
from evals.selectors import AS_KVPRESS
from evals.tasks import TASKS
from snapstream.assets import TINY_MODEL
from snapstream.config import DEFAULT_SINK, KVBudget

# Each did best on some task in a trial of eleven presses; none did on all.
EXTRA_ARMS = ("chunkkv", "compactor")
ARMS = ("full", "snapkv", "streaming", *EXTRA_ARMS)
EXTRA_BUDGETS = (Fraction(1, 4), Fraction(1, 16))
# Tasks of docs/research/accuracy.md that ask one question.
FAMILIES = (
    "single_words", "multi_number", "passkey", "number_string", "multi_uuid", "kv", "variable", "paraphrase",
)  # fmt: skip


PROMPTS_AT_ONCE = 8  # whose caches decode together


def peer_arm(name: str, slots: int, max_model_len: int, max_tokens: int) -> Arm:
    """What a press spends, in this project's terms; ValueError if the slots do not hold its window and the answer."""
    own = make_arm("as_kvpress", slots, max_model_len, max_tokens)
    budgets = {"full": KVBudget.full(max_model_len), "streaming": KVBudget.streaming(slots)}
    held = max_model_len if name == "full" else slots
    return Arm(name=name, slots=held, budget=budgets.get(name, own.budget), selector=AS_KVPRESS)


def press_of(name: str, prompt_len: int, num_kept: int) -> Any:
    """A press that keeps ``num_kept`` of ``prompt_len`` tokens; None where it would have nothing to do.

    ChunkKV keeps whole chunks of 20 tokens, so up to two chunks fewer.
    """
    if name == "full" or num_kept >= prompt_len:
        return None
    from kvpress import ChunkKVPress, CompactorPress, SnapKVPress, StreamingLLMPress

    ratio = 1 - (num_kept + 0.5) / prompt_len  # kvpress rounds what it keeps down
    if name == "streaming":
        return StreamingLLMPress(compression_ratio=ratio, n_sink=DEFAULT_SINK)
    snapkv = SnapKVPress(
        compression_ratio=ratio, window_size=AS_KVPRESS.observation_len, kernel_size=AS_KVPRESS.pool_width
    )
    if name == "compactor":
        return CompactorPress(compression_ratio=ratio)
    return ChunkKVPress(press=snapkv) if name == "chunkkv" else snapkv


class Prefilled:
    """One prompt through the model, and what each layer's hook was called with."""

    @torch.inference_mode()
    def __init__(self, model: Any, prompt_ids: list[int]) -> None:
        from kvpress import BasePress
        from transformers import DynamicCache

        calls: list[tuple[Any, dict[str, Any], Any]] = []

        class Recorder(BasePress):  # type: ignore[misc]
            def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
                calls.append((module, kwargs, output))
                return output

        self._model, self.calls = model, calls
        with Recorder()(model):
            cache = DynamicCache()
            self.logits = model(torch.tensor([prompt_ids]), past_key_values=cache, logits_to_keep=1).logits[:, -1]
        self._whole = cache

    @torch.inference_mode()
    def pruned(self, press: Any) -> Any:
        """A cache of its own, as ``press`` leaves it."""
        cache = copy(self._whole)
        cache.layers = [copy(layer) for layer in self._whole.layers]  # presses replace tensors, they write into none
        if press is not None:
            torch.manual_seed(0)  # Compactor's leverage scores are a random sketch
            press.post_init_from_model(self._model)
            for module, kwargs, output in self.calls:
                press.forward_hook(module, [], {**kwargs, "past_key_values": cache}, output)
        return cache


def stacked(caches: Sequence[Any]) -> Any:
    """Caches of equal lengths as one batch."""
    from transformers import DynamicCache

    batch = DynamicCache()
    for index in range(len(caches[0].layers)):
        layers = [cache.layers[index] for cache in caches]
        batch.update(torch.cat([own.keys for own in layers]), torch.cat([own.values for own in layers]), index)
    return batch


@torch.inference_mode()
def decode(model: Any, logits: torch.Tensor, cache: Any, positions: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Greedy output ids of every row of ``cache`` (B rows), from the ``logits [B, V]`` of the last prompt tokens on.

    ``positions`` [B] are those of the first output tokens: the lengths of the prompts.
    """
    ends = model.generation_config.eos_token_id
    end_ids = set(ends if isinstance(ends, list) else [ends])
    outputs: list[list[int]] = [[] for _ in positions]
    is_running = [True] * len(outputs)
    places = torch.tensor(positions)[:, None]
    for step in range(max_tokens):
        tokens = logits.argmax(-1).tolist()
        for row, token in enumerate(tokens):
            is_running[row] = is_running[row] and token not in end_ids
            outputs[row] += [token] if is_running[row] else []
        if not any(is_running):
            break
        fed = torch.tensor(tokens)[:, None]
        logits = model(fed, past_key_values=cache, position_ids=places + step).logits[:, -1]
    return outputs


@torch.inference_mode()
def answers(
    model: Any, prompts: Sequence[list[int]], arms: Sequence[Arm], max_tokens: int
) -> tuple[list[list[list[int]]], list[list[float]]]:
    """Greedy output ids by prompt and arm, and how many prompt tokens each kept.

    Caches that hold as many tokens in every layer decode as one batch.
    """
    outputs: list[list[list[int]]] = [[[] for _ in arms] for _ in prompts]
    kept = [[0.0] * len(arms) for _ in prompts]
    together: dict[tuple[int, ...], list[tuple[int, int, Any]]] = {}
    all_logits = []
    for i, prompt in enumerate(prompts):
        prefilled = Prefilled(model, prompt)
        all_logits.append(prefilled.logits)
        for j, arm in enumerate(arms):
            cache = prefilled.pruned(press_of(arm.name, len(prompt), arm.slots - max_tokens))
            lengths = tuple(own.keys.shape[2] for own in cache.layers)
            kept[i][j] = sum(lengths) / len(lengths)
            together.setdefault(lengths, []).append((i, j, cache))
    for own in together.values():
        logits = torch.cat([all_logits[i] for i, _, _ in own])
        positions = [len(prompts[i]) for i, _, _ in own]
        found = decode(model, logits, stacked([cache for _, _, cache in own]), positions, max_tokens)
        for (i, j, _), output in zip(own, found, strict=True):
            outputs[i][j] = output
    return outputs, kept


def run_group(model: Any, cells: Sequence[Cell]) -> None:
    """Ask every prompt of cells that share them, and store the results in the format of ``evals.cells``."""
    began = perf_counter()
    first, arms = cells[0], [cell.arm for cell in cells]
    chat, items = items_of(first)
    max_tokens = TASKS[first.task].max_tokens
    assert not any(item.forced_ids for item in items), f"{first.task} asks more than one question"
    outputs, kept = [], []
    for start in tqdm(range(0, len(items), PROMPTS_AT_ONCE), desc=first.task, leave=False, mininterval=10):
        prompts = [item.prompt_ids for item in items[start : start + PROMPTS_AT_ONCE]]
        for into, found in zip((outputs, kept), answers(model, prompts, arms, max_tokens), strict=True):
            into.extend(found)
    seconds = (perf_counter() - began) / len(cells)
    mean_prompt = sum(len(item.prompt_ids) for item in items) / len(items)
    config = model.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    for index, cell in enumerate(cells):
        press = press_of(cell.arm.name, cell.prompt_len, cell.arm.slots - max_tokens)
        counters = {
            "mean_prompt_tokens": mean_prompt,
            "mean_evicted_tokens": mean_prompt - sum(own[index] for own in kept) / len(kept),
            "row_bytes": cell.arm.slots * token_bytes,
            "cells_of_this_prefill": len(cells),
            "peer_version": f"kvpress {version('kvpress')}, transformers {version('transformers')}",
            "press": repr(press),
        }
        cell.write(judge(chat, items, [own[index] for own in outputs]) | counters, seconds)


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """All cells of a run, task by task."""
    found = []
    for task in args.families:
        longest = TASKS[task].max_tokens
        sizes = [("full", args.prompt_len)] if "full" in args.arms else []
        sizes += [
            (name, int(args.prompt_len * part)) for part in args.budgets for name in args.arms
            if name != "full" and (name not in EXTRA_ARMS or part in EXTRA_BUDGETS)
        ]  # fmt: skip
        for name, slots in sizes:
            arm = peer_arm(name, slots, args.prompt_len + longest, longest)
            found.append(
                Cell(
                    model=args.model, task=task, arm=arm, prompt_len=args.prompt_len, num_prompts=args.prompts,
                    source="kvpress",
                )
            )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="TASK")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--budgets", type=Fraction, nargs="+", default=[Fraction(1, n) for n in (2, 4, 8, 16)])
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=200)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    path, dtype = args.model, torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, trust_remote_code=False)
    model.eval()
    cells = cells_of(args)
    for some in group(not_stored(cells)):
        run_group(model, some)
    for cell in cells:
        stored = cell.read()
        assert stored is not None
        print(f"{cell.task:14} {cell.arm.name:10} {cell.arm.slots:5} {stored['result']['accuracy']:5.1f}")


if __name__ == "__main__":
    main()
