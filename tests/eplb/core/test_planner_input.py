"""What the planner is given and cannot mean, or means something special: one sentence each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eplb import Constraints, LoadHistory, Placement, Topology, imbalance, plan
from eplb.errors import ConfigError, HistoryError
from eplb.search.legality import first_violation

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ([[1.0, np.nan]], r"layer 0, expert 1: load is nan, expected a finite number, 0 or more"),
        ([[1.0, 2.0], [np.inf, 1.0]], "layer 1, expert 0: load is inf"),
        ([[[1.0, 2.0]], [[1.0, -0.5]]], "window 1, layer 0, expert 1: load is -0.5"),
        ([[3, -1]], "layer 0, expert 1: -1 tokens, expected 0 or more"),
        ([[2**62, 2**62]], r"expert 0: 4611686018427387904 tokens, .* 2 figures"),
        (np.array([[2**63, 1]], dtype=np.uint64), "9223372036854775808 tokens, expected at most"),
        (np.zeros((0, 1, 4)), r"tokens has shape \(0, 1, 4\), expected \[windows, layers"),
        ([1, 2, 3], r"tokens has shape \(3,\)"),
        ([["a", "b"]], "dtype <U1, expected integers or floats"),
    ],
)
def test_load_that_cannot_be_is_refused_with_its_place(load: Any, message: str) -> None:
    with pytest.raises(HistoryError, match=message):
        plan(load, TWO_RANKS)


def test_history_whose_windows_all_miss_a_rank_is_refused() -> None:
    missed = LoadHistory(np.ones((2, 1, 4)), missing_ranks=(frozenset({0}), frozenset({1})))

    with pytest.raises(HistoryError, match=r"each of the 2 windows misses ranks \[1\]"):
        plan(missed, TWO_RANKS)


def test_layers_without_load_are_even_and_spread_all_the_same() -> None:
    found = plan([[0, 0, 0, 0], [4, 3, 2, 1]], TWO_RANKS)

    assert found.after_per_layer[0] == found.lower_bound[0] == 1.0
    assert first_violation(found.problem, found.target) is None


def test_idle_window_counts_as_even_in_the_bound_too() -> None:
    one_rank_of_two = Topology(np.zeros(2), np.array([1, 1]))
    windows = np.array([[[30, 10]], [[0, 0]]])  # 30 over a mean of 20, and nothing

    found = plan(windows, one_rank_of_two)

    assert found.lower_bound.tolist() == found.after_per_layer.tolist() == [1.25]


def test_one_expert_with_all_the_load_gets_a_replica_on_every_rank() -> None:
    load = np.array([[0, 100, 0, 0]])

    found = plan(load, TWO_RANKS)

    assert imbalance(load, found.target, TWO_RANKS).tolist() == [1.0]


def test_no_expert_gets_more_replicas_than_there_are_ranks() -> None:
    found = plan([[100, 1]], TWO_RANKS)  # six slots for two experts, and two ranks

    assert found.target.replica_count.tolist() == [[2, 2]]


def test_pins_that_contradict_slots_are_refused() -> None:
    slots = np.array([[1, 3]])

    with pytest.raises(ConfigError, match="layer 0 pins 2 experts to rank 0, expected at most 1"):
        plan(
            [[1, 1, 1]], TWO_RANKS, constraints=Constraints(pinned={0: (0,), 1: (0,)}, slots=slots)
        )


@pytest.mark.parametrize(
    ("current", "message"),
    [
        (Placement(np.array([[0, 1, 2, 0]]), 3), "4 slots a layer, the topology has 6"),
        (Placement(np.array([[0, 1, 2, 0, 1, 3]]), 4), "1 layers x 4 experts, the history has 1"),
        (Placement(np.array([[0, 1, 2, -1, -1, -1]] * 2), 3), "2 layers x 3 experts, the history"),
    ],
)
def test_current_placement_of_another_system_is_refused(current: Placement, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan([[3, 2, 1]], TWO_RANKS, current=current)
