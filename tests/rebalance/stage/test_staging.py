"""Records in chunks, over simulated sources and a simulated clock: sources, budgets, failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.build import Move, Source
from rebalance.stage.lanes import Pull
from rebalance.stage.source_choice import HOST_RETRY_S, SourceChoice
from rebalance.stage.stage_settings import LinkBudget, StageSettings
from rebalance.stage.stager import StageFigures, Stager
from rebalance.threads.waiting import Wait
from rebalance.types import CalledOff, IsWanted, Record, always
from rebalance.weights.sources import HOST, Place, WeightSources
from runtime.memory import digest
from runtime.streams import Completion
from tests.support.simulated_time import Clock, Landing

SIZE, CHUNK = 80, 20  # bytes of a record, and of a chunk: four chunks each
# One host of four ranks, two slots each. Expert 0 is on ranks 0, 1 and 2; expert 1 on rank 3.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=2)
PLACEMENT = Placement(np.array([[0, 2, 0, 3, 2, 0, 1, 3]]), num_experts=4)
ON_1, ON_2, ON_3 = Place(Source.PEER, 1, 0), Place(Source.PEER, 2, 1), Place(Source.PEER, 3, 0)
CHUNKED = StageSettings(
    peer=LinkBudget(CHUNK),
    host=LinkBudget(CHUNK),
    in_flight=2,
    pull_deadline_s=5.0,
)
FROM_3 = Move(0, 1, 0, Source.PEER, 6)  # expert 1 to rank 0, which has it from rank 3 alone
FROM_2 = Move(0, 0, 7, Source.PEER, 5)  # expert 0 to rank 3, planned from rank 2


def record_of(record: Record) -> torch.Tensor:
    """Bytes that name the expert."""
    return torch.arange(SIZE, dtype=torch.uint8) + 100 * record[1]


@dataclass
class Simulated:
    """Sources whose chunks take ``latency_s``; what is ``corrupted`` gives wrong bytes."""

    clock: Clock
    latency_s: float = 0.0
    jitter: Callable[[], float] = float  # added to the latency of each chunk
    ranks: frozenset[int] = frozenset(range(4))
    corrupted: set[Place] = field(default_factory=set)
    refusing: set[Place] = field(default_factory=set)
    ordered: list[tuple[tuple[Place, int], Landing]] = field(default_factory=list)
    preloaded: list[list[Record]] = field(default_factory=list)
    leased: set[Record] = field(default_factory=set)
    reloaded: list[Record] = field(default_factory=list)
    host_answers_s: float = 0.0
    room: int = 100
    is_beyond_repair: bool = False
    has_records: bool = True  # False: of weights that were updated, which no disk has

    @property
    def pulled(self) -> list[tuple[Place, int]]:
        return [what for what, _ in self.ordered]

    @property
    def flying(self) -> list[Landing]:
        return [landing for _, landing in self.ordered if not landing.has_landed]

    def begin(self, back: object) -> None:
        pass

    def lease(
        self, records: Sequence[Record], *, deadline_s: float, is_wanted: IsWanted = always
    ) -> int:
        if self.leased.issuperset(records):
            return 0
        if not self.has_records:
            raise MigrationError("the host has no records of these weights")
        self.ask(is_wanted)
        self.preloaded.append(list(records))
        self.leased.update(records)
        return SIZE * len(records)

    def ask(self, is_wanted: IsWanted) -> None:
        """The host needs so long that somebody may have called it off when it answers."""
        self.clock.now += self.host_answers_s
        if not is_wanted():
            raise CalledOff("host 0: the wait for a record was cancelled")

    def hint(self, records: Sequence[Record]) -> None:
        pass

    def reload(self, record: Record, *, deadline_s: float, is_wanted: IsWanted = always) -> None:
        self.leased.discard(record)
        self.ask(is_wanted)
        self.reloaded.append(record)
        if self.is_beyond_repair:
            raise MigrationError("the disk has other bytes too")
        self.corrupted.discard(HOST)
        self.leased.add(record)

    def release(self, records: Collection[Record] | None = None) -> None:
        self.leased.difference_update(self.leased.copy() if records is None else records)

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        pass

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        if place in self.refusing:
            raise MigrationError(f"{place} is out of reach")
        part = record_of(record)[offset : offset + len(into)] + (place in self.corrupted)
        # Chunks of one kind of link land in order, as on a stream.
        earlier = [left.due for (at, _), left in self.ordered if (at == HOST) == (place == HOST)]
        due = max([self.clock() + self.latency_s + self.jitter(), *earlier[-1:]])
        landing = Landing(self.clock, due, lambda: into.copy_(part))
        self.ordered.append(((place, offset), landing))
        return landing

    def close(self) -> None:
        pass


@dataclass
class Bench:
    """A stager of one rank, and what surrounds it."""

    clock: Clock
    transport: Simulated
    choice: SourceChoice
    stager: Stager
    dead: set[int]

    def run(self, work: Generator[Wait, None, Any], until: float = math.inf) -> Any:
        """Run a generator by the clock; None when it has not ended by ``until``."""
        while True:
            try:
                wait = next(work)
            except StopIteration as end:
                return end.value
            times = [wait.until, *(c.due for c in wait.completions if isinstance(c, Landing))]
            if min(times) > until:
                self.clock.now = until
                return None
            self.clock.now = max(self.clock.now, min(times))

    def stage(self, *moves: Move) -> list[torch.Tensor]:
        pulls = [pull_of(move) for move in moves]
        assert self.run(self.stager.stage(pulls, lambda: True)) is True
        return [pull.into for pull in pulls]

    @property
    def figures(self) -> StageFigures:
        return self.stager.figures

    def places(self) -> list[Place]:
        """Where chunks came from, repeats left out."""
        return [place for place, _ in groupby(place for place, _ in self.transport.pulled)]


def pull_of(move: Move) -> Pull:
    return Pull(move, torch.zeros(SIZE, dtype=torch.uint8), PLACEMENT.slot_to_expert)


def bench(rank: int, settings: StageSettings = CHUNKED, **transport: Any) -> Bench:
    clock, dead = Clock(), set[int]()
    simulated = Simulated(clock, **transport)
    digests = torch.tensor([[digest(record_of((0, expert))) for expert in range(4)]])
    choice = SourceChoice(rank, TOPOLOGY, simulated.ranks, lambda: frozenset(dead), clock)
    stager = Stager(WeightSources(simulated, simulated), choice, digests, settings, clock)
    return Bench(clock, simulated, choice, stager, dead)


def test_record_is_pulled_in_chunks_and_counts_once_verified() -> None:
    made = bench(0)

    (into,) = made.stage(FROM_3)

    assert torch.equal(into, record_of((0, 1)))
    assert made.transport.pulled == [(ON_3, offset) for offset in (0, 20, 40, 60)]
    assert made.figures.bytes_by_source == {"peer": SIZE}
    assert made.figures.num_staged == 1


def test_chunks_are_ordered_ahead_but_not_without_end() -> None:
    made = bench(0, latency_s=1.0)
    most = 0
    work = made.stager.stage([pull_of(FROM_3)], lambda: True)
    for wait in work:
        most = max(most, len(made.transport.flying))
        assert len(wait.completions) == 1
        made.clock.now += 1.0

    assert most == CHUNKED.in_flight == 2
    assert made.clock.now == 2.0  # four chunks, two at a time


def test_chunks_are_pulled_from_all_replicas_in_turn() -> None:
    made = bench(3)

    made.stage(FROM_2)

    on_0 = Place(Source.PEER, 0, 0)
    assert [place for place, _ in made.transport.pulled] == [ON_2, on_0, ON_1, ON_2]


def test_own_slot_precedes_peers_and_a_planned_host_precedes_both() -> None:
    own = bench(2)
    own.stage(Move(0, 0, 4, Source.SAME_RANK, 5))
    host = bench(3)
    host.stage(Move(0, 0, 7, Source.HOST))

    assert own.places() == [Place(Source.SAME_RANK, 2, 1)]
    assert host.places() == [HOST]
    assert host.transport.preloaded == [[(0, 0)]]


def test_ranks_that_cannot_be_read_are_no_source() -> None:
    made = bench(0, ranks=frozenset([0]))

    made.stage(FROM_3)

    assert made.places() == [HOST]
    assert made.figures.bytes_by_source == {"disk": SIZE, "host": SIZE}


def test_wrong_digest_of_the_only_peer_falls_back_to_the_host() -> None:
    made = bench(0, corrupted={ON_3})
    for _ in range(2):
        (into,) = made.stage(FROM_3)
        assert torch.equal(into, record_of((0, 1)))

    assert made.places() == [ON_3, HOST]
    figures = made.figures
    assert figures.bytes_by_source == {"rejected": SIZE, "disk": SIZE, "host": 2 * SIZE}
    assert (figures.num_retries, figures.num_wrong_digests) == (1, 1)
    assert made.choice.num_quarantined == 1


def test_slot_that_gave_wrong_bytes_is_not_read_again_however_late() -> None:
    made = bench(0, corrupted={ON_3})
    made.stage(FROM_3)

    for _ in range(3):
        made.clock.now += 1000 * HOST_RETRY_S
        made.stage(FROM_3)

    assert made.places() == [ON_3, HOST]
    assert (made.figures.num_wrong_digests, made.choice.num_quarantined) == (1, 1)


def test_damaged_host_record_is_read_again_by_the_host_and_then_right() -> None:
    made = bench(0, ranks=frozenset([0]), corrupted={HOST})

    (into,) = made.stage(FROM_3)

    assert torch.equal(into, record_of((0, 1)))
    assert made.transport.reloaded == [(0, 1)]
    figures = made.figures
    assert (figures.num_wrong_digests, made.choice.num_quarantined) == (1, 0)


@pytest.mark.parametrize(("unwanted_at", "asked_again"), [(0.5, 0), (1.5, 0), (2.5, 1)])
def test_cancelled_host_answer_ends_staging_without_a_quarantine(
    unwanted_at: float, asked_again: int
) -> None:
    """Asked at 0 s for a record and at 1 s for it again: each answer takes the host 1 s."""
    made = bench(0, ranks=frozenset([0]), corrupted={HOST}, host_answers_s=1.0)

    work = made.stager.stage([pull_of(FROM_3)], lambda: made.clock.now < unwanted_at)
    assert made.run(work) is (unwanted_at > 2.0)
    made.run(made.stager.drain())

    assert len(made.transport.reloaded) == asked_again
    assert made.choice.num_quarantined == 0
    assert made.transport.flying == []


def test_host_record_that_cannot_be_repaired_is_not_read_again() -> None:
    made = bench(0, ranks=frozenset([0]), corrupted={HOST})
    made.transport.is_beyond_repair = True

    with pytest.raises(MigrationError, match=r"no source is left \(the host: digest mismatch\)"):
        made.stage(FROM_3)

    assert made.choice.num_quarantined == 1


def test_quarantined_host_record_is_retried_and_a_correct_one_released() -> None:
    made = bench(0, ranks=frozenset([0]), corrupted={HOST})
    made.transport.is_beyond_repair = True
    with pytest.raises(MigrationError, match="digest mismatch"):
        made.stage(FROM_3)
    made.clock.now += HOST_RETRY_S - 1  # its disk is well again, but nobody knows yet
    made.transport.corrupted.clear()
    with pytest.raises(MigrationError, match=r"no source is left \(none known\)"):
        made.stage(FROM_3)

    made.clock.now += 1
    made.stage(FROM_3)

    assert made.choice.num_quarantined == 0


def test_host_record_that_is_still_wrong_when_tried_again_stays_away() -> None:
    made = bench(0, ranks=frozenset([0]), corrupted={HOST})
    made.transport.is_beyond_repair = True
    for _ in range(2):
        with pytest.raises(MigrationError, match="digest mismatch"):
            made.stage(FROM_3)
        with pytest.raises(MigrationError, match="none known"):
            made.stage(FROM_3)
        made.clock.now += HOST_RETRY_S

    assert made.figures.num_wrong_digests == 2


def test_corrupted_one_of_several_replicas_is_identified() -> None:
    made = bench(3, corrupted={ON_2})
    on_0 = Place(Source.PEER, 0, 0)

    # All three at once are wrong; rank 2, asked alone, is wrong too; the host is right.
    made.stage(FROM_2)
    assert made.places()[-2:] == [ON_2, HOST]
    assert made.choice.num_quarantined == 1
    # The other two stay suspect: each is read alone, and the first that is right is cleared.
    made.transport.ordered.clear()
    made.stage(FROM_2)

    assert made.places() == [on_0]
    assert made.figures.num_wrong_digests == 2


def test_of_two_replicas_the_other_is_to_blame_when_one_is_right() -> None:
    made = bench(3, corrupted={ON_1}, ranks=frozenset([1, 2, 3]))

    made.stage(FROM_2)

    assert made.places() == [ON_2, ON_1, ON_2, ON_1, ON_2]
    assert made.choice.num_quarantined == 1


def test_host_without_records_is_no_attempt_and_a_replica_is_read() -> None:
    made = bench(3, corrupted={ON_2}, has_records=False)

    made.stage(FROM_2)

    # All three at once are wrong, and so is rank 2 alone; the host would have been next, and last.
    assert made.places()[-2:] == [ON_2, Place(Source.PEER, 0, 0)]
    assert made.figures.num_staged == 1


def test_source_that_refuses_is_passed_over() -> None:
    made = bench(0, refusing={ON_3})

    made.stage(FROM_3)

    assert made.places() == [HOST]
    assert made.choice.num_quarantined == 0


def test_when_every_source_is_bad_each_is_named() -> None:
    made = bench(0, corrupted={ON_3}, refusing={HOST})

    with pytest.raises(MigrationError, match=r"expert 1: .*slot 0 of rank 3: .*the host: "):
        made.stage(FROM_3)


def test_peer_that_dies_in_the_middle_of_a_pull_is_left_at_the_next_chunk() -> None:
    made = bench(3, latency_s=1.0)
    pull = pull_of(FROM_2)
    work = made.stager.stage([pull], lambda: True)
    assert made.run(work, until=0.5) is None
    made.dead.add(2)

    assert made.run(work) is True
    assert torch.equal(pull.into, record_of((0, 0)))
    assert Counter(place.rank for place, _ in made.transport.pulled)[2] == 1


def test_death_of_the_only_peer_waits_for_its_chunks_before_the_host() -> None:
    made = bench(0, latency_s=1.0)
    pull = pull_of(FROM_3)
    work = made.stager.stage([pull], lambda: True)
    assert made.run(work, until=0.5) is None
    made.dead.add(3)

    assert made.run(work) is True
    assert [place for place, _ in made.transport.pulled] == [ON_3] * 2 + [HOST] * 4
    assert made.clock.now == 3.0  # a second for the dead peer's two, then two of the host's


def test_late_chunk_of_a_dead_peer_never_overwrites_the_next_source() -> None:
    delays = iter([0.0, 3.0])
    made = bench(0, latency_s=1.0, corrupted={ON_3}, jitter=lambda: next(delays, 0.0))
    pull = pull_of(FROM_3)
    work = made.stager.stage([pull], lambda: True)
    assert made.run(work, until=0.5) is None
    made.dead.add(3)

    assert made.run(work) is True
    assert torch.equal(pull.into, record_of((0, 1)))
    assert made.figures.num_wrong_digests == 0
    assert made.clock.now == 6.0  # the late one at 4, then two of the host's at a time


def test_cancelled_staging_ends_within_a_chunk_and_drains() -> None:
    made = bench(0, latency_s=1.0)
    wanted = [True]
    work = made.stager.stage([pull_of(FROM_3)], lambda: wanted[0])
    assert made.run(work, until=0.5) is None
    wanted[0] = False

    assert made.run(work) is False
    assert made.clock.now == 0.5
    made.run(made.stager.drain())
    assert len(made.transport.pulled) == 2
    assert made.transport.flying == []


def test_chunk_that_never_lands_is_given_up_and_cannot_be_drained() -> None:
    made = bench(0, latency_s=math.inf)

    with pytest.raises(
        MigrationError, match=r"20 bytes from slot 0 of rank 3 did not arrive within 5 s"
    ):
        made.stage(FROM_3)
    with pytest.raises(MigrationError, match="2 copies into staging did not end within 5 s after"):
        made.run(made.stager.drain())


def test_hold_stops_the_next_chunk_until_it_is_resumed() -> None:
    made = bench(0, latency_s=0.1)
    made.stager.hold.pause(5.0)
    work = made.stager.stage([pull_of(FROM_3)], lambda: True)

    assert made.run(work, until=2.0) is None
    assert made.transport.pulled == []
    made.stager.hold.resume()
    assert made.run(work) is True

    assert made.clock.now >= 2.0


def test_expired_hold_delays_a_migration_and_does_not_end_it() -> None:
    made = bench(0)
    made.stager.hold.pause(5.0)

    made.stage(FROM_3)

    assert made.clock.now == 5.0


@pytest.mark.parametrize("seed", range(60))
def test_staged_records_stay_right_under_random_faults(seed: int) -> None:
    draw = np.random.default_rng(seed)
    receiver = int(draw.integers(4))
    made = bench(receiver, latency_s=float(draw.choice([0.0, 0.3, 1.0])))
    made.transport.jitter = lambda: float(draw.choice([0.0, 0.0, 1.5]))
    slots = [Place(Source.PEER, rank, slot) for rank in range(4) for slot in range(2)]
    spoilt = [HOST, *(place for place in slots if place.rank != receiver)]
    made.transport.corrupted = {place for place in spoilt if draw.random() < 0.25}
    made.transport.refusing = {place for place in spoilt if draw.random() < 0.15}
    dies_at = float(draw.uniform(0, 3))
    unwanted_at = float(draw.choice([math.inf, draw.uniform(0, 4)]))
    deaths = {(receiver + 1) % 4} if draw.random() < 0.5 else set()
    moves = moves_into(receiver, draw)
    pulls = [pull_of(move) for move in moves]

    def is_wanted() -> bool:
        if made.clock.now >= dies_at:
            made.dead.update(deaths)
        return made.clock.now < unwanted_at

    refusal = ""
    try:
        is_done = made.run(made.stager.stage(pulls, is_wanted))
    except MigrationError as exc:
        is_done, refusal = False, str(exc)
    made.run(made.stager.drain())

    assert made.transport.flying == []
    assert is_done or made.clock.now >= unwanted_at or "no source is left" in refusal
    if is_done:
        assert all(torch.equal(pull.into, record_of(pull.record)) for pull in pulls)
        assert made.figures.num_staged == len(pulls)


def moves_into(receiver: int, draw: np.random.Generator) -> list[Move]:
    """Every expert that is not on the receiver, planned from one of its slots or the host."""
    held = PLACEMENT.slot_to_expert[0].tolist()
    span = TOPOLOGY.slots_on(receiver)
    moves = []
    for expert in sorted(set(range(4)) - set(held[span])):
        holders = [slot for slot, found in enumerate(held) if found == expert]
        source = draw.choice([Source.PEER, Source.HOST])
        planned = int(draw.choice(holders)) if source == Source.PEER else -1
        moves.append(Move(0, expert, span.start, Source(int(source)), planned))
    return moves
