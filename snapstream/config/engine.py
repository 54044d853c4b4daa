"""Settings of an engine: what a user gives (``EngineOptions``) and what is decided from it (``EngineConfig``).

A field of ``EngineOptions`` made by ``setting`` is also a flag (``cli/flags.py`` reads its metadata). Command line,
server and ``LLM`` pass the object on unchanged; ``startup/resolve.py`` makes an ``EngineConfig`` of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

from snapstream.config.kv import (
    DEFAULT_SELECTOR,
    HEADS_SELECTOR,
    SELECTORS,
    HeadProfile,
    HeadSlots,
    KVBudget,
    Selector,
    as_heads,
    make_selector,
)
from snapstream.config.model import ModelConfig
from snapstream.config.values import (
    DTYPE_BYTES,
    DType,
    InvalidValue,
    KVDType,
    Registry,
    as_count,
    as_kind,
    as_path,
    check,
    check_choice,
    kv_dtype_help,
    parse_bytes,
    row_formats,
    set_counts,
)
from snapstream.config.weights import ActivationOption, WeightFormats, WeightsOption

# Namespace "a/b" is below "a": it shares nothing with it, and is reset with it.
NAMESPACE_SEPARATOR = "/"
SplitAttention = Literal["tp", "dp"]
SplitExperts = Literal["tp", "ep"]


def launched() -> tuple[int, int, str]:
    """RANK, WORLD_SIZE, and MASTER_ADDR:MASTER_PORT, as torchrun and LeaderWorkerSet set them; ValueError without."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, size, host, port = (os.environ.get(name, "") for name in names)
    missing = [name for name in names if not os.environ.get(name)]
    check(not missing, f"master_addr is 'env'; the environment lacks {', '.join(missing)}")
    check(size.isdigit() and int(size) >= 1, f"WORLD_SIZE is {size!r}; it must be a whole number >= 1")
    check(rank.isdigit() and int(rank) < int(size), f"RANK is {rank!r}; it must be from 0 to {int(size) - 1}")
    return int(rank), int(size), f"{host}:{port}"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks of one engine; ``size`` 1 is an engine on one device."""

    size: int = 1  # W, ranks that compute every step together
    attention: SplitAttention = "tp"  # decode attention: heads are split, or rows (each row is on one rank)
    experts: SplitExperts = "tp"  # every expert is split, or each rank has whole experts
    num_local: int = 0  # ranks on rank 0's machine; 0: all
    address: str = ""  # HOST:PORT of rank 0's store, where ranks of other machines join

    def __post_init__(self) -> None:
        set_counts(self, size=1, num_local=0)
        check(self.num_local <= self.size, f"local_ranks is {self.num_local}; tensor_parallel is {self.size}")
        is_spread = 0 < self.num_local < self.size
        check(
            is_spread == bool(self.address),
            f"local_ranks is {self.num_local} of tensor_parallel {self.size}, and master_addr is {self.address!r}; "
            "ranks on other machines need both, and others neither",
        )
        check_choice("attention", self.attention, get_args(SplitAttention))
        check_choice("experts", self.experts, get_args(SplitExperts))

    @property
    def ranks_here(self) -> int:
        """Ranks on rank 0's machine."""
        return self.num_local or self.size

    @property
    def dp_size(self) -> int:
        """Ranks that rows are distributed over; 1 where each rank has its heads' part of every row."""
        return self.size if self.attention == "dp" else 1


# Tokens of a block; a hit equals a cold prefill bit for bit where its end is also the end of a chunk. A GPU copies each
# layer of a block over its link, which is slow in small pieces.
BLOCK_LEN = {"cpu": 64, "cuda": 256}
SNAPSHOT_LEN = 2048  # tokens
IDLE_LEN = 2048  # tokens


