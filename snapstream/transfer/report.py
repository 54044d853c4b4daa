"""The report of a prefill as JSON, and back: what the answering engine tells its caller beside the tokens.

Invariant: a report from a peer is read field by field into plain values, or refused; how long it may be follows from
what the request asked for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from snapstream.config import KVBudget
from snapstream.request import Compression, KeptBitmap, Logprob, PrefixUse, Request
from snapstream.step import PrefillReport
from snapstream.transfer.wire import WireError, is_count, read_json

_FIXED_BYTES = 4096
_NUMBER_BYTES = 32  # of a number, or of a pair of them, as JSON
_PLAIN = [
    field.name for field in fields(Compression) if not field.name.startswith("kept_") or field.name[5:] == "tokens"
]


def max_report_bytes(request: Request, budget: KVBudget, num_layers: int, num_kv_heads: int) -> int:
    """Bytes of the longest report on a request."""
    sampling, prompt_len = request.sampling, len(request.prompt_token_ids)
    heads, most = num_layers * num_kv_heads, _FIXED_BYTES
    if sampling.return_kept == "bitmap":
        most += 2 * heads * -(-prompt_len // 8)
    elif sampling.return_kept:
        most += _NUMBER_BYTES * heads * (budget.num_topk + 1)
    if sampling.prompt_logprobs is not None:
        most += 2 * _NUMBER_BYTES * prompt_len * (2 + sampling.prompt_logprobs)
    return most


def report_to_bytes(report: PrefillReport) -> bytes:
    compression = report.compression
    told: dict[str, Any] = {name: getattr(compression, name) for name in _PLAIN}
    if compression.kept_positions is not None:
        told["kept_positions"] = compression.kept_positions
    if compression.kept_bitmap is not None:
        told["kept_bitmap"] = asdict(compression.kept_bitmap) | {"bits": compression.kept_bitmap.bits.hex()}
    logprobs = report.prompt_logprobs
    return json.dumps(
        {
            "compression": told,
            "prompt_logprobs": None
            if logprobs is None
            else [None if one is None else [one.token_id, one.logprob, one.top] for one in logprobs],
            "prefix": None if report.prefix is None else asdict(report.prefix),
        }
    ).encode()


def report_from_bytes(data: bytes | bytearray) -> PrefillReport:
    """WireError for anything that ``report_to_bytes`` does not write."""
    told = read_json(data, "report")
    try:
        prefix = told["prefix"]
        return PrefillReport(
            compression=_compression(told["compression"]),
            prompt_logprobs=None
            if told["prompt_logprobs"] is None
            else [_logprob(one) for one in told["prompt_logprobs"]],
            prefix=None
            if prefix is None
            else PrefixUse(_count(prefix["cached_tokens"]), _maybe(prefix["diverged_at"])),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise WireError(f"the report is not one: {type(error).__name__}: {str(error)[:200]}") from None


def _compression(told: dict[str, Any]) -> Compression:
    positions, bitmap = told.get("kept_positions"), told.get("kept_bitmap")
    counts = {name: _count(told[name]) for name in _PLAIN if name != "compress_ms"}
    return Compression(
        **counts,
        compress_ms=float(told["compress_ms"]),
        kept_positions=None
        if positions is None
        else tuple(tuple(tuple(map(_count, head)) for head in layer) for layer in positions),
        kept_bitmap=None
        if bitmap is None
        else KeptBitmap(
            num_layers=_count(bitmap["num_layers"]),
            num_kv_heads=_count(bitmap["num_kv_heads"]),
            num_tokens=_count(bitmap["num_tokens"]),
            bits=bytes.fromhex(bitmap["bits"]),
        ),
    )


def _logprob(told: Any) -> Logprob | None:
    if told is None:
        return None
    token, logprob, top = told
    return Logprob(_count(token), float(logprob), tuple((_count(one), float(own)) for one, own in top))


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r} is no count")
    return int(value)


def _maybe(value: Any) -> int | None:
    return None if value is None else _count(value)
