"""Counters of a run: figures that only grow, summed over events and ranks.

A process that begins to follow a run later counts the same, because all of it is in the store. So a
counter does not fall when the process that shows it restarts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample
from eplb.core.placement import EMPTY
from eplb.decision.pace import PaceChange
from eplb.decision.triggers import ACTS
from telemetry.state.events import (
    OUTCOME_OF_EVENT,
    Event,
    Outcome,
    pace_change,
    plan_end,
    plan_offer,
)
from telemetry.state.runs import RankState

SCRUB_RESULTS = ("clean", "damaged", "repaired", "lost")
UNTOLD = "untold"  # a migration that no noted plan led to
# What an anomaly counts as, by the place that an "error" event names; any other is "other".
ANOMALIES = ("load", "plan", "rank_death", "store_lost", "other")
# What the controller makes of samples that it does not count as load;
# telemetry.load.counts.OUTCOMES.
EXCLUDED = ("repeated", "late", "future", "stale", "malformed", "unreadable")
PACE_RESULTS = ("raised", "kept", "halved")  # of a judged migration, for the next one
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Durations:
    """A histogram: how many took at most each of BUCKETS_S, and longer; and their sum."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)  # not cumulative; the last is longer
    total_s: float = 0.0

    def plus(self, seconds: float) -> Durations:
        """Give the histogram with one more."""
        at = bisect_left(BUCKETS_S, seconds)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Durations(counts, self.total_s + seconds)


def anomaly_of(event: Event) -> str:
    """Which of ANOMALIES an event is; "" if it is none."""
    if event.kind == "error":
        where = str(event.detail.get("where", ""))
        return where if where in ANOMALIES else "other"
    return {"recovery": "rank_death", "restore": "store_lost"}.get(event.kind, "")


class RunTally:
    """Counts the plans of all runs, from the store's events in order: a death resets nothing."""

    def __init__(self) -> None:
        self.ended_plans = Counter(dict.fromkeys(OUTCOME_OF_EVENT.values(), 0))  # by outcome
        self.decided: Counter[tuple[str, ...]] = Counter()  # by (policy, decision)
        self.rebalances: Counter[tuple[str, ...]] = Counter(  # by (trigger, outcome)
            {(trigger, outcome): 0 for trigger in ACTS for outcome in self.ended_plans}
        )
        self.anomalies = Counter(dict.fromkeys(ANOMALIES, 0))  # by type
        self.excluded = dict.fromkeys(EXCLUDED, 0)  # samples, as the controller reported last
        self._excluded_before = Counter(self.excluded)  # of earlier runs
        self.pace_changes = Counter(dict.fromkeys(PACE_RESULTS, 0))
        self.plan_s = Durations()
        self.rebalance_s = Durations()  # from offered to committed
        self._trigger = UNTOLD  # of the plan noted last
        self._offered: tuple[int, str, float] = (0, UNTOLD, 0.0)  # plan id, trigger, when

    def note(self, event: Event) -> None:
        """Count one more event."""
        detail = event.detail
        if event.kind == "run":
            self._excluded_before.update(self.excluded)
            self.excluded = dict.fromkeys(EXCLUDED, 0)
        if "samples" in detail:
            self.excluded = {name: int(detail["samples"].get(name, 0)) for name in EXCLUDED}
        if event.kind == "plan":
            self.decided[str(detail.get("policy", "")), str(detail.get("decision", ""))] += 1
            self._trigger = str(detail.get("trigger", UNTOLD))
            if "plan_seconds" in detail:
                self.plan_s = self.plan_s.plus(float(detail["plan_seconds"]))
        elif (offer := plan_offer(event)) is not None:
            self._offered = (offer.plan_id, self._trigger, event.time)
            self._trigger = UNTOLD
        elif (end := plan_end(event)) is not None:
            self._note_end(end.plan_id, OUTCOME_OF_EVENT[event.kind], event.time)
        elif (change := pace_change(event)) is not None:
            self.pace_changes[_pace_result(change)] += 1
        elif found := anomaly_of(event):
            self.anomalies[found] += 1

    def shown(self) -> dict[str, Any]:
        """Give the counts of now as fields of a Snapshot."""
        return {
            "ended_plans": dict(self.ended_plans),
            "decided": dict(self.decided),
            "rebalances": dict(self.rebalances),
            "anomalies": dict(self.anomalies),
            "samples_excluded": {
                name: self._excluded_before[name] + self.excluded[name] for name in EXCLUDED
            },
            "pace_changes": dict(self.pace_changes),
            "plan_s": self.plan_s,
            "rebalance_s": self.rebalance_s,
        }

    def _note_end(self, plan_id: int, outcome: Outcome, time: float) -> None:
        self.ended_plans[outcome] += 1
        offered_id, trigger, since = self._offered
        self.rebalances[trigger if offered_id == plan_id else UNTOLD, outcome] += 1
        if outcome == "committed" and offered_id == plan_id:
            self.rebalance_s = self.rebalance_s.plus(max(0.0, time - since))


def _pace_result(change: PaceChange) -> str:
    if change.part == change.part_before:
        return "kept"
    return "raised" if change.part > change.part_before else "halved"


# Before a rank without a token is reported: steps of its samples, tokens for each rank.
UNCOUNTED_STEPS, UNCOUNTED_TOKENS = 256, 10_000


