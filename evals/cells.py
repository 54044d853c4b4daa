"""A cell is one measurement: a task under one resolved configuration. Its settings decide its result and name it.

A stored cell is not run again, so an interrupted run goes on where it stopped (``store.py``). Cells are independent of
each other: ``run_cells`` may give them to several processes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from evals import store
from evals.arms import Arm
from evals.by_head import by_head_runner, by_head_spec
from evals.chat import Chat
from evals.forced import generate
from evals.rounded import WIDTHS
from evals.score import found, found_after_first, mean_and_error
from evals.shared import generate_shared
from evals.tasks import TASKS, Item, make_items
from figures.machine import describe
from snapstream.calibration import FILE
from snapstream.config import KVDType
from snapstream.config.kv import read_profile
from snapstream.kv import layout
from snapstream.llm import LLM
from snapstream.models.registry import kv_spec_of
from snapstream.startup.build import MakeRunner

RESULTS = Path(os.environ.get("EVALS_RESULTS", Path(__file__).parent / "results"))
CHUNK_LEN = 512
MAX_SHARED = 32  # rules on one prefill


@functools.cache
def weights_of(model: Path) -> str:
    """Which weights these are: the beginning of the checksum of the folder's safetensors files."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _profile_id(model: Path) -> str:
    """Which per-head profile a checkpoint has beside its weights."""
    return hashlib.sha256(repr(read_profile(model / FILE).shares).encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement to make."""

    model: Path
    task: str
    arm: Arm
    prompt_len: int
    num_prompts: int
    seed: int = 0
    source: str = "snapstream"  # whose engine; see peers_kvpress.py
    kv_dtype: KVDType = "auto"  # storage of rows
    width: str = "auto"  # of weights, and of inputs of decode: of rounded.WIDTHS

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the result, as plain data."""
        return {
            "source": self.source,
            "model": self.model.name,
            "weights": weights_of(self.model),
            "task": self.task,
            "arm": self.arm.name,
            "slots": self.arm.slots,
            "budget": asdict(self.arm.budget),
            "snapkv": self.arm.selection,
            "prompt_len": self.prompt_len,
            "num_prompts": self.num_prompts,
            "max_tokens": TASKS[self.task].max_tokens,
            "seed": self.seed,
            # older cells keep their names
            **({"heads": _profile_id(self.model)} if self.arm.has_heads else {}),
            **({} if self.kv_dtype == "auto" else {"kv_dtype": self.kv_dtype}),
            **WIDTHS[self.width].settings,
        }

    @property
    def path(self) -> Path:
        """The file of the model and the task's group; its record there is found by the settings."""
        group = "_".join(re.findall(r"\w+", TASKS[self.task].group))
        return RESULTS / f"{self.model.name}-{weights_of(self.model)}" / f"{group}.jsonl"

    def read(self) -> store.Record | None:
        """The stored result, if there is one."""
        return store.read(self.path).get(store.key_of(self.settings))

    def write(self, result: dict[str, Any], seconds: float) -> None:
        """Store a result, whole or not at all."""
        head = {"settings": self.settings, **describe(), "seconds": round(seconds, 1)}
        store.append(self.path, head | {"result": result})


def not_stored(cells: Sequence[Cell], answers: Path | None = None) -> list[Cell]:
    """Cells without a result, or whose answers are wanted in a file that lacks them, each once.

    A file is read once however many of its cells are asked for.
    """
    stored = {path: store.read(path) for path in {cell.path for cell in cells}}
    answered = None if answers is None else store.read(answers)
    missing = []
    for cell in dict.fromkeys(cells):
        key = store.key_of(cell.settings)
        if key not in stored[cell.path] or (answered is not None and key not in answered):
            missing.append(cell)
    return missing


@functools.lru_cache(maxsize=32)
def _items(model: Path, task: str, num_prompts: int, prompt_len: int, seed: int) -> tuple[Chat, list[Item]]:
    chat = Chat(model)
    return chat, make_items(chat, task, num_prompts, prompt_len, seed)


def items_of(cell: Cell) -> tuple[Chat, list[Item]]:
    """The cell's tokenizer and prompts: the same for every arm."""
    return _items(cell.model, cell.task, cell.num_prompts, cell.prompt_len, cell.seed)


def answers_of(chat: Chat, items: list[Item], answers: list[list[int]]) -> list[dict[str, Any]]:
    """What was answered to each prompt, and how it scored."""
    found_texts = ["".join(chat.token_texts(ids)) for ids in answers]
    right = [found(text, item.references) for item, text in zip(items, found_texts, strict=True)]
    return [
        {"answer": text, "references": list(item.references), "score": sum(own) / len(own)}
        for item, text, own in zip(items, found_texts, right, strict=True)
    ]


def judge(chat: Chat, items: list[Item], answers: list[list[int]]) -> dict[str, Any]:
    """Scores of answers given as token ids, forced tokens left out; by reference where there are several."""
    scores, later, by_reference = [], [], []
    for item, ids in zip(items, answers, strict=True):
        texts = chat.token_texts(ids)
        right = found("".join(texts), item.references)
        by_reference.append(right)
        scores.append(sum(right) / len(right))
        references = [chat.token_texts(chat.token_ids(" " + reference)) for reference in item.references]
        after = found_after_first(texts, references)
        later += [sum(after) / len(after)] if after else []
    accuracy, error = mean_and_error(scores)
    result: dict[str, Any] = {"accuracy": accuracy, "standard_error": error}
    result["accuracy_after_first_token"] = mean_and_error(later)[0] if later else None
    result["mean_answer_tokens"] = sum(map(len, answers)) / len(answers)
    if max(map(len, by_reference)) > 1:  # in the order of the references
        columns = [[row[i] for row in by_reference if len(row) > i] for i in range(max(map(len, by_reference)))]
        result["accuracy_by_reference"] = [round(100 * sum(column) / len(column), 1) for column in columns]
    return result


def group(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that one prefill can serve; truncation has prompts of its own, ``by_head`` and ``heads`` other rows."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        own = cell.arm if cell.arm.name == "truncation" or cell.arm.has_heads else cell.arm.name == "by_head"
        key = (cell.model, cell.task, cell.prompt_len, cell.num_prompts, cell.seed, cell.kv_dtype, cell.width, own)
        groups.setdefault(key, []).append(cell)
    return [found[i : i + MAX_SHARED] for found in groups.values() for i in range(0, len(found), MAX_SHARED)]


def _make_runner(cell: Cell) -> MakeRunner:
    if cell.arm.name == "by_head":
        return by_head_runner
    return WIDTHS[cell.width].make_runner


def run_group(cells: Sequence[Cell], answers_file: Path | None = None) -> None:
    """Ask every prompt once, greedily, under the rule of each cell (``shared.py``), and store the results.

    ``answers_file`` gets a line per cell with the answer to every prompt.
    """
    began = perf_counter()
    first = cells[0]
    width = WIDTHS[first.width]
    task = TASKS[first.task]
    chat, items = items_of(first)
    prompts = [first.arm.prompt(item.prompt_ids, task.max_tokens) for item in items]
    forced = [item.forced_ids for item in items]
    rules = [(cell.arm.budget, cell.arm.selector) for cell in cells]
    with LLM(
        first.model,
        budget=first.arm.budget,
        selector=first.arm.selector,
        kv_dtype="float32" if first.kv_dtype == "auto" else first.kv_dtype,  # whatever the weights are
        weights=width.weights,
        activations=width.activations,
        heads=str(first.model / FILE) if first.arm.has_heads else None,
        executor=None if first.arm.has_heads else "eager",
        make_runner=_make_runner(first),
        max_rows=8 if first.arm.has_heads else 1,
        max_model_len=first.prompt_len + task.max_tokens,
        chunk_len=CHUNK_LEN,
        progress=False,
    ) as llm:
        width.check(llm.config)
        if first.arm.has_heads:  # one arm, over rows of the engine itself
            outputs = generate(llm, prompts, forced, task.max_tokens)
            answers = [[list(output.samples[0].token_ids)] for output in outputs]
        else:
            answers = generate_shared(llm, prompts, forced, task.max_tokens, rules)
        model, heads = llm.model_config, llm.config.heads
    spec_of = by_head_spec if first.arm.name == "by_head" else kv_spec_of
    seconds = (perf_counter() - began) / len(cells)
    for index, cell in enumerate(cells):
        own = [ids[index][len(item.forced_ids) :] for item, ids in zip(items, answers, strict=True)]
        capacity = cell.arm.budget.capacity
        kept: Callable[[int], int] = partial(layout.num_visible, capacity=capacity)
        if heads is not None:
            kept = heads.of(cell.arm.budget, cell.prompt_len).mean_visible
        evicted = [len(prompt) - kept(len(prompt)) for prompt in prompts]
        counters = {
            "mean_prompt_tokens": sum(map(len, prompts)) / len(prompts),
            "mean_evicted_tokens": sum(evicted) / len(prompts),
            "row_bytes": spec_of(model, "float32", cell.kv_dtype).row_bytes(capacity),
            "cells_of_this_prefill": len(cells),
        }
        cell.write(judge(chat, items, own) | counters, seconds)
        if answers_file is not None:
            store.append(answers_file, {"settings": cell.settings, "answers": answers_of(chat, items, own)})


def _work(cells: Sequence[Cell], answers: Path | None) -> int:
    import torch

    torch.set_num_threads(1)
    run_group(cells, answers)
    return len(cells)


def run_cells(cells: Sequence[Cell], jobs: int = 1, answers: Path | None = None) -> None:
    """Run what is not stored yet, with a progress bar; ``jobs`` processes of one thread each if more than one.

    ``answers``: a file for the answers to every prompt; stored cells that it lacks run again.
    """
    from tqdm import tqdm

    missing = not_stored(cells, answers)
    with tqdm(total=len(missing), desc="cells", unit="cell", disable=not missing) as bar:
        if jobs == 1:
            for some in group(missing):
                bar.set_postfix_str(some[0].task)
                run_group(some, answers)
                bar.update(len(some))
            return
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            try:
                for future in as_completed([pool.submit(_work, some, answers) for some in group(missing)]):
                    bar.update(future.result())
            except BaseException:  # Ctrl-C, or a cell that failed: what is running ends, the rest is not begun
                pool.shutdown(wait=False, cancel_futures=True)
                raise
