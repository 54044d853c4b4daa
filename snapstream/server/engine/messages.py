"""What the engine process says beside the messages of every engine (``snapstream/engine/messages.py``), and its orders.

It sends ``Ready`` once, then the answers of its engine, and ``Failed`` as its last word if it can still speak.
Invariant: nothing here imports torch. The front loads it only together with a tokenizer, whose library brings it, and
holds no weights but those of a draft. ``process_main.py`` and ``child.py`` are the two ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from snapstream.config import EngineConfig, EngineOptions, ModelConfig
from snapstream.engine.messages import FromEngine
from snapstream.plan.draft_memory import DraftMemory
from snapstream.transfer.settings import TransferSettings


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """All that the engine process needs to build its engine."""

    model: str  # checkpoint folder
    options: EngineOptions = field(default_factory=EngineOptions)
    num_threads: int | None = None  # of torch on the CPU; None means its default
    beside: DraftMemory | None = None  # the front's draft on the same device
    transfer: TransferSettings | None = None  # to send rows to other engines, or to receive some


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts about the loaded engine."""

    model: str
    engine: EngineConfig
    architecture: ModelConfig
    has_tokenizer: bool
    pid: int
    notes: tuple[str, ...] = ()  # lines about choices that were made at the start

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    @property
    def max_rows(self) -> int:
        return self.engine.max_rows

    @property
    def budget_slots(self) -> int:
        """Slots of the largest row."""
        return self.engine.budget.capacity


@dataclass(frozen=True, slots=True)
class Ready:
    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built, or broke; its process ends. "value": the settings are wrong."""

    kind: Literal["value", "error"]
    message: str


FromProcess = Ready | Failed | FromEngine
