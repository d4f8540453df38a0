"""The mover as a generator: driven step by step over a simulated clock, and by a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.build import Migration, Move, Pace, Source, Transaction, build_migration
from rebalance.protocol import phases
from rebalance.protocol.phases import Phase, PlanRef, RankPhase
from rebalance.stage.lanes import Pull
from rebalance.stage.mover import Mover, StagingRing
from rebalance.stage.share import RankSlots, Share
from rebalance.stage.stage_settings import (
    SERVING_BYTES_PER_SECOND,
    LinkBudget,
    StageSettings,
)
from rebalance.threads.waiting import SharedPhase, Wait, drive
from rebalance.threads.watchdog import ThreadActivity
from rebalance.types import CalledOff, IsWanted, Record, always
from rebalance.weights.sources import HOST, Place, WeightSources
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from runtime.routing import RoutingTable
from runtime.streams import Completion
from tests.support.simulated_time import Clock, Landing

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
SIZE = SCHEMA.record_bytes  # one page
# Ranks 0 and 1 share a host, rank 2 has its own. Rank 0 is to get expert 1 from rank 1 and expert
# 2 from its host, in both layers.
TOPOLOGY = Topology(np.array([0, 0, 1]), np.array([3, 1, 1]))
BASE = Placement(np.array([[0, EMPTY, EMPTY, 1, 2]] * 2), num_experts=3)
TARGET = Placement(np.array([[0, 1, 2, 1, 2]] * 2), num_experts=3)
SETTINGS = StageSettings(
    peer=LinkBudget(SIZE // 4), host=LinkBudget(SIZE // 2), in_flight=2, preload_records=1
)


def record_of(record: Record) -> torch.Tensor:
    filled = torch.zeros(SIZE, dtype=torch.uint8)
    filled.view(torch.int32).fill_(1 + 10 * record[0] + record[1])
    return filled


@dataclass
class Simulated:
    clock: Clock
    latency_s: float = 1.0
    ranks: frozenset[int] = frozenset([0, 1])
    landings: list[Landing] = field(default_factory=list)
    preloaded: list[list[Record]] = field(default_factory=list)
    released: list[list[Record]] = field(default_factory=list)
    reloaded: list[Record] = field(default_factory=list)
    leased: set[Record] = field(default_factory=set)
    room: int = 100
    is_host_gone: bool = False

    def begin(self, back: object) -> None:
        pass

    def lease(
        self, records: Sequence[Record], *, deadline_s: float, is_wanted: IsWanted = always
    ) -> int:
        if self.leased.issuperset(records):
            return 0
        self.preloaded.append(list(records))
        self.leased.update(records)
        return 0

    def hint(self, records: Sequence[Record]) -> None:
        pass

    def reload(self, record: Record, *, deadline_s: float, is_wanted: IsWanted = always) -> None:
        self.reloaded.append(record)

    def release(self, records: Collection[Record] | None = None) -> None:
        ended = sorted(self.leased if records is None else self.leased.intersection(records))
        self.leased.difference_update(ended)
        if ended and self.is_host_gone:
            raise MigrationError("the host cache 0 disconnected")
        if ended:
            self.released.append(ended)

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        pass

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        assert place in (HOST, Place(place.source, 1, 0)), "rank 2 is out of reach"
        part = record_of(record)[offset : offset + len(into)]
        due = self.clock() + self.latency_s
        self.landings.append(Landing(self.clock, due, lambda: into.copy_(part)))
        return self.landings[-1]

    def close(self) -> None:
        pass

    @property
    def num_flying(self) -> int:
        return sum(not landing.has_landed for landing in self.landings)


@dataclass
class Bench:
    clock: Clock
    transport: Simulated
    bank: ExpertBank
    mover: Mover
    shared: SharedPhase
    migration: Migration
    slots: RankSlots
    over_at: float = 0.0  # when the present wait is over
    share: Share = field(init=False)  # of the migration that is worked on

    def run(self, work: Iterator[Wait], is_reached: Callable[[], bool]) -> None:
        """Take steps until ``is_reached``; time passes only where the mover waits for it."""
        while not is_reached():
            self.clock.now = max(self.clock.now, self.over_at)
            self.look(next(work))

    def end(self, work: Iterator[Wait]) -> None:
        """Take steps to the end of the work."""
        for wait in work:
            self.look(wait)
            self.clock.now = max(self.clock.now, self.over_at)

    def look(self, wait: Wait) -> None:
        dues = [done.due for done in wait.completions if isinstance(done, Landing)]
        self.over_at = min([wait.until, *dues])

    def adopt(self) -> None:
        """What a vote does that shows every rank at work on the plan."""
        state = self.shared.state
        self.shared.state = phases.advance(phases.replace(state, is_adopted=True))

    def work(self, migration: Migration | None = None) -> Iterator[Wait]:
        """Work on the rank's share of a migration; by default of its own."""
        self.share = Share(migration or self.migration, self.slots)
        return self.mover.work(self.share, self.shared)

    def adopted(self) -> Iterator[Wait]:
        """Work on the migration, up to where every rank is at work on it."""
        work = self.work()
        self.run(work, lambda: self.shared.state.is_preloaded)
        self.adopt()
        return work

    def drop(self) -> None:
        """What a vote does that drops the plan."""
        self.shared.state = phases.drop(self.shared.state, 1, "a test")


