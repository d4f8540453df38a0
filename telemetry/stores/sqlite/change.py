"""Changes of the SQLite store that readers wait for: each in one transaction, each with its event.

A change increments the deployment's version in the same transaction, so that a reader that sees the
new version sees the change too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace

from eplb.core.placement import Placement
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.migration.serialisation import migration_to_bytes, placement_to_bytes
from telemetry import rules
from telemetry.store import Control, Details, Lease, LeaseOf, Outcome, RunInfo, Task, TaskState
from telemetry.stores.sqlite import rows
from telemetry.stores.sqlite.file import one


@dataclass
class Change:
    """An open write transaction of one deployment."""

    connection: sqlite3.Connection
    deployment: str
    time: float
    is_bumped: bool = False

    def check_fence(self, fence: int | None) -> None:
        """Refuse a writer whose token is not the newest."""
        if fence is not None:
            rules.check_fence(fence, self._latest_lease())

    def acquire_lease(
        self, holder: str, ttl_s: float, of: LeaseOf, is_over: Callable[[Lease], bool]
    ) -> Lease | None:
        """Grant the lease to ``holder``, unless another holds it."""
        latest = self._latest_lease(of)
        lease = rules.next_lease(holder, ttl_s, of, now=self.time, latest=latest, is_over=is_over)
        if lease is not None:
            self._write_lease(lease)
        return lease

    def release_lease(self, lease: Lease, is_over: Callable[[Lease], bool]) -> bool:
        """End a lease; False when it was its holder's no more."""
        latest = self._latest_lease(lease.of)
        ended = rules.given_up(lease, now=self.time, latest=latest, is_over=is_over)
        if ended is not None:
            self._write_lease(ended)
        return ended is not None

    def begin_run(self, info: RunInfo) -> bool:
        """Record a start; False when it is recorded already."""
        row = rows.run_row(info)
        known = one(self.connection, f"{rows.RUN} AND run = ?", self.deployment, info.run)
        if known is not None:
            rules.check_run_is_new(rows.run_of(row), rows.run_of(known))
            return False
        self.connection.execute(rows.INSERT_RUN, (self.deployment, *row))
        return True

    def set_control(self, control: Control) -> None:
        """Set the switches."""
        row = (self.deployment, rules.details_to_text(vars(control)))
        self.connection.execute("INSERT OR REPLACE INTO control VALUES (?, ?)", row)

    def bump(self) -> None:
        """Count the version up, which ends the waits of readers."""
        self.is_bumped = True
        self.connection.execute(
            "UPDATE deployment SET version = version + 1 WHERE name = ?", (self.deployment,)
        )

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event and return its id."""
        self.bump()
        added = self.connection.execute(
            "INSERT INTO event (deployment, time, kind, detail) VALUES (?, ?, ?, ?)",
            (self.deployment, self.time, kind, rules.details_to_text(detail)),
        )
        assert added.lastrowid is not None, "an INSERT has a rowid"
        return added.lastrowid

    def commit(
        self,
        placement: Placement,
        *,
        expected: int | None,
        plan_id: int,
        reason: str,
        outcome: Outcome,
    ) -> bool:
        """Make ``placement`` the committed one and close the open migration."""
        generation = placement.generation
        latest = self.latest_placement()
        known = one(
            self.connection,
            "SELECT hash FROM placement WHERE deployment = ? AND generation = ?",
            self.deployment,
            generation,
        )
        if not rules.is_to_be_committed(
            placement,
            expected=expected,
            committed=latest[0] if latest else None,
            known_hash=known[0] if known else None,
        ):
            return False
        rules.check_not_dropped(plan_id, generation, self._recovery())
        self._add_placement(placement, plan_id, reason)
        open_plan_id = self.open_plan_id()
        if open_plan_id is not None:
            self._close_migration(open_plan_id, outcome if open_plan_id == plan_id else "rejected")
            if open_plan_id != plan_id:
                overtaken = rules.overtaken_reason(generation)
                self.add_event("reject", rules.close_detail(open_plan_id, generation, overtaken))
        kind = rules.EVENT_OF_OUTCOME[outcome]
        self.add_event(kind, rules.close_detail(plan_id, generation, reason))
        return True

    def publish(self, migration: Migration) -> None:
        """Open a migration."""
        plan_id = migration.plan_id
        known = one(
            self.connection,
            "SELECT 1 FROM migration WHERE deployment = ? AND plan_id = ?",
            self.deployment,
            plan_id,
        )
        rules.check_plan_id(plan_id, open_plan_id=self.open_plan_id(), is_known=known is not None)
        rules.check_base(migration, self.latest_placement())
        self.connection.execute(
            "INSERT INTO migration VALUES (?, ?, ?, ?, 'open', ?)",
            (
                self.deployment,
                plan_id,
                self.time,
                migration.base.generation,
                migration_to_bytes(migration),
            ),
        )
        self._reserve_plan_ids(plan_id)
        self.add_event("publish", rules.publish_detail(migration))

    def withdraw(self, plan_id: int, *, outcome: Outcome, reason: str) -> bool:
        """Close an open migration of which nothing was applied."""
        if self.open_plan_id() != plan_id:
            return False
        self._close_migration(plan_id, outcome)
        latest = self.latest_placement()
        detail = rules.close_detail(plan_id, latest[0] if latest else None, reason)
        self.add_event(rules.EVENT_OF_OUTCOME[outcome], detail)
        return True

    def restore(
        self,
        run: RunInfo,
        placement: Placement,
        control: Control,
        last_plan_id: int,
        reason: str,
    ) -> bool:
        """Restore what a rank knows, unless the store has a placement; see LoadStore.restore."""
        current = one(self.connection, f"{rows.RUN} ORDER BY id DESC LIMIT 1", self.deployment)
        if not rules.is_to_be_restored(
            run,
            is_committed=self.latest_placement() is not None,
            current_run=rows.run_of(current).run if current else None,
        ):
            return False
        self.begin_run(run)
        self._add_placement(placement, 0, reason)
        self.set_control(control)
        last_plan_id += rules.PLAN_ID_GAP
        self._reserve_plan_ids(last_plan_id)
        detail = rules.restore_detail(
            run, placement, control, last_plan_id=last_plan_id, reason=reason
        )
        self.add_event("restore", detail)
        return True

    def add_survivor_report(self, report: SurvivorReport) -> None:
        """Write a survivor report."""
        key = (self.deployment, report.run, report.membership, report.rank)
        self.connection.execute(rows.REPLACE_REPORT, (*key, rules.report_to_text(report)))
        self.bump()

    def recover(self, record: Recovery, expected_membership: int) -> Recovery | None:
        """Write a record unless one stands; see LoadStore.recover."""
        standing = rules.standing_record(
            record, expected_membership=expected_membership, latest=self._recovery()
        )
        if standing is not None:
            return standing
        committed = self.latest_placement()
        if rules.is_overtaken(record, committed[0] if committed else None):
            return None
        row = (self.deployment, record.membership, rules.recovery_to_text(record))
        self.connection.execute(rows.INSERT_RECOVERY, row)
        self.add_event("recovery", vars(record))
        if rules.is_dropped_by(record, self.open_plan_id()):
            self.withdraw(record.plan_id, outcome="aborted", reason=record.reason)
        return record

    def claim(self) -> Task | None:
        """Set the oldest queued task running."""
        query = f"{rows.TASK} AND state = 'queued' ORDER BY id LIMIT 1"
        oldest = one(self.connection, query, self.deployment)
        if oldest is None:
            return None
        task = replace(rows.task_of(oldest), state="running")
        self.connection.execute("UPDATE task SET state = 'running' WHERE id = ?", (task.id,))
        self.bump()
        return task

    def submit(self, kind: str, request: Details) -> Task:
        """Queue a task."""
        text = rules.details_to_text(request)
        added = self.connection.execute(
            "INSERT INTO task (deployment, time, kind, request, state, result) "
            "VALUES (?, ?, ?, ?, 'queued', '{}')",
            (self.deployment, self.time, kind, text),
        )
        assert added.lastrowid is not None, "an INSERT has a rowid"
        self.add_event("task", rules.task_detail(added.lastrowid, kind, "queued"))
        request = rules.details_from_text(text)
        return Task(added.lastrowid, self.time, kind, request, "queued", {})

    def finish(self, task_id: int, state: TaskState, result: Details) -> None:
        """End a task."""
        found = one(
            self.connection,
            "SELECT state, kind FROM task WHERE deployment = ? AND id = ?",
            self.deployment,
            task_id,
        )
        rules.check_finish(task_id, found[0] if found else None, state)
        assert found is not None, "check_finish refuses a task that is not there"
        self.connection.execute(
            "UPDATE task SET state = ?, result = ? WHERE id = ?",
            (state, rules.details_to_text(result), task_id),
        )
        self.add_event("task", rules.task_detail(task_id, found[1], state))

    def latest_placement(self) -> tuple[int, str] | None:
        """Return generation and hash of the committed placement."""
        row = one(
            self.connection,
            "SELECT generation, hash FROM placement WHERE deployment = ? "
            "ORDER BY generation DESC LIMIT 1",
            self.deployment,
        )
        return (row[0], row[1]) if row else None

    def _recovery(self) -> Recovery | None:
        found = one(self.connection, rows.RECOVERY, self.deployment)
        return rules.recovery_from_text(found[0]) if found else None

    def open_plan_id(self) -> int | None:
        """Return the plan id of the open migration."""
        row = one(
            self.connection,
            "SELECT plan_id FROM migration WHERE deployment = ? AND state = 'open'",
            self.deployment,
        )
        return row[0] if row else None

    def _close_migration(self, plan_id: int, outcome: Outcome) -> None:
        self.connection.execute(
            "UPDATE migration SET state = ? WHERE deployment = ? AND plan_id = ?",
            (outcome, self.deployment, plan_id),
        )

    def _add_placement(self, placement: Placement, plan_id: int, reason: str) -> None:
        row = (placement.generation, self.time, plan_id, reason, placement.hash)
        self.connection.execute(
            "INSERT INTO placement VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.deployment, *row, placement_to_bytes(placement)),
        )

    def _reserve_plan_ids(self, up_to: int) -> None:
        self.connection.execute(
            "UPDATE deployment SET last_plan_id = max(last_plan_id, ?) WHERE name = ?",
            (up_to, self.deployment),
        )

    def _latest_lease(self, of: LeaseOf = "controller") -> Lease | None:
        return rows.lease_of(one(self.connection, rows.LEASE, self.deployment, of))

    def _write_lease(self, lease: Lease) -> None:
        self.connection.execute(rows.REPLACE_LEASE, (self.deployment, *rows.lease_row(lease)))
