"""Imbalance of windows and roll-ups, for page, metrics, terminal and history alike.

It is that of ``eplb.measure.balance``, over the ranks that hold experts. A drained rank has no slot
in use and gets no tokens: in the mean it would make the best placement look uneven.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from api.monitor.history import MinuteScore
from eplb.core.placement import slots_in_use
from eplb.core.topology import Topology
from eplb.errors import EplbError
from eplb.measure.balance import imbalance_of
from eplb.migration.serialisation import topology_from_dict
from telemetry.load.pruning import rollups_after
from telemetry.load.rollup import MINUTE, Rollup, joined
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

KEPT_PLACEMENTS = 64


class Holders:
    """Which ranks of a run count in its imbalance: those that hold experts.

    A placement is read only for a rank without a token, because any other one holds experts. A
    rank that holds some and gets no token counts: it is idle, or its counter fails.
    """

    def __init__(self, store: StateStore, topology: Topology) -> None:
        self._store, self._topology = store, topology
        self._empty = lru_cache(KEPT_PLACEMENTS)(self._read)

    def topology(self, received: NDArray[np.int64], generations: Iterable[int]) -> Topology:
        """Return the topology in which the ranks that held nothing are drained.

        Args:
            received: [L, R] tokens of each rank.
            generations: that served meanwhile; a rank held nothing if it did so in all of them.

        Raises:
            StoreError: the store cannot be read.
        """
        drained = np.asarray(~received.any(axis=0))
        for generation in generations:
            if not drained.any():
                break
            drained = drained & self._empty(generation)
        if not drained.any() or drained.all():
            return self._topology
        return replace(self._topology, drained=drained)

    def _read(self, generation: int) -> NDArray[np.bool_]:
        """[R] ranks without an expert; none where the store has no such placement."""
        found = self._store.placement(generation)
        if found is None or found.placement.num_slots != self._topology.num_slots:
            return np.zeros(self._topology.num_ranks, dtype=np.bool_)
        return np.asarray(~slots_in_use(found.placement, self._topology).any(axis=0))


def layer_imbalance(load: NDArray[np.int64], topology: Topology) -> NDArray[np.float64]:
    """[L] imbalance of a rank load [L, R]; NaN for a layer without tokens."""
    found = imbalance_of(load.astype(np.float64), topology)
    return np.where(load.any(axis=1), found, np.nan)


def mean_imbalance(load: NDArray[np.int64], topology: Topology) -> float | None:
    """Mean imbalance of the layers of a rank load [L, R] that have tokens; None: none has any."""
    if not load.any():
        return None
    return float(np.nanmean(layer_imbalance(load, topology)))


def contiguous_load(tokens: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """[L, R] rank load if the experts of ``tokens`` [L, E] lay on the ranks in order, no replicas.

    Where the ranks do not divide the experts, the first ones hold one more; drained ones have none.
    """
    load = np.zeros((len(tokens), topology.num_ranks), dtype=np.int64)
    parts = np.array_split(tokens, topology.serving.sum(), axis=1)
    load[:, topology.serving] = np.stack([part.sum(axis=1) for part in parts], axis=1)
    return load


def relative(
    load: NDArray[np.int64], counts: NDArray[np.bool_] | slice = slice(None)
) -> NDArray[np.float64]:
    """Each row over the mean of its columns that count; a row without tokens is all NaN."""
    mean = load[:, counts].mean(axis=1, keepdims=True)
    ratio: NDArray[np.float64] = np.full(load.shape, np.nan)
    np.divide(load, mean, out=ratio, where=mean > 0)
    ratio.flags.writeable = False
    return ratio


def minute_scores(
    store: StateStore, runs: Sequence[RunInfo], since: float
) -> Iterator[MinuteScore]:
    """Score the roll-ups of a minute that start past a time, oldest first.

    Raises:
        StoreError: the store cannot be read.
    """
    holders = {info.run: _holders(store, info) for info in runs}
    for (start, run), of_phases in groupby(
        rollups_after(store, MINUTE, since), key=lambda rollup: (rollup.start, rollup.run)
    ):
        of_run = holders.get(run)
        if of_run is not None:
            yield _score(run, start, list(of_phases), of_run)


def _holders(store: StateStore, info: RunInfo) -> Holders | None:
    try:
        return Holders(store, topology_from_dict(dict(info.topology)))
    except (EplbError, LookupError, TypeError, ValueError):
        return None  # its samples are in no window either


def _score(run: str, start: float, parts: Sequence[Rollup], holders: Holders) -> MinuteScore:
    minute = joined(parts, MINUTE, start, "mixed")
    topology = holders.topology(minute.received, minute.generations)
    return MinuteScore(
        run=run,
        start=start,
        measured=mean_imbalance(minute.received, topology),
        contiguous=mean_imbalance(contiguous_load(minute.tokens, topology), topology),
        generation=max(minute.generations, default=0),
        is_migrating=len(minute.generations) > 1,
    )
