"""Roll-ups of a store, page by page."""

from __future__ import annotations

from collections.abc import Iterator

from telemetry.retention.rollup import Rollup
from telemetry.store import RollupStore

PAGE = 100


def rollups_after(store: RollupStore, seconds: int, after: float) -> Iterator[Rollup]:
    """Give the roll-ups of a length that start past a time, oldest first, as they are asked for.

    Raises:
        StoreError: the store cannot be read.
    """
    limit = PAGE
    while found := store.rollups(seconds, after=after, limit=limit):
        # Those that start together may go on past the end of a page: read again with the next.
        is_last = len(found) < limit
        whole = found if is_last else [one for one in found if one.start < found[-1].start]
        if not whole:
            limit *= 2
            continue
        yield from whole
        if is_last:
            return
        after = whole[-1].start
