"""Replicas dealt in turn, and the hottest experts everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import Placement, Problem, Topology
from eplb.core.load import as_history
from eplb.core.placement import check_fits
from eplb.policies.table import round_robin, topk_everywhere

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)


ONE_RANK = Topology.uniform(num_nodes=1, ranks_per_node=1, slots_per_rank=4)
THREE_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=3)
SMALL_AND_DEAD = Topology(np.zeros(3), np.array([1, 4, 3]), alive=np.array([True, False, True]))


@pytest.mark.parametrize(
    ("topology", "current", "expected"),
    [
        # 0, 2 and 1, 3 in the first round; 0 and 1 again, each to the other rank.
        (TWO_RANKS, None, [0, 2, 1, 1, 3, 0]),
        (TWO_RANKS, [2, 0, -1, 3, 1, -1], [2, 0, 1, 3, 1, 0]),
        (SMALL_AND_DEAD, None, [0, -1, -1, -1, -1, 1, 2, 0]),
        (ONE_RANK, None, [0, 1, 2, -1]),
    ],
    ids=["in turn", "what stays on a rank stays in its slot", "small and dead", "one rank"],
)
def test_round_robin_assigns_experts_in_turn_repeatedly(
    topology: Topology, current: list[int] | None, expected: list[int]
) -> None:
    num_experts = max(expected) + 1
    serving = None if current is None else Placement(np.array([current]), num_experts)
    problem = Problem(as_history(np.ones((1, num_experts))), topology, current=serving)

    assert round_robin(problem).slot_to_expert.tolist() == [expected]


@pytest.mark.parametrize(
    ("topology", "load", "replicas"),
    [
        # Six slots for four experts: two of them fit everywhere.
        (TWO_RANKS, [10, 90, 20, 30], [1, 2, 1, 2]),
        (THREE_RANKS, [90, 50, 10, 10, 10, 10], [3, 2, 1, 1, 1, 1]),  # no whole second round
        (ONE_RANK, [1, 2, 3], [1, 1, 1]),
    ],
)
def test_hottest_experts_are_on_every_rank(
    topology: Topology, load: list[int], replicas: list[int]
) -> None:
    assert topk_everywhere(Problem(as_history([load]), topology)).replica_count.tolist() == [
        replicas
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_both_are_legal_on_any_ranks(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    slots = data.draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    alive = data.draw(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks))
    num_live = sum(count for count, lives in zip(slots, alive, strict=True) if lives)
    if not num_live:
        return
    topology = Topology(np.zeros(num_ranks), np.array(slots), alive=np.array(alive))
    num_experts = data.draw(st.integers(1, num_live))
    load = np.random.default_rng(num_live).integers(0, 100, size=(2, 3, num_experts))
    problem = Problem(as_history(load), topology)
    for policy in (round_robin, topk_everywhere):
        placement = policy(problem)

        check_fits(placement, topology)
        assert policy(problem).hash == placement.hash
