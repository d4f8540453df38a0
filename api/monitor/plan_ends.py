"""The outcome of the plan that a task has published, as part of the task's answer."""

from __future__ import annotations

from typing import Any

from api.http.schemas import PlanEnd, TaskAnswer
from telemetry.state import events
from telemetry.state.events import OUTCOME_OF_EVENT
from telemetry.state.store import StateStore
from telemetry.state.tasks import Task


def task_answer(store: StateStore, task: Task) -> TaskAnswer:
    """A task with the end of its plan, once it has published one."""
    end = plan_end(store, task.result.plan_id) if task.result.plan_id else None
    return TaskAnswer(**vars(task) | {"result": _shown(task)}, plan_end=end)


def plan_end(store: StateStore, plan_id: int) -> PlanEnd | None:
    """How a plan has ended, and why; None while it is open, or once its event was removed."""
    for event in store.events_backwards(OUTCOME_OF_EVENT):
        end = events.plan_end(event)
        if end is not None and end.plan_id == plan_id:
            outcome = OUTCOME_OF_EVENT[event.kind]
            return PlanEnd(outcome=outcome, reason=end.reason, time=event.time)
    return None


def _shown(task: Task) -> dict[str, Any]:
    """A result as one table: what is for display, and the facts over it."""
    result = task.result
    facts: dict[str, Any] = {"error": result.error} if result.error else {}
    facts |= {"refusal": result.refusal} if result.refusal else {}
    if task.kind in ("rebalance", "rollback", "approve") and task.state == "done":
        facts |= {"published": result.plan_id > 0, "plan_id": result.plan_id or None}
    return dict(result.detail) | facts
