"""The policies against slow references, brute force, and what each promises."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb import Constraints, CostModel, ModelShape, Placement, Problem, Topology, plan
from eplb.core.load import as_history
from eplb.core.zones import Ranks, replicate, zones_for
from eplb.policies.greedy import refined
from eplb.policies.table import POLICIES
from eplb.search.changes import FREE
from eplb.search.local_search import COPIES_ALWAYS, COPIES_NEVER, improve, rules_for
from eplb.search.packing import pack
from eplb.search.relabel import in_place, with_most_kept
from tests.support import slow_planner as reference


def one_zone(slots_of_rank: list[int], speed: list[float]) -> Ranks:
    first = np.concatenate([[0], np.cumsum(slots_of_rank)]).astype(np.int64)
    room = np.array([slots_of_rank], dtype=np.int64)
    zeros = np.zeros(len(speed), dtype=np.int64)
    return Ranks(zeros, zeros, first, 1.0 / np.array(speed), room)


def by_rank(held: np.ndarray, slots_of_rank: list[int]) -> list[list[int]]:
    return [part.tolist() for part in np.split(held, np.cumsum(slots_of_rank)[:-1])]


def test_expert_that_stays_on_a_rank_stays_in_its_slot() -> None:
    base, held = np.array([[4, 7, 5]]), np.array([[5, 4, 6]])

    assert in_place(held, base, Topology.uniform(1, 1, 3)).tolist() == [[4, 6, 5]]


def test_replica_without_a_rank_of_its_own_trades_places() -> None:
    # Expert 0 needs three ranks; packed heaviest first, rank 2 has the only free slot left.
    work, count = np.array([[1.0, 8.0, 8.0, 8.0, 6.0]]), np.array([[2, 1, 1, 1, 1]])
    ranks = one_zone([2, 1, 3], [1.0, 1.0, 1.0])

    held = by_rank(pack(work, count, np.zeros((1, 5), dtype=np.int64), ranks)[0], [2, 1, 3])

    assert sorted(expert for mine in held for expert in mine) == [0, 0, 1, 2, 3, 4]
    assert all(len(set(mine)) == len(mine) for mine in held)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_replicas_and_packing_equal_the_slow_reference(data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    speed = data.draw(
        st.lists(st.sampled_from([0.5, 1.0, 1.5]), min_size=len(slots), max_size=len(slots))
    )
    num_experts = data.draw(st.integers(max(1, sum(slots) - 6), sum(slots)))
    loads = data.draw(st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts))
    work = np.array([loads], dtype=np.float64)
    zones = np.zeros((1, num_experts), dtype=np.int64)
    ranks = one_zone(slots, speed)

    least = np.ones_like(zones)
    count = replicate(work, zones, np.array([[sum(slots)]]), np.array([[len(slots)]]), least)
    held = by_rank(pack(work, count, zones, ranks)[0], slots)

    assert count[0].tolist() == reference.replicate(loads, sum(slots), len(slots))
    slow = reference.pack(loads, count[0].tolist(), slots, ranks.slowness.tolist())
    assert [[expert for expert in mine if expert >= 0] for mine in held] == slow


@pytest.mark.parametrize("seed", [4471, 4540, 5676, 6331, 7212])
def test_copy_onto_a_rank_that_loses_more_than_it_gets_is_found(seed: int) -> None:
    # The rank that takes the copy gets less busy, so it bounds no gain.
    check_each_step(seed, copies=COPIES_ALWAYS)


# The same examples at every run: about one seed in 12,000 has two ranks that are equally busy,
# of which the reference relieves the one that gains more (8603).
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), copies=st.sampled_from([COPIES_NEVER, COPIES_ALWAYS]))
@example(seed=4001, copies=COPIES_ALWAYS)
@example(seed=424, copies=COPIES_ALWAYS)  # a rank loses more by one expert than another brings
def test_each_step_of_the_search_is_the_best_there_is(seed: int, copies: int) -> None:
    check_each_step(seed, copies)


def check_each_step(seed: int, copies: int) -> None:
    rng = np.random.default_rng(seed)
    num_experts, slots = 6, [3, 3, 3]
    load = rng.integers(1, 1000, size=(1, num_experts))
    problem = Problem(as_history(load), Topology.uniform(1, 3, 3), seed=seed)
    start = POLICIES["random"](problem).slot_to_expert.astype(np.int64)
    start[0, rng.permutation(9)[: rng.integers(0, 2)]] = -1
    if (np.bincount(start[start >= 0], minlength=num_experts) == 0).any():
        return
    rules = rules_for(problem, problem.demand, np.ones(1), 1e-9, copies)
    rules = rules._replace(max_steps=40, all_steps=40, far_move_cost=1.0)

    held = start.copy()
    steps = improve(problem, problem.frame, problem.demand, held, rules, start)

    base = by_rank(start[0], slots)
    now, loads = base, problem.scaled[0, 0].tolist()
    assert steps.score[0, 0] == pytest.approx(reference.imbalance(now, loads))
    for step in range(int(steps.taken[0])):
        taken = (
            *(int(steps.slots[0, step, 0]), int(steps.experts[0, step, 0])),
            *(int(steps.slots[0, step, 1]), int(steps.experts[0, step, 1])),
        )
        best = max(
            gain_of_change(base, now, change, loads)
            for change, _ in reference.changes(now, num_experts)
            if copies == COPIES_ALWAYS or change[2] >= 0
        )
        assert gain_of_change(base, now, taken, loads) == pytest.approx(best, abs=1e-9)
        now = reference.changed(now, taken)
        assert steps.score[0, step + 1] == pytest.approx(reference.imbalance(now, loads))
        assert steps.moves[0, step + 1] == sum(
            expert >= 0 and expert not in there
            for mine, there in zip(now, base, strict=True)
            for expert in mine
        )
    assert by_rank(held[0], slots) == now


def gain_of_change(
    base: list[list[int]], held: list[list[int]], change: tuple[int, ...], loads: list[float]
) -> float:
    """What the busiest rank gains per move, on the ranks that get busier."""
    after_held = reference.changed(held, change)
    before, after = rank_loads(held, loads), rank_loads(after_held, loads)
    # Ranks that hold the same experts in another order are equally busy, but for rounding.
    equally = [r for r in range(len(before)) if before[r] > max(before) - 1e-9]
    hot = min(equally, key=lambda r: after[r] - before[r])
    if after[hot] >= before[hot]:
        return -1.0
    touched = [r for r in range(len(before)) if before[r] < after[r] or r == hot]
    # What comes back to where it was at the start moves nothing; a free change is still ranked.
    moves = sum(
        expert >= 0 and expert not in there and expert not in mine
        for there, mine, new in zip(base, held, after_held, strict=True)
        for expert in new
    )
    return (before[hot] - max(after[r] for r in touched)) / max(moves, FREE)


def rank_loads(held: list[list[int]], loads: list[float]) -> list[float]:
    count = [sum(mine.count(e) for mine in held) for e in range(len(loads))]
    return [sum(loads[e] / count[e] for e in mine if e >= 0) for mine in held]


def test_auto_is_near_the_best_of_all_placements_on_tiny_cases() -> None:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
    everything = [
        placement
        for placement in product(range(5), repeat=6)
        if len(set(placement)) == 5 and len(set(placement[:3])) == len(set(placement[3:])) == 3
    ]
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(12):
        load = np.rint(rng.lognormal(0, 1, 5) * 1000).astype(np.int64)
        best = min(
            reference.imbalance([list(p[:3]), list(p[3:])], load.tolist()) for p in everything
        )

        found = POLICIES["auto"](Problem(as_history(load[None]), topology))

        halves = by_rank(found.slot_to_expert[0], [3, 3])
        gaps.append(reference.imbalance(halves, load.tolist()) - best)

    # A local search may end in a hollow: with two ranks of three slots it often has few ways out.
    assert np.mean(gaps) < 0.06
    assert max(gaps) < 0.25


def test_group_packings_are_exact() -> None:
    # Groups of one expert on two nodes of one rank: 9 + 1 against 5 + 5 is the only even split.
    topology = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=2)

    zones = zones_for(np.array([[9.0, 5.0, 5.0, 1.0]]), topology, num_groups=4)

    assert zones.of_expert.tolist() == [[0, 1, 1, 0]]


def test_many_groups_are_packed_heaviest_first() -> None:
    topology = Topology.uniform(num_nodes=4, ranks_per_node=1, slots_per_rank=4)
    work = np.arange(1.0, 17.0)[None]

    zones = zones_for(work, topology, num_groups=16)

    load = np.bincount(zones.of_expert[0], work[0])
    assert np.bincount(zones.of_expert[0]).tolist() == [4, 4, 4, 4]
    assert load.tolist() == [34, 34, 34, 34]


def test_auto_moves_few_experts_for_a_small_drift() -> None:
    rng = np.random.default_rng(7)
    topology = Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=9)
    load = np.rint(rng.lognormal(0, 1, (6, 256)) * 10_000).astype(np.int64)
    current = POLICIES["auto"](Problem(as_history(load), topology))
    drifted = np.rint(load * rng.lognormal(0, 0.2, load.shape)).astype(np.int64)

    found = POLICIES["auto"](Problem(as_history(drifted), topology, current=current))

    moved = (found.slot_to_expert != current.slot_to_expert).mean()
    assert moved < 0.12
    assert isinstance(found, Placement)


def windows(seed: int, layers: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.lognormal(8, 1, (3, layers, experts)).astype(np.int64)


def problem_of(topology: Topology, experts: int, layers: int = 2, **more: object) -> Problem:
    base = plan(windows(1, layers, experts), topology, policy="greedy").target
    return Problem(as_history(windows(2, layers, experts)), topology, current=base, **more)


def exchanged(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """A fresh plan before and after the exchange, each in the slots of the base."""
    assert problem.current is not None
    fresh, base = refined(problem), problem.current.slot_to_expert
    kept = with_most_kept(problem, fresh, base)
    return fresh, in_place(kept, base, problem.topology, problem.room)


def sets_of(held: np.ndarray, topology: Topology, ranks: list[int]) -> list[tuple[int, ...]]:
    return sorted(tuple(sorted(held[topology.slots_on(rank)].tolist())) for rank in ranks)


@pytest.mark.parametrize("slots_per_rank", [1, 2, 3])
def test_no_exchange_of_equal_ranks_keeps_more_experts(slots_per_rank: int) -> None:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=5, slots_per_rank=slots_per_rank)
    problem = problem_of(topology, 5 * slots_per_rank - 1)
    assert problem.current is not None

    fresh, kept = exchanged(problem)

    for layer, base in enumerate(problem.current.slot_to_expert):
        rank_sets = [set(fresh[layer, topology.slots_on(rank)]) for rank in range(5)]
        base_sets = [set(base[topology.slots_on(rank)]) for rank in range(5)]
        best = max(
            sum(len(base_sets[to] & rank_sets[by]) for to, by in enumerate(order))
            for order in permutations(range(5))
        )
        assert (kept[layer] == base).sum() == best


def test_exchange_halves_the_moves_of_a_fresh_plan_with_two_slots_a_rank() -> None:
    topology = Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=2)
    problem = problem_of(topology, 48, layers=4)
    assert problem.current is not None
    base = problem.current.slot_to_expert

    fresh, kept = exchanged(problem)

    as_packed = in_place(fresh, base, topology, problem.room)
    assert (kept != base).sum() < 0.7 * (as_packed != base).sum()
    for layer in range(len(base)):
        ranks = list(range(topology.num_ranks))
        assert sets_of(kept[layer], topology, ranks) == sets_of(fresh[layer], topology, ranks)


def test_ranks_of_another_speed_or_number_of_slots_are_not_exchanged() -> None:
    topology = Topology(
        node_of_rank=np.zeros(6, dtype=np.int64),
        slots_of_rank=np.array([2, 2, 2, 3, 3, 3]),
        rank_speed=np.array([1.0, 1.0, 0.5, 1.0, 1.0, 1.0]),
    )
    problem = problem_of(topology, 12)

    fresh, kept = exchanged(problem)

    for alike in ([0, 1], [2], [3, 4, 5]):
        for layer in range(len(kept)):
            found = sets_of(kept[layer], topology, alike)
            assert found == sets_of(fresh[layer], topology, alike)


@pytest.mark.parametrize("why", ["expert groups stay on nodes", "tokens that cross nodes cost"])
def test_ranks_of_two_nodes_are_not_exchanged_where_nodes_matter(why: str) -> None:
    topology = Topology.uniform(num_nodes=2, ranks_per_node=3, slots_per_rank=3)
    groups = 2 if "groups" in why else 1
    model = ModelShape((0, 1), 16, 2, 64, 32, num_expert_groups=groups)
    cost = CostModel(node_traffic=0.0 if "groups" in why else 0.5)
    problem = problem_of(topology, 16, model=model, cost=cost)

    fresh, kept = exchanged(problem)

    for node in ([0, 1, 2], [3, 4, 5]):
        for layer in range(len(kept)):
            assert sets_of(kept[layer], topology, node) == sets_of(fresh[layer], topology, node)


@pytest.mark.parametrize("slots_per_rank", [1, 2])
def test_ranks_with_pins_keep_their_experts_and_the_others_exchange(slots_per_rank: int) -> None:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=16, slots_per_rank=slots_per_rank)
    experts = 14 * slots_per_rank
    pinned = Constraints(pinned={0: (3,), 1: (7,)})
    problem = problem_of(topology, experts, layers=4, constraints=pinned)
    assert problem.current is not None
    base = problem.current.slot_to_expert

    fresh, kept = exchanged(problem)

    for layer in range(4):
        assert sets_of(kept[layer], topology, [3]) == sets_of(fresh[layer], topology, [3])
        assert sets_of(kept[layer], topology, [7]) == sets_of(fresh[layer], topology, [7])
        assert sets_of(kept[layer], topology, [*range(16)]) == (
            sets_of(fresh[layer], topology, [*range(16)])
        )
    assert (in_place(fresh, base, topology) != base).sum() > (kept != base).sum()


def test_failure_domains_allow_no_exchange() -> None:
    topology = Topology.uniform(num_nodes=2, ranks_per_node=4, slots_per_rank=2)
    problem = problem_of(topology, 12, constraints=Constraints(min_domains={0: 2}))
    assert problem.current is not None
    fresh = refined(problem)

    assert with_most_kept(problem, fresh, problem.current.slot_to_expert) is fresh
