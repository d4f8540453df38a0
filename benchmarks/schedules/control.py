"""Runs the program of a schedule, and checks the state at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Protocol

from benchmarks.schedules.ballots import Violation, Votes
from benchmarks.schedules.claims import Claims
from benchmarks.schedules.deployments import Deployment
from benchmarks.schedules.device import Step
from benchmarks.schedules.program import AFTER_A_DEATH, Doing, Program
from benchmarks.schedules.rank import Life, Rank
from benchmarks.schedules.simulated_links import Faults, Store
from eplb.migration.build import Source
from rebalance.protocol.phases import Phase
from rebalance.transport.interface import HOST, Place
from telemetry.events import plan_end
from telemetry.store import Control as Switches

NEVER = -1
DELAYS = ((0,), (0, 5, 15, 40, 80), (10, 40, 80))  # turns, from one doing to the next
DEADLINE_S, QUIET_DEADLINE_S = 100.0, 1000.0  # for a migration


class Controlled(Protocol):
    """A schedule, as far as its program reaches into it."""

    rng: Random
    deployment: Deployment
    now: float
    trace: list[tuple[str, int]]
    counts: Counter[str]
    store: Store
    faults: Faults
    ranks: list[Rank]
    votes: Votes
    claims: Claims

    def may_update(self) -> None:
        """Let ranks begin the update of their weights."""

    def may_recover(self) -> None:
        """Let survivors of a death recover."""


class Control:
    """Publishes plans, sets switches, injects and ends faults."""

    def __init__(self, schedule: Controlled, program: Program) -> None:
        self._schedule, self._store, self._rng = schedule, schedule.store, schedule.rng
        self.program, self._left = program, list(program.doings)
        self.version, self.updates_at = 0, NEVER
        self._published: list[int] = []
        self._published_at = 0.0
        self._delays, self._not_before = schedule.rng.choice(DELAYS), 0  # turns
        self._next: Callable[[], None] | None = None
        self._had_update_at_death = False

    # -- doing

    def may_go_on(self) -> bool:
        """Say whether the program's next doing can be done now."""
        self._next = self._find_next()
        return self._next is not None

    def go_on(self) -> None:
        """Do what ``may_go_on`` found."""
        assert self._next is not None, "asked first"
        self._next()

    def _find_next(self) -> Callable[[], None] | None:
        if self.updates_at != NEVER and self._has_updated():
            self.updates_at = NEVER
        if self._is_overdue():
            return lambda: self._withdraw("not finished in time")
        if len(self._schedule.trace) < self._not_before:
            return None
        if self._store.is_down and Doing.FIND_STORE in self._left:
            doing = Doing.FIND_STORE  # what comes before it may need the store
        elif self._left and self._may(self._left[0]):
            doing = self._left[0]
        else:
            return None
        return lambda: self._do(doing)

    def _is_overdue(self) -> bool:
        """As the real controller does: no migration is open for ever, e.g. one for old weights."""
        deadline_s = QUIET_DEADLINE_S if self.program.is_quiet else DEADLINE_S
        is_old = self._schedule.now - self._published_at > deadline_s
        return is_old and not self._store.is_down and self._store.ledger.published is not None

    def _has_updated(self) -> bool:
        return all(rank.core.fence.version == self.version for rank in self._schedule.ranks)

    def wants_update(self, rank: Rank) -> bool:
        """Say whether a rank's weights are to be replaced before its next step."""
        is_here = self.updates_at == rank.steps.steps
        return is_here and rank.core.fence.version < self.version

    def _may(self, doing: Doing) -> bool:
        if doing is Doing.PUBLISH:
            # A plan may wait for the switch for ever.
            is_held = not self._store.ledger.live().control.movement
            is_open = self._store.ledger.published is not None
            return not self._store.is_down and (is_held or not is_open)
        if doing in (Doing.SWITCH_OFF, Doing.SWITCH_ON, Doing.WITHDRAW):
            return not self._store.is_down
        return True

    def _do(self, doing: Doing) -> None:
        self._left.remove(doing)
        self._not_before = len(self._schedule.trace) + self._rng.choice(self._delays)
        self._schedule.trace.append((doing.value, -1))
        store, faults = self._store, self._schedule.faults
        if doing is Doing.PUBLISH:
            self._withdraw("another plan is wanted")
            self._publish()
        elif doing is Doing.WITHDRAW:
            self._withdraw("an operator withdrew it")
        elif doing in (Doing.SWITCH_OFF, Doing.SWITCH_ON):
            store.set_control(Switches(movement=doing is Doing.SWITCH_ON), reason="a test")
        elif doing in (Doing.LOSE_STORE, Doing.FIND_STORE):
            store.is_down = doing is Doing.LOSE_STORE
        elif doing is Doing.BREAK_LINKS:
            self._break_links()
        elif doing is Doing.REPAIR_LINKS:
            faults.wrong_bytes, faults.refusals = 0.0, 0.0
            faults.wrong_places.clear()
        elif doing in (Doing.REFUSE, Doing.ALLOW):
            faults.host_refuses = doing is Doing.REFUSE
        elif doing is Doing.UPDATE:
            self.version += 1
            self._schedule.may_update()
            self.updates_at = 1 + max(rank.steps.steps for rank in self._schedule.ranks)
        else:
            self._kill()

    def _publish(self) -> None:
        committed = self._store.committed()
        assert committed is not None, "a schedule starts with a placement"
        plan_id, deployment = self._store.next_plan_id(), self._schedule.deployment
        target, version = self._rng.randrange(len(deployment.targets)), self._served_version()
        migration = deployment.migration(committed.placement, target, plan_id, version)
        if migration is None:
            self._schedule.counts["nothing to move"] += 1
            return
        self._store.publish(migration)
        self._published.append(plan_id)
        self._published_at = self._schedule.now
        self._schedule.counts["plans"] += 1

    def _served_version(self) -> int:
        """As a controller reads it in the ranks' reports, which may be old."""
        versions = [rank.core.fence.version for rank in self._schedule.ranks]
        return 0 if self._rng.random() < 0.1 else min(versions)

    def _withdraw(self, why: str) -> None:
        opened = self._store.published()
        if opened is not None:
            self._store.withdraw(opened.plan_id, outcome="rejected", reason=why)

    def _break_links(self) -> None:
        faults, rng, deployment = self._schedule.faults, self._rng, self._schedule.deployment
        faults.wrong_bytes = rng.choice([0.0, 0.1, 0.5])
        faults.refusals = rng.choice([0.0, 0.1, 0.3])
        num_slots = int(deployment.topology.slots_of_rank[0])
        for layer in range(deployment.start.num_layers):
            for expert in range(deployment.start.num_experts):
                place = Place(Source.PEER, rng.randrange(3), rng.randrange(num_slots))
                if rng.random() < 0.3:
                    faults.wrong_places.add(((layer, expert), rng.choice([HOST, place])))

    def _kill(self) -> None:
        schedule = self._schedule
        victim = self._rng.choice(schedule.ranks)
        self._had_update_at_death = self.updates_at != NEVER
        victim.life = Life.DEAD
        schedule.votes.dead.add(victim.number)
        schedule.may_recover()
        schedule.counts["deaths"] += 1
        self._left = [doing for doing in self._left if doing in AFTER_A_DEATH]
        for rank in schedule.ranks:
            if self._rng.random() < 0.03:
                rank.patience_s = -1.0  # takes who has not spoken yet for dead

    # -- the end

    def is_settled(self) -> bool:
        """Say whether nothing is left to happen."""
        if self._left or self._schedule.store.is_down:
            return False
        alive = [rank for rank in self._schedule.ranks if rank.is_alive]
        if not all(self._is_at_rest(rank) for rank in alive):
            return False
        if self._schedule.votes.dead:
            return all(rank.life in (Life.RECOVERED, Life.REFUSED) for rank in alive)
        if self.updates_at != NEVER and not self._has_updated():
            return False
        return self._store.ledger.published is None

    def _is_at_rest(self, rank: Rank) -> bool:
        if rank.life is Life.REFUSED:
            return True  # it ends without another word
        is_idle = rank.shared.state.phase is Phase.IDLE and not rank.is_moving
        is_quiet = not rank.transport.in_flight and not rank.watcher.has_writing
        is_done = all(isinstance(order, Step) for order in rank.stream.queue)
        return is_idle and is_quiet and is_done and rank.life is not Life.UPDATING

    def state_text(self) -> str:
        """How it stands, for a hang."""
        ranks = [
            f"rank {r.number} {r.life.value} at step {r.steps.steps}: {r.shared.state}, waits for "
            f"{r.wait.what if r.wait else 'nothing'} {r.update_waits_for} {r.why}"
            for r in self._schedule.ranks
        ]
        opened = self._store.ledger.published
        left = [doing.value for doing in self._left]
        return f"left {left}, open plan {opened and opened.plan_id}\n" + "\n".join(ranks)

    def check_end(self) -> None:
        """Judge a settled schedule."""
        schedule, events = self._schedule, self._store.events()
        ends = {
            end.plan_id: (event.kind, end)
            for event in events
            if (end := plan_end(event)) is not None
        }
        for plan_id in self._published:
            if plan_id not in ends and not schedule.votes.dead:
                raise Violation(f"plan {plan_id} is neither committed nor dropped")
            if plan_id in ends:
                kind, end = ends[plan_id]
                if not end.reason:
                    raise Violation(f"plan {plan_id} ended without a reason")
                schedule.counts["committed" if kind == "commit" else "dropped"] += 1
        if self.program.is_quiet and schedule.counts["committed"] != len(self._published):
            raise Violation(f"plans were dropped though nothing was wrong: {ends}")
        held = [r for r in schedule.ranks if r.is_alive and r.life is not Life.REFUSED]
        for rank in held:
            self._check_rank(rank)
        self._check_refusals()
        schedule.counts["recoveries"] += any(rank.life is Life.RECOVERED for rank in held)
        schedule.counts["updates"] += self.version
        schedule.counts["bytes refused"] += any(
            rank.core.mover.figures().num_wrong_digests for rank in schedule.ranks
        )

    def _check_rank(self, rank: Rank) -> None:
        committed = self._store.committed()
        assert committed is not None, "a schedule starts with a placement"
        named, mine = committed.placement, rank.agent.placement
        if (named.hash, named.generation) != (mine.hash, mine.generation):
            raise Violation(
                f"the store names generation {named.generation}, rank {rank.number} serves "
                f"generation {mine.generation}: {rank.shared.state}"
            )
        if rank.table.rows.tobytes() != named.slot_to_expert.tobytes():
            raise Violation(f"rank {rank.number} routes otherwise than its placement says")
        if rank.core.mover.ring.num_free != rank.bank.num_staging:
            raise Violation(f"rank {rank.number} leaves staging entries in use")
        if not self._had_update_at_death:
            claims, version = self._schedule.claims, rank.core.fence.version
            claims.check_bytes(rank, rank.table.rows, version, "the end")
        if rank.shared.state.frozen_reason and not self._schedule.votes.dead:
            raise Violation(f"rank {rank.number} is frozen: {rank.shared.state.frozen_reason}")

    def _check_refusals(self) -> None:
        refused = [r for r in self._schedule.ranks if r.life is Life.REFUSED]
        self._schedule.counts["refusals"] += bool(refused)
        is_impatient = any(rank.patience_s < 0 for rank in self._schedule.ranks)
        for rank in refused:
            if not is_impatient and not self._had_update_at_death:
                raise Violation(f"rank {rank.number} cannot recover: {rank.why}")
