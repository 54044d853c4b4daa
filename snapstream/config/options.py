"""The settings that a user may give for an engine. Command line, server and ``LLM`` carry this object as it is.

A field is a setting: its default, and in its metadata the words and the form of its flag, which ``cli/flags.py`` reads.
``start/resolve.py`` makes an ``EngineConfig`` of it. This file has the settings from which something is decided;
``settings.py`` has those that an engine takes as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast, get_args

from snapstream.config.cache import KVBudget
from snapstream.config.engine import EXECUTORS
from snapstream.config.heads import HeadProfile, as_head_profile
from snapstream.config.parallel import ParallelConfig, SplitAttention, SplitExperts
from snapstream.config.prefix import DISK_BYTES, PrefixStore, as_prefix_store, as_size
from snapstream.config.selector import DEFAULT_SELECTOR, SELECTORS, Selector, make_selector
from snapstream.config.settings import Settings, setting
from snapstream.config.values import as_count, as_path, check, set_counts
from snapstream.config.weights import ActivationOption, WidthOption

Budget = KVBudget | int | str  # the only text is "full"
AutoCount = int | Literal["auto"]


def _count_or(word: str) -> Callable[[str], int | str]:
    """Reads a whole number or that word."""

    def parse(text: str) -> int | str:
        try:
            return text if text == word else int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number or {word!r}") from None

    return parse


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Settings):
    """Settings of an engine; lengths in tokens. ValueError for values that no engine could have."""

    budget: Budget = setting(
        8192,  # what the paper keeps of a 128k prompt
        "Slots of a row, or 'full'; a request may ask for less. At most max_model_len.",
        metavar="N|full",
        parse=_count_or("full"),
    )
    selector: str | Selector = setting(
        DEFAULT_SELECTOR, "Method that chooses what a row keeps.", metavar="|".join(SELECTORS.names)
    )
    heads: HeadProfile | str | None = setting(
        None,
        "Profile that gives kv heads unlike numbers of slots (snapstream calibrate). Default: equal heads.",
        metavar="FILE",
        parse=as_head_profile,
    )
    device: str = setting("cpu", "Where the engine runs.", metavar="cpu|cuda")
    weights: WidthOption = setting(
        "auto",
        "Width of the matrices in memory; auto: as the checkpoint stores them, on a GPU that of --dtype. "
        "int8 and int4 round while loading.",
    )
    activations: ActivationOption = setting(
        "auto",
        "Inputs of products with narrow weights: in --dtype, or with int8 and int4 weights rounded to int8 in decode; "
        "auto: that where looped steps know the model, and bfloat16 where a processor gains by it, in prefill and, "
        "with bfloat16 weights, in decode.",
    )
    executor: str | None = setting(
        None,
        "Decode as plain calls, compiled/captured, or looped. Default: graph on a GPU, looped on a CPU.",
        metavar="|".join(EXECUTORS.names),
    )
    max_rows: AutoCount = setting(
        8, "Rows: samples decoded together; auto: as many as fit.", metavar="N|auto", parse=_count_or("auto")
    )
    max_model_len: int | None = setting(None, "Prompt and output tokens. Default: the model's context.")
    chunk_len: AutoCount = setting(
        "auto",
        "Tokens of one prefill unit; auto: what suits model and device.",
        metavar="N|auto",
        parse=_count_or("auto"),
    )
    prefix_store: PrefixStore | int | str = setting(
        None,
        "Host memory for the exact keys and values of prompts, so that a common beginning is computed once; 0: none.",
        metavar="SIZE",
        parse=as_prefix_store,
    )
    prefix_dir: str | None = setting(
        None, "Private folder in which the prefix store outlives the process. Default: none.", metavar="DIR"
    )
    prefix_disk: int | str = setting(
        DISK_BYTES, "Most that --prefix-dir may hold.", metavar="SIZE", parse=lambda text: as_size("prefix_disk", text)
    )
    prefill_quantum: int = setting(0, "Units of prefill per step while rows decode. 0: what suits the device.")
    tensor_parallel: int = setting(1, "Ranks that compute every step together, each with a part of the model.")
    attention: SplitAttention = setting(
        "tp", "With --tensor-parallel: ranks split the heads (tp), or whole rows of latents are dealt out (dp)."
    )
    experts: SplitExperts = setting(
        "tp", "With --tensor-parallel: ranks split every expert (tp), or have whole ones (ep)."
    )

    local_ranks: int = setting(0, "Ranks on this machine; the others come from other machines. 0: all.")
    leader_address: str | None = setting(
        None, "With --local-ranks: where this engine waits for the ranks of other machines.", metavar="HOST:PORT"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        set_counts(self, prefill_quantum=0)
        for name in ("max_rows", "chunk_len"):
            if getattr(self, name) != "auto":
                object.__setattr__(self, name, as_count(name, getattr(self, name), 1))
        if self.max_model_len is not None:
            set_counts(self, max_model_len=1)
        if self.executor is not None:
            EXECUTORS.check(self.executor)
        for name, known in (("weights", get_args(WidthOption)), ("activations", get_args(ActivationOption))):
            value = getattr(self, name)
            check(value in known, f"{name} is {value!r}; it must be one of {', '.join(known)}")
        make_selector(self.selector)
        object.__setattr__(self, "heads", as_head_profile(self.heads))
        object.__setattr__(self, "prefix_store", as_prefix_store(self.prefix_store))
        object.__setattr__(self, "prefix_disk", as_size("prefix_disk", self.prefix_disk))
        if self.prefix_dir is not None:
            object.__setattr__(self, "prefix_dir", str(as_path("prefix_dir", self.prefix_dir)))
            check(
                self.prefix_store is not None, f"prefix_dir is {self.prefix_dir!r}; it needs a prefix_store in memory"
            )
        check_budget(self.budget)
        set_counts(self, tensor_parallel=1, local_ranks=0)
        check(
            self.parallel.size > 1 or (self.attention, self.experts) == ("tp", "tp"),
            f"attention is {self.attention!r} and experts {self.experts!r}, and there is one rank to compute them; "
            "give tensor_parallel",
        )

    @property
    def parallel(self) -> ParallelConfig:
        """How the engine is spread over ranks."""
        return ParallelConfig(
            size=self.tensor_parallel,
            attention=self.attention,
            experts=self.experts,
            num_local=self.local_ranks,
            address=self.leader_address or "",
        )

    @classmethod
    def of(cls, options: EngineOptions | None, given: dict[str, Any]) -> EngineOptions:
        """``options``, by default the defaults, with the fields ``given`` by name; TypeError for an unknown name."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise TypeError(f"{unknown[0]} is no setting of an engine; the settings are {', '.join(known)}")
        return replace(cls() if options is None else options, **given)


def check_budget(budget: Any) -> Budget:
    """``budget`` itself; ValueError unless it is a ``KVBudget``, a number of slots or ``"full"``."""
    if isinstance(budget, str):
        check(budget == "full", f"budget is {budget!r}; it must be a KVBudget, a number of slots or 'full'")
    elif not isinstance(budget, KVBudget):
        as_count("budget", budget, 1)
    return cast(Budget, budget)
