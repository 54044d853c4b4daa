"""Settings that an engine takes as they are given, and how a setting describes itself to the command line.

``options.py`` adds the settings that are still to be decided, ``engine.py`` the decisions: both have the fields of
``Settings``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from snapstream.config.cache import RescoringConfig
from snapstream.config.values import DTYPE_BYTES, DType, KVDType, as_kind, check, kv_dtype_bytes, set_counts

PrefillAttentionName = Literal[
    "auto",
    "reference",
    "cpu",
    "cpu_fp32",
    "cpu_bf16",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "flash_attn",
    "flash_attn_3",
    "flashinfer",
]


def setting(
    default: Any, help_text: str, *, metavar: str = "", flag: str = "", parse: Callable[[str], Any] | None = None
) -> Any:
    """A field with a flag: ``--NAME METAVAR``, or ``flag``; ``parse`` reads its text, by default by the type."""
    return field(default=default, metadata={"help": help_text, "metavar": metavar, "flag": flag, "parse": parse})


def whole(text: str) -> int:
    """A flag's text as a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that only the user decides."""

    rescoring: RescoringConfig | None = setting(  # None: what the prompt chose stays for ever, as in the paper
        None,
        "A full row chooses again what it keeps, every N tokens. Default: never.",
        metavar="N",
        flag="--rescore-every",
        parse=lambda text: RescoringConfig(every=whole(text)),
    )
    dtype: DType = setting("float32", "Of the computation and of rows.")  # and of staging
    kv_dtype: KVDType = setting(
        "auto",
        "Of rows: auto is that of --dtype; fp8 (e4m3) and int8 take a byte per number, and scales. bfloat16 and int8 "
        "are for a CPU.",
    )
    prefill_attention: PrefillAttentionName = setting(  # kernels/prefill/ decides, and refuses what cannot serve
        "auto", "Kernel that attends prompts; auto: by a table, and the start says which.", metavar="NAME"
    )
    max_waiting: int = setting(0, "Requests that may wait; more are refused. 0: no bound.")

    def __post_init__(self) -> None:
        set_counts(self, max_waiting=0)
        if self.rescoring is not None:
            as_kind("rescoring", self.rescoring, RescoringConfig)
        check(
            isinstance(self.dtype, str) and self.dtype in DTYPE_BYTES,
            f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}",
        )
        kv_dtype_bytes(self.dtype, self.kv_dtype)
        names = get_args(PrefillAttentionName)
        check(
            self.prefill_attention in names,
            f"prefill_attention is {self.prefill_attention!r}; it must be one of {', '.join(names)}",
        )
