"""Runs the program of a schedule, and checks the state at its end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.schedules.rank import Life, Rank
from benchmarks.schedules.simulated import (
    Copy,
    Deployment,
    Faults,
    InFlightChunk,
    Row,
    Step,
    Store,
    Violation,
    Votes,
    record_words,
)
from eplb.core.placement import EMPTY
from eplb.migration.build import Migration, Source
from rebalance.protocol.phases import Phase
from rebalance.weights.sources import HOST, Place
from telemetry.state.events import plan_end
from telemetry.state.live import Control as Switches

# -- What must hold, checked where it could be broken.
#
# One step, one placement: every rank begins step n with the same table and the same weights. The
# generation may differ for a step: a dropped plan changes it, and a rank that prepared nothing may
# read the vote a step late. Right bytes: when the devices make step n, each slot that its table
# routes to holds its expert. Nothing is written that is read: not by a chunk under way of a plan
# that is still worked on, not by a copy out of staging, not by steps that the device has yet to
# make, and no two write at once. No plan is dropped without an abort request
# (``rank.AbortRequests``, by the ranks' journals).

if TYPE_CHECKING:
    from benchmarks.schedules.rank import Rank

Expected = tuple[NDArray[np.intp], NDArray[np.int32]]  # rows of a bank, and what they must hold


class Claims:
    """Checks the claims on every rank."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks
        self._begun: dict[int, tuple[int, Step]] = {}  # by step: the first rank, and its table
        self._expected: dict[tuple[bytes, int], list[Expected]] = {}

    # -- who runs which step

    def begun(self, rank: int, step: Step) -> None:
        """A rank begins a step."""
        first, other = self._begun.setdefault(step.number, (rank, step))
        if other.identity != step.identity and self._ranks[first].is_alive:
            raise Violation(
                f"ranks {first} and {rank} run step {step.number} with different placements: "
                f"{_text_of(other)} and {_text_of(step)}"
            )

    def made(self, step: Step) -> None:
        """All devices make a step: tokens go where its table says."""
        for rank in self._ranks:
            self.check_bytes(rank, step.rows, step.identity[1], f"step {step.number}")

    def check_bytes(self, rank: Rank, rows: NDArray[np.int32], version: int, when: str) -> None:
        """Every slot of a rank that a table routes to holds its expert."""
        places, words = self._wanted(rows, version)[rank.number]
        found = rank.bank.words[places]
        if not np.array_equal(found, words):
            wrong = int(np.argwhere(found != words)[0, 0])
            layer, slot = divmod(int(places[wrong]), rank.bank.num_slots)
            raise Violation(
                f"rank {rank.number} layer {layer} slot {slot} holds {found[wrong].tolist()} in "
                f"{when}, expected {words[wrong].tolist()}"
            )

    def _wanted(self, rows: NDArray[np.int32], version: int) -> list[Expected]:
        key = (rows.tobytes(), version)
        if key not in self._expected:
            self._expected[key] = [_expected(rank, rows, version) for rank in self._ranks]
        return self._expected[key]

    # -- who writes and reads what

    def chunk_ordered(self, landing: InFlightChunk) -> None:
        """A chunk begins to be written."""
        target, source = landing.target, landing.source
        for reader in self._ranks:
            for other in reader.transport.in_flight:
                if reader.is_live(other.plan_id) and other.source == target:
                    raise Violation(f"{target} is written while rank {reader.number} reads it")
                other_move = (other.plan_id, other.record)
                if other.target == target and other_move != (landing.plan_id, landing.record):
                    raise Violation(f"{target} is written by two pulls at once")
                if other.target == source:
                    raise Violation(f"{source} is read while a chunk is written to it")
            self._check_stream(reader, target, source)

    def _check_stream(self, rank: Rank, target: Row, source: Row | None) -> None:
        layer, column = self._slot_of(target)
        if column != EMPTY and rank.is_alive and rank.table.rows[layer, column] != EMPTY:
            raise Violation(f"{target} is written while rank {rank.number} routes to it")
        for order in rank.stream.queue:
            if isinstance(order, Step) and column != EMPTY and order.rows[layer, column] != EMPTY:
                raise Violation(f"{target} is written before step {order.number} has read it")
            if not isinstance(order, Copy):
                continue
            if (rank.number, order.entry) == target:
                raise Violation(f"{target} is written before it was copied from")
            if (rank.number, order.row) in (target, source):
                raise Violation(f"{order.row} of rank {rank.number} is used while copied into")

    def _slot_of(self, row: Row) -> tuple[int, int]:
        """(layer, slot among those of all ranks); EMPTY for a staging entry."""
        bank = self._ranks[row[0]].bank
        layer, slot = divmod(row[1], bank.num_slots)
        return layer, (row[0] * bank.num_slots + slot if row[1] < bank.num_live else EMPTY)

    def copied(self, rank: int, copy: Copy) -> None:
        """A copy into a live slot is ordered, or made."""
        self._check_unread((rank, copy.row))
        for landing in self._ranks[rank].transport.in_flight:
            if landing.target == (rank, copy.entry):
                raise Violation(f"entry {copy.entry} of rank {rank} is swapped while written")

    def loaded(self, rank: int, row: int) -> None:
        """An engine writes new weights into a live slot."""
        self._check_unread((rank, row))
        if self._ranks[rank].stream.queue:
            raise Violation(f"rank {rank} loads weights while its device is at work")

    def _check_unread(self, row: Row) -> None:
        for reader in self._ranks:
            for landing in reader.transport.in_flight:
                if landing.source == row and reader.is_live(landing.plan_id):
                    raise Violation(f"{row} is overwritten while rank {reader.number} reads it")


