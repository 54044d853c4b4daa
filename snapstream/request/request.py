"""What a caller asks for: a prompt, how to answer it, the row it may fill, and how the row is filled."""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config import KVBudget, Selector
from snapstream.request.output import Trim
from snapstream.request.sampling import SamplingParams
from snapstream.request.ticket import RowTicket

MAX_PRIORITY = 100
# Namespace "a/b" lies below "a": it shares nothing with it, and is reset with it.
NAMESPACE_BORDER = "/"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way through the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    budget: KVBudget | None = None  # None means the engine's own
    selector: Selector | None = None  # None means the engine's own
    prompt: str | None = None  # source text, if there was one; only echoed
    # Position of each prompt token in its text, ascending, where tokens in between were left out; None: 0, 1, 2, ...
    positions: tuple[int, ...] | None = None
    trim: Trim | None = None  # only echoed
    priority: int = 0  # lower is sooner; see ``engine/waiting.py``
    namespace: str = ""  # prompts of different namespaces never share a block of the prefix store
    arrives: bool = False  # another engine reads the prompt: this one reserves a row, and waits for what it holds
    ticket: RowTicket | None = None  # where the row goes once the prompt is read; the request ends when it has gone

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the logical prompt, what a draft took out included."""
        return self.trim.prompt_tokens if self.trim is not None else len(self.prompt_token_ids)

    @property
    def next_position(self) -> int:
        """Where the answer begins."""
        return self.positions[-1] + 1 if self.positions is not None else len(self.prompt_token_ids)
