"""Flip mode: real agents in one process, and a demo, that never copy into what serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from eplb.core.placement import EMPTY, Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.build import Migration, Pace
from rebalance.types import Record
from rebalance.weights.sources import Place, WeightSources
from runtime.experts import ExpertBank, ExpertSchema
from runtime.streams import Completion
from telemetry.state.live import Control
from tests.support.agent_group import AgentGroup, digests_of, record_of
from tests.support.local_group import LocalHost, local_slots

NUM_LAYERS, NUM_EXPERTS = 2, 6
SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
FLIP = Pace(staging_experts=0, mode="flip", spare_slots=1)
# One host of three ranks; two experts on each, and one spare.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=3)
START = Placement(np.tile([0, 1, EMPTY, 2, 3, EMPTY, 4, 5, EMPTY], (NUM_LAYERS, 1)), NUM_EXPERTS)
# Every expert goes to the next rank: two newcomers for one spare.
ROUND = Placement(np.tile([4, 5, EMPTY, 0, 1, EMPTY, 2, 3, EMPTY], (NUM_LAYERS, 1)), NUM_EXPERTS)


RECORDS = {
    (layer, expert): record_of(SCHEMA, layer, expert, NUM_EXPERTS)
    for layer in range(NUM_LAYERS)
    for expert in range(NUM_EXPERTS)
}


class WatchedSources(WeightSources):
    """Looks, at each pull, whether a slot that some rank routes to is written."""

    group: Group
    rank = 0
    is_torn = False  # leaves half of a record behind, and fails

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Copy, and look before and after."""
        self.group.check_is_empty(self.rank, into)
        if self.is_torn:
            into[: len(into) // 2].fill_(255)
            raise MigrationError("the link broke in the middle of a record")
        landed = super().pull(record, place, offset, into)
        self.group.check_is_empty(self.rank, into)
        return landed


class Group(AgentGroup):
    """Three ranks with a spare each; after every step, what is routed to is right."""

    def __init__(self) -> None:
        super().__init__(START, TOPOLOGY)
        self.sources: list[WatchedSources] = []
        self.routed_when_written: list[tuple[int, int]] = []

    def check_is_empty(self, rank: int, into: torch.Tensor) -> None:
        """Find the slot that ``into`` lies in, and whether any rank routes to it."""
        bank, first_slot = self.banks[rank], int(TOPOLOGY.first_slot[rank])
        from_start = into.data_ptr() - bank.live(0, 0).data_ptr()
        layer, slot = divmod(from_start // SCHEMA.record_bytes, bank.num_slots)
        for agent in self.agents:
            if agent.placement.slot_to_expert[layer, first_slot + slot] != EMPTY:
                self.routed_when_written.append((layer, first_slot + slot))

    def step(self, ranks: Sequence[int] | None = None) -> list[bool]:
        going_on = super().step(ranks)
        assert all(going_on)
        assert len({agent.placement.hash for agent in self.agents}) == 1
        check_fits(self.placement, TOPOLOGY)
        self.check_bytes()
        return going_on

    def check_bytes(self) -> None:
        """Every slot that the table routes to holds the expert that it routes for."""
        for table in self.tables:
            routes = torch.argwhere(table.slots != EMPTY).tolist()
            assert len(routes) == NUM_LAYERS * NUM_EXPERTS
            for layer, expert, nth in routes:
                slot = int(table.slots[layer, expert, nth])
                rank = int(TOPOLOGY.rank_of_slot[slot])
                record = self.banks[rank].live(layer, slot - int(TOPOLOGY.first_slot[rank]))
                assert torch.equal(record, RECORDS[layer, expert])

    def publish(self, target: Placement, pace: Pace | None = None) -> Migration:
        return super().publish(target, pace or FLIP)


@pytest.fixture
def group() -> Iterator[Group]:
    made, digests = Group(), digests_of(RECORDS)
    made.banks += [ExpertBank(SCHEMA, NUM_LAYERS, 3, num_staging=0) for _ in range(3)]
    for rank in range(TOPOLOGY.num_ranks):
        made.fill(rank, RECORDS)
        slots = local_slots(TOPOLOGY, rank, made.banks)
        sources = WatchedSources(slots, LocalHost(RECORDS))
        sources.group, sources.rank = made, rank
        made.sources.append(sources)
        made.add(sources, digests)
    made.begin()
    yield made
    made.close()


def test_flip_serves_right_bytes_at_every_step(group: Group) -> None:
    migration = group.publish(ROUND)
    assert [txn.reads_after for txn in migration.transactions] == [0, 1]
    assert {move.layer for move in migration.transactions[1].moves} == {0, 1}
    seen = set()

    def is_committed() -> bool:
        seen.add(group.placement.hash)
        return group.generation() == 1

    group.step_until(is_committed)

    assert seen == {migration.placement_after(done).hash for done in range(3)}
    assert group.placement.hash == migration.target.hash
    assert group.routed_when_written == []
    assert group.agents[0].figures.experts_moved == 4


def test_spares_are_used_again_by_the_next_plan(group: Group) -> None:
    for generation, target in enumerate((ROUND, START, ROUND), start=1):
        group.publish(target)
        group.step_until(lambda reached=generation: group.generation() == reached)

    assert group.routed_when_written == []
    assert (group.placement.slot_to_expert == EMPTY).sum() == NUM_LAYERS * TOPOLOGY.num_ranks


def test_half_written_spares_stay_empty_after_an_abort(group: Group) -> None:
    group.sources[1].is_torn = True
    group.publish(ROUND)
    group.step_until(lambda: group.store.published() is None)

    assert group.placement.hash == START.hash
    assert group.generation() == 0

    group.sources[1].is_torn = False
    group.publish(ROUND)
    group.step_until(lambda: group.generation() == 1)

    assert group.routed_when_written == []


def test_plan_dropped_between_two_flips_leaves_every_rank_its_spares(group: Group) -> None:
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
    group.step_until(lambda: group.generation() == generation + 1)
    assert group.routed_when_written == []
