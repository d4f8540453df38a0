"""Records: what is packed comes back, and anything else is refused in words."""

import json

import numpy as np
import pytest

from eplb import EMPTY, Pace, Placement, Topology, build_migration, preset
from eplb.errors import StoreError
from eplb.migration.serialisation import (
    migration_from_bytes,
    migration_to_bytes,
    model_from_dict,
    model_to_dict,
    placement_from_bytes,
    placement_to_bytes,
    topology_from_dict,
    topology_to_dict,
)

SHARED = Placement(
    np.array([[0, 1, 0, 2]]),
    num_experts=3,
    generation=7,
    slot_share=np.array([[0.25, 1.0, 0.75, 1.0]]),
    source_share=np.array([[[1.0, 1.0, 0.0, 1.0]]]),
)
TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)


def test_placement_round_trips_through_bytes() -> None:
    found = placement_from_bytes(placement_to_bytes(SHARED))

    assert (found.hash, found.generation, found.num_experts) == (SHARED.hash, 7, 3)


FLIP = Pace(mode="flip", spare_slots=1, layers_per_transaction=2)
THREE_SLOTS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)


@pytest.mark.parametrize(
    ("base", "target", "topology", "pace"),
    [
        ([0, 1, 0, 2], [1, 0, 0, 2], TWO_RANKS, Pace(staging_experts=4)),
        ([0, 1, EMPTY, 2, 3, EMPTY], [2, 3, EMPTY, 0, 1, EMPTY], THREE_SLOTS, FLIP),
        ([0, 1, 0, 2], [0, 1, 0, 2], TWO_RANKS, Pace()),  # new shares alone
        ([0, 1, 0, 2], [1, 0, 0, 2], TWO_RANKS, Pace(experts_per_transaction=2, link_part=0.25)),
    ],
    ids=["copy", "flip", "without moves", "throttled"],
)
def test_migration_round_trips_with_the_same_hash(
    base: list[int], target: list[int], topology: Topology, pace: Pace
) -> None:
    wanted = Placement(np.array([target]), max(target) + 1)
    if base == target:
        wanted = Placement(SHARED.slot_to_expert, 3, slot_share=SHARED.slot_share)
    migration = build_migration(
        Placement(np.array([base]), max(base) + 1),
        wanted,
        topology,
        plan_id=12,
        pace=pace,
        weights_version=3,
    )

    found = migration_from_bytes(migration_to_bytes(migration))

    assert (found.hash, found.pace, found.weights_version) == (migration.hash, pace, 3)
    assert (found.moves, found.transactions) == (migration.moves, migration.transactions)
    assert found.placement_after(1).hash == migration.placement_after(1).hash


def test_migration_read_back_has_the_shares_of_each_source_node() -> None:
    two_nodes = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=2)
    base = Placement(
        np.array([[0, 1, 0, 2]]), 3, source_share=np.array([[[1, 1, 0, 1]], [[0.25, 1, 0.75, 1]]])
    )
    target = Placement(
        np.array([[1, 0, 2, 0]]), 3, source_share=np.array([[[1, 0.5, 1, 0.5]], [[1, 0, 1, 1]]])
    )
    migration = build_migration(base, target, two_nodes, plan_id=12)

    found = migration_from_bytes(migration_to_bytes(migration))

    for read, written in ((found.base, migration.base), (found.target, migration.target)):
        assert read.source_share is not None
        assert written.source_share is not None
        assert read.source_share.tolist() == written.source_share.tolist()
        assert read.hash == written.hash
    assert found.hash == migration.hash


def test_topology_and_model_survive_json() -> None:
    topology = Topology(
        np.array([0, 1]), np.array([2, 3]), rank_speed=np.array([1, 0.5]), alive=np.array([1, 0])
    )

    again = topology_from_dict(json.loads(json.dumps(topology_to_dict(topology))))
    model = model_from_dict(json.loads(json.dumps(model_to_dict(preset("longcat-flash")))))

    assert topology_to_dict(again) == topology_to_dict(topology)
    assert model_to_dict(model) == model_to_dict(preset("longcat-flash"))


@pytest.mark.parametrize("record", [b"", b"nonsense", placement_to_bytes(SHARED)[:100]])
def test_damaged_bytes_and_another_kind_of_record_are_refused(record: bytes) -> None:
    with pytest.raises(StoreError, match=f"{len(record)} bytes"):
        placement_from_bytes(record)
    with pytest.raises(StoreError, match="'placement' version 1"):
        migration_from_bytes(placement_to_bytes(SHARED))


def test_every_flipped_byte_is_refused() -> None:
    record = placement_to_bytes(SHARED)
    for position in range(0, len(record), 37):
        damaged = bytearray(record)
        damaged[position] ^= 0xFF

        with pytest.raises(StoreError, match="its digest does not match its content"):
            placement_from_bytes(bytes(damaged))
