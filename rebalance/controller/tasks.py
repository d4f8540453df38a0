"""What operators ask of the controller: each task runs once, or is refused with a reason."""

from __future__ import annotations

import logging

from eplb.clock import Clock, duration_text
from eplb.core.cost import Decision
from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from eplb.decision.pace import Throttle
from eplb.errors import (
    ConfigError,
    EplbError,
    HistoryError,
    PlacementError,
    StaleGeneration,
    StaleRevision,
    StoreError,
    TopologyError,
)
from eplb.migration.build import Migration
from eplb.planner import Plan
from rebalance.controller.lease import ControllerLease
from rebalance.controller.load import ServingGroup
from rebalance.controller.plans.planning import Planning, TaskRefused, cost_s_of
from rebalance.controller.plans.publishing import Publisher, Why, to_carry_out
from rebalance.controller.settings import LiveReader
from rebalance.types import SWITCHED_OFF
from telemetry.log_context import set_log_fields
from telemetry.state.proposals import LASTS_S, Approval, ProposalEnded
from telemetry.state.store import StateStore
from telemetry.state.tasks import Refusal, Task, TaskResult

OF_TARGET = ("rollback", "approve")  # kinds of tasks that name a placement
KINDS = ("rebalance", "rollback", "explain", "propose", "approve")

log = logging.getLogger(__name__)


class Tasks:
    """Works off the tasks of a store, under the lease.

    Args:
        clock: seconds since the epoch, as of the store.
    """

    def __init__(
        self,
        store: StateStore,
        live: LiveReader,
        lease: ControllerLease,
        planning: Planning,
        publisher: Publisher,
        clock: Clock,
    ) -> None:
        self._store, self._live, self._lease = store, live, lease
        self._planning, self._publisher, self._clock = planning, publisher, clock

    def work_off(self, group: ServingGroup) -> None:
        """End each task that is queued."""
        self._end_abandoned()
        fence = self._lease.token
        while (task := self._store.claim(fence=fence)) is not None:
            set_log_fields(task=task.id)
            try:
                result = self._result(group, task)
            except EplbError as exc:
                if _is_of_the_store(exc):
                    raise
                refusal = refusal_of(exc, task.kind)
                result = TaskResult(error=str(exc), refusal=refusal.value if refusal else "")
                self._store.finish(task.id, "failed", result, fence=fence)
                log.info("task=%d kind=%s failed: %s", task.id, task.kind, exc)
            else:
                self._store.finish(task.id, "done", result, fence=fence)
                log.info("task=%d kind=%s done", task.id, task.kind)
            finally:
                set_log_fields(task=None)

    def _end_abandoned(self) -> None:
        """Fail what an earlier controller was at when it died: it may be what killed it.

        This one ends each task in the turn that claims it, unless the store fails.
        """
        for task in self._store.tasks("running"):
            reason = (
                "the controller or its store failed during this task, expected a look at the open "
                "migration, and then the task to be submitted again"
            )
            result = TaskResult(error=reason, refusal=Refusal.ABANDONED.value)
            self._store.finish(task.id, "failed", result, fence=self._lease.token)

    def _result(self, group: ServingGroup, task: Task) -> TaskResult:
        if task.kind not in KINDS:
            known = ", ".join(KINDS)
            raise EplbError(f"task {task.id} is of kind {task.kind!r}, expected one of: {known}")
        self._refuse_if_expired(task)
        committed, settings = self._store.committed(), self._live.settings
        windows = group.complete_windows()
        past = None
        if committed is not None:
            past = self._planning.past(group, settings, committed.placement)
        if committed is None or past is None:
            why = "no complete window of load yet, expected at least one to plan on"
            raise TaskRefused(Refusal.NO_LOAD, why)
        serving, newest = committed.placement, windows[-1].index
        throttle = self._throttle(task)
        _refuse_if_stale(task, serving)
        if task.kind == "approve":
            return self._approve(group, task, past.history, serving, newest)
        if task.kind == "rollback":
            generation = int(task.request["generation"])
            why = f"rollback to generation {generation} ({task.request.get('reason', '')})"
            last = settings.plan_windows
            proposal = self._planning.rollback(group, settings, generation, serving, why, last=last)
        else:
            policy = str(task.request.get("policy") or settings.policy)
            proposal = self._planning.plan(group, settings, past.history, serving, policy)
            self._lease.check()  # a plan may take long, and what comes next is written down
        if task.kind == "explain":
            layer, expert = (int(task.request[name]) for name in ("layer", "expert"))
            try:
                found = proposal.explain(layer, expert)
                return TaskResult(detail=found.to_dict())
            except ConfigError as exc:
                raise TaskRefused(Refusal.NO_SUCH_EXPERT, str(exc)) from exc
        if task.kind == "propose":
            return self._propose(group, task, proposal, serving)
        is_dry = bool(task.request.get("dry_run", True))
        detail = proposal.to_dict() | {"dry_run": is_dry}
        if is_dry or proposal.decision is Decision.KEEP:
            return TaskResult(detail=detail)
        self._refuse_if_held_back()
        trigger = "request" if task.kind == "rebalance" else task.kind
        asked_by = f"task {task.id}"
        self._publisher.note(
            group, proposal, newest, trigger=trigger, actor=asked_by, throttle=throttle
        )
        is_promise = trigger != "rollback"
        migration = self._publisher.publish(
            group, proposal, serving, is_promise=is_promise, throttle=throttle
        )
        plan_id = _plan_id(migration, "the plan")
        pace = vars(migration.pace) if migration is not None else {}
        return TaskResult(plan_id=plan_id, detail=detail | {"pace": pace})

    def _throttle(self, task: Task) -> Throttle | None:
        """Return the throttle of a request, which the deployment's pace can take."""
        asked = task.request.get("throttle")
        if asked is None:
            return None
        try:
            throttle = Throttle(**asked)
            throttle.of(self._live.settings.pace)
        except ConfigError as exc:
            raise TaskRefused(Refusal.IMPOSSIBLE_THROTTLE, str(exc)) from exc
        return throttle

    def _propose(
        self, group: ServingGroup, task: Task, proposal: Plan, serving: Placement
    ) -> TaskResult:
        if proposal.decision is Decision.KEEP:
            kept = f"no proposal, because the plan is KEEP: {proposal.reason}"
            raise TaskRefused(Refusal.NOTHING_TO_PROPOSE, kept)
        asked = task.request
        by, reason = (str(asked.get(name, "")) for name in ("by", "reason"))
        lasts_s = float(asked.get("expires_s", LASTS_S))
        why = Why(by, "request", reason)
        made = self._publisher.propose(group, proposal, serving, why, lasts_s)
        return TaskResult(detail={"proposal": made.id})

    def _approve(
        self, group: ServingGroup, task: Task, past: LoadHistory, serving: Placement, newest: int
    ) -> TaskResult:
        """Publish the way to exactly the target that is stored; its price is of the load now."""
        by, reason = (str(task.request.get(name, "")) for name in ("by", "reason"))
        try:
            found, target = to_carry_out(self._store, int(task.request["proposal"]), serving)
        except StaleGeneration as exc:
            raise TaskRefused(Refusal.BASE_MOVED_ON, str(exc)) from exc
        self._refuse_if_held_back()
        why = f"proposal {found.id}, approved by {by} ({reason})"
        settings = self._live.settings
        proposal = self._planning.plan_back(group, settings, past, serving, target, why)
        is_drain = self._planning.is_draining(group, serving, settings)
        is_drain &= not self._planning.is_draining(group, target, settings)
        # What a drain costs was asked for with it.
        if not is_drain and not task.request.get("accept_loss"):
            _refuse_if_it_loses(proposal, found.id)
        self._publisher.note(group, proposal, newest, trigger="approval", actor=f"task {task.id}")
        approval = Approval(found.id, by, reason)
        migration = self._publisher.publish(
            group, proposal, serving, target=target, approval=approval
        )
        plan_id = _plan_id(migration, f"proposal {found.id}")
        return TaskResult(plan_id=plan_id, detail=proposal.to_dict())

    def _refuse_if_expired(self, task: Task) -> None:
        age_s, limit_s = self._clock() - task.time, self._live.settings.task_expiry_s
        if limit_s and age_s > limit_s:
            raise TaskRefused(
                Refusal.EXPIRED,
                f"task {task.id} of kind {task.kind!r} expired: found it queued for {age_s:.0f} s, "
                f"expected {limit_s:g} s at most; submit it again",
            )

    def _refuse_if_held_back(self) -> None:
        control = self._store.control()
        if not control.movement:
            why = f"{SWITCHED_OFF}, expected it on for a rebalance"
            raise TaskRefused(Refusal.MOVEMENT_OFF, why)
        if control.observe or self._live.settings.stage == "observe":
            why = "this deployment is observed only, expected observe off and a later stage"
            raise TaskRefused(Refusal.MOVEMENT_OFF, why)
        if self._store.published() is not None:
            why = "a migration is open already, expected none"
            raise TaskRefused(Refusal.MIGRATION_OPEN, why)


