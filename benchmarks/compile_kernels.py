"""Compiles every Triton kernel for GPUs that need not be here and records registers, spills and shared memory.

    python -m benchmarks.compile_kernels [--quick] [--arch 80 90] [--save]

The launchers run on tensors without data while their launches are recorded, so what is compiled is what would run:
same tiles, same specialisation. Numbers come from the machine code (``cuobjdump --dump-resource-usage`` of the copy
that ships with Triton): ``spill_bytes`` is the local memory of a thread, which these kernels use for nothing else. The
saved result names the source it was made from; a test fails when a kernel or its cut has changed since.
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
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.machine import RESULTS
from figures.machine import describe
from snapstream.config import KVDType
from snapstream.config.values import row_formats
from snapstream.config.weights import GROUPS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = Path(__file__).parents[1] / "snapstream" / "kernels" / "triton"
COMMON_DIMS = (64, 128)  # of heads: where a spill or more than ``MOST_REGISTERS`` calls for another cut
MOST_REGISTERS = 200
SHARED_OF_AN_A100 = 166_912  # bytes of a program
PREFILL_90 = "prefill_attention, sm_90"  # tiles that only Hopper's shared memory holds
FP8_ARCH = 89  # from here on a GPU converts e4m3, which Triton calls fp8e4nv; start-up refuses older ones
_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64",
          torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8",
          torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}  # fmt: skip
NUM_OUT, NUM_IN = 4096, 4096  # o of Llama-3.1-8B
NARROW_OUT = 2048  # of Llama-3.2-1B: programs take fewer rows


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a model decides how its kernels are compiled."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    has_norm: bool = False
    rank: int = 0  # of models that keep latents: numbers that are values too, of head_dim in all
    num_experts: int = 0
    expert_size: int = 0  # inner size of an expert


LLAMA_8B = Shape(
    name="Llama-3.1-8B", num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, intermediate_size=14336
)
LLAMA_1B = Shape(
    name="Llama-3.2-1B", num_heads=32, num_kv_heads=8, head_dim=64, hidden_size=2048, intermediate_size=8192
)
QWEN_06B = Shape(
    name="Qwen3-0.6B", num_heads=16, num_kv_heads=8, head_dim=128, hidden_size=1024, intermediate_size=3072,
    has_norm=True,
)  # fmt: skip
QWEN_30B = Shape(
    name="Qwen3-30B-A3B", num_heads=32, num_kv_heads=4, head_dim=128, hidden_size=2048, intermediate_size=6144,
    has_norm=True, num_experts=128, expert_size=768,
)  # fmt: skip
MODELS = [LLAMA_8B, LLAMA_1B, QWEN_06B, QWEN_30B]
DEEPSEEK_V3 = Shape(
    name="DeepSeek-V3", num_heads=128, num_kv_heads=1, head_dim=576, hidden_size=7168, intermediate_size=18432,
    rank=512, num_experts=256, expert_size=2048,
)  # fmt: skip
DEEPSEEK_LITE = Shape(
    name="DeepSeek-V2-Lite", num_heads=16, num_kv_heads=1, head_dim=576, hidden_size=2048, intermediate_size=10944,
    rank=512,
)  # fmt: skip
LATENTS = [DEEPSEEK_V3, DEEPSEEK_LITE]
OTHER_DIMS = [
    Shape(name=f"E={dim}", num_heads=8, num_kv_heads=8, head_dim=dim, hidden_size=8 * dim, intermediate_size=16 * dim)
    for dim in (80, 96, 192, 256)
]


def sources() -> str:
    """Digest of kernels and cuts; comments, docstrings and layout are left out."""
    text = "\n".join(ast.unparse(without_docstrings(file)) for file in sorted(KERNELS.glob("*.py")))
    return sha256(text.encode()).hexdigest()[:16]


def without_docstrings(file: Path) -> ast.Module:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel and its arguments by name."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


def recorded(launcher: Callable[[], object]) -> list[Launch]:
    """The launches that ``launcher`` makes; nothing runs."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        arguments |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        launches.append(Launch(kernel, arguments, options))

    with mock.patch.object(JITFunction, "run", record):
        launcher()
    return launches


