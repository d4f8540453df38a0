"""Roll-ups of a minute as points of the history, read once, when a process begins to watch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from api.monitor.history import MinuteScore
from api.monitor.snapshot import contiguous_load, mean_imbalance
from eplb.core.topology import Topology
from eplb.errors import EplbError
from eplb.migration.serialisation import topology_from_dict
from telemetry.retention.rollup import MINUTE, Rollup
from telemetry.store import RollupStore, RunInfo

_PAGE = 200


def minute_scores(
    store: RollupStore, runs: Sequence[RunInfo], since: float
) -> Iterator[MinuteScore]:
    """Score the roll-ups of a minute that start past a time, oldest first.

    Raises:
        StoreError: the store cannot be read.
    """
    topologies = {info.run: _topology(info) for info in runs}
    for (start, run), of_phases in groupby(
        _rollups(store, since), key=lambda rollup: (rollup.start, rollup.run)
    ):
        topology = topologies.get(run)
        if topology is not None:
            yield _score(run, start, list(of_phases), topology)


def _rollups(store: RollupStore, since: float) -> Iterator[Rollup]:
    """Read page by page; those that start together may go on past the end of a page."""
    after, limit = since, _PAGE
    while found := store.rollups(MINUTE, after=after, limit=limit):
        is_last = len(found) < limit
        whole = found if is_last else [one for one in found if one.start < found[-1].start]
        if not whole:
            limit *= 2
            continue
        yield from whole
        if is_last:
            return
        after = whole[-1].start


def _topology(info: RunInfo) -> Topology | None:
    try:
        return topology_from_dict(dict(info.topology))
    except (EplbError, LookupError, TypeError, ValueError):
        return None  # its samples are in no window either


def _score(run: str, start: float, parts: Sequence[Rollup], topology: Topology) -> MinuteScore:
    tokens = np.sum([part.tokens for part in parts], axis=0)
    received = np.sum([part.received for part in parts], axis=0)
    generations = frozenset[int]().union(*(part.generations for part in parts))
    return MinuteScore(
        run=run,
        start=start,
        measured=mean_imbalance(received, topology),
        contiguous=mean_imbalance(contiguous_load(tokens, topology.num_ranks), topology),
        generation=max(generations, default=0),
        is_migrating=len(generations) > 1,
    )
