"""How much a search does, where, on how many threads; and that a tie is no gain."""

from __future__ import annotations

import numpy as np
import pytest

from eplb import (
    Budget,
    Constraints,
    CostModel,
    ModelShape,
    Placement,
    Plan,
    Problem,
    Topology,
    plan,
)
from eplb.core.cost import Decision
from eplb.core.load import LoadHistory, as_history
from eplb.errors import ConfigError
from eplb.policies import greedy
from eplb.policies import incremental as incremental_policy
from eplb.search import local_search as search
from eplb.search.local_search import searched_score

ONE_EACH = Topology.uniform(num_nodes=8, ranks_per_node=8, slots_per_rank=1)
TWO_EACH = Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=2)


def loads(layers: int, experts: int, windows: int = 1, seed: int = 0) -> np.ndarray:
    """Tokens [T, L, E] whose windows differ by more than chance."""
    rng = np.random.default_rng(seed)
    share = rng.lognormal(0, 1, (layers, experts))
    drift = rng.lognormal(0, 0.3 if windows > 1 else 0.0, (windows, layers, experts))
    return np.rint(share * drift * 1e5).astype(np.int64)


def drifted(load: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(9)
    return np.rint(load * rng.lognormal(0, 0.2, load.shape)).astype(np.int64)


def same(one: Plan, other: Plan) -> bool:
    held, shares = one.target.slot_to_expert, one.shares
    return bool(
        held.tobytes() == other.target.slot_to_expert.tobytes()
        and shares.tobytes() == other.shares.tobytes()
        and one.to_dict() == other.to_dict()
    )


@pytest.mark.parametrize("time_ms", [None, 2.0])
@pytest.mark.parametrize("windows", [1, 6])
def test_plans_on_1_2_and_4_threads_are_equal_byte_for_byte(
    windows: int, time_ms: float | None
) -> None:
    load = loads(9, 48, windows)
    current = plan(load, TWO_EACH, policy="greedy").target

    def found(num_threads: int) -> tuple[Plan, Plan]:
        budget = Budget(time_ms=time_ms, num_threads=num_threads)
        fresh = plan(load, TWO_EACH, budget=budget)
        return fresh, plan(drifted(load), TWO_EACH, current=current, budget=budget)

    alone = found(1)

    for num_threads in (2, 4):
        assert all(same(one, other) for one, other in zip(alone, found(num_threads), strict=True))


@pytest.mark.parametrize("windows", [1, 6])
def test_plan_does_not_depend_on_which_layer_ends_first(
    windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, budget = loads(9, 48, windows), Budget(time_ms=2.0)
    in_order = plan(load, TWO_EACH, budget=budget)

    monkeypatch.setattr(search, "_on_threads", lambda work, layers, _: work(layers[::-1].copy()))

    assert same(in_order, plan(load, TWO_EACH, budget=budget))


def test_steps_that_even_layers_leave_go_to_a_layer_far_from_its_bound() -> None:
    hard = loads(1, 48)
    even = np.full((1, 7, 48), 1000)
    ranks, time_ms = TWO_EACH, 0.4

    alone = plan(hard, ranks, budget=Budget(time_ms=time_ms / 8))
    among_even_ones = plan(
        np.concatenate([hard, even], axis=1), ranks, budget=Budget(time_ms=time_ms)
    )

    assert among_even_ones.after_per_layer[0] < alone.after_per_layer[0]


def test_no_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads is 0, expected 1 or more"):
        Budget(num_threads=0)


def test_perturbation_over_several_windows_changes_replica_counts() -> None:
    load = loads(6, 48, windows=8, seed=3)

    greedy, auto = (plan(load, TWO_EACH, policy=name) for name in ("greedy", "auto"))

    assert (auto.target.replica_count != greedy.target.replica_count).any()
    assert auto.after < greedy.after - 0.02


@pytest.mark.parametrize("policy", ["auto", "greedy"])
def test_fresh_plan_of_one_slot_a_rank_keeps_what_serves(policy: str) -> None:
    load = loads(3, 64)

    found = plan(load, ONE_EACH, policy=policy)

    assert (found.decision, found.num_moves) == (Decision.KEEP, 0)


@pytest.mark.parametrize("policy", ["auto", "greedy"])
def test_replan_of_one_slot_a_rank_keeps_what_serves(policy: str) -> None:
    load = loads(3, 64)
    shuffled = np.random.default_rng(1).permuted(np.tile(np.arange(64), (3, 1)), axis=1)
    current = Placement(shuffled.astype(np.int32), num_experts=64, generation=3)

    found = plan(drifted(load), ONE_EACH, current=current, policy=policy)

    assert (found.decision, found.num_moves) == (Decision.KEEP, 0)


def test_replicas_on_ranks_of_one_slot_move_only_where_counts_change() -> None:
    load = loads(3, 48)
    current = plan(load, ONE_EACH, policy="greedy").target

    found = plan(drifted(load), ONE_EACH, current=current, policy="greedy")

    more = np.maximum(found.target.replica_count - current.replica_count, 0)
    assert found.num_moves == more.sum()
    assert 0 < found.num_moves < 0.2 * current.slot_to_expert.size


def test_fresh_plan_with_one_slot_ranks_moves_only_the_replicas() -> None:
    found = plan(loads(3, 48), ONE_EACH, policy="greedy")

    assert found.num_moves == 3 * (64 - 48)


def test_ranks_of_one_slot_and_other_speeds_are_not_taken_for_alike() -> None:
    speed = np.where(np.arange(64) < 8, 2.0, 1.0)
    ranks = Topology(np.zeros(64, int), np.ones(64, int), rank_speed=speed)

    found = plan(loads(2, 64), ranks, policy="greedy")

    hottest = np.argsort(-loads(2, 64)[0], axis=1)[:, :8]
    for layer in range(2):
        assert set(found.target.slot_to_expert[layer, :8]) == set(hottest[layer])


def test_layer_that_a_fresh_plan_does_not_improve_stays_as_it_is() -> None:
    even, uneven = np.full((1, 1, 8), 100), np.array([[[800, 10, 10, 10, 10, 10, 10, 10]]])
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=3)

    found = plan(np.concatenate([even, uneven], axis=1), ranks)

    moved = found.target.slot_to_expert != found.base.slot_to_expert
    assert moved.any(axis=1).tolist() == [False, True]


def test_perturbation_that_finds_nothing_leaves_the_best_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = np.array([[600, 560, 120, 120, 20, 10, 10, 10]])
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=2)
    found = []

    for patience in (1, 4, 16, 64):
        monkeypatch.setattr(search, "PATIENT", patience)
        found.append(plan(load, ranks, seed=2).after)

    assert found == sorted(found, reverse=True)


