"""SIGKILL of a rank at a random moment of a migration: real processes, real gloo, a real store.

The victim counts what its journal is told of and kills itself at a drawn note, so it dies in any
state of the phase machine, on any of its threads, with locks held. Then a start of all ranks must
serve what the store names.

Ranks are forked from a process that has no other thread which could hold a lock, and only then is
their rendezvous made: its server looks up the name of each caller, and a process that was forked in
the middle of that finds the C library's resolver locked for ever (seen: 1 start in 20).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import BrokenGroup, RankError, StaleGeneration
from eplb.migration.build import Pace, build_migration
from eplb.migration.recovery import Recovery
from rebalance.assembly.config import RankConfig
from rebalance.assembly.rank import make_slots
from rebalance.assembly.survivors import Stages, join_survivors
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.protocol.journal import Journal
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.recovery import Deadlines, recover
from rebalance.weights.sources import WeightSources
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema
from runtime.group import Rendezvous, reach
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore
from tests.support.agent_group import digests_of, held_in, records_of
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalHost, local_slots
from tests.support.processes import wait_until_watched
from tests.support.stores import sqlite_store

FORK = multiprocessing.get_context("fork")
NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 3, 4, 4
FAR_OFF = Deadlines(reports_s=NEVER_S, store_s=NEVER_S)
MOST_NOTES = 60  # of two migrations, about
SILENCE_S = 5.0  # of a rank in the survivors' group
SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
RECORDS = records_of(SCHEMA, NUM_LAYERS, NUM_EXPERTS)
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
ONE = Placement(np.tile([0, 1, 2, 1, 0, 3, 2, 3, 0, 3, 2, 1], (NUM_LAYERS, 1)), NUM_EXPERTS)
OTHER = Placement(np.tile([0, 1, 3, 1, 2, 3, 2, 0, 1, 3, 2, 0], (NUM_LAYERS, 1)), NUM_EXPERTS)


class Tokens:
    """The exchange of tokens: a collective in every step, in which a death shows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.steps = group, 0

    def exchange(self, agent: Rank) -> None:
        self.steps += 1
        given, received = torch.ones(NUM_RANKS), torch.zeros(NUM_RANKS)
        work = dist.all_to_all_single(received, given, group=self._group, async_op=True)
        assert work is not None
        agent.wait_for_exchange(work)


class Sink:
    """Takes samples and reports, and keeps none."""

    def offer(self, sample: LoadSample) -> bool:
        return True

    def state(self, state: RankState) -> None:
        return None


class Fate:
    """A journal that kills its process at one of the notes that it is told to take."""

    def __init__(self, journal: Journal, dies_at: int) -> None:
        self._journal, self._left = journal, dies_at

    def note(self, what: str, where: tuple[int, int, int], detail: Mapping[str, Any]) -> None:
        self._journal.note(what, where, detail)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Survived:
    """What a rank says at its end."""

    record: Recovery | None  # None: it halted with all others
    placement: tuple[int, str]  # generation, hash
    held: list[list[int]]  # [L][C] experts, by the bytes in the live slots


