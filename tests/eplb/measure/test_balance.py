"""Imbalance, and how even any placement could be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import Placement, Topology, balancedness, imbalance, lower_bound, rank_load
from tests.support import slow_planner as reference

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
PLACED = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=1)


def test_replica_halves_the_load_of_its_expert_and_imbalance_is_busiest_over_mean() -> None:
    tokens = np.array([[[60, 20, 20]], [[20, 60, 20]], [[0, 0, 0]]])

    assert rank_load(tokens, PLACED, TWO_RANKS).tolist() == [[[50, 50]], [[70, 30]], [[0, 0]]]
    assert imbalance(tokens, PLACED, TWO_RANKS).tolist() == [[1.0], [1.4], [1.0]]
    assert balancedness(tokens[1], PLACED, TWO_RANKS).tolist() == pytest.approx([1 / 1.4])


def test_slow_rank_takes_longer_and_a_dead_one_does_not_count() -> None:
    slow = Topology(np.zeros(2), np.full(2, 2), rank_speed=np.array([1.0, 0.5]))
    dead = Topology(np.zeros(3), np.full(3, 1), alive=np.array([True, True, False]))
    without = Placement(np.array([[0, 1, -1]]), num_experts=2)

    # Times are 50 and 100; at perfect balance both ranks would need 100 / 1.5.
    assert imbalance(np.array([[60, 20, 20]]), PLACED, slow).tolist() == [1.5]
    assert imbalance(np.array([[30, 10]]), without, dead).tolist() == [1.5]


def test_bound_is_the_smallest_largest_replica() -> None:
    # Four slots: the hot expert gets two of 450 each, and a rank's mean is 500.
    assert lower_bound(np.array([[900, 50, 50]]), TWO_RANKS).tolist() == [1.0]
    # One slot a rank: three ranks, mean 400, and no rank can hold less than 1000 / 1.
    one_each = Topology.uniform(1, 3, 1)
    assert lower_bound(np.array([[1000, 100, 100]]), one_each).tolist() == pytest.approx([2.5])
    assert lower_bound(np.zeros((1, 3)), one_each).tolist() == [1.0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    loads=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    spare=st.integers(0, 6),
    num_ranks=st.integers(1, 4),
)
def test_bound_is_what_greedy_replication_reaches(
    loads: list[int], spare: int, num_ranks: int
) -> None:
    slots_per_rank = -(-(len(loads) + spare) // num_ranks)
    topology = Topology.uniform(1, num_ranks, slots_per_rank)
    count = reference.replicate(loads, topology.num_slots, num_ranks)
    largest = max(load / replicas for load, replicas in zip(loads, count, strict=True))

    bound = lower_bound(np.array([loads]), topology)[0]

    mean = sum(loads) / num_ranks
    assert bound == pytest.approx(max(1.0, largest / mean if mean else 1.0))
