"""Flip mode: real agents over the shipped fakes, and a demo, that never copy into what serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.errors import MigrationError
from eplb.load import LoadSample
from eplb.migration import Migration, Pace, build_migration
from eplb.placement import EMPTY, Placement, check_fits
from eplb.topology import Topology
from rebalance.agent import RankAgent
from rebalance.links import LocalTransport
from rebalance.parts import AgentSettings, Links, RankParts
from rebalance.transport import LocalVotes, Place, Record
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from runtime.routing import RoutingTable
from runtime.streams import Completion
from telemetry import open_store
from telemetry.memory import MemoryStore
from telemetry.store import Control, LoadStore, RankState

DEADLINE_S = 20.0
NUM_LAYERS, NUM_EXPERTS = 2, 6
SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
FLIP = Pace(staging_experts=0, mode="flip", spare_slots=1)
# One host of three ranks; two experts on each, and one spare.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=3)
START = Placement(np.tile([0, 1, EMPTY, 2, 3, EMPTY, 4, 5, EMPTY], (NUM_LAYERS, 1)), NUM_EXPERTS)
# Every expert goes to the next rank: two newcomers for one spare.
ROUND = Placement(np.tile([4, 5, EMPTY, 0, 1, EMPTY, 2, 3, EMPTY], (NUM_LAYERS, 1)), NUM_EXPERTS)


class Clockwork:
    """A dispatcher's step counter without a dispatcher."""

    def __init__(self) -> None:
        self.steps = 0


