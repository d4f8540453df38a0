"""Ranks, slots and nodes: what is derived, and what is refused."""

import numpy as np
import pytest

from eplb import Topology
from eplb.errors import TopologyError

UNEVEN = Topology(node_of_rank=np.array([0, 0, 1]), slots_of_rank=np.array([2, 0, 3]))


def test_slots_are_numbered_rank_by_rank() -> None:
    assert UNEVEN.num_slots == 5
    assert UNEVEN.first_slot.tolist() == [0, 2, 2, 5]
    assert UNEVEN.rank_of_slot.tolist() == [0, 0, 2, 2, 2]
    assert UNEVEN.node_of_slot.tolist() == [0, 0, 1, 1, 1]
    assert UNEVEN.slots_on(2) == slice(2, 5)
    usual = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
    assert (usual.node_of_rank.tolist(), usual.num_slots) == ([0, 0, 1, 1], 12)
    with pytest.raises(TopologyError, match="0 nodes x 2 ranks x 3 slots"):
        Topology.uniform(num_nodes=0, ranks_per_node=2, slots_per_rank=3)


def test_hosts_follow_nodes_and_failure_domains_follow_hosts() -> None:
    rack = Topology(
        node_of_rank=np.zeros(4), slots_of_rank=np.ones(4), host_of_rank=np.array([0, 0, 1, 1])
    )

    assert UNEVEN.host_of_rank.tolist() == [0, 0, 1]
    assert rack.failure_domain.tolist() == [0, 0, 1, 1]
    assert (rack.num_nodes, rack.num_ranks) == (1, 4)
    assert rack.alive.all()
    assert (rack.rank_speed == 1.0).all()


def test_arrays_are_copied_and_read_only() -> None:
    slots = np.array([1, 1])
    topology = Topology(node_of_rank=np.zeros(2), slots_of_rank=slots)
    slots[0] = 9

    assert topology.num_slots == 2
    with pytest.raises(ValueError, match="read-only"):
        topology.slots_of_rank[0] = 9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots_of_rank": [1]}, r"slots_of_rank has shape \(1,\), expected \(2,\)"),
        ({"slots_of_rank": [1, -2]}, "rank 1 has -2 slots"),
        ({"rank_speed": [1.0, 0.0]}, "rank 1 has speed 0.0"),
        ({"rank_speed": [np.nan, 1.0]}, "rank 0 has speed nan"),
        ({"rank_speed": [1.0, np.inf]}, "rank 1 has speed inf, expected a finite number above 0"),
        ({"alive": [False, False]}, "no rank is alive of 2"),
    ],
)
def test_topology_with_arrays_of_unequal_length_is_refused(
    fields: dict[str, list[float]], message: str
) -> None:
    usual = {"node_of_rank": [0, 0], "slots_of_rank": [1, 1]}

    with pytest.raises(TopologyError, match=message):
        Topology(**{name: np.array(value) for name, value in (usual | fields).items()})
