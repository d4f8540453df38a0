"""Placements, migrations and shapes as bytes and as plain dictionaries, for stores and files.

The bytes are a digest, then numpy's ``.npz`` without pickles, which contains the version of this
layout. Damaged bytes and unknown versions are rejected.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import StoreError
from eplb.migration.build import Migration, Move, Pace, Source, Transaction

RECORD_VERSION = 1
DIGEST_BYTES = 16

Arrays = dict[str, NDArray[Any]]


def placement_to_bytes(placement: Placement) -> bytes:
    """Pack a placement."""
    return pack_record("placement", {}, _placement_arrays("", placement))


def placement_from_bytes(record: bytes) -> Placement:
    """Unpack a placement.

    Raises:
        StoreError: damaged bytes, another kind of record, or an unknown version.
    """
    _, arrays = unpack_record("placement", record)
    return _placement("", arrays)


def migration_to_bytes(migration: Migration) -> bytes:
    """Pack a migration with both of its placements."""
    rows = [
        (txn, one_round, move.layer, move.expert, move.dst_slot, move.source, move.src_slot)
        for txn, transaction in enumerate(migration.transactions)
        for one_round, moves in enumerate(transaction.rounds)
        for move in moves
    ]
    meta = {
        "plan_id": migration.plan_id,
        "layers": [list(txn.layers) for txn in migration.transactions],
        "reads_after": [txn.reads_after for txn in migration.transactions],
        "frees": [[list(freed) for freed in txn.frees] for txn in migration.transactions],
        "weights_version": migration.weights_version,
        "pace": asdict(migration.pace),
    }
    arrays = {"moves": np.array(rows, dtype=np.int64).reshape(-1, 7)}
    arrays |= _placement_arrays("base_", migration.base)
    arrays |= _placement_arrays("target_", migration.target)
    return pack_record("migration", meta, arrays)


def migration_from_bytes(record: bytes) -> Migration:
    """Unpack a migration.

    Raises:
        StoreError: damaged bytes, another kind of record, or an unknown version.
    """
    meta, arrays = unpack_record("migration", record)
    rounds: list[list[list[Move]]] = [[] for _ in meta["layers"]]
    for txn, one_round, layer, expert, dst_slot, source, src_slot in arrays["moves"].tolist():
        while len(rounds[txn]) <= one_round:
            rounds[txn].append([])
        rounds[txn][one_round].append(Move(layer, expert, dst_slot, Source(source), src_slot))
    transactions = tuple(
        Transaction(
            tuple(layers),
            tuple(tuple(moves) for moves in rounds_of_txn),
            after,
            tuple((layer, slot) for layer, slot in freed),
        )
        for layers, rounds_of_txn, after, freed in zip(
            meta["layers"], rounds, meta["reads_after"], meta["frees"], strict=True
        )
    )
    return Migration(
        meta["plan_id"],
        _placement("base_", arrays),
        _placement("target_", arrays),
        transactions,
        Pace(**meta["pace"]),
        meta["weights_version"],
    )


def topology_to_dict(topology: Topology) -> dict[str, Any]:
    """A topology as JSON-ready lists."""
    names = (
        "node_of_rank",
        "slots_of_rank",
        "host_of_rank",
        "failure_domain",
        "rank_speed",
        "alive",
    )
    return {name: getattr(topology, name).tolist() for name in names}


def topology_from_dict(fields: dict[str, Any]) -> Topology:
    """A topology from the output of ``topology_to_dict``."""
    return Topology(**fields)


def model_to_dict(model: ModelShape) -> dict[str, Any]:
    """A model shape as JSON-ready values."""
    values = vars(model) | {
        "layer_ids": list(model.layer_ids),
        "expert_cost": model.expert_cost.tolist(),
    }
    if model.num_matrices == ModelShape.num_matrices:
        del values["num_matrices"]  # readers of earlier versions know no other
    return values


def model_from_dict(fields: dict[str, Any]) -> ModelShape:
    """A model shape from the output of ``model_to_dict``."""
    return ModelShape(**(fields | {"layer_ids": tuple(fields["layer_ids"])}))


def _placement_arrays(prefix: str, placement: Placement) -> Arrays:
    arrays: Arrays = {
        "slot_to_expert": placement.slot_to_expert,
        "slot_share": placement.slot_share,
        "scalars": np.array([placement.num_experts, placement.generation]),
    }
    if placement.source_share is not None:
        arrays["source_share"] = placement.source_share
    return {prefix + name: array for name, array in arrays.items()}


def _placement(prefix: str, arrays: Arrays) -> Placement:
    num_experts, generation = (int(value) for value in arrays[prefix + "scalars"])
    return Placement(
        arrays[prefix + "slot_to_expert"],
        num_experts,
        generation,
        arrays[prefix + "slot_share"],
        arrays.get(prefix + "source_share"),
    )


def pack_record(kind: str, meta: dict[str, Any], arrays: Arrays) -> bytes:
    """A record as bytes: digest, then the archive of header and arrays."""
    header = json.dumps({"kind": kind, "version": RECORD_VERSION} | meta)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, header=np.array(header), **arrays)
    payload = buffer.getvalue()
    return _digest(payload) + payload


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


def unpack_record(kind: str, record: bytes) -> tuple[dict[str, Any], Arrays]:
    """Header and arrays of a record.

    Raises:
        StoreError: damaged bytes, another kind of record, or an unknown version.
    """
    digest, payload = record[:DIGEST_BYTES], record[DIGEST_BYTES:]
    # Checked before parsing: damaged archives raise many kinds of exceptions.
    if digest != _digest(payload):
        raise StoreError(
            f"a {kind} record of {len(record)} bytes cannot be read: "
            "its digest does not match its content"
        )
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        arrays = dict(archive)
    meta = json.loads(str(arrays.pop("header")))
    found = (meta["kind"], meta["version"])
    if found != (kind, RECORD_VERSION):
        raise StoreError(
            f"found a record of kind {found[0]!r} version {found[1]}, "
            f"expected kind {kind!r} version {RECORD_VERSION}"
        )
    return meta, arrays