def _refuse_if_it_loses(plan: Plan, proposal_id: int) -> None:
    """Refuse a plan that costs more than it saves, by the load of now."""
    cost, lost_s = plan.problem.cost, cost_s_of(plan)
    gain = plan.before - plan.after
    if lost_s > cost.saved_seconds(gain):
        raise TaskRefused(
            Refusal.LOSES,
            f"proposal {proposal_id} loses by the load of now: imbalance {plan.before:.3f} -> "
            f"{plan.after:.3f} {cost.saving_text(gain)} and costs {duration_text(lost_s)}, "
            "expected that it saves more, or an approval that accepts the loss "
            "(accept_loss; eplb approve --force)",
        )


def _is_of_the_store(exc: EplbError) -> bool:
    """Whether no outcome is known: another leader ends the task, or what was asked may be done."""
    return isinstance(exc, StoreError) and not isinstance(exc, StaleGeneration | StaleRevision)


def _refuse_if_stale(task: Task, serving: Placement) -> None:
    wanted = task.request.get("if_generation")
    if wanted is not None and int(wanted) != serving.generation:
        raise StaleGeneration(
            f"found generation {serving.generation} serving, expected generation {wanted} as "
            "asked for"
        )


def _plan_id(migration: Migration | None, what: str) -> int:
    if migration is None:
        raise TaskRefused(
            Refusal.NOT_PUBLISHED,
            f"{what} was not published: found another plan, or ranks without a common version of "
            "weights; submit it again",
        )
    return migration.plan_id


def refusal_of(exc: EplbError, kind: str) -> Refusal | None:
    """Return the reason of an error; None: one that is none of them.

    Args:
        exc: that ended the task.
        kind: of the task.
    """
    if isinstance(exc, TaskRefused):
        return exc.refusal
    if isinstance(exc, StaleGeneration):
        return Refusal.GENERATION_MOVED_ON
    if isinstance(exc, ProposalEnded):
        return Refusal.PROPOSAL_ENDED
    if isinstance(exc, HistoryError):
        return Refusal.NO_LOAD
    if isinstance(exc, PlacementError | ConfigError | TopologyError):
        return Refusal.CANNOT_SERVE if kind in OF_TARGET else Refusal.NO_PLAN
    return None
