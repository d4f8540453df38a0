"""Slots go to the layers that gain by them, and spread evenly over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb import Decision, Topology, imbalance, plan, redundancy_price
from eplb.decision.redundancy import allocate_redundancy, slots_per_layer
from eplb.errors import ConfigError, PlacementError, TopologyError

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=4)


def skewed(num_layers: int, num_experts: int, seed: int) -> NDArray[np.int64]:
    """Gamma profiles of recorded shapes; in one layer of eight an expert gets a third of it all."""
    rng = np.random.default_rng(seed)
    load = rng.gamma(4.7, size=(num_layers, num_experts))
    for layer in range(0, num_layers, 8):
        load[layer, rng.integers(num_experts)] = load[layer].sum() / 2
    return np.rint(load * 10_000).astype(np.int64)


def planned(load: NDArray[np.int64], usable: NDArray[np.int64], topology: Topology) -> float:
    """Mean imbalance when every layer is planned on its own slots."""
    ratios = []
    for layer, slots in enumerate(usable):
        own = replace(topology, slots_of_rank=slots.astype(np.int32))
        tokens = load[layer : layer + 1]
        ratios.append(imbalance(tokens, plan(tokens, own, policy="greedy").target, own)[0])
    return float(np.mean(ratios))


def test_layer_with_a_hot_expert_gets_the_spare_slots() -> None:
    even, hot = [10, 10, 10, 10], [70, 10, 10, 10]

    slots = allocate_redundancy([even, hot], TWO_RANKS, total_slots=10)

    # In the second layer expert 0 on both ranks makes 45 + 55, and one ten on both makes 50 + 50.
    assert slots.tolist() == [4, 6]


def test_skewed_layers_are_as_even_with_a_third_fewer_replicas() -> None:
    load = skewed(num_layers=16, num_experts=64, seed=0)
    uniform = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=10)
    wide = replace(uniform, slots_of_rank=np.full(8, 14))
    budget = 16 * (uniform.num_slots - 64)

    slots = allocate_redundancy(load, wide, total_slots=16 * 64 + budget * 7 // 10)

    used = int(slots.sum()) - 16 * 64
    assert used <= 0.7 * budget
    everywhere_alike = planned(load, np.full((16, 8), 10), wide)
    assert planned(load, slots_per_layer(slots, wide), wide) <= everywhere_alike + 0.002


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(PlacementError, match="7 slots in all for 2 layers x 4 experts"):
        allocate_redundancy(np.ones((2, 4), dtype=np.int64), TWO_RANKS, total_slots=7)


def test_more_slots_than_a_layer_can_have_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"layer 1 is given 9 slots, expected 0\.\.8"):
        slots_per_layer([8, 9], TWO_RANKS)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_budget_is_kept_and_every_expert_has_a_slot(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    slots = data.draw(st.lists(st.integers(1, 6), min_size=num_ranks, max_size=num_ranks))
    alive = data.draw(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks))
    alive[0] = True
    topology = Topology(np.zeros(num_ranks), np.array(slots), alive=np.array(alive))
    room = int(topology.slots_of_rank[topology.alive].sum())
    num_layers, num_experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, room))
    total = num_layers * num_experts + data.draw(st.integers(0, 12))
    load = np.random.default_rng(total).integers(0, 900, size=(2, num_layers, num_experts))

    given_slots = allocate_redundancy(load, topology, total)
    more = allocate_redundancy(load, topology, total + 1)
    usable = slots_per_layer(given_slots, topology)

    assert num_experts <= given_slots.min()
    assert given_slots.max() <= room
    assert given_slots.sum() <= total
    assert given_slots.tolist() == allocate_redundancy(load, topology, total).tolist()
    assert more.sum() <= total + 1
    assert usable.sum(axis=1).tolist() == given_slots.tolist()
    assert (usable <= topology.slots_of_rank).all()
    assert (usable[:, ~topology.alive] == 0).all()


@pytest.mark.parametrize("num_experts", [128, 256])
def test_plan_without_redundancy_is_even_fresh_and_after_drift(num_experts: int) -> None:
    rng = np.random.default_rng(5)
    load = np.rint(rng.lognormal(0, 1, (8, num_experts)) * 1e4).astype(np.int64)
    drifted = np.rint(load * rng.lognormal(0, 0.2, load.shape)).astype(np.int64)
    eight = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=num_experts // 8)

    fresh = plan(load, eight)
    again = plan(drifted, eight, current=fresh.target)

    assert (fresh.target.replica_count == 1).all()
    assert fresh.after <= 1.002
    assert again.decision in (Decision.MOVE, Decision.KEEP)
    assert again.after <= 1.025
    assert again.num_moves <= 0.1 * load.size
    assert (again.target.replica_count == 1).all()


def test_plan_without_redundancy_trades_one_pair_when_one_pair_is_enough() -> None:
    two = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
    serving = plan([[40, 10, 10, 40]], two).target  # ranks of 50

    found = plan([[40, 40, 10, 10]], two, current=serving)

    assert found.num_moves in (0, 2)
    assert found.after == 1.0


def test_redundancy_price_reports_gain_in_balance_and_kv_cache_taken() -> None:
    two = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)

    # One expert a rank: 300 over a mean of 200. With one slot more on each, both share all.
    none, one = redundancy_price(
        [[300, 100]], two, slot_bytes=10, kv_cache_bytes=100, levels=(0, 1), expert_part=0.5
    )

    assert (none.imbalance, none.bytes_per_rank, none.net) == (1.5, 0, 1.0)
    assert (one.imbalance, one.bytes_per_rank) == (1.0, 10)
    assert one.kv_cache_left == pytest.approx(0.9)
    assert one.speed == pytest.approx(1.25)  # a step of 1.25 becomes one of 1.0
    assert one.net == pytest.approx(1.25 * 0.9)


def test_redundancy_price_of_an_even_load_is_all_loss() -> None:
    two = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)

    levels = redundancy_price(
        [[10, 10]] * 3, two, slot_bytes=10, kv_cache_bytes=90, levels=(0, 1, 2, 3)
    )

    assert [level.bytes_per_rank for level in levels] == [0, 30, 60, 90]
    assert [round(level.net, 3) for level in levels] == [1.0, 0.667, 0.333, 0.0]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"slot_bytes": 0}, "slot_bytes is 0"),
        ({"slot_bytes": 1.5}, "slot_bytes is 1.5, expected a whole number"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes -1"),
        ({"expert_part": float("nan")}, "expert_part is nan"),
        ({"kv_worth": -0.1}, "kv_worth -0.1"),
        ({"levels": (-1,)}, "levels has -1 slots"),
    ],
)
def test_redundancy_price_given_an_impossible_figure_refuses_it(
    figures: dict[str, Any], message: str
) -> None:
    two = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)

    with pytest.raises(ConfigError, match=message):
        redundancy_price([[10, 10]], two, **({"slot_bytes": 1, "kv_cache_bytes": 1} | figures))
