"""Events that programs read back are complete, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.errors import StoreError
from telemetry.state.events import Event, PlanEnd, plan_end

END = {"generation": 4, "plan_id": 3, "reason": "skew"}


def event(kind: str, detail: dict[str, Any]) -> Event:
    return Event(12, 9.5, kind, detail)


@pytest.mark.parametrize("kind", ["commit", "abort", "reject"])
def test_end_of_a_plan_is_read_from_its_event(kind: str) -> None:
    assert plan_end(event(kind, END)) == PlanEnd(4, 3, "skew")


def test_placement_without_a_plan_ends_no_plan() -> None:
    assert plan_end(event("commit", END | {"plan_id": 0})) is None
    assert plan_end(event("plan", END)) is None


@pytest.mark.parametrize(
    ("detail", "why"),
    [
        ({"generation": 4, "reason": "skew"}, "event 12 .*plan_id"),
        (END | {"plan_id": "3"}, "plan_id is '3', expected int"),
        (END | {"generation": 4.5}, r"generation is 4\.5"),
        (END | {"more": 1}, "more"),
        (END | {"version": 2}, "version"),
    ],
)
def test_unreadable_event_of_a_plan_is_refused(detail: dict[str, Any], why: str) -> None:
    with pytest.raises(StoreError, match=why):
        plan_end(event("commit", detail))
