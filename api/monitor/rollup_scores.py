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
from telemetry.retention.reading import rollups_after
from telemetry.retention.rollup import MINUTE, Rollup
from telemetry.store import RollupStore, RunInfo


def minute_scores(
    store: RollupStore, runs: Sequence[RunInfo], since: float
) -> Iterator[MinuteScore]:
    """Score the roll-ups of a minute that start past a time, oldest first.

    Raises:
        StoreError: the store cannot be read.
    """
    topologies = {info.run: _topology(info) for info in runs}
    for (start, run), of_phases in groupby(
        rollups_after(store, MINUTE, since), key=lambda rollup: (rollup.start, rollup.run)
    ):
        topology = topologies.get(run)
        if topology is not None:
            yield _score(run, start, list(of_phases), topology)


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
