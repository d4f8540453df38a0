"""What the planner is given and cannot mean, or means something special: one sentence each."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from eplb import (
    Budget,
    CostModel,
    Decision,
    ModelShape,
    Placement,
    Topology,
    plan,
    preset,
    rebalance_experts,
    resplit,
)
from eplb.core.model import PRESETS
from eplb.errors import ConfigError, HistoryError, TopologyError
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


def test_layers_without_load_are_even_and_spread_all_the_same() -> None:
    found = plan([[0, 0, 0, 0], [4, 3, 2, 1]], TWO_RANKS)

    assert found.after_per_layer[0] == found.lower_bound[0] == 1.0
    assert first_violation(found.problem, found.target) is None


def test_idle_window_weighs_nothing_in_the_bound_too() -> None:
    one_rank_of_two = Topology(np.zeros(2), np.array([1, 1]))
    windows = np.array([[[30, 10]], [[0, 0]]])  # 30 over a mean of 20, and nothing

    found = plan(windows, one_rank_of_two)

    assert found.lower_bound.tolist() == found.after_per_layer.tolist() == [1.5]


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


torch = pytest.importorskip("torch")

TWO_OF_TWO = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
HOT = [[60, 20, 20]]
DTYPES = ("int32", "int64", "uint8", "bool", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("name", DTYPES)
def test_plan_given_a_tensor_of_any_dtype_equals_the_plan_for_the_list(name: str) -> None:
    load = torch.tensor(HOT, dtype=getattr(torch, name))

    found = plan(load, TWO_OF_TWO)

    assert found.hash == plan(load.double().tolist(), TWO_OF_TWO).hash


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_float16_load_with_fractions_raises_no_warning(kind: str) -> None:
    values = np.array([[0.6, 0.2, 0.2]], dtype=np.float16)
    load: Any = torch.tensor(values) if kind == "torch" else values

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = plan(load, TWO_OF_TWO)

    assert found.target.replica_count.tolist() == [[2, 1, 1]]


def test_calls_given_bfloat16_tensors_with_gradients_take_their_figures() -> None:
    load = torch.tensor(HOT, dtype=torch.bfloat16, requires_grad=True)
    serving = plan(HOT, TWO_OF_TWO).target

    assert resplit(load, serving, TWO_OF_TWO, scenarios=load).slot_share.shape == (1, 4)
    assert plan(HOT, TWO_OF_TWO, scenarios=load[None]).decision is Decision.MOVE
    assert plan(load, TWO_OF_TWO).target.replica_count.tolist() == [[2, 1, 1]]
    held, _, count = rebalance_experts(load, 4, 1, 1, 2)
    assert (held.dtype, held.requires_grad) == (torch.int64, False)
    assert count.tolist() == [[2, 1, 1]]


@pytest.mark.parametrize("value", [1.5, 1.0, True, "1", float("nan")])
@pytest.mark.parametrize("name", ["max_moves", "max_bytes"])
def test_budget_refuses_a_fraction(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"budget: {name} is .*, expected a whole number"):
        Budget(**{name: value})
    assert Budget(**{name: np.int64(3)}) == Budget(**{name: 3})


@pytest.mark.parametrize("value", [-1.0, float("nan"), np.float32(-1), np.float32("nan")])
@pytest.mark.parametrize(
    "name",
    ["pay_back_s", "min_share_gain", "node_traffic", "seconds_per_expert", "seconds_per_rebalance"],
)
def test_cost_model_given_a_negative_or_nan_price_refuses_it(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"cost: {name} is .*, expected 0 or more"):
        CostModel(**{name: value})


@pytest.mark.parametrize(
    "name",
    ["seconds_per_expert", "bytes_per_s", "seconds_per_rebalance", "far_moves", "node_traffic"],
)
def test_cost_model_given_an_infinite_price_refuses_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"cost: {name} is inf, expected a finite number"):
        CostModel(**{name: float("inf")})
    assert CostModel(pay_back_s=float("inf")).gain_worth(1.0) == 0.0  # every gain pays


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_model_given_an_impossible_cost_of_a_token_names_the_expert(value: float) -> None:
    with pytest.raises(ConfigError, match=r"expert_cost of expert 1 is .*, expected a finite"):
        ModelShape((0,), 2, 1, 1, 1, expert_cost=np.array([1.0, value]))


def test_every_preset_is_a_possible_model() -> None:
    for name, model in PRESETS.items():
        assert preset(name) is model
        assert model.expert_bytes > 0
        assert model.num_layers == len(set(model.layer_ids))


def test_bytes_default_to_three_matrices_of_bfloat16() -> None:
    assert ModelShape((0,), 4, top_k=1, hidden=10, intermediate=5).expert_bytes == 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "top-1 of 0 experts"),
        ({"top_k": 5}, "top-5 of 4 experts"),
        ({"layer_ids": (1, 1)}, "expected distinct layer numbers"),
        ({"layer_ids": ()}, "expected distinct layer numbers"),
        ({"num_expert_groups": 3}, "4 experts in 3 expert groups"),
        ({"expert_cost": np.ones(3)}, r"expert_cost has shape \(3,\), expected \(4,\)"),
    ],
)
def test_model_with_impossible_counts_is_refused(fields: dict[str, object], message: str) -> None:
    usual = {"layer_ids": (0,), "num_experts": 4, "top_k": 1, "hidden": 2, "intermediate": 2}

    with pytest.raises(ConfigError, match=message):
        ModelShape(**(usual | fields))


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown model 'gpt-9', expected one of: deepseek-r1"):
        preset("gpt-9")


UNEVEN = Topology(node_of_rank=np.array([0, 0, 1]), slots_of_rank=np.array([2, 0, 3]))


def test_slots_are_numbered_rank_by_rank() -> None:
    assert UNEVEN.num_slots == 5
    assert UNEVEN.first_slot.tolist() == [0, 2, 2, 5]
    assert UNEVEN.rank_of_slot.tolist() == [0, 0, 2, 2, 2]
    assert UNEVEN.node_of_slot.tolist() == [0, 0, 1, 1, 1]
    assert UNEVEN.slots_on(2) == slice(2, 5)
    usual = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
    assert (usual.node_of_rank.tolist(), usual.num_slots) == ([0, 0, 1, 1], 12)
    with pytest.raises(TopologyError, match="0 nodes x 2 ranks x 3 slots"):
        Topology.uniform(num_nodes=0, ranks_per_node=2, slots_per_rank=3)


def test_arrays_are_copied_and_read_only() -> None:
    slots = np.array([1, 1])
    topology = Topology(node_of_rank=np.zeros(2), slots_of_rank=slots)
    slots[0] = 9

    assert topology.num_slots == 2
    with pytest.raises(ValueError, match="read-only"):
        topology.slots_of_rank[0] = 9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots_of_rank": [1]}, r"slots_of_rank has shape \(1,\), expected \(2,\)"),
        ({"slots_of_rank": [1, -2]}, "rank 1 has -2 slots"),
        ({"rank_speed": [1.0, 0.0]}, "rank 1 has speed 0.0"),
        ({"rank_speed": [np.nan, 1.0]}, "rank 0 has speed nan"),
        ({"rank_speed": [1.0, np.inf]}, "rank 1 has speed inf, expected a finite number above 0"),
        ({"alive": [False, False]}, "no rank is alive of 2"),
    ],
)
def test_topology_with_arrays_of_unequal_length_is_refused(
    fields: dict[str, list[float]], message: str
) -> None:
    usual = {"node_of_rank": [0, 0], "slots_of_rank": [1, 1]}

    with pytest.raises(TopologyError, match=message):
        Topology(**{name: np.array(value) for name, value in (usual | fields).items()})
