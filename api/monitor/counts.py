"""Counters for metrics: figures that only grow, summed over events, ranks and runs.

All of it is in the store: a process that begins to follow a deployment later counts the same, and
no counter falls when the process that shows it restarts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from api.monitor.state import Counts, DecisionRecord, Durations
from eplb.core.load import LoadSample
from eplb.core.placement import EMPTY
from eplb.decision.pace import PaceChange
from eplb.decision.triggers import ACTS
from telemetry.state.events import (
    FAILED,
    OUTCOME_OF_EVENT,
    RECOVERED,
    RESTORED,
    SERVE_ON_STAGES,
    Event,
    Failure,
    Outage,
    PlanDecision,
    PlanEnd,
    SampleCounts,
    ServedOn,
)
from telemetry.state.runs import RankState, RunBegan

# In the order in which they are tried. The last two fill the host cache, not a slot.
SOURCES = ("same_rank", "peer", "host", "disk")
SCRUB_RESULTS = ("clean", "damaged", "repaired", "lost")
UNTOLD = "untold"  # trigger of a migration whose plan is not known
# What an anomaly counts as, by the place that an "error" event names; any other is "other".
ANOMALIES = ("load", "plan", "rank_death", "store_lost", "other")
# What the controller makes of samples that it does not count as load;
# telemetry.load.counts.OUTCOMES.
EXCLUDED = ("repeated", "late", "future", "stale", "malformed", "unreadable")
PACE_RESULTS = ("raised", "kept", "halved")  # pace of the next migration, after a judgement

# By the counter's name and the values of its labels, as ("anomalies", "load").
Tally = Counter[tuple[str, ...]]


def anomaly_of(event: Event) -> str:
    """Which of ANOMALIES an event is; "" if it is none."""
    if event.kind == FAILED:
        where = event.fact.where if isinstance(event.fact, Failure) else ""
        return where if where in ANOMALIES else "other"
    return {RECOVERED: "rank_death", RESTORED: "store_lost"}.get(event.kind, "")


def rank_tally(states: Iterable[RankState]) -> Tally:
    """Sum the counters of the ranks of one run.

    Ranks may count bytes of more than these sources, for example of records with a wrong digest.
    """
    total: Tally = Counter({("bytes_by_source", source): 0 for source in SOURCES})
    total.update({("scrubbed", result): 0 for result in SCRUB_RESULTS})
    for state in states:
        its = state.figures
        total[("experts_moved",)] += its.experts_moved or 0
        total[("samples_lost",)] += its.samples_lost or 0
        total[("store_errors",)] += its.store_errors or 0
        for source, count in (its.bytes_by_source or {}).items():
            total["bytes_by_source", source] += count
        for result, count in (its.scrubbed or {}).items():
            total["scrubbed", result] += count
        total[("digest_failures",)] += state.digest_failures
        total[("mover_failures",)] += state.mover_failures
    return total


class EventTally:
    """Counts the plans and anomalies of all runs, from the store's events in order."""

    def __init__(self) -> None:
        self.tally: Tally = Counter({("anomalies", kind): 0 for kind in ANOMALIES})
        self.tally.update({("pace_judgements", result): 0 for result in PACE_RESULTS})
        outcomes = OUTCOME_OF_EVENT.values()
        self.tally.update({("rebalances", act, end): 0 for act in ACTS for end in outcomes})
        self.plan_s = self.rebalance_s = Durations()
        self.unserved_s = 0.0  # total length of the outages that ended
        self.serve_on_s = dict.fromkeys(SERVE_ON_STAGES, 0.0)  # sums over all deaths
        self._excluded = dict.fromkeys(EXCLUDED, 0)  # counts of this run, as reported last
        self._excluded_before: Counter[str] = Counter(self._excluded)  # counts of earlier runs

    def note(self, event: Event, ended: DecisionRecord | None) -> None:
        """Count one more event, and the migration that it ends, where its plan is known."""
        match event.fact:
            case RunBegan():
                self._excluded_before.update(self._excluded)
                self._excluded = dict.fromkeys(EXCLUDED, 0)
            case PlanDecision() as plan:
                self.tally["plans", plan.policy, plan.decision] += 1
                if plan.plan_seconds is not None:
                    self.plan_s = self.plan_s.plus(plan.plan_seconds)
            case PlanEnd() as end if end.plan_id > 0:
                self._note_end(event, ended)
            case Outage() as outage:
                self.unserved_s += outage.unserved_s
            case ServedOn() as served:
                for stage, seconds in served.seconds.items():
                    self.serve_on_s[stage] = self.serve_on_s.get(stage, 0.0) + seconds
                self.tally["serve_on",] += 1
            case PaceChange() as change:
                steps = (change.part > change.part_before) - (change.part < change.part_before)
                self.tally["pace_judgements", {1: "raised", 0: "kept", -1: "halved"}[steps]] += 1
            case SampleCounts(counts) | Failure(samples=counts) if counts is not None:
                self._excluded = {name: counts.get(name, 0) for name in EXCLUDED}
        if found := anomaly_of(event):
            self.tally["anomalies", found] += 1

    def _note_end(self, event: Event, ended: DecisionRecord | None) -> None:
        outcome = OUTCOME_OF_EVENT[event.kind]
        trigger = (ended.trigger if ended is not None else "") or UNTOLD
        self.tally["rebalances", trigger, outcome] += 1
        if outcome == "committed" and ended is not None and ended.offered is not None:
            self.rebalance_s = self.rebalance_s.plus(max(0.0, event.time - ended.offered))

    def counts(self, of_ranks: Tally, earlier: Tally) -> Counts:
        """Give the counts of now, with those of the ranks of this run and of earlier ones."""
        excluded: Tally = Counter()
        for name, count in self._excluded.items():
            excluded["samples_excluded", name] = self._excluded_before[name] + count
        ranks = {key: of_ranks[key] + earlier[key] for key in of_ranks.keys() | earlier.keys()}
        tally = {**self.tally, **ranks, **excluded}
        serve_on_s = dict(self.serve_on_s)
        return Counts(tally, self.plan_s, self.rebalance_s, self.unserved_s, serve_on_s)


