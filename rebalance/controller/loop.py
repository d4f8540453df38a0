"""The controller loop: window -> plan -> publish -> watch the commit.

The controller runs in its own process and keeps no state outside the store: after a restart it
folds the samples again and continues. It never contacts a rank and commits nothing: the ranks write
the committed placement after the swap.

Several controllers may run. The holder of the lease leads. The others fold samples too, so that a
new leader can plan at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from eplb.clock import Clock
from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from eplb.decision.gate import Decision
from eplb.decision.promises import ENOUGH
from eplb.decision.rollout import breach, for_few_layers, stage_before
from eplb.errors import (
    ConfigError,
    EplbError,
    FencedOut,
    StaleGeneration,
    StaleRevision,
    StoreError,
)
from eplb.migration.build import Migration, build_migration
from eplb.migration.candidates import Candidates, candidates_for
from eplb.migration.spares import expand
from eplb.planner import Plan
from eplb.policies.table import policy_named
from eplb.versions import CONTROLLER as COMPONENT
from eplb.versions import Announcement, refusal
from rebalance.controller.due import Due
from rebalance.controller.failures import Failures
from rebalance.controller.lease import ControllerLease, new_holder
from rebalance.controller.load import Arrivals, Group
from rebalance.controller.open_migration import OpenPlan
from rebalance.controller.planning import Planning, planned_on, summary
from rebalance.controller.proposals import CONTROLLER, Why, drafted, to_carry_out, waiting
from rebalance.controller.settings import ControllerSettings as ControllerSettings
from rebalance.controller.settings import LiveReader
from rebalance.controller.track_record import Judged
from telemetry.joining import ranks_of
from telemetry.log_context import set_log_fields
from telemetry.proposals import LASTS_S, Approval, Proposal
from telemetry.retention.pruning import Keeper
from telemetry.store import Control, LoadStore, Task, TaskResult

KEEP_EVERY_S = 60.0  # between two turns of the keeper of old load
KINDS = ("rebalance", "rollback", "explain", "propose", "approve")  # of tasks
PAUSE_WINDOWS = 16  # after a rollback by rule: the history is then of windows after it

log = logging.getLogger(__name__)


class Controller:
    """Plans for one deployment. Call ``turn`` whenever the store changed, or ``run`` for ever.

    Args:
        holder: name under which it holds the lease. A supervisor that restarts a controller after
            its death may reuse the name; the new process then need not wait for the lease to
            expire.
        clock: seconds since the epoch.
        monotonic: of the lease, and of how long a plan takes.

    Raises:
        ConfigError: the settings name a policy that is not there.
    """

    def __init__(
        self,
        store: LoadStore,
        settings: ControllerSettings,
        *,
        holder: str | None = None,
        clock: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        policy_named(settings.policy)
        self._store, self._settings, self._clock = store, settings, clock
        self._monotonic, self._live = monotonic, LiveReader(store, settings)
        self._lease = ControllerLease(
            store, holder or new_holder(), settings.lease_ttl_s, clock=monotonic
        )
        self._arrivals = Arrivals(store, settings.phase, clock)
        self._group: Group | None = None
        self._fits_ranks = False  # whether it works with the version of their group
        self._planned_window = -1  # newest window that was planned on
        self._noted_window = -1  # newest window whose KEEP was recorded
        self._noted_decision = ""
        self._open = OpenPlan(store, clock)
        self._failures = Failures(store, clock)
        self._planning = Planning(store, monotonic)
        self._due = Due(clock)
        self._paused_until = -1  # window before which no plan follows a rollback by rule
        self._noted_errors: set[str] = set()
        self._keeper, self._kept_at = Keeper(store, settings.retention), clock()

    def run(self, is_stopping: Callable[[], bool], *, poll_s: float = 0.2) -> None:
        """Work until ``is_stopping``, then let another lead.

        Raises:
            StoreError: the store failed; ``run`` may be called again.
        """
        version = -1
        while not is_stopping():
            version = self._store.wait(version, poll_s)
            self.turn()
        self.close()

    def close(self) -> None:
        """Release the lease, so that no controller has to wait for it to expire."""
        self._lease.give_up()

    def turn(self) -> None:
        """Fold new samples; if this controller leads, plan, publish and watch."""
        group = self._arrivals.follow()
        if group is None:
            return
        if group is not self._group:
            self._noted_errors.clear()
            self._check_version(group)
            self._due.ranks_changed()
            self._group, self._planned_window, self._noted_window = group, -1, -1
            self._paused_until = -1
        try:
            if self._fits_ranks and self._lease.is_held():
                self._lead(group)
        except FencedOut as exc:
            self._lease.lose(str(exc))

    def _check_version(self, group: Group) -> None:
        """Stop leading while the ranks are of a version that this controller cannot work with."""
        joining = Announcement(COMPONENT, self._lease.holder)
        why = refusal(joining, ranks_of(self._store, group.run.run))
        self._fits_ranks = not why
        if why:
            self._note_error("version", ConfigError(why))
            self._lease.give_up()

    def _lead(self, group: Group) -> None:
        """Watch a migration, work off tasks, plan, and keep what is old."""
        self._arrivals.report_rejected()
        self._follow_live_settings()
        open_migration = self._store.published()
        if open_migration is not None:
            states = self._store.rank_states(group.run.run)
            served = self._served_weights()
            deadline_s, fence = self._settings.migration_deadline_s, self._lease.token
            self._open.watch(open_migration, states, served, deadline_s=deadline_s, fence=fence)
        self._work_off_tasks(group)
        # Asked again: a task may have published meanwhile, and a second MOVE would be noted.
        if open_migration is None and self._store.published() is None:
            self._plan_if_due(group)
        self._keep_if_due()

    def _follow_live_settings(self) -> None:
        """Take over live settings; values that cannot be used leave the settings as they are."""
        try:
            self._settings = self._live.read()
        except ConfigError as exc:
            self._note_error("settings", exc)

    def _keep_if_due(self) -> None:
        """Roll up and forget old load."""
        now = self._clock()
        if now - self._kept_at < KEEP_EVERY_S:
            return
        self._kept_at = now
        done = self._keeper.turn(now)
        if done.excluded:
            log.warning("%d samples excluded from roll-ups: %s", done.excluded, done.reason)

    def _note_error(self, where: str, exc: EplbError) -> None:
        """Log it, and make the first of its kind in a run an event."""
        log.warning("%s: %s", where, exc)
        if where not in self._noted_errors:
            self._noted_errors.add(where)
            self._store.add_event("error", {"where": where, "message": str(exc)})

    def _served_weights(self) -> int | None:
        """Version of the weights that every rank reports; None while they differ or none has."""
        assert self._group is not None, "asked about ranks that serve"
        states = self._store.rank_states(self._group.run.run)
        versions = {state.weights_version for state in states}
        return versions.pop() if len(versions) == 1 else None

    # -- plans

    def _plan_if_due(self, group: Group) -> None:
        before, due = self._planned_window, self._due.memory
        try:
            self._plan_on_new_window(group)
        except StoreError:
            # not planned: this window remains due
            self._planned_window, self._due.memory = before, due
            raise
        except EplbError as exc:  # no plan for this load; the next window is another
            self._note_error("plan", exc)

    def _plan_on_new_window(self, group: Group) -> None:
        windows = group.complete_windows()
        if not windows or windows[-1].index <= self._planned_window:
            return
        self._planned_window = windows[-1].index
        committed = self._store.committed()
        past = planned_on(windows, self._settings.plan_windows)
        if committed is None or past is None:
            return
        control = self._store.control()
        serving = committed.placement
        is_free = control.movement and not control.observe and self._settings.stage != "observe"
        judged = self._planning.judge(group, serving, self._settings)
        if judged is not None:
            self._step_back_if_due(judged)
            if is_free and self._take_back(group, judged, serving):
                return
        trigger = self._due.trigger(self._settings.triggers, windows, past, committed, group)
        if trigger is None:
            return
        proposal = self._plan(group, past.history, serving, self._settings.policy)
        self._suggest(candidates_for(past.history.tokens.sum(axis=0), serving, group.topology))
        if proposal.decision is Decision.KEEP:
            self._note_keep(proposal, windows[-1].index, trigger)
            return
        if self._settings.stage == "layers":
            proposal = for_few_layers(proposal, self._settings.stage_layers)
        why = self._held_back(control, serving)
        if not why and self._settings.stage == "propose":
            own = Why(CONTROLLER, trigger, proposal.reason)
            waits = waiting(self._store) or self._propose(group, proposal, serving, own)
            why = f"proposal {waits.id} waits for an approval"
        self._note(proposal, windows[-1].index, held_back=why, trigger=trigger)
        if not why:
            self._publish(group, proposal, serving)

    def _held_back(self, control: Control, serving: Placement) -> str:
        """Why no plan of the controller's own is published now; "" if one may be."""
        if control.observe or self._settings.stage == "observe":
            return "observe only"
        if not control.movement:
            return "movement is switched off"
        if self._settings.stage == "layers" and self._planning.is_judging(serving):
            return f"the plan before it is judged first, on {ENOUGH} windows"
        return self._paused() or self._failures.held_back(self._settings.back_off_s)

    def _step_back_if_due(self, judged: Judged) -> None:
        """Set the stage before this one where a plan made its windows worse than allowed."""
        stage, why = self._settings.stage, breach(judged.given, self._settings.stage_loss)
        before = stage_before(stage)
        if not why or before == stage:
            return
        reason = f"rollout of generation {judged.promise.target.generation}: {why}"
        self._lease.check()
        state = self._store.live()
        try:
            self._store.change_live({"stage": before}, expected=state.revision, reason=reason)
        except StaleRevision:
            log.info("stage not changed: live settings were changed at the same time")
            return
        self._follow_live_settings()
        log.warning("stage=%s, was %s: %s", before, stage, reason)

    def _plan(self, group: Group, past: LoadHistory, serving: Placement, policy: str) -> Plan:
        set_log_fields(generation=serving.generation)
        proposal = self._planning.plan(group, self._settings, past, serving, policy)
        self._lease.check()  # a plan may take long, and what comes next is written down
        return proposal

    # -- back to an earlier placement

    def _take_back(self, group: Group, judged: Judged, serving: Placement) -> bool:
        """Publish the way back from a plan that made its first windows worse; whether it did."""
        loss, promise, given = self._settings.rollback_loss, judged.promise, judged.given
        if not loss or given > -loss:
            return False
        generation, base = promise.target.generation, promise.base.generation
        why = (
            f"rollback to generation {base}: generation {generation} promised {promise.gain:.3f} "
            f"and gave {given:.3f} in its first windows, expected above {-loss:.3f}"
        )
        try:
            proposal = self._plan_back(group, base, serving, why, last=ENOUGH)
        except StoreError:
            raise
        except EplbError as exc:  # its ranks are gone, or it was pruned
            self._note_error("rollback", exc)
            return False
        self._paused_until = self._planned_window + PAUSE_WINDOWS
        return self._carry_out(group, proposal, serving, "rollback") is not None

    def _paused(self) -> str:
        """Why no plan is published after a rollback by rule; "" if one may be."""
        left = self._paused_until - self._planned_window
        return f"{left} windows of the pause after a rollback are left" if left > 0 else ""

    def _plan_back(
        self, group: Group, generation: int, serving: Placement, why: str, *, last: int
    ) -> Plan:
        earlier = self._store.placement(generation)
        if earlier is None:
            raise EplbError(f"{why}: found no placement of generation {generation} in the store")
        past = planned_on(group.complete_windows(), last)
        if past is None:
            raise EplbError(f"{why}: found no complete window of load, expected one for its price")
        return self._planning.plan_back(
            group, self._settings, past.history, serving, earlier.placement, why
        )

    def _carry_out(
        self, group: Group, proposal: Plan, serving: Placement, trigger: str, actor: str = ""
    ) -> Migration | None:
        """Record a decision and publish its migration."""
        self._note(proposal, self._planned_window, trigger=trigger, actor=actor)
        return self._publish(group, proposal, serving, is_promise=trigger != "rollback")

    def _suggest(self, candidates: Candidates) -> None:
        """Publish candidate experts that hosts should preload for a coming plan, if they
        changed."""
        if candidates != self._store.candidates():
            self._store.suggest(candidates)

    def _target(self, group: Group, proposal: Plan, current: Placement) -> Placement:
        """The plan's target with the spare slots of the deployment."""
        spare_slots = self._settings.spare_slots
        if not spare_slots:
            return proposal.target
        return expand(proposal.target, current, group.topology, spare_slots)

    def _propose(
        self, group: Group, proposal: Plan, serving: Placement, why: Why, lasts_s: float = LASTS_S
    ) -> Proposal:
        """Store a plan until somebody decides on it."""
        target, now = self._target(group, proposal, serving), self._clock()
        made = drafted(proposal, target, serving, now=now, lasts_s=lasts_s, why=why)
        return self._store.propose(*made, fence=self._lease.token)

    def _publish(
        self,
        group: Group,
        proposal: Plan,
        current: Placement,
        *,
        is_promise: bool = True,
        target: Placement | None = None,
        approval: Approval | None = None,
    ) -> Migration | None:
        """Offer the way from ``current``, which the plan was made for, to the plan's target.

        Args:
            is_promise: whether the plan is held to its gain; a rollback promises none.
            target: exactly this one in place of the plan's.
            approval: of the proposal that is carried out.
        """
        target = target or self._target(group, proposal, current)
        served = self._served_weights()
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
            pace=self._settings.pace,
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

    def _note_keep(self, proposal: Plan, window: int, trigger: str) -> None:
        """Record a KEEP decision; of those made at each window, one in a while."""
        is_due = window - self._noted_window >= self._settings.keep_every_windows
        is_due |= trigger != "load"
        if is_due or self._noted_decision != proposal.decision.value:
            self._note(proposal, window, trigger=trigger)

    def _note(
        self, proposal: Plan, window: int, *, held_back: str = "", trigger: str, actor: str = ""
    ) -> None:
        self._noted_window, self._noted_decision = window, proposal.decision.value
        reason = f"{proposal.reason} (not moved: {held_back})" if held_back else proposal.reason
        detail = summary(proposal) | {"reason": reason, "window": window, "trigger": trigger}
        detail |= {"actor": actor or "controller", "stage": self._settings.stage}
        detail |= self._planning.how
        self._store.add_event("plan", detail)
        log.info(
            "generation=%d decision=%s reason=%r",
            proposal.base_generation,
            proposal.decision.value,
            reason,
        )

    # -- tasks

    def _work_off_tasks(self, group: Group) -> None:
        self._end_abandoned_tasks()
        fence = self._lease.token
        while (task := self._store.claim(fence=fence)) is not None:
            set_log_fields(task=task.id)
            try:
                result = self._work_off(group, task)
            except FencedOut:
                raise  # the new leader ends the task
            except EplbError as exc:
                self._store.finish(task.id, "failed", TaskResult(error=str(exc)), fence=fence)
                log.info("task=%d kind=%s failed: %s", task.id, task.kind, exc)
            else:
                self._store.finish(task.id, "done", result, fence=fence)
                log.info("task=%d kind=%s done", task.id, task.kind)
            finally:
                set_log_fields(task=None)

    def _end_abandoned_tasks(self) -> None:
        """Fail what an earlier controller was at when it died: it may be what killed it.

        This one ends each task in the turn that claims it, unless the store fails.
        """
        for task in self._store.tasks("running"):
            reason = "the controller exited during this task, expected it to be submitted again"
            result = TaskResult(error=reason)
            self._store.finish(task.id, "failed", result, fence=self._lease.token)

    def _work_off(self, group: Group, task: Task) -> TaskResult:
        if task.kind not in KINDS:
            known = ", ".join(KINDS)
            raise EplbError(f"task {task.id} is of kind {task.kind!r}, expected one of: {known}")
        self._refuse_if_expired(task)
        committed = self._store.committed()
        past = planned_on(group.complete_windows(), self._settings.plan_windows)
        if committed is None or past is None:
            raise EplbError("no complete window of load yet, expected at least one to plan on")
        serving = committed.placement
        _refuse_if_stale(task, serving)
        if task.kind == "approve":
            return self._approve(group, task, past.history, serving)
        if task.kind == "rollback":
            generation = int(task.request["generation"])
            why = f"rollback to generation {generation} ({task.request.get('reason', '')})"
            windows = self._settings.plan_windows
            proposal = self._plan_back(group, generation, serving, why, last=windows)
        else:
            policy = str(task.request.get("policy") or self._settings.policy)
            proposal = self._plan(group, past.history, serving, policy)
        if task.kind == "explain":
            layer, expert = (int(task.request[name]) for name in ("layer", "expert"))
            return TaskResult(detail=proposal.explain(layer, expert).to_dict())
        if task.kind == "propose":
            return self._propose_for(group, task, proposal, serving)
        is_dry = bool(task.request.get("dry_run", True))
        detail = proposal.to_dict() | {"dry_run": is_dry}
        if is_dry or proposal.decision is Decision.KEEP:
            return TaskResult(detail=detail)
        self._refuse_if_held_back()
        trigger = "request" if task.kind == "rebalance" else task.kind
        migration = self._carry_out(group, proposal, serving, trigger, f"task {task.id}")
        return TaskResult(plan_id=migration.plan_id if migration else 0, detail=detail)

    def _propose_for(
        self, group: Group, task: Task, proposal: Plan, serving: Placement
    ) -> TaskResult:
        if proposal.decision is Decision.KEEP:
            raise EplbError(f"no proposal, because the plan is KEEP: {proposal.reason}")
        asked = task.request
        by, reason = (str(asked.get(name, "")) for name in ("by", "reason"))
        lasts_s = float(asked.get("expires_s", LASTS_S))
        made = self._propose(group, proposal, serving, Why(by, "request", reason), lasts_s)
        return TaskResult(detail={"proposal": made.id})

    def _approve(
        self, group: Group, task: Task, past: LoadHistory, serving: Placement
    ) -> TaskResult:
        """Publish the way to exactly the target that is stored; its price is of the load now."""
        by, reason = (str(task.request.get(name, "")) for name in ("by", "reason"))
        found, target = to_carry_out(self._store, int(task.request["proposal"]), serving)
        self._refuse_if_held_back()
        why = f"proposal {found.id}, approved by {by} ({reason})"
        proposal = self._planning.plan_back(group, self._settings, past, serving, target, why)
        self._note(proposal, self._planned_window, trigger="approval", actor=f"task {task.id}")
        approval = Approval(found.id, by, reason)
        migration = self._publish(group, proposal, serving, target=target, approval=approval)
        if migration is None:
            raise EplbError(
                f"proposal {found.id} was not published: found another plan, or ranks without a "
                "common version of weights; approve it again"
            )
        return TaskResult(plan_id=migration.plan_id, detail=proposal.to_dict())

    def _refuse_if_expired(self, task: Task) -> None:
        age_s, limit_s = self._clock() - task.time, self._settings.task_expiry_s
        if limit_s and age_s > limit_s:
            raise EplbError(
                f"task {task.id} of kind {task.kind!r} expired: found it queued for {age_s:.0f} s, "
                f"expected {limit_s:g} s at most; submit it again"
            )

    def _refuse_if_held_back(self) -> None:
        control = self._store.control()
        if not control.movement:
            raise EplbError("movement is switched off, expected it on for a rebalance")
        if control.observe or self._settings.stage == "observe":
            raise EplbError(
                "this deployment is observed only, expected observe off and a later stage"
            )
        if self._store.published() is not None:
            raise EplbError("a migration is open already, expected none")


def _refuse_if_stale(task: Task, serving: Placement) -> None:
    wanted = task.request.get("if_generation")
    if wanted is not None and int(wanted) != serving.generation:
        raise StaleGeneration(
            f"found generation {serving.generation} serving, expected generation {wanted} as "
            "asked for"
        )
