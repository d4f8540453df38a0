"""Votes and pulls: one contract each, over the real wires and within one process."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import MigrationError, RankError
from eplb.migration.build import Source
from rebalance.protocol.ballot import BALLOT_SIZE
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.stage.digest_table import agree_on_digests, table_of
from rebalance.types import Outcome, PendingVote, Record, VoteGroup
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.sources import HOST, MappedSlots, Place, WeightSources, map_peers
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertBank, ExpertSchema, PeerBank
from runtime.memory import attach
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalHost, LocalVotes, local_slots

FORK = multiprocessing.get_context("fork")
RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
Result = tuple[Outcome, list[int]]


# -- votes


@dataclass
class Voter:
    """What a rank of the contract test can do."""

    rank: int
    votes: VoteGroup
    die: Callable[[], None]


Ballots = Callable[[Voter], Any]
RunVoters = Callable[[int, Ballots], list[Any]]  # results by rank; None of one that died


def run_local_voters(size: int, function: Ballots) -> list[Any]:
    votes = LocalVotes(size)

    def run(rank: int) -> Any:
        return function(Voter(rank, votes.member(rank), lambda: votes.kill(rank)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def run_gloo_voters(size: int, function: Ballots, rendezvous: Path) -> list[Any]:
    """As run_ranks does, but a rank may die."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def run(rank: int, pipe: Connection) -> NoReturn:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size
        )
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=NEVER_S))
        assert isinstance(group, dist.ProcessGroup)
        dist.barrier(group)  # all are connected: a rank that dies now dies in a vote
        try:
            pipe.send(function(Voter(rank, GlooVotes(group), die)))
        finally:
            os._exit(0)

    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = FORK.Pipe(duplex=False)
        processes.append(FORK.Process(target=run, args=(rank, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return [_result_of(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result_of(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


@pytest.fixture(params=["gloo", "local"])
def run_voters(request: pytest.FixtureRequest, tmp_path: Path) -> RunVoters:
    if request.param == "local":
        return run_local_voters
    return lambda size, function: run_gloo_voters(size, function, tmp_path / "rendezvous")


def ballot(*values: int) -> list[int]:
    return [*values, *[0] * (BALLOT_SIZE - len(values))]


def wait_for(pending: PendingVote) -> Result:
    return pending.poll(NEVER_S)


def test_every_rank_reads_the_smallest_of_every_figure(run_voters: RunVoters) -> None:
    cast = [ballot(3, -5, 7), ballot(4, -9, 7), ballot(2, 2**62, 7)]

    results = run_voters(3, lambda voter: wait_for(voter.votes.cast(cast[voter.rank])))

    assert results == [(Outcome.VALUE, ballot(2, -9, 7))] * 3


def test_many_votes_end_in_the_order_of_casting(run_voters: RunVoters) -> None:
    def vote(voter: Voter) -> list[int]:
        draw = random.Random(voter.rank)
        read = []
        for number in range(100):
            pending = voter.votes.cast(ballot(number, draw.randrange(1000)))
            outcome, reduced = wait_for(pending)
            assert (outcome, reduced[0]) == (Outcome.VALUE, number)
            read.append(reduced[1])
        return read

    results = run_voters(3, vote)

    draws = [random.Random(rank) for rank in range(3)]
    expected = [min(draw.randrange(1000) for draw in draws) for _ in range(100)]
    assert results == [expected] * 3


def test_vote_is_late_until_the_last_rank_has_cast_it(run_voters: RunVoters) -> None:
    others_found_it_late = FORK.Barrier(3)

    def vote(voter: Voter) -> list[Result]:
        read = []
        if voter.rank == 2:
            others_found_it_late.wait()
        pending = voter.votes.cast(ballot(voter.rank + 5))
        if voter.rank != 2:
            read = [pending.poll(0.0), pending.poll(0.05)]
            others_found_it_late.wait()
        return [*read, wait_for(pending), wait_for(pending)]

    results = run_voters(3, vote)

    late, value = (Outcome.LATE, []), (Outcome.VALUE, ballot(5))
    assert results == [[late, late, value, value]] * 2 + [[value, value]]


@pytest.mark.system
def test_vote_that_ends_at_its_deadline_is_never_broken(
    run_voters: RunVoters,
) -> None:
    # A time-out and a failure look alike to gloo's caller. Rank 1 casts about when rank 0 gives up.
    def vote(voter: Voter) -> set[Outcome]:
        draw, seen = random.Random(voter.rank), set()
        for _ in range(400):
            if voter.rank == 1:
                until = time.perf_counter() + draw.uniform(0.0007, 0.0013)
                while time.perf_counter() < until:
                    pass
            pending = voter.votes.cast(ballot(1))
            outcome = Outcome.LATE
            while outcome is Outcome.LATE:
                outcome, _ = pending.poll(0.001 if voter.rank == 0 else NEVER_S)
                seen.add(outcome)
        return seen

    results = run_voters(2, vote)

    assert not any(Outcome.BROKEN in seen for seen in results)


def test_dead_rank_breaks_the_vote_that_it_has_not_cast(run_voters: RunVoters) -> None:
    def vote(voter: Voter) -> list[Outcome] | None:
        first = wait_for(voter.votes.cast(ballot(1)))[0]
        if voter.rank == 2:
            voter.die()
            return None
        pending = voter.votes.cast(ballot(2))
        return [first, wait_for(pending)[0], pending.poll(0.0)[0]]

    *survivors, dead = run_voters(3, vote)

    assert survivors == [[Outcome.VALUE, Outcome.BROKEN, Outcome.BROKEN]] * 2
    assert dead is None


def test_vote_cast_after_a_death_is_broken_too(run_voters: RunVoters) -> None:
    def vote(voter: Voter) -> list[Outcome] | None:
        if voter.rank == 1:
            voter.die()
            return None
        return [wait_for(voter.votes.cast(ballot(number)))[0] for number in range(3)]

    survivor, _ = run_voters(2, vote)

    assert survivor == [Outcome.BROKEN] * 3


# -- pulls

# Ranks 0 and 1 share a host; rank 2 is on another.
TOPOLOGY = Topology(
    node_of_rank=np.array([0, 0, 0]), slots_of_rank=np.array([2, 3, 2]), host_of_rank=[0, 0, 1]
)


@dataclass
class Pulling:
    """Rank 0 with its sources; rank 1 is its peer, here or in another process."""

    sources: WeightSources
    bank: ExpertBank
    write_at_peer: Callable[[int, int, int], object]  # layer, slot, the byte to fill it with

    def at_peer(self, slot: int) -> Place:
        """A slot of rank 1, the way it is read from here."""
        return Place(Source.PEER, 1, slot)

    def pull(self, record: Record, place: Place) -> torch.Tensor:
        """A whole record, in three chunks."""
        into = torch.zeros(self.bank.schema.record_bytes, dtype=torch.uint8)
        for offset in range(0, len(into), 2000):
            part = into[offset : offset + 2000]
            assert self.sources.pull(record, place, offset, part).is_complete()
        return into


@contextmanager
def peer_process(
    schema: ExpertSchema,
) -> Iterator[tuple[str, Callable[[int, int, int], object]]]:
    """Rank 1 as a process: the handle of its bank, and a way to have it write a slot."""
    ours, theirs = FORK.Pipe()

    def serve() -> None:
        bank = ExpertBank(schema, 2, 3, num_staging=4)
        theirs.send(bank.handle)
        while True:
            layer, slot, byte = theirs.recv()
            bank.live(layer, slot).fill_(byte)
            theirs.send("written")

    def write(layer: int, slot: int, byte: int) -> object:
        ours.send((layer, slot, byte))
        return _result_of(ours)

    process = FORK.Process(target=serve, daemon=True)
    process.start()
    yield _result_of(ours), write
    process.kill()
    process.join()


@pytest.fixture(params=["shared memory", "local"])
def pulling(
    request: pytest.FixtureRequest,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    small_checkpoint: Checkpoint,
) -> Iterator[Pulling]:
    mine = ExpertBank(small_schema, 2, 2, num_staging=4)
    if request.param == "local":
        peers = [ExpertBank(small_schema, 2, slots, num_staging=4) for slots in (3, 2)]
        records = {(1, 6): repacked(small_checkpoint, small_schema, (1, 6))}
        slots = local_slots(TOPOLOGY, 0, [mine, *peers])
        sources = WeightSources(slots, LocalHost(records))
        yield Pulling(sources, mine, lambda *where: peers[0].live(*where[:2]).fill_(where[2]))
        return
    address = HostCacheAddress(f"test-{os.getpid()}-pull", os.urandom(16))
    host_cache = HostCacheServer.of_checkpoint(address, small_checkpoint, small_model, small_schema)
    reader = HostCacheClient(address, 8, small_schema.record_bytes, deadline_s=NEVER_S)
    with peer_process(small_schema) as (handle, write):
        # Rank 2 is on another host: its handle means nothing here and must not be opened.
        handles = {0: mine.handle, 1: handle, 2: "/proc/1/fd/none"}
        slots = MappedSlots(0, mine, map_peers(0, TOPOLOGY, mine, handles.__getitem__))
        yield Pulling(WeightSources(slots, reader), mine, write)
    reader.close()
    host_cache.close()


def repacked(checkpoint: Checkpoint, schema: ExpertSchema, record: Record) -> torch.Tensor:
    into = torch.zeros(schema.record_bytes, dtype=torch.uint8)
    checkpoint.repack(*record, schema, into)
    return into


def test_slot_of_the_same_rank_is_copied(pulling: Pulling) -> None:
    pulling.bank.live(1, 1).fill_(9)

    assert (pulling.pull((1, 0), Place(Source.SAME_RANK, 0, 1)) == 9).all()


def test_peer_s_slot_is_read_as_it_is_at_that_moment(pulling: Pulling) -> None:
    last_of_three = pulling.at_peer(2)
    for byte in (7, 8):
        pulling.write_at_peer(0, 2, byte)
        assert (pulling.pull((0, 3), last_of_three) == byte).all()

    assert not pulling.pull((1, 3), last_of_three).any()  # another layer


def test_unreachable_peer_is_an_error_with_a_reason(pulling: Pulling) -> None:
    assert pulling.sources.readable == {0, 1}

    with pytest.raises(MigrationError, match="layer 0 expert 3: rank 2 cannot be read by this"):
        pulling.pull((0, 3), Place(Source.PEER, 2, 0))


def test_record_is_preloaded_from_disk_once_and_then_copied(
    pulling: Pulling, small_checkpoint: Checkpoint, small_schema: ExpertSchema
) -> None:
    host = pulling.sources.host
    loaded = [host.lease([(1, 6)], deadline_s=NEVER_S) for _ in range(2)]

    assert loaded == [small_schema.record_bytes, 0]
    assert torch.equal(pulling.pull((1, 6), HOST), repacked(small_checkpoint, small_schema, (1, 6)))


def test_record_that_is_not_on_disk_is_named(pulling: Pulling) -> None:
    with pytest.raises(MigrationError, match=r"expert.*9"):
        pulling.sources.host.lease([(1, 9)], deadline_s=NEVER_S)


def test_slots_of_a_dead_peer_stay_readable_where_attached(small_schema: ExpertSchema) -> None:
    mine = ExpertBank(small_schema, 2, 2, num_staging=4)
    into = torch.zeros(small_schema.record_bytes, dtype=torch.uint8)
    with peer_process(small_schema) as (handle, write):
        write(0, 0, 5)
        peer = PeerBank(handle, mine, 3)

    peer.read(0, 0, into)  # rank 1 is dead now

    assert (into == 5).all()
    with pytest.raises(MigrationError, match=f"arena {handle} cannot be attached, is its owner"):
        PeerBank(handle, mine, 3)


def test_peer_of_another_size_is_refused(small_schema: ExpertSchema) -> None:
    mine, peer = (ExpertBank(small_schema, 2, 2, num_staging=n) for n in (4, 5))
    size = small_schema.record_bytes

    with pytest.raises(MigrationError, match=f"has {9 * size} bytes, expected {8 * size}"):
        PeerBank(peer.handle, mine, 2)


def test_slots_are_read_of_a_peer_s_memory_that_is_mapped_already(
    small_schema: ExpertSchema,
) -> None:
    mine, other = (ExpertBank(small_schema, 2, slots, num_staging=1) for slots in (2, 3))
    for layer in range(2):
        for slot in range(3):
            other.live(layer, slot).fill_(10 * layer + slot)
    into = torch.zeros(small_schema.record_bytes // 2, dtype=torch.uint8)

    peers = map_peers(0, TOPOLOGY, mine, {1: other.arena.bytes}.__getitem__)
    slots = MappedSlots(0, mine, peers)
    slots.read(1, Place(Source.PEER, 1, 2), len(into), into)

    assert (into == 12).all()
    with pytest.raises(MigrationError, match=r"layer 1 slot 2 of rank 1 cannot be read: .*size"):
        slots.read(1, Place(Source.PEER, 1, 2), len(into) + 1, into)


def test_peer_slots_are_mapped_read_only(small_schema: ExpertSchema) -> None:
    bank = ExpertBank(small_schema, 1, 1, num_staging=0)

    attached = attach(bank.handle, small_schema.record_bytes)

    with pytest.raises(ValueError, match="read-only"):
        attached[0] = 1


# -- digests


def agreeing(rank: int, mine: dict[Record, tuple[int, int]]) -> list[list[list[int]]] | str:
    group = dist.group.WORLD
    assert group is not None
    try:
        votes = GlooVotes(group)
        table: list[list[list[int]]] = agree_on_digests(
            table_of(mine, 1, 3), votes, deadline_s=NEVER_S
        ).tolist()
    except (MigrationError, RankError) as exc:
        return str(exc)
    return table


def test_all_ranks_get_one_table_of_digests(run_ranks: RunRanks) -> None:
    mine = [{(0, 0): (4, -2), (0, 1): (5, 2**62)}, {(0, 1): (5, 2**62), (0, 2): (-6, 1)}]

    tables = run_ranks(2, lambda rank: agreeing(rank, mine[rank]))

    assert tables == [[[[4, -2], [5, 2**62], [-6, 1]]]] * 2


@pytest.mark.parametrize("other", [(5, 3), (4, 2)])
def test_replicas_of_different_bytes_are_refused_on_every_rank(
    run_ranks: RunRanks, other: tuple[int, int]
) -> None:
    mine = [{(0, 0): (1, 1), (0, 1): (5, 2)}, {(0, 1): other, (0, 2): (1, 1)}, {}]

    told = run_ranks(3, lambda rank: agreeing(rank, mine[rank]))

    refusal = "layer 0 expert 1: ranks hold different bytes for it"
    assert all(str(sentence).startswith(refusal) for sentence in told)


def test_rank_death_during_the_digest_agreement_is_an_error(run_ranks: RunRanks) -> None:
    def agree(rank: int) -> object:
        dist.barrier()  # it dies among ranks that are connected
        return "dead" if rank == 1 else agreeing(rank, {})

    told, _ = run_ranks(2, agree)

    assert told.startswith("a rank died or timed out during the ")
