"""Exchange of what equal ranks hold: fewest moves, the same balance, nothing that binds broken."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from eplb import Constraints, CostModel, ModelShape, Problem, Topology, plan
from eplb.core.load import as_history
from eplb.policies.greedy import refined
from eplb.search.relabel import in_place, with_most_kept


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
