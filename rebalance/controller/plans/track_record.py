"""Compares the promised with the measured gain of the controller's plans.

A committed plan is judged once enough windows were measured since it serves: each window's load
under the placement before it and under its own. The sums are stored as an event, so that a
restarted controller continues from them. It also finds the plans that an earlier controller
published and nobody has judged yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from eplb.core.cost import Decision, Objective
from eplb.core.load import num_full_blocks
from eplb.core.placement import Placement
from eplb.core.problem import Problem, Record
from eplb.decision.alternatives import ENOUGH, Promise, realised
from eplb.decision.outcome import Plan
from telemetry.load.drift import LOOK_BACK
from telemetry.load.folder import Window
from telemetry.state.events import (
    DECIDED,
    JUDGED,
    OFFERED,
    Judgement,
    PlanDecision,
    PlanOffer,
    plan_offer,
    read_event,
)
from telemetry.state.store import StateStore

MOST_OPEN = 8  # promises; one for each window until the first is judged, and some more


class Judged(NamedTuple):
    """A plan that has served for long enough."""

    promise: Promise
    given: float  # reduction of its score on the windows that came under the plan


class TrackRecord:
    """Judges each MOVE and each RESPLIT after it has served, and keeps the sums.

    A RESPLIT is a new generation with the same slots, and does not end a judgement. So several
    plans may be open: a MOVE, and the shares that followed it.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.record = _latest(store)
        self._open = deque(_read_open_promises(store), MOST_OPEN)  # oldest first
        self._serving: Placement | None = None
        self._generations: set[int] = set()  # with the experts where they are now

    def unseen(self, windows: Sequence[Window], committed: Placement) -> int:
        """Return the number of latest windows with the present slots."""
        before = self._serving
        if before is None or not np.array_equal(before.slot_to_expert, committed.slot_to_expert):
            self._generations = set()
        self._generations.add(committed.generation)
        self._serving = committed
        return _latest_under(self._generations, windows)

    def published(self, proposal: Plan, base: Placement, target: Placement) -> None:
        """Hold a plan to what it promises; one that had to be made may promise no gain."""
        gain = proposal.before - proposal.after
        if proposal.decision is not Decision.KEEP and 0 < gain < inf:
            before = [one for one in self._open if one.target.generation < target.generation]
            self._open = deque(before, MOST_OPEN)
            self._open.append(Promise(base, target, gain, proposal.problem.objective))

    def taken_back(self) -> None:
        """Judge none of the plans so far, because the way to an earlier placement is published."""
        self._open.clear()

    def is_judging(self, committed: Placement) -> bool:
        """Whether a plan serves that has not had its windows yet."""
        return any(committed.generation >= one.target.generation for one in self._open)

    def judge(
        self,
        windows: Sequence[Window],
        committed: Placement,
        problem_of: Callable[[Sequence[Window]], Problem],
    ) -> Judged | None:
        """Judge the oldest promise whose windows are enough, by all windows that came under it.

        Args:
            windows: complete ones.
            committed: the placement that serves.
            problem_of: windows as a plan looks at them, which a promise was made on, with what it
                is judged by.

        Returns:
            The promise that was judged now, and what it gave; None: there was none to judge.
        """
        self.unseen(windows, committed)
        self._open = deque((one for one in self._open if _may_serve(one, committed)), MOST_OPEN)
        for promise in self._open:
            since = {one for one in self._generations if one >= promise.target.generation}
            count = _latest_under(since, windows)
            if _num_full(windows, count) >= ENOUGH:
                self._open.remove(promise)
                return self._judge(promise, problem_of(windows[-count:]))
        return None

    def _judge(self, promise: Promise, problem: Problem) -> Judged:
        given = realised(problem, promise)
        self.record = self.record.with_plan(promise.gain, given)
        judgement = Judgement(
            promise.target.generation,
            round(promise.gain, 6),
            round(given, 6),
            [self.record.promised, self.record.given],
        )
        self._store.add_event(JUDGED, judgement)
        return Judged(promise, given)


def _num_full(windows: Sequence[Window], count: int) -> int:
    """How many windows the latest ``count`` are worth; those with few tokens tell little."""
    if count < ENOUGH:
        return count
    seen = windows[-max(count, LOOK_BACK) :]
    return num_full_blocks(np.array([window.tokens.sum() for window in seen]), count)


def _latest_under(generations: Collection[int], windows: Sequence[Window]) -> int:
    """Number of latest windows in which none but these generations served."""
    others = (not window.generations <= set(generations) for window in reversed(windows))
    return next((count for count, other in enumerate(others) if other), len(windows))


def _may_serve(promise: Promise, committed: Placement) -> bool:
    """Whether the promised placement serves, with later shares perhaps, or may still come.

    It does not where it was dropped half-way, or other slots came after it.
    """
    target = promise.target
    if committed.generation == target.generation:
        return committed.hash == target.hash
    is_to_come = committed.generation < target.generation
    return is_to_come or np.array_equal(committed.slot_to_expert, target.slot_to_expert)


def _read_open_promises(store: StateStore) -> list[Promise]:
    """The promises of the latest published plans that nobody has judged, oldest first."""
    found: list[Promise] = []
    offer: PlanOffer | None = None
    judged, num_offers = -1, 0  # the newest generation that was judged
    for event in store.events_backwards({JUDGED, OFFERED, DECIDED}):
        if event.kind == JUDGED:
            judged = max(judged, read_event(event, Judgement).generation)
        elif event.kind == OFFERED:
            offer, num_offers = plan_offer(event), num_offers + 1
            if offer is None or offer.generation <= judged or num_offers > MOST_OPEN:
                break  # everything before was judged too, or dropped
        elif offer is not None:
            decision = event.fact
            if not isinstance(decision, PlanDecision):
                offer = None
                continue
            if decision.trigger == "rollback":
                break  # it judged none of those before
            held = _promise(store, offer, decision)
            found, offer = found + held, None
            if held and decision.decision == Decision.MOVE.value:
                break  # it ended those before
    return found[::-1]


def _promise(store: StateStore, offer: PlanOffer, decision: PlanDecision) -> list[Promise]:
    """The promise of a published plan; empty where it was dropped, or promised nothing."""
    before, after = decision.imbalance_before, decision.imbalance_after
    if decision.generation != offer.base_generation or before is None or after is None:
        return []
    if before <= after:
        return []
    objective: Objective = "time" if decision.objective == "time" else "tokens"
    base, target = store.placement(offer.base_generation), store.placement(offer.generation)
    published = store.published()
    if published is not None and published.plan_id == offer.plan_id:
        return [Promise(published.base, published.target, before - after, objective)]
    if base is None or target is None or target.plan_id != offer.plan_id:
        return []
    return [Promise(base.placement, target.placement, before - after, objective)]


def _latest(store: StateStore) -> Record:
    newest = next(store.events_backwards((JUDGED,)), None)
    if newest is None:
        return Record()
    promised, given = read_event(newest, Judgement).record
    return Record(float(promised), float(given))
