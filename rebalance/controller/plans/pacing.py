"""The pace of the next migration, from what the store has of the one before it.

    publish -> commit, abort or reject -> pace (this event: the plan is judged) -> plan -> publish

All of it is read from the store each time, so that a new leader continues.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eplb.decision.pace import PaceVerdict, StepTimes, next_part, paced
from eplb.migration.build import Pace
from rebalance.controller.open_migration import NOT_FINISHED
from rebalance.controller.settings import ControllerSettings
from telemetry.events import OUTCOME_OF_EVENT, PlanEnd, PlanOffer, plan_end, plan_offer, read_event
from telemetry.store import LoadStore, events_backwards

KIND = "pace"  # of the event
_KINDS = {KIND, "publish", *OUTCOME_OF_EVENT}
FIRST = "no migration was judged yet"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PaceChange:
    """Detail of the event: what a migration did to the steps, and the part of the next one."""

    plan_id: int
    slowdown: float | None  # None: not measured
    budget: float
    part: float
    reason: str


class NextPace(NamedTuple):
    """The pace of the next migration."""

    pace: Pace
    reason: str


class Last(NamedTuple):
    """What the newest events say of migrations and their pace."""

    offer: PlanOffer | None  # the latest migration that was published
    end: PlanEnd | None  # and how it ended
    change: PaceChange | None  # the latest judgement


class Pacing:
    """Judges the latest migration once, when the next one is decided."""

    def __init__(self, store: LoadStore) -> None:
        self._store = store

    def next(self, run: str, num_layers: int, settings: ControllerSettings) -> NextPace:
        """Return the pace of the next migration; no migration is open.

        Args:
            run: of the ranks that serve.
            num_layers: MoE layers of the model.

        Raises:
            StoreError: the store failed; nothing was judged.
        """
        own, budget = settings.pace, settings.step_time_budget
        if not budget:
            return NextPace(own, "fixed: step_time_budget is 0")
        found = [state.step_times for state in self._store.rank_states(run)]
        times = [one for one in found if one is not None]
        if not times:
            return NextPace(own, "fixed: no rank reports times of its steps")
        change = self._judged(times, budget)
        if change is None:
            return NextPace(own, FIRST)
        return NextPace(paced(own, change.part, num_layers), change.reason)

    def _judged(self, times: Sequence[StepTimes], budget: float) -> PaceChange | None:
        """Return the latest judgement, and write it down if it is made now."""
        last = _last(self._store)
        if last.offer is None or (last.change and last.change.plan_id >= last.offer.plan_id):
            return last.change
        part = last.change.part if last.change else 1.0
        plan_id, verdict = last.offer.plan_id, PaceVerdict(part, None, "")
        if last.offer.moves:
            is_late = last.end is not None and last.end.reason.startswith(NOT_FINISHED)
            verdict = next_part(part, budget, plan_id, times, is_late=is_late)
        reason = verdict.reason or f"plan {plan_id} was not judged: it moved no expert"
        reason += f": part {part:g} -> {verdict.part:g}" if verdict.part != part else ""
        slowdown = None if verdict.slowdown is None else round(verdict.slowdown, 4)
        change = PaceChange(plan_id, slowdown, budget, verdict.part, reason)
        self._store.add_event(KIND, vars(change))
        log.info("plan_id=%d pace=%g reason=%r", plan_id, change.part, reason)
        return change


def _last(store: LoadStore) -> Last:
    """Read back to the latest judgement."""
    offer, ends = None, dict[int, PlanEnd]()
    for event in events_backwards(store, _KINDS):
        if event.kind == KIND:
            change = read_event(event, PaceChange)
            return Last(offer, ends.get(offer.plan_id) if offer else None, change)
        offer = offer or plan_offer(event)
        end = plan_end(event)
        if end is not None:
            ends.setdefault(end.plan_id, end)
    return Last(offer, ends.get(offer.plan_id) if offer else None, None)
