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
from copy import copy

from eplb.clock import Clock
from eplb.core.cost import Decision
from eplb.core.placement import Placement
from eplb.decision.alternatives import ENOUGH
from eplb.decision.triggers import breach, for_few_layers, stage_before
from eplb.errors import (
    ConfigError,
    EplbError,
    FencedOut,
    StaleRevision,
    StoreError,
)
from eplb.migration.candidates import Candidates, candidates_for
from eplb.migration.membership import leavers, phase_of
from eplb.policies.table import policy_named
from eplb.versions import CONTROLLER as COMPONENT
from eplb.versions import Announcement, refusal
from rebalance.controller.due import Due, Failures
from rebalance.controller.lease import ControllerLease, new_holder
from rebalance.controller.load import Arrivals, ServingGroup
from rebalance.controller.open_migration import OpenPlan
from rebalance.controller.plans.planning import Planning
from rebalance.controller.plans.publishing import (
    CONTROLLER,
    Publisher,
    Why,
    served_weights,
    waiting,
)
from rebalance.controller.plans.track_record import Judged
from rebalance.controller.settings import ControllerSettings as ControllerSettings
from rebalance.controller.settings import LiveReader
from rebalance.controller.tasks import Tasks
from rebalance.types import SWITCHED_OFF
from telemetry.load.pruning import Keeper
from telemetry.state.clock import StoreClock
from telemetry.state.events import FAILED, Failure
from telemetry.state.joining import ranks_of
from telemetry.state.live import Control
from telemetry.state.proposals import Proposal
from telemetry.state.store import StateStore

KEEP_EVERY_S = 60.0  # between two turns of the keeper of old load
PAUSE_WINDOWS = 16  # after a rollback by rule: the history is then of windows after it

log = logging.getLogger(__name__)