def _expected(rank: Rank, rows: NDArray[np.int32], version: int) -> Expected:
    held = rows[:, rank.columns]
    layers, slots = np.nonzero(held != EMPTY)
    words = record_words(version)[layers, held[layers, slots]]
    return layers * rank.bank.num_slots + slots, words


def _text_of(step: Step) -> str:
    return f"{step.rows.tolist()} of weights {step.identity[1]}"


# -- What happens to the ranks of a schedule from outside: plans, switches, faults, new weights.


class Doing(Enum):
    """One thing that a program does."""

    PUBLISH = "publish"
    WITHDRAW = "withdraw"
    SWITCH_OFF = "switch off"
    SWITCH_ON = "switch on"
    LOSE_STORE = "lose the store"
    FIND_STORE = "find the store"
    BREAK_LINKS = "break links"
    REPAIR_LINKS = "repair links"
    REFUSE = "host refuses"
    ALLOW = "host allows"
    UPDATE = "update"
    KILL = "kill"
    CUT = "cut links"
    RETIRE = "retire"
    SCALE = "scale"
    CANCEL = "cancel"


PAIRS = (
    (Doing.SWITCH_OFF, Doing.SWITCH_ON),
    (Doing.LOSE_STORE, Doing.FIND_STORE),
    (Doing.BREAK_LINKS, Doing.REPAIR_LINKS),
    (Doing.REFUSE, Doing.ALLOW),
)
AFTER_A_DEATH = frozenset({Doing.FIND_STORE, Doing.REPAIR_LINKS, Doing.ALLOW})
QUIET = 0.15  # of programs have plans alone: then each of them must be committed
EACH = 0.2  # of programs have this fault


@dataclass(frozen=True)
class Program:
    """What is done, in order, at moments that the schedule picks."""

    doings: tuple[Doing, ...]

    @property
    def is_quiet(self) -> bool:
        """Say whether nothing gets in the way of a plan."""
        return set(self.doings) == {Doing.PUBLISH}


def random_program(rng: random.Random) -> Program:
    """Plans, and what gets in their way."""
    doings = [Doing.PUBLISH] * rng.choice([1, 1, 1, 2, 2, 3])
    if rng.random() < QUIET:
        return Program(tuple(doings))
    for off, on in PAIRS:
        if rng.random() < EACH:
            first = rng.randint(0, len(doings) - 1)
            doings.insert(first, off)
            doings.insert(rng.randint(first + 1, min(len(doings), first + 3)), on)
    for doing in (Doing.WITHDRAW, Doing.UPDATE):
        if rng.random() < EACH:
            doings.insert(rng.randint(1, len(doings)), doing)
    if rng.random() < 2 * EACH:
        doings.insert(rng.randint(1, len(doings)), Doing.KILL)
    return Program(tuple(doings))


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
        is_open = self._store.peek(self._store.published) is not None
        return is_old and not self._store.is_down and is_open

    def _has_updated(self) -> bool:
        ranks = self._schedule.ranks
        return all(rank.shared.state.weights_version == self.version for rank in ranks)

    def wants_update(self, rank: Rank) -> bool:
        """Say whether a rank's weights are to be replaced before its next step."""
        is_here = self.updates_at == rank.steps.steps
        return is_here and rank.shared.state.weights_version < self.version

    def _may(self, doing: Doing) -> bool:
        if doing is Doing.PUBLISH:
            # A plan may wait for the switch for ever.
            is_held = not self._store.peek(self._store.control).movement
            is_open = self._store.peek(self._store.published) is not None
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
        self._publish_migration(migration)

    def _publish_migration(self, migration: Migration) -> None:
        self._store.publish(migration)
        self._published.append(migration.plan_id)
        self._published_at = self._schedule.now
        self._schedule.counts["plans"] += 1

    def _served_version(self) -> int:
        """As a controller reads it in the ranks' reports, which may be old."""
        versions = [rank.shared.state.weights_version for rank in self._schedule.ranks]
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
        return self._store.peek(self._store.published) is None

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
        opened = self._store.peek(self._store.published)
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
            rank.agent.mover.figures.num_wrong_digests for rank in schedule.ranks
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
        if rank.agent.mover.ring.num_free != rank.bank.num_staging:
            raise Violation(f"rank {rank.number} leaves staging entries in use")
        if not self._had_update_at_death:
            claims, version = self._schedule.claims, rank.shared.state.weights_version
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
