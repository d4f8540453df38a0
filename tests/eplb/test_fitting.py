"""Cordons that fit, the sentence for each that does not, and plans that keep to them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from eplb import LoadHistory
from eplb.core.constraints import Constraints, room_of
from eplb.core.cost import Decision
from eplb.core.model import ModelShape
from eplb.core.placement import (
    EMPTY,
    Placement,
    slots_in_use,
    sole_experts,
    uncovered_experts,
    undrained,
)
from eplb.core.topology import Topology
from eplb.errors import ConfigError, PlacementError
from eplb.fitting import Cordon, Pins, arrivals, coverage_of, fitting_cordons, fitting_pins
from eplb.planner import plan, plan_to

CORDON, DRAIN = Cordon.CORDON, Cordon.DRAIN
# Four ranks of three slots for six experts; experts 0 and 1 have two replicas each.
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
CURRENT = Placement(
    np.array([[0, 1, EMPTY, 0, 2, EMPTY, 1, 3, EMPTY, 4, 5, EMPTY]]), num_experts=6, generation=7
)
LOAD = np.array([[[60, 50, 20, 20, 10, 10]]])


def drained(*ranks: int) -> Topology:
    return replace(TOPOLOGY, drained=np.isin(np.arange(4), ranks))


def test_ranks_know_their_slots_in_use_and_what_their_loss_costs() -> None:
    assert slots_in_use(CURRENT, TOPOLOGY).tolist() == [[2, 2, 2, 2]]
    assert sole_experts(CURRENT, TOPOLOGY).tolist() == [0, 1, 1, 2]
    assert undrained(CURRENT, drained(3)) == (3,)


@pytest.mark.parametrize(
    ("leaves", "uncovered"),
    [
        ((0,), []),
        ((1,), [(0, 2)]),  # others have more replicas, and the last rank stays
        ((3,), [(0, 4), (0, 5)]),
        ((0, 2), [(0, 1), (0, 3)]),
    ],
)
def test_experts_that_no_rank_which_stays_holds_are_uncovered(
    leaves: tuple[int, ...], uncovered: list[tuple[int, int]]
) -> None:
    is_left = ~np.isin(np.arange(4), leaves)

    assert uncovered_experts(CURRENT, TOPOLOGY, is_left) == uncovered


def test_cordons_and_drains_that_fit_are_taken_together() -> None:
    found = fitting_cordons({3: DRAIN, 0: CORDON}, CURRENT, TOPOLOGY)

    assert found.unmet == ()
    assert found.topology.drained.tolist() == [False, False, False, True]
    assert found.topology.serving.tolist() == [True, True, True, False]
    assert found.kept == {(0, 0): (0,), (0, 1): (0,)}
    room = found.limited(room_of(Constraints(), found.topology, 1), CURRENT)
    assert room.tolist() == [[2, 3, 3, 0]]


@pytest.mark.parametrize(
    ("cordons", "unmet"),
    [
        ({4: DRAIN}, "rank 4 (drain): expected ranks 0..3"),
        (
            {0: DRAIN, 1: DRAIN, 2: DRAIN},
            "rank 2 (drain): found 3 slots in a layer on rank 3 for 6 experts that must be there, "
            "expected one or more for each",
        ),
        (
            {0: CORDON, 1: DRAIN, 2: DRAIN},
            "rank 2 (drain): found 3 slots in a layer on rank 3 for 4 experts that must be there, "
            "expected one or more for each",
        ),
    ],
)
def test_cordon_that_memory_does_not_allow_is_left_out_with_a_sentence(
    cordons: dict[int, Cordon], unmet: str
) -> None:
    found = fitting_cordons(cordons, CURRENT, TOPOLOGY)

    assert found.unmet == (unmet,)
    assert found.topology.drained.sum() + len(found.cordoned) == len(cordons) - 1


def test_cordon_of_a_dead_rank_is_left_out() -> None:
    topology = replace(TOPOLOGY, alive=np.array([True, True, True, False]))

    found = fitting_cordons({3: CORDON, 2: CORDON}, CURRENT, topology)

    assert (found.cordoned, found.unmet) == ((2,), ("rank 3 (cordon): the rank is not alive",))


@pytest.mark.parametrize("policy", ["auto", "greedy", "round_robin", "topk_everywhere", "exact"])
def test_plan_empties_a_drained_rank_and_judges_the_others(policy: str) -> None:
    found = plan(LOAD, drained(3), current=CURRENT, policy=policy)

    assert found.decision is Decision.MOVE
    assert "rank 3 is drained, and holds experts" in found.reason
    assert (found.target.slot_to_expert[0, 9:] == EMPTY).all()
    assert (found.target.replica_count >= 1).all()
    assert np.isfinite([found.before, found.after]).all()


def test_best_plan_of_the_other_ranks_is_even_without_the_drained_one() -> None:
    even = np.full((1, 1, 6), 30)

    found = plan(even, drained(3), current=CURRENT)

    assert found.after == 1.0


def test_drained_ranks_stay_empty_over_random_loads_and_constraints() -> None:
    topology, rng = Topology.uniform(2, 4, 5), np.random.default_rng(5)
    current: Placement | None = None
    for turn in range(12):
        away = np.isin(np.arange(8), rng.choice(8, size=turn % 3, replace=False))
        tokens = rng.poisson(100 * rng.lognormal(size=(4, 3, 24)))
        constraints = Constraints(min_domains={2: 2} if turn % 2 else {})
        now = replace(topology, drained=away)
        found = plan(LoadHistory(tokens), now, current=current, constraints=constraints)
        current = found.target
        assert not slots_in_use(current, topology)[:, away].any()


def test_cordoned_rank_keeps_exactly_what_it_holds() -> None:
    found = fitting_cordons({0: CORDON}, CURRENT, TOPOLOGY)
    room = found.limited(room_of(Constraints(), found.topology, 1), CURRENT)
    constraints = Constraints(slots=room, pinned=found.kept)

    free = plan(LOAD, TOPOLOGY, current=CURRENT)
    held = plan(LOAD, found.topology, current=CURRENT, constraints=constraints)

    assert (free.target.slot_to_expert != CURRENT.slot_to_expert)[0, :3].any()
    assert held.decision is Decision.MOVE
    assert held.target.slot_to_expert[0, :3].tolist() == [0, 1, EMPTY]
    assert arrivals((0,), CURRENT, held.target, TOPOLOGY) == ""


def test_redundancy_yields_where_a_cordoned_rank_uses_fewer_slots_than_its_part() -> None:
    current = Placement(
        np.array([[0, EMPTY, EMPTY, 1, 2, EMPTY, 3, 4, EMPTY, 5, 0, EMPTY]]), num_experts=6
    )
    found = fitting_cordons({0: CORDON}, current, TOPOLOGY)
    even = np.array([[2, 2, 1, 1]])  # one slot for each expert, in equal parts

    room = found.limited(even, current)

    assert room.tolist() == [[1, 3, 3, 3]]
    constraints = Constraints(slots=room, pinned=found.kept)
    planned = plan(LOAD, found.topology, current=current, constraints=constraints)
    assert planned.target.slot_to_expert[0, :3].tolist() == [0, EMPTY, EMPTY]
    roomy = np.array([[2, 2, 2, 2]])
    assert found.limited(roomy, current).tolist() == [[1, 2, 2, 2]]


def test_cordoned_rank_keeps_its_experts_where_groups_stay_on_nodes() -> None:
    rng = np.random.default_rng(0)
    model = ModelShape(tuple(range(6)), 32, 4, num_expert_groups=4, hidden=16, intermediate=8)
    topology = Topology.uniform(num_nodes=2, ranks_per_node=4, slots_per_rank=6)
    tokens = rng.poisson(1000 * rng.lognormal(size=(6, 32)), size=(4, 6, 32))
    current = plan(tokens, topology, model=model).target
    found = fitting_cordons({5: CORDON}, current, topology, 4)
    room = found.limited(room_of(Constraints(), found.topology, 6), current)
    other = rng.poisson(1000 * rng.lognormal(size=(6, 32)), size=(4, 6, 32))

    for policy in ("auto", "greedy"):
        planned = plan(
            other,
            found.topology,
            model=model,
            current=current,
            policy=policy,
            constraints=Constraints(slots=room, pinned=found.kept),
        )
        mine = topology.slots_on(5)
        assert planned.target.slot_to_expert[:, mine].tolist() == (
            current.slot_to_expert[:, mine].tolist()
        )


def test_drain_that_a_node_cannot_make_up_for_releases_expert_groups() -> None:
    topology = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=6)
    wider = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=8)
    rows = [[*range(first, first + 4), EMPTY, EMPTY] for first in range(0, 16, 4)]
    current = Placement(np.array([rows]).reshape(1, -1), num_experts=16)
    wide = Placement(
        np.pad(np.array([rows]), ((0, 0), (0, 0), (0, 2)), constant_values=EMPTY).reshape(1, -1), 16
    )

    # 8 experts of a group for the 6 slots that are left on the second node, or for 8.
    released = fitting_cordons({3: DRAIN}, current, topology, 2)
    assert (released.releases_groups, released.unmet) == (True, ())
    assert fitting_cordons({3: DRAIN}, wide, wider, 2).releases_groups is False
    assert fitting_cordons({3: DRAIN}, current, topology).releases_groups is False


def test_way_back_to_a_drained_rank_is_refused() -> None:
    earlier = plan(LOAD, TOPOLOGY, current=CURRENT).problem

    with pytest.raises(PlacementError, match="rank 3 is drained, and holds experts"):
        plan_to(replace(earlier, topology=drained(3)), CURRENT, why="rollback")
    target = CURRENT.with_generation(8)
    moved = Placement(np.where(target.slot_to_expert == EMPTY, 2, target.slot_to_expert), 6)
    assert arrivals((0, 3), CURRENT, moved, TOPOLOGY) == (
        "layer 0: expert 2 is new on rank 0, which is cordoned"
    )


# Two ranks of three slots for four experts: two slots beyond one for each expert.
ONE_NODE = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
ROOM = np.full((2, 2), 3)


def test_pins_of_one_layer_and_of_each_layer_are_taken_together() -> None:
    found = fitting_pins({3: (1,), (0, 3): (0,)}, ROOM, ONE_NODE, 4)

    assert found.pinned == {(0, 3): (1, 0), (1, 3): (1,)}
    assert found.left.tolist() == [[2, 2], [3, 2]]
    assert found.unmet == ()
    assert (ROOM == 3).all()


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({(2, 0): (0,)}, "layer 2 expert 0: expected layers 0, 1 and experts 0..3"),
        ({(0, 4): (0,)}, "layer 0 expert 4: expected layers 0, 1 and experts 0..3"),
        ({(0, 0): (2,)}, "layer 0 expert 0 on rank 2: expected ranks 0..1"),
        (
            {(0, expert): (1,) for expert in range(4)},
            "layer 0 expert 3 on rank 1: pins or a cordon take every slot there that may be used",
        ),
        (
            {(0, expert): (0, 1) for expert in range(3)},
            "layer 0 expert 2 on rank 1: every slot that may be used is needed by an expert "
            "without another",
        ),
    ],
)
def test_pin_that_cannot_be_met_is_left_out_with_a_sentence(pins: Pins, expected: str) -> None:
    found = fitting_pins(pins, ROOM, ONE_NODE, 4)

    assert found.unmet == (expected,)
    assert sum(map(len, found.pinned.values())) == sum(map(len, pins.values())) - 1


def test_pin_to_a_dead_rank_is_left_out() -> None:
    topology = replace(ONE_NODE, alive=np.array([True, False]))

    found = fitting_pins({(0, 1): (0, 1)}, np.array([[4, 0]] * 2), topology, 4)

    assert found.pinned == {(0, 1): (0,)}
    assert found.unmet == ("layer 0 expert 1 on rank 1: the rank is not alive",)


def test_no_pin_is_taken_where_expert_groups_stay_on_nodes() -> None:
    topology = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=3)

    found = fitting_pins({(0, 0): (1,)}, ROOM, topology, 4, num_groups=2)

    assert found.pinned == {}
    assert "2 expert groups stay each on one of 2 nodes" in found.unmet[0]
    assert fitting_pins({}, ROOM, topology, 4, num_groups=2).unmet == ()


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
