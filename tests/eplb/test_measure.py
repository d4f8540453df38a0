"""Imbalance, and how even any placement could be."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

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
    balancedness,
    imbalance,
    lower_bound,
    plan,
    rank_load,
)
from tests.support import slow_planner as reference

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
PLACED = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=1)


def test_replica_halves_the_load_of_its_expert_and_imbalance_is_busiest_over_mean() -> None:
    tokens = np.array([[[60, 20, 20]], [[20, 60, 20]], [[0, 0, 0]]])

    assert rank_load(tokens, PLACED, TWO_RANKS).tolist() == [[[50, 50]], [[70, 30]], [[0, 0]]]
    assert imbalance(tokens, PLACED, TWO_RANKS).tolist() == [[1.0], [1.4], [1.0]]
    assert balancedness(tokens[1], PLACED, TWO_RANKS).tolist() == pytest.approx([1 / 1.4])


def test_slow_rank_takes_longer_and_a_dead_one_does_not_count() -> None:
    slow = Topology(np.zeros(2), np.full(2, 2), rank_speed=np.array([1.0, 0.5]))
    dead = Topology(np.zeros(3), np.full(3, 1), alive=np.array([True, True, False]))
    without = Placement(np.array([[0, 1, -1]]), num_experts=2)

    # Times are 50 and 100; at perfect balance both ranks would need 100 / 1.5.
    assert imbalance(np.array([[60, 20, 20]]), PLACED, slow).tolist() == [1.5]
    assert imbalance(np.array([[30, 10]]), without, dead).tolist() == [1.5]


def test_bound_is_the_smallest_largest_replica() -> None:
    # Four slots: the hot expert gets two of 450 each, and a rank's mean is 500.
    assert lower_bound(np.array([[900, 50, 50]]), TWO_RANKS).tolist() == [1.0]
    # One slot a rank: three ranks, mean 400, and no rank can hold less than 1000 / 1.
    one_each = Topology.uniform(1, 3, 1)
    assert lower_bound(np.array([[1000, 100, 100]]), one_each).tolist() == pytest.approx([2.5])
    assert lower_bound(np.zeros((1, 3)), one_each).tolist() == [1.0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    loads=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    spare=st.integers(0, 6),
    num_ranks=st.integers(1, 4),
)
def test_bound_is_what_greedy_replication_reaches(
    loads: list[int], spare: int, num_ranks: int
) -> None:
    slots_per_rank = -(-(len(loads) + spare) // num_ranks)
    topology = Topology.uniform(1, num_ranks, slots_per_rank)
    count = reference.replicate(loads, topology.num_slots, num_ranks)
    largest = max(load / replicas for load, replicas in zip(loads, count, strict=True))

    bound = lower_bound(np.array([loads]), topology)[0]

    mean = sum(loads) / num_ranks
    assert bound == pytest.approx(max(1.0, largest / mean if mean else 1.0))


FOUR = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=1)
ONE_DEAD = replace(FOUR, alive=np.array([True, True, True, False]))


@pytest.mark.parametrize(
    ("held", "share", "tokens", "expected"),
    [
        # Nobody serves expert 3: a layer that waits for its tokens never ends.
        ([0, 1, 2, 3], None, [10, 10, 10, 10], np.inf),
        ([0, 1, 2, 3], None, [10, 10, 10, 0], 1.0),
        # Expert 0's 60 tokens were 30 and 30; rank 0 takes all 60 now, of 100 on three ranks.
        ([0, 1, 2, 0], None, [60, 20, 20], 1.8),
        # 80 tokens at 1:1 over ranks 0 and 1 and 40 on rank 2: three ranks of 40.
        ([0, 0, 1, 0], [[0.25, 0.25, 1.0, 0.5]], [80, 40], 1.0),
    ],
)
def test_tokens_of_a_dead_replica_go_to_the_live_ones_in_proportion(
    held: list[int], share: list[list[float]] | None, tokens: list[int], expected: float
) -> None:
    shares = {} if share is None else {"slot_share": np.array(share)}
    placement = Placement(np.array([held]), len(tokens), **shares)

    found = imbalance(np.array([tokens]), placement, ONE_DEAD)

    assert found.tolist() == pytest.approx([expected])


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


LINEAR = ((100.0, 100.0), (200.0, 200.0))  # 100 us up to 100 tokens, then one for each
TIME = {"objective": "time", "cost": CostModel(curve=LINEAR)}
EIGHT = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=2)
NOT_ON_7 = {"constraints": Constraints(slots=np.array([[2] * 7 + [0]]))}


@pytest.mark.parametrize(
    ("topology", "tokens", "settings", "expected"),
    [
        (Topology(np.zeros(8), np.array([1] * 7 + [0])), [10] * 7, {}, 1.0),
        # Rank 7 serves other layers, so it counts; 10 over 70 / 8 is the least for this one.
        (EIGHT, [10] * 7, NOT_ON_7, 8 / 7),
        # The hottest expert's rank has one more slot, which holds 10 at least: 60 over 50.
        (Topology.uniform(1, 2, 2), [50, 20, 20, 10], {}, 1.2),
        # 800 us on each rank, and splitting an expert costs no less in all.
        (Topology.uniform(1, 2, 2), [400] * 4, TIME, 1.0),
        (Topology.uniform(1, 2, 1), [900, 300], TIME, 1.5),
    ],
    ids=["a rank without slots", "a rank not to use", "no spare slots", "time", "time of one"],
)
def test_bound_is_what_the_best_plan_reaches(
    topology: Topology, tokens: list[int], settings: dict[str, Any], expected: float
) -> None:
    found = plan([tokens], topology, **settings)

    assert found.after == pytest.approx(expected)
    assert found.lower_bound.tolist() == pytest.approx([expected])


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
