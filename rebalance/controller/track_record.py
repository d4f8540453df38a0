"""Compares the promised with the measured gain of the controller's plans.

A committed plan is judged once enough windows were measured under its placement. The sums are
stored as an event, so that a restarted controller continues from them. It also finds the plan that
an earlier controller published and nobody has judged yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.decision.gate import Decision
from eplb.decision.outcome import Plan
from eplb.decision.promises import ENOUGH, Promise, Record
from telemetry.events import PlanOffer, plan_offer, read_event
from telemetry.store import Event, EventStore, PlacementStore, events_backwards
from telemetry.windows.folder import Window

KIND = "promise"  # of the event


@dataclass(frozen=True)
class Judgement:
    """Detail of the event: what a plan promised and gave, and the sums with it."""

    generation: int
    promised: float
    given: float
    record: list[float]  # promised, given


class Promises(EventStore, PlacementStore, Protocol):
    """Where decisions, judgements and placements are."""


class Judged(NamedTuple):
    """A plan that has served for long enough."""

    promise: Promise
    given: float  # reduction of imbalance on the windows that came under the plan


class TrackRecord:
    """Judges each MOVE after it has served, and keeps the sums.

    A RESPLIT is a new generation with the same slots, and does not end a judgement.
    """

    def __init__(self, store: Promises) -> None:
        self._store = store
        self.record = _latest(store)
        self._open = _unjudged(store)
        self._serving: Placement | None = None
        self._generations: set[int] = set()  # with the experts where they are now

    def unseen(self, windows: Sequence[Window], committed: Placement) -> int:
        """Return the number of latest windows with the present slots."""
        before = self._serving
        if before is None or not np.array_equal(before.slot_to_expert, committed.slot_to_expert):
            self._generations = set()
        self._generations.add(committed.generation)
        self._serving = committed
        others = (not window.generations <= self._generations for window in reversed(windows))
        return next((count for count, other in enumerate(others) if other), len(windows))

    def published(self, proposal: Plan, base: Placement, target: Placement) -> None:
        """Hold a plan to what it promises; only the latest one can be judged."""
        if proposal.decision is Decision.MOVE:
            self._open = Promise(base, target, proposal.before - proposal.after)

    def is_judging(self, committed: Placement) -> bool:
        """Whether a plan serves that has not had its windows yet."""
        return self._open is not None and committed.generation >= self._open.target.generation

    def judge(
        self, windows: Sequence[Window], committed: Placement, topology: Topology
    ) -> Judged | None:
        """Judge the open promise by the windows that came under it, once they are enough.

        Returns:
            The promise that was judged now, and what it gave; None: there was none to judge.
        """
        promise, count = self._open, self.unseen(windows, committed)
        if promise is None or committed.generation < promise.target.generation:
            return None
        if not np.array_equal(committed.slot_to_expert, promise.target.slot_to_expert):
            self._open = None  # dropped half-way, or another placement came
            return None
        if count < ENOUGH:
            return None
        given = promise.given(np.stack([window.tokens for window in windows[-count:]]), topology)
        self.record = self.record.with_plan(promise.gain, given)
        self._open = None
        judgement = Judgement(
            promise.target.generation,
            round(promise.gain, 6),
            round(given, 6),
            [self.record.promised, self.record.given],
        )
        self._store.add_event(KIND, vars(judgement))
        return Judged(promise, given)


def _unjudged(store: Promises) -> Promise | None:
    """The promise of the latest published plan, if it is a MOVE that nobody has judged."""
    offer: PlanOffer | None = None
    for event in events_backwards(store, {KIND, "publish", "plan"}):
        if event.kind == KIND:
            return None  # everything before was judged, or followed by what was
        if event.kind == "publish":
            offer = offer or plan_offer(event)
        elif offer is not None and event.detail.get("decision") == Decision.RESPLIT.value:
            offer = None  # the slots stay, and so does the promise of the MOVE before it
        elif offer is not None:
            return _promise(store, offer, event)
    return None


def _promise(store: Promises, offer: PlanOffer, decision: Event) -> Promise | None:
    detail = decision.detail
    before, after = detail.get("imbalance_before"), detail.get("imbalance_after")
    is_other = detail.get("generation") != offer.base_generation
    if is_other or before is None or after is None or detail.get("trigger") == "rollback":
        return None  # a rollback promises no gain
    base, target = store.placement(offer.base_generation), store.placement(offer.generation)
    published = store.published()
    if published is not None and published.plan_id == offer.plan_id:
        return Promise(published.base, published.target, before - after)
    if base is None or target is None or target.plan_id != offer.plan_id:
        return None
    return Promise(base.placement, target.placement, before - after)


def _latest(store: EventStore) -> Record:
    newest = next(events_backwards(store, (KIND,)), None)
    if newest is None:
        return Record()
    promised, given = read_event(newest, Judgement).record
    return Record(float(promised), float(given))
