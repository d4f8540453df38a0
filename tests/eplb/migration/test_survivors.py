"""What survivors of a death serve: a pure function of placement, ranks and load."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.placement import EMPTY, Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.measure import imbalance
from eplb.migration.spares import compact, steps_towards, take
from eplb.migration.survivors import Refill, relieved, survive

THREE_RANKS = Topology.uniform(num_nodes=3, ranks_per_node=1, slots_per_rank=3)


def placement(*held: int, share: list[float] | None = None) -> Placement:
    shares = {} if share is None else {"slot_share": np.array([share])}
    return Placement(np.array([held]), num_experts=max(held) + 1, generation=4, **shares)


def test_covered_experts_keep_their_slots_and_take_the_share_of_the_dead_ones() -> None:
    share = [0.5, 0.2, 1.0, 0.3, 0.4, 1.0, 0.2, 0.4, 1.0]
    before = placement(0, 1, 2, 0, 1, 3, 0, 1, 4, share=share)
    after = survive(before, Topology.uniform(3, 1, 3), [])
    assert after.target.slot_share.tolist() == before.slot_share.tolist()

    # Rank 2 alone had expert 4, which takes the slot of a second replica of 0 or 1.
    found = survive(before, THREE_RANKS, [2])

    assert found.target.generation == 5
    assert found.target.slot_to_expert[0, 6:].tolist() == [EMPTY] * 3
    assert found.refills == (Refill(0, 0, 4),)
    assert found.target.slot_to_expert[0, :6].tolist() == [4, 1, 2, 0, 1, 3]
    # 0.2 and 0.4 of expert 1 are left: one third and two thirds of its tokens.
    assert found.target.slot_share[0, [1, 4]] == pytest.approx([1 / 3, 2 / 3])


def test_refills_are_spread_over_the_ranks() -> None:
    before = placement(0, 1, 2, 2, 0, 1, 3, 4, 5)

    found = survive(before, THREE_RANKS, [2])

    assert sorted(one.expert for one in found.refills) == [3, 4, 5]
    per_rank = [len(found.refills_of(rank)) for rank in range(3)]
    assert sorted(per_rank[:2]) == [1, 2]
    assert per_rank[2] == 0


def test_free_slot_is_taken_only_where_no_expert_has_a_second_replica() -> None:
    before = placement(0, 1, EMPTY, 2, 3, 0, 4, 5, EMPTY)

    found = survive(before, THREE_RANKS, [2])

    assert found.refills[0].slot in (0, 5)  # of a second replica of expert 0
    assert found.refills[1].slot == 2


def test_fewer_slots_than_experts_are_refused() -> None:
    before = placement(0, 1, 2, 3, 4, 5, 6, 7, 8)

    with pytest.raises(PlacementError, match="layer 0: expert 6 has no slot on a live rank"):
        survive(before, THREE_RANKS, [2])


def test_no_survivor_is_refused() -> None:
    with pytest.raises(PlacementError, match="no rank of 3 is left"):
        survive(placement(0, 1, 2, 0, 1, 2, 0, 1, 2), THREE_RANKS, [0, 1, 2])


def test_load_sets_the_shares_of_survivors() -> None:
    topology = Topology.uniform(4, 1, 2)
    before = placement(0, 1, 0, 2, 3, 1, 0, 3)
    load = np.array([[600, 200, 200, 200]])

    plain = survive(before, topology, [3])
    by_load = survive(before, topology, [3], load)

    def balance(made: Placement) -> float:
        return float(imbalance(load, made, plain.topology).mean())

    assert by_load.target.slot_to_expert.tolist() == plain.target.slot_to_expert.tolist()
    assert balance(by_load.target) < balance(plain.target)


@pytest.mark.parametrize("seed", range(40))
def test_any_victims_leave_a_legal_placement_or_a_refusal(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_ranks, slots, layers = int(random.integers(2, 7)), int(random.integers(2, 6)), 3
    topology = Topology.uniform(num_ranks, 1, slots)
    num_experts = int(random.integers(slots, num_ranks * slots))
    rows = []
    for _ in range(layers):
        row = random.permutation(num_experts).tolist()
        rows.append(row + [EMPTY] * (num_ranks * slots - len(row)))
        free = [slot for slot in range(num_experts, num_ranks * slots) if random.random() < 0.7]
        for slot in free:
            rank = slot // slots
            other = int(random.integers(num_experts))
            if other not in rows[-1][rank * slots : (rank + 1) * slots]:
                rows[-1][slot] = other
    before = Placement(np.array(rows), num_experts)
    victims = random.permutation(num_ranks)[: int(random.integers(1, num_ranks))]

    try:
        found = survive(before, topology, victims)
    except PlacementError:
        assert (num_ranks - len(victims)) * slots < num_experts
        return

    check_fits(found.target, found.topology)
    for layer, slot, expert in found.refills:
        assert found.target.slot_to_expert[layer, slot] == expert
    again = survive(before, topology, victims)
    assert again.target.hash == found.target.hash


def test_free_slot_is_taken_of_the_rank_with_the_most_of_them() -> None:
    before = placement(0, EMPTY, EMPTY, 1, 2, EMPTY, 3, EMPTY, EMPTY)

    found = survive(before, THREE_RANKS, [2])

    assert found.refills == (Refill(0, 1, 3),)


def test_plan_starts_from_spares_that_survivors_refilled_into() -> None:
    survived = placement(0, 1, 2, 3, 4, 0, EMPTY, EMPTY, EMPTY)

    base = relieved(survived, THREE_RANKS, 1)

    # Expert 0 of rank 1 has another replica; expert 2 moves to the rank that has joined.
    assert base.slot_to_expert.tolist() == [[0, 1, EMPTY, 3, 4, EMPTY, 2, EMPTY, EMPTY]]
    assert base.generation == survived.generation
    assert relieved(base, THREE_RANKS, 1) is base


@pytest.mark.parametrize("seed", range(40))
def test_ranks_get_the_spares_back_that_survivors_refilled_into(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_ranks, room, spares = 4, int(random.integers(2, 5)), int(random.integers(1, 3))
    slots = room + spares
    num_experts = int(random.integers(2 * room + 1, min(2 * slots, 3 * room) + 1))
    topology = Topology.uniform(num_ranks, 1, slots)
    row = np.full((num_ranks, slots), EMPTY)
    row[:, :room] = random.permutation(np.arange(num_ranks * room) % num_experts).reshape(
        num_ranks, room
    )
    before = Placement(row.reshape(1, -1), num_experts)
    survived = survive(before, topology, random.permutation(num_ranks)[:2], joined=range(num_ranks))
    held = survived.target.slot_to_expert[0].copy()

    base = relieved(survived.target, topology, spares)
    target, _ = compact(base, topology, spares)
    for step in steps_towards(target, survived.target, topology, spares)[0]:
        assert all(held[slot] == EMPTY for _, slot in step.fills)
        take(step, held)
        Placement(held[None], num_experts)  # each expert is served

    in_use = (held.reshape(num_ranks, slots) != EMPTY).sum(axis=1)
    assert in_use.max() <= room
