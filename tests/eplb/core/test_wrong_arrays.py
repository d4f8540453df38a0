"""What cannot be an expert, a slot or a load is refused, and not cut to what it resembles."""

from __future__ import annotations

import numpy as np
import pytest

from eplb import Placement, Topology, balancedness, imbalance, register_policy
from eplb.errors import ConfigError, HistoryError, PlacementError, TopologyError

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)
TWO_EXPERTS = Placement(np.array([[0, 1]]), num_experts=2)


@pytest.mark.parametrize(
    ("load", "found"), [([[1.0, np.nan]], "nan"), ([[-1, 3]], "-1"), ([[np.inf, 1.0]], "inf")]
)
def test_imbalance_of_a_load_that_is_none_is_refused(load: list[list[float]], found: str) -> None:
    for measure in (imbalance, balancedness):
        with pytest.raises(HistoryError, match=f"load has {found}.* tokens of an expert, expected"):
            measure(np.array(load), TWO_EXPERTS, TWO_RANKS)


def test_imbalance_of_a_load_of_other_experts_or_layers_is_refused() -> None:
    message = r"load has shape \(1, 5\), expected \[..., 1 layers, 2 experts\] as the placement"
    with pytest.raises(ConfigError, match=message):
        imbalance(np.ones((1, 5)), TWO_EXPERTS, TWO_RANKS)
    with pytest.raises(ConfigError, match=r"load has shape \(3, 2\), expected"):
        imbalance(np.ones((3, 2)), TWO_EXPERTS, TWO_RANKS)


def test_imbalance_on_ranks_of_other_slots_is_refused() -> None:
    wide = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=4)

    with pytest.raises(ConfigError, match="placement has 2 slots a layer, the topology has 8"):
        imbalance(np.ones((1, 2)), TWO_EXPERTS, wide)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[0.5, 1.9]], "slot_to_expert has 0.5, expected whole numbers"),
        ([[0.0, np.nan]], "slot_to_expert has nan, expected whole numbers"),
        ([["0", "1"]], "slot_to_expert has dtype <U1, expected whole numbers"),
        ([[0, 2**32 + 1]], "slot_to_expert has 4294967297, expected numbers of 32 bits"),
    ],
)
def test_experts_that_are_no_whole_numbers_are_refused(
    held: list[list[float]], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement(np.array(held), num_experts=2)


def test_whole_numbers_in_any_type_are_taken() -> None:
    held = Placement(np.array([[0.0, 1.0]]), num_experts=np.int64(2), generation=np.int64(3))

    assert held.slot_to_expert.tolist() == [[0, 1]]


@pytest.mark.parametrize("name", ["num_experts", "generation"])
@pytest.mark.parametrize("value", [float("nan"), 2.0, None])
def test_count_of_a_placement_that_is_no_whole_number_is_refused(name: str, value: object) -> None:
    counts = {"num_experts": 2, "generation": 1, name: value}

    with pytest.raises(PlacementError, match=f"{name} is {value}, expected a whole number"):
        Placement(np.array([[0, 1]]), **counts)  # type: ignore[arg-type]


def test_slots_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"2 ranks x 1\.5 slots, expected whole numbers"):
        Topology.uniform(1, 2, slots_per_rank=1.5)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match=r"slots_of_rank has 1\.5, expected whole numbers"):
        Topology(np.zeros(2), np.array([1.5, 2.0]))


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("x", 3, "policy 'x' is 3, expected a function from a Problem to a Placement"),
        ("", lambda problem: problem, "policy name is '', expected text"),
        (3, lambda problem: problem, "policy name is 3, expected text"),
    ],
)
def test_policy_that_is_no_function_is_refused(name: object, policy: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_policy(name, policy)  # type: ignore[arg-type]