@dataclass
class Ranks:
    """One start of four ranks, forked, over banks in memory that they share."""

    store: Path
    run: str
    banks: list[ExpertBank]
    dies_at: dict[int, int]  # notes until its death, by rank
    dies_agreed: int | None = None  # a rank that dies once it has agreed with the other survivors
    stops_formed: int | None = None  # a rank that stops before its first pass in the new group

    def __enter__(self) -> Ranks:
        self.processes, self.pipes, self.rendezvous = [], [], Rendezvous()
        self.folder.mkdir()
        for rank in range(NUM_RANKS):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=self._live, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def folder(self) -> Path:
        """Of the journals."""
        return self.store.with_suffix(f".{self.run}")

    def _live(self, rank: int, pipe: Connection) -> NoReturn:
        logging.disable(logging.CRITICAL)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            pipe.send(self._serve(rank, pipe))
        except BaseException as exc:
            pipe.send(repr(exc))
        finally:
            os._exit(0)

    def _serve(self, rank: int, pipe: Connection) -> Survived | str:
        timeout = timedelta(seconds=NEVER_S)
        rendezvous = reach(self.rendezvous.handle, NEVER_S)
        prefixed = PrefixStore(self.run, rendezvous)
        dist.init_process_group(
            "gloo", store=prefixed, rank=rank, world_size=NUM_RANKS, timeout=timeout
        )
        votes = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(votes, dist.ProcessGroup)
        assert dist.group.WORLD is not None
        tokens = Tokens(dist.group.WORLD)
        store = sqlite_store(self.store, "test")
        agent = self._agent(rank, store, GlooVotes(votes), tokens)
        agent.start()
        threading.Thread(target=lambda: (pipe.recv(), agent.request_halt()), daemon=True).start()
        record = None
        try:
            while agent.step():
                tokens.exchange(agent)
        except BrokenGroup:
            if rank == self.dies_agreed:
                recover(agent, store, deadlines=FAR_OFF)
                os.kill(os.getpid(), signal.SIGKILL)
            record, group = join_survivors(agent, Stages(), deadline_s=600.0)
            if self.stops_formed is not None:
                return self._stop_formed(rank, group)
            group.votes.close()
        agent.leave()
        placement = agent.placement
        return Survived(
            record, (placement.generation, placement.hash), held_in(self.banks[rank], NUM_EXPERTS)
        )

    def _stop_formed(self, rank: int, group: Group) -> str:
        """Stop one rank, while the others wait for it before they serve; why they cease to."""
        assert self.stops_formed is not None
        wait_until_watched(group.votes._liveness)
        pids = dict(group.gather(os.getpid()))
        if rank == self.stops_formed:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            group.gather("")
        except RankError as exc:
            os.kill(pids[self.stops_formed], signal.SIGKILL)
            return str(exc)
        return "every rank came"

    def _agent(self, rank: int, store: StateStore, votes: GlooVotes, tokens: Tokens) -> Rank:
        committed = store.committed()
        assert committed is not None
        placement, bank = committed.placement, self.banks[rank]
        mine = placement.slot_to_expert[:, TOPOLOGY.slots_on(rank)].tolist()
        for layer, slots in enumerate(mine):
            for slot, expert in enumerate(slots):
                bank.live(layer, slot).copy_(RECORDS[layer, expert])
        dist.barrier()  # every bank is filled before anybody reads a peer's
        agent = Rank(
            RankConfig(
                "test",
                4,
                1,
                vote_deadline_s=NEVER_S,
                plan_deadline_s=NEVER_S,
                silence_s=SILENCE_S,
            ),
            make_slots(rank, TOPOLOGY, bank, digests_of(RECORDS), placement),
            SlotCounter(NUM_LAYERS, bank.num_slots),
            store,
            Sink(),
            passes=tokens,
            journal=Fate(Journal(self.folder, self.run, rank), self.dies_at.get(rank, 0)),
        )
        sources = WeightSources(local_slots(TOPOLOGY, rank, self.banks), LocalHost(RECORDS))
        group = Group(rank, self.run, TOPOLOGY, votes, membership=store.epoch())
        agent.enter(group, placement, sources)
        return agent


def publish_next(store: StateStore) -> None:
    """Offer a migration to the other of the two placements, layer by layer, unless one is open."""
    committed = store.committed()
    assert committed is not None
    if store.published() is not None:
        return
    base = committed.placement
    target = ONE if base.hash == OTHER.hash else OTHER
    pace, plan_id = Pace(staging_experts=2), store.next_plan_id()
    try:
        store.publish(build_migration(base, target, TOPOLOGY, plan_id=plan_id, pace=pace))
    except StaleGeneration:
        return  # something was committed in between


def drive(store: StateStore, ranks: Ranks, until_generation: int | None) -> list[Any]:
    """Publish migrations until every rank has said its last; None of one that was killed."""
    results: dict[int, Any] = {}
    pipes = ranks.pipes
    version, is_halting = -1, False
    while len(results) < NUM_RANKS:
        committed = store.committed()
        assert committed is not None
        is_reached = until_generation is not None and (
            committed.placement.generation >= until_generation
        )
        if is_reached and not is_halting:
            is_halting = True
            pipes[0].send("halt")
        if not is_halting and not results:
            publish_next(store)
        for rank in set(range(NUM_RANKS)) - results.keys():
            if pipes[rank].poll():
                try:
                    results[rank] = pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    results[rank] = None
        version = store.wait(version, 0.05)
    return [results[rank] for rank in range(NUM_RANKS)]


