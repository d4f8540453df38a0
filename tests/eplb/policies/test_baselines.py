"""Replicas dealt in turn, and the hottest experts everywhere."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import Placement, Problem, Topology
from eplb.core.load import as_history
from eplb.core.placement import check_fits
from eplb.policies.baselines import round_robin, topk_everywhere

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)


def test_round_robin_assigns_experts_in_turn_repeatedly() -> None:
    placement = round_robin(Problem(as_history([[1, 1, 1, 1]]), TWO_RANKS))

    # 0, 2 and 1, 3 in the first round; 0 and 1 again, each to the other rank.
    assert placement.slot_to_expert.tolist() == [[0, 2, 1, 1, 3, 0]]


def test_full_rank_and_a_dead_one_are_passed_over() -> None:
    topology = Topology(np.zeros(3), np.array([1, 4, 3]), alive=np.array([True, False, True]))

    placement = round_robin(Problem(as_history([[1, 1, 1]]), topology))

    assert placement.slot_to_expert.tolist() == [[0, -1, -1, -1, -1, 1, 2, 0]]


def test_hottest_expert_is_on_every_rank() -> None:
    placement = topk_everywhere(Problem(as_history([[10, 90, 20, 30]]), TWO_RANKS))

    # Six slots for four experts: two of them fit everywhere, here 1 and 3.
    assert placement.replica_count.tolist() == [[1, 2, 1, 2]]


def test_slots_that_do_not_make_a_whole_round_go_to_the_next_hottest() -> None:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=3)

    placement = topk_everywhere(Problem(as_history([[90, 50, 10, 10, 10, 10]]), topology))

    assert placement.replica_count.tolist() == [[3, 2, 1, 1, 1, 1]]


def test_single_rank_holds_everything_once() -> None:
    one = Topology.uniform(num_nodes=1, ranks_per_node=1, slots_per_rank=4)
    problem = Problem(as_history([[1, 2, 3]]), one)

    assert topk_everywhere(problem).replica_count.tolist() == [[1, 1, 1]]
    assert round_robin(problem).slot_to_expert.tolist() == [[0, 1, 2, -1]]


def test_expert_that_stays_on_a_rank_stays_in_its_slot() -> None:
    current = Placement(np.array([[2, 0, -1, 3, 1, -1]]), num_experts=4)
    problem = Problem(as_history([[1, 1, 1, 1]]), TWO_RANKS, current=current)

    assert round_robin(problem).slot_to_expert.tolist() == [[2, 0, 1, 3, 1, 0]]


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
