"""One atomic change of the Redis store as a ``Ledger``: what it reads, and the writes it names."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from telemetry.records.live_codec import live_to_text
from telemetry.store import Details, Lease, LeaseOf, Outcome, RunInfo, Task
from telemetry.stores import commit_rules
from telemetry.stores.redis import json_codec
from telemetry.stores.redis.change import LEASE_FIELDS, Change, State, live_of
from telemetry.stores.redis.connection.link import RedisLink
from telemetry.stores.redis.keys import SCHEMA_VERSION, Keys

KEPT_PLACEMENTS = 1000


@dataclass(frozen=True)
class RedisLedger:
    """Reads the state as it was at one moment; what it writes is made if nothing changed since."""

    link: RedisLink
    keys: Keys
    state: State
    change: Change

    @property
    def time(self) -> float:
        """Seconds since the epoch, by the store's clock."""
        return self.state.time

    def current_run(self) -> str | None:
        """Return the name of the latest start."""
        found = self.link.read("LINDEX", self.keys.run_order, -1)
        return found.decode() if found is not None else None

    def run(self, name: str) -> RunInfo | None:
        """Return the start of that name."""
        found = self.link.read("HGET", self.keys.runs, name)
        return json_codec.run_from_text(found) if found is not None else None

    def add_run(self, info: RunInfo) -> None:
        """Record a start."""
        self.change.write("HSET", self.keys.runs, info.run, json_codec.run_to_text(info))
        self.change.write("RPUSH", self.keys.run_order, info.run)

    def latest_lease(self, of: LeaseOf) -> Lease | None:
        """Return the last lease that was given out."""
        return self.state.lease_of(of)

    def put_lease(self, lease: Lease, *, is_new_token: bool) -> Lease:
        """Write a lease; a new token leaves out those that a crashed server may have given out."""
        if is_new_token:
            counter = "token" if lease.of == "controller" else f"token_of_{lease.of}"
            lease = replace(lease, token=lease.token + self.state.gap(counter))
            self.change.give_out(counter, lease.token, self.state)
        self.change.set_state(**{LEASE_FIELDS[lease.of]: commit_rules.lease_to_text(lease)})
        return lease

    def committed(self) -> tuple[int, str] | None:
        """Return generation and hash of the committed placement."""
        return self.state.committed

    def hash_of(self, generation: int) -> str | None:
        """Return the hash of a committed placement."""
        committed = self.state.committed
        if committed is None or generation > committed[0]:
            return None
        if generation == committed[0]:
            return committed[1]
        entry_id = f"{generation}-1"
        found = self.link.read("XRANGE", self.keys.placements, entry_id, entry_id)
        return found[0][1][b"hash"].decode() if found else None

    def add_placement(self, placement: Placement, plan_id: int, reason: str) -> None:
        """Write a placement as the committed one."""
        line = {
            "time": repr(self.time),
            "plan_id": plan_id,
            "reason": reason,
            "hash": placement.hash,
            "record": placement_to_bytes(placement),
        }
        words = [word for pair in line.items() for word in pair]
        bound = ("MAXLEN", "~", KEPT_PLACEMENTS)
        # Generations only grow, so they serve as ids; id 0-0 is not allowed, generation 0 is.
        entry_id = f"{placement.generation}-1"
        self.change.write("XADD", self.keys.placements, *bound, entry_id, *words)
        # The layout's version too: a store that lost its contents has lost it.
        committed = f"{placement.generation} {placement.hash}"
        self.change.set_state(committed=committed, schema=SCHEMA_VERSION)

    def open_plan_id(self) -> int | None:
        """Return the plan id of the open migration."""
        return self.state.open_plan_id

    def is_known_plan(self, plan_id: int) -> bool:
        """Return whether a migration of this plan id was published."""
        return bool(self.link.read("HEXISTS", self.keys.plans, plan_id))

    def open_migration(self, migration: Migration) -> None:
        """Write the open migration."""
        plan_id = migration.plan_id
        self.change.write("SET", self.keys.migration, migration_to_bytes(migration))
        self.change.write("HSET", self.keys.plans, plan_id, "open")
        self.change.set_state(open_plan=f"{plan_id} {migration.hash}")

    def close_migration(self, plan_id: int, outcome: Outcome) -> None:
        """End the open migration."""
        self.change.write("HSET", self.keys.plans, plan_id, outcome)
        self.change.write("DEL", self.keys.migration)
        self.change.set_state(open_plan="")

    def next_plan_id(self) -> int:
        """Give out a plan id."""
        return self.reserve_plan_ids(self.state.last("plan_id") + self.state.gap("plan_id") + 1)

    def reserve_plan_ids(self, up_to: int) -> int:
        """Note ids as given out, and return the greatest that is."""
        last = self.state.last("plan_id")
        if up_to > last:
            self.change.give_out("plan_id", up_to, self.state)
        return max(last, up_to)

    def proposals(self) -> list[Proposal]:
        """Return all proposals as they are stored, oldest first."""
        found = map(proposal_from_text, self.link.read("HVALS", self.keys.proposals))
        return sorted(found, key=lambda one: one.id)

    def add_proposal(self, proposal: Proposal, content: Content) -> None:
        """Write a new proposal."""
        packed = content_to_bytes(content)
        self.change.write("HSET", self.keys.proposal_contents, proposal.id, packed)
        self.put_proposal(proposal)

    def put_proposal(self, proposal: Proposal) -> None:
        """Write a proposal that changed its state."""
        self.change.write("HSET", self.keys.proposals, proposal.id, proposal_to_text(proposal))

    def drop_proposal(self, proposal_id: int) -> None:
        """Forget a proposal and its content."""
        self.change.write("HDEL", self.keys.proposals, proposal_id)
        self.change.write("HDEL", self.keys.proposal_contents, proposal_id)

    def recovery(self) -> Recovery | None:
        """Return the latest record of a recovery."""
        found = self.state.fields.get("recovery")
        return commit_rules.recovery_from_text(found) if found else None

    def put_recovery(self, record: Recovery) -> None:
        """Write the record of a recovery."""
        self.change.set_state(recovery=commit_rules.recovery_to_text(record))

    def live(self) -> LiveState:
        """Return the live settings."""
        return live_of(self.state.fields.get("live"), self.state.fields.get("control"))

    def put_live(self, state: LiveState) -> LiveState:
        """Write the live settings, and the switches for ranks of the version before."""
        state = replace(state, revision=state.revision + self.state.gap("live"))
        self.change.give_out("live", state.revision, self.state)
        switches = commit_rules.details_to_text(vars(state.control))
        self.change.set_state(live=live_to_text(state), control=switches)
        return state

    def task(self, task_id: int) -> Task | None:
        """Return a task."""
        found = self.link.read("HGET", self.keys.tasks, task_id)
        return json_codec.task_from_text(found) if found is not None else None

    def oldest_queued(self) -> Task | None:
        """Return the task that was queued first of those that wait."""
        oldest = self.link.read("ZRANGE", self.keys.tasks_in("queued"), 0, 0)
        return self.task(int(oldest[0])) if oldest else None

    def add_task(self, kind: str, request: Details) -> Task:
        """Queue a task under a new id."""
        task_id = self.state.last("task_id") + self.state.gap("task_id") + 1
        task = Task(task_id, self.time, kind, request, "queued")
        self.change.give_out("task_id", task_id, self.state)
        self.put_task(task)
        return task

    def put_task(self, task: Task) -> None:
        """Write a task, and its id among those in its state alone."""
        self.change.write("HSET", self.keys.tasks, task.id, json_codec.task_to_text(task))
        self.change.write("ZADD", self.keys.tasks_in(task.state), task.id, task.id)
        for state in ("queued", "running"):
            if state != task.state:
                self.change.write("ZREM", self.keys.tasks_in(state), task.id)

    def add_event(self, kind: str, detail: Details) -> None:
        """Append an event."""
        self.change.event(kind, detail)

    def wake(self) -> None:
        """Wake readers that wait."""
        self.change.is_awaited = True

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first."""
        texts = self.link.read("HVALS", self.keys.announced)
        return commit_rules.announcements_from_texts(texts)

    def put_announcement(self, announced: Announcement) -> None:
        """Write an announcement."""
        text = commit_rules.announcement_to_text(announced)
        self.change.write("HSET", self.keys.announced, _field_of(announced), text)

    def drop_announcement(self, announced: Announcement) -> None:
        """Forget an announcement."""
        self.change.write("HDEL", self.keys.announced, _field_of(announced))


def _field_of(announced: Announcement) -> str:
    return f"{announced.component} {announced.name}"
