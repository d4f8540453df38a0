"""Failure domains of experts, as far as slots allow, against a search over all counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eplb.core.constraints import Constraints
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.fitting import coverage_of
from eplb.planner import plan


def topology(*slots: int) -> Topology:
    """Return ranks of so many slots, each a failure domain."""
    return Topology(np.arange(len(slots)), np.array(slots))


def covered_by_search(slots: tuple[int, ...], num_experts: int, domains: int) -> int:
    """Most experts with replicas in so many ranks, by trying every way to fill the ranks."""
    experts = range(num_experts)
    ways = [list(itertools.combinations(experts, min(one, num_experts))) for one in slots]
    best = -1
    for held in itertools.product(*ways):
        counts = [sum(expert in rank for rank in held) for expert in experts]
        if min(counts) >= 1:
            best = max(best, sum(count >= domains for count in counts))
    return best


@pytest.mark.parametrize(
    ("slots", "num_experts", "domains"),
    [((3, 3), 4, 2), ((4, 1), 4, 2), ((2, 2, 2), 4, 2), ((3, 2, 2), 4, 3), ((4, 4), 4, 2)],
)
def test_number_of_covered_experts_is_the_most_that_fit(
    slots: tuple[int, ...], num_experts: int, domains: int
) -> None:
    tokens = np.arange(num_experts, 0, -1)[None]
    found = coverage_of(tokens, np.array([slots]), topology(*slots), domains)

    most = covered_by_search(slots, num_experts, domains)
    assert len(found.constraints.min_domains) == most
    assert found.uncovered == tuple((0, expert) for expert in range(most, num_experts))


def test_experts_with_most_tokens_are_covered_first_and_the_plan_keeps_them() -> None:
    ranks = topology(3, 3)
    tokens = np.array([[10, 40, 20, 30]])

    found = coverage_of(tokens, np.array([[3, 3]]), ranks, 2)
    target = plan(tokens, ranks, constraints=found.constraints).target

    assert sorted(found.constraints.min_domains) == [(0, 1), (0, 3)]
    assert found.uncovered == ((0, 2), (0, 0))
    held = target.slot_to_expert.reshape(2, 3)
    assert all({1, 3} <= set(rank.tolist()) for rank in held)


def test_one_domain_asks_for_nothing_and_less_is_refused() -> None:
    tokens, room = np.ones((1, 4), dtype=np.int64), np.array([[3, 3]])

    assert not coverage_of(tokens, room, topology(3, 3), 1).constraints.binds_experts
    with pytest.raises(ConfigError, match="min_domains is 0, expected 1 or more"):
        coverage_of(tokens, room, topology(3, 3), 0)


# -- with expert groups

GROUPED = ModelShape((0,), 8, 2, hidden=16, intermediate=8, num_expert_groups=2)
GROUPED_TOKENS = np.array([[10, 40, 20, 30, 15, 5, 35, 25]])


def two_nodes(domains: list[int]) -> Topology:
    """Two nodes of two ranks of three slots; the ranks are in these failure domains."""
    return Topology(np.array([0, 0, 1, 1]), np.full(4, 3), failure_domain=np.array(domains))


def ranks_of(placement: Placement, expert: int) -> list[int]:
    """Return the ranks that hold an expert of the only layer."""
    return (np.flatnonzero(placement.slot_to_expert[0] == expert) // 3).tolist()


def test_groups_stay_on_nodes_that_have_enough_domains() -> None:
    ranks, room = two_nodes([0, 1, 2, 3]), np.full((1, 4), 3)

    found = coverage_of(GROUPED_TOKENS, room, ranks, 2, num_groups=2)
    target = plan(GROUPED_TOKENS, ranks, model=GROUPED, constraints=found.constraints).target

    # Six slots of a node for four experts: two of each group have a second replica.
    assert sorted(found.constraints.min_domains) == [(0, 1), (0, 3), (0, 6), (0, 7)]
    assert not found.releases_groups
    nodes = [{rank // 2 for rank in ranks_of(target, expert)} for expert in range(8)]
    assert all(len(found) == 1 for found in nodes), "each expert stays on one node"
    assert nodes[:4] == [nodes[0]] * 4
    assert all(len(set(ranks_of(target, expert))) == 2 for expert in (1, 3, 6, 7))


def test_groups_are_released_where_the_domains_are_nodes() -> None:
    ranks, room = two_nodes([0, 0, 1, 1]), np.full((1, 4), 3)
    with pytest.raises(ConfigError, match="must be in 2 failure domains, expected at most 1"):
        plan(GROUPED_TOKENS, ranks, model=GROUPED, constraints=Constraints(min_domains={1: 2}))

    found = coverage_of(GROUPED_TOKENS, room, ranks, 2, num_groups=2)
    target = plan(GROUPED_TOKENS, ranks, model=GROUPED, constraints=found.constraints).target

    assert found.releases_groups
    assert sorted(found.constraints.min_domains) == [(0, 1), (0, 3), (0, 6), (0, 7)]
    assert all(
        {rank // 2 for rank in ranks_of(target, expert)} == {0, 1} for expert in (1, 3, 6, 7)
    )
