"""Booked and effective imbalance under SGLang's ``static`` rule: a measured table, and its cure."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.planner.plan import numpy_greedy
from eplb import DispatchRule, Placement, Topology, effective_shares, imbalance, plan

STATIC = DispatchRule.SGLANG_STATIC
AHEAD = 0.03  # of booked imbalance, at most

# Experts, slots, ranks, ranks of a node, sigma; then mean max / mean of 12 lognormal layers without
# balancing, as the published balancer books it, and under the rule of SGLang 0.5.23, all measured
# with the engine's own code on another draw of such loads.
TABLE = [
    ((128, 144, 8, 8, 0.6), (1.26, 1.003, 1.009)),
    ((128, 144, 8, 8, 1.0), (1.52, 1.002, 1.025)),
    ((128, 144, 8, 8, 1.4), (1.92, 1.001, 1.081)),
    ((256, 288, 16, 8, 1.0), (1.69, 1.002, 1.094)),
    ((256, 288, 32, 8, 0.6), (1.62, 1.007, 1.015)),
    ((256, 288, 32, 8, 1.0), (2.28, 1.005, 1.101)),
    ((256, 288, 32, 8, 1.4), (3.40, 1.002, 1.222)),
    ((256, 288, 32, 32, 1.0), (2.28, 1.005, 1.019)),
    ((256, 320, 64, 8, 1.0), (3.21, 1.018, 1.155)),
]
Size = tuple[int, int, int, int, float]


def loads(size: Size, layers: int, seed: int) -> NDArray[np.int64]:
    drawn = np.random.default_rng(seed).lognormal(0, size[4], (layers, size[0]))
    return np.rint(drawn * 1e4).astype(np.int64)


def ranks_of(size: Size) -> Topology:
    _, num_slots, num_ranks, per_node, _ = size
    return Topology.uniform(num_ranks // per_node, per_node, num_slots // num_ranks)


def measured(size: Size, layers: int, seed: int) -> tuple[float, float, float]:
    """Without balancing, booked, and under the rule."""
    num_experts, num_slots, num_ranks, _, _ = size
    load, topology = loads(size, layers, seed), ranks_of(size)
    in_order = Placement(np.tile(np.arange(num_experts), (layers, 1)), num_experts)
    held = numpy_greedy(load, num_slots, num_ranks)
    booked = Placement(held, num_experts)
    shares = effective_shares(booked, topology, STATIC)
    once = Topology.uniform(1, num_ranks, num_experts // num_ranks)
    none = imbalance(load, in_order, once).mean()
    really = imbalance(load, Placement(held, num_experts, slot_share=shares), topology).mean()
    return float(none), float(imbalance(load, booked, topology).mean()), float(really)


@pytest.mark.parametrize(("size", "expected"), TABLE)
def test_static_rule_over_the_published_plan_reproduces_the_table(
    size: Size, expected: tuple[float, float, float]
) -> None:
    found = np.array([measured(size, layers=12, seed=seed) for seed in range(4)])

    # Another draw of the same loads: within three deviations of such means of 12 layers, and the
    # third digit that the table is rounded to.
    off = np.abs(found.mean(axis=0) - expected)
    assert (off <= 3 * found.std(axis=0, ddof=1) + 0.005).all()


def test_plan_for_the_static_rule_at_ep32_is_within_three_percent() -> None:
    size: Size = (256, 288, 32, 8, 1.0)
    load, topology = loads(size, layers=6, seed=1), ranks_of(size)

    found = plan(load, topology, dispatch=STATIC)

    assert found.effective <= 1.03
    assert measured(size, layers=6, seed=1)[2] > 1.08


@pytest.mark.slow
@pytest.mark.parametrize("size", [size for size, _ in TABLE])
def test_plan_for_the_static_rule_is_near_what_is_booked(size: Size) -> None:
    load, topology = loads(size, layers=12, seed=1), ranks_of(size)
    booked = measured(size, layers=12, seed=1)[1]

    found = plan(load, topology, dispatch=STATIC)

    assert found.effective <= max(booked + AHEAD, float(found.lower_bound.mean()))
