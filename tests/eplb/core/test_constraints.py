"""What every plan keeps to, and how contradictions are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import Constraints, Decision, ModelShape, Placement, Topology, plan
from eplb.core.placement import check_fits
from eplb.errors import ConfigError, PlacementError
from eplb.planner import Plan
from eplb.policies.table import POLICIES
from eplb.search.legality import first_violation

# Taken here: tests of peers register theirs, which know no constraints.
OWN_POLICIES = sorted(set(POLICIES) - {"exact"})

# Four ranks of three slots, each its own failure domain.
FOUR = Topology(node_of_rank=np.zeros(4), slots_of_rank=np.full(4, 3), failure_domain=np.arange(4))
EVEN = np.full((1, 6), 100)


def ranks_with(found: Plan, expert: int, layer: int = 0) -> set[int]:
    slots = np.flatnonzero(found.target.slot_to_expert[layer] == expert)
    return set(found.topology.rank_of_slot[slots].tolist())


def test_two_ranks_of_one_domain_are_one_domain() -> None:
    paired = Topology(
        node_of_rank=np.zeros(4), slots_of_rank=np.full(4, 3), failure_domain=[0, 0, 1, 1]
    )

    found = plan(EVEN, paired, constraints=Constraints(min_domains=dict.fromkeys(range(6), 2)))

    for expert in range(6):
        assert {rank // 2 for rank in ranks_with(found, expert)} == {0, 1}


def test_slots_that_a_layer_may_not_use_stay_empty() -> None:
    slots = np.array([[3, 3, 3, 3], [1, 3, 2, 0]])

    found = plan(np.repeat(EVEN, 2, axis=0), FOUR, constraints=Constraints(slots=slots))

    used = (found.target.slot_to_expert[1] >= 0).reshape(4, 3).sum(axis=1)
    assert used.tolist() == [1, 3, 2, 0]


def test_current_placement_that_breaks_a_constraint_must_move() -> None:
    current = Placement(np.array([[0, 1, 2, 3, 4, 5, -1, -1, -1, -1, -1, -1]]), num_experts=6)

    found = plan(EVEN, FOUR, current=current, constraints=Constraints(pinned={0: (3,)}))

    assert found.decision is Decision.MOVE
    assert "expert 0 is pinned to rank 3, which does not hold it" in found.reason
    assert 3 in ranks_with(found, 0)


def test_groups_are_kept_exactly_when_asked() -> None:
    model = ModelShape((0, 1), 64, top_k=4, hidden=4, intermediate=2, num_expert_groups=8)
    load = np.random.default_rng(0).integers(1, 1000, size=(2, 64))
    topology = Topology.uniform(num_nodes=4, ranks_per_node=2, slots_per_rank=9)

    found = plan(load, topology, model=model, constraints=Constraints(keep_groups=True))
    free = plan(load, topology, model=model, constraints=Constraints(keep_groups=False))

    assert first_violation(found.problem, found.target) is None
    assert free.after < found.after


@pytest.mark.parametrize(
    ("constraints", "error", "message"),
    [
        ({"pinned": {9: (0,)}}, ConfigError, "pinned names layer 0 expert 9"),
        ({"pinned": {0: (7,)}}, ConfigError, "0 is pinned to rank 7, expected a live rank"),
        ({"min_domains": {0: 5}}, ConfigError, "expert 0 must be in 5 failure domains"),
        ({"min_domains": {0: 0}}, ConfigError, "min_domains of 0 is 0, expected 1 or more"),
        ({"min_domains": 2}, ConfigError, "min_domains is 2, expected a value for each expert"),
        ({"min_domains": {0: 1.5}}, ConfigError, "min_domains of 0 is 1.5, expected a whole"),
        ({"pinned": [0]}, ConfigError, r"pinned is \[0\], expected a value for each expert"),
        ({"pinned": {0: 1}}, ConfigError, "0 is pinned to 1, expected ranks"),
        ({"hottest_in_two_domains": -1}, ConfigError, "expected 0 or more"),
        ({"hottest_in_two_domains": 1.5}, ConfigError, "is 1.5, expected a whole number"),
        ({"joining": {0, 1, 2, 3}}, ConfigError, "every live rank is joining"),
        ({"joining": {8}}, ConfigError, r"rank 8 is joining, expected 0\.\.3"),
        ({"joining": {0, 1, 2}}, PlacementError, "3 slots on ranks that are ready for 6 experts"),
        ({"pinned": dict.fromkeys(range(4), (0,))}, ConfigError, "pins 4 experts to rank 0"),
        ({"min_domains": dict.fromkeys(range(6), 3)}, PlacementError, "ask for 18 replicas"),
        ({"slots": np.full((1, 4), 4)}, ConfigError, r"4 slots of rank 0, expected 0\.\.3"),
        ({"slots": np.full((1, 4), 1)}, PlacementError, "layer 0: found 4 slots .* 6 experts"),
        ({"slots": np.full((2, 4), 3)}, ConfigError, "slots has shape"),
        ({"keep_groups": True}, ConfigError, "keep_groups asks for 1 expert groups"),
    ],
)
def test_contradicting_constraints_are_refused_with_a_reason(
    constraints: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(EVEN, FOUR, constraints=Constraints(**constraints))


@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_hottest_experts_are_by_real_load_for_every_policy(
    policy: str,
) -> None:
    constraints = Constraints(hottest_in_two_domains=1)
    for hottest in range(6):
        load = EVEN + 100 * (np.arange(6) == hottest)
        found = plan(load, FOUR, policy=policy, constraints=constraints)
        assert len(ranks_with(found, hottest)) >= 2


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_policy_keeps_every_constraint(data: st.DataObject) -> None:
    # Proving an optimum takes seconds: "exact" has an example of its own.
    check_policies(data, OWN_POLICIES)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_policy_keeps_every_constraint_in_many_examples(data: st.DataObject) -> None:
    check_policies(data, OWN_POLICIES)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_exact_policy_keeps_every_constraint(data: st.DataObject) -> None:
    check_policies(data, ["exact"])


def check_policies(data: st.DataObject, policies: list[str]) -> None:
    """Plan drawn problems, with and without a placement that serves, by each policy."""
    num_ranks = data.draw(st.integers(2, 6))
    num_experts = data.draw(st.integers(2, 8))
    # Room to spare: what fits only just may be refused, because the way there is not searched.
    each = -(-num_experts // num_ranks) * 3 + 1
    topology = Topology(
        node_of_rank=np.zeros(num_ranks),
        slots_of_rank=np.full(num_ranks, each),
        failure_domain=np.arange(num_ranks) % data.draw(st.integers(1, 3)),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    load = rng.integers(0, 1000, size=(2, 2, num_experts))
    domains = len(set(topology.failure_domain.tolist()))
    constraints = Constraints(
        min_domains={int(rng.integers(num_experts)): int(rng.integers(1, domains + 1))},
        hottest_in_two_domains=int(rng.integers(0, 3)) if domains > 1 else 0,
        pinned={(1, int(rng.integers(num_experts))): (int(rng.integers(num_ranks)),)},
        joining=frozenset({0} if rng.integers(2) else ()),
    )
    current = plan(load[::-1], topology, policy="random").target
    for policy in policies:
        for before in (None, current):
            found = plan(load, topology, policy=policy, current=before, constraints=constraints)

            serves = found.target if found.decision is Decision.MOVE else found.base
            assert first_violation(found.problem, serves) is None


TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
PLACED = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=1)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[0, 1, 0, 1]], "layer 0: expert 2 has no slot"),
        ([[0, 1, 2, 3]], "layer 0 slot 3 holds expert 3, expected 0..2"),
        ([[0, 1, 2, -2]], "slot 3 holds expert -2"),
        ([0, 1, 2], r"shape \(3,\), expected \[layers, slots\]"),
    ],
)
def test_placement_that_must_not_serve_is_refused(held: list[list[int]], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement(np.array(held), num_experts=3)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ([[0.5, 1.0, 0.4, 1.0]], "shares of expert 0 in layer 0 sum to 0.9, expected 1"),
        ([[1.5, 1.0, -0.5, 1.0]], "slot 0 has 1.5"),
        ([[0.5, 1.0, np.nan, 1.0]], "slot 2 has nan"),
        ([[0.5, 1.0, 0.5]], r"shape \(1, 3\), expected \(1, 4\)"),
    ],
)
def test_shares_that_do_not_add_up_are_refused(share: list[list[float]], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement(PLACED.slot_to_expert, 3, slot_share=np.array(share))


def test_shares_may_differ_by_source_node() -> None:
    share = np.array([[[1.0, 1, 0, 1]], [[0.0, 1, 1, 1]]])

    placement = Placement(PLACED.slot_to_expert, 3, source_share=share)

    assert placement.source_share is not None
    assert placement.hash != PLACED.hash
    with pytest.raises(PlacementError, match="source_share of node 1: the shares of expert 0"):
        Placement(PLACED.slot_to_expert, 3, source_share=np.array([share[0], share[0] * 0.5]))


def test_layers_of_another_placement_can_be_taken() -> None:
    base = Placement(np.array([[0, 1], [0, 1]]), num_experts=2, generation=4)
    other = Placement(np.array([[1, 0], [1, 0]]), num_experts=2, generation=5)

    mixed = base.with_layers(other, [1])

    assert mixed.slot_to_expert.tolist() == [[0, 1], [1, 0]]
    assert mixed.generation == 4
    with pytest.raises(PlacementError, match="expected"):
        base.with_layers(PLACED, [0])


def test_shares_by_source_survive_a_mix_with_a_placement_without() -> None:
    share = np.array([[[1.0, 1, 0, 1]], [[0.0, 1, 1, 1]]])
    by_source = Placement(PLACED.slot_to_expert, 3, source_share=share)

    there, back = PLACED.with_layers(by_source, [0]), by_source.with_layers(PLACED, [0])

    assert there.source_share is not None
    assert there.source_share.tolist() == share.tolist()
    assert back.source_share is not None
    assert back.source_share[0].tolist() == PLACED.slot_share.tolist()


@pytest.mark.parametrize(
    ("held", "topology", "words"),
    [
        ([0, 0, 1, 2], TWO_RANKS, "layer 0: rank 0 holds expert 0 more than once"),
        (
            [0, 1, 0, 2],
            Topology(np.zeros(2), np.full(2, 2), alive=np.array([True, False])),
            "slot 2 holds expert 0 on rank 1, which is not alive",
        ),
        ([0, 1, 0, 2], Topology.uniform(1, 2, 3), "4 slots .* 6"),
    ],
)
def test_placement_that_ranks_cannot_serve_does_not_fit(
    held: list[int], topology: Topology, words: str
) -> None:
    with pytest.raises(PlacementError, match=words):
        check_fits(Placement(np.array([held]), num_experts=3), topology)


def test_hash_names_what_ranks_route_by() -> None:
    assert PLACED.hash == PLACED.with_generation(9).hash
    assert PLACED.hash != Placement(np.array([[0, 2, 0, 1]]), num_experts=3).hash