def bench(
    latency_s: float = 1.0,
    staging: int = 4,
    beat: ThreadActivity | None = None,
    settings: StageSettings = SETTINGS,
) -> Bench:
    clock = Clock()
    transport = Simulated(clock, latency_s)
    bank = ExpertBank(SCHEMA, 2, 3, num_staging=staging)
    digests = torch.tensor(
        [[digest(record_of((layer, expert))) for expert in range(3)] for layer in range(2)]
    )
    parts = RankSlots(0, TOPOLOGY, bank, RoutingTable(BASE, max_replicas=3), digests)
    mover = Mover(parts, WeightSources(transport, transport), settings, clock=clock, beat=beat)
    migration = build_migration(
        BASE, TARGET, TOPOLOGY, plan_id=1, pace=Pace(staging_experts=staging)
    )
    plan = PlanRef(1, migration.vote_hash, 0, len(migration.transactions), 1)
    shared = SharedPhase(phases.see_plan(RankPhase(generation=0), plan))
    return Bench(clock, transport, bank, mover, shared, migration, parts)


def test_nothing_is_pulled_before_every_rank_works_on_the_plan() -> None:
    made = bench()
    work = made.work()

    made.run(work, lambda: made.clock.now > 10.0)

    assert made.transport.preloaded == [[(0, 2)], [(1, 2)]]  # one at a time, as the settings say
    assert made.transport.landings == []
    assert made.shared.state.is_preloaded


def test_migration_is_staged_and_reported_transaction_by_transaction() -> None:
    made = bench(staging=2)  # two moves a layer: each layer is a transaction
    work = made.adopted()

    made.run(work, lambda: made.shared.state.prepared == 1)
    for move in made.share.moves[0]:
        staged = made.mover.destination(move, "copy")
        assert torch.equal(staged, record_of((move.layer, move.expert)))
    assert (made.mover.figures.num_staged, made.mover.ring.num_in_use) == (2, 2)

    # The ring is full: the second layer waits until the first was swapped.
    pulled = len(made.transport.landings)
    made.run(work, lambda: made.clock.now > 50.0)
    assert len(made.transport.landings) == pulled

    moves = made.share.moves[0]
    made.mover.ring.release(moves, Completion(is_cuda=False))
    made.run(work, lambda: made.shared.state.prepared == 2)
    assert made.mover.figures.bytes_by_source == {"disk": 0, "peer": 2 * SIZE, "host": 2 * SIZE}


