"""Tables of MemoryStore; the lock of the store guards them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

from eplb.core.load import LoadSample
from telemetry.retention.rollup import Rollup
from telemetry.store import Details, Event


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

    def between(self, since: float, before_time: float, after: int) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken in a stretch of time and past a cursor."""
        found = [item for item in self._samples.items() if since <= item[1].time < before_time]
        return [(cursor, sample) for cursor, sample in found if cursor > after]

    def count(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were added, those included that were pruned."""
        counts = Counter(rank for of_run, rank, _ in self._keys if of_run == run)
        counts.update({rank: num for (of_run, rank), num in self._pruned.items() if of_run == run})
        return dict(sorted(counts.items()))

    def prune(self, before_time: float) -> int:
        """Forget samples taken before ``before_time`` and return how many."""
        old = self.between(-inf, before_time, after=0)
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


class EventTable:
    """Events, numbered from 1; the oldest may be forgotten."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_pruned = 0

    def add(self, time: float, kind: str, detail: Details) -> Event:
        """Append an event."""
        event_id = self._num_pruned + len(self._events) + 1
        self._events.append(Event(event_id, time, kind, detail))
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


def _key(sample: LoadSample) -> tuple[str, int, int]:
    return sample.run, sample.rank, sample.sequence
