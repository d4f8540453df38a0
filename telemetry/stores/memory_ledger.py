"""What decisions read and write in the memory store: a ``Ledger`` over plain dictionaries."""

from __future__ import annotations

from eplb.clock import Clock
from eplb.core.placement import Placement
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery
from eplb.versions import Announcement
from telemetry.live import LiveState
from telemetry.proposals import Content, Proposal
from telemetry.store import (
    CommittedPlacement,
    Details,
    Lease,
    LeaseOf,
    Outcome,
    RunInfo,
    Task,
)
from telemetry.stores.deciding_store import as_stored
from telemetry.stores.memory_tables import EventTable


class MemoryLedger:
    """One deployment's state; the lock of the store guards it, so every change is atomic.

    Decisions raise before their first write, so nothing has to be taken back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.version = 0
        self.runs: dict[str, RunInfo] = {}
        self.leases: dict[LeaseOf, Lease] = {}
        self.placements: dict[int, CommittedPlacement] = {}  # by generation, which only grows
        self.published: Migration | None = None  # the open one
        self._plan_ids: set[int] = set()  # published so far
        self._last_plan_id = 0
        self.latest_recovery: Recovery | None = None
        self._proposals: dict[int, Proposal] = {}
        self.contents: dict[int, Content] = {}  # of the proposals
        self.live_state = LiveState()
        self.tasks: list[Task] = []  # numbered from 1
        self.events = EventTable()
        self._announced: dict[tuple[str, str], Announcement] = {}  # by component and name

    @property
    def time(self) -> float:
        """Seconds since the epoch."""
        return self._clock()

    def current_run(self) -> str | None:
        """Return the name of the latest start."""
        return next(reversed(self.runs), None)

    def run(self, name: str) -> RunInfo | None:
        """Return the start of that name."""
        return self.runs.get(name)

    def add_run(self, info: RunInfo) -> None:
        """Record a start."""
        self.runs[info.run] = info

    def latest_lease(self, of: LeaseOf) -> Lease | None:
        """Return the last lease that was given out."""
        return self.leases.get(of)

    def put_lease(self, lease: Lease, *, is_new_token: bool) -> Lease:
        """Write a lease."""
        self.leases[lease.of] = lease
        return lease

    def committed(self) -> tuple[int, str] | None:
        """Return generation and hash of the committed placement."""
        latest = self.latest()
        return None if latest is None else (latest.placement.generation, latest.placement.hash)

    def latest(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        return next(reversed(self.placements.values()), None)

    def hash_of(self, generation: int) -> str | None:
        """Return the hash of a committed placement."""
        found = self.placements.get(generation)
        return None if found is None else found.placement.hash

    def add_placement(self, placement: Placement, plan_id: int, reason: str) -> None:
        """Write a placement as the committed one."""
        line = CommittedPlacement(placement, self.time, plan_id, reason)
        self.placements[placement.generation] = line

    def open_plan_id(self) -> int | None:
        """Return the plan id of the open migration."""
        return None if self.published is None else self.published.plan_id

    def is_known_plan(self, plan_id: int) -> bool:
        """Return whether a migration of this plan id was published."""
        return plan_id in self._plan_ids

    def open_migration(self, migration: Migration) -> None:
        """Write the open migration."""
        self._plan_ids.add(migration.plan_id)
        self.published = migration

    def close_migration(self, plan_id: int, outcome: Outcome) -> None:
        """End the open migration."""
        self.published = None

    def next_plan_id(self) -> int:
        """Give out a plan id."""
        return self.reserve_plan_ids(self._last_plan_id + 1)

    def reserve_plan_ids(self, up_to: int) -> int:
        """Note ids as given out, and return the greatest that is."""
        self._last_plan_id = max(self._last_plan_id, up_to)
        return self._last_plan_id

    def proposals(self) -> list[Proposal]:
        """Return all proposals as they are stored."""
        return list(self._proposals.values())

    def add_proposal(self, proposal: Proposal, content: Content) -> None:
        """Write a new proposal."""
        self.put_proposal(proposal)
        self.contents[proposal.id] = content

    def put_proposal(self, proposal: Proposal) -> None:
        """Write a proposal that changed its state."""
        self._proposals[proposal.id] = proposal

    def drop_proposal(self, proposal_id: int) -> None:
        """Forget a proposal and its content."""
        del self._proposals[proposal_id], self.contents[proposal_id]

    def recovery(self) -> Recovery | None:
        """Return the latest record of a recovery."""
        return self.latest_recovery

    def put_recovery(self, record: Recovery) -> None:
        """Write the record of a recovery."""
        self.latest_recovery = record

    def live(self) -> LiveState:
        """Return the live settings."""
        return self.live_state

    def put_live(self, state: LiveState) -> LiveState:
        """Write the live settings."""
        self.live_state = state
        return state

    def task(self, task_id: int) -> Task | None:
        """Return a task."""
        return self.tasks[task_id - 1] if 1 <= task_id <= len(self.tasks) else None

    def oldest_queued(self) -> Task | None:
        """Return the task that was queued first of those that wait."""
        return next((task for task in self.tasks if task.state == "queued"), None)

    def add_task(self, kind: str, request: Details) -> Task:
        """Queue a task under a new id."""
        self.tasks.append(Task(len(self.tasks) + 1, self.time, kind, request, "queued"))
        return self.tasks[-1]

    def put_task(self, task: Task) -> None:
        """Write a task that changed its state."""
        self.tasks[task.id - 1] = task

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event and return its id."""
        event = self.events.add(self.time, kind, as_stored(detail))
        self.wake()
        return event.id

    def wake(self) -> None:
        """Count the version up."""
        self.version += 1

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first."""
        return list(self._announced.values())

    def put_announcement(self, announced: Announcement) -> None:
        """Write an announcement."""
        self.drop_announcement(announced)
        self._announced[announced.component, announced.name] = announced

    def drop_announcement(self, announced: Announcement) -> None:
        """Forget an announcement."""
        self._announced.pop((announced.component, announced.name), None)
