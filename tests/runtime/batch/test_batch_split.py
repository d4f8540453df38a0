"""Replicas chosen by the batch's counts: right answers, exact shares, whatever the ranks send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from runtime.batch.counts import all_gather_counts
from runtime.batch.split import BatchSplit
from runtime.batch.split_rule import SplitRule, split_batch, split_layout
from runtime.routing import RoutingTable

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]

# Three ranks of three slots, six experts: 0 is on all ranks, 1 on two.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=3)
PLACEMENT = Placement(np.array([[0, 1, 2, 0, 1, 3, 0, 4, 5]]), num_experts=6)
SWAPPED = Placement(np.array([[0, 1, 2, 5, 1, 3, 5, 4, 0]]), num_experts=6)
TOKENS, TOP_K = 40, 2
SHARE = np.array([0.4, 0.3, 0.1, 0.1, 0.05, 0.05])


def routed(rank: int, step: int) -> torch.Tensor:
    """[T, K] experts of one rank, rank 2 without tokens and with padding among those of rank 1."""
    rng = np.random.default_rng(10 * step + rank)
    chosen = [rng.choice(6, TOP_K, replace=False, p=SHARE) for _ in range(TOKENS)]
    experts = torch.from_numpy(np.stack(chosen))
    if rank == 1:
        experts[7] = -1
    return experts[:0] if rank == 2 else experts


def new_split(table: RoutingTable, rank: int, rule: SplitRule | None = None) -> BatchSplit:
    assert dist.group.WORLD is not None
    return BatchSplit(
        table,
        all_gather_counts(dist.group.WORLD),
        source=rank,
        num_sources=3,
        max_pairs=TOKENS * TOP_K,
        rule=rule,
    )


def rank_load_by_reference(placement: Placement, counts: np.ndarray[Any, Any]) -> float:
    layout = split_layout(
        placement.expert_to_slots[0],
        placement.slot_share[0],
        TOPOLOGY.rank_of_slot,
        num_split=3,
        ways=8,
    )
    return float(split_batch(counts, layout).rank_load.max())


def test_ranks_split_one_batch_exactly_before_and_after_a_swap(run_ranks: RunRanks) -> None:
    def serve(rank: int) -> list[list[int]]:
        table = RoutingTable(PLACEMENT, max_replicas=3, topology=TOPOLOGY)
        split = new_split(table, rank)
        chosen = [split.slots(0, routed(rank, 0)).flatten().tolist()]
        table.load(SWAPPED, [0])
        chosen.append(split.slots(0, routed(rank, 1)).flatten().tolist())
        return chosen

    results = run_ranks(3, serve)

    for step, placement in enumerate((PLACEMENT, SWAPPED)):
        received, counts = np.zeros(9, int), np.zeros(6, int)
        for rank in range(3):
            wanted = routed(rank, step).flatten().tolist()
            for expert, slot in zip(wanted, results[rank][step], strict=True):
                assert (slot == EMPTY) == (expert < 0)
                if expert >= 0:
                    assert placement.slot_to_expert[0, slot] == expert
                    received[slot] += 1
                    counts[expert] += 1
        load = received.reshape(3, 3).sum(axis=1)
        # Boundaries between replicas are rounded to tokens: one for each split expert at most.
        assert load.max() <= rank_load_by_reference(placement, counts) + 2


def test_id_that_is_no_expert_is_counted_and_gets_no_slot(run_ranks: RunRanks) -> None:
    def serve(rank: int) -> tuple[list[int], int]:
        table = RoutingTable(PLACEMENT, max_replicas=3, topology=TOPOLOGY)
        chosen = new_split(table, rank).slots(0, torch.tensor([[0, 6], [-1, 5]]))
        return chosen.flatten().tolist(), int(table.strays)

    for chosen, strays in run_ranks(3, serve):
        assert chosen[1:] == [EMPTY, EMPTY, 8]
        assert chosen[0] in (0, 3, 6)
        assert strays == 1


def test_table_without_a_topology_has_neither_a_split_nor_extra_slots() -> None:
    table = RoutingTable(PLACEMENT, max_replicas=3)

    with pytest.raises(ConfigError, match="no topology"):
        BatchSplit(table, lambda own, to: None, source=0, num_sources=1, max_pairs=8)
    with pytest.raises(ConfigError, match="1 extra slots and no topology"):
        RoutingTable(PLACEMENT, max_replicas=3, extra_slots=1)


def test_table_with_a_topology_routes_as_one_without() -> None:
    with_split = RoutingTable(PLACEMENT, max_replicas=3, topology=TOPOLOGY)
    without = RoutingTable(PLACEMENT, max_replicas=3)

    assert torch.equal(with_split.slots, without.slots)
    assert torch.equal(with_split.cumulative, without.cumulative)
    with_split.load(SWAPPED, [0])
    without.load(SWAPPED, [0])
    experts = routed(0, 3)
    assert torch.equal(with_split.choose(0, experts, salt=5), without.choose(0, experts, salt=5))


def test_table_with_extra_slots_numbers_slots_as_the_wider_dispatch_does() -> None:
    wide = RoutingTable(PLACEMENT, max_replicas=3, topology=TOPOLOGY, extra_slots=2)
    plain = RoutingTable(PLACEMENT, max_replicas=3, topology=TOPOLOGY)
    assert TOPOLOGY.widened(2).num_slots == 15
    experts = torch.cat([routed(0, 1), torch.tensor([[-1, 4]])])

    chosen = wide.choose(0, experts, salt=3)

    slot = plain.choose(0, experts, salt=3)
    assert torch.equal(chosen, torch.where(slot < 0, slot, slot + 2 * (slot // 3)))
    assert torch.equal(
        wide.split["slot"],
        torch.where(
            plain.split["slot"] < 0, -1, plain.split["slot"] // 3 * 5 + plain.split["slot"] % 3
        ),
    )


def test_layer_whose_batches_gain_nothing_leaves_out_its_exchange_on_every_rank(
    run_ranks: RunRanks,
) -> None:
    def serve(rank: int) -> list[bool]:
        table = RoutingTable(PLACEMENT, max_replicas=3, topology=TOPOLOGY)
        split = new_split(table, rank, SplitRule(worth=1e6, num_tried=2, num_off=3))
        seen = []
        for step in range(10):
            experts = routed(rank, step)
            seen.append(split.is_on(0, experts))
            if seen[-1]:
                split.slots(0, experts)
        return seen

    tried, left_out = [True] * 2, [False] * 3
    for seen in run_ranks(3, serve):
        assert seen == tried + left_out + tried + left_out
