"""What is minimised: windows that stay apart, scenarios, time, and never worse than before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import Budget, CostModel, ModelShape, Scenarios, Topology, imbalance, plan
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.decision.expectation import Promise, realised
from eplb.decision.score import measured
from eplb.errors import ConfigError, HistoryError
from eplb.search.local_search import searched_score

FOUR = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=4)
FLAT_THEN_LINEAR = ((1.0, 10.0), (100.0, 10.0), (200.0, 20.0))


def drawn(share: np.ndarray, tokens: int, windows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([[rng.multinomial(tokens, row) for row in share] for _ in range(windows)])


def test_plan_on_windows_of_chance_beats_greedy_on_the_next_ones() -> None:
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=5)
    windows = drawn(np.random.default_rng(3).dirichlet(np.ones(32), size=6), 1000, 48, seed=3)
    seen, to_come = windows[:16], windows[16:]

    auto, greedy = (
        imbalance(to_come, plan(seen, ranks, policy=name).target, ranks).mean()
        for name in ("auto", "greedy")
    )

    assert auto < greedy


def test_scenario_is_planned_for() -> None:
    calm = np.array([[3000, 1000, 1000, 1000, 1000, 1000, 1000, 1000]])
    burst = np.array([[[1000, 1000, 1000, 1000, 1000, 1000, 1000, 9000]]])

    ready = plan(calm, FOUR, scenarios=Scenarios(burst, np.array([0.5]))).target
    unready = plan(calm, FOUR).target

    assert imbalance(burst, ready, FOUR).mean() < imbalance(burst, unready, FOUR).mean()


@pytest.mark.parametrize(
    ("windows", "weight", "error", "message"),
    [
        ([[[1.0, np.nan]]], [0.5], HistoryError, "scenario 0, layer 0, expert 1: load is nan"),
        ([[[1.0, -1.0]]], [0.5], HistoryError, "load is -1.0"),
        ([[1.0, 1.0]], [0.5], HistoryError, "scenarios have shape"),
        ([[[1.0, 1.0]]], [1.0], ConfigError, "sum to less than 1"),
        ([[[1.0, 1.0]]], [0.1, 0.1], ConfigError, "expected 1 above 0"),
    ],
)
def test_scenarios_that_cannot_be_planned_on_are_refused(
    windows: list[object], weight: list[float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Scenarios(np.array(windows), np.array(weight))


def test_few_tokens_get_one_replica_each_and_many_are_split() -> None:
    # At 8 tokens a step a second replica costs as much time as the first and saves none.
    few = np.array([[16, 8, 8, 8, 8, 8, 8, 8]])
    many = np.array([[4000, 800, 800, 800, 800, 800, 800, 800]])
    cost = CostModel(curve=FLAT_THEN_LINEAR)

    by_time = plan(few, FOUR, objective="time", cost=cost)
    split = plan(many, FOUR, objective="time", cost=cost)

    assert by_time.target.replica_count.tolist() == [[1] * 8]
    assert by_time.after == pytest.approx(1.0, abs=1e-3)  # two experts on each rank
    assert split.target.replica_count[0, 0] > 1


def history_of(load: np.ndarray, steps: int) -> LoadHistory:
    return LoadHistory(load[None], np.array([0]), np.array([steps - 1]))


@pytest.mark.parametrize(
    ("steps", "objective", "why"),
    [
        (100, "time", "5 rows a slot in a step, below 100"),
        (2, "tokens", "250 rows a slot in a step, not below 100"),
        (1, "tokens", "windows of one step, or without steps"),
        (100, "tokens", "no curve of the experts' time was given or measured"),
    ],
)
def test_objective_auto_follows_the_batch_and_says_why(
    steps: int, objective: str, why: str
) -> None:
    load = np.array([[4000, *[4000 // 7] * 7]])  # 500 rows a slot in a window
    cost = CostModel() if "no curve" in why else CostModel(curve=FLAT_THEN_LINEAR)

    found = plan(history_of(load, steps), FOUR, cost=cost)

    assert found.problem.objective == objective
    assert found.reason.endswith(f"; objective {objective}: {why}")
    same = plan(history_of(load, steps), FOUR, cost=cost, objective=objective)
    assert found.target.hash == same.target.hash


def test_gain_of_a_plan_for_time_is_judged_by_time() -> None:
    # Second replicas are active slots: without them 8 tokens a step take less time.
    load = np.array([[16, 8, 8, 8, 8, 8, 8, 8]])
    cost = CostModel(curve=FLAT_THEN_LINEAR)
    crowded = plan(load, FOUR, objective="tokens").target
    sparse = plan(load, FOUR, objective="time", cost=cost).target
    problem = Problem(LoadHistory(load[None]), FOUR, cost=cost)

    by_time = realised(problem, Promise(crowded, sparse, 0.1, "time"))
    by_tokens = realised(problem, Promise(crowded, sparse, 0.1, "tokens"))

    assert by_time > 0.1
    assert by_tokens < 0


def test_shared_expert_is_time_on_every_rank() -> None:
    load = np.array([[4000, 800, 800, 800, 800, 800, 800, 800]])
    model = ModelShape((0,), 8, top_k=1, hidden=4, intermediate=2)
    shared = replace(model, num_shared_experts=2)

    with_shared = plan(load, FOUR, model=shared, objective="time").before
    without = plan(load, FOUR, model=model, objective="time").before

    assert 1.0 < with_shared < without


@pytest.mark.parametrize(
    "curve",
    [
        ((1.0, 1.0),),
        ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((1.0, 1.0), (float("nan"), 1.0)),
        ((1.0, 1.0), (2.0, float("nan"))),
        ((1.0, 1.0), (float("inf"), 9.0)),
    ],
)
def test_curve_that_is_none_is_refused(curve: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match="cost: curve is"):
        CostModel(curve=curve)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1, 30, 1000]))
def test_plan_for_time_is_never_slower_than_the_plan_for_tokens(seed: int, scale: int) -> None:
    load = np.random.default_rng(seed).integers(0, 20, size=(2, 2, 10)) * scale

    by_time = plan(load, FOUR, objective="time")
    by_tokens = plan(load, FOUR)

    held = by_tokens.target.slot_to_expert.astype(np.int64)
    assert (
        searched_score(by_time.problem, by_time.target.slot_to_expert.astype(np.int64))
        <= searched_score(by_time.problem, held) + 1e-9
    ).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    windows=st.sampled_from([1, 3]),
    objective=st.sampled_from(["tokens", "time"]),
    max_moves=st.sampled_from([None, 0, 2, 5]),
)
def test_no_plan_is_worse_than_current_by_its_own_objective(
    seed: int, windows: int, objective: str, max_moves: int | None
) -> None:
    rng = np.random.default_rng(seed)
    load = rng.integers(1, 5000, size=(windows, 2, 10))
    current = plan(rng.integers(1, 5000, size=(2, 10)), FOUR, policy="random").target

    found = plan(
        load, FOUR, current=current, objective=objective, budget=Budget(max_moves=max_moves)
    )

    scores = [
        searched_score(found.problem, placement.slot_to_expert.astype(np.int64)).mean()
        for placement in (found.target, current)
    ]
    assert scores[0] <= scores[1] + 1e-9
    assert max_moves is None or found.num_moves <= max_moves
    assert measured(found.problem, found.target).mean() <= found.before + 1e-9


def test_budget_of_time_is_the_same_on_any_machine() -> None:
    rng = np.random.default_rng(5)
    load = np.rint(rng.lognormal(0, 1, (4, 64)) * 10_000).astype(np.int64)
    ranks = Topology.uniform(num_nodes=2, ranks_per_node=8, slots_per_rank=5)

    none, little, much = (
        plan(load, ranks, budget=Budget(time_ms=time_ms)) for time_ms in (0.0, 0.1, 50.0)
    )

    assert none.after >= little.after >= much.after
    assert none.after > much.after
    assert plan(load, ranks, budget=Budget(time_ms=0.1)).hash == little.hash


def test_plans_made_at_once_are_the_same_plan() -> None:
    load = np.rint(np.random.default_rng(6).lognormal(0, 1, (4, 64)) * 10_000).astype(np.int64)
    ranks = Topology.uniform(num_nodes=2, ranks_per_node=8, slots_per_rank=5)

    with ThreadPoolExecutor(4) as threads:
        plans = list(threads.map(lambda _: plan(load, ranks, seed=3), range(8)))

    assert {found.hash for found in plans} == {plan(load, ranks, seed=3).hash}
