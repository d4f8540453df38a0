"""Loads as torch tensors of every kind of number, and figures that are no figures."""

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
    Topology,
    plan,
    rebalance_experts,
    resplit,
)
from eplb.errors import ConfigError

torch = pytest.importorskip("torch")

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
HOT = [[60, 20, 20]]
DTYPES = ("int32", "int64", "uint8", "bool", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("name", DTYPES)
def test_plan_given_a_tensor_of_any_dtype_equals_the_plan_for_the_list(name: str) -> None:
    load = torch.tensor(HOT, dtype=getattr(torch, name))

    found = plan(load, TWO_RANKS)

    assert found.hash == plan(load.double().tolist(), TWO_RANKS).hash


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_float16_load_with_fractions_raises_no_warning(kind: str) -> None:
    values = np.array([[0.6, 0.2, 0.2]], dtype=np.float16)
    load: Any = torch.tensor(values) if kind == "torch" else values

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = plan(load, TWO_RANKS)

    assert found.target.replica_count.tolist() == [[2, 1, 1]]


def test_calls_given_bfloat16_tensors_with_gradients_take_their_figures() -> None:
    load = torch.tensor(HOT, dtype=torch.bfloat16, requires_grad=True)
    serving = plan(HOT, TWO_RANKS).target

    assert resplit(load, serving, TWO_RANKS, scenarios=load).slot_share.shape == (1, 4)
    assert plan(HOT, TWO_RANKS, scenarios=load[None]).decision is Decision.MOVE
    assert plan(load, TWO_RANKS).target.replica_count.tolist() == [[2, 1, 1]]
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
