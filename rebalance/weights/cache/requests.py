"""Requests to the host cache, and the reasons of a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rebalance.types import Digest, Record
from rebalance.weights.cache.entries import Entry, EntryTable


@dataclass(eq=False)
class Request:
    """A rank's request for records. ``ended`` is called once and must not block."""

    holder: int
    number: int
    records: Sequence[Record]
    ended: Callable[[Request], None]
    weights_version: int = 0
    is_for_host: bool = False  # another host asks, not a rank: nothing is asked of a third
    num_from_disk: int = 0
    num_from_hosts: int = 0
    fetched: set[Record] = field(default_factory=set)  # read for this request, not for an earlier
    added: list[Entry] = field(default_factory=list)  # leases that this request added
    missing: set[Record] = field(default_factory=set)
    found: dict[Record, tuple[Digest, int]] = field(default_factory=dict)  # digest and place
    error: str | None = None
    is_ended: bool = False


def refusal_of(request: Request, table: EntryTable, weights_version: int) -> str | None:
    """Return why a request can never be granted, or None.

    Records come from the checkpoint, whose weights are version 0.
    """
    if request.weights_version < weights_version:
        return (
            f"weights version {request.weights_version} was invalidated by version "
            f"{weights_version}: ranks replaced the weights while they served; to start from the "
            "checkpoint again, restart the host caches of all hosts first"
        )
    if request.weights_version > 0:
        return (
            f"weights version {request.weights_version} is not in the host cache, "
            "which is filled from the checkpoint, version 0"
        )
    asked, room = set(request.records), table.num_entries
    if len(asked) + table.num_leases[request.holder] <= room:
        return None
    beside = {entry.record for entry in table.held_by(request.holder)} - asked
    if len(asked) + len(beside) <= room:
        return None
    return (
        f"{len(asked)} records asked for beside {len(beside)} that this rank holds, "
        f"expected at most {room}, the capacity of the host cache"
    )


def no_room(request: Request, table: EntryTable) -> str:
    """Return what keeps a request waiting."""
    held = sum(bool(entry.holders) for entry in table.entries.values())
    return (
        f"no room for {len(set(request.records))} records: {held} of {table.num_entries} entries "
        f"are held, by {len(table.holders())} ranks"
    )