class Sink:
    """Takes what the agent offers."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def offer(self, sample: LoadSample) -> bool:
        return True

    def state(self, state: RankState) -> None:
        self._store.report(state)


class WatchedTransport(LocalTransport):
    """Looks, at each pull, whether a slot that some rank routes to is written."""

    group: Group
    is_torn = False  # leaves half of a record behind, and fails

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Copy, and look before and after."""
        self.group.check_is_empty(self._rank, into)
        if self.is_torn:
            into[: len(into) // 2].fill_(255)
            raise MigrationError("the link broke in the middle of a record")
        landed = super().pull(record, place, offset, into)
        self.group.check_is_empty(self._rank, into)
        return landed


@dataclass
class Group:
    store: MemoryStore
    agents: list[RankAgent]
    banks: list[ExpertBank]
    clocks: list[Clockwork]
    transports: list[WatchedTransport]
    tables: list[RoutingTable]
    routed_when_written: list[tuple[int, int]]

    def check_is_empty(self, rank: int, into: torch.Tensor) -> None:
        """Find the slot that ``into`` lies in, and whether any rank routes to it."""
        bank, first_slot = self.banks[rank], int(TOPOLOGY.first_slot[rank])
        from_start = into.data_ptr() - bank.live(0, 0).data_ptr()
        layer, slot = divmod(from_start // SCHEMA.record_bytes, bank.num_slots)
        for agent in self.agents:
            if agent.placement.slot_to_expert[layer, first_slot + slot] != EMPTY:
                self.routed_when_written.append((layer, first_slot + slot))

    def step(self) -> None:
        for agent in self.agents:
            assert agent.step()
        for clock in self.clocks:
            clock.steps += 1
        assert len({agent.placement.hash for agent in self.agents}) == 1
        check_fits(self.placement, TOPOLOGY)
        self.check_bytes()

    def step_until(self, is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_reached():
            assert time.monotonic() < deadline, "the group did not get there"
            self.step()

    @property
    def placement(self) -> Placement:
        return self.agents[0].placement

    def check_bytes(self) -> None:
        """Every slot that the table routes to holds the expert that it routes for."""
        for table in self.tables:
            routes = torch.argwhere(table.slots != EMPTY).tolist()
            assert len(routes) == NUM_LAYERS * NUM_EXPERTS
            for layer, expert, nth in routes:
                slot = int(table.slots[layer, expert, nth])
                rank = int(TOPOLOGY.rank_of_slot[slot])
                record = self.banks[rank].live(layer, slot - int(TOPOLOGY.first_slot[rank]))
                assert torch.equal(record, record_of(layer, expert))

    def publish(self, target: Placement, pace: Pace = FLIP) -> Migration:
        plan_id = self.store.next_plan_id()
        migration = build_migration(self.placement, target, TOPOLOGY, plan_id=plan_id, pace=pace)
        self.store.publish(migration)
        return migration


def record_of(layer: int, expert: int) -> torch.Tensor:
    """Bytes that name the expert they stand for."""
    filled = torch.zeros(SCHEMA.record_bytes, dtype=torch.uint8)
    filled.view(torch.int32).fill_(1 + layer * NUM_EXPERTS + expert)
    return filled


@pytest.fixture
def group() -> Iterator[Group]:
    store, votes = MemoryStore("test"), LocalVotes(TOPOLOGY.num_ranks)
    store.commit(START, expected=None, reason="start")
    records = {(n, e): record_of(n, e) for n in range(NUM_LAYERS) for e in range(NUM_EXPERTS)}
    digests = torch.zeros((NUM_LAYERS, NUM_EXPERTS, 2), dtype=torch.int64)
    for (layer, expert), record in records.items():
        digests[layer, expert] = torch.tensor(digest(record))
    banks = [ExpertBank(SCHEMA, NUM_LAYERS, 3, num_staging=0) for _ in range(3)]
    made = Group(store, [], banks, [], [], [], [])
    settings = AgentSettings("test", "run", TOPOLOGY, sample_steps=4, vote_deadline_s=DEADLINE_S)
    for rank, bank in enumerate(banks):
        for layer, slot in np.ndindex(NUM_LAYERS, 2):
            bank.live(layer, slot).copy_(records[layer, 2 * rank + slot])
        transport = WatchedTransport(TOPOLOGY, rank, banks, records)
        transport.group = made
        clock, table = Clockwork(), RoutingTable(START, max_replicas=2)
        parts = RankParts(rank, bank, table, SlotCounter(NUM_LAYERS, 3), clock, digests)
        links = Links(votes.member(rank), transport, store, Sink(store))
        made.agents.append(RankAgent(settings, parts, links, START))
        made.clocks.append(clock)
        made.transports.append(transport)
        made.tables.append(table)
    for agent in made.agents:
        agent.start()
    yield made
    # At once: each waits for its watcher's turn to end.
    with ThreadPoolExecutor(len(made.agents)) as pool:
        list(pool.map(lambda agent: agent.close(), made.agents))


def committed_generation(group: Group) -> int:
    committed = group.store.committed()
    assert committed is not None
    return committed.placement.generation


def test_a_flip_serves_right_bytes_at_every_step(group: Group) -> None:
    migration = group.publish(ROUND)
    assert [txn.reads_after for txn in migration.transactions] == [0, 1]
    assert {move.layer for move in migration.transactions[1].moves} == {0, 1}
    seen = set()

    def is_committed() -> bool:
        seen.add(group.placement.hash)
        return committed_generation(group) == 1

    group.step_until(is_committed)

    assert seen == {migration.placement_after(done).hash for done in range(3)}
    assert group.placement.hash == migration.target.hash
    assert group.routed_when_written == []
    assert group.agents[0].figures.experts_moved == 4


def test_spares_are_used_again_by_the_next_plan(group: Group) -> None:
    for generation, target in enumerate((ROUND, START, ROUND), start=1):
        group.publish(target)
        group.step_until(lambda reached=generation: committed_generation(group) == reached)

    assert group.routed_when_written == []
    assert (group.placement.slot_to_expert == EMPTY).sum() == NUM_LAYERS * TOPOLOGY.num_ranks


def test_half_written_spares_stay_empty_after_an_abort(group: Group) -> None:
    group.transports[1].is_torn = True
    group.publish(ROUND)
    group.step_until(lambda: group.store.published() is None)

    assert group.placement.hash == START.hash
    assert committed_generation(group) == 0

    group.transports[1].is_torn = False
    group.publish(ROUND)
    group.step_until(lambda: committed_generation(group) == 1)

    assert group.routed_when_written == []


def test_a_plan_dropped_between_two_flips_leaves_every_rank_its_spares(group: Group) -> None:
    group.publish(ROUND, Pace(0, mode="flip", spare_slots=1, layers_per_transaction=1))
    group.step_until(lambda: group.placement.hash != START.hash)
    group.store.set_control(Control(movement=False), reason="stop")
    group.step_until(lambda: group.store.published() is None)

    committed = group.store.committed()
    assert committed is not None
    assert committed.placement.hash == group.placement.hash
    spares = (group.placement.slot_to_expert == EMPTY).reshape(NUM_LAYERS, 3, 3).sum(axis=2)
    assert (spares == 1).all()

    generation = committed.placement.generation
    group.store.set_control(Control(movement=True), reason="go on")
    group.publish(START)
    group.step_until(lambda: committed_generation(group) == generation + 1)
    assert group.routed_when_written == []


# -- the demo

ROOT = Path(__file__).resolve().parent.parent
TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "eplb"))

StartDemo = Callable[..., Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, start_demo: StartDemo) -> dict[str, Any]:
    """A demo with a spare on each rank, until it has rebalanced."""
    folder = tmp_path_factory.mktemp("flips")
    demo = start_demo(folder, "--serve", *TEXT, seconds=1, spare_slots=1)
    demo.sees("a commit", lambda store: store.committed().placement.generation >= 1)
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.ends() == 0, demo.told()
    assert demo.errors == ""
    return {"summary": demo.summary(), "folder": folder}


@pytest.mark.slow
def test_a_demo_with_spares_gives_right_answers(served: dict[str, Any]) -> None:
    summary = served["summary"]

    assert summary["slots"] == 12 + 4
    assert summary["rebalances"] >= 1
    assert summary["reference_checks"] > 0
    assert summary["reference_failures"] == 0
    moved = sum(summary["bytes_by_source"].get(name, 0) for name in ("same_rank", "peer", "host"))
    # More may have been staged than was swapped: a demo may end in mid-migration.
    assert moved >= summary["experts_moved"] * summary["expert_bytes"] > 0


def test_every_rank_of_a_demo_keeps_its_spares_in_every_placement(served: dict[str, Any]) -> None:
    def placements(store: LoadStore) -> list[Placement]:
        return [line.placement for line in store.placements(limit=1000)]

    path: Path = served["folder"] / "state" / "store.sqlite"
    with closing(open_store(path, "demo")) as store:
        found = placements(store)

    assert len(found) >= 2
    for placement in found:
        empty = placement.slot_to_expert == EMPTY
        assert (empty.reshape(len(empty), 4, 4).sum(axis=2) >= 1).all()
