"""``snapstream demo``: the main use case on the model that ships with the package, in a minute on two cores.

A generated document longer than the budget, several questions about it in one batch, the same under four budgets; then
one row drawn over its document: what was kept. The documents are generated (``assets/documents``) with known answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import Document, Question, make_document
from snapstream.config import KVBudget
from snapstream.llm import LLM
from snapstream.types import KeptBitmap, RequestOutput, SamplingParams

DECODE_TOKENS = 96  # of the speed run: long enough to time, short enough to wait for
STRIP_COLUMNS = 72
STRIP_LINES = 4
SHADES = " ░▒▓█"
SEED = 1  # of the documents
FAMILIES = ("multi_number", "multi_words", "kv")  # one document each


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question about one document, as the model sees it."""

    document: Document
    question: Question
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One budget and its results."""

    name: str
    budget: KVBudget
    outputs: list[RequestOutput]
    tokens_per_s: float  # decode of as many rows as there are questions

    def num_right(self, cases: list[Case]) -> int:
        pairs = zip(self.outputs, cases, strict=True)
        return sum(case.question.is_answered_by(output.text) for output, case in pairs)


def make_cases(llm: LLM, num_tokens: int, num_questions: int) -> list[Case]:
    """Questions about documents of ``num_tokens`` tokens, families in turn."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "the shipped model has a tokenizer"
    cases = []
    for index, family in enumerate(FAMILIES):
        document = make_document(
            family=family,
            seed=SEED,
            count_tokens=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
            target_tokens=num_tokens - 48,  # template and question
            num_questions=len(range(index, num_questions, len(FAMILIES))),
        )
        for question in document.questions:
            ids = llm.chat_token_ids([{"role": "user", "content": document.prompt(question)}])
            cases.append(Case(document=document, question=question, token_ids=ids))
    return cases


def run_arm(name: str, budget: KVBudget, cases: list[Case], max_model_len: int) -> Arm:
    """Ask everything in one batch, then time a longer decode of as many rows."""
    rows = len(cases)
    with LLM(TINY_MODEL, budget=budget, max_rows=rows, max_model_len=max_model_len, progress=False) as llm:
        prompts = [case.token_ids for case in cases]
        answers = SamplingParams(max_tokens=24, temperature=0.0, return_kept="bitmap")
        outputs = llm.generate(prompts, answers)
        speed = SamplingParams(n=rows, max_tokens=DECODE_TOKENS, temperature=0.0, ignore_eos=True)
        timings = llm.generate(prompts[:1], speed)[0].timings
    return Arm(
        name=name,
        budget=budget,
        outputs=outputs,
        tokens_per_s=rows * (DECODE_TOKENS - 1) / timings.decode_ms * 1e3,
    )