class SampleTally:
    """Figures from the samples of a run beside their windows."""

    def __init__(self) -> None:
        self._newest: dict[int, float] = {}  # rank -> time of its newest sample
        self._received: dict[int, NDArray[np.int64]] = {}  # rank -> [L] tokens of all its samples
        self._first: dict[int, LoadSample] = {}  # rank -> first sample of its newest generation
        self._steps: Counter[int] = Counter()  # of each rank's samples
        self._in_migration: set[int] = set()  # windows
        self.token_time: float | None = None  # of the newest sample with a token

    def note(self, sample: LoadSample, window: int) -> None:
        """Count one more sample, of a window."""
        self._newest[sample.rank] = max(sample.time, self._newest.get(sample.rank, sample.time))
        self._steps[sample.rank] += sample.last_step - sample.first_step + 1
        received = sample.tokens.sum(axis=1)
        if received.any():
            self.token_time = max(sample.time, self.token_time or sample.time)
        self._received[sample.rank] = self._received.get(sample.rank, 0) + received
        if self._is_in_migration(sample):
            self._in_migration.add(window)

    def windows_in_migration(self, oldest: int) -> frozenset[int]:
        """Windows in which part of a migration served that was not committed yet.

        Drops those before ``oldest``. Detected by slots, so new shares alone are not seen.
        """
        self._in_migration = {window for window in self._in_migration if window >= oldest}
        return frozenset(self._in_migration)

    def _is_in_migration(self, sample: LoadSample) -> bool:
        """Return whether a rank holds other experts than when its generation began.

        Only the last transaction of a migration makes a generation: what the ones before it have
        swapped serves under the number of the placement that they leave.
        """
        first = self._first.setdefault(sample.rank, sample)
        if sample.generation > first.generation:
            self._first[sample.rank] = first = sample
        return sample.generation == first.generation and not np.array_equal(
            sample.slot_to_expert, first.slot_to_expert
        )

    def age_s(self, now: float) -> float | None:
        """Age of the newest sample of the rank that is furthest behind; None before any."""
        oldest = min(self._newest.values(), default=None)
        return None if oldest is None else max(0.0, now - oldest)

    def uncounted(self) -> tuple[int, ...]:
        """Ranks that hold experts and counted no token since the start, while others did.

        A rank may be idle, and then receives what others route to its experts: with fewer tokens
        than ``UNCOUNTED_TOKENS`` for each rank nothing is concluded. Where no rank counts a token,
        all may be idle.
        """
        total = sum(int(tokens.sum()) for tokens in self._received.values())
        if total < UNCOUNTED_TOKENS * len(self._received):
            return ()
        return tuple(
            rank
            for rank, tokens in sorted(self._received.items())
            if not tokens.any()
            and self._steps[rank] >= UNCOUNTED_STEPS
            and (self._first[rank].slot_to_expert != EMPTY).any()
        )

    def received(self, num_ranks: int) -> NDArray[np.int64] | None:
        """[L, R] tokens that each rank received over all samples; None before any."""
        if not self._received:
            return None
        silent = np.zeros_like(next(iter(self._received.values())))
        return np.stack([self._received.get(r, silent) for r in range(num_ranks)], axis=1)


@dataclass(frozen=True)
class Carried:
    """Counters of the ranks of runs that have ended, as the ranks reported them last."""

    bytes_by_source: Mapping[str, int] = field(default_factory=dict)
    scrubbed: Mapping[str, int] = field(default_factory=dict)
    experts_moved: int = 0
    samples_lost: int = 0
    store_errors: int = 0
    digest_failures: int = 0
    mover_failures: int = 0
    samples_stored: int = 0

    def plus(self, states: Sequence[RankState], samples_stored: int) -> Carried:
        """Give the counters with those of one run more."""

        def total(key: str) -> int:
            return sum(int(state.detail.get(key, 0)) for state in states)

        moved, scrubbed = Counter(self.bytes_by_source), Counter(self.scrubbed)
        for state in states:
            moved.update(state.detail.get("bytes_by_source", {}))
            scrubbed.update(state.detail.get("scrubbed", {}))
        return Carried(
            bytes_by_source=moved,
            scrubbed=scrubbed,
            experts_moved=self.experts_moved + total("experts_moved"),
            samples_lost=self.samples_lost + total("samples_lost"),
            store_errors=self.store_errors + total("store_errors"),
            digest_failures=self.digest_failures + sum(one.digest_failures for one in states),
            mover_failures=self.mover_failures + sum(one.mover_failures for one in states),
            samples_stored=self.samples_stored + samples_stored,
        )


def scrubbed_slots(states: Iterable[RankState]) -> dict[str, int]:
    """Sum the live slots that the ranks' scrubbers checked, by result."""
    total = Counter(dict.fromkeys(SCRUB_RESULTS, 0))
    for state in states:
        total.update(state.detail.get("scrubbed", {}))
    return dict(total)


def oldest_progress(states: Iterable[RankState], now: float) -> tuple[float | None, str]:
    """Give the longest time without progress of a step or busy thread, and where it is."""
    ages = [
        (
            max(0.0, now - state.time - state.report_every_s) + state.progress_age_s,
            f"rank {state.rank}, {state.progress_of or 'the step'}",
        )
        for state in states
    ]
    return max(ages, key=lambda age: age[0], default=(None, ""))
