"""Facts of events, as tests put them into a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eplb.migration.recovery import NO_PLAN, Recovery
from telemetry.state.events import PlanDecision


def plan_event(decision: str = "KEEP", reason: str = "even", **changes: Any) -> PlanDecision:
    """Make the decision on a plan that moves nothing and cost nothing, but for what is given."""
    figures: dict[str, Any] = {
        "policy": "auto",
        "objective": "tokens",
        "imbalance_before": None,
        "imbalance_after": 1.0,
        "expected_gain": 0.0,
        "moves": 0,
        "bytes": 0,
        "cost_s": 0.0,
        "generation": 1,
        "target_generation": 2,
    }
    return PlanDecision(decision=decision, reason=reason, **figures | changes)


def recovery_event(reason: str, survivors: Sequence[int] = (0,)) -> Recovery:
    """Make the record of a death while nothing moved."""
    return Recovery(1, "a", tuple(survivors), 1, NO_PLAN, 0, reason, 0.0)