class Controller:
    """Plans for one deployment. Call ``turn`` whenever the store changed, or ``run`` for ever.

    Args:
        holder: name under which it holds the lease. A supervisor that restarts a controller after
            its death may reuse the name; the new process then need not wait for the lease to
            expire.
        clock: seconds since the epoch; None: the store's.
        monotonic: of the lease, of the deadline of a migration, and of how long a plan takes.

    Raises:
        ConfigError: the settings name a policy that is not there.
    """

    def __init__(
        self,
        store: StateStore,
        settings: ControllerSettings,
        *,
        holder: str | None = None,
        clock: Clock | None = None,
        monotonic: Clock = time.monotonic,
    ) -> None:
        policy_named(settings.policy)
        clock = clock or StoreClock(store)
        self._store, self._clock = store, clock
        self._live = LiveReader(store, settings)
        self._lease = ControllerLease(
            store, holder or new_holder(), settings.lease_ttl_s, clock=monotonic
        )
        self._arrivals = Arrivals(store, clock)
        self._group: ServingGroup | None = None
        self._fits_ranks = False  # whether it works with the version of their group
        self._planned_window = -1  # newest window that was planned on
        self._open = OpenPlan(store, monotonic)
        self._failures = Failures(store, clock)
        self._planning = Planning(store, monotonic)
        self._publisher = Publisher(store, self._live, self._lease, self._planning, clock)
        self._tasks = Tasks(store, self._live, self._lease, self._planning, self._publisher, clock)
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
        if isinstance(self._clock, StoreClock):
            self._clock.follow()
        group = self._arrivals.follow()
        if group is None:
            return
        if group is not self._group:
            self._noted_errors.clear()
            self._check_version(group)
            self._due.ranks_changed()
            self._publisher.ranks_changed()
            self._group, self._planned_window, self._paused_until = group, -1, -1
        try:
            if self._fits_ranks and self._lease.is_held():
                self._lead(group)
        except FencedOut as exc:
            self._lease.lose(str(exc))

    def _check_version(self, group: ServingGroup) -> None:
        """Stop leading while the ranks are of a version that this controller cannot work with."""
        ranks = ranks_of(self._store, group.run.run)  # stored in one change with their start
        why = refusal(Announcement(COMPONENT, self._lease.holder), ranks) if ranks else ""
        self._fits_ranks = not why
        if why:
            self._note_error("version", ConfigError(why))
            self._lease.give_up()

    def _lead(self, group: ServingGroup) -> None:
        """Watch a migration, work off tasks, plan, and keep what is old."""
        self._arrivals.report_rejected()
        self._arrivals.report_skipped()
        self._follow_live_settings(group)
        open_migration = self._store.published()
        if open_migration is not None:
            states = self._store.rank_states(group.run.run)
            served = served_weights(states)
            deadline_s, fence = self._live.settings.migration_deadline_s, self._lease.token
            self._open.watch(open_migration, states, served, deadline_s=deadline_s, fence=fence)
        self._end_overdue_membership(group)
        self._tasks.work_off(group)
        # Asked again: a task may have published meanwhile, and a second MOVE would be noted.
        if open_migration is None and self._store.published() is None:
            self._plan_if_due(group)
        self._keep_if_due()

    def _follow_live_settings(self, group: ServingGroup) -> None:
        """Take over live settings; values that cannot be used leave the settings as they are."""
        try:
            self._live.read(group.topology)
        except ConfigError as exc:
            self._note_error("settings", exc)

    def _keep_if_due(self) -> None:
        """Roll up and forget old load."""
        now = self._clock()
        if 0 <= now - self._kept_at < KEEP_EVERY_S:  # below 0: the clock was set back
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
            self._store.add_event(FAILED, Failure(where, str(exc)))

    # -- plans

    def _plan_if_due(self, group: ServingGroup) -> None:
        before, due = self._planned_window, copy(self._due)
        try:
            self._plan_on_new_window(group)
        except StoreError:
            # Not planned: this window remains due. What was published may have reached the store.
            self._planned_window, self._due = before, due
            self._planning.forget()
            raise
        except EplbError as exc:  # no plan for this load; the next window is another
            self._note_error("plan", exc)

    def _plan_on_new_window(self, group: ServingGroup) -> None:
        windows = group.complete_windows()
        if not windows or windows[-1].index <= self._planned_window:
            return
        self._planned_window = windows[-1].index
        committed, settings = self._store.committed(), self._live.settings
        if committed is None:
            return
        serving = committed.placement
        past = self._planning.past(group, settings, serving)
        if past is None:
            return
        control = self._store.control()
        is_free = control.movement and not control.observe and settings.stage != "observe"
        judged = self._planning.judge(group, serving, settings)
        if judged is not None:
            self._step_back_if_due(group, judged)
            settings = self._live.settings  # of the stage before, if it stepped back
            if is_free and self._take_back(group, judged, serving):
                return
        self._end_impossible_membership(group, serving)
        is_draining = self._planning.is_draining(group, serving, settings)
        trigger = self._due.trigger(
            settings.triggers, windows, past, committed, group, is_draining=is_draining
        )
        if trigger is None:
            return
        proposal = self._planning.plan(group, settings, past.history, serving, settings.policy)
        self._lease.check()  # a plan may take long, and what comes next is written down
        self._suggest(candidates_for(past.history.tokens.sum(axis=0), serving, group.topology))
        if proposal.decision is Decision.KEEP:
            self._publisher.note_keep(group, proposal, windows[-1].index, trigger)
            return
        if settings.stage == "layers":
            proposal = for_few_layers(proposal, settings.stage_layers)
        why = self._why_held_back(control, serving)
        if not why and settings.stage == "propose":
            own = Why(CONTROLLER, trigger, proposal.reason)
            waits = self._waiting_proposal(group) if is_draining else waiting(self._store)
            waits = waits or self._publisher.propose(group, proposal, serving, own)
            why = f"proposal {waits.id} waits for an approval"
        self._publisher.note(group, proposal, windows[-1].index, held_back=why, trigger=trigger)
        if not why:
            self._publisher.publish(group, proposal, serving)

    def _waiting_proposal(self, group: ServingGroup) -> Proposal | None:
        """Give the controller's open proposal that drains; one that does not makes room for it."""
        waits = waiting(self._store)
        content = None if waits is None else self._store.proposal_content(waits.id)
        if waits is None or content is None:
            return None
        if self._planning.is_draining(group, content.target, self._live.settings):
            why = "a rank was ordered to be drained since, and keeps experts in it"
            self._store.reject(waits.id, by=CONTROLLER, reason=why)
            return None
        return waits

    def _end_overdue_membership(self, group: ServingGroup) -> None:
        """End an operation at its deadline, with what it waits for."""
        change, committed = self._store.membership_change(), self._store.committed()
        if change is None or change.left_s(self._store.backend.now()) != 0.0:
            return
        placement = None if committed is None else committed.placement
        ready = [one.rank for one in self._store.joiners()]
        phase, waits = phase_of(change.wanted, placement, group.topology, ready)
        assert change.until is not None, "or it has no deadline"
        why = f"not done within {change.until - change.time:.0f} s, {phase}: {waits}"
        self._lease.check()
        if self._store.end_membership_change(change.id, "failed", why=why):
            log.warning("operation %s on the ranks failed: %s", change.id, why)

    def _end_impossible_membership(self, group: ServingGroup, serving: Placement) -> None:
        """End an operation whose leavers cannot be drained although every wanted rank serves.

        The feasibility was looked at when it was asked for; cordons or a death may have come since.
        """
        change, topology = self._store.membership_change(), group.topology
        if change is None or change.ended or not topology.alive[list(change.wanted)].all():
            return
        leaving = leavers(change.wanted, topology)
        why = self._planning.why_not_drained(group, serving, self._live.settings, leaving)
        if why:
            self._lease.check()
            self._store.end_membership_change(change.id, "failed", why=why)

    def _why_held_back(self, control: Control, serving: Placement) -> str:
        """Why no plan of the controller's own is published now; "" if one may be."""
        if control.observe or self._live.settings.stage == "observe":
            return "observe only"
        if not control.movement:
            return SWITCHED_OFF
        if self._live.settings.stage == "layers" and self._planning.is_judging(serving):
            return f"the plan before it is judged first, on {ENOUGH} windows"
        return self._why_paused() or self._failures.held_back(self._live.settings.back_off_s)

    def _step_back_if_due(self, group: ServingGroup, judged: Judged) -> None:
        """Set the stage before this one where a plan made its windows worse than allowed."""
        stage, why = self._live.settings.stage, breach(judged.given, self._live.settings.stage_loss)
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
        self._follow_live_settings(group)
        log.warning("stage=%s, was %s: %s", before, stage, reason)

    # -- back to an earlier placement

    def _take_back(self, group: ServingGroup, judged: Judged, serving: Placement) -> bool:
        """Publish the way back from a plan that made its first windows worse; whether it did."""
        loss, promise, given = self._live.settings.rollback_loss, judged.promise, judged.given
        if not loss or given > -loss:
            return False
        generation, base = promise.target.generation, promise.base.generation
        why = (
            f"rollback to generation {base}: generation {generation} promised {promise.gain:.3f} "
            f"and gave {given:.3f} in its first windows, expected above {-loss:.3f}"
        )
        try:
            proposal = self._planning.rollback(
                group, self._live.settings, base, serving, why, last=ENOUGH
            )
        except StoreError:
            raise
        except EplbError as exc:  # its ranks are gone, or it was pruned
            self._note_error("rollback", exc)
            return False
        self._paused_until = self._planned_window + PAUSE_WINDOWS
        self._publisher.note(group, proposal, self._planned_window, trigger="rollback")
        published = self._publisher.publish(group, proposal, serving, is_promise=False)
        return published is not None

    def _why_paused(self) -> str:
        """Why no plan is published after a rollback by rule; "" if one may be."""
        left = self._paused_until - self._planned_window
        return f"{left} windows of the pause after a rollback are left" if left > 0 else ""

    def _suggest(self, candidates: Candidates) -> None:
        """Publish candidate experts that hosts should preload for a coming plan, if they
        changed."""
        if candidates != self._store.candidates():
            self._store.suggest(candidates)
