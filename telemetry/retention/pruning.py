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

from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from eplb.errors import ConfigError, HistoryError
from telemetry.retention.folding import Minutes, RunShape, hours_of
from telemetry.retention.reading import rollups_after
from telemetry.retention.rollup import HOUR, MINUTE, Rollup
from telemetry.store import LoadStore

_PAGE = 2_000  # samples read at a time


@dataclass(frozen=True)
class Retention:
    """Retention periods.

    Raises:
        ConfigError: a length that is not positive, or a negative number of events.
    """

    samples_s: float = 3600.0
    minutes_s: float = 24 * 3600.0
    hours_s: float = 30 * 24 * 3600.0
    events: int = 100_000

    def __post_init__(self) -> None:
        for name in ("samples_s", "minutes_s", "hours_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0 seconds")
        if self.events < 0:
            raise ConfigError(f"events is {self.events}, expected 0 or more")


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

    def __init__(self, store: LoadStore, retention: Retention | None = None) -> None:
        self._store, self._retention = store, retention or Retention()
        self._shapes: dict[str, RunShape] = {}

    def turn(self, now: float) -> Turn:
        """Prune and roll up what is due at ``now``, in seconds since the epoch.

        Raises:
            StoreError: the store failed; the next turn continues where this one ended.
        """
        done, kept = Turn(), self._retention
        self._roll_up_samples(_floor(now - kept.samples_s, MINUTE), done)
        self._roll_up_minutes(_floor(now - kept.minutes_s, HOUR), done)
        self._store.prune_rollups(HOUR, now - kept.hours_s)
        done.events = self._store.prune_events(kept.events)
        return done

    def _roll_up_samples(self, before_time: float, done: Turn) -> None:
        """Roll up and forget samples, the oldest minutes first."""
        end = -np.inf
        while end < before_time:
            minutes = Minutes(self._known_shapes(), before_time)
            refused = self._read_samples(minutes)
            end = minutes.end
            done.minutes += self._write(minutes.rollups(), done)
            done.samples += self._store.prune(end)
            done.excluded += len(refused)
            done.reason = refused[-1] if refused else done.reason

    def _read_samples(self, minutes: Minutes) -> list[str]:
        refused, cursor = [], 0
        while found := self._store.samples_before(minutes.end, after=cursor, limit=_PAGE):
            cursor = found[-1][0]
            refused += minutes.add([sample for _, sample in found]).refused
        return refused

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
        for info in self._store.runs():
            if info.run not in self._shapes:
                try:
                    self._shapes[info.run] = RunShape.of(info)
                except HistoryError:
                    continue  # its samples are left out, and counted as such
        return self._shapes


def _floor(time: float, seconds: int) -> float:
    return time // seconds * seconds
