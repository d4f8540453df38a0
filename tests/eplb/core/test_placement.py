"""The one truth about where experts are, and the lookups that follow from it."""

import numpy as np
import pytest

from eplb import EMPTY, Placement, Topology
from eplb.core.placement import check_fits, duplicate_replicas
from eplb.errors import PlacementError

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
PLACED = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=1)


def test_counts_and_the_inverse_follow_from_the_slots() -> None:
    assert PLACED.replica_count.tolist() == [[2, 1, 1]]
    assert PLACED.expert_to_slots.tolist() == [[[0, 2], [1, EMPTY], [3, EMPTY]]]
    assert PLACED.slot_share.tolist() == [[0.5, 1.0, 0.5, 1.0]]


def test_empty_slots_hold_nothing_and_get_nothing() -> None:
    placement = Placement(np.array([[1, EMPTY, 0]]), num_experts=2)

    assert placement.slot_share.tolist() == [[1.0, 0.0, 1.0]]
    assert placement.replica_count.tolist() == [[1, 1]]


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


def test_second_replica_on_a_rank_is_a_duplicate() -> None:
    doubled = Placement(np.array([[0, 0, 1, 2]]), num_experts=3)

    assert duplicate_replicas(doubled, TWO_RANKS).tolist() == [[0, 0, 0]]


def test_hash_names_what_ranks_route_by() -> None:
    assert PLACED.hash == PLACED.with_generation(9).hash
    assert PLACED.hash != Placement(np.array([[0, 2, 0, 1]]), num_experts=3).hash
