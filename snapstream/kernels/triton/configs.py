"""How each kernel is cut: tile sizes, warps, pipeline depth and splits, chosen by shape from stated tables. No Triton.

Invariant: a choice looks at head dimension, dtype, capacity and head counts, which are constant for an engine, never
at the batch or at its contents. Equal rows therefore sum in an equal order in any bucket, and a captured graph never
meets a kernel that is not compiled. ``code_launch`` alone looks at the number of tokens: its kernels sum in one order,
and a start launches all of them.

The reasoning, to be replaced by measurement (``benchmarks/kernels.py --device cuda`` prints the best of a grid): an
H200 reads 4.8 TB/s with 132 multiprocessors, 36 bytes per nanosecond each; at a latency of about 0.8 us a
multiprocessor needs some 30 KB in flight. Decode tiles of K and V are 16 KB each; with ``num_stages`` of 3 two pairs
are in flight per program (64 KB) and 96 KB of shared memory let two programs share a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

_TILE_BYTES = 16 * 1024  # of K, and as much of V, per step of the decode loop
_TARGET_PROGRAMS = 264  # two for each of 132 multiprocessors, at a batch of one
_LEAST_PROGRAMS = 128  # of a product with codes: about one for each multiprocessor
_MAX_SPLITS = 64
_LEAST_SPLIT = 128  # slots; below this the partial results weigh more than 1/16 of what a split reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The cut of one compiled kernel."""

    block: int  # tokens or slots of one tile
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch(Launch):
    """How a row is cut for decode attention."""

    num_splits: int
    split_slots: int  # a multiple of ``block``


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLaunch(Launch):
    """How products with a matrix per expert are cut: ``block`` numbers along the input at a time."""

    rows: int  # tokens of one expert per program
    columns: int  # rows of its matrix; like ``block`` a part of the 128 that share a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLaunch(Launch):
    """How a product with codes is cut: ``block`` groups of a row at a time, which alone orders its sums."""

    tokens: int  # per program
    rows: int  # of the matrix, per program


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunch(Launch):
    """How a chunk of a prompt is cut: ``block`` keys at a time."""

    queries: int  # of one head per program


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLaunch(Launch):
    """How a product of one token is cut: ``block`` columns of a row at a time."""

    rows: int  # of the matrix, per program


@dataclass(frozen=True, slots=True, kw_only=True)
class FewLaunch(Launch):
    """How a product of few tokens is cut: ``block`` columns at a time, ``num_stages`` of them in flight."""

    rows: int  # of the matrix, per program
    num_splits: int
    split_len: int  # columns of a split, a multiple of ``block``


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLaunch(Launch):
    """How the SnapKV scores are cut: ``block`` keys per tile in both passes; warps and stages of the first."""

    rows: int  # pass 1: most (head, query) pairs per program
    window_block: int  # pass 2: most observation queries per product


