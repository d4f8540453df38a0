"""Recovery after a death: survivors agree on one placement, record it, and end together.

    reports ----> decide ----> record (first writer wins) ----> roll forward ----> commit
    each to                    compare and set,                 what the others
    the store                  in the store                     swapped already

The broken group is never used again: after a death every vote on it fails. Survivors serve on in a
new one where that is switched on (``rebalance/assembly/survivors.py``); else they end, and a start
of all ranks loads the committed placement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from eplb.clock import Clock, Deadline
from eplb.errors import RankError, StaleGeneration, StoreError
from eplb.migration.recovery import (
    Recovery,
    SurvivorReport,
    WrittenEnd,
    cut_off,
    decide,
    is_minority,
    is_settled,
)
from rebalance.protocol.ballot import NO_PLAN
from rebalance.rank.rank import REPORT_DEADLINE_S, Rank
from telemetry.state.store import StateStore

RETRY_S = 0.05  # from one try of a store that fails to the next
MINORITY_S = 2.0  # for the record of the others, by ranks that take most of the group for dead
# For a report of the other half, by the half without the lowest rank: one that was cut off, and is
# not dead, reports when this one does.
HALF_S = 0.3

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of a recovery."""

    # For the others' reports; a rank without one counts as dead. All ranks see at about the same
    # time that their group is broken, and all of them are started again.
    reports_s: float = 5.0
    store_s: float = 20.0  # for a store that fails, in all


def recover(
    survivor: Rank,
    store: StateStore,
    *,
    deadlines: Deadlines | None = None,
    clock: Clock = time.monotonic,
) -> Recovery:
    """Agree with the other survivors. Each of them calls it once, after a BrokenGroup.

    Afterwards every survivor holds one placement, and the store has it as committed.

    Args:
        survivor: this rank.
        store: in which they agree.
        deadlines: of its steps.
        clock: of the deadlines.

    Raises:
        RankError: there was no agreement in time, or this rank counts as dead. The committed
            placement of the store is still valid for a start, which loads every slot.
    """
    deadlines = deadlines or Deadlines()
    # The others wait for them no longer than reports_s, and may have begun to a little earlier.
    report = survivor.survivor_report(min(REPORT_DEADLINE_S, deadlines.reports_s / 2))
    limit = Deadline.after(deadlines.store_s + deadlines.reports_s, clock)
    retries = _Retries(report.rank, limit)
    retries.until_done("write its survivor report", lambda: store.add_survivor_report(report))
    begun, reports_s = clock(), deadlines.reports_s
    record = retries.until_done(
        "agree with the other survivors",
        lambda: _agree(survivor, store, report, reports_s, lambda: clock() - begun),
    )
    if report.rank not in record.survivors:
        raise RankError(
            f"rank {report.rank}: the other survivors excluded it ({record.reason}): "
            "its survivor report came too late"
        )
    try:
        survivor.apply_recovery(record)
    except RuntimeError as exc:  # torch's, of a device that a death took with it
        raise RankError(f"rank {report.rank} cannot roll forward: {exc}") from exc
    retries.until_done("read the commit", lambda: _await_commit(store, survivor, record, retries))
    log.warning(
        "generation=%d rank=%d membership=%d recovered: %s",
        record.generation,
        report.rank,
        record.membership,
        record.reason,
    )
    return record