def test_problem_of_some_layers_is_planned_as_these_layers_of_the_whole() -> None:
    layers = np.array([0, 3, 5])
    windows = as_history(loads(6, 48, 6))
    base = plan(drifted(windows.tokens[0]), TWO_EACH, policy="greedy").target
    whole = Problem(windows, TWO_EACH, current=base)

    part = whole.of_layers(layers)

    assert np.allclose(part.price, whole.price[layers], rtol=0.1)
    assert np.array_equal(part.current.slot_to_expert, base.slot_to_expert[layers])
    assert np.array_equal(greedy.greedy(part), greedy.greedy(whole)[layers])
    # Each layer draws from its number, so a search from there finds another local minimum.
    searched = searched_score(part, greedy.refined(part))
    assert np.allclose(searched, searched_score(whole, greedy.refined(whole))[layers], rtol=0.03)


def test_problem_of_some_layers_has_their_part_of_every_limit() -> None:
    model = ModelShape(tuple(range(6)), 48, 2, 64, 32)
    windows = as_history(loads(6, 48, 4))
    budget = Budget(max_moves=60, max_bytes=50 * model.expert_bytes)
    slots = np.tile(TWO_EACH.slots_of_rank, (6, 1))
    slots[3, 0] = 1
    constraints = Constraints(pinned={(3, 7): (2,), (4, 1): (0,), 5: (9,)}, slots=slots)
    whole = Problem(windows, TWO_EACH, model, budget=budget, constraints=constraints)

    part = whole.of_layers(np.array([5, 3, 0])).of_layers(np.array([1]))

    assert part.max_moves == 8
    assert part.part == pytest.approx(1 / 6)
    assert part.model is not None
    assert part.model.layer_ids == (3,)
    assert part.constraints.pinned == {(0, 7): (2,), 5: (9,)}
    assert part.room.tolist() == [slots[3].tolist()]


@pytest.mark.parametrize("num_changed", [0, 3])
def test_fresh_plans_are_tried_worst_first_until_a_batch_gains_nothing(
    num_changed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Topology.uniform(num_nodes=8, ranks_per_node=8, slots_per_rank=2)
    old, new = loads(12, 96, 4, seed=1), loads(12, 96, 4, seed=2)
    base = plan(old, ranks).target
    new[:, num_changed:] = old[:, num_changed:]
    problem = Problem(
        as_history(new), ranks, current=base, cost=CostModel(pay_back_s=0.2, expert_part=1.0)
    )
    tried: list[LoadHistory] = []

    def noted(part: Problem) -> np.ndarray:
        tried.append(part.history)
        return greedy.refined(part)

    monkeypatch.setattr(incremental_policy, "refined", noted)
    monkeypatch.setattr(incremental_policy, "FIRST_FRESH", 3)
    incremental_policy.incremental(problem)

    # Of the other nine layers, those that may gain: three with the loads above.
    assert [part.num_layers for part in tried] == ([3, 3] if num_changed else [3])
