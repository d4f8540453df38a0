"""Tasks in the Redis store: queued, claimed by one controller, ended once."""

from __future__ import annotations

from dataclasses import replace

from telemetry import rules
from telemetry.store import Details, Task, TaskState
from telemetry.stores.redis import rows
from telemetry.stores.redis.change import Change, Changes, State
from telemetry.stores.redis.connection.link import RedisLink
from telemetry.stores.redis.keys import Keys


class Tasks:
    """Tasks of one deployment, numbered from 1."""

    def __init__(self, link: RedisLink, keys: Keys, changes: Changes) -> None:
        self._link, self._keys, self._changes = link, keys, changes

    def submit(self, kind: str, request: Details) -> Task:
        """Queue a task."""
        asked = rules.details_from_text(rules.details_to_text(request))

        def decision(state: State, change: Change) -> Task:
            task_id = state.last("task_id") + state.gap("task_id") + 1
            task = Task(task_id, state.time, kind, asked, "queued", {})
            change.give_out("task_id", task_id, state)
            self._put(change, task)
            change.write("ZADD", self._keys.queued, task.id, task.id)
            change.event("task", rules.task_detail(task.id, kind, "queued"))
            return task

        return self._changes.decide(f"task {kind!r}", decision)

    def claim(self, fence: int | None) -> Task | None:
        """Set the oldest queued task running."""

        def decision(state: State, change: Change) -> Task | None:
            rules.check_fence(fence, state.lease)
            oldest = self._link.read("ZRANGE", self._keys.queued, 0, 0)
            found = self.get(int(oldest[0])) if oldest else None
            if found is None:
                return None
            task = replace(found, state="running")
            self._put(change, task)
            change.write("ZADD", self._keys.running, task.id, task.id)
            change.write("ZREM", self._keys.queued, task.id)
            change.is_awaited = True
            return task

        # Looked at first: a controller asks far more often than it gets.
        if fence is None and not self._link.read("ZCARD", self._keys.queued):
            return None
        return self._changes.decide("claim of a task", decision)

    def in_state(self, state: TaskState, after: int, limit: int) -> list[Task]:
        """Return tasks in a state past an id, oldest first."""
        asked = (self._keys.tasks_in(state), f"({after}", "+inf", "LIMIT", 0, limit)
        ids = self._link.read("ZRANGEBYSCORE", *asked)
        found = self._link.read("HMGET", self._keys.tasks, *ids) if ids else []
        tasks = [rows.task_from_text(text) for text in found if text is not None]
        return [task for task in tasks if task.state == state]  # it may have changed since

    def finish(self, task_id: int, state: TaskState, result: Details, fence: int | None) -> None:
        """End a task."""
        text = rules.details_to_text(result)

        def decision(seen: State, change: Change) -> None:
            rules.check_fence(fence, seen.lease)
            found = self.get(task_id)
            rules.check_finish(task_id, found.state if found else None, state)
            assert found is not None, "check_finish refuses a task that is not there"
            self._put(change, replace(found, state=state, result=rules.details_from_text(text)))
            change.write("ZREM", self._keys.queued, task_id)
            change.write("ZREM", self._keys.running, task_id)
            change.write("ZADD", self._keys.tasks_in(state), task_id, task_id)
            change.event("task", rules.task_detail(task_id, found.kind, state))

        self._changes.decide(f"end of task {task_id}", decision)

    def get(self, task_id: int) -> Task | None:
        """Return a task, or None when there is no such task."""
        found = self._link.read("HGET", self._keys.tasks, task_id)
        return rows.task_from_text(found) if found is not None else None

    def _put(self, change: Change, task: Task) -> None:
        change.write("HSET", self._keys.tasks, task.id, rows.task_to_text(task))