def _agree(
    survivor: Rank,
    store: StateStore,
    report: SurvivorReport,
    reports_s: float,
    waited_s: Callable[[], float],
) -> Recovery:
    """Return another survivor's record, or write one once all live ranks have reported.

    Ranks whose links are cut take all others for dead, and wait for nobody. So a minority first
    leaves the record to the others, and the sides of a cut first wait until each knows all ranks of
    the other one.
    """
    overtaken_by: int | None = None
    while True:
        if report.dead != (dead := tuple(sorted(survivor.dead()))):
            report = replace(report, dead=dead)
            store.add_survivor_report(report)
        version, standing = store.version(), store.recovery()
        if standing is not None and standing.membership > report.membership:
            return _own_run(standing, report)
        reports = store.survivor_reports(report.run, report.membership)
        reported = {one.rank for one in reports}
        lost = survivor.members & {*report.dead}
        silent = survivor.members - reported - lost
        most_s = reports_s if silent else 0.0
        if is_minority(survivor.members, lost):
            is_known = 2 * len(lost) > len(survivor.members) or lost & reported
            most_s = max(most_s, MINORITY_S if is_known else HALF_S)
        elif not is_settled(reports, report.rank):
            most_s = max(most_s, MINORITY_S)
        left_s = most_s - waited_s()
        if left_s <= 0:
            beyond = cut_off(reports, report.rank) | {*report.dead}
            record = decide(reports, beyond, silent, _written_end(survivor, store, report))
            written = store.recover(record, expected_membership=report.membership)
            if written is not None:
                return written
            # A dead rank's last commit came in between: it is looked at once more.
            found = store.committed()
            assert found is not None, "a generation is newer than the record's"
            if found.placement.generation == overtaken_by:
                raise RankError(
                    f"rank {report.rank}: generation {overtaken_by} is committed, and survivors "
                    f"can reach only generation {record.generation} of plan {record.plan_id}"
                )
            overtaken_by = found.placement.generation
            continue
        # A moment at most: a death is detected by its liveness connection, not by the store.
        store.wait(version, min(left_s, RETRY_S))


def _written_end(survivor: Rank, store: StateStore, report: SurvivorReport) -> WrittenEnd | None:
    """The end of this rank's migration in the store, if a dead rank has written it."""
    committed = store.committed()
    if committed is None or committed.plan_id != report.plan_id or report.plan_id == NO_PLAN:
        return None
    # It was dropped where it stands here, or else finished: then every rank had prepared it all.
    is_dropped = committed.placement.hash == survivor.placement.hash
    applied = report.swapped if is_dropped else report.prepared
    return WrittenEnd(report.plan_id, applied, committed.placement.generation)


def _own_run(record: Recovery, report: SurvivorReport) -> Recovery:
    if (record.run, record.membership) != (report.run, report.membership + 1):
        raise RankError(
            f"rank {report.rank} is of run {report.run!r}, membership {report.membership}; found "
            f"membership {record.membership} of run {record.run!r} recorded: this rank is excluded"
        )
    return record


def _await_commit(store: StateStore, survivor: Rank, record: Recovery, retries: _Retries) -> None:
    """Wait until the store names what the survivors hold. Their commit writers write it."""
    mine = survivor.placement
    while True:
        version = store.version()
        committed, published = store.committed(), store.published()
        is_open = published is not None and published.plan_id == record.plan_id
        found = committed.placement if committed else None
        if found is not None and found.generation >= record.generation and not is_open:
            if (found.generation, found.hash) == (mine.generation, mine.hash):
                return
            raise RankError(
                f"the store names generation {found.generation} (hash {found.hash}), "
                f"found generation {mine.generation} (hash {mine.hash}) in this rank's slots"
            )
        store.wait(version, retries.left_s(f"for generation {record.generation} to be committed"))


class _Retries:
    """Tries a store again until one deadline for all that a recovery asks of it."""

    def __init__(self, rank: int, deadline: Deadline) -> None:
        self._rank, self._deadline = rank, deadline
        self._told: set[str] = set()

    def left_s(self, what: str) -> float:
        if self._deadline.has_passed:
            raise RankError(f"rank {self._rank}: timed out while waiting {what}")
        return self._deadline.left_s

    def until_done(self, what: str, ask: Callable[[], Result]) -> Result:
        while True:
            try:
                return ask()
            except StaleGeneration as exc:
                raise RankError(f"rank {self._rank} cannot {what}: {exc}") from exc
            except StoreError as exc:
                if self._deadline.left_s <= RETRY_S:
                    raise RankError(
                        f"rank {self._rank} cannot {what}: the store failed until the deadline: "
                        f"{exc}"
                    ) from exc
                # Once: an outage of seconds would fill the log with one cause.
                level = logging.DEBUG if what in self._told else logging.WARNING
                log.log(level, "rank %d cannot %s, retrying: %s", self._rank, what, exc)
                self._told.add(what)
                time.sleep(RETRY_S)  # a failing store sends no notification when it works again
