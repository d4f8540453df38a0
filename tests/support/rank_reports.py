"""Reports of ranks, as tests put them into a store."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from telemetry.state.runs import RankState

_TYPED = {field.name for field in fields(RankState)}


def rank_report(run: str, rank: int, **values: Any) -> RankState:
    """Make a report of an idle rank; a value that is no field of RankState is a detail."""
    idle: dict[str, Any] = {
        "time": 1.0,
        "step": 1,
        "generation": 0,
        "phase": "idle",
        "plan_id": 0,
        "applied": 0,
        "sequence": 0,
        "weights_version": 0,
    }
    typed = {name: value for name, value in values.items() if name in _TYPED}
    detail = {name: value for name, value in values.items() if name not in _TYPED}
    return RankState(run, rank, **idle | typed, detail=detail)
