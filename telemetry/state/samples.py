"""Samples of ranks, in order of arrival, and what is kept of those that were pruned.

A reader skips a record that is damaged, and one that another version wrote
(``telemetry/state/unreadable.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from math import inf, isfinite, nextafter

from eplb.core.load import LoadSample
from eplb.errors import ConfigError, HistoryError
from telemetry.load.rollup import Rollup, rollup_from_bytes, rollup_to_bytes
from telemetry.load.sample_codec import sample_from_bytes, sample_to_bytes
from telemetry.state.backend import Change, Entry, Range, Table, Value, packed
from telemetry.state.part import Part

ROLLUPS = Table("rollups", is_ordered=True)  # (start, run, phase) -> roll-up, for each length
_SAMPLE, _ROLLUP = "sample", "roll-up"  # kinds of unreadable records


class SamplePart(Part):
    """Samples and roll-ups."""

    deployment: str

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples and return how many were new; a repeated (run, rank, sequence) is not.

        When an answer was lost and a batch was sent again, the count is of what was new then.

        Raises:
            ConfigError: a sample of another deployment.
            HistoryError: a sample without a time by which it can be read or pruned.
        """
        for sample in samples:
            _check(sample, self.deployment)
        return self.backend.append(
            [Entry(s.run, s.rank, s.sequence, s.time, sample_to_bytes(s)) for s in samples]
        )

    def samples(
        self, run: str, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) in order of arrival, those past the cursor ``after``.

        A record that cannot be read is left out and counted in ``refused``. Only when there is
        nothing more past the cursor is the result empty.
        """
        return self._page(
            lambda past: self.backend.read(run, past, limit), after=after, position=run
        )

    def samples_before(
        self, before_time: float, *, since: float = -inf, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return what ``prune(before_time)`` would forget, of every run; else as ``samples``.

        Args:
            since: samples taken before that are left out, and not read.
        """
        return self._page(
            lambda past: self.backend.read_between(since, before_time, past, limit),
            after=after,
            position=None if isfinite(since) else "before",
        )

    def sample_counts(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were stored, those included that were pruned."""
        return self.backend.counts(run)

    def prune(self, before_time: float) -> int:
        """Forget samples taken before ``before_time``, of any run, and return how many."""
        return self.backend.prune_log(before_time)

    def refused(self) -> dict[str, int]:
        """Return how many samples and roll-ups this object could not read, by reason.

        Reasons: "damaged", and "version" for one written by a version that is not known here.
        """
        by_reason: Counter[str] = Counter()
        for (kind, reason), number in self.backend.unreadable.counts().items():
            if kind in (_SAMPLE, _ROLLUP):
                by_reason[reason] += number
        return dict(by_reason)

    def skipped(self) -> dict[str, int]:
        """Return how many other records this object could not read, by their kind."""
        by_kind: Counter[str] = Counter()
        for (kind, _), number in self.backend.unreadable.counts().items():
            if kind not in (_SAMPLE, _ROLLUP):
                by_kind[kind] += number
        return dict(by_kind)

    def add_rollups(self, rollups: Sequence[Rollup]) -> int:
        """Add roll-ups, all or none, and return how many were new.

        Of one (run, phase, seconds, start) the first stands.
        """
        packed = {
            (ROLLUPS.of(r.seconds), f"{r.run}\0{r.phase}\0{r.start!r}"): (r, rollup_to_bytes(r))
            for r in reversed(rollups)
        }

        def decision(change: Change) -> int:
            new = [(table, key) for table, key in packed if change.get(table, key) is None]
            for table, key in new:
                rollup, record = packed[table, key]
                change.put(table, key, record, order=float(rollup.start))
            return len(new)

        return self.backend.decide(f"adding of {len(rollups)} roll-ups", decision)

    def rollups(self, seconds: int, *, after: float = -1.0, limit: int = 10_000) -> list[Rollup]:
        """Return roll-ups of that length that start past ``after``, of every run, oldest first."""
        table, num_read = ROLLUPS.of(seconds), limit
        while True:
            records = self.backend.scan(table, Range(after, limit=num_read))
            named = [((seconds, key), record) for key, record in records]
            readable = self.backend.unreadable.readable(named, _rollup_of, _ROLLUP)
            if readable or len(records) < num_read:
                return [rollup for _, rollup in readable]
            num_read *= 2  # none of these could be read

    def prune_rollups(self, seconds: int, before_time: float) -> int:
        """Forget roll-ups of that length that ended by ``before_time``, and return how many."""
        return self.backend.prune(ROLLUPS.of(seconds), nextafter(before_time - seconds, inf))

    def _page(
        self,
        fetch: Callable[[int], list[tuple[int, bytes]]],
        *,
        after: int,
        position: Hashable | None,
    ) -> list[tuple[int, LoadSample]]:
        """Return readable samples past a cursor; none only where no more follow.

        A reader's cursor stays where it read nothing. How far it was read from there is kept, for
        each ``position``, so that an unreadable tail is not read every time; None: of a read that
        is not repeated nothing is kept.
        """
        unreadable = self.backend.unreadable
        start = unreadable.passed(position, after)
        while records := fetch(start):
            start = records[-1][0]
            if readable := unreadable.readable(records, sample_from_bytes, _SAMPLE):
                return readable
        if position is not None:
            unreadable.pass_by(position, after, start)
        return []


def _rollup_of(record: Value) -> Rollup:
    return rollup_from_bytes(packed(record, "a roll-up"))


def _check(sample: LoadSample, deployment: str) -> None:
    if not isfinite(sample.time):
        raise HistoryError(
            f"sample {sample.sequence} of rank {sample.rank} was taken at {sample.time}, "
            "expected a time"
        )
    if sample.deployment != deployment:
        raise ConfigError(
            f"sample {sample.sequence} of rank {sample.rank} is of deployment "
            f"{sample.deployment!r}, expected {deployment!r}"
        )
