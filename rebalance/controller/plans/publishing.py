"""What becomes of a plan: an event, a proposal that waits, or a migration that ranks vote on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from eplb.clock import Clock
from eplb.core.cost import Decision
from eplb.core.placement import Placement
from eplb.decision.outcome import explain_layer
from eplb.decision.pace import (
    PaceChange,
    StepTimes,
    Throttle,
    judged,
    pace_now,
    paced,
)
from eplb.errors import StaleGeneration
from eplb.migration.build import Migration, Pace, build_migration
from eplb.migration.spares import expand
from eplb.planner import Plan
from rebalance.controller.lease import ControllerLease
from rebalance.controller.load import ServingGroup
from rebalance.controller.open_migration import NOT_FINISHED
from rebalance.controller.plans.planning import Planning, decided
from rebalance.controller.settings import ControllerSettings, LiveReader
from telemetry.state.events import (
    DECIDED,
    JUDGED_PACE,
    OUTCOME_OF_EVENT,
    PlanEnd,
    PlanOffer,
    pace_change,
    plan_end,
    plan_offer,
)
from telemetry.state.proposals import (
    LASTS_S,
    Approval,
    Content,
    Proposal,
    ProposalEnded,
    check_open,
)
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore

CONTROLLER = "controller"  # by whom its own proposals are
EXPLAINED_LAYERS = 4  # that gain most
KEPT_MOVES = 5000  # of the list, for display; the target has them all


class Why(NamedTuple):
    """Why a proposal is made."""

    by: str
    trigger: str
    reason: str


def drafted(
    plan: Plan,
    target: Placement,
    serving: Placement,
    *,
    now: float,
    lasts_s: float,
    why: Why,
) -> tuple[Proposal, Content]:
    """Make a proposal of a plan.

    Args:
        plan: that moves something.
        target: of its migration, with spare slots where the deployment has them.
        serving: the base of the migration.
        now: seconds since the epoch.
        lasts_s: how long it can be approved.
        why: it is made.
    """
    decision = decided(plan)
    proposal = Proposal(
        time=now,
        expires=now + lasts_s,
        base_generation=serving.generation,
        base_hash=serving.hash,
        by=why.by,
        trigger=why.trigger,
        reason=why.reason,
        target_generation=decision.target_generation,
        decision=decision.decision,
        plan_reason=decision.reason,
        policy=decision.policy,
        imbalance_before=decision.imbalance_before,
        imbalance_after=decision.imbalance_after,
        expected_gain=decision.expected_gain,
        moves=decision.moves,
        bytes=decision.bytes,
        cost_s=decision.cost_s,
    )
    layer_ids = plan.problem.layer_ids
    moves = [
        [layer_ids[move.layer], move.expert, move.dst_slot, move.source.name.lower(), move.src_slot]
        for move in plan.moves[:KEPT_MOVES]
    ]
    detail = {"plan": plan.to_dict(), "move_list": moves, "explanation": _explain(plan)}
    return proposal, Content(target, detail)


def _explain(plan: Plan) -> list[dict[str, Any]]:
    layer_ids, gain = plan.problem.layer_ids, plan.before_per_layer - plan.after_per_layer
    changes = (plan.base.slot_to_expert != plan.target.slot_to_expert).any(axis=1)
    changes |= (plan.base.slot_share != plan.target.slot_share).any(axis=1)
    best = np.argsort(-np.where(changes, gain, -np.inf), kind="stable")
    taken = [int(layer) for layer in best[:EXPLAINED_LAYERS] if changes[layer]]
    return [
        {"layer": found.layer, "sentences": list(found.sentences)}
        for found in (explain_layer(plan, layer_ids[layer]) for layer in taken)
    ]


def to_carry_out(
    store: StateStore, proposal_id: int, serving: Placement
) -> tuple[Proposal, Placement]:
    """Return an open proposal and its target.

    Raises:
        ProposalEnded: it is not open any more, or there is none.
        StaleGeneration: it was made on another placement than ``serving``.
    """
    found = next((one for one in store.proposals() if one.id == proposal_id), None)
    content = store.proposal_content(proposal_id)
    if found is None or content is None:
        raise ProposalEnded(f"there is no proposal {proposal_id}")
    check_open(found)
    if found.base_hash != serving.hash:
        raise StaleGeneration(
            f"base moved on: found generation {serving.generation} serving, expected generation "
            f"{found.base_generation} of proposal {proposal_id}"
        )
    return found, content.target


def waiting(store: StateStore) -> Proposal | None:
    """Return the controller's own open proposal: it makes no other while one waits."""
    open_ones = (one for one in store.proposals() if one.state == "open")
    return next((one for one in open_ones if one.by == CONTROLLER), None)


_KINDS = {JUDGED_PACE, "publish", *OUTCOME_OF_EVENT}

log = logging.getLogger(__name__)


class NextPace(NamedTuple):
    """The pace of the next migration."""

    pace: Pace
    reason: str


