"""The store for a cluster: one Redis server, or one slot of a Redis Cluster, that all hosts share.

What is acknowledged is as safe as the server's append-only file makes it; ``durability`` reports
how safe that is. A crash on the client's side loses nothing. When the server does not respond, a
call retries for some seconds and then raises StoreError. Whether a change was made in the meantime
is then unknown, and safe to request again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.migration.build import Migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.versions import Announcement
from telemetry.live import LiveState
from telemetry.proposals import Content, Proposal, content_from_bytes, standing
from telemetry.records.rank_state_codec import rank_state_from_text, rank_state_to_text
from telemetry.records.sample_codec import SAMPLE_VERSION
from telemetry.retention.rollup import Rollup
from telemetry.store import (
    CommittedPlacement,
    Details,
    Event,
    Lease,
    LeaseOf,
    RankState,
    RunInfo,
    Task,
    TaskState,
)
from telemetry.stores import commit_rules
from telemetry.stores.deciding_store import DecidingStore, Ledger
from telemetry.stores.lease_watch import LeaseWatch
from telemetry.stores.redis import json_codec
from telemetry.stores.redis.change import Change, Changes, State, live_of
from telemetry.stores.redis.connection.address import RedisAddress, parse_address
from telemetry.stores.redis.connection.link import RedisLink
from telemetry.stores.redis.connection.server_checks import Durability, check_server
from telemetry.stores.redis.connection.wait import Waiter
from telemetry.stores.redis.keys import Keys, deployment_of, pattern_of_all
from telemetry.stores.redis.ledger import RedisLedger
from telemetry.stores.redis.placements import PlacementReader
from telemetry.stores.redis.samples import Samples

T = TypeVar("T")


class RedisStore(DecidingStore):
    """LoadStore over Redis. Threads may share a store object; each process opens its own.

    Args:
        clock: for times in place of the server's, for tests and simulations.
        monotonic: for how long leases stand; if not given, ``clock`` where that is.
        sample_version: of the records that ``append`` writes; see
            ``telemetry/records/sample_codec.py``.

    Raises:
        ConfigError: the URL or the deployment's name cannot be used.
        StoreError: the server cannot be reached or must not be trusted with placements.
    """

    def __init__(
        self,
        url: str | RedisAddress,
        deployment: str,
        *,
        clock: Clock | None = None,
        monotonic: Clock | None = None,
        sample_version: int = SAMPLE_VERSION,
    ) -> None:
        self.deployment = deployment
        address = url if isinstance(url, RedisAddress) else parse_address(url)
        self._keys = Keys(address.prefix, deployment)
        self.link = RedisLink(address)
        try:
            self.durability: Durability = check_server(self.link, self._keys)
        except BaseException:
            self.link.close()
            raise
        self._changes = Changes(self.link, self._keys, clock)
        self._watch = LeaseWatch(monotonic or clock)
        self._placements = PlacementReader(self.link, self._keys)
        self._samples = Samples(self.link, self._keys, sample_version)
        self._repair()
        self._waiter = Waiter(self.link, self._keys.wake, self.version)

    def current_run(self) -> RunInfo | None:
        """Return the latest start."""
        name = self.link.read("LINDEX", self._keys.run_order, -1)
        return None if name is None else self._run(name)

    def runs(self) -> list[RunInfo]:
        """Return every start on record, oldest first."""
        names = self.link.read("LRANGE", self._keys.run_order, 0, -1)
        return [self._run(name) for name in dict.fromkeys(names)]  # a torn start may be there twice

    def report(self, state: RankState) -> None:
        """Replace the latest report of a rank."""
        text = rank_state_to_text(state)
        self.link.write("HSET", self._keys.of("ranks", state.run), state.rank, text)

    def rank_states(self, run: str) -> list[RankState]:
        """Return the last report of every rank."""
        found = self.link.read("HVALS", self._keys.of("ranks", run))
        return sorted(map(rank_state_from_text, found), key=lambda state: state.rank)

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples.

        When an answer was lost and a batch was sent again, the count is of what was new then.
        """
        commit_rules.check_samples(self.deployment, samples)
        return self._samples.append(samples)

    def samples(
        self, run: str, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) past the cursor ``after``."""
        return self._samples.past(run, after, limit)

    def samples_before(
        self, before_time: float, *, since: float = -inf, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken from ``since`` to ``before_time``."""
        return self._samples.between(since, before_time, after, limit)

    def sample_counts(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were stored, those included that were pruned."""
        return self._samples.counts(run)

    def prune(self, before_time: float) -> int:
        """Forget samples taken before ``before_time``, of any run, and return how many."""
        return self._samples.prune(before_time)

    def refused(self) -> dict[str, int]:
        """Return how many records could not be read, by reason."""
        return self._samples.refused()

    def add_rollups(self, rollups: Sequence[Rollup]) -> int:
        """Add roll-ups."""
        return self._samples.add_rollups(rollups)

    def rollups(self, seconds: int, *, after: float = -1.0, limit: int = 10_000) -> list[Rollup]:
        """Return roll-ups of a length that start past ``after``, oldest first."""
        return self._samples.rollups(seconds, after, limit)

    def prune_rollups(self, seconds: int, before_time: float) -> int:
        """Forget roll-ups that ended by ``before_time`` and return how many."""
        return self._samples.prune_rollups(seconds, before_time)

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        return self._placements.committed()

    def placement(self, generation: int) -> CommittedPlacement | None:
        """Return the placement of a generation."""
        return self._placements.placement(generation)

    def placements(
        self, limit: int = 100, *, before: int | None = None
    ) -> list[CommittedPlacement]:
        """Return committed placements, newest first; the last 1,000 are kept."""
        return self._placements.placements(limit, before)

    def published(self) -> Migration | None:
        """Return the open migration."""
        return self._placements.published()

    def proposals(self) -> list[Proposal]:
        """Return all proposals, oldest first."""
        state = self._changes.look()
        ledger = RedisLedger(self.link, self._keys, state, Change(self._keys))
        return [standing(one, state.time, state.committed) for one in ledger.proposals()]

    def proposal_content(self, proposal_id: int) -> Content | None:
        """Return the rest of a proposal."""
        found = self.link.read("HGET", self._keys.proposal_contents, proposal_id)
        return content_from_bytes(found) if found is not None else None

    def add_survivor_report(self, report: SurvivorReport) -> None:
        """Write a survivor report."""
        change = Change(self._keys, is_awaited=True)
        key = self._keys.of("words", report.run, report.membership)
        change.write("HSET", key, report.rank, commit_rules.report_to_text(report))
        self._changes.make(f"survivor report of rank {report.rank}", change)

    def survivor_reports(self, run: str, membership: int) -> list[SurvivorReport]:
        """Return what survivors of a group wrote, by rank."""
        found = self.link.read("HVALS", self._keys.of("words", run, membership))
        reports = [commit_rules.report_from_text(text.decode()) for text in found]
        return sorted(reports, key=lambda report: report.rank)

    def recovery(self) -> Recovery | None:
        """Return the latest record."""
        found = self._state_field("recovery")
        return commit_rules.recovery_from_text(found) if found else None

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event. Its id is the clock in milliseconds, or one more than the last."""
        change = Change(self._keys)
        change.event(kind, detail)
        (event_id,) = self._changes.make(f"event {kind!r}", change)
        return event_id

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return events past the id ``after``."""
        first = f"{max(0, after) + 1}-0"
        found = self.link.read("XRANGE", self._keys.events, first, "+", "COUNT", limit)
        return [json_codec.event_of(entry) for entry in found]

    def latest_events(self, *, before: int | None = None, limit: int = 1000) -> list[Event]:
        """Return events newest first."""
        last = "+" if before is None else f"({before}-0"
        found = self.link.read("XREVRANGE", self._keys.events, last, "-", "COUNT", limit)
        return [json_codec.event_of(entry) for entry in found]

    def prune_events(self, keep: int) -> int:
        """Forget all but the latest ``keep`` events."""
        return int(self.link.write("XTRIM", self._keys.events, "MAXLEN", "=", max(0, keep)))

    def tasks(self, state: TaskState, *, after: int = 0, limit: int = 1000) -> list[Task]:
        """Return tasks in a state, oldest first."""
        asked = (self._keys.tasks_in(state), f"({after}", "+inf", "LIMIT", 0, limit)
        ids = self.link.read("ZRANGEBYSCORE", *asked)
        texts = self.link.read("HMGET", self._keys.tasks, *ids) if ids else []
        found = [json_codec.task_from_text(text) for text in texts if text is not None]
        return [task for task in found if task.state == state]  # it may have changed since

    def claim(self, *, fence: int | None = None) -> Task | None:
        """Claim the oldest queued task."""
        # Looked at first: a controller asks far more often than it gets.
        if fence is None and not self.link.read("ZCARD", self._keys.tasks_in("queued")):
            return None
        return super().claim(fence=fence)

    def task(self, task_id: int) -> Task | None:
        """Return a task."""
        found = self.link.read("HGET", self._keys.tasks, task_id)
        return json_codec.task_from_text(found) if found is not None else None

    def live(self) -> LiveState:
        """Return the live settings."""
        live, control = self.link.read("HMGET", self._keys.state, "live", "control")
        return live_of(live and live.decode(), control and control.decode())

    def candidates(self) -> Candidates:
        """Return what hosts may need next."""
        text = self._state_field("candidates")
        return commit_rules.candidates_from_text(text) if text else Candidates()

    def suggest(self, candidates: Candidates) -> None:
        """Name what hosts may need next."""
        change = Change(self._keys, is_awaited=True)
        change.set_state(candidates=commit_rules.candidates_to_text(candidates))
        self._changes.make("candidates", change)

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first."""
        texts = self.link.read("HVALS", self._keys.announced)
        return commit_rules.announcements_from_texts(texts)

    def version(self) -> int:
        """Return a number that grows with each change that a reader may wait for."""
        return int(self._state_field("version") or 0)

    def wait(self, version: int, timeout_s: float) -> int:
        """Return once the version differs from ``version``, or after ``timeout_s``."""
        return self._waiter.wait(version, timeout_s)

    def close(self) -> None:
        """Close the connections and end every wait; the store cannot be used after."""
        self.link.close()
        self._waiter.close()

    def _decide(self, what: str, decision: Callable[[Ledger], T]) -> T:
        def decided(state: State, change: Change) -> T:
            return decision(RedisLedger(self.link, self._keys, state, change))

        return self._changes.decide(what, decided)

    def _latest_lease(self, of: LeaseOf) -> Lease | None:
        return self._changes.look().lease_of(of)

    def _repair(self) -> None:
        try:
            self._samples.repair()
        except BaseException:
            self.link.close()
            raise

    def _run(self, name: bytes) -> RunInfo:
        found = self.link.read("HGET", self._keys.runs, name)
        return json_codec.run_from_text(found)

    def _state_field(self, name: str) -> str | None:
        found = self.link.read("HGET", self._keys.state, name)
        return None if found is None else found.decode()


def deployments_at(url: str) -> list[str]:
    """Return the names of the deployments that ran or have a placement in a store, sorted.

    Every key of the server is looked at once; the user needs the command SCAN.

    Raises:
        ConfigError: the URL cannot be used.
        StoreError: the server cannot be reached.
    """
    address = parse_address(url)
    link = RedisLink(address)
    try:
        keys = link.names(pattern_of_all(address.prefix))
    finally:
        link.close()
    return sorted({name for key in keys if (name := deployment_of(key, address.prefix))})
