"""Decisions of the controller and the migrations that followed, from the store's events.

plan (MOVE or RESPLIT) -> publish -> commit, abort or reject -> promise (once it is judged)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from api.monitor.history import History, HistoryMark, MarkKind
from api.monitor.state import DecisionRecord
from eplb.migration.recovery import Recovery, start_of
from telemetry.state.events import (
    OF_RANKS,
    OUTCOME_OF_EVENT,
    Event,
    Failure,
    Judgement,
    PlanDecision,
    PlanEnd,
    PlanOffer,
    Switched,
)
from telemetry.state.runs import RunBegan

KEPT_DECISIONS, KEPT_REBALANCES = 50, 200


class DecisionLog:
    """Follows the events of all runs, in order."""

    def __init__(self, history: History | None) -> None:
        self._history = history
        self._decisions: dict[int, DecisionRecord] = {}  # id -> decision
        self._rebalances: dict[int, DecisionRecord] = {}  # those that were published, by plan id
        self._plan: DecisionRecord | None = None  # noted last, and not published
        self._is_moving = True

    def decisions(self) -> tuple[DecisionRecord, ...]:
        """Give the latest decisions, oldest first."""
        return tuple(self._decisions.values())

    def rebalances(self) -> tuple[DecisionRecord, ...]:
        """Give the decisions that were published, newest first."""
        return tuple(reversed(self._rebalances.values()))

    def note(self, event: Event) -> DecisionRecord | None:
        """Follow one more event; return the decision whose migration it ends."""
        match event.fact:
            case PlanDecision() as plan:
                self._plan = DecisionRecord.of(event, plan)
                self._decisions[event.id] = self._plan
                drop_oldest(self._decisions, KEPT_DECISIONS)
            case PlanOffer() as offer:
                self._note_offer(event, offer)
            case PlanEnd() as end if end.plan_id > 0:
                return self._ended(event, end)
            case Judgement() as judged:
                for one in list(self._rebalances.values()):
                    is_it = one.target_generation == judged.generation
                    if is_it and one.outcome == "committed":
                        promised, given = judged.promised, judged.given
                        self._change(replace(one, gain_promised=promised, gain_realised=given))
            case RunBegan(run=run) if start_of(run) == run:  # and not a group that goes on
                self._mark(event, "restart", f"the ranks started: run {run}")
            case Recovery(reason=why):
                self._mark(event, "death", why)
            case Failure() as failure if failure.where == OF_RANKS:
                self._mark(event, "death", failure.message)
            case Switched() as now if now.movement is not self._is_moving:
                self._is_moving = now.movement
                kind: MarkKind = "resume" if now.movement else "pause"
                self._mark(event, kind, now.reason)
        return None

    def _note_offer(self, event: Event, offer: PlanOffer) -> None:
        plan, self._plan = self._plan or DecisionRecord.of(event), None
        self._change(
            replace(
                plan,
                decision=plan.decision or "MOVE",
                generation=offer.base_generation,
                plan_id=offer.plan_id,
                target_generation=offer.generation,
                moves=offer.moves,
                offered=event.time,
            )
        )
        drop_oldest(self._rebalances, KEPT_REBALANCES)

    def _ended(self, event: Event, end: PlanEnd) -> DecisionRecord | None:
        known = self._rebalances.get(end.plan_id)
        if known is None:
            return None
        outcome = OUTCOME_OF_EVENT[event.kind]
        ended = replace(known, ended=event.time, outcome=outcome, end_reason=end.reason)
        self._change(ended)
        if outcome == "committed":
            kind: MarkKind = "RESPLIT" if known.decision == "RESPLIT" else "MOVE"
            kind = "ROLLBACK" if known.trigger == "rollback" else kind
            self._mark(event, kind, known.reason, end.generation)
        return ended

    def _change(self, published: DecisionRecord) -> None:
        assert published.plan_id is not None, "what was published has a plan id"
        self._rebalances[published.plan_id] = published
        if published.id in self._decisions:
            self._decisions[published.id] = published

    def _mark(self, event: Event, kind: MarkKind, text: str, generation: int | None = None) -> None:
        if self._history is not None:
            self._history.mark(HistoryMark(event.time, kind, text, generation))


def drop_oldest(kept: dict[int, Any], most: int) -> None:
    """Remove what was added first, until ``most`` are left."""
    while len(kept) > most:
        del kept[next(iter(kept))]
