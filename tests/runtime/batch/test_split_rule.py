"""A batch's split reaches the optimum of its linear program on the replicas that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import linprog

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from runtime.batch.counts import all_gather_counts
from runtime.batch.split import BatchSplit
from runtime.batch.split_rule import (
    PLANNED,
    SplitLayout,
    SplitRule,
    SplitSwitch,
    split_batch,
    split_layout,
)
from runtime.routing import RoutingTable


def layout_of(placement: Placement, rank_of_slot: NDArray[np.int32], ways: int = 8) -> SplitLayout:
    return split_layout(
        placement.expert_to_slots[0],
        placement.slot_share[0],
        rank_of_slot,
        num_split=max(1, placement.num_slots - placement.num_experts),
        ways=ways,
    )


def drawn(rng: np.random.Generator) -> tuple[Placement, NDArray[np.int32]]:
    """Experts on ranks at random: hot ones on more, some twice on a rank, empty slots."""
    num_ranks, per_rank = int(rng.integers(2, 13)), int(rng.integers(2, 6))
    num_experts = int(rng.integers(2, num_ranks * per_rank))
    held = np.full(num_ranks * per_rank, EMPTY)
    slots = rng.permutation(len(held))
    held[slots[:num_experts]] = np.arange(num_experts)
    rest = slots[num_experts:]
    held[rest] = rng.choice(num_experts, len(rest), p=zipf(num_experts))
    held[rest[rng.random(len(rest)) < 0.1]] = EMPTY
    rank_of_slot = np.repeat(np.arange(num_ranks, dtype=np.int32), per_rank)
    return Placement(held[None], num_experts), rank_of_slot


def zipf(num_experts: int) -> NDArray[np.float64]:
    part: NDArray[np.float64] = 1.0 / np.arange(1, num_experts + 1)
    return part / part.sum()


def optimum(
    counts: NDArray[np.int64], held: NDArray[np.int32], rank_of: NDArray[np.int32]
) -> float:
    pairs = sorted({(e, r) for e, r in zip(held.tolist(), rank_of.tolist(), strict=True) if e >= 0})
    expert, rank = np.array(pairs).T
    columns = np.arange(len(pairs))
    on_rank = np.zeros((int(rank_of[-1]) + 1, len(pairs) + 1))
    on_rank[rank, columns], on_rank[:, -1] = 1, -1
    of_expert = np.zeros((len(counts), len(pairs) + 1))
    of_expert[expert, columns] = 1
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1
    found = linprog(cost, on_rank, np.zeros(len(on_rank)), of_expert, counts, method="highs")
    return float(found.fun)


FULL = SplitRule(rounds=12, least=0)


@pytest.mark.parametrize(("rule", "mean", "most"), [(FULL, 1.008, 1.05), (SplitRule(), 1.02, 1.15)])
def test_split_is_close_to_the_optimum_of_the_linear_program(
    rule: SplitRule, mean: float, most: float
) -> None:
    rng, gaps = np.random.default_rng(11), []
    for _ in range(60):
        placement, rank_of_slot = drawn(rng)
        counts = rng.multinomial(5000, rng.permutation(zipf(placement.num_experts)))
        layout = layout_of(placement, rank_of_slot, ways=16)
        made = split_batch(counts, layout, rule)

        split, used = made.tokens, layout.expert >= 0
        assert np.allclose(split[used].sum(axis=1), counts[layout.expert[used]])
        assert (split >= 0).all()
        load = made.rank_load
        assert load.sum() == pytest.approx(5000)
        gaps.append(load.max() / optimum(counts, placement.slot_to_expert[0], rank_of_slot))

    assert min(gaps) > 1 - 1e-6
    assert np.mean(gaps) < mean
    assert max(gaps) < most


def test_two_experts_that_share_a_rank_end_level() -> None:
    # Ranks 0, 1, 2 hold experts {0}, {0, 1}, {1}: 90 tokens are 30 on each rank.
    placement = Placement(np.array([[0, EMPTY, 0, 1, 1, EMPTY]]), num_experts=2)
    layout = layout_of(placement, np.array([0, 0, 1, 1, 2, 2], np.int32))
    counts = np.array([40, 50])

    load = split_batch(counts, layout, FULL).rank_load

    assert load == pytest.approx([30, 30, 30], rel=1e-2)
    assert layout.num_turns == 2  # they share rank 1


def test_second_replica_on_a_rank_gets_no_tokens() -> None:
    placement = Placement(np.array([[0, 0, 0, 1]]), num_experts=2)
    layout = layout_of(placement, np.array([0, 0, 1, 1], np.int32))

    assert layout.slot[0].tolist()[:2] == [0, 2]
    load = split_batch(np.array([10, 4]), layout, FULL).rank_load
    assert load == pytest.approx([7, 7], rel=1e-2)


def test_replica_without_a_share_gets_no_tokens() -> None:
    share = np.array([[1.0, 0.0, 1.0]])  # rank 1 is dead
    placement = Placement(np.array([[0, 0, 1]]), num_experts=2, slot_share=share)
    layout = layout_of(placement, np.array([0, 1, 2], np.int32))

    assert layout.expert.tolist() == [-1]
    assert layout.row.tolist() == [PLANNED, -1]
    load = split_batch(np.array([6, 3]), layout).rank_load
    assert load.tolist() == [6, 0, 3]


def test_expert_on_more_ranks_than_ways_keeps_its_planned_shares() -> None:
    share = np.array([[0.5, 0.25, 0.25, 1.0]])
    placement = Placement(np.array([[0, 0, 0, 1]]), num_experts=2, slot_share=share)
    layout = layout_of(placement, np.arange(4, dtype=np.int32), ways=2)

    assert layout.row.tolist() == [PLANNED, -1]
    load = split_batch(np.array([8, 1]), layout).rank_load
    assert load.tolist() == [4, 2, 2, 1]


def test_batch_without_tokens_is_split_into_nothing() -> None:
    placement = Placement(np.array([[0, 0]]), num_experts=1)
    layout = layout_of(placement, np.array([0, 1], np.int32))

    assert split_batch(np.array([0]), layout).tokens.tolist() == [[0.0] * 8]


def test_more_split_experts_than_rows_are_refused() -> None:
    placement = Placement(np.array([[0, 1, 0, 1]]), num_experts=2)

    with pytest.raises(ValueError, match="found more than 1 experts on several ranks"):
        split_layout(
            placement.expert_to_slots[0],
            placement.slot_share[0],
            np.array([0, 0, 1, 1]),
            num_split=1,
            ways=8,
        )


def test_way_gets_the_least_tokens_or_none() -> None:
    # Ranks 0 and 1 hold expert 0; rank 1 holds expert 1 besides.
    placement = Placement(np.array([[0, 2, 0, 1]]), num_experts=3)
    layout = layout_of(placement, np.array([0, 0, 1, 1], np.int32))
    counts = np.array([40, 50, 20])  # level would be 35 and 5 tokens of expert 0

    made = split_batch(counts, layout, SplitRule(least=16))

    assert made.tokens[0, :2].tolist() == [40, 0]
    assert made.rank_load.tolist() == [60, 50]
    assert made.saved == pytest.approx(70 - 60)  # planned: 20 tokens of expert 0 on either rank


def test_switch_is_off_after_batches_that_save_too_little_and_tries_again() -> None:
    rule = SplitRule(worth=100, num_tried=4, num_off=3)
    switch, seen = SplitSwitch(), []
    for saved in (500, 0, 0, 0, 0, 0, 0):  # the mean falls below 100 with the last
        switch = switch.after(saved, rule)
        seen.append(switch.is_on)
    assert seen == [True] * 6 + [False]
    for _ in range(3):
        switch = switch.after(0.0, rule)
    assert switch == SplitSwitch()
    for saved in (150, 90, 90, 110):
        switch = switch.after(saved, rule)
    assert switch.is_on


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


def test_table_without_a_topology_has_no_split() -> None:
    table = RoutingTable(PLACEMENT, max_replicas=3)

    with pytest.raises(ConfigError, match="no topology"):
        BatchSplit(table, lambda own, to: None, source=0, num_sources=1, max_pairs=8)


def test_table_with_a_topology_routes_as_one_without() -> None:
    with_split = RoutingTable(PLACEMENT, max_replicas=3, topology=TOPOLOGY)
    without = RoutingTable(PLACEMENT, max_replicas=3)

    assert torch.equal(with_split.slots, without.slots)
    assert torch.equal(with_split.cumulative, without.cumulative)
    with_split.load(SWAPPED, [0])
    without.load(SWAPPED, [0])
    experts = routed(0, 3)
    assert torch.equal(with_split.choose(0, experts, salt=5), without.choose(0, experts, salt=5))


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
