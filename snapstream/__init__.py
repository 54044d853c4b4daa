"""snapstream: LLM inference in which a sequence owns a row of constant size, however long its prompt was.

The names below are loaded on first use, so that ``import snapstream`` never imports torch. Start reading at
``llm.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from snapstream.version import __version__

if TYPE_CHECKING:
    from snapstream.async_llm import AsyncLLM
    from snapstream.config import EngineOptions, KVBudget, PrefixStoreConfig, Selector
    from snapstream.kv.selectors.diverse import Diverse
    from snapstream.kv.selectors.hops import Hops
    from snapstream.kv.selectors.snapkv import SnapKV
    from snapstream.llm import LLM
    from snapstream.spec_prefill.compressor import PromptCompressor
    from snapstream.spec_prefill.settings import PromptCompression
    from snapstream.types import Grammar, RequestOutput, SamplingParams

__all__ = [
    "AsyncLLM",
    "LLM",
    "Diverse",
    "EngineOptions",
    "Grammar",
    "Hops",
    "KVBudget",
    "PrefixStoreConfig",
    "PromptCompression",
    "RequestOutput",
    "SamplingParams",
    "Selector",
    "SnapKV",
    "PromptCompressor",
    "__version__",
]

_NAMES = {
    "snapstream.async_llm": ("AsyncLLM",),
    "snapstream.config": ("EngineOptions", "KVBudget", "PrefixStoreConfig", "Selector"),
    "snapstream.kv.selectors.diverse": ("Diverse",),
    "snapstream.kv.selectors.hops": ("Hops",),
    "snapstream.kv.selectors.snapkv": ("SnapKV",),
    "snapstream.llm": ("LLM",),
    "snapstream.spec_prefill.compressor": ("PromptCompressor",),
    "snapstream.spec_prefill.settings": ("PromptCompression",),
    "snapstream.types": ("Grammar", "RequestOutput", "SamplingParams"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
