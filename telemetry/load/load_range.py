"""Load over a range of time: windows of samples, and roll-ups of what was pruned.

    roll-ups of an hour, then of a minute, then windows of the samples past them

Retention prunes samples only after their minute is rolled up, so a roll-up stands for all samples
of its minute: those that are still there, of a turn that was killed, are not counted again. Memory
is bounded, whatever the range: windows are given as soon as no more of their samples are to come.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile
from math import inf, nextafter
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample, Phase
from eplb.core.model import ModelShape
from eplb.declared import Meaning
from eplb.errors import HistoryError
from telemetry.load.folder import Window, common_phase
from telemetry.load.pruning import rollups_after
from telemetry.load.reader import RunReader, model_and_topology, pages
from telemetry.load.rollup import HOUR, MINUTE, Rollup, joined
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

STRETCH_S = 10.0  # of samples that are read and folded at a time
_LONGEST_S = 30 * 86_400.0  # that is passed at a time
_PAGE = 1000  # samples
_WINDOW_BYTES = 8 * 2**20  # of the windows that are held, which are there twice
_LEAST_WINDOWS = 8


@dataclass(frozen=True)
class LoadSpan:
    """The time and steps of one row of load: of a window, or of a roll-up."""

    run: str
    time: Annotated[
        float,
        Meaning(
            "time of its end; of a window, of its newest sample",
            unit="s since the epoch",
            example=1790000000.0,
        ),
    ]
    seconds: Annotated[int, Meaning("0: a window of samples; 60 or 3600: a roll-up")]
    first_step: int
    last_step: Annotated[int, Meaning("inclusive")]
    phase: Phase
    generation: Annotated[int, Meaning("the newest that ranks served")]
    missing_ranks: Annotated[int, Meaning("ranks that sent nothing, or not all of a window")]


@dataclass(frozen=True, eq=False)
class LoadRow(LoadSpan):
    """Tokens of one window, or of one roll-up."""

    tokens: NDArray[np.int64]  # [L, E] received by each expert
    received: NDArray[np.int64]  # [L, R] received by each rank
    layer_ids: tuple[int, ...]  # [L] numbers of the layers in the model


def load_rows(
    store: StateStore, since: float, until: float, phase: Phase | None = None
) -> Iterator[LoadRow]:
    """Give the load from ``since`` to, not including, ``until``, oldest first.

    Args:
        since, until: seconds since the epoch; roll-ups that start, and samples that were taken.
        phase: count the tokens of this phase alone; None: of all phases.

    Raises:
        StoreError: the store cannot be read.
    """
    runs = {info.run: info for info in store.runs()}
    readers = {run: _reader(store, info) for run, info in runs.items()}
    end = since
    covered = set[tuple[str, float]]()  # run and start of hours that are rolled up
    for seconds in (HOUR, MINUTE):
        rollups = rollups_after(store, seconds, nextafter(since, -inf))
        in_range = takewhile(lambda rollup: rollup.start < until, rollups)
        for (start, run), of_phases in groupby(in_range, key=lambda one: (one.start, one.run)):
            parts = [rollup for rollup in of_phases if phase in (None, rollup.phase)]
            end = max(end, start + seconds)
            is_known = (run, start // HOUR * HOUR) in covered
            reader = readers.get(run)
            if parts and reader is not None and not is_known:
                load = joined(parts, seconds, start, common_phase({part.phase for part in parts}))
                num_missing = int(reader.topology.alive.sum()) - len(load.ranks)
                yield _row(load, start + seconds, seconds, num_missing, reader.model)
            if seconds == HOUR:
                covered.add((run, start))
    begun = min((info.time for info in runs.values()), default=until)
    windows = _Windows(store, readers, phase)
    # Ranks have clocks of their own: a sample may be a little older than its run.
    at = max(end, min(begun - HOUR, until))
    for start, stop in _stretches(store, at, until):
        yield from windows.read(start, stop)
    yield from windows.rows()


def _stretches(store: StateStore, at: float, until: float) -> Iterator[tuple[float, float]]:
    """Stretches of time with samples; where there are none, ever longer ones are passed."""
    width = STRETCH_S
    while at < until:
        end = min(at + width, until)
        if not store.samples_before(end, since=at, limit=1):
            at, width = end, min(2 * width, _LONGEST_S)
        elif width > STRETCH_S:
            width = max(STRETCH_S, width / 8)
        else:
            yield at, end
            at = end


def _reader(store: StateStore, info: RunInfo) -> RunReader | None:
    """A reader of a run; None where its samples are in no window of any reader."""
    try:
        model, topology = model_and_topology(info)
        window_bytes = 8 * model.num_layers * (model.num_experts + topology.num_ranks)
        return RunReader(store, info, keep=max(_LEAST_WINDOWS, _WINDOW_BYTES // window_bytes))
    except HistoryError:
        return None


class _Windows:
    """Windows of the run that is read, each given once no more of its samples are to come.

    That is a stretch after its newest sample: clocks of ranks differ. Where windows are so short
    that not all of two stretches can be held, it is earlier.
    """

    def __init__(
        self, store: StateStore, readers: dict[str, RunReader | None], phase: Phase | None
    ) -> None:
        self._store, self._readers, self._phase = store, readers, phase
        self._order = {run: number for number, run in enumerate(readers)}
        self._follow("")

    def _follow(self, run: str) -> None:
        self._run, self._reader = run, self._readers.pop(run, None)
        self._given = -1  # index of the last window that was given
        self._times: dict[int, float] = {}  # of the newest sample of each window

    def read(self, since: float, until: float) -> Iterator[LoadRow]:
        """Fold the samples of a stretch of time, and give the windows that have ended."""
        query = partial(self._store.samples_before, until, since=since)
        for _, samples in pages(query, 0, _PAGE):
            by_run: dict[str, list[LoadSample]] = {}
            for sample in samples:
                by_run.setdefault(sample.run, []).append(sample)
            for run in sorted(by_run, key=lambda run: self._order.get(run, -1)):
                if self._order.get(run, -1) > self._order.get(self._run, -1):
                    yield from self.rows()
                    self._follow(run)
                # Of an earlier run: sent late, after the next one began.
                if run != self._run or self._reader is None:
                    continue
                folder = self._reader.folder
                for sample in self._reader.fold(by_run[run]):
                    index = folder.index_of(sample)
                    self._times[index] = max(sample.time, self._times.get(index, sample.time))
                yield from self.rows(below=(folder.newest or 0) - folder.keep // 2)
        yield from self.rows(older_than=until - STRETCH_S)

    def rows(self, *, below: float = inf, older_than: float = inf) -> Iterator[LoadRow]:
        """Give windows in order, up to the first whose index or newest sample is past a limit."""
        reader = self._reader
        if reader is None:
            return
        for window in reader.folder.windows(self._phase):
            if window.index <= self._given:
                continue
            if window.index >= below or self._times[window.index] >= older_than:
                return
            self._given = window.index
            time, num_missing = self._times.pop(window.index), len(window.missing_ranks)
            yield _row(window, time, 0, num_missing, reader.model)


def _row(
    load: Window | Rollup, time: float, seconds: int, num_missing: int, model: ModelShape
) -> LoadRow:
    return LoadRow(
        load.run,
        time,
        seconds,
        load.first_step,
        load.last_step,
        load.phase,
        max(load.generations, default=0),
        num_missing,
        load.tokens,
        load.received,
        model.layer_ids,
    )
