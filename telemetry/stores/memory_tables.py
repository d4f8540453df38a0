"""Tables of MemoryStore; the lock of the store guards them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from eplb.core.load import LoadSample
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery
from telemetry import rules
from telemetry.retention.rollup import Rollup
from telemetry.store import CommittedPlacement, Details, Event, Lease, LeaseOf, Task, TaskState
from telemetry.stores.lease_watch import LeaseWatch


def as_stored(details: Details) -> Details:
    """A copy through JSON, as every store returns it, immutable to others."""
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

    def before(self, before_time: float, after: int) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken before a time and past a cursor."""
        old = [item for item in self._samples.items() if item[1].time < before_time]
        return [(cursor, sample) for cursor, sample in old if cursor > after]

    def count(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were added, those included that were pruned."""
        counts = Counter(rank for of_run, rank, _ in self._keys if of_run == run)
        counts.update({rank: num for (of_run, rank), num in self._pruned.items() if of_run == run})
        return dict(sorted(counts.items()))

    def prune(self, before_time: float) -> int:
        """Forget samples taken before ``before_time`` and return how many."""
        old = self.before(before_time, after=0)
        for cursor, sample in old:
            del self._samples[cursor]
            self._keys.remove(_key(sample))
            self._pruned[sample.run, sample.rank] += 1
        return len(old)


class RollupTable:
    """Roll-ups, each (run, phase, seconds, start) once."""

    def __init__(self) -> None:
        self._rollups: dict[tuple[float, str, str, int], Rollup] = {}

    def add(self, rollups: Sequence[Rollup]) -> int:
        """Add roll-ups and return how many were new."""
        before = len(self._rollups)
        for one in rollups:
            self._rollups.setdefault((one.start, one.run, one.phase, one.seconds), one)
        return len(self._rollups) - before

    def past(self, seconds: int, after: float) -> list[Rollup]:
        """Return roll-ups of a length that start past ``after``, oldest first."""
        found = (key for key in self._rollups if key[0] > after and key[3] == seconds)
        return [self._rollups[key] for key in sorted(found)]

    def prune(self, seconds: int, before_time: float) -> int:
        """Forget roll-ups of a length that ended by a time, and return how many."""
        last_start = before_time - seconds
        old = [key for key in self._rollups if key[3] == seconds and key[0] <= last_start]
        for key in old:
            del self._rollups[key]
        return len(old)


class LeaseTable:
    """The last lease of each kind that was given out."""

    def __init__(self, monotonic: Callable[[], float] | None) -> None:
        self._latest: dict[LeaseOf, Lease] = {}
        self._watch = LeaseWatch(monotonic)

    def acquire(self, holder: str, ttl_s: float, of: LeaseOf, now: float) -> Lease | None:
        """Grant the lease to ``holder``, unless another holds it."""
        latest, is_over = self._latest.get(of), self._watch.is_over
        lease = rules.next_lease(holder, ttl_s, of, now=now, latest=latest, is_over=is_over)
        return None if lease is None else self._write(lease)

    def release(self, lease: Lease, now: float) -> bool:
        """End a lease; False when it was its holder's no more."""
        latest, is_over = self._latest.get(lease.of), self._watch.is_over
        ended = rules.given_up(lease, now=now, latest=latest, is_over=is_over)
        return ended is not None and self._write(ended) is ended

    def held(self, of: LeaseOf) -> Lease | None:
        """Return the lease that holds now."""
        latest = self._latest.get(of)
        return None if latest is None or self._watch.is_over(latest) else latest

    def check(self, fence: int | None) -> None:
        """Refuse a writer whose token is not the newest."""
        rules.check_fence(fence, self._latest.get("controller"))

    def _write(self, lease: Lease) -> Lease:
        self._latest[lease.of] = lease
        self._watch.age_s(lease)
        return lease


class EventTable:
    """Events, numbered from 1; the oldest may be forgotten."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_pruned = 0

    def add(self, time: float, kind: str, detail: Details) -> Event:
        """Append an event."""
        event_id = self._num_pruned + len(self._events) + 1
        self._events.append(Event(event_id, time, kind, as_stored(detail)))
        return self._events[-1]

    def past(self, after: int) -> list[Event]:
        """Return events past an id, oldest first."""
        return self._events[max(0, after - self._num_pruned) :]

    def prune(self, keep: int) -> int:
        """Forget all but the latest ``keep`` and return how many."""
        num_old = max(0, len(self._events) - max(0, keep))
        del self._events[:num_old]
        self._num_pruned += num_old
        return num_old


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

    def add(
        self, line: CommittedPlacement, expected: int | None, recovery: Recovery | None
    ) -> bool:
        """Commit a placement; False when this very one was committed before."""
        latest, known = self.latest(), self._lines.get(line.placement.generation)
        is_new = rules.is_to_be_committed(
            line.placement,
            expected=expected,
            committed=latest.placement.generation if latest else None,
            known_hash=known.placement.hash if known else None,
        )
        if is_new:
            rules.check_not_dropped(line.plan_id, line.placement.generation, recovery)
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