class Pacing:
    """Judges the latest migration once, when the next one is decided.

        publish -> commit, abort or reject -> pace (this event judges the plan) -> plan -> publish

    All of it is read from the store each time, so that a new leader continues.
    """

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
        latest = self._judge_pace(times, budget) if times else None
        part, reason = pace_now(budget, latest, is_measured=bool(times))
        return NextPace(paced(settings.pace, part, num_layers), reason)

    def _judge_pace(self, times: Sequence[StepTimes], budget: float) -> PaceChange | None:
        """Return the latest judgement, and write it down if it is made now."""
        offer, end, latest = self._last()
        if offer is None or (latest and latest.plan_id >= offer.plan_id):
            return latest
        is_late = end is not None and end.reason.startswith(NOT_FINISHED)
        part = latest.part if latest else 1.0
        change = judged(
            offer.plan_id, part, budget, times, moves=bool(offer.moves), is_late=is_late
        )
        self._store.add_event(JUDGED_PACE, change)
        log.info("plan_id=%d pace=%g reason=%r", change.plan_id, change.part, change.reason)
        return change

    def _last(self) -> tuple[PlanOffer | None, PlanEnd | None, PaceChange | None]:
        """The latest migration that was published, how it ended, and the latest judgement."""
        offer, ends, change = None, dict[int, PlanEnd](), None
        for event in self._store.events_backwards(_KINDS):
            if (change := pace_change(event)) is not None:
                break
            offer = offer or plan_offer(event)
            if (end := plan_end(event)) is not None:
                ends.setdefault(end.plan_id, end)
        return offer, ends.get(offer.plan_id) if offer else None, change


class Publisher:
    """Records decisions, stores proposals and publishes migrations, each under the lease.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: StateStore,
        live: LiveReader,
        lease: ControllerLease,
        planning: Planning,
        clock: Clock,
    ) -> None:
        self._store, self._live, self._lease = store, live, lease
        self._planning, self._clock = planning, clock
        self._pacing = Pacing(store)
        self.ranks_changed()

    def ranks_changed(self) -> None:
        """Note another run: its first decision is recorded."""
        self._noted_window = -1  # newest window whose decision was recorded
        self._noted_decision = ""

    def note_keep(self, group: ServingGroup, proposal: Plan, window: int, trigger: str) -> None:
        """Record a KEEP decision; of those made at each window, one in a while."""
        is_due = window - self._noted_window >= self._live.settings.keep_every_windows
        is_due |= trigger != "load"
        if is_due or self._noted_decision != proposal.decision.value:
            self.note(group, proposal, window, trigger=trigger)

    def note(
        self,
        group: ServingGroup,
        proposal: Plan,
        window: int,
        *,
        held_back: str = "",
        trigger: str,
        actor: str = "controller",
        throttle: Throttle | None = None,
    ) -> None:
        """Record a decision; one that is carried out with its pace.

        Args:
            window: the newest that was planned on.
            held_back: why it is not carried out; "" if it is.
            trigger: what the plan was due by.
            actor: who asked for it.
            throttle: of the request.
        """
        self._noted_window, self._noted_decision = window, proposal.decision.value
        reason = f"{proposal.reason} (not moved: {held_back})" if held_back else proposal.reason
        decision = replace(
            decided(proposal),
            reason=reason,
            window=window,
            trigger=trigger,
            actor=actor,
            stage=self._live.settings.stage,
            **self._planning.how,
        )
        if not held_back and proposal.decision is not Decision.KEEP:
            pace = self._pace(group, throttle)
            decision = replace(decision, pace=vars(pace.pace), pace_reason=pace.reason)
        self._store.add_event(DECIDED, decision)
        log.info(
            "generation=%d decision=%s reason=%r",
            proposal.base_generation,
            proposal.decision.value,
            reason,
        )

    def propose(
        self,
        group: ServingGroup,
        proposal: Plan,
        serving: Placement,
        why: Why,
        lasts_s: float = LASTS_S,
    ) -> Proposal:
        """Store a plan until somebody decides on it."""
        target, now = self._target(group, proposal, serving), self._clock()
        made = drafted(proposal, target, serving, now=now, lasts_s=lasts_s, why=why)
        return self._store.propose(*made, fence=self._lease.token)

    def publish(
        self,
        group: ServingGroup,
        proposal: Plan,
        current: Placement,
        *,
        is_promise: bool = True,
        target: Placement | None = None,
        approval: Approval | None = None,
        throttle: Throttle | None = None,
    ) -> Migration | None:
        """Offer the way from ``current``, which the plan was made for, to the plan's target.

        Args:
            is_promise: whether the plan is held to its gain; a rollback promises none.
            target: exactly this one in place of the plan's.
            approval: of the proposal that is carried out.
            throttle: of the request.

        Returns:
            None: another plan is open, or the ranks' weights differ in version.
        """
        target = target or self._target(group, proposal, current)
        served = served_weights(self._store.rank_states(group.run.run))
        if served is None:
            log.info(
                "generation=%d not published: no weights version that all ranks report",
                target.generation,
            )
            return None
        migration = build_migration(
            current,
            target,
            group.topology,
            plan_id=self._store.next_plan_id(),
            pace=self._pace(group, throttle).pace,
            weights_version=served,
        )
        try:
            self._store.publish(migration, fence=self._lease.token, approval=approval)
        except StaleGeneration as exc:
            log.info("plan_id=%d not published: %s", migration.plan_id, exc)
            return None
        if is_promise:
            self._planning.published(proposal, current, migration.target)
        else:
            self._planning.taken_back()
        return migration

    def _pace(self, group: ServingGroup, throttle: Throttle | None) -> NextPace:
        settings = self._live.settings
        found = self._pacing.next(group.run.run, group.model.num_layers, settings)
        if throttle is None:
            return found
        asked = ", ".join(
            f"{name} {value:g}" for name, value in vars(throttle).items() if value is not None
        )
        return NextPace(throttle.of(found.pace), f"{found.reason}; throttled to {asked}")

    def _target(self, group: ServingGroup, proposal: Plan, current: Placement) -> Placement:
        """The plan's target with the spare slots of the deployment."""
        spare_slots = self._live.settings.spare_slots
        if not spare_slots:
            return proposal.target
        return expand(proposal.target, current, group.topology, spare_slots)


def served_weights(states: list[RankState]) -> int | None:
    """Version of the weights that every rank reports; None while they differ or none has."""
    versions = {state.weights_version for state in states}
    return versions.pop() if len(versions) == 1 else None
