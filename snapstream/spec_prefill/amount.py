"""How much of a prompt is to stay, and when that leaves nothing to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A share of the chunks of every text, or a ceiling in target tokens; one of them is None."""

    keep: float | None
    max_tokens: int | None
    threshold: int  # prompts of fewer tokens are left alone

    def why_not(self, before: int, has_candidates: bool) -> str:
        """Why a prompt of ``before`` tokens is left alone, or nothing."""
        if self.max_tokens is not None and before <= self.max_tokens:
            return f"{before:,} tokens fit the ceiling of {self.max_tokens:,}"
        if self.keep is not None and before < self.threshold:
            return f"{before:,} tokens are below the threshold of {self.threshold:,}"
        if self.keep == 1:
            return "keep is 1"
        if not has_candidates and self.max_tokens is None:
            return "everything is protected"
        return ""