def check_survivors(store: StateStore, results: list[Any], victim: int) -> None:
    survivors = [rank for rank in range(NUM_RANKS) if rank != victim]
    assert results[victim] is None, results[victim]
    record, committed = store.recovery(), store.committed()
    assert record is not None
    assert committed is not None
    assert record.survivors == tuple(survivors)
    assert record.reason == f"rank {victim} died or cannot be reached"
    placement = committed.placement
    assert placement.generation == record.generation
    for rank in survivors:
        assert isinstance(results[rank], Survived), results[rank]
        assert results[rank].record == record
        assert results[rank].placement == (placement.generation, placement.hash)
        mine = placement.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
        assert results[rank].held == mine.tolist()


def serve(ranks: Ranks, until_generation: int | None = None) -> list[Any]:
    """Let ranks live to their end; what each said last."""
    # The store after the ranks: no connection to it is ever forked.
    with ranks, closing(sqlite_store(ranks.store, "test")) as store:
        return drive(store, ranks, until_generation)


def live_and_die(folder: Path, seed: int) -> Recovery:
    """Let a rank die, survivors recover, and all ranks start again; return the record."""
    draw = random.Random(seed)
    victim, dies_at = draw.randrange(NUM_RANKS), draw.randint(2, MOST_NOTES)
    path = folder / f"store-{seed}.sqlite"
    banks = [ExpertBank(SCHEMA, NUM_LAYERS, 3, num_staging=2) for _ in range(NUM_RANKS)]
    with closing(sqlite_store(path, "test")) as store:
        store.commit(ONE, expected=None, reason="start")
    results = serve(Ranks(path, "first", banks, {victim: dies_at}))
    with closing(sqlite_store(path, "test")) as store:
        check_survivors(store, results, victim)
        record, committed = store.recovery(), store.committed()
        assert record is not None
        assert committed is not None
        if (left_open := store.published()) is not None:
            store.withdraw(left_open.plan_id, outcome="rejected", reason="its run has ended")
    results = serve(Ranks(path, "again", banks, {}), committed.placement.generation + 1)
    with closing(sqlite_store(path, "test")) as store:
        committed = store.committed()
        assert committed is not None
    for rank, one in enumerate(results):
        assert isinstance(one, Survived), one
        assert one.record is None
        assert one.placement == (committed.placement.generation, committed.placement.hash)
        mine = committed.placement.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
        assert one.held == mine.tolist()
    return record


@pytest.mark.system
@pytest.mark.parametrize("seed", [1, 3])
def test_survivors_of_a_kill_agree_and_a_start_serves_what_they_held(
    tmp_path: Path, seed: int
) -> None:
    record = live_and_die(tmp_path, seed)

    assert record.membership == 1


@pytest.mark.system
def test_survivor_that_dies_before_the_group_is_formed_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    banks = [ExpertBank(SCHEMA, NUM_LAYERS, 3, num_staging=2) for _ in range(NUM_RANKS)]
    with closing(sqlite_store(path, "test")) as store:
        store.commit(ONE, expected=None, reason="start")

    found = serve(Ranks(path, "first", banks, {1: 20}, dies_agreed=2))

    assert (found[1], found[2]) == (None, None)
    for rank in (0, 3):
        assert isinstance(found[rank], Survived), found[rank]
        record = found[rank].record
        assert record is not None
        assert (record.membership, record.survivors) == (2, (0, 3))
    assert found[0].placement == found[3].placement


@pytest.mark.system
def test_survivor_that_stops_before_its_first_pass_is_known_by_its_silence(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    banks = [ExpertBank(SCHEMA, NUM_LAYERS, 3, num_staging=2) for _ in range(NUM_RANKS)]
    with closing(sqlite_store(path, "test")) as store:
        store.commit(ONE, expected=None, reason="start")

    found = serve(Ranks(path, "first", banks, {1: 20}, stops_formed=2))

    assert (found[1], found[2]) == (None, None)
    for rank in (0, 3):
        assert found[rank] == f"rank {rank}: rank 2 died before all served on"


@pytest.mark.slow
def test_survivors_of_forty_kills_agree(tmp_path: Path) -> None:
    records = [live_and_die(tmp_path, seed) for seed in range(100, 140)]

    # The kills were spread over the states: some left a mix of layers, some nothing, some a whole.
    assert {record.applied for record in records} >= {0, 1, 2}
