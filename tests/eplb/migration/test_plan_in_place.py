"""An expert that stays on a rank stays in its slot: weights never move within a rank."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.topology import Topology
from eplb.migration.build import Source
from eplb.planner import plan

RANKS = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=10)


@pytest.mark.parametrize("policy", ["auto", "greedy"])
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_moves_a_weight_within_a_rank(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.lognormal(sigma=1.0, size=(1, 4, 64))
    current = plan(load, RANKS, policy=policy).target
    for _ in range(3):
        load = np.concatenate([load, load[-1:] * rng.lognormal(sigma=0.8, size=(1, 4, 64))])[-2:]
        next_plan = plan(load, RANKS, policy=policy, current=current)

        assert not [move for move in next_plan.moves if move.source is Source.SAME_RANK]

        current = next_plan.target
