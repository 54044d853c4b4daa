"""A plan with whom it concerns, from the scheduler that made it to the engine that reads its result a step later."""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.engine.live import LiveRequest, LiveSample
from snapstream.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan and whom it concerns. Results are matched to these samples, never to rows: rows change hands."""

    plan: StepPlan
    started: tuple[LiveRequest, ...] = ()  # their first unit is in this plan
    prefilled: tuple[LiveRequest, ...] = ()  # their last unit is in this plan, or their row came with it
    reserved: tuple[LiveRequest, ...] = ()  # have rows now, and wait for what these hold
    decoding: tuple[LiveSample, ...]  # aligned with plan.decode_rows
