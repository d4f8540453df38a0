"""The open migration: withdrawn when it cannot be finished, or not in time.

Ranks abort a plan that stalls on one of them. This covers what no rank can detect, such as a plan
that no rank has adopted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from eplb.clock import Clock
from eplb.migration.build import Migration
from rebalance.types import SWITCHED_OFF
from telemetry.state.events import PlanOutcome
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore

NOT_FINISHED = "not finished in"  # begins the reason

log = logging.getLogger(__name__)


class OpenPlan:
    """The controller's view of the open migration: when it was first seen.

    Args:
        store: where it is open.
        clock: of seconds; one that is never set.
    """

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._open_since: tuple[int, float] = (0, 0.0)  # plan id, and when it was first seen open

    def watch(
        self,
        migration: Migration,
        states: Sequence[RankState],
        served_weights: int | None,
        *,
        deadline_s: float,
        fence: int,
    ) -> None:
        """Withdraw the migration if that is due.

        Args:
            migration: the open migration of the store.
            states: latest reports of the ranks that serve now.
            served_weights: version of the weights on all of them; None while they differ.
            deadline_s: for a migration, from when it was first seen.
            fence: the token of the controller's lease.

        Raises:
            FencedOut: another controller holds the lease now.
        """
        objection = self._objection(migration, states, served_weights, deadline_s)
        if objection is None:
            return
        outcome, reason = objection
        if self._store.withdraw(migration.plan_id, outcome=outcome, reason=reason, fence=fence):
            # A switch that a user has set is not a warning.
            level = logging.INFO if reason == SWITCHED_OFF else logging.WARNING
            log.log(level, "plan_id=%d withdrawn: %s", migration.plan_id, reason)

    def _objection(
        self,
        migration: Migration,
        states: Sequence[RankState],
        served_weights: int | None,
        deadline_s: float,
    ) -> tuple[PlanOutcome, str] | None:
        plan_id, version = migration.plan_id, migration.weights_version
        committed = self._store.committed()
        if committed is None or committed.placement.generation != migration.base.generation:
            return "rejected", "the plan was made for another placement than the committed one"
        if served_weights is not None and served_weights != version:
            return (
                "rejected",
                f"the plan is for weights version {version}, found version {served_weights} on "
                "all ranks",
            )
        is_taken_up = any(state.plan_id == plan_id for state in states)
        if not self._store.control().movement and not is_taken_up:
            return "aborted", SWITCHED_OFF
        if self._open_since[0] != plan_id:
            self._open_since = (plan_id, self._clock())
        if self._clock() - self._open_since[1] > deadline_s:
            return "aborted", f"{NOT_FINISHED} {deadline_s:.0f} s"
        return None
