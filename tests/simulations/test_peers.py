"""What other engines do, as policies: registered by name, and on loads small enough to check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb import Topology, plan
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.policies.table import POLICIES
from simulations.peers import PEERS, moving_average, register_peers
from simulations.peers.flashlb import FlashlbWhenDue, flashlb

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
# The first window heats expert 0, the last one expert 3.
SWITCHED = LoadHistory([[[70, 10, 10, 10]], [[70, 10, 10, 10]], [[10, 10, 10, 70]]])


def test_peers_registered_are_planned_with_by_name() -> None:
    register_peers()
    register_peers()

    found = plan(SWITCHED, TWO_RANKS, policy="greedy_on_last")

    assert found.policy == "greedy_on_last"
    assert set(PEERS) <= set(POLICIES)


def test_greedy_on_last_window_ignores_earlier_windows() -> None:
    problem = Problem(SWITCHED, TWO_RANKS)

    replicas = {name: policy(problem).replica_count[0].tolist() for name, policy in PEERS.items()}

    assert replicas["greedy_on_last"][3] == 2
    assert replicas["greedy_on_sum"][0] == 2


def test_moving_average_weighs_a_window_by_its_age() -> None:
    # 0.36 of the first window, 0.24 of the second, 0.4 of the last.
    assert moving_average(SWITCHED)[0].round(6).tolist() == [46.0, 10.0, 10.0, 34.0]


def test_flashlb_when_due_plans_the_layers_whose_balance_fell() -> None:
    steady, moved = [40, 30, 20, 10], [10, 20, 30, 400]
    first = Problem(LoadHistory([[steady, steady]] * 4), TWO_RANKS)
    when_due = FlashlbWhenDue()

    planned = when_due(first)
    same = when_due(replace(first, current=planned))
    other = LoadHistory([[steady, moved]] * 4)
    after = when_due(replace(first, history=other, current=same))

    assert planned.hash == flashlb(first).hash  # nothing was promised yet: every layer is due
    assert same.hash == planned.hash
    changed = (after.slot_to_expert != same.slot_to_expert).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [1]
