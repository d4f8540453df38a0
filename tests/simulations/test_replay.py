"""The replay over time: one pass, each scheme by its own rules, input that is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from eplb import ModelShape, Placement, Topology, plan
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.errors import ConfigError, HistoryError, PlacementError
from eplb.policies.table import greedy_policy, register_policy
from simulations.migration_cost import moved_between
from simulations.peers.engines import deepseek_slots
from simulations.replay import Scenario, noise_floor, replay, replay_all
from simulations.schemes import lowest
from simulations.windows import Tokens, WindowSeries
from simulations.workloads import windows_named

FOUR_RANKS = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
HOT = np.array([[60, 20, 20, 20, 20, 20, 20, 20]])


def repeated(window: Tokens, num_windows: int) -> WindowSeries:
    return WindowSeries(*window.shape, lambda: (window.copy() for _ in range(num_windows)))


def test_windows_are_read_once_for_all_policies() -> None:
    readings = 0

    def read() -> Iterator[Tokens]:
        nonlocal readings
        readings += 1
        yield from (HOT.copy() for _ in range(4))

    found = replay_all(
        Scenario(FOUR_RANKS, load=WindowSeries(1, 8, read)), ["none", "auto", "deepseek"]
    )

    assert readings == 1
    assert [len(one.imbalance) for one in found] == [3, 3, 3]


def test_memory_of_a_replay_does_not_grow_with_windows() -> None:
    def peak(num_windows: int) -> int:
        windows = windows_named(f"generated:steady:layers=2,experts=64,windows={num_windows}", 0)
        scenario = Scenario(Topology.uniform(1, 8, 9), load=windows, plan_every=10_000)
        tracemalloc.start()
        try:
            replay(scenario, "none")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(40)  # what is compiled and cached
    # 160 windows more are 164 kB of counts; what stays of each is its imbalance.
    assert peak(200) - peak(40) < 60_000


def test_policies_are_judged_as_if_replayed_alone() -> None:
    windows = windows_named("generated:gamma:layers=2,experts=16,windows=8,drift=0.5", 1)
    scenario = Scenario(Topology.uniform(1, 4, 5), load=windows)

    together = replay_all(scenario, ["greedy", "none", "vllm"])

    for one in together:
        assert np.array_equal(replay(scenario, one.policy).imbalance, one.imbalance)


def test_ranks_without_slots_count_in_no_mean() -> None:
    topology = Topology(np.zeros(3), np.array([4, 4, 0]))
    found = replay(Scenario(topology, load=repeated(HOT, 3)), "none")

    assert found.per_window.tolist() == [1.2, 1.2]  # 120 of 200 tokens on one of two ranks
    assert noise_floor(Scenario(topology, load=repeated(HOT, 2)), 200.0) < 1.2


@pytest.mark.parametrize(
    ("policy", "planned_after"),
    [("deepseek", [3, 7, 11]), ("vllm", [0, 4, 8]), ("sglang", [3])],
)
def test_engines_plan_by_their_own_triggers(policy: str, planned_after: list[int]) -> None:
    # Hot in another place in every window, so that each plan changes something; SGLang's first plan
    # uses ranks better than 0.8, and so is its last one.
    def read() -> Iterator[Tokens]:
        for number in range(13):
            yield np.roll(HOT, number if policy != "sglang" else 0, axis=1)

    found = replay(Scenario(FOUR_RANKS, load=WindowSeries(1, 8, read), plan_every=4), policy)

    assert [one.window for one in found.rebalances] == planned_after


def test_engine_plans_on_all_load_since_its_latest_plan() -> None:
    first, second = np.array([[90, 10, 10, 10]]), np.array([[10, 90, 10, 10]])
    windows = WindowSeries(1, 4, lambda: iter([first, second, second, first]))
    topology = Topology.uniform(1, 2, 3)

    found = replay(Scenario(topology, load=windows, plan_every=2, keep_placements=True), "deepseek")

    # Of windows 0 and 1 together experts 0 and 1 are hot alike, and both get a replica.
    target = found.rebalances[0].target
    assert target is not None
    assert target.replica_count[0].tolist() == [2, 2, 1, 1]


def deepseek_slowly(tokens: list[int], num_ranks: int, num_slots: int) -> list[int]:
    """One layer, without groups, step by step as its description has it."""
    copies = [1] * len(tokens)
    replicas = list(range(len(tokens)))
    while len(replicas) < num_slots:
        heaviest = max(range(len(tokens)), key=lambda e: (tokens[e] / copies[e], -e))
        replicas.append(heaviest)
        copies[heaviest] += 1
    order = sorted(range(num_slots), key=lambda r: (-tokens[replicas[r]] / copies[replicas[r]], r))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for replica in order:
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < num_slots // num_ranks]
        load = [sum(tokens[replicas[r]] / copies[replicas[r]] for r in ranks[k]) for k in free]
        ranks[free[load.index(min(load))]].append(replica)
    return [replicas[replica] for rank in ranks for replica in rank]


@pytest.mark.parametrize("seed", range(5))
def test_deepseek_peer_places_as_its_description_says(seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(1, 10_000, size=(3, 16))

    held = deepseek_slots(tokens, Topology.uniform(1, 4, 6))

    assert held.tolist() == [deepseek_slowly(layer.tolist(), 4, 24) for layer in tokens]


def test_deepseek_peer_keeps_groups_on_nodes() -> None:
    tokens = np.random.default_rng(0).integers(1, 1000, size=(2, 16))

    held = deepseek_slots(tokens, Topology.uniform(2, 2, 6), num_groups=4)

    for layer in held.reshape(2, 2, 12):
        nodes = [{int(expert) // 4 for expert in node} for node in layer]
        assert not nodes[0] & nodes[1]
        assert len(nodes[0] | nodes[1]) == 4


def test_deepseek_peer_refuses_uneven_ranks() -> None:
    with pytest.raises(PlacementError, match="expected live ranks of one size"):
        deepseek_slots(HOT, Topology(np.zeros(2), np.array([4, 5])))


def test_raw_policy_is_taken_where_the_gate_keeps_what_serves() -> None:
    def in_reverse(problem: Problem) -> Placement:
        held = np.resize(np.arange(problem.num_experts)[::-1], (1, problem.topology.num_slots))
        return Placement(held, problem.num_experts)

    register_policy("in_reverse", in_reverse)
    scenario = Scenario(FOUR_RANKS, load=repeated(HOT, 4))

    gated, raw = replay_all(scenario, ["in_reverse", "raw:in_reverse"])

    assert (len(gated.rebalances), len(raw.rebalances)) == (0, 1)


def test_oracles_bound_what_planners_reach() -> None:
    windows = windows_named("generated:gamma:layers=2,experts=16,windows=10,drift=0.6", 3)
    scenario = Scenario(Topology.uniform(1, 4, 6), load=windows)
    names = ["auto", "oracle:shares", "oracle:re-plan", "oracle:force-balanced"]

    ours, shares, fresh, forced = replay_all(scenario, names)

    assert [one.is_oracle for one in (ours, shares, fresh, forced)] == [False, True, True, True]
    assert np.allclose(forced.imbalance, 1.0)
    # Neither oracle bounds the other: one places for an even split, one splits as placed.
    assert 1.0 <= fresh.mean < ours.mean
    assert 1.0 <= shares.mean < ours.mean
    assert ours.moves == shares.moves  # the same plans; only the split looks ahead


def test_failing_policy_keeps_what_it_did_and_stops_no_other() -> None:
    def fails_later(problem: Problem) -> Placement:
        if problem.history.num_windows > 2:
            raise PlacementError("no place left")
        return greedy_policy(problem)

    register_policy("fails_later", fails_later)
    found = replay_all(Scenario(FOUR_RANKS, load=repeated(HOT, 5)), ["fails_later", "none"])

    assert len(found[0].imbalance) == 2
    assert "planning after window 2: no place left" in found[0].failed
    assert (len(found[1].imbalance), found[1].failed) == (4, "")


@pytest.mark.parametrize(
    ("windows", "policy", "error", "words"),
    [
        ([HOT, HOT, np.ones((1, 4), int)], "none", HistoryError, r"2 .*\(1, 4\).*\(1, 8\)"),
        ([HOT, -HOT], "none", HistoryError, "window 1 has -60 tokens"),
        ([HOT], "none", HistoryError, "1 windows, .* 2"),
        ([HOT, HOT], "best", ConfigError, "'best', expected one of: .*vllm"),
    ],
)
def test_windows_and_policies_that_cannot_be_replayed_are_refused(
    windows: list[Tokens], policy: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        replay(Scenario(FOUR_RANKS, load=WindowSeries(1, 8, lambda: iter(windows))), policy)


def test_idle_windows_count_in_no_mean() -> None:
    windows = WindowSeries(1, 8, lambda: iter([HOT, HOT, 0 * HOT, HOT]))

    ours, engine, forced = replay_all(
        Scenario(TWO_RANKS_OF_FOUR, load=windows), ["none", "deepseek", "oracle:re-plan"]
    )

    assert ours.idle.tolist() == [False, True, False]
    assert ours.mean == pytest.approx(1.2)
    assert not engine.failed
    assert not forced.failed


TWO_RANKS_OF_FOUR = Topology.uniform(1, 2, 4)


@pytest.mark.parametrize("seed", [100, 101])
def test_replay_behind_idle_windows_serves_busy_ones_as_plans_on_the_sum(seed: int) -> None:
    def planned_on_the_sum(problem: Problem) -> Placement:
        total = problem.history.total()
        return plan(total, problem.topology, current=problem.current).target

    register_policy(f"sum {seed}", planned_on_the_sum)
    rng = np.random.default_rng(seed)
    share = rng.gamma(1.5, size=(3, 32))
    sizes = [5] * 14 + [48_000] * 10
    load = [[rng.multinomial(n, row / row.sum()) for row in share] for n in sizes]
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=9)
    scenario = Scenario(ranks, load=LoadHistory(np.array(load)), past_windows=24)

    replays = replay_all(scenario, ["auto", f"sum {seed}"])
    ours, on_sum = (one.per_window[-8:].mean() for one in replays)

    assert ours < on_sum + 0.005


def test_incomplete_windows_are_skipped_and_counted() -> None:
    gap = (frozenset[int](), frozenset({1}), frozenset[int]())
    history = LoadHistory(np.stack([HOT, 0 * HOT, HOT]), missing_ranks=gap)
    scenario = Scenario(TWO_RANKS_OF_FOUR, load=history)

    assert replay(scenario, "none").per_window.tolist() == [pytest.approx(1.2)]
    assert scenario.windows.skipped == 1


def test_steps_of_windows_reach_the_planner() -> None:
    history = LoadHistory(np.stack([HOT] * 3), np.arange(3) * 50, np.arange(3) * 50 + 49)
    seen: list[int] = []

    def watches(problem: Problem) -> Placement:
        seen.extend(problem.history.steps_per_window.tolist())
        return greedy_policy(problem)

    register_policy("watches", watches)
    replay(Scenario(FOUR_RANKS, load=history), "watches")

    assert set(seen) == {50}


def test_moves_are_counted_by_link() -> None:
    base = Placement(np.array([[0, 1, 0, 2, 3, 2]]), 4)
    target = Placement(np.array([[1, 0, 0, 3, 2, 0]]), 4)

    moved = moved_between(base, target, Topology.uniform(2, 1, 3))

    # Experts change places on both ranks; expert 0 comes to rank 1 from another node.
    assert moved.by_link == {"same_rank": 4, "node": 0, "network": 1}
    assert moved.received.tolist() == [[2, 2], [0, 0], [0, 1]]


def test_bytes_need_a_model() -> None:
    model = ModelShape((0,), 8, 2, 64, 32)
    without = replay(Scenario(FOUR_RANKS, load=repeated(HOT, 3)), "deepseek")
    with_model = replay(Scenario(FOUR_RANKS, model, load=repeated(HOT, 3)), "deepseek")

    assert without.bytes_by_link == {}
    assert sum(with_model.bytes_by_link.values()) == with_model.moves * model.expert_bytes


# Two ranks of two experts and one free slot each: 90 + 10 tokens on rank 0, 10 + 10 on rank 1.
RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
HELD = np.array([0, 1, -1, 2, 3, -1], dtype=np.int32)
LOAD = np.array([90.0, 10.0, 0.0, 10.0, 10.0, 0.0])


def test_pieces_make_ranks_equal_where_slots_suffice() -> None:
    (piece,) = lowest(LOAD, HELD, RANKS, least=0, tolerance=1e-4)

    assert (piece.slot, piece.rank, piece.tokens) == (0, 1, 40.0)


@pytest.mark.parametrize("window", [np.array([[90, 10, 10, 10]]), np.array([[0, 0, 0, 0]])])
def test_oracle_serves_every_token(window: Tokens) -> None:
    windows = WindowSeries(1, 4, lambda: (window.copy() for _ in range(3)))

    (found,) = replay_all(Scenario(RANKS, load=windows), ["oracle:moonep"])

    assert found.is_oracle
    assert found.last_load.sum() == window.sum()
    assert found.mean == pytest.approx(1.0)


def test_ultra_ep_is_within_its_published_range_at_its_set_up() -> None:
    # 64 ranks of 4 experts and 2 redundant slots, 65,536 rows a rank: 1.01 to 1.04 is published.
    text = "generated:prefill:layers=2,experts=256,windows=3,tokens=524288,shape_low=1,shape_high=1"
    scenario = Scenario(Topology.uniform(8, 8, 6), load=windows_named(text, 0))

    none, moon, ultra = replay_all(scenario, ["none", "oracle:moonep", "oracle:ultraep"])

    assert none.mean > 2.0
    assert 1.0 <= moon.mean <= ultra.mean <= 1.04