def compiled(launch: Launch, arch: int) -> Any:
    """The kernel for ``sm_<arch>``, specialised as Triton would on a launch with aligned tensors."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.name == "EARLY":  # a launch without a GPU says no
            value = arch >= 90
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", arch, 32)
    device = SimpleNamespace(get_current_target=lambda: target)
    with mock.patch.object(type(triton.runtime.driver), "active", device):
        launch.kernel.create_binder()  # from here on the kernel knows whether its source is Triton or Gluon
    source = launch.kernel.ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=launch.options)


def resources(kernel: Any) -> dict[str, int]:
    """Registers and spilled bytes of a thread, shared memory of a program in bytes, warps."""
    import triton

    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text.stdout))
    return {
        "registers": int(found["REG"]),
        "spill_bytes": int(found["STACK"]) + int(found["LOCAL"]),
        "shared_bytes": int(kernel.metadata.shared),
        "num_warps": int(kernel.metadata.num_warps),
        "num_stages": int(kernel.metadata.num_stages),
    }


def launchers(
    shape: Shape, dtype: torch.dtype, capacity: int, *, is_fp8: bool = False
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every launch of a model on tensors without data; with ``is_fp8`` those that touch rows or experts in FP8."""
    from snapstream.kernels.rows import HeadNorm, LayerRows
    from snapstream.kernels.triton import (
        attention,
        configs,
        dense,
        latent_attention,
        prefill,
        products,
        rows,
        scores,
    )

    def empty(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*size, dtype=kind, device="meta")

    batch, heads, groups, dim = 8, shape.num_heads, shape.num_kv_heads, shape.head_dim
    prompt = 131072
    index = empty(batch, kind=torch.int64)
    stored = torch.float8_e4m3fn if is_fp8 else dtype
    scales = empty(1, 9, groups, kind=torch.float32) if is_fp8 else None
    stack = empty(1, 9, groups, capacity, dim, kind=stored)
    cache = LayerRows(stack, stack, 0, scales, scales)
    staged = empty(groups, prompt, dim)
    kept = empty(groups, capacity, kind=torch.int64)
    q = empty(batch, heads, dim)
    if shape.num_experts:
        chosen, ends = empty(batch * 8, shape.hidden_size), empty(shape.num_experts, kind=torch.int32)
        matrices = empty(shape.num_experts, 2 * shape.expert_size, shape.hidden_size, kind=stored)
        blocks = [-(-size // 128) for size in matrices.shape[1:]]
        of_blocks = empty(shape.num_experts, *blocks, kind=torch.float32) if is_fp8 else None
        yield "experts", lambda: products.launch_grouped_linear(chosen, matrices, of_blocks, ends)
    if shape.rank:
        of_rows = None if scales is None else scales[0]
        yield (
            "latent_attention",
            lambda: latent_attention.launch_latent_attention(q, cache.k, shape.rank, index, index, scales=of_rows),
        )
        yield "gather_rows", lambda: rows.gather_rows(cache, [0], staged, staged, kept)
        return
    yield "decode_attention", lambda: attention.decode_attention(q, cache, index, index)
    angles = (empty(batch, 1, dim, kind=torch.float32),) * 2
    head_norm = HeadNorm(empty(heads + groups, dim) if shape.has_norm else None, 1e-6)
    projected = empty(batch, heads + 2 * groups, dim)
    yield (
        "norm_rope_write",
        lambda: rows.norm_rope_write(projected, head_norm, angles, cache, index, index),
    )
    yield "gather_rows", lambda: rows.gather_rows(cache, [0], staged, staged, kept)
    if is_fp8:
        return
    yield "norm_rope", lambda: rows.norm_rope(projected, head_norm, angles, groups)
    hidden, weight = empty(batch, shape.hidden_size), empty(shape.hidden_size)
    yield "rms_norm", lambda: dense.launch_rms_norm(hidden, None, weight, 1e-6)
    yield "add_rms_norm", lambda: dense.launch_rms_norm(hidden, hidden, weight, 1e-6)
    wide = empty(2 * shape.intermediate_size, shape.hidden_size)
    yield "one_linear", lambda: dense.launch_one_linear(hidden[:1], (weight, 1e-6), wide, None, gated=True)
    yield (
        "add_one_linear",
        lambda: dense.launch_one_linear(
            empty(1, shape.intermediate_size), None, empty(shape.hidden_size, shape.intermediate_size), None, hidden[:1]
        ),
    )
    if dtype != torch.float32:
        yield "few_linear", lambda: dense.few_linear(hidden, wide, None, in_parts=False)
        parts = empty(4, batch, shape.hidden_size, kind=torch.float32)
        yield "few_linear", lambda: dense.few_linear(hidden, wide, None, in_parts=True)
        yield "add_rms_norm", lambda: dense.launch_rms_norm(parts, hidden, weight, 1e-6)
        chunk = empty(2048, heads, dim)
        small = configs.prefill_launch(dim, 2, SHARED_OF_AN_A100)
        yield PREFILL_90, lambda: prefill.prefill_attention(chunk, staged, staged)
        yield PREFILL_90, lambda: prefill.prefill_attention(chunk, staged, staged, window=4096)
        yield "prefill_attention", lambda: prefill.prefill_attention(chunk, staged, staged, launch=small)
    yield "swiglu", lambda: dense.swiglu(empty(batch, 2 * shape.intermediate_size))
    yield (
        "snapkv_scores",
        lambda: scores.snapkv_scores(
            empty(32, heads, dim), staged, prompt - 32, 4, prompt - 2048, over_row=False, group_max=False
        ),
    )


# By model: channels and taps of the convolution; kind, heads and sizes of keys and values of the recurrence, if any.
RECURRENT: dict[str, tuple[int, int, tuple[str, int, int, int, int] | None]] = {
    "LFM2-1.2B": (2048, 3, None),
    "Qwen3-Next-80B": (8192, 4, ("delta", 16, 32, 128, 128)),
    "Kimi-Linear-48B": (12288, 4, ("kda", 32, 32, 128, 128)),
    "Granite-4.0-H-tiny": (3328, 4, ("mamba", 1, 48, 128, 64)),
}


def recurrent_launchers(dtype: torch.dtype) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """The decode steps of recurrent layers, each with its model and operator."""
    from snapstream.kernels.triton import recurrence

    def empty(*size: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, dtype=kind, device="meta")

    rows = empty(8, kind=torch.int64)
    for model, (channels, taps, memory) in RECURRENT.items():
        x, state, weights = empty(8, channels, kind=dtype), empty(9, taps - 1, channels), empty(taps, channels)
        bias = weights[0] if memory is None or memory[0] == "mamba" else None
        yield (
            model,
            "conv_step",
            partial(recurrence.conv_step, x, state, rows, weights, bias, memory is not None),
        )
        if memory is not None:
            kind, groups, heads, key, value = memory
            num_gates = {"delta": 2 * heads, "kda": heads + heads * key, "mamba": heads}[kind]
            gates, step = empty(8, num_gates, kind=dtype), empty(heads * key if kind == "kda" else heads)
            skip = empty(heads) if kind == "mamba" else None
            mixed, states = empty(8, 2 * groups * key + heads * value, kind=dtype), empty(9, heads, key, value)
            yield (
                model, "memory_step",
                partial(recurrence.memory_step, mixed, gates, states, rows, empty(heads), step, skip),
            )  # fmt: skip


def integer_rows(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Kv dtype, operator and launch of what touches rows of int8 and int4."""
    from snapstream.kernels.formats import ENCODINGS
    from snapstream.kernels.rows import LayerRows
    from snapstream.kernels.triton import attention, rows

    batch, groups, dim, capacity = 8, shape.num_kv_heads, shape.head_dim, 32768

    def empty(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*size, dtype=kind, device="meta")

    def made(kv_dtype: KVDType) -> LayerRows:
        formats = [ENCODINGS[form.name] for form in row_formats("float32", kv_dtype)]
        keys, values = (empty(1, 9, groups, capacity, own.width(dim), kind=own.dtype) for own in formats)
        k_scale, v_scale = (
            empty(1, 9, groups, capacity, kind=torch.float32) if own.format.scales else None for own in formats
        )
        return LayerRows(keys, values, 0, k_scale, v_scale)

    index, tokens = empty(batch, kind=torch.int64), empty(batch, groups, dim)
    q = empty(batch, shape.num_heads, dim)
    kinds: tuple[KVDType, ...] = ("int8", "int4", "int8/int4")
    for kv_dtype in kinds:
        cache = made(kv_dtype)
        yield kv_dtype, "decode_attention", partial(attention.decode_attention, q, cache, index, index)
        yield kv_dtype, "store_codes", partial(rows.store_codes, tokens, tokens, cache, index, index)


def code_launchers(dtype: torch.dtype, groups: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Both widths, every tile of tokens, and the sizes of groups, each with what it is."""
    from snapstream.kernels.triton import configs, products

    def empty(*size: int, kind: torch.dtype) -> Tensor:
        return torch.empty(*size, dtype=kind, device="meta")

    def launcher(num_tokens: int, num_out: int, bits: int, group: int) -> Callable[[], object]:
        x, stored = empty(num_tokens, NUM_IN, kind=dtype), empty(num_out, NUM_IN * bits // 8, kind=torch.uint8)
        scales = empty(num_out, NUM_IN // group, kind=torch.float16)
        return lambda: products.code_linear(x, stored, scales, None)

    tiles = configs.CODE_TOKENS[:1] if dtype == torch.float32 else configs.CODE_TOKENS
    for group in groups:
        for bits in (8, 4):
            for tokens in tiles:
                yield f"int{bits} in groups of {group}, {tokens} tokens", launcher(tokens, NUM_OUT, bits, group)
            yield f"int{bits} in groups of {group}, narrow", launcher(1, NARROW_OUT, bits, group)


def report(arches: list[int], *, quick: bool) -> Iterator[dict[str, Any]]:
    """One entry per kernel, shape, dtype and architecture; ``quick`` is bf16 with heads of the common sizes."""
    cases = (
        [(LLAMA_1B, "bf16"), (QWEN_30B, "bf16")]
        if quick
        else [(s, d) for s in [*MODELS, *LATENTS, *OTHER_DIMS] for d in DTYPES]
    )
    for shape, dtype, is_fp8 in ((shape, dtype, is_fp8) for shape, dtype in cases for is_fp8 in (False, True)):
        for op, launcher in launchers(shape, DTYPES[dtype], capacity=32768, is_fp8=is_fp8):
            for launch in recorded(launcher):
                least = 90 if op == PREFILL_90 else FP8_ARCH if is_fp8 else 0
                for arch in (arch for arch in arches if arch >= least):
                    yield {
                        "op": op,
                        "kernel": launch.kernel.__name__,
                        "shape": shape.name,
                        "head_dim": shape.head_dim,
                        "dtype": dtype,
                        "rows": "fp8" if is_fp8 else dtype,
                        "arch": f"sm_{arch}",
                        **resources(compiled(launch, arch)),
                    }
    for shape, dtype in cases:
        if shape.rank or shape.head_dim % 32 or (dtype == "fp32" and shape.head_dim > 128):  # those would spill
            continue
        for kv_dtype, op, launcher in integer_rows(shape, DTYPES[dtype]):
            for launch, arch in ((launch, arch) for launch in recorded(launcher) for arch in arches):
                yield {"op": op, "kernel": launch.kernel.__name__, "shape": shape.name, "head_dim": shape.head_dim,
                       "dtype": dtype, "rows": kv_dtype, "arch": f"sm_{arch}",
                       **resources(compiled(launch, arch))}  # fmt: skip
    for dtype in ("bf16",) if quick else DTYPES:
        for name, op, launcher in recurrent_launchers(DTYPES[dtype]):
            (launch,) = recorded(launcher)
            for arch in arches:
                yield {"op": op, "kernel": launch.kernel.__name__, "shape": name, "head_dim": 0, "dtype": dtype,
                       "rows": "fp32", "arch": f"sm_{arch}", **resources(compiled(launch, arch))}  # fmt: skip
        for weights, launcher in code_launchers(DTYPES[dtype], (32,) if quick else GROUPS):
            (launch,) = recorded(launcher)
            for arch in arches:
                yield {"op": "code_linear", "kernel": launch.kernel.__name__, "shape": "4096 numbers", "head_dim": 0,
                       "dtype": dtype, "rows": weights, "arch": f"sm_{arch}",
                       **resources(compiled(launch, arch))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="bf16 and heads of the common sizes only")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, e.g. 80 90")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/compile/<date>_triton.json")
    args = parser.parse_args()
    import triton

    if triton.knobs.runtime.interpret:
        sys.exit("error: TRITON_INTERPRET is set; interpreted kernels cannot be compiled")
    entries = []
    for entry in report(args.arch, quick=args.quick):
        entries.append(entry)
        print("{kernel:22} {shape:18} {dtype} rows {rows} {arch}: {registers:3} registers, "
              "{spill_bytes} bytes spilled, {shared_bytes} shared, {num_warps} warps".format(**entry),
              file=sys.stderr, flush=True)  # fmt: skip
    result = {
        "name": "triton_compile",
        **describe(),
        "triton": triton.__version__,
        "sources": sources(),
        "kernels": entries,
    }
    if args.save:
        folder = RESULTS / "compile"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result['date']}_triton.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
