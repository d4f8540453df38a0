"""Tasks: requests that the controller works off, and why one failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from eplb.errors import StoreError
from telemetry.state.backend import ALL, Change, Range, Reader, Table, number_in
from telemetry.state.codec import as_stored
from telemetry.state.events import note
from telemetry.state.lease import check_fence
from telemetry.state.part import Part, Records
from telemetry.state.runs import Details

TaskState = Literal["queued", "running", "done", "failed"]

QUEUED = Table("queued", is_ordered=True, is_index=True)  # ids of tasks that have not ended
RUNNING = Table("running", is_ordered=True, is_index=True)
_PAGE = 1000


class Refusal(StrEnum):
    """Reasons of a failed task on which an operator acts; its error has the words."""

    NO_LOAD = "no-load"  # no complete window yet: ask again later
    NO_PLAN = "no-plan"  # constraints, cordons or dead ranks leave no placement
    CANNOT_SERVE = "cannot-serve"  # the placement asked for, on these ranks and cordons
    NO_SUCH_PLACEMENT = "no-such-placement"
    NO_SUCH_EXPERT = "no-such-expert"
    NOTHING_TO_PROPOSE = "nothing-to-propose"  # the plan is KEEP
    MOVEMENT_OFF = "movement-off"
    MIGRATION_OPEN = "migration-open"
    GENERATION_MOVED_ON = "generation-moved-on"  # another generation serves than the request names
    BASE_MOVED_ON = "base-moved-on"  # another generation serves than the proposal's base
    PROPOSAL_ENDED = "proposal-ended"
    LOSES = "loses"  # on the present load an approved plan costs more than it saves
    NOT_PUBLISHED = "not-published"  # another plan came first: ask again
    IMPOSSIBLE_THROTTLE = "impossible-throttle"  # out of range, or not of the mode of migrations
    EXPIRED = "expired"  # it was queued for too long
    ABANDONED = "abandoned"  # the controller exited during it
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class TaskResult:
    """The result of a task."""

    error: str = ""  # why it failed
    plan_id: int = 0  # plan id of the migration that was published for it; 0: none
    # Shown to people; its keys depend on the kind of task.
    detail: Details = field(default_factory=dict)
    refusal: str = ""  # a Refusal; "": an unexpected error


@dataclass(frozen=True)
class Task:
    """A request that the controller works off, e.g. a rebalance asked for over HTTP."""

    id: int
    time: float
    kind: str
    request: Details
    state: TaskState
    result: TaskResult = TaskResult()


TASKS = Records(Task, Table("tasks", is_ordered=True), "task")  # by id


class TaskPart(Part):
    """The tasks of a deployment."""

    def submit(self, kind: str, request: Details) -> Task:
        """Queue a task."""
        asked = as_stored(request)

        def decision(change: Change) -> Task:
            task_id = change.next("task_id")
            task = Task(task_id, change.time, kind, asked, "queued")
            _put(change, task)
            _note(change, task, asked.get("reason"))
            return task

        return self.backend.decide(f"task {kind!r}", decision)

    def claim(self, *, fence: int | None = None) -> Task | None:
        """Claim the oldest queued task, which is then running; None if there is none.

        Raises:
            FencedOut: the token ``fence`` is not the newest.
        """
        # Looked at before anything is decided: a controller asks far more often than it gets.
        if not self.backend.scan(QUEUED, Range(limit=1)):
            check_fence(self.backend, fence)
            return None

        def decision(change: Change) -> Task | None:
            check_fence(change, fence)
            queued = (task for task in _in_queue(change, QUEUED) if task.state == "queued")
            task = next(queued, None)
            if task is None:
                return None
            running = replace(task, state="running")
            _put(change, running)
            change.wake()
            return running

        return self.backend.decide("claim of a task", decision)

    def finish(
        self, task_id: int, state: TaskState, result: TaskResult, *, fence: int | None = None
    ) -> None:
        """End a task with its result.

        Raises:
            StoreError: there is no such task, it has ended, or ``state`` is not an end.
            FencedOut: the token ``fence`` is not the newest.
        """
        if state not in ("done", "failed"):
            raise StoreError(f"task {task_id} cannot end as {state!r}, expected 'done' or 'failed'")
        kept = replace(result, detail=as_stored(result.detail))

        def decision(change: Change) -> None:
            check_fence(change, fence)
            task = TASKS.get(change, task_id)
            if task is None:
                raise StoreError(f"task {task_id} cannot be finished: there is no such task")
            if task.state in ("done", "failed"):
                raise StoreError(f"task {task_id} cannot be finished: it is {task.state} already")
            ended = replace(task, state=state, result=kept)
            _put(change, ended)
            _note(change, ended, kept.error)

        self.backend.decide(f"end of task {task_id}", decision)

    def cancel(self, task_id: int, *, reason: str) -> bool:
        """Fail a task that is still queued; False for one that was claimed, ended or is unknown.

        A task is claimed or cancelled, never both.
        """
        result = TaskResult(error=f"cancelled: {reason}", refusal=Refusal.CANCELLED.value)

        def decision(change: Change) -> bool:
            task = TASKS.get(change, task_id)
            if task is None or task.state != "queued":
                return False
            ended = replace(task, state="failed", result=result)
            _put(change, ended)
            _note(change, ended, result.error)
            return True

        return self.backend.decide(f"cancellation of task {task_id}", decision)

    def tasks(self, state: TaskState, *, after: int = 0, limit: int = 1000) -> list[Task]:
        """Return tasks in a state past the id ``after``, oldest first."""
        if state in ("queued", "running"):
            table = QUEUED if state == "queued" else RUNNING
            listed = _in_queue(self.backend, table, Range(after, limit=limit))
            return [task for task in listed if task.state == state]
        tasks: list[Task] = []
        while len(tasks) < limit:
            page = self.backend.scan(TASKS.table, Range(after, limit=_PAGE))
            tasks += [task for task in TASKS.readable(self.backend, page) if task.state == state]
            if len(page) < _PAGE:
                break
            after = number_in(page[-1][0], "the id of a task")
        return tasks[:limit]

    def task(self, task_id: int) -> Task | None:
        """Return a task, or None when there is no such task."""
        return TASKS.get(self.backend, task_id)


def _in_queue(reader: Reader, table: Table, within: Range = ALL) -> Iterator[Task]:
    """Tasks of the state of an index, by their ids; a torn write may leave one of another state."""
    for key, _ in reader.scan(table, within):
        record = reader.get(TASKS.table, key)
        yield from TASKS.readable(reader, [] if record is None else [(key, record)])


def _put(change: Change, task: Task) -> None:
    TASKS.put(change, task.id, task)
    if task.state == "queued":
        change.put(QUEUED, task.id, "")
    else:
        change.delete(QUEUED, task.id)
    if task.state == "running":
        change.put(RUNNING, task.id, "")
    elif task.state != "queued":
        change.delete(RUNNING, task.id)


def _note(change: Change, task: Task, reason: object) -> None:
    """Append the event of a task; reason: of the request, or why it failed."""
    why = {"reason": str(reason)} if reason else {}
    note(change, "task", {"task": task.id, "kind": task.kind, "state": task.state} | why)
