"""Proved optima: a published example, brute force, and every rule that a placement must keep."""

from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb import ModelShape, Placement, Problem, Topology, imbalance
from eplb.core.load import as_history
from eplb.core.placement import check_fits
from eplb.core.zones import nodes_of_groups
from eplb.errors import ConfigError
from eplb.policies.exact import solve_exact


def best_of_all(work: NDArray[np.int64], topology: Topology) -> float:
    """Imbalance of the best placement, mean by tokens, by trying every placement there is."""
    num_experts = work.shape[-1]
    choices = [
        [c for size in range(int(slots) + 1) for c in combinations(range(num_experts), size)]
        for slots in np.where(topology.alive, topology.slots_of_rank, 0)
    ]
    best = np.inf
    for held in product(*choices):
        holders = [sum(expert in mine for mine in held) for expert in range(num_experts)]
        if min(holders) == 0:
            continue
        each = work / np.array(holders)
        time = np.array([each[:, list(mine)].sum(axis=1) for mine in held]).T / topology.rank_speed
        fair = work.sum(axis=1) / topology.rank_speed[topology.alive].sum()
        best = min(best, float(time.max(axis=1).sum() / fair.sum()))
    return best


@pytest.mark.system
def test_published_example_is_proved_to_the_last_token() -> None:
    # Loads, slots and devices of vllm-ascend's FlashLB example (vllm-project/vllm pull request
    # 37656), where greedy replication gives a busiest device of 232.
    load = [[600, 560, 120, 120, 20, 10, 10, 10]]
    problem = Problem(as_history(load), Topology.uniform(1, 8, 2))

    found = solve_exact(problem)

    assert found.is_proved.all()
    assert found.objective[0] * sum(load[0]) / 8 == pytest.approx(590 / 3)  # 196.67
    assert found.bound[0] * sum(load[0]) / 8 == pytest.approx(590 / 3, rel=1e-5)
    assert found.gap.tolist() == [0.0]


@pytest.mark.parametrize("num_windows", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_is_at_least_as_good_as_brute_force(seed: int, num_windows: int) -> None:
    rng = np.random.default_rng(seed)
    topology = Topology(
        np.zeros(3), np.array([3, 2, 2]), rank_speed=rng.choice([0.5, 1.0, 2.0], size=3)
    )
    load = np.rint(rng.lognormal(3, 1, (num_windows, 1, 4))).astype(np.int64)

    found = solve_exact(Problem(as_history(load), topology))

    assert found.is_proved.all()
    assert found.objective[0] == pytest.approx(best_of_all(load[:, 0], topology), rel=1e-4)
    served = imbalance(load, found.placement, topology)[:, 0]
    assert np.average(served, weights=load.sum(axis=(1, 2))) == pytest.approx(found.objective[0])


def test_exact_puts_nothing_on_a_dead_rank() -> None:
    topology = Topology(np.zeros(3), np.array([2, 3, 2]), alive=np.array([True, False, True]))
    load = np.array([[50, 30, 20]])

    found = solve_exact(Problem(as_history(load), topology))

    check_fits(found.placement, topology)
    assert found.objective[0] == pytest.approx(best_of_all(load, topology), rel=1e-4)


def test_groups_stay_on_nodes() -> None:
    model = ModelShape((0,), 8, top_k=1, hidden=4, intermediate=2, num_expert_groups=4)
    topology = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
    load = [[90, 10, 80, 10, 20, 10, 10, 20]]

    found = solve_exact(Problem(as_history(load), topology, model))

    # Groups weigh 100, 90, 30 and 30: the best two nodes are 130 and 120.
    assert nodes_of_groups(found.placement.slot_to_expert[0], topology, 4, 8) is not None
    assert found.is_proved.all()
    assert found.objective[0] == pytest.approx(130 / 125)


def test_ranks_that_are_alike_keep_what_they_have() -> None:
    # 40 + 10 on each rank is the best there is, and it serves already.
    current = Placement(np.array([[3, 1, 2, 0]]), num_experts=4)

    topology = Topology.uniform(1, 2, 2)
    problem = Problem(as_history([[10, 40, 40, 10]]), topology, None, current)
    kept = solve_exact(problem).placement

    moved = (kept.slot_to_expert != current.slot_to_expert).sum()
    assert imbalance(np.array([[10, 40, 40, 10]]), kept, Topology.uniform(1, 2, 2)).tolist() == [1]
    assert moved <= 2  # the two tens may have traded places: that is as good


def test_exact_with_too_little_effort_reports_a_gap() -> None:
    rng = np.random.default_rng(0)
    load = np.rint(rng.lognormal(0, 1, (1, 24)) * 1000).astype(np.int64)
    problem = Problem(as_history(load), Topology.uniform(1, 6, 5))

    found = solve_exact(problem, effort=0.01)

    assert not found.is_proved.any()
    assert found.gap[0] == pytest.approx(found.objective[0] / found.bound[0] - 1)
    assert found.bound[0] >= 1.0
    assert solve_exact(problem, effort=0.01).placement.hash == found.placement.hash


def test_layer_without_tokens_is_perfect() -> None:
    found = solve_exact(Problem(as_history([[0, 0, 0]]), Topology.uniform(1, 2, 2)))

    assert (found.objective[0], found.is_proved[0]) == (1.0, True)


def test_large_model_is_refused_before_it_is_tried() -> None:
    problem = Problem(as_history(np.ones((1, 256), dtype=np.int64)), Topology.uniform(4, 8, 9))

    with pytest.raises(ConfigError, match=r"layer 0 has \d+ choices .* expected at most 20000"):
        solve_exact(problem)


def test_no_effort_is_refused() -> None:
    with pytest.raises(ConfigError, match="effort is 0, expected more than 0"):
        solve_exact(Problem(as_history([[1]]), Topology.uniform(1, 1, 1)), effort=0)
