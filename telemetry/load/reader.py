"""The reader of load: samples of a store past a cursor, folded into the windows of their run.

The controller plans on these windows, the page shows them, and history, exports and shadow
planning are made of them; an index means the same window to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import EplbError, HistoryError
from eplb.migration.serialisation import model_from_dict, topology_from_dict
from telemetry.load.counts import RunShape
from telemetry.load.folder import DEFAULT_KEEP, Cut, CutBySteps, CutByTime, WindowFolder
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

PAGE = 10_000  # samples read at a time

# Reads (cursor, sample) past the cursor ``after``, up to ``limit``; StateStore has such methods.
Query = Callable[..., list[tuple[int, LoadSample]]]


class RunReader:
    """Reads one run: ``read`` folds what is new in the store into the windows of ``folder``.

    Args:
        store: of the deployment.
        run: the start of the run, as the store has it.
        keep: how many windows the folder holds, the latest.
        clock: seconds since the epoch, to exclude what ``WindowFolder.add_all`` excludes by it.
            None: whatever fits the run is counted.
        latest: so many samples of each rank are read at first, about, the latest; None: all.

    Raises:
        HistoryError: what was recorded at the start is no model, no topology or no window.
    """

    def __init__(
        self,
        store: StateStore,
        run: RunInfo,
        *,
        keep: int = DEFAULT_KEEP,
        clock: Clock | None = None,
        latest: int | None = None,
    ) -> None:
        self.run = run
        self.model, self.topology = model_and_topology(run)
        # Of the run's start, not of the first sample, which may be malformed.
        self.shape = shape_of(store.deployment, run.run, self.model, self.topology)
        seconds = run.window_seconds
        cut: Cut = CutByTime(seconds) if seconds else CutBySteps(run.window_steps)
        self.folder = WindowFolder(cut, self.shape, keep=keep)
        self.num_read = 0  # samples, whatever became of them
        self._store, self._clock, self._cursor = store, clock, 0
        if latest is not None:
            self._cursor = store.backend.cursor_before(run.run, latest * self.topology.num_ranks)

    def read(self, page: int = PAGE) -> Iterator[list[LoadSample]]:
        """Fold what arrived since the last call, and give the accepted samples of each page.

        Args:
            page: samples read at a time. The folder drops its oldest windows as newer ones begin,
                so a reader that looks at each window takes pages of fewer windows than it holds.

        Raises:
            StoreError: the store cannot be read; the next call continues where this one ended.
        """
        query = partial(self._store.samples, self.run.run)
        for cursor, samples in pages(query, self._cursor, page):
            self._cursor = cursor
            yield self.fold(samples)

    def fold(self, samples: list[LoadSample]) -> list[LoadSample]:
        """Fold samples that were read elsewhere, and return those that are accepted."""
        self.num_read += len(samples)
        return self.folder.add_all(samples, None if self._clock is None else self._clock())


def pages(query: Query, after: int, limit: int) -> Iterator[tuple[int, list[LoadSample]]]:
    """Give samples page by page, each with the cursor of its last sample.

    Args:
        query: asked again as long as pages are asked for, and there are any.
        after: the cursor to begin past.
        limit: samples of a page.
    """
    while page := query(after=after, limit=limit):
        after = page[-1][0]
        yield after, [sample for _, sample in page]


def model_and_topology(run: RunInfo) -> tuple[ModelShape, Topology]:
    """Return the model and the topology that were recorded at the start of a run.

    Raises:
        HistoryError: what was recorded is no model or no topology.
    """
    try:
        return model_from_dict(dict(run.model)), topology_from_dict(dict(run.topology))
    except (EplbError, LookupError, TypeError, ValueError) as exc:
        raise HistoryError(f"run {run.run!r} has no readable model or topology: {exc!r}") from exc


def shape_of(deployment: str, run: str, model: ModelShape, topology: Topology) -> RunShape:
    """Return what the samples of a run have in common."""
    sizes = topology.num_ranks, model.num_experts, model.num_layers
    dead = frozenset(np.flatnonzero(~topology.alive).tolist())
    return RunShape(deployment, run, *sizes, dead)