def seconds_to_stage(settings: StageSettings, **pace: float) -> float:
    """Return how long all of a migration is staged, with chunks that land at once."""
    made = bench(latency_s=0.0, settings=settings)
    migration = build_migration(
        BASE, TARGET, TOPOLOGY, plan_id=1, pace=Pace(staging_experts=8, **pace)
    )
    work = made.work(migration)
    made.adopt()
    made.run(work, lambda: made.shared.state.prepared == len(migration.transactions))
    return made.clock.now


def test_part_of_a_link_without_a_budget_is_one_of_the_default() -> None:
    free = replace(SETTINGS, peer=LinkBudget(SIZE // 4), host=LinkBudget(SIZE // 4))

    assert seconds_to_stage(free) == 0.0
    assert seconds_to_stage(free, link_part=0.5) == pytest.approx(
        1.5 * SIZE / (0.5 * SERVING_BYTES_PER_SECOND)
    )


def test_small_host_cache_is_preloaded_transaction_by_transaction() -> None:
    made = bench(staging=2)
    made.transport.room = 1
    work = made.work()
    made.run(work, lambda: made.shared.state.is_preloaded)
    assert made.transport.preloaded == [[(0, 2)]]
    made.adopt()

    made.run(work, lambda: made.shared.state.prepared == 1)
    moves = made.share.moves[0]
    made.mover.ring.release(moves, Completion(is_cuda=False))
    made.run(work, lambda: made.shared.state.prepared == 2)

    assert made.transport.preloaded == [[(0, 2)], [(1, 2)]]
    assert made.transport.released == [[(0, 2)], [(1, 2)]]


def test_abort_frees_the_ring_after_the_last_chunk_has_arrived() -> None:
    made = bench(staging=2)
    work = made.adopted()
    made.run(work, lambda: made.transport.num_flying == 4)
    made.drop()

    pulled = len(made.transport.landings)
    assert next(work).what == "cancelled copies"
    assert made.shared.state.phase is Phase.ABORTED
    assert made.mover.ring.num_free == 0
    made.end(work)

    assert made.shared.state.phase is Phase.IDLE
    assert made.mover.ring.num_free == 2
    assert made.transport.num_flying == 0
    assert len(made.transport.landings) == pulled


def test_rank_that_halts_in_mid_migration_ends_the_work_without_a_vote() -> None:
    made = bench()
    work = made.adopted()
    made.run(work, lambda: made.transport.num_flying > 0)
    started = made.clock.now

    made.shared.close()
    made.end(work)

    assert made.transport.num_flying == 0
    assert made.clock.now - started <= made.transport.latency_s


def test_copies_that_never_end_freeze_the_rank_and_keep_their_entries() -> None:
    made = bench(latency_s=math.inf, staging=2)
    work = made.adopted()
    made.run(work, lambda: bool(made.shared.state.abort_reason))
    assert "did not arrive within 30 s" in made.shared.state.abort_reason
    made.run(work, lambda: bool(made.shared.state.frozen_reason))
    made.drop()
    made.end(work)

    assert made.shared.state.phase is Phase.IDLE
    assert "staging copies did not end" in made.shared.state.frozen_reason
    assert made.mover.ring.num_free == 0  # what is still being written is never used again


def test_dead_host_does_not_freeze_a_rank_without_pending_copies() -> None:
    made = bench(staging=2)
    work = made.adopted()
    made.run(work, lambda: made.transport.num_flying > 0)

    made.transport.is_host_gone = True
    made.drop()
    made.end(work)

    assert made.shared.state.phase is Phase.IDLE
    assert made.shared.state.frozen_reason == ""
    assert made.transport.num_flying == 0
    assert made.mover.ring.num_free == 2


def test_swap_with_stalled_copies_is_aborted_with_a_reason() -> None:
    made = bench(staging=2)
    work = made.adopted()
    made.run(work, lambda: made.shared.state.prepared == 1)
    stuck = Landing(made.clock, math.inf, lambda: None)
    moves = made.share.moves[0]
    made.mover.ring.release(moves, stuck)

    made.run(work, lambda: bool(made.shared.state.abort_reason))

    assert "copies of a swap did not end within 30 s" in made.shared.state.abort_reason


def reason_to_drop(made: Bench, migration: Migration) -> str:
    """What a mover says of a plan that every rank works on, if it says it without any vote."""
    work = made.work(migration)
    made.adopt()
    made.run(work, lambda: bool(made.shared.state.abort_reason) or made.clock.now > 100.0)
    assert made.transport.landings == []
    return made.shared.state.abort_reason


def test_plan_beyond_the_staging_ring_is_aborted_with_a_reason() -> None:
    made = bench(staging=2)
    made.mover.ring = StagingRing(1)

    assert "transaction 0 brings 2 experts" in reason_to_drop(made, made.migration)


def test_plan_without_transactions_is_aborted_with_a_reason() -> None:
    made = bench()
    nothing = build_migration(BASE, BASE, TOPOLOGY, plan_id=1)

    assert "no transactions" in reason_to_drop(made, nothing)


def test_flip_into_a_serving_slot_is_aborted_with_a_reason() -> None:
    """By a bug, or another maker: expert 1 over expert 0, which moves to slot 1 too late."""
    moves = Move(0, 0, 1, Source.HOST), Move(0, 1, 0, Source.PEER, 3)
    away = Transaction((0,), (moves[:1],), frees=((0, 0),))
    into = Transaction((0,), (moves[1:],), reads_after=0)
    target = BASE.slot_to_expert.copy()
    target[0, :2] = 1, 0
    pace = Pace(staging_experts=0, mode="flip", spare_slots=1)

    for transactions, nth in (((away, into), 1), ((replace(into, rounds=(moves,)),), 0)):
        made = bench()
        forged = Migration(1, BASE, Placement(target, 3), transactions, pace)
        reason = reason_to_drop(made, forged)
        assert f"transaction {nth} writes layer 0 slot 0" in reason
        assert "found expert 0" in reason


def test_host_that_cannot_preload_is_a_reason_to_drop_the_plan() -> None:
    made = bench()

    def fail(records: Sequence[Record], **given: object) -> Mapping[str, int]:
        raise MigrationError("the disk is gone")

    made.transport.lease = fail  # type: ignore[method-assign]
    work = made.work()

    made.run(work, lambda: bool(made.shared.state.abort_reason))

    assert made.shared.state.abort_reason == "rank 0: the disk is gone"


def test_cancelled_preload_adds_no_abort_reason() -> None:
    made = bench()

    def is_dropped(
        records: Sequence[Record], *, deadline_s: float, is_wanted: IsWanted = always
    ) -> Mapping[str, int]:
        assert is_wanted()
        made.drop()
        assert not is_wanted()
        raise CalledOff("host 0: the wait for a record was cancelled")

    made.transport.lease = is_dropped  # type: ignore[method-assign]
    made.end(made.work())

    assert made.shared.state.phase is Phase.IDLE
    assert made.shared.state.frozen_reason == ""
    assert made.transport.landings == []


def test_mover_reports_the_chunk_that_it_waits_for() -> None:
    made = bench(latency_s=math.inf)
    work = made.adopted()
    made.run(work, lambda: made.transport.num_flying == 4)
    next(work)
    made.clock.now += 7

    standing = made.mover.beat.standing()

    assert (standing.doing, standing.age_s) == ("pulling layer 0 expert 1 from slot 0 of rank 1", 7)


def test_unexpected_exception_is_raised_after_the_plan_is_cleaned_up() -> None:
    made = bench()
    work = made.adopted()
    made.run(work, lambda: made.transport.num_flying == 4)

    def fail(record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        raise ValueError("a torn wire")

    made.transport.pull = fail  # type: ignore[method-assign]
    made.run(work, lambda: bool(made.shared.state.abort_reason))
    assert "ValueError: a torn wire" in made.shared.state.abort_reason
    made.drop()
    with pytest.raises(ValueError, match="a torn wire"):
        made.end(work)

    assert made.transport.num_flying == 0
    assert (made.shared.state.phase, made.shared.state.frozen_reason) == (Phase.IDLE, "")
    assert made.mover.ring.num_free == 4


# -- one record outside of any migration


def pull_of_expert_1(into: torch.Tensor) -> Pull:
    return Pull(Move(0, 1, 1, Source.PEER), into, BASE.slot_to_expert)


def test_single_fetch_does_not_count_as_a_migration() -> None:
    made = bench(latency_s=0.0)
    into = torch.zeros(SIZE, dtype=torch.uint8)

    assert made.mover.fetch(pull_of_expert_1(into), made.shared, lambda: True)

    assert torch.equal(into, record_of((0, 1)))
    figures = made.mover.figures
    assert (figures.num_staged, figures.bytes_by_source["peer"]) == (0, SIZE)


def test_fetch_that_is_not_wanted_any_more_leaves_nothing_that_writes() -> None:
    made = bench(latency_s=0.0)
    answers = iter([True, False])

    pull = pull_of_expert_1(torch.zeros(SIZE, dtype=torch.uint8))
    assert not made.mover.fetch(pull, made.shared, lambda: next(answers))

    assert made.transport.num_flying == 0
    assert made.mover.is_drained


def test_fetch_is_refused_after_copies_that_did_not_end() -> None:
    made = bench(latency_s=math.inf)
    work = made.adopted()
    made.run(work, lambda: bool(made.shared.state.frozen_reason))

    pull = pull_of_expert_1(torch.zeros(SIZE, dtype=torch.uint8))
    with pytest.raises(MigrationError, match="cancelled copies may still be writing to staging"):
        made.mover.fetch(pull, made.shared, lambda: True)


def test_loan_survives_a_dropped_plan_and_ends_with_the_copy() -> None:
    clock, ring = Clock(), StagingRing(2)
    entry = ring.borrow()
    assert entry is not None
    ring.take(Move(0, 1, 1, Source.PEER))
    assert ring.borrow() is None

    ring.release_all()
    assert ring.num_free == 1

    ring.give_back(entry, Landing(clock, 5.0, lambda: None))
    assert ring.num_free == 1
    clock.now = 5.0
    assert ring.num_free == 2


# -- the thread that drives it


class NeverWaits(threading.Condition):
    """A condition on which a wait is a failure."""

    def wait(self, timeout: float | None = None) -> bool:
        raise AssertionError(f"a wait of {timeout} s after the change")


def test_change_during_a_generator_step_is_not_lost() -> None:
    shared = SharedPhase(RankPhase(generation=0))
    shared.changed = NeverWaits()

    def work() -> Iterator[Wait]:
        shared.update(phases.freeze, "a test")  # as another thread might, right after the look
        yield Wait("a time that is far off", math.inf)

    drive(work(), shared, Clock())


@pytest.mark.parametrize("after_s", [0.0, 0.02])
def test_driver_resumes_on_a_completion_or_at_the_deadline(after_s: float) -> None:
    shared, real = SharedPhase(RankPhase(generation=0)), Clock()
    started = time.monotonic()

    def elapsed() -> float:
        return time.monotonic() - started

    def work() -> Iterator[Wait]:
        yield Wait("a time", after_s)
        assert elapsed() >= after_s
        real.now = 1.0
        landing = Landing(real, 1.0, lambda: None)
        yield Wait("bytes", math.inf, (Landing(real, math.inf, lambda: None), landing))

    drive(work(), shared, elapsed)
