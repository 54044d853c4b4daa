"""The Triton kernels as PyTorch operators: honest about shapes and mutation, whole in a compiled graph, and enough to
run the engine. Interpreted, on a CPU."""

from __future__ import annotations

import ast
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from snapstream import kernels
from snapstream.config import KVBudget, KVDType
from snapstream.exec.eager import EagerDecode
from snapstream.kernels import groups
from snapstream.kernels.formats import FP8
from snapstream.kernels.interface import HeadNorm, LayerRows, RowPlaces, bind
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.startup.build import MakeRunner, build_runner
from snapstream.types import SamplingParams
from tests.kernels.triton import interpreter
from tests.parity.checkpoints import VOCAB, make_model, save

pytestmark = interpreter.interpreted()


def heads_and_rows() -> dict[str, Tensor]:
    """Projected heads of three tokens (4 query heads, 2 kv heads, E = 16), angles, and three layers of four rows."""
    torch.manual_seed(0)
    cache = torch.randn(2, 3, 4, 2, 40, 16)
    return {
        "heads": torch.randn(3, 8, 16), "norm": torch.rand(6, 16), "cos": torch.randn(3, 1, 16),
        "sin": torch.randn(3, 1, 16), "k": cache[0].clone(), "v": cache[1].clone(), "rows": torch.tensor([2, 0, 1]),
        "slots": torch.tensor([5, 39, 0]), "lengths": torch.tensor([6, 40, 1]),
    }  # fmt: skip


def test_operators_say_truly_what_they_change_and_return() -> None:
    from snapstream.kernels.triton import attention, dense, products, recurrence, scores
    from snapstream.kernels.triton import rows as gather
    from snapstream.kernels.triton import rows as rope_write

    t = heads_and_rows()
    q, stacks, at = t["heads"][:, :4], (t["k"], t["v"]), (t["rows"], t["slots"])
    staged, index = torch.randn(2, 2, 60, 16), torch.arange(40).expand(2, -1)
    x, ones = torch.randn(3, 32), torch.ones(32)
    angles, ends = (t["cos"], t["sin"]), torch.tensor([1, 3], dtype=torch.int32)
    narrow = [torch.zeros(3, 4, 2, 40, 16, dtype=torch.uint8).view(FP8.dtype) for _ in "kv"]
    scales = torch.rand(2, 3, 4, 2) + 0.5
    codes = [torch.zeros(3, 4, 2, 40, 18, dtype=torch.uint8) for _ in "kv"]
    eighths = [torch.zeros(3, 4, 2, 40, 32, dtype=torch.int8) for _ in "kv"], torch.zeros(2, 3, 4, 2, 40)
    tokens = torch.randn(2, 3, 2, 32)
    states, memory, rates = torch.randn(4, 2, 32), torch.randn(4, 2, 4, 8), -torch.rand(2)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (attention.decode_operator, (q, *stacks, 1, t["rows"], t["lengths"]), {}),
        (attention.decode_operator, (q, *stacks, 1, t["rows"], t["lengths"]), {"sinks": torch.randn(4)}),
        (rope_write.norm_rope_write_operator, (t["heads"], t["norm"], 1e-6, *angles, *stacks, 1, *at), {}),
        (rope_write.norm_rope_operator, (t["heads"], None, 1e-6, *angles, 2), {}),
        (dense.rms_norm, (x, ones, 1e-6), {}),
        (dense.add_rms_norm, (x.clone(), x, ones, 1e-6), {}),
        (dense.swiglu, (x,), {}),
        (dense.one_linear, (x[:1], ones, 1e-6, torch.randn(16, 32), torch.randn(16), True), {}),
        (dense.one_linear, (x[:1], None, 0.0, torch.randn(16, 32), None, False), {}),
        (dense.add_one_linear, (torch.randn(1, 16), x[:1], torch.randn(16, 32), None), {}),
        (dense.few_linear, (x.bfloat16(), torch.randn(16, 32).bfloat16(), None, False), {}),
        (dense.few_linear, (x.bfloat16(), torch.randn(16, 32).bfloat16(), torch.randn(16).bfloat16(), True), {}),
        (dense.add_rms_norm, (x.clone(), torch.randn(4, 3, 32), ones, 1e-6), {}),
        (scores.snapkv_scores, (q, staged[0], 57, 4, 50), {"over_row": False, "group_max": False}),
        (gather.gather_operator, (*stacks, 1, [1, 3], *staged, index), {}),
        (products.grouped_linear_operator, (x, torch.randn(2, 16, 32), None, ends), {}),
        (products.code_linear, (x, *groups.quantize(torch.randn(16, 32), 4, 32), None), {}),
        (recurrence.conv_step, (x, states, t["rows"], torch.randn(3, 32), None, True), {}),
        (recurrence.memory_step, (x, x[:, :4], memory, t["rows"], rates, -rates, None), {}),
        (recurrence.memory_step, (x, x[:, :2], memory, t["rows"], rates, -rates, -rates), {}),
        (attention.decode_operator, (q, *narrow, 1, t["rows"], t["lengths"], *scales), {}),
        (rope_write.norm_rope_write_operator, (t["heads"], None, 1e-6, *angles, *narrow, 2, *at, *scales), {}),
        (gather.gather_operator, (*narrow, 1, [1, 3], *staged, index, *scales), {}),
        (gather.store_codes, (*tokens, *codes, 1, *at, None, None), {}),
        (gather.store_codes, (*tokens, *eighths[0], 1, *at, *eighths[1]), {}),
        (gather.store_codes, (*tokens, eighths[0][0], codes[1], 1, *at, eighths[1][0], None), {}),
    ]
    for operator, arguments, named in calls:
        is_fp8 = any(isinstance(value, Tensor) and value.dtype == FP8.dtype for value in arguments)
        # what compares before and after has no FP8 in torch; the schema is the same one
        utils = {"test_utils": ("test_faketensor",)} if is_fp8 else {}
        torch.library.opcheck(operator, arguments, named, **utils)
    modules = (attention, dense, products, gather, recurrence, scores)
    everyone = {
        value for module in modules for value in vars(module).values() if isinstance(value, torch.library.CustomOpDef)
    }
    assert everyone == {operator for operator, _, _ in calls}