@dataclass(frozen=True, kw_only=True)
class PrefixStoreConfig:
    """Host memory that keeps the exact keys and values of prompts; lengths in tokens."""

    num_bytes: int
    block_len: int = 0  # tokens that are stored, found and evicted together; 0: 64, and 256 on a GPU
    min_tokens: int = 1  # shorter prompts, and shorter common prefixes, are ignored
    snapshot_len: int = SNAPSHOT_LEN  # tokens between two snapshots of the states of recurrent layers
    idle_len: int = IDLE_LEN  # tokens of a conversation that an idle engine prefills ahead of its next turn; 0: none

    def __post_init__(self) -> None:
        set_counts(self, num_bytes=1, block_len=0, min_tokens=1, snapshot_len=2, idle_len=0)

    def on(self, device: str) -> PrefixStoreConfig:
        """The store with the block length of a device, if it has none of its own."""
        return self if self.block_len else replace(self, block_len=BLOCK_LEN["cpu" if device == "cpu" else "cuda"])

    def num_blocks(self, token_bytes: int) -> int:
        """Blocks that it holds; ValueError where not one fits. ``token_bytes``: of a token over all layers."""
        block_bytes = self.block_len * token_bytes
        check(
            self.num_bytes >= block_bytes,
            f"prefix_store is {self.num_bytes} bytes; a block of {self.block_len} tokens takes {block_bytes}",
        )
        return self.num_bytes // block_bytes

    def num_snapshots(self, num_blocks: int) -> int:
        """Snapshots of recurrent states for so many blocks: two for each ``snapshot_len`` tokens, because the end of
        each prompt has one too.
        """
        return max(2 * num_blocks * self.block_len // self.snapshot_len, 1)


DISK_SIZE = "16GiB"

PrefixStore = PrefixStoreConfig | Literal["auto"] | None


def as_prefix_disk(given: Any) -> int:
    """A size in bytes or in words; ValueError for anything else."""
    if isinstance(given, str):
        try:
            return parse_bytes(given)
        except ValueError as error:
            raise ValueError(f"prefix_disk is {error}") from None
    return as_count("prefix_disk", given, 1)


def as_prefix_store(given: Any) -> PrefixStore:
    """A size in bytes or in words (``"8GiB"``), ``"auto"``, a ``PrefixStoreConfig``; None and 0 mean no store."""
    if given is None or isinstance(given, PrefixStoreConfig) or given == "auto":
        return cast(PrefixStore, given)
    if isinstance(given, str):
        try:
            given = 0 if given.strip() == "0" else parse_bytes(given)
        except ValueError:
            raise ValueError(
                f"prefix_store is {given!r}; it must be 0, 'auto' or a size with its unit, such as 8GiB"
            ) from None
    num_bytes = as_count("prefix_store", given, 0)
    return PrefixStoreConfig(num_bytes=num_bytes) if num_bytes else None


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """The decisions of ``plan/fit.py`` for a model and a device; ``engine/admission.py`` cuts prompts by them.

    With ``step_work`` the units of a step in which rows decode are counted by their work, in query-key pairs; a token's
    matrix products weigh as ``token_keys`` keys, and long prompts are cut into units of down to ``least_chunk_len``
    tokens.
    """

    chunk_len: int = 512  # T: tokens of one unit
    short_len: int = 512  # prompts up to this length are packed together and may overtake longer ones
    prefill_quantum: int = 0  # units per step while rows decode; 0 means num_layers (one chunk through the model)
    step_work: int = 0  # 0: units are counted one by one, by the quantum
    token_keys: int = 0
    least_chunk_len: int = 0  # 0: all units have chunk_len tokens

    def __post_init__(self) -> None:
        set_counts(self, chunk_len=1, short_len=1, prefill_quantum=0, step_work=0, token_keys=0, least_chunk_len=0)


PrefillAttentionName = Literal[
    "auto",
    "reference",
    "cpu",
    "cpu_fp32",
    "cpu_int16",
    "cpu_bf16",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "triton",
    "flash_attn",
    "flash_attn_3",
]


def setting(
    default: Any,
    help_text: str,
    *,
    metavar: str = "",
    flag: str = "",
    parse: Callable[[str], Any] | None = None,
    envvar: str | None = None,
) -> Any:
    """A field with a flag: ``--NAME METAVAR``, or ``flag``; ``parse`` reads its text, by default by the type.

    The flag of a field that is true by default makes it false.
    """
    words = {"help": help_text, "metavar": metavar, "flag": flag, "parse": parse, "envvar": envvar}
    return field(default=default, metadata=words)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that only the user decides."""

    dtype: DType = setting("float32", "Dtype of the computation and of rows.")  # and of staging
    kv_dtype: KVDType = setting("auto", kv_dtype_help())
    prefill_attention: PrefillAttentionName = setting(  # chosen, or refused, in kernels/backends
        "auto", "Prefill attention kernel; auto: the fastest here, timed at the start.", metavar="NAME"
    )
    max_waiting: int = setting(0, "Requests that may wait; more are refused. 0: no bound.")

    def __post_init__(self) -> None:
        set_counts(self, max_waiting=0)
        check_choice("dtype", self.dtype, tuple(DTYPE_BYTES))
        row_formats(self.dtype, self.kv_dtype)
        check_choice("prefill_attention", self.prefill_attention, get_args(PrefillAttentionName))


SPECULATIVE_TOKENS = 8
STALL_TIMEOUT_S = 60.0  # a prefill chunk, or a decode step, takes far less; 0: no timeout
SHORT_RESERVE = 4096  # tokens of the staging pool that only short prompts may use
EXECUTORS: Registry[Any] = Registry(  # an ``Executor``, or one by type of device
    "executor",
    {
        "eager": "snapstream.exec.executors:EAGER",
        "graph": "snapstream.exec.executors:GRAPH",
        "looped": "snapstream.exec.executors:LOOPED",
    },
)


@dataclass(frozen=True, kw_only=True)
class Speculator:
    """The draft model of speculative decoding: another model, or with ``OWN`` the model's own prediction layer."""

    OWN: ClassVar[str] = "mtp"  # the option
    MOST_SLOTS: ClassVar[int] = 1024  # of a row: its last tokens

    folder: str  # or GGUF file
    model: ModelConfig
    # Of its steps (``plan/fit.py``).
    formats: WeightFormats | None = None
    executor: str = "looped"
    device: str = "cpu"
    dtype: DType = "float32"

    @property
    def num_slots(self) -> int:
        """Slots of a row; no sliding window is smaller, so that none wraps around."""
        windows = [window for window in self.model.windows or () if window is not None]
        return min([self.MOST_SLOTS, self.model.max_position, *windows])

    @property
    def is_own(self) -> bool:
        return self.model.prediction_of > 0

    @property
    def num_read(self) -> int:
        """Tokens that are read into a row when it begins, or is full."""
        return max(self.num_slots // 2, 1)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter that requests may name (``models/adapters.py``)."""

    name: str
    folder: str
    digest: str  # of its files: the prefix store keeps adapters apart by it
    shapes: tuple[tuple[int, int], ...]  # of its matrices in memory
    rank: int  # most rows of the first matrix of a product: the ranks of q, k and v together


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """What scheduler and runner share. Lengths in tokens."""

    budget: KVBudget  # the largest row; a request may ask for a smaller one
    max_model_len: int  # prompt + output of one request
    selector: Selector = field(default_factory=make_selector)  # of requests that name none
    heads: HeadSlots | None = None  # slots of every kv head; None: all have the budget's
    max_rows: int = 8  # resident requests
    chunking: Chunking = field(default_factory=Chunking)
    staging_tokens: int = 0  # pool for prompts in prefill; 0 means one longest prompt + reserve
    short_reserve: int = SHORT_RESERVE
    device: str = "cpu"
    executor: str = "eager"  # of EXECUTORS
    num_speculative_tokens: int = 0  # drafted per row and step, at most
    speculator: Speculator | None = None  # drafts where prompt lookup finds nothing
    weights: WeightFormats | None = None  # formats of the matrices; None: in dtype
    reserved_bytes: int = 0  # of the device's memory, for a draft
    prefix_store: PrefixStoreConfig | None = None
    prefix_blocks: int = 0  # that the store holds
    prefix_snapshots: int = 0  # of recurrent states that the store holds; 0 for models without
    prefix_row_len: int = 0  # longest sequence whose row has the exact keys and values that the store keeps; 0: none
    prefix_dir: str = ""  # folder of the store's disk cache; none by default
    prefix_disk: int = 0  # bytes that it may hold
    prefix_max_len: int = 0  # longer prompts are neither stored nor looked up; 0: max_model_len
    loras: tuple[Adapter, ...] = ()
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        as_kind("budget", self.budget, KVBudget)
        if not isinstance(self.selector, Selector):
            raise TypeError(f"selector is {self.selector!r}; it must be a Selector")
        set_counts(self, max_model_len=1, max_rows=1, staging_tokens=0, short_reserve=0, reserved_bytes=0)
        set_counts(self, num_speculative_tokens=0)
        if self.prefix_store is not None:
            as_kind("prefix_store", self.prefix_store, PrefixStoreConfig)
            object.__setattr__(self, "prefix_store", self.prefix_store.on(self.device))
            set_counts(self, prefix_blocks=1, prefix_max_len=0, prefix_disk=0, prefix_row_len=0)
        as_kind("parallel", self.parallel, ParallelConfig)
        EXECUTORS.check(self.executor)
        if self.weights is not None:
            as_kind("weights", self.weights, WeightFormats)
        self.check_budget(self.budget)
        if self.heads is not None:
            as_kind("heads", self.heads, HeadSlots)
            check(self.heads.budget == self.budget, "heads: their slots are not of the rows' budget")
        check(
            self.pool_tokens > self.short_reserve,
            f"staging_tokens is {self.staging_tokens}; it must be larger than short_reserve ({self.short_reserve})",
        )

    def check_budget(self, budget: KVBudget, selector: Selector | None = None) -> None:
        """ValueError for a budget that cannot hold the observation window, or that no row can hold.

        ``selector`` is a request's own; None means the engine's.
        """
        if budget.num_topk:
            observation_len = (selector or self.selector).observation_len
            least = budget.num_sink + observation_len
            check(
                budget.capacity >= least,
                f"a budget of {budget.capacity} slots is smaller than sinks + observation_len "
                f"({budget.num_sink} + {observation_len} = {least})",
            )
        check(
            budget.capacity <= self.budget.capacity,
            f"a budget of {budget.capacity} slots is larger than a row of this engine ({self.budget.capacity})",
        )
        if self.heads is not None:  # no head may have more slots than the longest of the engine's
            most = self.budget.num_topk
            check(
                budget.num_topk <= most and budget.num_window == 0,
                f"a budget with num_topk {budget.num_topk} and num_window {budget.num_window}; with the per-head "
                f"budgets of this engine they are at most {most} and 0",
            )

    def adapter(self, name: str) -> int:
        """Index of a LoRA adapter, counted from 1; 0 for "", which is the model alone. ValueError for another name."""
        names = ["", *(own.name for own in self.loras)]
        if name not in names:
            loaded = ", ".join(names[1:]) or "none"
            raise InvalidValue(f"lora is {name!r}; the adapters of this engine: {loaded}", "lora")
        return names.index(name)

    @property
    def only_lora(self) -> str:
        """The name of its one adapter, for commands with one conversation; "" without. ValueError for several."""
        names = [own.name for own in self.loras]
        check(len(names) < 2, f"loras: {', '.join(names)} are given; one answers here")
        return "".join(names)

    def prefix_namespace(self, namespace: str, lora: str) -> str:
        """The namespace below ``namespace`` in which the prefix store keeps prompts of an adapter."""
        index = self.adapter(lora)
        return f"{namespace}{NAMESPACE_SEPARATOR}lora {self.loras[index - 1].digest}" if index else namespace

    @property
    def row_budget(self) -> KVBudget:
        """The budget of a row's counters."""
        return self.budget if self.heads is None else self.heads.widest

    @property
    def pool_tokens(self) -> int:
        """Staging pool in tokens."""
        return self.staging_tokens or self.max_model_len + self.short_reserve


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
    selector: str | Selector | None = setting(
        None,
        f"Method that chooses what a row keeps. Default: {HEADS_SELECTOR} with per-head KV budgets, else "
        f"{DEFAULT_SELECTOR}.",
        metavar="|".join(SELECTORS.names),
        parse=str,
    )
    heads: HeadProfile | str | None = setting(
        None,
        "Per-head KV budgets: a file of snapstream calibrate; auto: the model's known profile, or one measured at the "
        "start where that takes a minute at most; none: equal heads. Default: auto on a CPU without --selector, else "
        "none.",
        metavar="auto|none|FILE",
        parse=as_heads,
    )
    device: str = setting("cpu", "Where the engine runs.", metavar="cpu|cuda")
    weights: WeightsOption = setting(
        "auto",
        "Format of the matrices in memory; auto: as the checkpoint stores them, on a GPU that of --dtype. int8 and "
        "int4 are quantized while loading.",
    )
    activations: ActivationOption = setting(
        "auto",
        "Inputs of GEMMs with low-precision weights. dtype: as --dtype; int8: int8 in decode, for weights in groups; "
        "auto: int8 in decode where the looped executor supports the model, and what is faster here: in prefill int8, "
        "bfloat16 or int16, in decode bfloat16 with bfloat16 weights.",
    )
    executor: str | None = setting(
        None,
        "eager: plain PyTorch; graph: CUDA graphs, the default on a GPU; looped: kernel looping, one native call per "
        "step, the default on a CPU.",
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
        "Host memory for the exact keys and values of prompts, so that a common prefix is computed once; 0: none.",
        metavar="SIZE",
        parse=as_prefix_store,
    )
    prefix_dir: str | None = setting(
        None, "Private folder in which the prefix store outlives the process. Default: none.", metavar="DIR"
    )
    prefix_disk: int | str = setting(DISK_SIZE, "Maximum size of --prefix-dir.", metavar="SIZE", parse=as_prefix_disk)
    num_speculative_tokens: AutoCount = setting(
        "auto",
        "Most tokens of a row that a step drafts from earlier text (prompt lookup) and verifies: same answers, several "
        f"tokens per step where text repeats. auto: {SPECULATIVE_TOKENS} with looped decode or a draft model; used "
        "only while it pays. 0: none.",
        metavar="N|auto",
        parse=_count_or("auto"),
    )
    speculative_model: str | Speculator | None = setting(
        None,
        "Small model with the same vocabulary (folder, GGUF file or hub id), or mtp, the model's own prediction layer, "
        "that drafts tokens where prompt lookup finds none; answers stay the same. Default: none.",
        metavar="MODEL",
        parse=str,
    )
    loras: tuple[Any, ...] = setting(  # becomes (name, path), or Adapter once it is read
        (),
        "LoRA adapter of PEFT (folder or hub id) that requests name as their model; repeatable.",
        metavar="NAME=PATH",
        flag="--lora",
    )
    prefill_quantum: int = setting(0, "Units of prefill per step while rows decode. 0: what suits the device.")
    tensor_parallel: int = setting(1, "Ranks that compute every step together, each with a part of the model.")
    attention: SplitAttention = setting(
        "tp", "With --tensor-parallel: ranks split the heads (tp), or each has whole rows of latents (dp)."
    )
    experts: SplitExperts = setting(
        "tp", "With --tensor-parallel: ranks split every expert (tp), or have whole ones (ep)."
    )

    local_ranks: int = setting(0, "Ranks on this machine; the others come from other machines. 0: all.")
    master_addr: str | None = setting(
        None,
        "With --local-ranks: where rank 0 listens for the ranks of other machines. 'env': as RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT say, one rank per process.",
        metavar="HOST:PORT",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        set_counts(self, prefill_quantum=0)
        for name, least in (("max_rows", 1), ("chunk_len", 1), ("num_speculative_tokens", 0)):
            if getattr(self, name) != "auto":
                object.__setattr__(self, name, as_count(name, getattr(self, name), least))
        if self.max_model_len is not None:
            set_counts(self, max_model_len=1)
        if self.executor is not None:
            EXECUTORS.check(self.executor)
        check_choice("weights", self.weights, get_args(WeightsOption))
        check_choice("activations", self.activations, get_args(ActivationOption))
        make_selector(self.selector)
        object.__setattr__(self, "heads", as_heads(self.heads))
        object.__setattr__(self, "prefix_store", as_prefix_store(self.prefix_store))
        object.__setattr__(self, "prefix_disk", as_prefix_disk(self.prefix_disk))
        if self.prefix_dir is not None:
            object.__setattr__(self, "prefix_dir", str(as_path("prefix_dir", self.prefix_dir)))
            check(
                self.prefix_store is not None, f"prefix_dir is {self.prefix_dir!r}; it needs a prefix_store in memory"
            )
        if self.speculative_model is not None and not isinstance(self.speculative_model, Speculator):
            path = as_path("speculative_model", self.speculative_model)
            object.__setattr__(self, "speculative_model", str(path))
            check(
                self.num_speculative_tokens != 0,
                f"speculative_model is {str(path)!r}, and num_speculative_tokens is 0; leave one of them out",
            )
        object.__setattr__(self, "loras", as_loras(self.loras))
        check_budget(self.budget)
        set_counts(self, tensor_parallel=1, local_ranks=0)
        if self.master_addr == "env":
            self._take_environment()
        check(
            self.parallel.size > 1 or (self.attention, self.experts) == ("tp", "tp"),
            f"attention is {self.attention!r} and experts {self.experts!r}, and there is one rank to compute them; "
            "give tensor_parallel",
        )

    def _take_environment(self) -> None:
        """Fill in what torchrun or LeaderWorkerSet has set; ranks but the first keep ``master_addr`` "env"."""
        rank, size, address = launched()
        check(
            self.tensor_parallel in (1, size) and self.local_ranks in (0, 1),
            f"master_addr is 'env' and WORLD_SIZE {size}; tensor_parallel is {self.tensor_parallel} and local_ranks "
            f"{self.local_ranks}: leave them out",
        )
        object.__setattr__(self, "tensor_parallel", size)
        object.__setattr__(self, "local_ranks", int(size > 1))
        object.__setattr__(self, "master_addr", None if size == 1 else "env" if rank else address)

    @property
    def parallel(self) -> ParallelConfig:
        """How the engine is spread over ranks."""
        return ParallelConfig(
            size=self.tensor_parallel,
            attention=self.attention,
            experts=self.experts,
            num_local=self.local_ranks,
            address=self.master_addr or "",
        )

    @property
    def lora_names(self) -> list[str]:
        return _names_of(self.loras)

    @property
    def has_automatic_heads(self) -> bool:
        """Whether kv heads get per-head budgets where a profile is known or soon measured.

        That is the default on a CPU unless heads or a selector are named: a named selector fills rows as its paper has
        it. On a GPU, where their speed was not measured (docs/research/gpu.md), only if asked for.
        """
        is_default = self.heads is None and self.selector is None and self.device == "cpu"
        return is_default or self.heads == "auto"

    @classmethod
    def of(cls, options: EngineOptions | None, given: dict[str, Any]) -> EngineOptions:
        """``options``, by default the defaults, with the fields ``given`` by name; TypeError for an unknown name."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise TypeError(f"{unknown[0]} is not a setting of an engine; the settings are {', '.join(known)}")
        return replace(cls() if options is None else options, **given)


def as_loras(given: Any) -> tuple[Adapter | tuple[str, str], ...]:
    """Adapters of a mapping from names to paths, or of ``NAME=PATH`` and ``PATH``. ValueError for equal names."""
    if not isinstance(given, (Mapping, tuple, list)):
        raise TypeError(f"loras is {given!r}; it must be a mapping from names to folders")
    found: list[Adapter | tuple[str, str]] = []
    for own in given.items() if isinstance(given, Mapping) else given:
        if isinstance(own, str):
            name, equals, path = own.partition("=")
            own = (name, path) if equals else (Path(own).name, own)
        if not isinstance(own, Adapter):
            name, path = own
            check(isinstance(name, str) and name != "", f"loras: the name of {path!r} is {name!r}; it must be a string")
            own = name, str(as_path(f"loras: the folder of {name!r}", path))
        found.append(own)
    names = _names_of(found)
    twice = [name for name in names if names.count(name) > 1]
    check(not twice, f"loras: {twice[:1]} is the name of several adapters")
    return tuple(found)


def _names_of(loras: Iterable[Adapter | tuple[str, str]]) -> list[str]:
    return [own.name if isinstance(own, Adapter) else own[0] for own in loras]


def check_budget(budget: Any) -> Budget:
    """``budget`` itself; ValueError unless it is a ``KVBudget``, a number of slots or ``"full"``."""
    if isinstance(budget, str):
        check(budget == "full", f"budget is {budget!r}; it must be a KVBudget, a number of slots or 'full'")
    elif not isinstance(budget, KVBudget):
        as_count("budget", budget, 1)
    return cast(Budget, budget)
