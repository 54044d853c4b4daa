"""Compiles the looped Triton kernel for GPUs that need not be here and records registers, spills and shared memory.

    python -m benchmarks.compile_looped [--quick] [--arch 80 90] [--save]

As ``benchmarks.compile_kernels`` does for the kernels of single operators, at real models' sizes: the numbers come from
the machine code, nothing runs. The saved result names the source it was made from; a test fails when that has changed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compile_kernels import (
    KERNELS,
    LLAMA_1B,
    LLAMA_8B,
    QWEN_06B,
    Shape,
    compiled,
    recorded,
    resources,
    without_docstrings,
)
from benchmarks.machine import RESULTS
from figures.machine import describe

LAYERS, VOCAB, CAPACITY = 4, 128_256, 8192
DENSE, QUICK = "bf16", ("int4", 32)
CODES = (("int8", 32), QUICK)  # of ``--weights``
LARGE_GROUPS = (("int4", 128),)  # as a checkpoint has them: all layers alike, tables dense
BATCHES = (1, 4, 16)  # both kinds of products
CODE_BATCHES = (1, 16)  # which of codes are these
NUM_PROGRAMS = {80: 108, 90: 132}  # multiprocessors of an A100 and of an H100 or H200
PARTS = KERNELS / "looped"


def sources() -> str:
    """Digest of the kernel and its cut; comments, docstrings and layout are left out."""
    files = [file for file in sorted(PARTS.glob("*.py")) if file.name != "twin.py"]
    text = "\n".join(ast.unparse(without_docstrings(file)) for file in files)
    return sha256(text.encode()).hexdigest()[:16]


def report(arches: list[int], *, quick: bool) -> Iterator[dict[str, Any]]:
    """Per model, batch and architecture: both forms over dense weights, of the largest model also the ring's variants;
    at a batch of 1 also a layer alone and without loads ahead; and the form without a ring over codes, of fewer models,
    because its loops are long.
    """
    shapes = (LLAMA_1B,) if quick else (QWEN_06B, LLAMA_1B, LLAMA_8B)
    for shape in shapes:
        for batch in BATCHES[::2] if quick else BATCHES:
            for arch in arches:
                for weights, name, looped, is_whole in _forms(shape, batch, NUM_PROGRAMS[arch], quick=quick):
                    (made,) = recorded(_launcher(looped, batch, is_whole=is_whole))
                    made.options.pop("launch_cooperative_grid", None)
                    cut, kernel = looped.launch, compiled(made, arch)
                    yield {
                        "form": name, "shape": shape.name, "weights": weights, "batch": batch, "dtype": "bf16",
                        "arch": f"sm_{arch}", "block_rows": cut.block_rows, "block_cols": cut.block_cols,
                        "stages": cut.stages, **of_machine_code(kernel), **resources(kernel),
                    }  # fmt: skip


def _forms(shape: Shape, batch: int, num_programs: int, *, quick: bool) -> Iterator[tuple[str, str, Any, bool]]:
    """Weights and form by name, the form, and whether it is launched for the whole step."""
    from snapstream.kernels.triton.looped.launch import Looped, ring_variants

    model, keys = _model(shape), _rows(shape, batch)
    looped = _first_form(model, keys, batch, num_programs)
    yield DENSE, "looped", looped, True
    for name, launch in ring_variants(model, num_programs, batch).items():
        if name == "ring" or (shape == LLAMA_8B and not quick):
            yield DENSE, name, Looped(model, keys, keys, batch, launch), True
    if batch == 1 and not quick:
        yield DENSE, "a call per layer", looped, False
        yield DENSE, "no loads ahead", looped.without_loads_ahead(), True
    if batch not in CODE_BATCHES or (shape == LLAMA_1B and not quick):
        return
    for width, group in (QUICK,) if quick else CODES + LARGE_GROUPS * (shape == LLAMA_8B):
        looped = _first_form(_in_codes(model, width, group), keys, batch, num_programs)
        yield f"{width} in groups of {group}", "looped", looped, True


def _first_form(model: Any, keys: Tensor, batch: int, num_programs: int) -> Any:
    from snapstream.kernels.triton.looped.launch import Looped, register_launch

    return Looped(model, keys, keys, batch, register_launch(model, num_programs, batch))


def of_machine_code(kernel: Any) -> dict[str, Any]:
    """What the order of instructions shows.

    ``barriers_with_loads``: barriers at which weights are on their way between the arrival and the first look at the
    counter: loads that are evicted first, or asynchronous copies, stand between the reduction and the next strong load.
    ``copies_left``: how many groups of asynchronous copies each wait for copies leaves under way, in order.
    """
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", text)
    kept = [name for name in names if name.startswith(("RED", "LDG"))]
    count, is_open, has_loads = 0, False, False
    for name in kept:
        if name.startswith("RED"):
            is_open, has_loads = True, False
        elif "STRONG" in name:
            count += is_open and has_loads
            is_open = False
        elif ".EF" in name or name.startswith("LDGSTS"):
            has_loads = True
    left = [int(number, 16) for number in re.findall(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)", text)]
    copies = [name for name in names if name.startswith("LDGSTS")]
    return {"barriers_with_loads": count, "copies_left": left, "copies": sorted(set(copies))}


def _launcher(looped: Any, batch: int, *, is_whole: bool) -> Callable[[], object]:
    """A launch of the whole step, or of one layer in its midst."""
    from snapstream.kernels.rows import RowPlaces

    index = _empty(batch, kind=torch.int64)
    angles = (_empty(batch, 1, looped.model.head_dim, kind=torch.float32),) * 2
    layers = range(looped.model.num_layers) if is_whole else range(1, 2)
    places = RowPlaces(index, index, index)
    return lambda: looped.run_part(index, places, angles, layers, begins=is_whole, ends=is_whole)


def _empty(*size: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*size, dtype=kind, device="meta")


def _rows(shape: Shape, batch: int) -> Tensor:
    return _empty(LAYERS, batch + 1, shape.num_kv_heads, CAPACITY, shape.head_dim)


def _model(shape: Shape) -> Any:
    """A model of this shape without data."""
    from snapstream.kernels.triton.looped.launch import LoopedModel

    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    wide = shape.num_heads * dim
    embed, head_norm = _empty(VOCAB, hidden), _empty(LAYERS, dim) if shape.has_norm else None
    return LoopedModel(
        num_layers=LAYERS, hidden_size=hidden, inner_size=inner, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=dim, eps=1e-5, embed=embed, head=embed,
        qkv=_empty(LAYERS, wide + 2 * shape.num_kv_heads * dim, hidden), o=_empty(LAYERS, hidden, wide),
        gate_up=_empty(LAYERS, 2 * inner, hidden), down=_empty(LAYERS, hidden, inner),
        input_norm=_empty(LAYERS, hidden), post_norm=_empty(LAYERS, hidden), final_norm=_empty(hidden),
        q_norm=head_norm, k_norm=head_norm,
    )  # fmt: skip


def _in_codes(model: Any, width: str, group: int) -> Any:
    """The same with weights of int8 or int4. In groups of 32 attention and tables are int8, as start-up has them; in
    larger ones as checkpoints do: all layers alike, and dense tables.
    """
    from snapstream.kernels.triton.looped.launch import Codes

    def codes(bits: int, *roles: str) -> dict[str, Codes]:
        shapes = {role: getattr(model, role).shape for role in roles}
        return {
            role: Codes(_empty(*lead, cols * bits // 8, kind=torch.uint8),
                        _empty(*lead, cols // group, kind=torch.float16), bits)
            for role, (*lead, cols) in shapes.items()
        }  # fmt: skip

    bits, attention, mlp = 4 if width == "int4" else 8, ("qkv", "o"), ("gate_up", "down")
    if group == 32:
        return replace(model, **codes(8, *attention, "embed", "head"), **codes(bits, *mlp))
    return replace(model, **codes(bits, *attention, *mlp))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one model, the whole step only")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, e.g. 80 90")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/compile/<date>_looped.json")
    args = parser.parse_args()
    import triton

    if triton.knobs.runtime.interpret:
        sys.exit("error: TRITON_INTERPRET is set; interpreted kernels cannot be compiled")
    entries = []
    for entry in report(args.arch, quick=args.quick):
        entries.append(entry)
        print(
            "{form:18} {shape:13} {weights:21} batch {batch:2} {arch}: tiles {block_rows} x {block_cols}, "
            "{registers:3} registers, {spill_bytes} bytes spilled, {shared_bytes} shared, "
            "loads at {barriers_with_loads} barriers".format(**entry), file=sys.stderr, flush=True)  # fmt: skip
    result = {"name": "looped_compile", **describe(), "triton": triton.__version__, "sources": sources(),
              "kernels": entries}  # fmt: skip
    if args.save:
        folder = RESULTS / "compile"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result['date']}_looped.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
