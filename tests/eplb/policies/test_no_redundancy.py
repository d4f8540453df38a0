"""One slot for each expert: pairs trade places, and what redundancy would cost beside that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eplb import Decision, Topology, plan, redundancy_price
from eplb.errors import ConfigError


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
