"""One atomic change of the SQLite store: an open write transaction.

A change that readers wait for counts the deployment's version up in the same transaction, so that
whoever sees the new version sees the change too.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

from eplb.core.placement import Placement
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery
from eplb.migration.serialisation import migration_to_bytes, placement_to_bytes
from eplb.versions import Announcement
from telemetry.live import LiveState
from telemetry.proposals import (
    Content,
    Proposal,
    content_to_bytes,
    proposal_from_text,
    proposal_to_text,
)
from telemetry.records.live_codec import live_from_text, live_to_text
from telemetry.records.task_codec import result_to_text
from telemetry.store import Details, Lease, LeaseOf, Outcome, RunInfo, Task, TaskResult
from telemetry.stores import commit_rules
from telemetry.stores.sqlite import queries
from telemetry.stores.sqlite.file import one


@dataclass
class Change:
    """An open write transaction of one deployment: a ``Ledger``."""

    connection: sqlite3.Connection
    deployment: str
    time: float
    is_bumped: bool = False

    def current_run(self) -> str | None:
        """Return the name of the latest start."""
        found = self._one(f"{queries.RUN} ORDER BY id DESC LIMIT 1")
        return queries.run_of(found).run if found else None

    def run(self, name: str) -> RunInfo | None:
        """Return the start of that name."""
        found = self._one(f"{queries.RUN} AND run = ?", name)
        return queries.run_of(found) if found else None

    def add_run(self, info: RunInfo) -> None:
        """Record a start."""
        self.connection.execute(queries.INSERT_RUN, (self.deployment, *queries.run_row(info)))

    def latest_lease(self, of: LeaseOf) -> Lease | None:
        """Return the last lease that was given out."""
        return queries.lease_of(self._one(queries.LEASE, of))

    def put_lease(self, lease: Lease, *, is_new_token: bool) -> Lease:
        """Write a lease; no token that was given out is ever lost."""
        self.connection.execute(queries.REPLACE_LEASE, (self.deployment, *queries.lease_row(lease)))
        return lease

    def committed(self) -> tuple[int, str] | None:
        """Return generation and hash of the committed placement."""
        found = self._one(queries.LATEST_HASH)
        return (found[0], found[1]) if found else None

    def hash_of(self, generation: int) -> str | None:
        """Return the hash of a committed placement."""
        found = self._one(
            "SELECT hash FROM placement WHERE deployment = ? AND generation = ?", generation
        )
        return found[0] if found else None

    def add_placement(self, placement: Placement, plan_id: int, reason: str) -> None:
        """Write a placement as the committed one."""
        row = (placement.generation, self.time, plan_id, reason, placement.hash)
        self.connection.execute(
            "INSERT INTO placement VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.deployment, *row, placement_to_bytes(placement)),
        )

    def open_plan_id(self) -> int | None:
        """Return the plan id of the open migration."""
        found = self._one(queries.OPEN_PLAN)
        return found[0] if found else None

    def is_known_plan(self, plan_id: int) -> bool:
        """Return whether a migration of this plan id was published."""
        query = "SELECT 1 FROM migration WHERE deployment = ? AND plan_id = ?"
        return self._one(query, plan_id) is not None

    def open_migration(self, migration: Migration) -> None:
        """Write the open migration."""
        row = (migration.plan_id, self.time, migration.base.generation)
        self.connection.execute(
            "INSERT INTO migration VALUES (?, ?, ?, ?, 'open', ?)",
            (self.deployment, *row, migration_to_bytes(migration)),
        )

    def close_migration(self, plan_id: int, outcome: Outcome) -> None:
        """End the open migration."""
        self.connection.execute(
            "UPDATE migration SET state = ? WHERE deployment = ? AND plan_id = ?",
            (outcome, self.deployment, plan_id),
        )

    def next_plan_id(self) -> int:
        """Give out a plan id."""
        return self.reserve_plan_ids(self._last_plan_id() + 1)

    def reserve_plan_ids(self, up_to: int) -> int:
        """Note ids as given out, and return the greatest that is."""
        self.connection.execute(queries.RESERVE_PLAN_IDS, (up_to, self.deployment))
        return self._last_plan_id()

    def _last_plan_id(self) -> int:
        found = self._one(queries.LAST_PLAN_ID)
        assert found is not None, "the deployment was registered when the store was opened"
        return int(found[0])

    def proposals(self) -> list[Proposal]:
        """Return all proposals as they are stored."""
        found = self.connection.execute(queries.PROPOSALS, (self.deployment,))
        return [proposal_from_text(text) for (text,) in found]

    def add_proposal(self, proposal: Proposal, content: Content) -> None:
        """Write a new proposal."""
        row = (self.deployment, proposal.id, proposal_to_text(proposal), content_to_bytes(content))
        self.connection.execute(queries.INSERT_PROPOSAL, row)

    def put_proposal(self, proposal: Proposal) -> None:
        """Write a proposal that changed its state."""
        row = (proposal_to_text(proposal), self.deployment, proposal.id)
        self.connection.execute(queries.PUT_PROPOSAL, row)

    def drop_proposal(self, proposal_id: int) -> None:
        """Forget a proposal and its content."""
        self.connection.execute(queries.DROP_PROPOSAL, (self.deployment, proposal_id))

    def recovery(self) -> Recovery | None:
        """Return the latest record of a recovery."""
        found = self._one(queries.RECOVERY)
        return commit_rules.recovery_from_text(found[0]) if found else None

    def put_recovery(self, record: Recovery) -> None:
        """Write the record of a recovery."""
        row = (self.deployment, record.membership, commit_rules.recovery_to_text(record))
        self.connection.execute(queries.INSERT_RECOVERY, row)

    def live(self) -> LiveState:
        """Return the live settings."""
        found = self._one(queries.LIVE)
        return live_from_text(found[0]) if found else LiveState()

    def put_live(self, state: LiveState) -> LiveState:
        """Write the live settings."""
        self.connection.execute(queries.REPLACE_LIVE, (self.deployment, live_to_text(state)))
        return state

    def task(self, task_id: int) -> Task | None:
        """Return a task."""
        found = self._one(f"{queries.TASK} AND id = ?", task_id)
        return queries.task_of(found) if found else None

    def oldest_queued(self) -> Task | None:
        """Return the task that was queued first of those that wait."""
        found = self._one(queries.TASKS, "queued", 0, 1)
        return queries.task_of(found) if found else None

    def add_task(self, kind: str, request: Details) -> Task:
        """Queue a task under a new id."""
        added = self.connection.execute(
            "INSERT INTO task (deployment, time, kind, request, state, result) "
            "VALUES (?, ?, ?, ?, 'queued', ?)",
            (
                self.deployment,
                self.time,
                kind,
                commit_rules.details_to_text(request),
                result_to_text(TaskResult()),
            ),
        )
        assert added.lastrowid is not None, "an INSERT has a rowid"
        return Task(added.lastrowid, self.time, kind, request, "queued")

    def put_task(self, task: Task) -> None:
        """Write a task that changed its state."""
        self.connection.execute(
            "UPDATE task SET state = ?, result = ? WHERE id = ?",
            (task.state, result_to_text(task.result), task.id),
        )

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event and return its id."""
        self.wake()
        added = self.connection.execute(
            "INSERT INTO event (deployment, time, kind, detail) VALUES (?, ?, ?, ?)",
            (self.deployment, self.time, kind, commit_rules.details_to_text(detail)),
        )
        assert added.lastrowid is not None, "an INSERT has a rowid"
        return added.lastrowid

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first."""
        found = self.connection.execute(queries.ANNOUNCED, (self.deployment,))
        return commit_rules.announcements_from_texts(text for (text,) in found)

    def put_announcement(self, announced: Announcement) -> None:
        """Write an announcement."""
        text = commit_rules.announcement_to_text(announced)
        row = (self.deployment, announced.component, announced.name, text)
        self.connection.execute(queries.REPLACE_ANNOUNCED, row)

    def drop_announcement(self, announced: Announcement) -> None:
        """Forget an announcement."""
        row = (self.deployment, announced.component, announced.name)
        self.connection.execute(queries.DROP_ANNOUNCED, row)

    def wake(self) -> None:
        """Count the version up, which ends the waits of readers."""
        self.is_bumped = True
        self.connection.execute(
            "UPDATE deployment SET version = version + 1 WHERE name = ?", (self.deployment,)
        )

    def _one(self, query: str, *values: Any) -> Any:
        """The first row of a query whose first parameter is the deployment."""
        return one(self.connection, query, self.deployment, *values)
