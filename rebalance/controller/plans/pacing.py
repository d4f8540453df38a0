"""The pace of the next migration, from what the store has of the one before it.

    publish -> commit, abort or reject -> pace (this event: the plan is judged) -> plan -> publish

All of it is read from the store each time, so that a new leader continues.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from eplb.decision.pace import PaceChange, PaceVerdict, StepTimes, next_part, pace_now, paced
from eplb.migration.build import Pace
from rebalance.controller.open_migration import NOT_FINISHED
from rebalance.controller.settings import ControllerSettings
from telemetry.state.events import (
    JUDGED_PACE,
    OUTCOME_OF_EVENT,
    PlanEnd,
    PlanOffer,
    pace_change,
    plan_end,
    plan_offer,
)
from telemetry.state.store import StateStore

_KINDS = {JUDGED_PACE, "publish", *OUTCOME_OF_EVENT}

log = logging.getLogger(__name__)


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

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def next(self, run: str, num_layers: int, settings: ControllerSettings) -> NextPace:
        """Return the pace of the next migration; no migration is open.

        Args:
            run: of the ranks that serve.
            num_layers: MoE layers of the model.

        Raises:
            StoreError: the store failed; nothing was judged.
        """
        budget = settings.step_time_budget
        found = [state.step_times for state in self._store.rank_states(run)] if budget else []
        times = [one for one in found if one is not None]
        latest = self._judged(times, budget) if times else None
        now = pace_now(budget, latest, is_measured=bool(times))
        return NextPace(paced(settings.pace, now.part, num_layers), now.reason)

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
        change = PaceChange(plan_id, slowdown, budget, part, verdict.part, reason)
        self._store.add_event(JUDGED_PACE, vars(change))
        log.info("plan_id=%d pace=%g reason=%r", plan_id, change.part, reason)
        return change


def _last(store: StateStore) -> Last:
    """Read back to the latest judgement."""
    offer, ends = None, dict[int, PlanEnd]()
    for event in store.events_backwards(_KINDS):
        change = pace_change(event)
        if change is not None:
            return Last(offer, ends.get(offer.plan_id) if offer else None, change)
        offer = offer or plan_offer(event)
        end = plan_end(event)
        if end is not None:
            ends.setdefault(end.plan_id, end)
    return Last(offer, ends.get(offer.plan_id) if offer else None, None)