# Before a rank without a token is reported: steps of its samples, tokens for each rank.
UNCOUNTED_STEPS, UNCOUNTED_TOKENS = 256, 10_000


class SampleTally:
    """Figures from the samples of a run beside their windows."""

    def __init__(self) -> None:
        self._newest: dict[int, float] = {}  # rank -> time of its newest sample
        self._received: dict[int, NDArray[np.int64]] = {}  # rank -> [L] tokens of all its samples
        self._first: dict[int, LoadSample] = {}  # rank -> first sample of its newest generation
        self._steps: Counter[int] = Counter()  # rank -> steps of its samples
        self._in_migration: set[int] = set()  # windows

    def note(self, sample: LoadSample, window: int) -> None:
        """Count one more sample, of a window."""
        self._newest[sample.rank] = max(sample.time, self._newest.get(sample.rank, sample.time))
        self._steps[sample.rank] += sample.last_step - sample.first_step + 1
        received = sample.tokens.sum(axis=1)
        self._received[sample.rank] = self._received.get(sample.rank, 0) + received
        # Only the last transaction of a migration makes a generation: what the ones before it have
        # swapped serves under the number of the placement that they leave.
        first = self._first.setdefault(sample.rank, sample)
        if sample.generation > first.generation:
            self._first[sample.rank] = first = sample
        if sample.generation == first.generation and not np.array_equal(
            sample.slot_to_expert, first.slot_to_expert
        ):
            self._in_migration.add(window)

    def windows_in_migration(self, oldest: int) -> frozenset[int]:
        """Windows in which part of a migration served that was not committed yet.

        Drops those before ``oldest``. Detected by slots, so new shares alone are not seen.
        """
        self._in_migration = {window for window in self._in_migration if window >= oldest}
        return frozenset(self._in_migration)

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
