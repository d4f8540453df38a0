"""A rank's first experts: from its host cache into its slots, and proved there."""

from __future__ import annotations

import time
from collections.abc import Sequence

from eplb.errors import MigrationError
from rebalance.types import Digest, Record
from rebalance.weights.cache.client import HostCacheClient
from runtime.experts import ExpertBank

FILL_RECORDS = 64  # leased at a time


def fill_bank(
    bank: ExpertBank,
    held: Sequence[Sequence[int]],
    host_cache: HostCacheClient,
    *,
    deadline_s: float,
) -> dict[Record, Digest]:
    """Load the first experts of a rank: slots ``held`` [L][C], negative for an empty one.

    Returns:
        The digest of every expert that this rank now holds, taken from the slots themselves.

    Raises:
        MigrationError: a record cannot be read, or a slot does not hold what was read.
    """
    places: dict[Record, list[int]] = {}  # a rank may hold an expert in two slots
    for layer, slots in enumerate(held):
        for slot, expert in enumerate(slots):
            if expert >= 0:
                places.setdefault((layer, expert), []).append(slot)
    deadline = time.monotonic() + deadline_s
    # Not all at once: a small host cache has no room for them, and reading goes on while one is
    # copied.
    size = max(1, min(FILL_RECORDS, host_cache.num_entries // 4))
    records, digests = list(places), dict[Record, Digest]()
    for first in range(0, len(records), size):
        batch, following = records[first : first + size], records[first + size : first + 2 * size]
        found, _ = host_cache.load(batch, deadline_s=max(0.0, deadline - time.monotonic()))
        host_cache.hint(following)
        for record, expected in zip(batch, found, strict=True):
            for slot in places[record]:
                expected = _fill_slot(bank, record, slot, expected, host_cache, deadline)
            digests[record] = expected
        host_cache.release(batch)
    return digests


def _fill_slot(
    bank: ExpertBank,
    record: Record,
    slot: int,
    expected: Digest,
    host_cache: HostCacheClient,
    deadline: float,
) -> Digest:
    """Copy a leased record into a slot and prove it there; return its digest."""
    layer, expert = record
    host_cache.read(record, bank.live(layer, slot))
    if bank.digest(layer, slot) != expected:
        # The host's memory may have been damaged since: its disk is a second try.
        left_s = max(0.0, deadline - time.monotonic())
        expected = host_cache.reload(record, deadline_s=left_s)
        host_cache.read(record, bank.live(layer, slot))
    if bank.digest(layer, slot) != expected:
        raise MigrationError(
            f"layer {layer} slot {slot}: digest mismatch after loading expert {expert}"
        )
    return expected
