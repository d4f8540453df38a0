"""Tokens that cross nodes: counted as they travel, kept near by shares, and saved by moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import Budget, Constraints, CostModel, Placement, Problem, Topology, plan, rank_load
from eplb.core.load import as_history
from eplb.core.placement import check_fits
from eplb.decision.score import score_of
from eplb.errors import ConfigError
from eplb.shares.traffic import crossing, with_less_crossing, with_local_shares
from tests.support.slow_planner import crossing as crossing_said_plainly

# Two nodes of one rank; experts 0 and 1 on the first, 0 and 2 on the second.
TWO_NODES = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=2)
SPREAD = Placement(np.array([[0, 1, 0, 2]]), num_experts=3)
LOAD = np.array([[60, 20, 20]]) * 1000


def problem(cost: CostModel | None = None, **others: object) -> Problem:
    return Problem(as_history(LOAD), TWO_NODES, cost=cost or CostModel(), **others)


def test_replica_on_every_node_keeps_its_tokens_near() -> None:
    near = with_local_shares(problem(), SPREAD)

    assert crossing(problem(), SPREAD).tolist() == [0.5]  # by shares without sources
    # All of expert 0 stays; half of experts 1 and 2 have to cross.
    assert crossing(problem(), near) == pytest.approx([0.2])
    assert near.source_share is not None
    assert near.source_share[:, 0].tolist() == [[1, 1, 0, 1], [0, 1, 1, 1]]


def test_keeping_tokens_near_changes_the_load_of_no_rank() -> None:
    uneven = Placement(SPREAD.slot_to_expert, 3, 0, np.array([[0.3, 1, 0.7, 1]]))

    near = with_local_shares(problem(), uneven)

    assert near.source_share is not None
    # Half of the tokens start on each node: together the two nodes' shares are those of before.
    assert near.source_share.mean(axis=0)[0] == pytest.approx([0.3, 1, 0.7, 1])
    assert crossing(problem(), near) == pytest.approx([0.2 + 0.6 * 0.2])


def test_tokens_that_start_on_one_node_draw_their_experts_there() -> None:
    cost = CostModel(node_traffic=1.0, tokens_of_node=(1.0, 0.0))
    away = Placement(np.array([[1, -1, 0, 2]]), num_experts=3)

    moved = with_less_crossing(problem(cost), away)
    pinned = problem(cost, constraints=Constraints(pinned={0: [1]}))

    assert 0 in moved.slot_to_expert[0, :2]
    assert 0 in with_less_crossing(pinned, away).slot_to_expert[0, 2:]
    assert crossing(problem(cost), with_local_shares(problem(cost), moved))[0] < 0.5


def test_price_on_crossing_places_replicas_on_different_nodes() -> None:
    # Four ranks on two nodes; expert 0 gets two replicas, which may share a node for balance.
    four = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=2)
    load = np.array([[40, 20, 20, 20, 20, 20, 20]]) * 1000

    found = plan(load, four, cost=CostModel(node_traffic=0.5))

    nodes = four.node_of_slot[found.target.slot_to_expert[0] == 0]
    assert sorted(nodes.tolist()) == [0, 1]
    assert found.crossing[1] == pytest.approx(0.5 * 120 / 160)
    assert found.target.source_share is not None
    assert "imbalance and traffic" in found.reason
    assert plan(load, four).target.source_share is None
    with pytest.raises(ConfigError, match="each of 2 nodes"):
        plan(load, four, cost=CostModel(node_traffic=0.1, tokens_of_node=(1.0, 1.0, 1.0)))


def test_budget_of_moves_is_kept() -> None:
    rng = np.random.default_rng(5)
    topology = Topology.uniform(num_nodes=4, ranks_per_node=2, slots_per_rank=6)
    load = rng.integers(100, 10_000, (2, 32))
    current = plan(load, topology).target

    for most in (0, 3, 12):
        found = plan(
            load,
            topology,
            current=current,
            budget=Budget(max_moves=most),
            cost=CostModel(node_traffic=1.0, pay_back_s=1e9),
        )

        assert found.num_moves <= most
        assert found.after <= found.before


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_plan_that_minds_traffic_costs_no_more_than_one_that_does_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_nodes, ranks = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    topology = Topology.uniform(num_nodes, ranks, int(rng.integers(2, 5)))
    num_experts = int(rng.integers(2, topology.num_slots + 1))
    load = rng.integers(0, 5000, (3, 2, num_experts))
    cost = CostModel(node_traffic=float(rng.choice([0.05, 0.3, 2.0])))
    asked = Problem(as_history(load), topology, cost=cost)

    heedless = plan(load, topology).target
    heedful = plan(load, topology, cost=cost).target

    check_fits(heedful, topology)
    assert score_of(asked, heedful).mean() <= score_of(asked, heedless).mean() + 1e-9
    said_plainly = crossing_said_plainly(load, heedful, topology)
    assert crossing(asked, heedful) == pytest.approx(said_plainly, abs=1e-9)
    near = with_local_shares(asked, heedless)
    assert (rank_load(load, near, topology) == rank_load(load, heedless, topology)).all()
    assert (crossing(asked, near) <= crossing(asked, heedless) + 1e-9).all()
