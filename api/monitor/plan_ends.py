"""The outcome of the plan that a task has published, as part of the task's answer."""

from __future__ import annotations

from api.http.schemas import PlanEnd, TaskAnswer
from telemetry.rules import EVENT_OF_OUTCOME
from telemetry.store import EventStore, Outcome, Task, events_backwards

OUTCOMES: dict[str, Outcome] = {kind: outcome for outcome, kind in EVENT_OF_OUTCOME.items()}


def task_answer(store: EventStore, task: Task) -> TaskAnswer:
    """A task with the end of its plan, once it has published one."""
    plan_id = task.result.get("plan_id") if task.state == "done" else None
    end = plan_end(store, int(plan_id)) if plan_id else None
    return TaskAnswer(**vars(task), plan_end=end)


def plan_end(store: EventStore, plan_id: int) -> PlanEnd | None:
    """How a plan has ended, and why; None while it is open, or once its event was removed."""
    for event in events_backwards(store, OUTCOMES):
        if event.detail.get("plan_id") == plan_id:
            reason = str(event.detail.get("reason", ""))
            return PlanEnd(outcome=OUTCOMES[event.kind], reason=reason, time=event.time)
    return None
