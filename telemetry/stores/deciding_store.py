"""What every store decides alike: who may commit, publish, lead or claim, and what is written.

A decision reads and writes a ``Ledger``, one atomic change of a store, and lets
``telemetry/stores/commit_rules.py`` judge. ``DecidingStore`` offers the decisions as methods of
``LoadStore``. A decision is repeated when another change came first, so it keeps no state between
calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from eplb.core.placement import Placement
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery
from eplb.versions import RANKS, Announcement
from telemetry.events import EVENT_OF_OUTCOME, PlanEnd, PlanOffer
from telemetry.live import (
    SWITCHES,
    LiveSettings,
    LiveState,
    Value,
    changed,
    expired,
    started,
)
from telemetry.proposals import (
    Approval,
    Content,
    Proposal,
    ProposalEnded,
    check_open,
    check_proposed,
    standing,
    to_forget,
)
from telemetry.records.task_codec import result_from_text, result_to_text
from telemetry.refusals import Refusal
from telemetry.store import (
    Control,
    Details,
    Lease,
    LeaseOf,
    Outcome,
    RunInfo,
    Task,
    TaskResult,
    TaskState,
)
from telemetry.stores import commit_rules
from telemetry.stores.lease_watch import LeaseWatch

EXPIRED = "expired"  # begins the reason of the event
KEPT_ANNOUNCEMENTS = 256  # of a component: hosts, and controllers that were started again

T = TypeVar("T")


class Ledger(Protocol):
    """One atomic change of a deployment: all its writes are made, or none."""

    @property
    def time(self) -> float:
        """Seconds since the epoch, by the store's clock."""

    def current_run(self) -> str | None:
        """Return the name of the latest start."""

    def run(self, name: str) -> RunInfo | None:
        """Return the start of that name."""

    def add_run(self, info: RunInfo) -> None:
        """Record a start."""

    def latest_lease(self, of: LeaseOf) -> Lease | None:
        """Return the last lease that was given out, be it run out or given up."""

    def put_lease(self, lease: Lease, *, is_new_token: bool) -> Lease:
        """Write a lease and return it; a store that may have lost tokens raises a new one."""

    def committed(self) -> tuple[int, str] | None:
        """Return generation and hash of the committed placement."""

    def hash_of(self, generation: int) -> str | None:
        """Return the hash of the placement that was committed as a generation."""

    def add_placement(self, placement: Placement, plan_id: int, reason: str) -> None:
        """Write a placement as the committed one."""

    def open_plan_id(self) -> int | None:
        """Return the plan id of the open migration."""

    def is_known_plan(self, plan_id: int) -> bool:
        """Return whether a migration of this plan id was published."""

    def open_migration(self, migration: Migration) -> None:
        """Write the open migration."""

    def close_migration(self, plan_id: int, outcome: Outcome) -> None:
        """End the open migration."""

    def next_plan_id(self) -> int:
        """Give out a plan id."""

    def reserve_plan_ids(self, up_to: int) -> int:
        """Note ids as given out, and return the greatest that is."""

    def proposals(self) -> Sequence[Proposal]:
        """Return all proposals as they are stored."""

    def add_proposal(self, proposal: Proposal, content: Content) -> None:
        """Write a new proposal."""

    def put_proposal(self, proposal: Proposal) -> None:
        """Write a proposal that changed its state."""

    def drop_proposal(self, proposal_id: int) -> None:
        """Forget a proposal and its content."""

    def recovery(self) -> Recovery | None:
        """Return the latest record of a recovery."""

    def put_recovery(self, record: Recovery) -> None:
        """Write the record of a recovery."""

    def live(self) -> LiveState:
        """Return the live settings."""

    def put_live(self, state: LiveState) -> LiveState:
        """Write them and return them; a store that may have lost revisions raises theirs."""

    def task(self, task_id: int) -> Task | None:
        """Return a task."""

    def oldest_queued(self) -> Task | None:
        """Return the task that was queued first of those that wait."""

    def add_task(self, kind: str, request: Details) -> Task:
        """Queue a task under a new id."""

    def put_task(self, task: Task) -> None:
        """Write a task that changed its state."""

    def add_event(self, kind: str, detail: Details) -> object:
        """Append an event; readers that wait are woken."""

    def wake(self) -> None:
        """Wake readers that wait, without an event."""

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first."""

    def put_announcement(self, announced: Announcement) -> None:
        """Write an announcement in place of an earlier one of that component and name."""

    def drop_announcement(self, announced: Announcement) -> None:
        """Forget an announcement."""


def as_stored(details: Details) -> Details:
    """A copy as every store gives it back: what JSON makes of it, changed by nobody."""
    return commit_rules.details_from_text(commit_rules.details_to_text(details))


class DecidingStore(ABC):
    """The decisions as methods; see ``LoadStore`` for each. A store gives the atomic change."""

    _watch: LeaseWatch

    @abstractmethod
    def _decide(self, what: str, decision: Callable[[Ledger], T]) -> T:
        """Let a decision read and write the store in one atomic change."""

    @abstractmethod
    def live(self) -> LiveState:
        """Return the live settings."""

    @abstractmethod
    def _latest_lease(self, of: LeaseOf) -> Lease | None:
        """Return the last lease that was given out."""

    def begin_run(self, info: RunInfo) -> None:
        """Record a start; the same again changes nothing."""
        info = replace(info, model=as_stored(info.model), topology=as_stored(info.topology))

        def decision(ledger: Ledger) -> None:
            known = ledger.run(info.run)
            if known is not None:
                commit_rules.check_run_is_new(info, known)
                return
            ledger.add_run(info)
            _announce(ledger, Announcement(RANKS, info.run))
            ledger.add_event("run", commit_rules.run_detail(info))

        self._decide(f"run {info.run!r}", decision)

    def acquire_lease(self, holder: str, ttl_s: float, of: LeaseOf = "controller") -> Lease | None:
        """Acquire or renew a lease."""
        is_over = self._watch.is_over

        def decision(ledger: Ledger) -> Lease | None:
            latest, now = ledger.latest_lease(of), ledger.time
            lease = commit_rules.next_lease(
                holder, ttl_s, of, now=now, latest=latest, is_over=is_over
            )
            if lease is None:
                return None
            is_new_token = latest is None or lease.token != latest.token
            return ledger.put_lease(lease, is_new_token=is_new_token)

        lease = self._decide(f"lease for {holder!r}", decision)
        if lease is not None:
            self._watch.age_s(lease)
        return lease

    def release_lease(self, lease: Lease) -> bool:
        """Release the lease."""

        def decision(ledger: Ledger) -> bool:
            latest, is_over = ledger.latest_lease(lease.of), self._watch.is_over
            ended = commit_rules.given_up(lease, now=ledger.time, latest=latest, is_over=is_over)
            if ended is not None:
                ledger.put_lease(ended, is_new_token=False)
            return ended is not None

        return self._decide(f"end of the lease of {lease.holder!r}", decision)

    def lease(self, of: LeaseOf = "controller") -> Lease | None:
        """Return the lease that holds now."""
        latest = self._latest_lease(of)
        return None if latest is None or self._watch.is_over(latest) else latest

    def latest_lease(self, of: LeaseOf = "controller") -> Lease | None:
        """Return the lease that was given out last."""
        return self._latest_lease(of)

    def commit(
        self,
        placement: Placement,
        *,
        expected: int | None,
        plan_id: int = 0,
        reason: str,
        outcome: Outcome = "committed",
    ) -> bool:
        """Make ``placement`` the committed one and close the open migration."""
        generation = placement.generation

        def decision(ledger: Ledger) -> bool:
            committed = ledger.committed()
            if not commit_rules.is_to_be_committed(
                placement,
                expected=expected,
                committed=committed[0] if committed else None,
                known_hash=ledger.hash_of(generation),
            ):
                return False
            commit_rules.check_not_dropped(plan_id, generation, ledger.recovery())
            ledger.add_placement(placement, plan_id, reason)
            open_id = ledger.open_plan_id()
            if open_id is not None:
                ledger.close_migration(open_id, outcome if open_id == plan_id else "rejected")
                if open_id != plan_id:
                    overtaken = commit_rules.overtaken_reason(generation)
                    ledger.add_event("reject", vars(PlanEnd(generation, open_id, overtaken)))
            ledger.add_event(EVENT_OF_OUTCOME[outcome], vars(PlanEnd(generation, plan_id, reason)))
            return True

        return self._decide(f"commit of generation {generation}", decision)

    def next_plan_id(self) -> int:
        """Reserve a plan id."""
        return self._decide("next plan id", lambda ledger: ledger.next_plan_id())

    def publish(
        self, migration: Migration, *, fence: int | None = None, approval: Approval | None = None
    ) -> None:
        """Offer a migration to the ranks."""
        plan_id = migration.plan_id

        def decision(ledger: Ledger) -> None:
            _check_fence(ledger, fence)
            is_known = ledger.is_known_plan(plan_id)
            commit_rules.check_plan_id(
                plan_id, open_plan_id=ledger.open_plan_id(), is_known=is_known
            )
            commit_rules.check_base(migration, ledger.committed())
            if approval is not None:
                found = _open_proposal(ledger, approval.proposal)
                _end(ledger, replace(found, plan_id=plan_id), "approved", approval)
            ledger.open_migration(migration)
            ledger.reserve_plan_ids(plan_id)
            ledger.add_event("publish", vars(PlanOffer.of(migration)))

        self._decide(f"publish of plan {plan_id}", decision)

    def propose(
        self, proposal: Proposal, content: Content, *, fence: int | None = None
    ) -> Proposal:
        """Store a proposal."""

        def decision(ledger: Ledger) -> Proposal:
            _check_fence(ledger, fence)
            now, committed = ledger.time, ledger.committed()
            check_proposed(proposal, committed)
            for old in to_forget(standing(one, now, committed) for one in ledger.proposals()):
                ledger.drop_proposal(old)
            added = replace(proposal, id=ledger.next_plan_id(), summary=as_stored(proposal.summary))
            ledger.add_proposal(added, content)
            _note_proposal(ledger, added, added.by, added.reason)
            return added

        return self._decide("a new proposal", decision)

    def reject(self, proposal_id: int, *, by: str, reason: str) -> Proposal:
        """End an open proposal."""

        def decision(ledger: Ledger) -> Proposal:
            found = _open_proposal(ledger, proposal_id)
            return _end(ledger, found, "rejected", Approval(proposal_id, by, reason))

        return self._decide(f"end of proposal {proposal_id}", decision)

    def withdraw(
        self, plan_id: int, *, outcome: Outcome, reason: str, fence: int | None = None
    ) -> bool:
        """Close an open migration of which nothing was applied."""
        assert outcome != "committed", "a migration that was applied is closed by commit"

        def decision(ledger: Ledger) -> bool:
            _check_fence(ledger, fence)
            if ledger.open_plan_id() != plan_id:
                return False
            _drop(ledger, plan_id, outcome, reason)
            return True

        return self._decide(f"withdrawal of plan {plan_id}", decision)

    def recover(self, record: Recovery, *, expected_membership: int) -> Recovery | None:
        """Write a record unless one stands; return the one that stands."""

        def decision(ledger: Ledger) -> Recovery | None:
            standing = commit_rules.standing_record(
                record, expected_membership=expected_membership, latest=ledger.recovery()
            )
            if standing is not None:
                return standing
            committed, open_id = ledger.committed(), ledger.open_plan_id()
            if commit_rules.is_overtaken(record, committed[0] if committed else None):
                return None
            ledger.put_recovery(record)
            ledger.add_event("recovery", vars(record))
            if open_id is not None and commit_rules.is_dropped_by(record, open_id):
                _drop(ledger, open_id, "aborted", record.reason)
            return record

        return self._decide(f"recovery to membership {record.membership}", decision)

    def restore(
        self,
        run: RunInfo,
        placement: Placement,
        live: LiveState,
        *,
        last_plan_id: int,
        reason: str,
    ) -> bool:
        """Write what a rank knows into a store that lost its contents."""

        def decision(ledger: Ledger) -> bool:
            current, is_committed = ledger.current_run(), ledger.committed() is not None
            if not commit_rules.is_to_be_restored(
                run, is_committed=is_committed, current_run=current
            ):
                return False
            if current is None:
                ledger.add_run(run)
                _announce(ledger, Announcement(RANKS, run.run))
            ledger.add_placement(placement, 0, reason)
            # Readers may know revisions past the caller's.
            ledger.put_live(replace(live, revision=live.revision + commit_rules.PLAN_ID_GAP))
            greatest = ledger.reserve_plan_ids(last_plan_id + commit_rules.PLAN_ID_GAP)
            detail = commit_rules.restore_detail(
                run, placement, live, last_plan_id=greatest, reason=reason
            )
            ledger.add_event("restore", detail)
            return True

        return self._decide(f"restoring of run {run.run!r}", decision)

    def announce(self, mine: Announcement) -> None:
        """Record the version of a process."""
        what = f"version of {mine.component} {mine.name!r}"
        self._decide(what, lambda ledger: _announce(ledger, mine))

    def control(self) -> Control:
        """Return the switches that apply."""
        return self.live().control

    def set_control(self, control: Control, *, reason: str) -> None:
        """Set both switches."""
        self.change_live(vars(control), reason=reason)

    def change_live(
        self,
        changes: Mapping[str, Value | None],
        *,
        expected: int | None = None,
        reason: str,
        lasts_s: float | None = None,
    ) -> LiveState:
        """Set live values."""

        def decision(ledger: Ledger) -> LiveState:
            return _put_live(
                ledger, changes, expected=expected, now=ledger.time, reason=reason, lasts_s=lasts_s
            )

        return self._decide("live settings", decision)

    def expire_live(self) -> LiveState:
        """Remove live values whose time has passed."""
        state = self.live()
        if not state.until:
            return state

        def decision(ledger: Ledger) -> LiveState:
            now, state = ledger.time, ledger.live()
            over = expired(state, now)
            if not over:
                return state
            reason = f"{EXPIRED}: {state.changes[next(iter(over))].reason}"
            return _put_live(ledger, over, expected=None, now=now, reason=reason)

        return self._decide("expiry of live settings", decision)

    def set_static(self, static: LiveSettings, *, reason: str) -> LiveState:
        """Set with what the deployment was started."""

        def decision(ledger: Ledger) -> LiveState:
            state = ledger.put_live(started(ledger.live(), static))
            ledger.add_event("control", commit_rules.control_detail(state, reason))
            return state

        return self._decide("static settings", decision)

    def submit(self, kind: str, request: Details) -> Task:
        """Queue a task."""
        asked = as_stored(request)

        def decision(ledger: Ledger) -> Task:
            task = ledger.add_task(kind, asked)
            detail = commit_rules.task_detail(task.id, kind, "queued", asked.get("reason"))
            ledger.add_event("task", detail)
            return task

        return self._decide(f"task {kind!r}", decision)

    def claim(self, *, fence: int | None = None) -> Task | None:
        """Claim the oldest queued task."""

        def decision(ledger: Ledger) -> Task | None:
            _check_fence(ledger, fence)
            found = ledger.oldest_queued()
            if found is None:
                return None
            task = replace(found, state="running")
            ledger.put_task(task)
            ledger.wake()
            return task

        return self._decide("claim of a task", decision)

    def finish(
        self, task_id: int, state: TaskState, result: TaskResult, *, fence: int | None = None
    ) -> None:
        """End a task."""
        kept = result_from_text(result_to_text(result))

        def decision(ledger: Ledger) -> None:
            _check_fence(ledger, fence)
            found = ledger.task(task_id)
            commit_rules.check_finish(task_id, found.state if found else None, state)
            assert found is not None, "check_finish refuses a task that is not there"
            ledger.put_task(replace(found, state=state, result=kept))
            detail = commit_rules.task_detail(task_id, found.kind, state, kept.error)
            ledger.add_event("task", detail)

        self._decide(f"end of task {task_id}", decision)

    def cancel(self, task_id: int, *, reason: str) -> bool:
        """Cancel a task that is still queued."""
        result = TaskResult(error=f"cancelled: {reason}", refusal=Refusal.CANCELLED.value)

        def decision(ledger: Ledger) -> bool:
            found = ledger.task(task_id)
            if found is None or found.state != "queued":
                return False
            ledger.put_task(replace(found, state="failed", result=result))
            detail = commit_rules.task_detail(task_id, found.kind, "failed", result.error)
            ledger.add_event("task", detail)
            return True

        return self._decide(f"cancellation of task {task_id}", decision)


def _check_fence(ledger: Ledger, fence: int | None) -> None:
    if fence is not None:
        commit_rules.check_fence(fence, ledger.latest_lease("controller"))


def _open_proposal(ledger: Ledger, proposal_id: int) -> Proposal:
    now, committed = ledger.time, ledger.committed()
    for found in ledger.proposals():
        if found.id == proposal_id:
            check_open(standing(found, now, committed))
            return found
    raise ProposalEnded(f"there is no proposal {proposal_id}")


def _end(ledger: Ledger, found: Proposal, state: str, decided: Approval) -> Proposal:
    ended = replace(
        found, state=state, ended=ledger.time, ended_by=decided.by, end_reason=decided.reason
    )
    ledger.put_proposal(ended)
    _note_proposal(ledger, ended, decided.by, decided.reason)
    return ended


def _note_proposal(ledger: Ledger, proposal: Proposal, actor: str, reason: str) -> None:
    fields = {"proposal": proposal.id, "state": proposal.state, "actor": actor, "reason": reason}
    ledger.add_event("proposal", fields | {"generation": proposal.base_generation})


def _drop(ledger: Ledger, plan_id: int, outcome: Outcome, reason: str) -> None:
    ledger.close_migration(plan_id, outcome)
    committed = ledger.committed()
    end = PlanEnd(committed[0] if committed else None, plan_id, reason)
    ledger.add_event(EVENT_OF_OUTCOME[outcome], vars(end))


def _put_live(
    ledger: Ledger, changes: Mapping[str, Value | None], *, reason: str, **more: Any
) -> LiveState:
    """Write a change of live values with its events; more: as ``changed`` takes it."""
    state = changed(ledger.live(), changes, reason=reason, **more)
    state = ledger.put_live(state)
    if changes.keys() & set(SWITCHES):
        ledger.add_event("control", commit_rules.control_detail(state, reason))
    others = {name: value for name, value in changes.items() if name not in SWITCHES}
    if others:
        detail = {"revision": state.revision, "live": others, "reason": reason}
        ledger.add_event("settings", detail)
    return state


def _announce(ledger: Ledger, mine: Announcement) -> None:
    others = [
        one
        for one in ledger.announced()
        if one.component == mine.component and one.name != mine.name
    ]
    for old in others[: len(others) + 1 - KEPT_ANNOUNCEMENTS]:
        ledger.drop_announcement(old)
    ledger.put_announcement(replace(mine, time=ledger.time))