def power_of_two(size: int, least: int = 1) -> int:
    """Smallest power of two >= ``size`` and >= ``least``."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def decode_launch(
    head_dim: int, dtype_bytes: float, capacity: int, num_kv_heads: int, query_bytes: int | None = None
) -> DecodeLaunch:
    """Decode attention: K tiles of 16 KB. ``dtype_bytes`` are those of a number of the cache, of int4 half a byte,
    ``query_bytes`` those of q.
    """
    if (query_bytes or dtype_bytes) == 4:  # no tensor cores at full precision: small tiles, or the products spill
        # FP8 rows widen in registers: a second tile in flight would not fit there
        num_stages = 1 if dtype_bytes <= 1 else 2
        num_warps = 8 if dtype_bytes < 1 or head_dim > 192 else 4  # four spill codes, or the accumulator of a head
        launch = Launch(block=32 if head_dim <= 64 else 16, num_warps=num_warps, num_stages=num_stages)
    elif dtype_bytes <= 1:
        # A tile of bytes is widened in registers: 16 KB of them would take 170 to 250 per thread. 8 KB and one stage
        # more keep as much in flight (three pairs, 48 KB) in 96 to 180.
        slots = _TILE_BYTES // 2 // power_of_two(head_dim, 16)
        most = 32 if dtype_bytes < 1 else 64  # unpacked, a tile of int4 takes twice the registers
        launch = Launch(block=min(max(slots, 16), most), num_warps=4, num_stages=4)
    else:
        slots = _TILE_BYTES // (power_of_two(head_dim, 16) * int(dtype_bytes))
        launch = Launch(block=min(max(slots, 16), 128), num_warps=4, num_stages=3)
    return split_row(launch, capacity, num_kv_heads)


LATENT_HEADS = 16  # per program: they accumulate their numbers in registers, 32 KB for DeepSeek's 512


def latent_launch(query_bytes: int, row_bytes: int, capacity: int, num_heads: int) -> DecodeLaunch:
    """Attention of ``LATENT_HEADS`` query heads at a time over a row of latents."""
    if query_bytes == 4:  # no tensor cores at full precision: the least tiles
        launch = Launch(block=16, num_warps=8, num_stages=1)
    else:  # FP8 widens in registers, of which four warps have too few
        launch = Launch(block=32, num_warps=8 if row_bytes == 1 else 4, num_stages=2)
    return split_row(launch, capacity, -(-num_heads // LATENT_HEADS))


def split_row(
    launch: Launch, capacity: int, num_kv_heads: int, target_programs: int = _TARGET_PROGRAMS
) -> DecodeLaunch:
    """Splits of equal length, so many that a single row makes ``target_programs`` if it is long enough."""
    wanted = min(-(-target_programs // num_kv_heads), _MAX_SPLITS)
    slots = max(-(-capacity // wanted), _LEAST_SPLIT)
    slots = -(-slots // launch.block) * launch.block
    return DecodeLaunch(
        block=launch.block,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        num_splits=-(-capacity // slots),
        split_slots=slots,
    )


def score_launch(head_dim: int, dtype_bytes: int) -> ScoreLaunch:
    """Both passes of the SnapKV scores: 64 keys against up to 128 queries."""
    if dtype_bytes == 4:
        # Four warps would hold the products of heads of 128 in all 255 registers; eight need 44.
        return ScoreLaunch(block=16, num_warps=8, rows=32 if head_dim <= 128 else 16, window_block=16)
    block = 64 if head_dim <= 128 else 32
    return ScoreLaunch(block=block, num_warps=8, num_stages=2, rows=128, window_block=64)


def grouped_launch(dtype_bytes: int) -> GroupedLaunch:
    """One cut for few tokens and many: 16 tokens are the least of a product on tensor cores, 32 let long prompts read
    an expert's matrix half as often. Up to four steps of 8 KB of bf16 weights and 4 KB of tokens are in flight.
    """
    if dtype_bytes == 4:
        return GroupedLaunch(block=32, rows=16, columns=32, num_warps=4, num_stages=2)
    return GroupedLaunch(block=64, rows=32, columns=64, num_warps=4, num_stages=4)


CODE_TOKENS = (16, 32, 64)  # tokens of one program; the first is the least of tensor cores


def code_launch(num_tokens: int, num_out: int, group: int, dtype_bytes: int) -> CodeLaunch:
    """Products with codes: 256 numbers of a row or more at a time, one group or two per warp.

    This cut does look at the batch: tiles of 16, 32 and 64 tokens are three kernels with one order of sums, for which
    they must deal groups to warps alike. A program takes 32 rows, or 16 of a matrix so narrow that there would not be
    a program for each multiprocessor. Up to three steps of 2 to 16 KB are in flight.
    """
    tokens = next((size for size in CODE_TOKENS if num_tokens <= size), CODE_TOKENS[-1])
    groups = 8 if group == 32 else 4
    if dtype_bytes == 4:  # no tensor cores at full precision
        return CodeLaunch(block=groups, tokens=16, rows=16, num_warps=4)
    is_wide = group == 32 and tokens < CODE_TOKENS[-1]  # sums of more would not stay in registers
    rows = 32 if is_wide and -(-num_out // 32) >= _LEAST_PROGRAMS else 16
    return CodeLaunch(block=groups, tokens=tokens, rows=rows, num_warps=4, num_stages={16: 4, 32: 3, 64: 2}[tokens])


def prefill_launch(head_dim: int, dtype_bytes: int, shared_bytes: int) -> PrefillLaunch:
    """Prefill attention: the largest tiles that fit into ``shared_bytes`` of a program. On an H200 the first of each
    list is the fastest of seven for heads of 128 (502 TFLOP/s behind 32k keys) and of five for heads of 64 (413).
    """
    if dtype_bytes == 4:  # no tensor cores at full precision
        return PrefillLaunch(block=16, queries=32, num_warps=4, num_stages=1)
    size = power_of_two(head_dim, 16)
    cuts = [(128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2)]  # queries, keys, warps, stages
    if size != 128:
        cuts = [(128, 64, 8, 3 if size < 128 else 2), (64, 32, 8, 2)]
    for queries, block, warps, stages in cuts:
        cut = PrefillLaunch(block=block, queries=queries, num_warps=warps, num_stages=stages)
        if dtype_bytes * size * (queries + 2 * block * stages) <= shared_bytes:
            return cut
    return cut


def one_launch(num_in: int) -> OneLaunch:
    """Products of one token: 64 numbers of the matrix per thread, whole rows where they are not too long. Measured on
    an H200 (bf16, matrices of 1,024 to 14,336 columns): the best of fifteen cuts, or within a tenth of it.
    """
    block = power_of_two(num_in, 128) if num_in <= 4096 else 2048
    return OneLaunch(block=block, rows=min(8192 // block, 16), num_warps=4)


FEW_TOKENS = 16  # the least of tensor cores


def few_launch(num_out: int, num_in: int, *, in_parts: bool) -> FewLaunch:
    """Products of 2 to 16 tokens: 64 rows per program, the least that Hopper's products of whole warpgroups take; in
    parts, so many splits of 256 columns or more that there are two programs for each multiprocessor, but at most eight,
    which the next kernel adds up. On an H100 near the best of fifteen cuts, for narrow matrices up to a fifth behind.
    """
    tiles, block = -(-num_out // 64), 128
    splits = max(min(_TARGET_PROGRAMS // tiles, num_in // (2 * block), 8), 1) if in_parts else 1
    split_len = -(-num_in // (splits * block)) * block
    return FewLaunch(
        block=block, rows=64, num_splits=-(-num_in // split_len), split_len=split_len, num_warps=4, num_stages=4
    )


def memory_launch(key_dim: int, value_dim: int) -> Launch:
    """Steps of recurrent layers: 16 KB of a head's fp32 state, a run of its values for all elements of its key."""
    block = max(_TILE_BYTES // 4 // power_of_two(key_dim), 8)
    return Launch(block=min(block, power_of_two(value_dim, 8)), num_warps=4)


SCORE_SPLIT = 2048  # keys per program of the first pass; a constant, so that N alone fixes the order of the sums


def norm_warps(size: int) -> int:
    """RMSNorm: a row per program, about 16 elements per thread."""
    return min(max(power_of_two(size) // 512, 1), 16)
