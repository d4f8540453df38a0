"""A placement that other ranks take over."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.placement import EMPTY, Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.migration.resize import taken_over
from eplb.migration.spares import compact

TWO, THREE = Topology.uniform(1, 2, 3), Topology.uniform(1, 3, 3)
FOUR_EXPERTS = Placement(np.array([[0, 1, 2, 3, 0, 1]]), num_experts=4, generation=7)


def test_fewer_ranks_hold_each_expert_and_give_up_second_replicas_first() -> None:
    given = Placement(np.array([[0, 1, 2, 3, 0, 1, 4, 5, 0]]), num_experts=6, generation=0)

    found, num_kept = taken_over(given, THREE, TWO, 0)

    rows = [set(found.slot_to_expert[0, :3].tolist()), set(found.slot_to_expert[0, 3:].tolist())]
    assert sorted(rows[0] | rows[1]) == [0, 1, 2, 3, 4, 5]
    assert (3 in rows[1], num_kept) == (True, 4)


def test_too_few_slots_for_all_experts_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"found 2 slots in a layer on ranks 0, 1.* 4 experts"):
        taken_over(FOUR_EXPERTS, TWO, Topology.uniform(1, 2, 2), 1)


@pytest.mark.parametrize("seed", range(40))
def test_resized_placements_serve_every_expert_with_their_spares(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_experts, num_layers = int(random.integers(4, 20)), 3

    def topology() -> tuple[Topology, int]:
        num_ranks, spares = int(random.integers(1, 7)), int(random.integers(0, 3))
        least = -(-num_experts // num_ranks)
        slots = int(random.integers(least, num_experts + 1))
        return Topology.uniform(1, num_ranks, slots + spares), spares

    (before, spares), (after, spares_after) = topology(), topology()
    start, _ = taken_over(
        Placement(np.arange(num_experts)[None].repeat(num_layers, 0), num_experts, 0),
        Topology.uniform(1, 1, num_experts),
        before,
        spares,
    )
    rows = start.slot_to_expert.reshape(num_layers, before.num_ranks, -1)
    shuffled = random.permuted(rows, axis=2).reshape(num_layers, -1)
    base = Placement(shuffled, num_experts, 3)

    found, num_kept = taken_over(base, before, after, spares_after)
    again, kept_again = taken_over(found, after, after, spares_after)

    check_fits(found, after)
    compact(found, after, spares_after)
    assert (found.replica_count > 0).all()
    assert num_kept <= (base.slot_to_expert != EMPTY).sum()
    assert (again.slot_to_expert == found.slot_to_expert).all()
    assert kept_again == (found.slot_to_expert != EMPTY).sum()
