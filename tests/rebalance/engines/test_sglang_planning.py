"""Plans for SGLang's map, without the engine: lists, records, and the rule that is booked."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from eplb import DispatchRule
from eplb.core.topology import Topology
from eplb.errors import PlacementError, StoreError
from rebalance.engines.common.messages import PassWindow
from rebalance.engines.common.planning import System
from rebalance.engines.common.replica_weights import shares_of
from rebalance.engines.sglang.planning import (
    RULES,
    Planned,
    Planner,
    Shape,
    answer_of,
    make_plan,
)
from rebalance.engines.sglang.replica_weights import (
    evened,
    list_weights,
    replica_lists,
    source_table,
    source_weights,
)

EXPERTS, SLOTS, RANKS = 8, 12, 4
TRIVIAL = np.tile(np.arange(SLOTS) % EXPERTS, (3, 1))
MOVABLE = np.array([False, True, True])


def shape(algorithm: str) -> Shape:
    return Shape(System(RANKS, 1, 1, 8), 0, EXPERTS, SLOTS, algorithm, [1, 2])


def load(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(0, 1.0, (2, 3, EXPERTS)) * 1e4
    drawn[:, ~MOVABLE] = 0
    return np.rint(drawn).astype(np.int64)


def planned(algorithm: str, seed: int) -> Planned:
    """A plan with free moves for a map that no plan has made."""
    serving = np.zeros_like(TRIVIAL)
    return make_plan(load(seed), TRIVIAL, serving, shape(algorithm), **limits())


def limits(max_moved: float = 1.0) -> dict[str, float]:
    return {"max_moved": max_moved, "pay_back_s": 1e9, "target_imbalance": 1.0}


def load_of_slots(held: np.ndarray) -> np.ndarray:
    """Tokens [L, S], of the first replica of each expert."""
    tokens = np.zeros(held.shape, dtype=np.int64)
    for row, expert in np.ndindex(3, EXPERTS):
        tokens[row, np.flatnonzero(held[row] == expert)[0]] = load(4)[0, row, expert]
    return tokens


def planner_of(algorithm: str, max_moved: float = 1.0) -> Planner:
    """With a window under a map that no plan has made."""
    made = Planner({"shape": asdict(shape(algorithm)), **limits(max_moved)})
    made.add(PassWindow(load_of_slots(TRIVIAL), TRIVIAL, np.zeros_like(TRIVIAL)))
    return made


def test_list_names_each_slot_as_often_as_its_weight() -> None:
    held = np.array([[0, 1, 0, 2]])
    weights = np.array([[3, 1, 1, 1]])

    assert replica_lists(held, weights, 3).tolist() == [
        [[0, 0, 2, 0], [1, -1, -1, -1], [3, -1, -1, -1]]
    ]


@pytest.mark.parametrize("seed", range(3))
def test_random_lists_have_their_weights_and_balanced_prefixes(seed: int) -> None:
    random = np.random.default_rng(seed)
    held = np.stack([random.permutation(np.arange(SLOTS) % EXPERTS) for _ in range(3)])
    weights = random.integers(1, 5, held.shape)

    lists = replica_lists(held, weights, EXPERTS)

    for row, expert in np.ndindex(*lists.shape[:2]):
        entries = [slot for slot in lists[row, expert].tolist() if slot >= 0]
        slots = np.flatnonzero(held[row] == expert).tolist()
        assert Counter(entries) == {slot: weights[row, slot] for slot in slots}
        assert (lists[row, expert, len(entries) :] == -1).all(), "padding stands last"
        for length in range(1, len(entries) + 1):
            seen = Counter(entries[:length])
            for slot in slots:
                due = length * weights[row, slot] / len(entries)
                assert abs(seen[slot] - due) <= 1.0, "a prefix is split as nearly as it can be"


def test_list_longer_than_the_engines_map_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"expert 0 has 5 .*4"):
        replica_lists(np.array([[0, 1, 0, 2]]), np.array([[4, 1, 1, 1]]), 3)


def test_expert_without_a_slot_is_refused() -> None:
    with pytest.raises(PlacementError, match="row 0: expert 2 has no slot"):
        replica_lists(np.array([[0, 1, 0, 1]]), np.ones((1, 4), dtype=np.int64), 3)


def test_weights_follow_shares_by_largest_remainder() -> None:
    held = np.array([[0, 0, 0, 1]])

    weights = list_weights(held, np.array([[0.55, 0.30, 0.15, 1.0]]), 20)

    assert weights.tolist() == [[11, 6, 3, 1]]
    assert shares_of(held, weights).tolist() == [[0.55, 0.3, 0.15, 1.0]]


def test_even_shares_have_the_shortest_list() -> None:
    held = np.array([[0, 0, 1]])

    assert list_weights(held, np.array([[0.5, 0.5, 1.0]]), 64).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("algorithm", sorted(RULES))
def test_plan_leaves_rows_without_routed_experts(algorithm: str) -> None:
    made = planned(algorithm, 1)

    assert made.moves
    assert (made.slot_to_expert[0] == TRIVIAL[0]).all()
    assert made.figures["effective"] < made.figures["imbalance_before"]
    if RULES[algorithm] is DispatchRule.EVEN:
        assert (made.weights == 1).all()


def test_static_plan_has_a_slot_of_the_expert_for_each_source_rank() -> None:
    made = planned("static", 2)

    rows = np.arange(3)[:, None, None]
    assert made.sources.shape == (3, EXPERTS, RANKS)
    assert (made.slot_to_expert[rows, made.sources] == np.arange(EXPERTS)[:, None]).all()
    used = np.zeros((3, SLOTS), dtype=np.int64)
    np.add.at(used, (rows, made.sources), 1)
    assert (used == made.weights).all(), "a slot weighs as many ranks as use it"


def test_effective_imbalance_is_that_of_the_slots_which_sources_use() -> None:
    made = planned("static", 5)

    tokens = load(5)[:, MOVABLE].astype(float)  # [T, L, E], a quarter from each source rank
    loads = np.zeros((*tokens.shape[:2], RANKS))
    for row, expert, source in np.ndindex(2, EXPERTS, RANKS):
        rank = made.sources[1 + row, expert, source] // (SLOTS // RANKS)
        loads[:, row, rank] += tokens[:, row, expert] / RANKS
    by_window = (loads.max(2) / loads.mean(2)).mean(axis=1)
    expected = np.average(by_window, weights=tokens.sum(axis=(1, 2)))
    assert made.figures["effective"] == pytest.approx(expected, abs=1e-4)


def test_source_ranks_use_their_own_slot_then_their_nodes() -> None:
    topology = Topology.uniform(2, 2, 2)  # slots 0, 1 on rank 0, ..., 6, 7 on rank 3
    held = np.array([[0, 1, 2, 3, 0, 4, 5, 6]])
    weights = np.array([[3, 4, 4, 4, 1, 4, 4, 4]])

    table = source_table(held, weights, 7, topology)

    assert table[0, 0].tolist() == [0, 0, 4, 0], "rank 2 has slot 4, which one rank may use"
    assert table[0, 6].tolist() == [7, 7, 7, 7]


def test_weights_that_leave_a_source_rank_without_a_slot_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"expert 0 .*3.*4"):
        source_table(
            np.array([[0, 0, 1, 2]]), np.array([[2, 1, 4, 4]]), 3, Topology.uniform(1, 4, 1)
        )


@pytest.mark.parametrize("seed", range(2))
def test_evened_weights_keep_sums_and_lower_the_busiest_rank(seed: int) -> None:
    random = np.random.default_rng(seed)
    held = np.stack([random.permutation(np.arange(SLOTS) % EXPERTS) for _ in range(3)])
    work = random.lognormal(0, 1.0, (3, EXPERTS))
    weights = source_weights(held, np.ones(held.shape), RANKS)

    busiest = []
    for most in (0, 100):
        found, evener = evened(
            held,
            weights,
            work / work.sum(axis=1, keepdims=True) * RANKS,
            np.arange(SLOTS) // (SLOTS // 2),
            each=SLOTS // RANKS,
            goal=1.0,
            most_swaps=most,
        )
        assert (evener >= 1).all()
        loads = []
        for row in range(3):
            assert (np.bincount(found[row], evener[row]) == RANKS).all()
            for half in (slice(0, SLOTS // 2), slice(SLOTS // 2, SLOTS)):
                assert sorted(found[row, half]) == sorted(held[row, half]), "zones stay"
            brought = work[row, found[row]] * evener[row]
            loads.append(np.bincount(np.arange(SLOTS) // 3, brought).max())
        assert (found == held).all() or most
        busiest.append(loads)

    start = [
        np.bincount(np.arange(SLOTS) // 3, work[row, held[row]] * weights[row]).max()
        for row in range(3)
    ]
    assert (np.array(busiest[0]) <= start).all()
    assert (np.array(busiest[1]) <= busiest[0]).all()
    assert np.sum(busiest[1]) < np.sum(start)


def test_answer_is_the_same_on_every_call() -> None:
    first, second = planner_of("static"), planner_of("static")

    assert first.plan() == second.plan()
    assert first.plan() == second.plan()


def test_planner_without_a_window_has_no_answer() -> None:
    assert Planner({"shape": asdict(shape("static")), **limits()}).plan() is None


def test_planner_moves_few_experts_once_a_plan_has_made_the_map() -> None:
    planner = planner_of("dynamic", max_moved=0.0)
    found = planner.plan()
    assert found is not None
    first = answer_of(found[0])
    planner.add(
        PassWindow(load_of_slots(first.slot_to_expert), first.slot_to_expert, first.weights)
    )

    again = planner.plan()

    assert not np.array_equal(first.slot_to_expert, TRIVIAL)
    assert again is not None
    if again[0]:
        assert np.array_equal(answer_of(again[0]).slot_to_expert, first.slot_to_expert)


def test_damaged_answer_is_refused() -> None:
    found = planner_of("dynamic").plan()
    assert found is not None
    record = bytearray(found[0])
    record[len(record) // 2] ^= 1

    with pytest.raises(StoreError, match="digest"):
        answer_of(bytes(record))
