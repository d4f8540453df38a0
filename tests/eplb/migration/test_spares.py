"""Spare slots: planned without them, reached through them, and never without an expert."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.core.placement import EMPTY, Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import PlacementError, TopologyError
from eplb.measure import rank_load
from eplb.migration.spares import compact, expand, steps_towards, take

THREE_SLOTS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
BASE = Placement(np.array([[0, EMPTY, 1, 2, 3, EMPTY]]), num_experts=4, generation=6)


def test_more_newcomers_than_spares_take_more_steps() -> None:
    target = Placement(np.array([[2, 3, 0, 1]]), num_experts=4)

    one = steps_towards(target, BASE, THREE_SLOTS, 1)[0]
    wide = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=4)
    roomy = Placement(np.array([[0, 1, EMPTY, EMPTY, 2, 3, EMPTY, EMPTY]]), num_experts=4)
    two = steps_towards(target, roomy, wide, 2)[0]

    assert [len(step.fills) for step in one] == [2, 2]
    assert [len(step.fills) for step in two] == [4]


def test_spares_that_are_not_there_are_refused() -> None:
    full = Placement(np.array([[0, 1, 2, 3, EMPTY, EMPTY]]), num_experts=4)
    uneven = Topology(np.array([0, 0]), np.array([4, 1]))

    with pytest.raises(PlacementError, match=r"layer 0: rank 0 .* 1 "):
        compact(full, THREE_SLOTS, 1)
    with pytest.raises(TopologyError, match="rank 1 has 1 slots"):
        compact(Placement(np.array([[0, 1, 2, EMPTY, EMPTY]]), 3), uneven, 2)
    with pytest.raises(PlacementError, match="6 slots"):
        expand(BASE, BASE, THREE_SLOTS, 1)
    with pytest.raises(TopologyError, match="0 spares"):
        expand(BASE, BASE, THREE_SLOTS, 0)


def random_placement(
    rng: np.random.Generator, topology: Topology, num_layers: int, num_experts: int
) -> Placement:
    """Every expert somewhere, random replicas beside, some slots EMPTY, uneven shares."""
    held = np.full((num_layers, topology.num_slots), EMPTY)
    for row in held:
        room = rng.permutation(topology.num_slots)
        row[room[:num_experts]] = rng.permutation(num_experts)
        for slot in room[num_experts:]:
            on_rank = row[topology.slots_on(int(topology.rank_of_slot[slot]))]
            absent = np.setdiff1d(np.arange(num_experts), on_rank)
            if absent.size and rng.random() < 0.8:
                row[slot] = rng.choice(absent)
    plain = Placement(held, num_experts)
    weight = np.where(held == EMPTY, 0.0, rng.uniform(0.5, 1.5, held.shape))
    total = np.zeros((num_layers, num_experts))
    np.add.at(total, (np.arange(num_layers)[:, None], np.maximum(held, 0)), weight)
    share = weight / np.take_along_axis(total, np.maximum(held, 0), axis=1)
    return Placement(held, num_experts, 0, np.where(plain.slot_to_expert == EMPTY, 0.0, share))


def held_by_ranks(placement: Placement, layer: int, topology: Topology) -> list[Counter[int]]:
    row = placement.slot_to_expert[layer]
    return [
        Counter(row[topology.slots_on(rank)].tolist()) - Counter({EMPTY: topology.num_slots})
        for rank in range(topology.num_ranks)
    ]


def check_every_step(
    target: Placement, current: Placement, topology: Topology, spare_slots: int
) -> None:
    smaller_slots = topology.slots_of_rank - spare_slots
    for layer, steps in enumerate(steps_towards(target, current, topology, spare_slots)):
        row = current.slot_to_expert[layer].copy()
        most = 0
        for step in steps:
            assert step.fills or step.frees
            assert all(row[slot] == EMPTY for _, slot in step.fills)
            take(step, row)
            check_fits(Placement(row[None], current.num_experts), topology)  # covered, no doubles
            used = [np.sum(row[topology.slots_on(r)] != EMPTY) for r in range(topology.num_ranks)]
            assert (np.array(used) <= smaller_slots).all(), "a rank has no spares left"
        before = held_by_ranks(current, layer, topology)
        after = held_by_ranks(Placement(row[None], current.num_experts), 0, topology)
        for old, new in zip(before, after, strict=True):
            most = max(most, len(new - old), len(old - new))
        assert len(steps) <= -(-most // spare_slots), "a rank that changes most sets the number"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    slots=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(lambda s: sum(s) > 0),
    spare_slots=st.integers(1, 3),
)
def test_expanded_placement_holds_and_loads_as_the_compact_target(
    seed: int, slots: list[int], spare_slots: int
) -> None:
    rng = np.random.default_rng(seed)
    smaller = Topology(np.zeros(len(slots)), np.array(slots))
    topology = Topology(np.zeros(len(slots)), np.array(slots) + spare_slots)
    num_experts = int(rng.integers(1, smaller.num_slots + 1))
    start = random_placement(rng, smaller, 2, num_experts)
    target = random_placement(rng, smaller, 2, num_experts)
    held = np.full((2, topology.num_slots), EMPTY)
    for rank, num_slots in enumerate(slots):
        own = rng.permutation(np.arange(topology.num_slots)[topology.slots_on(rank)])
        held[:, own[:num_slots]] = start.slot_to_expert[:, smaller.slots_on(rank)]
    current = Placement(held, num_experts)

    expanded = expand(target, current, topology, spare_slots)

    check_every_step(target, current, topology, spare_slots)
    tokens = rng.integers(0, 100, (2, num_experts))
    loads = [
        rank_load(tokens, placement, on)
        for placement, on in ((target, smaller), (expanded, topology))
    ]
    assert np.allclose(*loads)
    for layer in range(2):
        assert held_by_ranks(target, layer, smaller) == held_by_ranks(expanded, layer, topology)
    assert compact(expanded, topology, spare_slots)[0].num_slots == smaller.num_slots
    stays = (current.slot_to_expert != EMPTY) & (current.slot_to_expert != expanded.slot_to_expert)
    for layer, slot in np.argwhere(stays).tolist():
        rank = int(topology.rank_of_slot[slot])
        moved = expanded.slot_to_expert[layer, topology.slots_on(rank)]
        assert current.slot_to_expert[layer, slot] not in moved, "an expert that stays has moved"
