"""What has happened in a run so far: figures that only grow, summed over events and ranks.

Whoever begins to follow a run later counts the same, because all of it is read from the store. So a
counter does not fall when the process that shows it is started again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from telemetry.store import Event, RankState

OUTCOME_OF_EVENT = {"commit": "committed", "abort": "aborted", "reject": "rejected"}
SCRUB_RESULTS = ("clean", "damaged", "repaired", "lost")
TRIGGERS = ("load", "request")  # the controller's own, after a window; asked for by a person
UNTOLD = "untold"  # a migration that no noted plan led to
# What an anomaly counts as, by the place that an "error" event names; any other is "other".
ANOMALIES = ("load", "plan", "rank_death", "other")
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


class RunTally:
    """Counts the plans of the current run, from the store's events in order."""

    def __init__(self) -> None:
        self.ended_plans = Counter(dict.fromkeys(OUTCOME_OF_EVENT.values(), 0))  # by outcome
        self.decided: Counter[tuple[str, ...]] = Counter()  # by (policy, decision)
        self.rebalances: Counter[tuple[str, ...]] = Counter(  # by (trigger, outcome)
            {(trigger, outcome): 0 for trigger in TRIGGERS for outcome in self.ended_plans}
        )
        self.anomalies = Counter(dict.fromkeys(ANOMALIES, 0))  # by type
        self.plan_s = Durations()
        self.rebalance_s = Durations()  # from offered to committed
        self._trigger = UNTOLD  # of the plan noted last
        self._offered: tuple[int, str, float] = (0, UNTOLD, 0.0)  # plan id, trigger, when

    def note(self, event: Event) -> None:
        """Count one more event."""
        detail = event.detail
        if event.kind == "plan":
            self.decided[str(detail.get("policy", "")), str(detail.get("decision", ""))] += 1
            self._trigger = str(detail.get("trigger", UNTOLD))
            if "plan_seconds" in detail:
                self.plan_s = self.plan_s.plus(float(detail["plan_seconds"]))
        elif event.kind == "publish":
            self._offered = (int(detail.get("plan_id", 0)), self._trigger, event.time)
            self._trigger = UNTOLD
        elif event.kind in OUTCOME_OF_EVENT and int(detail.get("plan_id", 0)) > 0:
            self._note_end(int(detail["plan_id"]), OUTCOME_OF_EVENT[event.kind], event.time)
        elif event.kind == "error":
            where = str(detail.get("where", ""))
            self.anomalies[where if where in ANOMALIES else "other"] += 1
        elif event.kind == "recovery":
            self.anomalies["rank_death"] += 1

    def _note_end(self, plan_id: int, outcome: str, time: float) -> None:
        self.ended_plans[outcome] += 1
        offered_id, trigger, since = self._offered
        self.rebalances[trigger if offered_id == plan_id else UNTOLD, outcome] += 1
        if outcome == "committed" and offered_id == plan_id:
            self.rebalance_s = self.rebalance_s.plus(max(0.0, time - since))


def scrubbed_slots(states: Iterable[RankState]) -> dict[str, int]:
    """Sum the live slots that the ranks' scrubbers looked at, by what came of it."""
    total = Counter(dict.fromkeys(SCRUB_RESULTS, 0))
    for state in states:
        total.update(state.detail.get("scrubbed", {}))
    return dict(total)


def oldest_progress(states: Iterable[RankState], now: float) -> tuple[float | None, str]:
    """Give the age of what has got on least, as far as anybody knows, and say what it is."""
    ages = [
        (
            max(0.0, now - state.time) + float(state.detail.get("progress_age_s", 0.0)),
            f"rank {state.rank}, {state.detail.get('progress_of') or 'the step'}",
        )
        for state in states
    ]
    return max(ages, key=lambda age: age[0], default=(None, ""))
