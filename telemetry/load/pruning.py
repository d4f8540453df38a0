"""Retention of load: samples, then roll-ups of a minute, then of an hour.

Whatever is about to be forgotten is rolled up first. Each turn of the keeper reads, writes
roll-ups, and only then prunes. Of one stretch of time the first roll-up stands, and it is written
while all that it is made of is still there. So a keeper that is killed between any two steps loses
nothing and doubles nothing, and neither do two keepers at once: the next turn makes the same
roll-ups, which stand already, and prunes.

A sample that arrives after its minute was rolled up is older than all samples that are kept, an
hour by default. It is forgotten, and counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated

import numpy as np

from eplb.core.load import LoadSample, Phase
from eplb.declared import Setting, check_fields
from eplb.errors import HistoryError
from telemetry.load.counts import Outcome, Outcomes, RunShape, WindowSums, count_all
from telemetry.load.reader import model_and_topology, pages, shape_of
from telemetry.load.rollup import HOUR, MINUTE, Rollup, joined
from telemetry.state.store import StateStore

_PAGE = 2_000  # samples read at a time
_ROLLUPS = 100  # roll-ups
_MOST_MINUTES = 64  # filled at once; 58 layers x 256 experts x 320 ranks take 17 MB


@dataclass(frozen=True)
class Retention:
    """Retention periods.

    Raises:
        ConfigError: a length that is not positive, or a negative number of events.
    """

    keep_samples_s: Annotated[
        float, Setting("age at which samples become roll-ups of a minute", above=0)
    ] = 3600.0
    keep_minutes_s: Annotated[
        float, Setting("age at which roll-ups of a minute become roll-ups of an hour", above=0)
    ] = 24 * 3600.0
    keep_hours_s: Annotated[
        float, Setting("age at which roll-ups of an hour are removed", above=0)
    ] = 30 * 24 * 3600.0
    keep_events: Annotated[int, Setting("events that are kept, the latest", unit="events")] = (
        100_000
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class Turn:
    """Result of one turn of the keeper."""

    minutes: int = 0  # roll-ups written
    hours: int = 0
    standing: int = 0  # roll-ups made that stood already: of a killed turn, or of late samples
    samples: int = 0  # pruned
    excluded: int = 0  # samples that are in no roll-up, because they do not fit their run
    reason: str = ""  # of the last one left out
    events: int = 0  # pruned


class Keeper:
    """Rolls up and prunes one deployment. Call ``turn`` about once a minute."""

    def __init__(self, store: StateStore, retention: Retention | None = None) -> None:
        self._store, self._retention = store, retention or Retention()
        self._shapes: dict[str, RunShape] = {}

    def turn(self, now: float) -> Turn:
        """Prune and roll up what is due at ``now``, in seconds since the epoch.

        Raises:
            StoreError: the store failed; the next turn continues where this one ended.
        """
        done, kept = Turn(), self._retention
        self._roll_up_samples(_floor(now - kept.keep_samples_s, MINUTE), done)
        self._roll_up_minutes(_floor(now - kept.keep_minutes_s, HOUR), done)
        self._store.prune_rollups(HOUR, now - kept.keep_hours_s)
        done.events = self._store.prune_events(kept.keep_events)
        return done

    def _roll_up_samples(self, before_time: float, done: Turn) -> None:
        """Roll up and forget samples, the oldest minutes first."""
        end = -np.inf
        while end < before_time:
            minutes = self._read_samples(before_time)
            end = minutes.end
            done.minutes += self._write(minutes.rollups(), done)
            done.samples += self._store.prune(end)
            done.excluded += minutes.outcomes.counts["malformed"]
            done.reason = minutes.outcomes.reasons.get("malformed", done.reason)

    def _read_samples(self, before_time: float) -> _Minutes:
        minutes = _Minutes(self._known_shapes(), before_time)

        def query(*, after: int, limit: int) -> list[tuple[int, LoadSample]]:
            # No sample of a minute that this turn of the loop does not hold is read.
            return self._store.samples_before(minutes.end, after=after, limit=limit)

        for _, samples in pages(query, 0, _PAGE):
            minutes.add(samples)
        return minutes

    def _roll_up_minutes(self, before_time: float, done: Turn) -> None:
        """Roll up and forget roll-ups of a minute."""
        minutes = rollups_after(self._store, MINUTE, after=-1.0)
        old = takewhile(lambda minute: minute.start < before_time, minutes)
        done.hours += self._write(hours_of(old), done)
        self._store.prune_rollups(MINUTE, before_time)

    def _write(self, rollups: list[Rollup], done: Turn) -> int:
        num_new = self._store.add_rollups(rollups) if rollups else 0
        done.standing += len(rollups) - num_new
        return num_new

    def _known_shapes(self) -> dict[str, RunShape]:
        deployment = self._store.deployment
        for info in self._store.runs():
            if info.run not in self._shapes:
                try:
                    model, topology = model_and_topology(info)
                except HistoryError:
                    continue  # its samples are left out, and counted as such
                self._shapes[info.run] = shape_of(deployment, info.run, model, topology)
        return self._shapes


class _Minutes:
    """Samples of any run, in any order, as roll-ups of a minute.

    Only so many minutes are held, the oldest: ``end`` is where those begin that are not.
    """

    def __init__(self, shapes: dict[str, RunShape], end: float) -> None:
        self.end, self.outcomes = end, Outcomes()
        self._shapes = shapes
        self._filling: dict[float, dict[tuple[str, Phase], WindowSums]] = defaultdict(dict)

    def add(self, samples: list[LoadSample]) -> None:
        """Count samples; those of minutes that are not held are late."""
        by_run: dict[str, list[LoadSample]] = defaultdict(list)
        for sample in samples:
            by_run[sample.run].append(sample)
        for run, of_run in by_run.items():
            if run in self._shapes:
                count_all(of_run, self._shapes[run], self._place, self.outcomes)
                continue
            for _ in of_run:
                self.outcomes.exclude(
                    "malformed", f"run {run!r} is not recorded, expected its start"
                )

    def rollups(self) -> list[Rollup]:
        """Return the roll-ups of the minutes that are held, oldest first."""
        return [
            Rollup(
                run,
                phase,
                MINUTE,
                start,
                filling.first_step,
                filling.last_step,
                filling.num_samples,
                frozenset(filling.generations),
                frozenset(filling.ranks),
                *filling.total(phase),
            )
            for start, fillings in sorted(self._filling.items())
            for (run, phase), filling in sorted(fillings.items())
        ]

    def _place(self, sample: LoadSample) -> WindowSums | Outcome:
        if not sample.time < self.end:
            return "late"
        start = _floor(sample.time, MINUTE)
        fillings, key = self._filling[start], (sample.run, sample.phase)
        if key not in fillings:
            fillings[key] = WindowSums(self._shapes[sample.run])
        if len(self._filling) > _MOST_MINUTES:
            self.end = max(self._filling)
            del self._filling[self.end]
        return fillings[key] if start < self.end else "late"


def hours_of(minutes: Iterable[Rollup]) -> list[Rollup]:
    """Fold roll-ups of a minute into those of an hour, oldest first."""
    hours: dict[tuple[float, str, Phase], Rollup] = {}
    for minute in minutes:
        key = (_floor(minute.start, HOUR), minute.run, minute.phase)
        # One by one: the minutes of a day at once would take 400 MB.
        parts = [hours[key], minute] if key in hours else [minute]
        hours[key] = joined(parts, HOUR, key[0], minute.phase)
    return [hours[key] for key in sorted(hours)]


def _floor(time: float, seconds: int) -> float:
    return time // seconds * seconds


def rollups_after(store: StateStore, seconds: int, after: float) -> Iterator[Rollup]:
    """Give the roll-ups of a length that start past a time, oldest first, as they are asked for.

    Raises:
        StoreError: the store cannot be read.
    """
    limit = _ROLLUPS
    while page := store.rollups(seconds, after=after, limit=limit):
        # Those that start together may go on past the end of a page: read again with the next.
        is_last = len(page) < limit
        whole = page if is_last else [one for one in page if one.start < page[-1].start]
        if not whole:
            limit *= 2
            continue
        yield from whole
        if is_last:
            return
        after = whole[-1].start
