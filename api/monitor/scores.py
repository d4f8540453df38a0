"""Imbalance of windows and roll-ups, and the drift of their load since it was planned on.

Page, metrics, terminal and history read the same figures. The imbalance is that of
``eplb.measure``, over the ranks that hold experts. A drained rank has no slot in use and
gets no tokens: in the mean it would make the best placement look uneven.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from api.monitor.state import Heat, Reading, WindowScore
from eplb.core.load import LoadHistory
from eplb.core.placement import slots_in_use
from eplb.core.topology import Topology
from eplb.errors import EplbError
from eplb.measure import imbalance_of
from eplb.migration.serialisation import topology_from_dict
from telemetry.load.drift import Drift, drift
from telemetry.load.folder import Window, history
from telemetry.load.pruning import rollups_after
from telemetry.load.rollup import MINUTE, Rollup, joined
from telemetry.state.events import PlanDecision, PlanEnd
from telemetry.state.runs import RunBegan, RunInfo
from telemetry.state.store import StateStore

KEPT_PLACEMENTS = 64
COMPARED_WINDOWS = 4  # the latest ones
PLANNED_WINDOWS = 4  # windows of a plan whose event does not name them


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
    return ratio


def heat_of(seen: Reading) -> Heat:
    """Give the load of ranks and experts in the latest window."""
    window = seen.latest
    if window is None or seen.scale is None:
        return Heat(seen.state.run, None)
    ranks, experts = relative(window.received, seen.scale.serving), relative(window.tokens)
    return Heat(window.run, window.index, _rows(ranks), _rows(experts))


def _rows(ratio: NDArray[np.float64]) -> tuple[tuple[float, ...] | None, ...]:
    # Three digits are more than a picture shows, and a third of the bytes.
    rows = np.round(ratio, 3).tolist()
    is_empty = np.isnan(ratio[:, 0])  # [L]; a row is all NaN or has none
    return tuple(None if none else tuple(row) for row, none in zip(rows, is_empty, strict=True))


def scored(
    load: Window | Rollup,
    holders: Holders,
    *,
    index: int,
    is_complete: bool,
    is_migrating: bool,
    time: float | None,
) -> WindowScore:
    """Score a window, or the roll-up of a minute.

    Args:
        load: tokens of the window.
        holders: tells which ranks count.
        index: number of the window in its run.
        is_complete: whether every rank reported on it.
        is_migrating: whether part of an uncommitted migration served in it.
        time: end of its newest sample.

    Raises:
        StoreError: the store cannot be read.
    """
    topology = holders.topology(load.received, load.generations)
    return WindowScore(
        index=index,
        first_step=load.first_step,
        last_step=load.last_step,
        measured=mean_imbalance(load.received, topology),
        contiguous=mean_imbalance(contiguous_load(load.tokens, topology), topology),
        generation=max(load.generations, default=0),
        is_complete=is_complete,
        is_migrating=is_migrating or len(load.generations) > 1,
        time=time,
    )


def minute_scores(
    store: StateStore, runs: Sequence[RunInfo], since: float
) -> Iterator[tuple[str, WindowScore]]:
    """Score the roll-ups of a minute that start past a time, oldest first, each with its run.

    Raises:
        StoreError: the store cannot be read.
    """
    holders = dict[str, Holders]()
    for info in runs:
        # The samples of a run that cannot be read are in no window either.
        with suppress(EplbError, LookupError, TypeError, ValueError):
            holders[info.run] = Holders(store, topology_from_dict(dict(info.topology)))
    for (start, run), of_phases in groupby(
        rollups_after(store, MINUTE, since), key=lambda rollup: (rollup.start, rollup.run)
    ):
        if run in holders:
            minute = joined(list(of_phases), MINUTE, start, "mixed")
            yield (
                run,
                scored(
                    minute,
                    holders[run],
                    index=int(start) // MINUTE,
                    is_complete=True,
                    is_migrating=False,
                    time=start + MINUTE,
                ),
            )


class DriftWatch:
    """Keeps the load that the serving placement was planned on, for as long as it serves.

    It is found among the windows at hand, so a process that begins to watch long after a commit
    does not know it, and gives None until the next one. The same holds for a first placement,
    which was planned on no load.
    """

    def __init__(self) -> None:
        self._serves: tuple[str | None, int | None] = (None, None)  # run and generation
        self._planned_on: LoadHistory | None = None
        self._planned_window = -1  # the newest of those

    def update(self, seen: Reading, windows: Sequence[Window]) -> Drift | None:
        """Give the drift of the latest windows; None while either side is not known.

        Args:
            seen: tells what serves, and the events that led to it.
            windows: those with their matrices, oldest first.
        """
        serves = seen.state.run, seen.state.generation
        if serves != self._serves:
            self._serves, self._planned_on = serves, None
        plan = _plan_behind(seen) if self._planned_on is None else None
        if plan is not None and plan.window is not None:
            newest = plan.window
            looked_at = PLANNED_WINDOWS if plan.windows is None else plan.windows
            upto = [window for window in windows if window.index <= newest and window.is_complete]
            if upto and upto[-1].index == newest:
                self._planned_on = history(upto, last=looked_at)
                self._planned_window = newest
        since = [window for window in windows if window.index > self._planned_window]
        latest = history(since, last=COMPARED_WINDOWS)
        if self._planned_on is None or latest is None:
            return None
        return drift(self._planned_on, latest)


def _plan_behind(seen: Reading) -> PlanDecision | None:
    """The decision that led to the placement that serves, while it is among the kept events."""
    latest: PlanDecision | None = None
    for event in seen.events:
        match event.fact:
            case RunBegan():
                latest = None
            case PlanDecision() as plan if plan.moves_experts and plan.window is not None:
                latest = plan
            case PlanEnd() as end if event.kind == "commit":
                if end.generation == seen.state.generation:
                    return latest if end.plan_id > 0 else None
    return None
