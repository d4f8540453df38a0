"""Decisions of the controller and the migrations that followed, from the store's events.

plan (MOVE or RESPLIT) -> publish -> commit, abort or reject -> promise (once it is judged)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from api.monitor.history import History, HistoryMark, MarkKind
from api.monitor.state import DecisionRecord
from telemetry.state.events import (
    OUTCOME_OF_EVENT,
    Event,
    PlanEnd,
    plan_end,
    plan_offer,
    read_event,
)

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
        detail = event.detail
        if event.kind == "plan":
            self._plan = _decision(event)
            self._decisions[event.id] = self._plan
            drop_oldest(self._decisions, KEPT_DECISIONS)
        elif (offer := plan_offer(event)) is not None:
            plan, self._plan = self._plan or _decision(event), None
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
        elif event.kind in OUTCOME_OF_EVENT:
            return self._ended(event)
        elif event.kind == "promise":
            for one in list(self._rebalances.values()):
                is_it = one.target_generation == detail.get("generation")
                if is_it and one.outcome == "committed":
                    promised, given = detail.get("promised"), detail["given"]
                    self._change(replace(one, gain_promised=promised, gain_realised=given))
        elif event.kind == "run":
            self._mark(event, "restart", f"the ranks started: run {detail.get('run')}")
        elif event.kind == "recovery" or (event.kind == "error" and detail.get("where") == "ranks"):
            self._mark(event, "death", str(detail.get("message") or detail.get("reason")))
        elif event.kind == "control" and detail.get("movement") is not self._is_moving:
            self._is_moving = bool(detail.get("movement"))
            kind: MarkKind = "resume" if self._is_moving else "pause"
            self._mark(event, kind, str(detail.get("reason", "")))
        return None

    def _ended(self, event: Event) -> DecisionRecord | None:
        end = plan_end(event)
        found = self._rebalances.get(end.plan_id) if end is not None else None
        if end is None or found is None:
            return None
        outcome = OUTCOME_OF_EVENT[event.kind]
        ended = replace(found, ended=event.time, outcome=outcome, end_reason=end.reason)
        self._change(ended)
        if outcome == "committed":
            kind: MarkKind = "RESPLIT" if found.decision == "RESPLIT" else "MOVE"
            self._mark(event, "ROLLBACK" if found.trigger == "rollback" else kind, found.reason)
        return ended

    def _change(self, published: DecisionRecord) -> None:
        assert published.plan_id is not None, "what was published has a plan id"
        self._rebalances[published.plan_id] = published
        if published.id in self._decisions:
            self._decisions[published.id] = published

    def _mark(self, event: Event, kind: MarkKind, text: str) -> None:
        if self._history is None:
            return
        generation = read_event(event, PlanEnd).generation if event.kind == "commit" else None
        self._history.mark(HistoryMark(event.time, kind, text, generation))


def _decision(event: Event) -> DecisionRecord:
    """Read a decision from the controller's event; most is empty in an event of another kind."""
    detail = event.detail
    return DecisionRecord(
        id=event.id,
        time=event.time,
        decision=str(detail.get("decision", "")),
        reason=str(detail.get("reason", "")),
        policy=str(detail.get("policy", "")),
        imbalance_before=detail.get("imbalance_before"),
        imbalance_after=detail.get("imbalance_after"),
        moves=int(detail.get("moves", 0)),
        bytes=int(detail.get("bytes", 0)),
        generation=int(detail.get("generation", 0)),
        trigger=str(detail.get("trigger", "")),
        actor=str(detail.get("actor", "")),
        stage=str(detail.get("stage", "")),
        num_uncovered=int(detail.get("asked", {}).get("num_uncovered", 0)),
        pace_reason=str(detail.get("pace_reason", "")),
    )


def drop_oldest(kept: dict[int, Any], most: int) -> None:
    """Remove what was added first, until ``most`` are left."""
    while len(kept) > most:
        del kept[next(iter(kept))]