def arms_of(num_tokens: int, max_model_len: int) -> Iterator[tuple[str, KVBudget]]:
    """Full attention, StreamingLLM at a quarter, SnapStream at a quarter and an eighth."""
    yield "full attention", KVBudget.full(max_model_len)
    yield "StreamingLLM 1/4", KVBudget.streaming(num_tokens // 4)
    yield "SnapStream 1/4", KVBudget.of(num_tokens // 4)
    yield "SnapStream 1/8", KVBudget.of(num_tokens // 8)


def results_table(arms: list[Arm], cases: list[Case]) -> Table:
    """Right answers, bytes and speed of every arm."""
    table = Table(title=f"{len(cases)} questions in one batch, each after its own copy of a document")
    table.add_column("cache")
    for heading in ("slots", "right", "KV per row", "decode tokens/s"):
        table.add_column(heading, justify="right")
    for arm in arms:
        compression = arm.outputs[0].compression
        assert compression is not None
        table.add_row(
            arm.name,
            f"{arm.budget.capacity:,}",
            f"{arm.num_right(cases)} of {len(cases)}",
            f"{compression.row_bytes / 2**20:.2f} MiB",
            f"{arm.tokens_per_s:,.0f}",
        )
    return table


def answers_table(arms: list[Arm], cases: list[Case]) -> Table:
    """The right answer, and an arm's answer where it was wrong."""
    table = Table(title="answers")
    table.add_column("question")
    table.add_column("true")
    for arm in arms:
        table.add_column(arm.name.replace(" ", "\n"))
    for index, case in enumerate(cases):
        cells = []
        for arm in arms:
            text = arm.outputs[index].text.strip()
            is_right = case.question.is_answered_by(text)
            cells.append("[green]right[/]" if is_right else f"[red]{escape(text) or '(nothing)'}[/]")
        table.add_row(escape(case.question.text), escape(case.question.value), *cells)
    return table


def kept_shares(bitmap: KeptBitmap) -> list[float]:
    """For every prompt token the share of (layer, kv head) pairs whose row kept it."""
    bits = np.frombuffer(bitmap.bits, np.uint8).reshape(bitmap.num_layers * bitmap.num_kv_heads, -1)
    kept = np.unpackbits(bits, axis=1, count=bitmap.num_tokens, bitorder="little")
    return [float(share) for share in kept.mean(axis=0)]


def strip(values: list[float], marked: range) -> Iterator[str]:
    """Lines of shaded cells with the marked tokens underlined; a cell is as dark as its most kept token."""
    cells = STRIP_COLUMNS * STRIP_LINES
    edges = [round(i * len(values) / cells) for i in range(cells + 1)]
    for line in range(STRIP_LINES):
        shades, marks = "", ""
        for cell in range(line * STRIP_COLUMNS, (line + 1) * STRIP_COLUMNS):
            low, high = edges[cell], max(edges[cell + 1], edges[cell] + 1)
            shades += SHADES[round(max(values[low:high], default=0.0) * (len(SHADES) - 1))]
            marks += "^" if low < marked.stop and marked.start < high else " "
        yield f"  |{shades}|"
        if "^" in marks:
            yield f"   {marks} "


def fact_tokens(case: Case, llm: LLM) -> range:
    """Prompt tokens of the sentence that answers the question."""
    assert llm.tokenizer is not None
    start, end = case.question.spans[0]
    prefix = llm.chat_token_ids([{"role": "user", "content": "x"}]).index(
        llm.tokenizer("x", add_special_tokens=False)["input_ids"][-1]
    )
    before = len(llm.tokenizer(case.document.text[:start], add_special_tokens=False)["input_ids"])
    fact = len(llm.tokenizer(case.document.text[start:end], add_special_tokens=False)["input_ids"])
    return range(prefix + before, prefix + before + fact)


def run_demo(num_tokens: int = 4096, num_questions: int = 6) -> list[Arm]:
    """Print the comparison; returns the arms, so that a test can look at them."""
    console = Console()
    began = perf_counter()
    max_model_len = num_tokens + 32 + DECODE_TOKENS
    with LLM(TINY_MODEL, budget="full", max_rows=1, max_model_len=max_model_len, progress=False) as llm:
        cases = make_cases(llm, num_tokens, num_questions)
        marked = fact_tokens(cases[0], llm)
    longest = max(len(case.token_ids) for case in cases)
    console.print(f"{len(FAMILIES)} generated documents of about {longest:,} tokens; no network, no GPU.\n")
    arms = []
    for name, budget in arms_of(num_tokens, max_model_len):
        with console.status(f"{name} ..."):
            arms.append(run_arm(name, budget, cases, max_model_len))
    console.print(results_table(arms, cases))
    console.print(answers_table(arms, cases))
    _print_row(console, arms[2], cases[0], marked)
    console.print(f"\n{perf_counter() - began:.0f} s in all.")
    return arms


def _print_row(console: Console, arm: Arm, case: Case, marked: range) -> None:
    output, budget = arm.outputs[0], arm.budget
    assert output.compression is not None and output.compression.kept_bitmap is not None, "the prompt outgrows the row"
    console.print(f"\nOne row of {arm.name}, drawn over its prompt of {len(output.prompt_token_ids):,} tokens.")
    console.print(
        f"{budget.num_sink} sinks | {budget.num_topk} selected | ring of {budget.num_recent}. "
        "Darker: kept by more layers and heads. ^ is the sentence that answers:"
    )
    console.print(f"[dim]{escape(case.question.text)}[/]\n", highlight=False)
    for line in strip(kept_shares(output.compression.kept_bitmap), marked):
        console.print(line, highlight=False)
