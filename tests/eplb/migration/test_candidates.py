"""What hosts are told to have ready before a plan is decided on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.migration.candidates import Candidates, candidates_for

# Two hosts of one rank with three slots each; rank 0 holds experts 0 to 2, rank 1 experts 3 and 0.
TWO_HOSTS = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=3)
HELD = Placement(np.array([[0, 1, 2, 3, 0, -1]] * 2), num_experts=4)


def test_host_is_named_the_hot_experts_that_it_lacks_hottest_first() -> None:
    # Means are 10. In layer 0 expert 0 is hottest and on both hosts; in layer 1 expert 3 is hot.
    tokens = np.array([[22, 12, 4, 2], [2, 14, 4, 20]])

    found = candidates_for(tokens, HELD, TWO_HOSTS)

    assert found.of(0) == ((1, 3),)
    assert found.of(1) == ((1, 1), (0, 1))
    assert candidates_for(tokens, HELD, TWO_HOSTS, per_host=1).of(1) == ((1, 1),)
    assert found.of(7) == ()


def test_expert_that_has_replicas_already_is_as_hot_as_each_of_them() -> None:
    tokens = np.array([[0, 0, 0, 40]] * 2)
    doubled = Placement(np.array([[0, 1, 2, 3, 3, 3]] * 2), num_experts=4)

    assert candidates_for(tokens, HELD, TWO_HOSTS).of(0) == ((0, 3), (1, 3))
    assert candidates_for(tokens // 2, doubled, TWO_HOSTS).of(0) == ((0, 3), (1, 3))
    evenly = np.array([[10, 10, 10, 30]] * 2)  # 10 for each of its three replicas, the mean is 15
    assert candidates_for(evenly, doubled, TWO_HOSTS).of(0) == ()


def test_one_host_lacks_nothing_and_a_dead_rank_holds_nothing() -> None:
    tokens = np.array([[40, 0, 0, 0]] * 2)
    one_host = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
    without_rank_1 = replace(TWO_HOSTS, alive=np.array([True, False]))

    assert candidates_for(tokens, HELD, one_host) == Candidates(((),))
    assert candidates_for(tokens, HELD, without_rank_1).of(1) == ((0, 0), (1, 0))
