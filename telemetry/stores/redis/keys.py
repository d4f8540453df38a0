"""The keys of one deployment in Redis: ``prefix:{deployment}:name``.

Redis Cluster hashes what stands in the braces, so all keys of a deployment lie in one slot, on one
server, where a script may use them together.

    state        HASH    what decisions rest on, and counters: see telemetry/stores/redis/change.py
    runs         HASH    run -> its start; run_order LIST: in which order they began
    ranks:RUN    HASH    rank -> its latest report
    sampled      SET     names of the runs with samples
    samples:RUN  STREAM  cursor-0: record
    times:RUN    ZSET    cursor by the time of its sample
    seen:RUN     HASH    rank -> how many samples, and which sequences
    rollups:SECONDS      HASH run, phase, start -> record; starts:SECONDS ZSET the same by start
    placements   STREAM  generation-1: committed placements
    migration    STRING  the open one
    plans        HASH    plan id -> open, committed, aborted, rejected
    words:RUN:MEMBERSHIP HASH rank -> survivor report
    tasks        HASH    id -> task; queued, running, tasks:done and tasks:failed ZSET: ids
    events       STREAM  id-0: time, kind, detail
    proposals    HASH    id -> proposal; proposal_contents HASH id -> the rest of it
    announced    HASH    component and name -> version of a process
    receipt:ID   STRING  answer to a change of the last two minutes
    wake         channel: a change was made; a hint, never data
"""

from __future__ import annotations

import re

from eplb.errors import ConfigError
from telemetry.store import TaskState

SCHEMA_VERSION = "1"  # counts up with each change of the layout above


class Keys:
    """Names of the keys of one deployment.

    Raises:
        ConfigError: a name that would not keep the deployment in one slot.
    """

    def __init__(self, prefix: str, deployment: str) -> None:
        if not deployment or "{" in deployment or "}" in deployment:
            raise ConfigError(
                f"deployment {deployment!r} cannot be kept in Redis, expected a name without braces"
            )
        self._prefix = f"{prefix}:{{{deployment}}}:"
        self.state, self.events, self.wake = self.of("state"), self.of("events"), self.of("wake")
        self.runs, self.run_order = self.of("runs"), self.of("run_order")
        self.sampled = self.of("sampled")
        self.placements, self.migration = self.of("placements"), self.of("migration")
        self.plans, self.announced = self.of("plans"), self.of("announced")
        self.tasks = self.of("tasks")
        self.proposals = self.of("proposals")
        self.proposal_contents = self.of("proposal_contents")
        self.queued, self.running = self.of("queued"), self.of("running")

    def tasks_in(self, state: TaskState) -> str:
        """Return the key of the ids of the tasks in a state."""
        # Both are older than the others, and have no name among the tasks.
        older = {"queued": self.queued, "running": self.running}
        return older.get(state, self.of("tasks", state))

    def of(self, name: str, *parts: object) -> str:
        """Return the key of a name, or of one thing among many of that name."""
        return self._prefix + ":".join([name, *map(str, parts)])


def pattern_of_all(prefix: str) -> str:
    """Return the pattern of the keys of every deployment, with the prefix taken as it stands."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + ":{*}:*"


def deployment_of(key: str, prefix: str) -> str | None:
    """Return the deployment that a key shows to have run or to have a placement; None: no such."""
    begin = f"{prefix}:{{"
    name, _, of = key.removeprefix(begin).partition("}:")
    is_shown = key.startswith(begin) and of in ("run_order", "placements")
    return name if is_shown else None
