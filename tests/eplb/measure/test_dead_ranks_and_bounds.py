"""Figures for operators: dead ranks, ranks without slots, bounds in the unit of the score."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import (
    Constraints,
    CostModel,
    Decision,
    ModelShape,
    Placement,
    Topology,
    imbalance,
    lower_bound,
    plan,
)

FOUR = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=1)
ONE_DEAD = replace(FOUR, alive=np.array([True, True, True, False]))


def test_imbalance_with_an_expert_only_on_a_dead_rank_is_infinite() -> None:
    served = Placement(np.array([[0, 1, 2, 3]]), num_experts=4)

    # Nobody serves expert 3: a layer that waits for its tokens never ends.
    assert imbalance(np.array([[10, 10, 10, 10]]), served, ONE_DEAD).tolist() == [np.inf]
    assert imbalance(np.array([[10, 10, 10, 0]]), served, ONE_DEAD).tolist() == [1.0]


def test_imbalance_gives_tokens_of_a_dead_replica_to_the_live_ones() -> None:
    replicated = Placement(np.array([[0, 1, 2, 0]]), num_experts=3)

    # Expert 0's 60 tokens were 30 and 30; rank 0 takes all 60 now, of 100 on three ranks.
    found = imbalance(np.array([[60, 20, 20]]), replicated, ONE_DEAD)

    assert found.tolist() == pytest.approx([1.8])


def test_imbalance_with_uneven_shares_keeps_their_proportions_on_live_ranks() -> None:
    shares = np.array([[0.25, 0.25, 1.0, 0.5]])
    replicated = Placement(np.array([[0, 0, 1, 0]]), num_experts=2, slot_share=shares)

    # 80 tokens at 1:1 over ranks 0 and 1 and 40 on rank 2: three ranks of 40.
    assert imbalance(np.array([[80, 40]]), replicated, ONE_DEAD).tolist() == [1.0]


def test_plan_with_dead_ranks_reports_unserved_tokens() -> None:
    eight = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=3)
    two_dead = replace(eight, alive=np.arange(8) < 6)
    serving = Placement(np.repeat(np.arange(16)[None], 1, axis=0).repeat(1, axis=0), 16)
    held = np.full((1, 24), -1)
    held[0, np.arange(24) % 3 < 2] = serving.slot_to_expert[0]

    found = plan(np.full((1, 16), 1000), two_dead, current=Placement(held, 16, 3))

    assert found.decision is Decision.MOVE
    assert found.before == np.inf
    assert found.lost == pytest.approx(0.25)  # experts 12 to 15 of 16
    assert "25.0% of the tokens are for experts without a live slot" in found.reason
    assert found.after == pytest.approx(18 / 16)  # 16 experts on 6 ranks: 3 on one, 16 / 6 mean
    assert all(np.isfinite(score) for _, score in found.curve)


@pytest.mark.parametrize("policy", ["auto", "greedy"])
def test_plan_with_dead_ranks_is_json_without_infinity(policy: str) -> None:
    serving = Placement(np.array([[0, 1, 2, 3]]), 4, 3)
    topology = replace(ONE_DEAD, slots_of_rank=np.array([2, 2, 2, 1]))
    serving = Placement(np.array([[0, -1, 1, -1, 2, -1, 3]]), 4, 3)

    found = plan([[10, 10, 10, 10]], topology, current=serving, policy=policy)

    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["before"] is None
    assert told["before_per_layer"] == [None]
    assert told["lost"] == pytest.approx(0.25)
    json.dumps(found.explain(0, 3).to_dict(), allow_nan=False)


def test_imbalance_counts_no_rank_without_slots() -> None:
    with_two_idle = Topology(np.zeros(5), np.array([1, 1, 1, 0, 0]))
    placement = Placement(np.array([[0, 1, 2]]), num_experts=3)
    tokens = np.array([[60, 20, 10]])

    assert imbalance(tokens, placement, with_two_idle).tolist() == [2.0]  # 60 over 90 / 3
    assert lower_bound(tokens, with_two_idle).tolist() == [2.0]
    found = plan(tokens, with_two_idle)
    assert found.after == found.lower_bound[0] == 2.0


def test_imbalance_of_even_ranks_beside_one_without_slots_is_one() -> None:
    seven_of_eight = Topology(np.zeros(8), np.array([1] * 7 + [0]))

    found = plan(np.full((1, 7), 10), seven_of_eight)

    assert found.after == found.lower_bound[0] == 1.0


def test_bound_of_a_layer_that_may_not_use_a_rank_counts_its_part() -> None:
    eight = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=2)
    usable = np.array([[2] * 7 + [0]])

    found = plan(np.full((1, 7), 10), eight, constraints=Constraints(slots=usable))

    # Rank 7 serves other layers, so it counts; 10 over 70 / 8 is the least for this one.
    assert found.after == pytest.approx(8 / 7)
    assert found.lower_bound.tolist() == pytest.approx([8 / 7])


def test_bound_without_spare_slots_counts_what_is_beside_the_hottest_expert() -> None:
    two = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)

    found = plan([[50, 20, 20, 10]], two)

    # Its rank has one more slot, which holds 10 at least: 60 over a mean of 50.
    assert found.after == pytest.approx(1.2)
    assert found.lower_bound.tolist() == pytest.approx([1.2])


LINEAR = ((100.0, 100.0), (200.0, 200.0))  # 100 us up to 100 tokens, then one for each


def test_bound_of_time_for_even_experts_is_one() -> None:
    two = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
    cost = CostModel(curve=LINEAR)

    found = plan([[400, 400, 400, 400]], two, objective="time", cost=cost)

    # 800 us on each rank, and splitting an expert costs no less in all.
    assert found.after == pytest.approx(1.0)
    assert found.lower_bound.tolist() == pytest.approx([1.0])


def test_bound_of_time_for_one_large_expert_is_its_time_over_the_mean() -> None:
    two = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)
    cost = CostModel(curve=LINEAR)

    found = plan([[900, 300]], two, objective="time", cost=cost)

    assert found.lower_bound.tolist() == pytest.approx([900 / 600])
    assert found.after == pytest.approx(900 / 600)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([3, 40, 4000]),
    curve=st.sampled_from(
        [
            LINEAR,
            ((1.0, 20.4), (256.0, 20.8), (512.0, 40.5)),
            ((1.0, 1.0), (10.0, 10.0), (20.0, 40.0)),  # splitting saves: 2 x 10 for 40
        ]
    ),
)
def test_bound_of_time_is_never_above_what_a_plan_reaches(
    seed: int, scale: int, curve: tuple[tuple[float, float], ...]
) -> None:
    rng = np.random.default_rng(seed)
    load = np.rint(rng.lognormal(0, 1, (2, 2, 12)) * scale).astype(np.int64)
    four = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=4)
    shape = ModelShape((0, 1), 12, 2, 1, 1, num_shared_experts=1)

    found = plan(load, four, objective="time", model=shape, cost=CostModel(curve=curve))

    assert (found.lower_bound <= found.after_per_layer + 1e-9).all()
