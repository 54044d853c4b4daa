"""What ``plan`` adds where an engine has several ranks: weights of one by role, and how long steps would take.

Times are predictions; ``predict.py`` has the formulas and the assumptions. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from snapstream.config import ParallelConfig
from snapstream.models.shapes import role_bytes
from snapstream.models.shards import rank_config
from snapstream.plan.predict import LINKS, Predictor, PromptTime, StepTime


@dataclass(frozen=True, kw_only=True)
class RanksPlan:
    """Sizes in bytes, times in seconds."""

    parallel: ParallelConfig
    role_bytes: dict[str, int]  # weights of one rank
    bandwidth_bytes_per_s: float  # of one device
    flop_per_s: float
    steps: dict[str, StepTime]  # by the name of a line of the plan: all rows that fit, right after their prompts
    prompt: PromptTime  # alone

    @classmethod
    def of(
        cls, predictor: Predictor, batches: Mapping[str, tuple[int, int]], prompt_len: int, chunk_len: int
    ) -> RanksPlan:
        """``batches``: rows and visible slots of each line; those of no rows have no step."""
        stored = rank_config(predictor.model, predictor.parallel)
        return cls(
            parallel=predictor.parallel,
            role_bytes=role_bytes(stored, predictor.dtype, predictor.forms),
            bandwidth_bytes_per_s=predictor.bandwidth_bytes_per_s,
            flop_per_s=predictor.flop_per_s,
            steps={name: predictor.step(rows, slots) for name, (rows, slots) in batches.items() if rows > 0},
            prompt=predictor.prompt(prompt_len, chunk_len),
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields above under their names, with what follows from them: whole times over each of ``links``."""
        plain = asdict(self)
        plain["links"] = [asdict(link) for link in LINKS]
        plain["prompt"]["seconds"] = self.prompt.seconds
        for name, step in self.steps.items():
            plain["steps"][name] |= {"seconds": step.seconds, "tokens_per_s": step.tokens_per_s}
        return plain