def test_what_an_operator_changes_has_no_default() -> None:
    """PyTorch 2.11 drops arguments that equal their default before it looks up those that are changed."""
    changing = 0
    for file in Path(kernels.__file__).parent.glob("triton/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            calls = [own for own in getattr(node, "decorator_list", []) if isinstance(own, ast.Call)]
            keywords = [keyword for call in calls for keyword in call.keywords if keyword.arg == "mutates_args"]
            if isinstance(node, ast.FunctionDef) and keywords:
                names, changed = [own.arg for own in node.args.args], ast.literal_eval(keywords[0].value)
                assert {*changed}.isdisjoint(names[len(names) - len(node.args.defaults) :]), node.name
                changing += bool(changed)
    assert changing > 3


def test_a_compiled_step_is_one_graph_for_every_batch_content() -> None:
    """Norm, rotation, write and attention of two layers of one cache: same result, compiled once, nothing broken."""
    t, kernels = heads_and_rows(), bind("cpu", "triton")

    def step(heads: Tensor, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        out = heads[:, :4]
        norm, rope, places = HeadNorm(t["norm"], 1e-6), (t["cos"], t["sin"]), RowPlaces(rows, slots, lengths)
        for layer in (0, 2):
            entering = torch.cat((out, heads[:, 4:]), 1)
            out = out + kernels.attend_rows(entering, norm, rope, LayerRows(k, v, layer), places, None)
        return kernels.swiglu(kernels.rms_norm(out.flatten(1), torch.ones(64), 1e-6))

    count = CompileCounterWithBackend("aot_eager")  # functionalised, but without a C++ compiler
    compiled = torch.compile(step, fullgraph=True, backend=count, dynamic=False)
    for shift in range(3):
        rows, lengths = (t["rows"] + shift) % 4, t["slots"] + 1 - shift * (t["slots"] > shift)
        want_k, want_v = t["k"].clone(), t["v"].clone()
        want = step(t["heads"], want_k, want_v, rows, t["slots"], lengths)
        got = compiled(t["heads"], t["k"], t["v"], rows, t["slots"], lengths)
        torch.testing.assert_close(got, want)
        assert torch.equal(t["k"], want_k) and torch.equal(t["v"], want_v)
    assert count.frame_count == 1


@pytest.mark.parametrize("kv_dtype", ["auto", "int4", "int8/int4"])
def test_the_engine_answers_the_same(kv_dtype: KVDType, tmp_path: Path) -> None:
    """Greedy tokens of prompts above and below the budget, every kernel the Triton one."""
    folder = save(make_model("qwen3", head_dim=32), tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (40, 7)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    budget = KVBudget(num_sink=2, num_topk=14, num_recent=16)

    def run(make_runner: MakeRunner) -> list[list[int]]:
        with LLM(folder, budget=budget, selector=SnapKV(observation_len=8), max_rows=2, max_model_len=48,
                 kv_dtype=kv_dtype, make_runner=make_runner, executor="eager", progress=False) as llm:  # fmt: skip
            return [output.token_ids for output in llm.generate(prompts, params)]

    assert run(partial(build_runner, kernels=bind("cpu", "triton"))) == run(build_runner)


def test_products_of_few_tokens_in_a_step(tmp_path: Path) -> None:
    """Prompts and steps of up to 16 tokens, whose products are added in parts, give the logits of plain PyTorch."""
    from snapstream.kernels.triton import dense

    torch.manual_seed(0)
    folder = save(make_model("qwen3", hidden_size=272, intermediate_size=600), tmp_path)
    prompts = [[*range(3, 3 + count)] for count in (3, 16, 17, 5)]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=0)
    found = []
    for kernels in (bind("cpu", "torch"), replace(bind("cpu", "triton"), few_linear=dense.few_linear)):
        with LLM(folder, budget="full", max_rows=4, max_model_len=48, progress=False, executor="eager",
                 dtype="float16", make_runner=partial(build_runner, kernels=kernels)) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params)
        found.append([(entry.logprob, token) for output in outputs
                      for entry, token in zip(output.logprobs or [], output.token_ids, strict=True)])  # fmt: skip
    for (one, token), (other, same) in zip(*found, strict=True):
        assert token == same and abs(one - other) < 0.02


@pytest.mark.parametrize("num_rows", [1, 2, "few"])
def test_launches_of_a_decode_step(num_rows: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, rotation and slot are one kernel per layer. Sums of the residual stream ride on the norms, two per layer
    and one at the end but for the first; with one row both are part of a layer's four products. So are the products of
    few rows of 16-bit numbers.
    """
    from snapstream.kernels.triton import dense
    from snapstream.kernels.triton import rows as rope_write

    calls: Counter[str] = Counter()

    def kind(name: str, arguments: tuple[Any, ...]) -> str:
        is_sum = name == "launch_rms_norm" and arguments[1] is not None  # the residual
        return "add_rms_norm" if is_sum else name.removeprefix("launch_")

    for module, name in (
        (rope_write, "launch_norm_rope_write"), (rope_write, "launch_norm_rope"), (dense, "launch_rms_norm"),
        (dense, "launch_swiglu"), (dense, "launch_one_linear"),
        (dense, "launch_few_linear"),
    ):  # fmt: skip
        kernel = getattr(module, name)
        monkeypatch.setattr(
            module, name,
            lambda *args, name=name, kernel=kernel, **named: (calls.update([kind(name, args)]),
                                                              kernel(*args, **named))[1],
        )  # fmt: skip
    steps: list[Counter[str]] = []
    step = EagerDecode.step

    def counted(self: EagerDecode, *args: Any) -> Any:
        calls.clear()
        found = step(self, *args)
        steps.append(calls.copy())
        return found

    monkeypatch.setattr(EagerDecode, "step", counted)
    folder, kernels = save(make_model("qwen3"), tmp_path), bind("cpu", "triton")
    kernels = replace(kernels, few_linear=dense.few_linear) if num_rows == "few" else kernels
    with LLM(folder, budget=32, selector=SnapKV(observation_len=8), max_rows=2, max_model_len=48, progress=False,
             executor="eager", dtype="bfloat16" if num_rows == "few" else "float32",
             make_runner=partial(build_runner, kernels=kernels)) as llm:  # fmt: skip
        layers = llm.model_config.num_layers
        llm.generate(
            [[5, 6, 7]] * (1 if num_rows == 1 else 2), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        )
    expected = {"norm_rope_write": layers, "rms_norm": 1, "one_linear": 4 * layers + 1}
    if num_rows != 1:
        expected = {"norm_rope_write": layers, "rms_norm": 1, "add_rms_norm": 2 * layers, "swiglu": layers}
    if num_rows == "few":
        expected |= {"few_linear": 4 * layers + 1}
    assert expected in steps
