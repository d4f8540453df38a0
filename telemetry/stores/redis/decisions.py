"""Decisions of the Redis store: start of a run, lease, commit, publish, withdraw, recovery.

Each method looks, lets ``telemetry/rules.py`` judge, and names the writes; ``Changes.decide`` makes
them or asks again.
"""

from __future__ import annotations

from dataclasses import replace

from eplb.core.placement import Placement
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery
from eplb.migration.serialisation import migration_to_bytes, placement_to_bytes
from telemetry import rules
from telemetry.store import Control, Lease, LeaseOf, Outcome, RunInfo
from telemetry.stores.lease_watch import LeaseWatch
from telemetry.stores.redis import rows
from telemetry.stores.redis.change import LEASE_FIELDS, Change, Changes, State
from telemetry.stores.redis.connection.link import RedisLink
from telemetry.stores.redis.keys import SCHEMA_VERSION, Keys

KEPT_PLACEMENTS = 1000


class Decisions:
    """Changes of one deployment that depend on its state."""

    def __init__(self, link: RedisLink, keys: Keys, changes: Changes, watch: LeaseWatch) -> None:
        self._link, self._keys, self._changes, self._watch = link, keys, changes, watch

    def begin_run(self, info: RunInfo) -> None:
        """Record a start; the same again changes nothing."""
        text = rows.run_to_text(info)

        def decision(_: State, change: Change) -> None:
            known = self._link.read("HGET", self._keys.runs, info.run)
            if known is not None:
                rules.check_run_is_new(rows.run_from_text(text), rows.run_from_text(known))
                return
            self._add_run(change, info)
            change.event("run", rules.run_detail(info))

        self._changes.decide(f"run {info.run!r}", decision)

    # -- the one controller, the one owner

    def acquire_lease(self, holder: str, ttl_s: float, of: LeaseOf) -> Lease | None:
        """Acquire or renew a lease."""
        is_over, counter = self._watch.is_over, f"token_of_{of}" if of != "controller" else "token"

        def decision(state: State, change: Change) -> Lease | None:
            latest, now = state.lease_of(of), state.time
            lease = rules.next_lease(holder, ttl_s, of, now=now, latest=latest, is_over=is_over)
            if lease is None:
                return None
            if latest is None or lease.token != latest.token:
                lease = replace(lease, token=lease.token + state.gap(counter))
                change.give_out(counter, lease.token, state)
            change.set_state(**{LEASE_FIELDS[of]: rules.lease_to_text(lease)})
            return lease

        lease = self._changes.decide(f"lease for {holder!r}", decision)
        if lease is not None:
            self._watch.age_s(lease)
        return lease

    def release_lease(self, lease: Lease) -> bool:
        """Release the lease."""

        def decision(state: State, change: Change) -> bool:
            latest, is_over = state.lease_of(lease.of), self._watch.is_over
            ended = rules.given_up(lease, now=state.time, latest=latest, is_over=is_over)
            if ended is not None:
                change.set_state(**{LEASE_FIELDS[lease.of]: rules.lease_to_text(ended)})
            return ended is not None

        return self._changes.decide(f"end of the lease of {lease.holder!r}", decision)

    # -- placements and migrations

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

        def decision(state: State, change: Change) -> bool:
            is_new = rules.is_to_be_committed(
                placement,
                expected=expected,
                committed=state.committed[0] if state.committed else None,
                known_hash=self._known_hash(state, generation),
            )
            if is_new:
                rules.check_not_dropped(plan_id, generation, _recovery_in(state))
                self._add_placement(change, placement, state.time, plan_id, reason)
                self._close_at_commit(state, change, generation, plan_id, outcome)
                kind = rules.EVENT_OF_OUTCOME[outcome]
                change.event(kind, rules.close_detail(plan_id, generation, reason))
            return is_new

        return self._changes.decide(f"commit of generation {generation}", decision)

    def next_plan_id(self) -> int:
        """Reserve a plan id."""

        def decision(state: State, change: Change) -> int:
            plan_id = state.last("plan_id") + state.gap("plan_id") + 1
            change.give_out("plan_id", plan_id, state)
            return plan_id

        return self._changes.decide("next plan id", decision)

    def publish(self, migration: Migration, fence: int | None) -> None:
        """Open a migration."""
        plan_id, record = migration.plan_id, migration_to_bytes(migration)

        def decision(state: State, change: Change) -> None:
            rules.check_fence(fence, state.lease)
            is_known = bool(self._link.read("HEXISTS", self._keys.plans, plan_id))
            rules.check_plan_id(plan_id, open_plan_id=state.open_plan_id, is_known=is_known)
            rules.check_base(migration, state.committed)
            change.write("SET", self._keys.migration, record)
            change.write("HSET", self._keys.plans, plan_id, "open")
            change.set_state(open_plan=f"{plan_id} {migration.hash}")
            if plan_id > state.last("plan_id"):
                change.give_out("plan_id", plan_id, state)
            change.event("publish", rules.publish_detail(migration))

        self._changes.decide(f"publish of plan {plan_id}", decision)

    def withdraw(self, plan_id: int, *, outcome: Outcome, reason: str, fence: int | None) -> bool:
        """Close an open migration of which nothing was applied."""

        def decision(state: State, change: Change) -> bool:
            rules.check_fence(fence, state.lease)
            if state.open_plan_id != plan_id:
                return False
            self._drop(state, change, plan_id, outcome, reason)
            return True

        return self._changes.decide(f"withdrawal of plan {plan_id}", decision)

    def recover(self, record: Recovery, expected_membership: int) -> Recovery | None:
        """Write a record unless one stands; see LoadStore.recover."""

        def decision(state: State, change: Change) -> Recovery | None:
            standing = rules.standing_record(
                record, expected_membership=expected_membership, latest=_recovery_in(state)
            )
            if standing is not None:
                return standing
            if rules.is_overtaken(record, state.committed[0] if state.committed else None):
                return None
            change.set_state(recovery=rules.recovery_to_text(record))
            change.event("recovery", vars(record))
            if rules.is_dropped_by(record, state.open_plan_id):
                self._drop(state, change, record.plan_id, "aborted", record.reason)
            return record

        return self._changes.decide(f"recovery to membership {record.membership}", decision)

    def restore(
        self,
        run: RunInfo,
        placement: Placement,
        control: Control,
        last_plan_id: int,
        reason: str,
    ) -> bool:
        """Restore what a rank knows, unless the store has a placement; see LoadStore.restore."""

        def decision(state: State, change: Change) -> bool:
            current = self._link.read("LINDEX", self._keys.run_order, -1)
            if not rules.is_to_be_restored(
                run,
                is_committed=state.committed is not None,
                current_run=current.decode() if current is not None else None,
            ):
                return False
            if current is None:
                self._add_run(change, run)
            self._add_placement(change, placement, state.time, 0, reason)
            # The layout's version, which was written when the store was opened, is lost too.
            change.set_state(schema=SCHEMA_VERSION, control=rules.details_to_text(vars(control)))
            plan_id = max(state.last("plan_id"), last_plan_id + rules.PLAN_ID_GAP)
            change.give_out("plan_id", plan_id, state)
            detail = rules.restore_detail(
                run, placement, control, last_plan_id=plan_id, reason=reason
            )
            change.event("restore", detail)
            return True

        return self._changes.decide(f"restoring of run {run.run!r}", decision)

    def _add_run(self, change: Change, info: RunInfo) -> None:
        change.write("HSET", self._keys.runs, info.run, rows.run_to_text(info))
        change.write("RPUSH", self._keys.run_order, info.run)

    def _known_hash(self, state: State, generation: int) -> str | None:
        if state.committed is None or generation > state.committed[0]:
            return None
        if generation == state.committed[0]:
            return state.committed[1]
        entry_id = f"{generation}-1"
        found = self._link.read("XRANGE", self._keys.placements, entry_id, entry_id)
        return found[0][1][b"hash"].decode() if found else None

    def _add_placement(
        self, change: Change, placement: Placement, time: float, plan_id: int, reason: str
    ) -> None:
        line = {
            "time": repr(time),
            "plan_id": plan_id,
            "reason": reason,
            "hash": placement.hash,
            "record": placement_to_bytes(placement),
        }
        words = [word for pair in line.items() for word in pair]
        bound = ("MAXLEN", "~", KEPT_PLACEMENTS)
        # Generations only grow, so they serve as ids; id 0-0 is not allowed, generation 0 is.
        entry_id = f"{placement.generation}-1"
        change.write("XADD", self._keys.placements, *bound, entry_id, *words)
        change.set_state(committed=f"{placement.generation} {placement.hash}")

    def _close_at_commit(
        self, state: State, change: Change, generation: int, plan_id: int, outcome: Outcome
    ) -> None:
        open_plan_id = state.open_plan_id
        if open_plan_id is None:
            return
        self._close(change, open_plan_id, outcome if open_plan_id == plan_id else "rejected")
        if open_plan_id != plan_id:
            overtaken = rules.overtaken_reason(generation)
            change.event("reject", rules.close_detail(open_plan_id, generation, overtaken))

    def _drop(
        self, state: State, change: Change, plan_id: int, outcome: Outcome, reason: str
    ) -> None:
        self._close(change, plan_id, outcome)
        detail = rules.close_detail(
            plan_id, state.committed[0] if state.committed else None, reason
        )
        change.event(rules.EVENT_OF_OUTCOME[outcome], detail)

    def _close(self, change: Change, plan_id: int, outcome: Outcome) -> None:
        change.write("HSET", self._keys.plans, plan_id, outcome)
        change.write("DEL", self._keys.migration)
        change.set_state(open_plan="")


def _recovery_in(state: State) -> Recovery | None:
    found = state.fields.get("recovery")
    return rules.recovery_from_text(found) if found else None
