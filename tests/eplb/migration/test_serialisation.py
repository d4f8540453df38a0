"""Records: what is packed comes back, and anything else is refused in words."""

import json
from dataclasses import replace

import numpy as np
import pytest

from eplb import EMPTY, Pace, Placement, Topology, build_migration, preset
from eplb.errors import StoreError
from eplb.migration import serialisation as records
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


def test_migration_round_trips_with_the_same_hash() -> None:
    target = Placement(np.array([[1, 0, 0, 2]]), num_experts=3)
    base = Placement(np.array([[0, 1, 0, 2]]), num_experts=3)
    migration = build_migration(base, target, TWO_RANKS, plan_id=12, pace=Pace(staging_experts=4))

    found = migration_from_bytes(migration_to_bytes(migration))

    assert found.hash == migration.hash
    assert found.moves == migration.moves
    assert found.transactions == migration.transactions


def test_migration_at_the_pace_of_release_0_1_has_its_hash_and_no_later_name() -> None:
    target = Placement(np.array([[1, 0, 0, 2]]), num_experts=3)
    base = Placement(np.array([[0, 1, 0, 2]]), num_experts=3)
    first = build_migration(base, target, TWO_RANKS, plan_id=12, pace=Pace(staging_experts=4))
    later = replace(first, pace=replace(first.pace, link_part=0.5))

    assert first.hash == "1029f0169f983c468ea83aaf08f7756b"  # computed by release 0.1
    assert set(first.pace.recorded) == {
        "staging_experts",
        "transactions_per_commit",
        "mode",
        "spare_slots",
        "layers_per_transaction",
    }
    assert later.hash != first.hash
    assert migration_from_bytes(migration_to_bytes(later)).pace == later.pace


def test_flip_migration_round_trips_with_the_same_hash() -> None:
    three_slots = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
    base = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]]), num_experts=4)
    target = Placement(np.array([[2, 3, EMPTY, 0, 1, EMPTY]]), num_experts=4)
    pace = Pace(mode="flip", spare_slots=1, layers_per_transaction=2)
    migration = build_migration(base, target, three_slots, plan_id=12, pace=pace, weights_version=3)

    found = migration_from_bytes(migration_to_bytes(migration))

    assert (found.hash, found.pace, found.weights_version) == (migration.hash, pace, 3)
    assert found.transactions == migration.transactions
    assert found.placement_after(1).hash == migration.placement_after(1).hash


def test_migration_from_before_flip_mode_is_read_as_copies() -> None:
    migration = build_migration(
        Placement(np.array([[0, 1, 0, 2]]), 3),
        Placement(np.array([[1, 0, 0, 2]]), 3),
        TWO_RANKS,
        plan_id=1,
        pace=Pace(transactions_per_commit=1),
    )
    meta, arrays = records.unpack_record("migration", migration_to_bytes(migration))
    for name in ("reads_after", "frees", "weights_version", "kind", "version"):
        del meta[name]
    meta["pace"] = {"staging_experts": 16, "transactions_per_commit": 1}

    assert (
        migration_from_bytes(records.pack_record("migration", meta, arrays)).hash == migration.hash
    )


@pytest.mark.parametrize(
    ("pace", "later"),
    [
        (Pace(), set()),
        (Pace(experts_per_transaction=2, link_part=0.25), {"experts_per_transaction", "link_part"}),
    ],
)
def test_default_pace_names_nothing_that_an_earlier_release_refuses(
    pace: Pace, later: set[str]
) -> None:
    base, target = Placement(np.array([[0, 1, 0, 2]]), 3), Placement(np.array([[1, 0, 0, 2]]), 3)
    migration = build_migration(base, target, TWO_RANKS, plan_id=1, pace=pace)
    record = migration_to_bytes(migration)

    meta, _ = records.unpack_record("migration", record)

    known = {"staging_experts", "transactions_per_commit", "mode", "spare_slots"}
    assert set(meta["pace"]) == known | {"layers_per_transaction"} | later
    assert migration_from_bytes(record).hash == migration.hash


def test_migration_without_moves_round_trips() -> None:
    target = Placement(SHARED.slot_to_expert, 3, slot_share=np.array([[0.5, 1, 0.5, 1]]))
    migration = build_migration(
        Placement(SHARED.slot_to_expert, 3, slot_share=SHARED.slot_share),
        target,
        TWO_RANKS,
        plan_id=1,
    )

    assert migration_from_bytes(migration_to_bytes(migration)).hash == migration.hash


def test_topology_and_model_survive_json() -> None:
    topology = Topology(
        np.array([0, 1]), np.array([2, 3]), rank_speed=np.array([1, 0.5]), alive=np.array([1, 0])
    )

    again = topology_from_dict(json.loads(json.dumps(topology_to_dict(topology))))
    model = model_from_dict(json.loads(json.dumps(model_to_dict(preset("longcat-flash")))))

    assert topology_to_dict(again) == topology_to_dict(topology)
    assert model_to_dict(model) == model_to_dict(preset("longcat-flash"))


@pytest.mark.parametrize("record", [b"", b"nonsense", placement_to_bytes(SHARED)[:100]])
def test_damaged_bytes_are_refused(record: bytes) -> None:
    with pytest.raises(StoreError, match=f"record of {len(record)} bytes cannot be read"):
        placement_from_bytes(record)


def test_another_kind_of_record_is_refused() -> None:
    with pytest.raises(StoreError, match="found a record of kind 'placement' version 1, expected"):
        migration_from_bytes(placement_to_bytes(SHARED))


def test_every_flipped_byte_is_refused() -> None:
    record = placement_to_bytes(SHARED)
    for position in range(0, len(record), 37):
        damaged = bytearray(record)
        damaged[position] ^= 0xFF

        with pytest.raises(StoreError, match="its digest does not match its content"):
            placement_from_bytes(bytes(damaged))
