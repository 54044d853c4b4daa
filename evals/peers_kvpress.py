"""The same prompts and scores for kvpress's SnapKV and StreamingLLM, in an environment of its own (see README.md).

    python -m evals.peers_kvpress --families kv variable --budgets 1/4 1/8 --prompts 200

kvpress prunes the cache of the prompt and lets it grow by the answer. For equal slots it keeps ``slots - longest
answer`` prompt tokens, so that both engines hold at most ``slots`` tokens. The whole prompt is pruned, the question in
it, as here. Window and pooling width are this project's defaults; the presses take the softmax over the whole row.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from evals.arms import Arm
from evals.cells import Cell, items_of, judge
from evals.tasks import TASKS
from snapstream.assets import TINY_MODEL
from snapstream.config import DEFAULT_SINK, DEFAULT_WINDOW, KVBudget, SnapKVConfig

ARMS = ("full", "snapkv", "streaming")
FAMILIES = ("multi_number", "kv", "multi_uuid", "variable", "paraphrase")


def make_arm(name: str, slots: int, max_model_len: int, max_tokens: int) -> Arm:
    """What a press spends, in this project's terms: SnapKVPress keeps no sinks of its own."""
    snapkv = SnapKVConfig(softmax_over="row", pooling="avg")
    if name == "full":
        return Arm(name=name, slots=max_model_len, budget=KVBudget.full(max_model_len), snapkv=snapkv)
    if slots - max_tokens <= DEFAULT_WINDOW:
        raise ValueError(f"{slots} slots leave nothing to select beside a window of {DEFAULT_WINDOW} and {max_tokens}")
    if name == "streaming":
        return Arm(name=name, slots=slots, budget=KVBudget.streaming(slots), snapkv=snapkv)
    recent = DEFAULT_WINDOW + max_tokens
    budget = KVBudget(num_sink=0, num_topk=slots - recent, num_recent=recent)
    return Arm(name=name, slots=slots, budget=budget, snapkv=snapkv)


def press_for(arm: Arm, prompt_len: int, num_kept: int) -> Any:
    """A press that keeps exactly ``num_kept`` of ``prompt_len`` tokens, or one that does nothing."""
    if arm.name == "full" or num_kept >= prompt_len:
        return lambda _: nullcontext()
    from kvpress import SnapKVPress, StreamingLLMPress

    ratio = 1 - (num_kept + 0.5) / prompt_len  # kvpress rounds what it keeps down
    if arm.name == "streaming":
        return StreamingLLMPress(compression_ratio=ratio, n_sink=DEFAULT_SINK)
    return SnapKVPress(compression_ratio=ratio, window_size=arm.snapkv.window_len, kernel_size=arm.snapkv.pool_kernel)


@torch.inference_mode()
def answer(
    model: Any, prompt_ids: list[int], forced: tuple[int, ...], arm: Arm, max_tokens: int
) -> tuple[list[int], int]:
    """Greedy output ids, and the cache's length after pruning."""
    from transformers import DynamicCache

    cache = DynamicCache()
    press = press_for(arm, len(prompt_ids), arm.slots - max_tokens)
    with press(model):
        logits = model(torch.tensor([prompt_ids]), past_key_values=cache, logits_to_keep=1).logits
    kept = cache.get_seq_length()
    ends = model.generation_config.eos_token_id
    end_ids = set(ends if isinstance(ends, list) else [ends])
    output: list[int] = []
    for step in range(max_tokens):
        token = int(logits[0, -1].argmax())
        if step >= len(forced):
            if token in end_ids:
                break
            output.append(token)
        else:
            token = forced[step]
        place = torch.tensor([[len(prompt_ids) + step]])
        logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=place).logits
    return output, kept


def run_cell(model: Any, cell: Cell) -> None:
    """Ask every prompt of the cell and store its result in the format of ``evals.cells``."""
    began = perf_counter()
    chat, items = items_of(cell)
    max_tokens = TASKS[cell.task].max_tokens
    answers, lengths = [], []
    for item in tqdm(items, desc=f"{cell.task} {cell.arm.name} {cell.arm.slots}", leave=False):
        output, kept = answer(model, item.prompt_ids, item.forced_ids, cell.arm, max_tokens)
        answers.append(output)
        lengths.append(kept)
    mean_prompt = sum(len(item.prompt_ids) for item in items) / len(items)
    config = model.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    counters = {
        "mean_prompt_tokens": mean_prompt,
        "mean_evicted_tokens": mean_prompt - sum(lengths) / len(lengths),
        "row_bytes": cell.arm.slots * token_bytes,
        "peer_version": f"kvpress {version('kvpress')}",
    }
    cell.write(judge(chat, items, answers) | counters, perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--families", nargs="+", choices=list(TASKS), default=list(FAMILIES), metavar="TASK")
    parser.add_argument("--budgets", type=Fraction, nargs="+", default=[Fraction(1, 4), Fraction(1, 8)])
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=200)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True).eval()
    for task in args.families:
        longest = TASKS[task].max_tokens
        sizes = [("full", args.prompt_len)]
        sizes += [(name, int(args.prompt_len * part)) for part in args.budgets for name in ARMS[1:]]
        for name, slots in sizes:
            arm = make_arm(name, slots, args.prompt_len + longest, longest)
            cell = Cell(model=args.model, task=task, arm=arm, prompt_len=args.prompt_len, num_prompts=args.prompts,
                        source="kvpress")  # fmt: skip
            if not cell.path.exists():
                run_cell(model, cell)
            stored = cell.read()
            assert stored is not None
            print(f"{task:14} {name:10} {slots:5} {stored['result']['accuracy']:5.1f}", flush=True)


if __name__ == "__main__":
    main()
