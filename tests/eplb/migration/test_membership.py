"""Which ranks should serve, against every choice there is; and what a change of them waits for."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from eplb.core.placement import EMPTY, Placement, uncovered_experts
from eplb.core.topology import Topology
from eplb.core.zones import keeps_groups
from eplb.errors import PlacementError, TopologyError
from eplb.migration.membership import phase_of, shortage, wanted_for

SEEDS = range(60)


def random_case(seed: int) -> tuple[Placement, Topology, np.random.Generator]:
    """Ranks of several failure domains with slots of several sizes, some EMPTY on each."""
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(3, 8))
    hosts = np.sort(rng.integers(0, 3, num_ranks)).astype(np.int32)
    slots = rng.integers(2, 6, num_ranks).astype(np.int32)
    topology = Topology(node_of_rank=hosts // 2, slots_of_rank=slots, host_of_rank=hosts)
    num_experts = int(rng.integers(2, int(slots.sum()) + 1))
    held = np.full((2, topology.num_slots), EMPTY)
    for row in held:
        filled = rng.permutation(topology.num_slots)[: rng.integers(num_experts, len(row) + 1)]
        row[filled] = rng.integers(0, num_experts, len(filled))
        row[filled[:num_experts]] = np.arange(num_experts)
    return Placement(held, num_experts), topology, rng


def crowding(ranks: tuple[int, ...], topology: Topology) -> int:
    """The more even the failure domains, the less."""
    return int((np.unique(topology.failure_domain[list(ranks)], return_counts=True)[1] ** 2).sum())


def lost_by(ranks: tuple[int, ...], placement: Placement, topology: Topology) -> int:
    is_left = np.isin(np.arange(topology.num_ranks), ranks)
    return len(uncovered_experts(placement, topology, is_left))


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_are_retired_wherever_any_choice_has_the_slots(seed: int) -> None:
    placement, topology, rng = random_case(seed)
    everyone = range(topology.num_ranks)
    count = int(rng.integers(1, topology.num_ranks))
    choices = list(combinations(everyone, count))
    possible = [one for one in choices if not shortage(one, placement.num_experts, topology)]

    if not possible:
        with pytest.raises(PlacementError, match="that must be there"):
            wanted_for(count, everyone, placement, topology)
    else:
        assert wanted_for(count, everyone, placement, topology) in possible


@pytest.mark.parametrize("seed", SEEDS)
def test_one_rank_is_retired_evenly_and_then_with_the_fewest_moves(seed: int) -> None:
    placement, topology, _ = random_case(seed)
    count = topology.num_ranks - 1
    everyone = range(topology.num_ranks)
    possible = [
        one
        for one in combinations(everyone, count)
        if not shortage(one, placement.num_experts, topology)
    ]
    if not possible:
        with pytest.raises(PlacementError):
            wanted_for(count, everyone, placement, topology)
        return

    found = wanted_for(count, everyone, placement, topology)

    even = min(crowding(one, topology) for one in possible)
    assert crowding(found, topology) == even
    if len(set(topology.host_of_rank.tolist())) == 1:  # nothing but moves tells ranks apart
        fewest = min(lost_by(one, placement, topology) for one in possible)
        assert lost_by(found, placement, topology) == fewest


@pytest.mark.parametrize("seed", SEEDS)
def test_failure_domains_stay_as_even_as_any_choice_of_equal_ranks(seed: int) -> None:
    _, drawn, rng = random_case(seed)
    topology = replace(drawn, slots_of_rank=np.full(drawn.num_ranks, 4))
    placement = Placement(np.tile(np.arange(4), (1, topology.num_ranks)), 4)
    everyone = range(topology.num_ranks)
    count = int(rng.integers(1, topology.num_ranks + 1))
    some = rng.permutation(topology.num_ranks)[: rng.integers(1, count + 1)].tolist()

    fewer = wanted_for(count, everyone, placement, topology)
    more = wanted_for(count, some, placement, topology)

    best = [crowding(one, topology) for one in combinations(everyone, count)]
    assert crowding(fewer, topology) == min(best)
    with_some = [one for one in combinations(everyone, count) if set(some) <= set(one)]
    assert set(some) <= set(more)
    assert crowding(more, topology) == min(crowding(one, topology) for one in with_some)


def test_rank_without_slots_stays_and_is_not_counted() -> None:
    topology = Topology(node_of_rank=np.array([0, 0, 1]), slots_of_rank=np.array([2, 2, 0]))
    placement = Placement([[0, 1, 1, 0]], 2)

    assert wanted_for(1, range(3), placement, topology) == (0, 2)
    with pytest.raises(TopologyError, match=r"3 ranks are to serve, expected 1\.\.2"):
        wanted_for(3, range(3), placement, topology)


def test_expert_groups_stay_on_nodes_where_another_rank_can_be_retired() -> None:
    # Node 0 has three ranks of two slots for four experts, node 1 has two larger ones.
    topology = Topology(
        node_of_rank=np.array([0, 0, 0, 1, 1]),
        slots_of_rank=np.array([2, 2, 2, 3, 3]),
        host_of_rank=np.array([0, 1, 2, 3, 3]),
    )
    placement = Placement([[0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 4, 5]], 8)

    plain = wanted_for(4, range(5), placement, topology)
    grouped = wanted_for(4, range(5), placement, topology, num_groups=2)

    left = replace(topology, alive=np.isin(np.arange(5), grouped))
    assert plain == (0, 1, 2, 3)  # of the host with two ranks
    assert grouped in {(0, 1, 3, 4), (0, 2, 3, 4), (1, 2, 3, 4)}
    assert keeps_groups(left, 2, 8)


def test_spare_slots_of_every_rank_are_not_counted_as_room() -> None:
    topology = Topology.uniform(1, 3, 3)
    placement = Placement([[0, 1, EMPTY, 2, 3, EMPTY, 4, 0, EMPTY]], 5)

    assert shortage((0, 1, 2), 5, topology, spare_slots=1) == ""
    assert shortage((0, 1), 5, topology, spare_slots=1).startswith("found 4 slots in a")
    with pytest.raises(PlacementError, match=r"on ranks 0, 1 \(without 1 of each\) for 5 experts"):
        wanted_for(2, range(3), placement, topology, spare_slots=1)


@pytest.mark.parametrize("count", [0, 4])
def test_more_ranks_than_the_topology_has_or_none_are_refused(count: int) -> None:
    placement = Placement([[0, 1, 0, 1, 0, 1]], 2)

    with pytest.raises(TopologyError, match=rf"{count} ranks are to serve, expected 1\.\.3"):
        wanted_for(count, range(3), placement, Topology.uniform(1, 3, 2))


def test_phase_follows_the_experts_of_leavers_and_the_readiness_of_joiners() -> None:
    topology = Topology.uniform(1, 4, 2)
    serving = replace(topology, alive=np.array([True, True, True, False]))
    full = Placement([[0, 1, 2, 3, 0, 1, EMPTY, EMPTY]], 4)
    drained = Placement([[0, 1, 2, 3, EMPTY, EMPTY, EMPTY, EMPTY]], 4)

    assert phase_of((0, 1, 2), full, serving) == ("settled", "")
    assert phase_of((0, 1, 3), full, serving)[0] == "draining"
    assert phase_of((0, 1, 3), drained, serving)[0] == "waiting"
    assert phase_of((0, 1, 3), drained, serving, ready=[3])[0] == "joining"
    assert phase_of((0, 1), drained, serving) == (
        "leaving",
        "without experts, they leave the group next: rank 2",
    )
    assert phase_of((0, 1, 2), None, serving) == ("settled", "")
