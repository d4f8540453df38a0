"""Samples, placements and tasks in memory, for MemoryStore, whose lock guards them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from eplb.load import LoadSample
from eplb.migration import Migration
from telemetry import rules
from telemetry.store import CommittedPlacement, Details, Task, TaskState


def as_stored(details: Details) -> Details:
    """A copy as every store gives it back: what JSON makes of it, changed by nobody."""
    return rules.details_from_text(rules.details_to_text(details))


class SampleTable:
    """Samples in order of arrival, each (run, rank, sequence) once."""

    def __init__(self) -> None:
        self._samples: dict[int, LoadSample] = {}  # by cursor
        self._keys: set[tuple[str, int, int]] = set()
        self._pruned: Counter[tuple[str, int]] = Counter()  # by run and rank
        self._last_cursor = 0

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples and return how many were new."""
        before = self._last_cursor
        for sample in samples:
            if _key(sample) not in self._keys:
                self._keys.add(_key(sample))
                self._last_cursor += 1
                self._samples[self._last_cursor] = sample
        return self._last_cursor - before

    def past(self, run: str, after: int) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of a run past the cursor ``after``."""
        of_run = [item for item in self._samples.items() if item[1].run == run]
        return [(cursor, sample) for cursor, sample in of_run if cursor > after]

    def count(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were added, those included that were pruned."""
        counts = Counter(rank for of_run, rank, _ in self._keys if of_run == run)
        counts.update({rank: num for (of_run, rank), num in self._pruned.items() if of_run == run})
        return dict(sorted(counts.items()))

    def prune(self, before_time: float) -> int:
        """Forget samples taken before ``before_time`` and return how many."""
        old = [cursor for cursor, sample in self._samples.items() if sample.time < before_time]
        for cursor in old:
            sample = self._samples.pop(cursor)
            self._keys.remove(_key(sample))
            self._pruned[sample.run, sample.rank] += 1
        return len(old)


class PlacementTable:
    """Committed placements, and the open migration."""

    def __init__(self) -> None:
        self._lines: dict[int, CommittedPlacement] = {}  # by generation, which only grows
        self._plan_ids: set[int] = set()  # published so far
        self.open: Migration | None = None

    def latest(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        return next(reversed(self._lines.values()), None)

    def newest_first(self) -> list[CommittedPlacement]:
        """Return all committed placements."""
        return list(reversed(self._lines.values()))

    def add(self, line: CommittedPlacement, expected: int | None) -> bool:
        """Commit a placement; False when this very one was committed before."""
        latest, known = self.latest(), self._lines.get(line.placement.generation)
        is_new = rules.is_to_be_committed(
            line.placement,
            expected=expected,
            committed=latest.placement.generation if latest else None,
            known_hash=known.placement.hash if known else None,
        )
        if is_new:
            self._lines[line.placement.generation] = line
        return is_new

    def publish(self, migration: Migration) -> None:
        """Open a migration."""
        rules.check_plan_id(
            migration.plan_id,
            open_plan_id=self.open.plan_id if self.open else None,
            is_known=migration.plan_id in self._plan_ids,
        )
        latest = self.latest()
        committed = (latest.placement.generation, latest.placement.hash) if latest else None
        rules.check_base(migration, committed)
        self._plan_ids.add(migration.plan_id)
        self.open = migration


class TaskTable:
    """Tasks, numbered from 1."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def add(self, time: float, kind: str, request: Details) -> Task:
        """Queue a task."""
        task = Task(len(self._tasks) + 1, time, kind, as_stored(request), "queued", {})
        self._tasks.append(task)
        return task

    def claim(self) -> Task | None:
        """Set the oldest queued task running."""
        for index, task in enumerate(self._tasks):
            if task.state == "queued":
                self._tasks[index] = replace(task, state="running")
                return self._tasks[index]
        return None

    def running(self) -> list[Task]:
        """Return the tasks that were claimed and have not ended."""
        return [task for task in self._tasks if task.state == "running"]

    def finish(self, task_id: int, state: TaskState, result: Details) -> Task:
        """End a task."""
        found = self.get(task_id)
        rules.check_finish(task_id, found.state if found else None, state)
        assert found is not None, "check_finish refuses a task that is not there"
        ended = replace(found, state=state, result=as_stored(result))
        self._tasks[task_id - 1] = ended
        return ended

    def get(self, task_id: int) -> Task | None:
        """Return a task, or None when there is no such task."""
        return self._tasks[task_id - 1] if 1 <= task_id <= len(self._tasks) else None


def _key(sample: LoadSample) -> tuple[str, int, int]:
    return sample.run, sample.rank, sample.sequence
