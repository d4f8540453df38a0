"""What each rebalance was to bring, what it cost, and what it brought, from the store's events.

    plan (MOVE or RESPLIT) -> publish -> commit, abort or reject -> promise (once it is judged)

A plan that was decided and held back is HELD: its event says why nothing moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from api.monitor.history import History, HistoryMark, MarkKind
from api.monitor.snapshot import Decision
from telemetry.state.events import (
    OUTCOME_OF_EVENT,
    Event,
    PlanEnd,
    plan_end,
    plan_offer,
    read_event,
)

KEPT = 200
HELD_BACK = " (not moved: "  # in the reason of a plan that was not published


@dataclass(frozen=True)
class Rebalance:
    """One migration, from its plan on."""

    plan_id: int
    generation: int  # that it leads to
    decision_id: int | None  # of the event that decided it; None: there was none
    decision: str  # MOVE or RESPLIT
    trigger: str  # one of eplb.decision.triggers.ACTS
    actor: str  # the controller, or the task of an operator
    stage: str  # of the rollout
    reason: str
    offered: float  # seconds since the epoch
    ended: float | None  # None: it is open
    outcome: str | None  # committed, aborted or rejected; None: it is open
    end_reason: str | None
    moves: int
    bytes: int
    imbalance_before: float | None  # as planned
    imbalance_predicted: float | None
    gain_promised: float | None  # reduction of imbalance, once it was judged
    gain_realised: float | None


class RebalanceLog:
    """Follows the events of all runs, in order."""

    def __init__(self, history: History | None) -> None:
        self._history = history
        self._rebalances: dict[int, Rebalance] = {}  # by plan id
        self._plan: Event | None = None  # the decision noted last
        self._is_moving = True

    def latest(self) -> tuple[Rebalance, ...]:
        """Give the kept ones, newest first."""
        return tuple(reversed(self._rebalances.values()))

    def followed(self, decisions: Iterable[Decision]) -> tuple[Decision, ...]:
        """Give decisions with how the migration of each ended, and what it brought."""
        of_decision = {one.decision_id: one for one in self._rebalances.values()}

        def with_end(decision: Decision) -> Decision:
            one = of_decision.get(decision.id)
            if one is None:
                return decision
            return replace(
                decision,
                plan_id=one.plan_id,
                outcome=one.outcome,
                gain_promised=one.gain_promised,
                gain_realised=one.gain_realised,
            )

        return tuple(with_end(one) for one in decisions)

    def note(self, event: Event) -> None:
        """Follow one more event."""
        detail = event.detail
        if event.kind == "plan":
            self._plan = event
            if HELD_BACK in (reason := str(detail.get("reason", ""))):
                self._mark(event, "HELD", reason)
        elif (offer := plan_offer(event)) is not None:
            self._offered(event, offer.plan_id, offer.generation, offer.moves)
        elif event.kind in OUTCOME_OF_EVENT:
            self._ended(event)
        elif event.kind == "promise":
            self._judged(event)
        elif event.kind == "run":
            self._mark(event, "restart", f"the ranks started: run {detail.get('run')}")
        elif event.kind == "recovery" or (event.kind == "error" and detail.get("where") == "ranks"):
            self._mark(event, "death", str(detail.get("message") or detail.get("reason")))
        elif event.kind == "control" and detail.get("movement") is not self._is_moving:
            self._is_moving = bool(detail.get("movement"))
            kind: MarkKind = "resume" if self._is_moving else "pause"
            self._mark(event, kind, str(detail.get("reason", "")))

    def _offered(self, event: Event, plan_id: int, generation: int, moves: int) -> None:
        plan = {} if self._plan is None else dict(self._plan.detail)
        decision_id = None if self._plan is None else self._plan.id
        self._plan = None
        self._rebalances[plan_id] = Rebalance(
            plan_id=plan_id,
            generation=generation,
            decision_id=decision_id,
            decision=str(plan.get("decision", "MOVE")),
            trigger=str(plan.get("trigger", "")),
            actor=str(plan.get("actor", "")),
            stage=str(plan.get("stage", "")),
            reason=str(plan.get("reason", "")),
            offered=event.time,
            ended=None,
            outcome=None,
            end_reason=None,
            moves=moves,
            bytes=int(plan.get("bytes", 0)),
            imbalance_before=plan.get("imbalance_before"),
            imbalance_predicted=plan.get("imbalance_after"),
            gain_promised=None,
            gain_realised=None,
        )
        while len(self._rebalances) > KEPT:
            del self._rebalances[next(iter(self._rebalances))]

    def _ended(self, event: Event) -> None:
        end = plan_end(event)
        found = self._rebalances.get(end.plan_id) if end is not None else None
        if end is None or found is None:
            return
        outcome = OUTCOME_OF_EVENT[event.kind]
        ended = replace(found, ended=event.time, outcome=outcome, end_reason=end.reason)
        self._rebalances[end.plan_id] = ended
        if outcome == "committed":
            kind: MarkKind = "RESPLIT" if found.decision == "RESPLIT" else "MOVE"
            self._mark(event, "ROLLBACK" if found.trigger == "rollback" else kind, found.reason)

    def _judged(self, event: Event) -> None:
        detail = event.detail
        for plan_id, one in self._rebalances.items():
            if one.generation == detail.get("generation") and one.outcome == "committed":
                gains = {"gain_promised": detail.get("promised"), "gain_realised": detail["given"]}
                self._rebalances[plan_id] = replace(one, **gains)

    def _mark(self, event: Event, kind: MarkKind, text: str) -> None:
        if self._history is None:
            return
        generation = None
        if event.kind == "commit":
            generation = read_event(event, PlanEnd).generation
        self._history.mark(HistoryMark(event.time, kind, text, generation))
