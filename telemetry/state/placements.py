"""Committed placements, the open migration, and what survivors of a death agree on.

Placements and migrations are compare-and-set: a decision on an old generation is rejected. Neither
changes once written, and to unpack one takes milliseconds, so the last of each is kept for callers
that ask at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from threading import Lock

from eplb.core.placement import Placement
from eplb.errors import StaleGeneration, StoreError
from eplb.migration.build import Migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.migration.serialisation import (
    DIGEST_BYTES,
    migration_from_bytes,
    migration_to_bytes,
    placement_from_bytes,
    placement_to_bytes,
)
from telemetry.state.backend import (
    HEAD,
    Change,
    Range,
    Reader,
    Table,
    Value,
    number_in,
    packed,
    text_of,
)
from telemetry.state.codec import from_record, pack, unpack
from telemetry.state.events import (
    EVENT_OF_OUTCOME,
    OFFERED,
    RECOVERED,
    RESTART,
    RESTORED,
    PlanEnd,
    PlanOffer,
    PlanOutcome,
    Restart,
    Restored,
    note,
)
from telemetry.state.groups import PROPOSED
from telemetry.state.lease import check_fence
from telemetry.state.live import LiveState, live_in, put_live, write_live
from telemetry.state.live import Value as LiveValue
from telemetry.state.membership import MembershipChange, check_wanted, put_change
from telemetry.state.part import (
    COMMITTED,
    NEWEST_PLAN,
    OPEN_PLAN,
    RECOVERY,
    Part,
    Records,
    Single,
    committed_in,
    epoch_in,
    open_plan_in,
)
from telemetry.state.proposals import Approval, approve
from telemetry.state.runs import RunInfo, add_run, alive_in, begin, latest_run_in

KEPT_PLACEMENTS = 1000  # latest placements that are never removed
_PRUNED_EVERY = 100  # generations
PLAN_ID_GAP = 1000  # after a loss: others may know of a few more ids than the one that restores
_MAX_READS = 8  # attempts to read a migration that changes meanwhile

PLACEMENTS = Table("placements", is_ordered=True)  # generation -> placement
MIGRATION = Table("migration")  # plan id -> the open migration
# By rank, for each run and membership.
SURVIVOR_REPORTS = Records(SurvivorReport, Table("survivor_reports"), "survivor report")
CANDIDATES = Single(Candidates, "candidates", "the candidates")
MEETINGS = Table("meetings")  # key of torch's rendezvous -> value, for each membership


@dataclass(frozen=True)
class CommittedPlacement:
    """One line of the history of placements."""

    placement: Placement
    time: float
    plan_id: int  # 0: not from a plan
    reason: str


class PlacementPart(Part):
    """Placements, migrations, and recovery from deaths and from a loss of the store."""

    def __init__(self) -> None:
        self._unpacking = Lock()
        self._last_committed: CommittedPlacement | None = None
        self._last_published: tuple[str, Migration] | None = None  # name and content

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves, or None before the first."""
        serving = committed_in(self.backend)
        if serving is None:
            return None
        generation, expected = serving
        with self._unpacking:
            last = self._last_committed
            if last is None or (last.placement.generation, last.placement.hash) != serving:
                last = self._last_committed = self.placement(generation)
            if last is None or last.placement.hash != expected:
                raise StoreError(
                    f"generation {generation} has "
                    f"{f'hash {last.placement.hash}' if last else 'no record'}, expected hash "
                    f"{expected}: a torn write of another placement is in its place"
                )
            return last

    def placement(self, generation: int) -> CommittedPlacement | None:
        """Return the placement that was committed as this generation, or None."""
        record = self.backend.get(PLACEMENTS, generation)
        return None if record is None else _placement_of(record)

    def placements(
        self, limit: int = 100, *, before: int | None = None
    ) -> list[CommittedPlacement]:
        """Return committed placements below the generation ``before``, newest first; None: all."""
        below = inf if before is None else before
        records = self.backend.scan(PLACEMENTS, Range(-inf, below, limit, newest_first=True))
        readable = self.backend.unreadable.readable(records, _placement_of, "placement")
        return [line for _, line in readable]

    def commit(
        self,
        placement: Placement,
        *,
        expected: int | None,
        plan_id: int = 0,
        reason: str,
        outcome: PlanOutcome = "committed",
        membership: int | None = None,
        run: RunInfo | None = None,
        dropped: Callable[[LiveState], Mapping[str, LiveValue | None]] = lambda _: {},
        next_group: Recovery | None = None,
    ) -> bool:
        """Make ``placement`` the committed one and close the migration ``plan_id``, atomically.

        Every rank calls this after a swap; the first writes. Returns False when this very
        placement is committed already. A migration with another plan id that is still open is
        rejected, because its base serves no longer.

        Args:
            expected: the generation that this placement follows; None for the first of all.
            membership: of the group of the rank that writes; None: no rank writes.
            run: a start of other ranks, which begins in the same change: readers take the ranks of
                the placement from the latest start.
            dropped: gives new live values, where those of now name ranks that ``run`` has not.
            next_group: the planned group that serves it, recorded as that of survivors would be.

        Raises:
            StaleGeneration: something else is committed, or generations do not grow; or survivors
                of a death have agreed since: a dead rank's last write is late; or ``next_group`` is
                not wanted any more.
        """
        generation = placement.generation

        def decision(change: Change) -> bool:
            serving = committed_in(change)
            if _hash_of(change, generation, serving) == placement.hash:
                return False
            _check_follows(generation, expected, None if serving is None else serving[0])
            _check_membership(generation, membership, epoch_in(change))
            _put_committed(change, placement, plan_id, reason)
            if next_group is not None:
                check_wanted(change, alive_in(change), next_group.survivors)
                RECOVERY.put(change, next_group)
                PROPOSED.clear(change)  # it serves
            open_plan = open_plan_in(change)
            if open_plan is not None:
                is_this = open_plan[0] == plan_id
                _close(change, open_plan[0])
                if not is_this:
                    overtaken = f"generation {generation} was committed in its place"
                    note(change, "reject", PlanEnd(generation, open_plan[0], overtaken))
            note(change, EVENT_OF_OUTCOME[outcome], PlanEnd(generation, plan_id, reason))
            if run is not None:
                begin(change, run)
                if values := dropped(live_in(change)):
                    write_live(change, values, None, reason)
            return True

        is_written = self.backend.decide(f"commit of generation {generation}", decision)
        if is_written and generation % _PRUNED_EVERY == 0:
            self.backend.prune(PLACEMENTS, generation - KEPT_PLACEMENTS)
        return is_written

    def next_plan_id(self) -> int:
        """Reserve a plan id that was never given out before."""
        return self.backend.decide("next plan id", lambda change: change.next("plan_id"))

    def publish(
        self, migration: Migration, *, fence: int | None = None, approval: Approval | None = None
    ) -> None:
        """Offer a migration to the ranks.

        Args:
            fence: the token of the writer's lease, run out or not; None for a writer that needs
                none.
            approval: of the proposal that it carries out, which is approved in the same change.

        Raises:
            StaleGeneration: its base is not the committed placement, or another is still open.
            ProposalEnded: the proposal is not open any more, or there is none.
            FencedOut: ``fence`` is not the newest token: another controller has taken the lease
                since, or the store never gave this token out. Nothing is changed.
        """
        plan_id = migration.plan_id
        if plan_id < 1:
            raise StoreError(f"plan id {plan_id} cannot be published, expected 1 or more")
        record = migration_to_bytes(migration)

        def decision(change: Change) -> None:
            check_fence(change, fence)
            open_plan = open_plan_in(change)
            if open_plan is not None:
                raise StaleGeneration(
                    f"plan {plan_id} cannot be published: plan {open_plan[0]} is open"
                )
            if plan_id <= (newest := _newest_plan_in(change)):
                raise StaleGeneration(
                    f"plan id {plan_id} cannot be published: the latest was {newest}, expected a "
                    "later one, from next_plan_id"
                )
            _check_base(migration, committed_in(change))
            if approval is not None:
                approve(change, approval, plan_id)
            change.put(MIGRATION, plan_id, record)
            change.put(HEAD, NEWEST_PLAN, str(plan_id))
            change.put(HEAD, OPEN_PLAN, _name_of(plan_id, record))
            if plan_id > change.last("plan_id"):
                change.give_out("plan_id", plan_id)
            note(change, OFFERED, PlanOffer.of(migration))

        self.backend.decide(f"publish of plan {plan_id}", decision)

    def published(self) -> Migration | None:
        """Return the open migration, or None.

        Raises:
            StoreError: also where its record is another one than the store names.
        """
        with self._unpacking:
            named = read = ""
            # Two questions: the migration may be closed, and another opened, between them.
            for _ in range(_MAX_READS):
                value = self.backend.get(HEAD, OPEN_PLAN)
                if not value:
                    return None
                named = text_of(value)
                if self._last_published is not None and self._last_published[0] == named:
                    return self._last_published[1]
                plan_id = named.partition(" ")[0]
                record = self.backend.get(MIGRATION, plan_id)
                read = _name_of(plan_id, record)
                if read == named:
                    assert record is not None, "a record that is missing has no name"
                    content = migration_from_bytes(packed(record, "the open migration"))
                    self._last_published = named, content
        raise StoreError(
            f"the record of the open migration is {read or 'missing'}, expected {named}: a torn "
            "write of another migration is in its place"
        )

    def withdraw(
        self, plan_id: int, *, outcome: PlanOutcome, reason: str, fence: int | None = None
    ) -> bool:
        """Close an open migration of which nothing was applied; False when it was not open.

        Raises:
            FencedOut: as ``publish``.
        """
        assert outcome != "committed", "a migration that was applied is closed by commit"

        def decision(change: Change) -> bool:
            check_fence(change, fence)
            open_plan = open_plan_in(change)
            if open_plan is None or open_plan[0] != plan_id:
                return False
            _drop(change, plan_id, outcome, reason)
            return True

        return self.backend.decide(f"withdrawal of plan {plan_id}", decision)

    # -- deaths

    def add_survivor_report(self, report: SurvivorReport) -> None:
        """Write a survivor report, which replaces an earlier one of the same run and membership."""

        def write(change: Change) -> None:
            SURVIVOR_REPORTS.of(report.run, report.membership).put(change, report.rank, report)
            change.wake()

        self.backend.make(f"survivor report of rank {report.rank}", write)

    def survivor_reports(self, run: str, membership: int) -> list[SurvivorReport]:
        """Return what survivors of a group wrote, by rank."""
        return SURVIVOR_REPORTS.of(run, membership).scan(self.backend)

    def recover(self, recovery: Recovery, *, expected_membership: int) -> Recovery | None:
        """Write the record that follows the group ``expected_membership``, unless there is one.

        If the record applies no transaction of the open migration, that migration is aborted with
        it, so that it cannot be committed any more.

        Returns:
            The first writer's record. None: a newer generation than the record's is committed, so
            read and decide again.

        Raises:
            StaleGeneration: another run recovered, or this group's successor has broken too.
        """
        if recovery.membership <= expected_membership:
            raise StoreError(
                f"the record of membership {recovery.membership} cannot follow membership "
                f"{expected_membership}, expected a greater one"
            )

        def decision(change: Change) -> Recovery | None:
            latest, serving = RECOVERY.get(change), committed_in(change)
            if (epoch := epoch_in(change)) > expected_membership:
                written = None if latest is None else (latest.membership, latest.run)
                if written == (recovery.membership, recovery.run) == (epoch, recovery.run):
                    return latest
                raise StaleGeneration(
                    f"membership {recovery.membership} of run {recovery.run!r} follows membership "
                    f"{expected_membership}, found a group of membership {epoch} recorded or "
                    "started since"
                )
            if serving is not None and serving[0] > recovery.generation:
                return None
            RECOVERY.put(change, recovery)
            note(change, RECOVERED, recovery)
            open_plan = open_plan_in(change)
            if open_plan is not None and (recovery.plan_id, recovery.applied) == (open_plan[0], 0):
                _drop(change, open_plan[0], "aborted", recovery.reason)
            return recovery

        return self.backend.decide(f"recovery to membership {recovery.membership}", decision)

    def recovery(self) -> Recovery | None:
        """Return the latest record, or None before the first death."""
        return RECOVERY.get(self.backend)

    def note_restart(self, run: str, lost: Sequence[int], reason: str) -> None:
        """Record why the survivors of a death cannot serve on; the first that writes it counts.

        Args:
            run: that broke.
            lost: ranks that died in it.
            reason: what is missing, and what would have been enough.
        """

        def decision(change: Change) -> None:
            if text_of(change.get(HEAD, RESTART) or "") != run:
                change.put(HEAD, RESTART, run)
                note(change, RESTART, Restart(run, tuple(lost), reason))

        self.backend.decide("why all ranks start again", decision)

    def put_meeting(self, membership: int, key: str, value: bytes) -> None:
        """Write what a survivor has the others of its group know: by which address it is reached.

        It is read in a moment, so it wakes nobody.
        """
        self.backend.put(MEETINGS.of(membership), key, value)

    def meeting(self, membership: int, key: str) -> bytes | None:
        """Return what ``put_meeting`` wrote, or None."""
        found = self.backend.get(MEETINGS.of(membership), key)
        return found.encode() if isinstance(found, str) else found

    def restore(
        self,
        run: RunInfo,
        placement: Placement,
        live: LiveState,
        *,
        last_plan_id: int,
        reason: str,
        membership: MembershipChange | None = None,
    ) -> bool:
        """Restore the state that a rank knows in a store that lost its contents, atomically.

        Of all callers one writes. False, and nothing is changed: the run has its placement, another
        run is current, or a placement of a higher generation is committed. A first placement that
        no run has used is replaced.

        Args:
            placement: what serves; the next commit follows its generation.
            live: the settings as the caller has read them last.
            last_plan_id: the newest that the caller has seen; later ids are well above it.
            membership: the latest operation on the ranks; without it ranks that left would return.
        """

        def decision(change: Change) -> bool:
            current, committed = latest_run_in(change), committed_in(change)
            if current is not None and current.run != run.run:
                return False
            if committed is not None and (current or committed[0] > placement.generation):
                return False
            if current is None:
                add_run(change, run)
            _put_committed(change, placement, 0, reason)
            if membership is not None:
                put_change(change, membership)
            # Readers may know revisions past the caller's.
            put_live(change, replace(live, revision=live.revision + PLAN_ID_GAP))
            greatest = max(change.last("plan_id"), last_plan_id + PLAN_ID_GAP)
            change.give_out("plan_id", greatest)
            fact = Restored(run.run, placement.generation, greatest, live.control.movement, reason)
            note(change, RESTORED, fact)
            return True

        return self.backend.decide(f"restoring of run {run.run!r}", decision)

    # -- hints

    def candidates(self) -> Candidates:
        """Return what hosts may need next, as the controller sees it; at first nothing."""
        return CANDIDATES.get(self.backend) or Candidates()

    def suggest(self, candidates: Candidates) -> None:
        """Set the records that hosts may need next; the latest call counts.

        It is no event: it changes often, and only reading ahead depends on it.
        """

        def write(change: Change) -> None:
            CANDIDATES.put(change, candidates)
            change.wake()

        self.backend.make("candidates", write)


