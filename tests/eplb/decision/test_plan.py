"""The planner's front door: what it finds, what it decides, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb import (
    Budget,
    CostModel,
    Decision,
    ModelShape,
    Placement,
    Topology,
    plan,
)
from eplb.core.constraints import Constraints
from eplb.core.dispatch import DispatchRule
from eplb.core.load import LoadHistory, Phase, as_history
from eplb.core.placement import EMPTY, check_fits
from eplb.core.problem import Problem
from eplb.errors import ConfigError, HistoryError, PlacementError
from eplb.planner import plan_to

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
EVEN_SPLIT = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=7)
HOT_FIRST = np.array([[6000, 2000, 2000]])
# Experts 0 and 1 on one rank, 2 on the other; shares have nothing to choose between.
SINGLE = Placement(np.array([[0, 1, 2, EMPTY]]), num_experts=3, generation=7)
HOT_LAST = np.array([[2000, 2000, 6000]])


DEAR_MOVES = CostModel(seconds_per_expert=60.0)


def lognormal(num_layers: int, num_experts: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return np.rint(rng.lognormal(0, 1, (num_layers, num_experts)) * 10_000).astype(np.int64)


def test_hot_expert_gets_the_spare_slot() -> None:
    found = plan(HOT_FIRST, TWO_RANKS)

    assert found.decision is Decision.MOVE
    assert found.target.replica_count.tolist() == [[2, 1, 1]]
    assert found.after == 1.0
    assert found.before == 1.6  # contiguous: ranks hold experts {0, 1} and {2}
    assert found.target.generation == 1


def test_move_follows_the_generation_it_was_planned_on() -> None:
    found = plan(np.array([[2000, 2000, 6000]]), TWO_RANKS, current=EVEN_SPLIT)

    assert found.decision is Decision.MOVE
    assert (found.base_generation, found.target.generation) == (7, 8)
    assert found.target.replica_count.tolist() == [[1, 1, 2]]
    assert len(found.moves) == found.num_moves == 1
    assert "for 1 moves" in found.reason


@pytest.mark.parametrize("policy", ["auto", "fresh"])
@pytest.mark.parametrize("cost", [CostModel(pay_back_s=0.0), DEAR_MOVES])
def test_move_that_costs_more_than_it_saves_is_kept(cost: CostModel, policy: str) -> None:
    found = plan(HOT_FIRST, TWO_RANKS, policy=policy, current=SINGLE, cost=cost)

    assert found.decision is Decision.KEEP
    assert found.num_moves == 0
    assert np.array_equal(found.target.slot_to_expert, SINGLE.slot_to_expert)


def test_kept_plan_has_figures_of_what_serves_and_of_what_was_rejected() -> None:
    found = plan(HOT_FIRST, TWO_RANKS, policy="fresh", current=SINGLE, cost=DEAR_MOVES)

    assert found.decision is Decision.KEEP
    assert (found.before, found.after, found.proposed) == (1.6, 1.6, 1.0)


def test_imbalance_that_chance_explains_is_kept() -> None:
    few_tokens = np.array([[9, 6, 6]])

    found = plan(few_tokens, TWO_RANKS, current=Placement(np.array([[0, 1, 2, 1]]), 3))

    assert found.decision is Decision.KEEP
    assert "sampling noise" in found.reason


@pytest.mark.parametrize("limit", [{"cost": DEAR_MOVES}, {"budget": Budget(max_moves=0)}])
def test_new_shares_are_taken_where_moving_does_not_pay(limit: dict[str, Any]) -> None:
    found = plan(HOT_LAST, TWO_RANKS, current=EVEN_SPLIT, **limit)

    # Ranks hold {0, 1} and {0, 2}: all of expert 0 to the first makes 4000 and 6000.
    assert found.decision is Decision.RESPLIT
    assert found.shares[0] == pytest.approx([1, 1, 0, 1], abs=0.05)
    assert (found.num_moves, found.target.generation) == (0, 8)
    assert found.before == pytest.approx(1.4)
    assert found.after == pytest.approx(1.2, abs=0.02)


def test_move_must_pay_beyond_new_shares_alone() -> None:
    # Shares alone bring 1.4 to 1.2, another replica of expert 2 in place of 0 brings 1.0.
    cost = CostModel(seconds_per_expert=2.0)
    assert plan(HOT_LAST, TWO_RANKS, current=EVEN_SPLIT, cost=CostModel()).num_moves == 1

    found = plan(HOT_LAST, TWO_RANKS, current=EVEN_SPLIT, cost=cost)

    assert found.decision is Decision.RESPLIT
    assert "1 moves more do not pay: imbalance 1.2" in found.reason


# Three slots for two experts: rank 0 holds both, rank 1 the hot one.
TWO_AND_ONE = Topology(np.zeros(2), np.array([2, 1]))
SEVENTY_THIRTY = np.array([[70, 30]]) * 100_000


def test_move_carries_the_shares_of_its_target() -> None:
    found = plan(SEVENTY_THIRTY, TWO_AND_ONE)

    # 20 of the 70 beside the 30 make 50 and 50; equal split would make 65 and 35.
    assert found.target.replica_count.tolist() == [[2, 1]]
    assert sorted(found.shares[0]) == pytest.approx([2 / 7, 5 / 7, 1.0], abs=0.02)
    assert found.after == pytest.approx(1.0, abs=0.01)


def test_fresh_policy_is_as_even_as_a_plan_without_a_current_one_and_moves_fewer_experts() -> None:
    topology = Topology.uniform(num_nodes=2, ranks_per_node=4, slots_per_rank=5)
    load, free = lognormal(6, 32, 5), CostModel(pay_back_s=1e9)
    current = plan(lognormal(6, 32, 6), topology).target

    fresh = plan(load, topology, policy="fresh", current=current, cost=free)
    anew = plan(load, topology)

    assert fresh.decision is Decision.MOVE
    assert fresh.after <= anew.after * 1.005
    in_place = fresh.target.slot_to_expert == current.slot_to_expert
    assert in_place.mean() > 1.2 * (anew.target.slot_to_expert == current.slot_to_expert).mean()


def test_gap_is_the_distance_of_a_plan_from_its_bound() -> None:
    one_each = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)

    found = plan(np.array([[3000, 1000]]), one_each)

    # Two slots for two experts: the hot one stays whole.
    assert (found.lower_bound.tolist(), found.gap.tolist()) == ([1.5], [0.0])


def test_peaks_in_different_windows_are_not_averaged_away() -> None:
    # The sum looks even, but experts 0 and 1 peak together, and so do 2 and 3.
    windows = np.array([[[900, 900, 100, 100]], [[100, 100, 900, 900]]])
    one_slot_each = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)

    found = plan(windows, one_slot_each)

    assert found.before == 1.8
    assert found.after == 1.0


def test_budget_of_moves_is_kept() -> None:
    load, topology = lognormal(4, 64, seed=1), Topology.uniform(2, 4, 9)
    current = plan(load, topology).target
    drifted = lognormal(4, 64, seed=2)

    for max_moves in (0, 1, 7, 30):
        found = plan(drifted, topology, current=current, budget=Budget(max_moves=max_moves))

        assert found.num_moves <= max_moves
        assert found.after <= found.before


@pytest.mark.parametrize("policy", ["greedy", "auto"])
def test_more_moves_never_balance_worse(policy: str) -> None:
    load, topology = lognormal(4, 64, seed=1), Topology.uniform(2, 4, 9)
    current = plan(load, topology).target

    found = plan(lognormal(4, 64, seed=2), topology, current=current, policy=policy)

    moves = [moves for moves, _ in found.curve]
    balance = [imbalance for _, imbalance in found.curve]
    assert moves == sorted(moves)
    assert balance == sorted(balance, reverse=True)
    assert found.curve[0] == (0, found.before)
    # The curve is of moves; shares come on top.
    assert found.curve[-1][0] == found.num_moves
    assert found.after <= found.curve[-1][1] + 1e-9


def test_bytes_are_counted_by_link() -> None:
    model = ModelShape((0,), num_experts=3, top_k=1, hidden=4, intermediate=2, expert_bytes=100)

    found = plan(np.array([[2000, 2000, 6000]]), TWO_RANKS, model=model, current=EVEN_SPLIT)

    assert found.bytes_by_link == {"same_rank": 0, "node": 100, "network": 0, "host": 0}


def test_expert_that_costs_nothing_balances_nothing() -> None:
    free_last = np.array([1.0, 1.0, 0.0])
    model = ModelShape((0,), 3, top_k=1, hidden=4, intermediate=2, expert_cost=free_last)

    found = plan(np.array([[500, 500, 90_000]]), TWO_RANKS, model=model)

    assert found.before == 2.0  # contiguous: experts 0 and 1 share a rank
    assert found.after == 1.0


def test_expert_lost_with_its_rank_is_placed_again() -> None:
    topology = Topology(
        node_of_rank=np.zeros(3), slots_of_rank=np.full(3, 2), alive=np.array([True, True, False])
    )
    current = Placement(np.array([[0, 1, 1, 2, 3, 0]]), num_experts=4, generation=3)

    found = plan(np.full((1, 4), 1000), topology, current=current, budget=Budget(max_moves=1))

    assert found.target.replica_count.tolist() == [[1, 1, 1, 1]]
    assert found.num_moves == 1


def test_groups_stay_on_nodes_in_prefill_and_not_in_decode_unless_asked_for() -> None:
    model = ModelShape((0,), 64, top_k=4, hidden=4, intermediate=2, num_expert_groups=8)
    topology = Topology.uniform(num_nodes=4, ranks_per_node=2, slots_per_rank=9)
    tokens = lognormal(1, 64, seed=3)[None]

    def kept(phase: Phase, asked: bool | None = None) -> bool:
        constraints = Constraints(keep_groups=asked)
        history = LoadHistory(tokens, phase=phase)
        return Problem(history, topology, model, constraints=constraints).groups_stay

    assert (kept("prefill"), kept("mixed"), kept("decode")) == (True, True, False)
    assert (kept("decode", True), kept("prefill", False)) == (True, False)


@pytest.mark.parametrize(
    ("load", "settings", "error", "words"),
    [
        (np.ones((1, 5)), {}, PlacementError, "4 slots .* 5 experts"),
        (HOT_FIRST, {"budget": Budget(max_bytes=1)}, ConfigError, "max_bytes .* model"),
        (
            HOT_FIRST,
            {"policy": "best"},
            ConfigError,
            r"unknown policy 'best', expected one of: auto, contiguous, exact, .*greedy",
        ),
    ],
)
def test_call_that_cannot_be_planned_is_refused(
    load: NDArray[np.int64], settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan(load, TWO_RANKS, **settings)


def test_plan_excludes_windows_with_missing_ranks() -> None:
    tokens = np.array([[[9000, 0, 0]], HOT_FIRST])
    history = LoadHistory(tokens, missing_ranks=(frozenset({1}), frozenset()))

    assert plan(history, TWO_RANKS).before == 1.6

    with pytest.raises(HistoryError, match="expected a complete one"):
        plan(LoadHistory(tokens, missing_ranks=(frozenset({1}),) * 2), TWO_RANKS)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_plan_is_legal_complete_and_repeatable(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    slots = data.draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    alive = data.draw(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks))
    speed = data.draw(
        st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_ranks, max_size=num_ranks)
    )
    live_slots = sum(count for count, lives in zip(slots, alive, strict=True) if lives)
    if not live_slots:
        return
    topology = Topology(
        node_of_rank=np.zeros(num_ranks),
        slots_of_rank=np.array(slots),
        rank_speed=np.array(speed),
        alive=np.array(alive),
    )
    num_experts = data.draw(st.integers(1, live_slots))
    seed = data.draw(st.integers(0, 1000))
    load = np.random.default_rng(seed).integers(0, 1000, size=(3, 2, num_experts))
    for policy in ("auto", "contiguous", "greedy", "random"):
        first = plan(load, topology, policy=policy, seed=seed)
        again = plan(load, topology, policy=policy, seed=seed)
        later = plan(load[::-1] ** 2, topology, policy=policy, seed=seed, current=first.target)

        check_fits(first.target, topology)
        check_fits(later.target, topology)
        assert first.hash == again.hash
        assert (first.after_per_layer >= first.lower_bound - 1e-9).all()
        assert later.decision is Decision.KEEP or later.after <= later.before


# -- to a placement that was chosen elsewhere


def test_reason_of_a_plan_from_a_placement_that_lost_experts_has_no_endless_time() -> None:
    half = replace(Topology.uniform(1, 3, 2), alive=np.array([True, True, False]))
    lost = Placement(np.array([[0, EMPTY, 1, EMPTY, 2, EMPTY]]), num_experts=3, generation=7)
    whole = Placement(np.array([[0, 2, 1, EMPTY, EMPTY, EMPTY]]), num_experts=3, generation=3)

    found = plan_to(Problem(as_history(HOT_FIRST), half, current=lost), whole, why="an order")

    assert found.decision is Decision.MOVE
    assert found.reason == "an order: some experts have no live slot in the current placement"


def test_plan_to_an_earlier_placement_is_priced_and_not_gated() -> None:
    problem = Problem(as_history(HOT_FIRST), TWO_RANKS, current=EVEN_SPLIT, cost=DEAR_MOVES)

    found = plan_to(problem, SINGLE, why="an order")

    assert found.decision is Decision.RESPLIT  # a replica only goes
    assert (found.before, found.after, found.target.generation) == (1.0, 1.6, 8)
    assert found.reason.startswith("an order: imbalance 1.000 -> 1.600")
    assert found.reason.endswith("by itself a KEEP")


def test_plan_to_a_placement_keeps_experts_of_a_rank_in_their_slots() -> None:
    current = Placement(np.array([[0, 1, 0, 2]]), 3, 7)
    share = np.array([[1.0, 0.3, 1.0, 0.7]])
    wanted = Placement(np.array([[1, 0, 2, 0]]), 3, 2, share)  # the same ranks, other slots
    problem = Problem(as_history(HOT_FIRST), TWO_RANKS, current=current)

    found = plan_to(problem, wanted, why="an order")

    assert found.decision is Decision.RESPLIT
    assert found.target.slot_to_expert.tolist() == [[0, 1, 0, 2]]
    assert found.target.slot_share.tolist() == [[0.3, 1.0, 0.7, 1.0]]


def test_plan_to_what_serves_is_kept_and_something_has_to_serve() -> None:
    problem = Problem(as_history(HOT_LAST), TWO_RANKS, current=EVEN_SPLIT)

    found = plan_to(problem, EVEN_SPLIT.with_generation(3), why="an order")

    assert (found.decision, found.target) == (Decision.KEEP, EVEN_SPLIT)
    assert found.reason == "an order: it is the current placement"
    with pytest.raises(ConfigError):
        plan_to(Problem(as_history(HOT_FIRST), TWO_RANKS), EVEN_SPLIT, why="an order")


def test_plan_to_shares_that_the_dispatch_rule_ignores_states_both_figures() -> None:
    uneven = EVEN_SPLIT.with_shares(np.array([[0.9, 1.0, 0.1, 1.0]]))
    history, rule = as_history(HOT_FIRST), DispatchRule.EVEN
    problem = Problem(history, TWO_RANKS, current=EVEN_SPLIT, dispatch=rule)

    found = plan_to(problem, uneven, why="an order")

    assert found.reason.endswith("booked imbalance 1.480 is 1.000 under dispatch rule even")


def test_shares_of_other_source_nodes_are_refused_with_both_numbers() -> None:
    by_source = replace(EVEN_SPLIT, source_share=np.repeat(EVEN_SPLIT.slot_share[None], 3, axis=0))
    history = as_history(HOT_FIRST)

    for current, wanted in ((by_source, EVEN_SPLIT), (EVEN_SPLIT, by_source)):
        with pytest.raises(PlacementError, match="source_share is for 3 nodes, expected 1"):
            plan_to(Problem(history, TWO_RANKS, current=current), wanted, why="an order")


@given(seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_plan_to_a_placement_has_its_experts_and_shares_on_every_rank(seed: int) -> None:
    topology = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=5)
    current = plan(lognormal(3, 16, seed), topology, policy="random", seed=seed).target
    wanted = plan(lognormal(3, 16, seed + 1), topology).target
    problem = Problem(as_history(lognormal(3, 16, seed + 2)), topology, current=current)

    found = plan_to(problem, wanted, why="an order").target

    for layer in range(3):
        for rank in range(topology.num_ranks):
            span = topology.slots_on(rank)
            held = [
                dict(
                    zip(
                        one.slot_to_expert[layer, span].tolist(),
                        one.slot_share[layer, span].tolist(),
                        strict=True,
                    )
                )
                for one in (found, wanted)
            ]
            assert held[0] == held[1]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Placement(np.array([[0, 1, 2]]), 3), "found 1 layers of 3 slots and 3 experts"),
        (Placement(np.array([[0, 1, 2, 0]]), 3), "rank 1, which is not alive"),
        (Placement(np.array([[0, 0, 1, 2]]), 3), "rank 0 holds expert 0 more than once"),
    ],
    ids=["other slots", "a dead rank", "twice on a rank"],
)
def test_plan_to_a_placement_that_cannot_serve_is_refused(wanted: Placement, words: str) -> None:
    alive = np.array([True, "not alive" not in words])
    topology = replace(TWO_RANKS, slots_of_rank=np.array([3, 1]), alive=alive)
    current = Placement(np.array([[0, 1, 2, EMPTY]]), 3, 7)
    problem = Problem(as_history(HOT_FIRST), topology, current=current)

    with pytest.raises(PlacementError, match=words):
        plan_to(problem, wanted, why="an order")