def _check_follows(generation: int, expected: int | None, serving: int | None) -> None:
    if serving != expected:
        raise StaleGeneration(
            f"generation {generation} follows generation {expected}, "
            f"found generation {serving} committed"
        )
    if serving is not None and generation <= serving:
        raise StaleGeneration(
            f"found generation {generation} to commit, expected more than {serving}"
        )


def _check_membership(generation: int, membership: int | None, epoch: int) -> None:
    """Refuse the commit of a rank after whose group another one was recorded or started."""
    if membership is not None and epoch > membership:
        raise StaleGeneration(
            f"generation {generation} of membership {membership} cannot be committed: a group of "
            f"membership {epoch} was recorded or started since"
        )


def _check_base(migration: Migration, serving: tuple[int, str] | None) -> None:
    base = migration.base
    if serving is None:
        raise StaleGeneration(
            f"plan {migration.plan_id} starts from generation {base.generation}, "
            "found no committed placement"
        )
    if (base.generation, base.hash) != serving:
        raise StaleGeneration(
            f"plan {migration.plan_id} starts from generation {base.generation} (hash "
            f"{base.hash}), found generation {serving[0]} (hash {serving[1]}) committed"
        )


def _hash_of(change: Change, generation: int, serving: tuple[int, str] | None) -> str | None:
    """Hash of the placement that was committed as a generation."""
    if serving is None or generation > serving[0]:
        return None
    if generation == serving[0]:
        return serving[1]
    record = change.get(PLACEMENTS, generation)
    return None if record is None else _placement_of(record).placement.hash


def _put_committed(change: Change, placement: Placement, plan_id: int, reason: str) -> None:
    meta = {"time": change.time, "plan_id": plan_id, "reason": reason}
    change.put(PLACEMENTS, placement.generation, pack(meta, placement_to_bytes(placement)))
    change.put(HEAD, COMMITTED, f"{placement.generation} {placement.hash}")


def _placement_of(record: Value) -> CommittedPlacement:
    what = "the record of a placement"
    meta, content = unpack(packed(record, what), what)
    return from_record(
        CommittedPlacement, meta | {"placement": placement_from_bytes(content)}, what
    )


def _newest_plan_in(reader: Reader) -> int:
    return number_in(reader.get(HEAD, NEWEST_PLAN), "the newest plan id")


def _name_of(plan_id: int | str, record: Value | None) -> str:
    """Plan id and digest of a packed migration, which begins with it."""
    if record is None:
        return ""
    return f"{plan_id} {packed(record, 'the open migration')[:DIGEST_BYTES].hex()}"


def _close(change: Change, plan_id: int) -> None:
    change.put(HEAD, OPEN_PLAN, "")
    change.delete(MIGRATION, plan_id)


def _drop(change: Change, plan_id: int, outcome: PlanOutcome, reason: str) -> None:
    _close(change, plan_id)
    serving = committed_in(change)
    end = PlanEnd(None if serving is None else serving[0], plan_id, reason)
    note(change, EVENT_OF_OUTCOME[outcome], end)
