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
from itertools import groupby, takewhile
from math import inf, nextafter

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample, Phase
from eplb.errors import EplbError
from eplb.migration.serialisation import model_from_dict, topology_from_dict
from telemetry.retention.reading import rollups_after
from telemetry.retention.rollup import HOUR, MINUTE, Rollup
from telemetry.store import LoadStore, RunInfo
from telemetry.windows.folder import Window, WindowFolder, common_phase
from telemetry.windows.run_windows import folder_of

STRETCH_S = 10.0  # of samples that are read and folded at a time
_LONGEST_S = 30 * 86_400.0  # that is passed at a time
_PAGE = 1000  # samples
_WINDOW_BYTES = 8 * 2**20  # of the windows that are held, which are there twice
_LEAST_WINDOWS = 8


@dataclass(frozen=True, eq=False)
class LoadRow:
    """Tokens of one window, or of one roll-up."""

    run: str
    time: float  # seconds since the epoch at which it ends; of a window, of its newest sample
    seconds: int  # 0: a window of samples; MINUTE or HOUR: a roll-up
    first_step: int
    last_step: int  # inclusive
    phase: Phase
    generation: int  # the newest that served
    missing_ranks: int  # that sent no sample, or not of every step of a window
    tokens: NDArray[np.int64]  # [L, E] received by each expert
    received: NDArray[np.int64]  # [L, R] received by each rank


def load_rows(
    store: LoadStore, since: float, until: float, phase: Phase | None = None
) -> Iterator[LoadRow]:
    """Give the load from ``since`` to, not including, ``until``, oldest first.

    Args:
        since, until: seconds since the epoch; roll-ups that start, and samples that were taken.
        phase: count the tokens of this phase alone; None: of all phases.

    Raises:
        StoreError: the store cannot be read.
    """
    runs = {info.run: info for info in store.runs()}
    shapes = {run: folder for run, info in runs.items() if (folder := _folder(info)) is not None}
    end = since
    covered = set[tuple[str, float]]()  # run and start of hours that are rolled up
    for seconds in (HOUR, MINUTE):
        found = rollups_after(store, seconds, nextafter(since, -inf))
        in_range = takewhile(lambda one: one.start < until, found)
        for (start, run), of_phases in groupby(in_range, key=lambda one: (one.start, one.run)):
            parts = [one for one in of_phases if phase in (None, one.phase)]
            end = max(end, start + seconds)
            is_known = (run, start // HOUR * HOUR) in covered
            if parts and run in shapes and not is_known:
                yield _of_rollups(parts, shapes[run].num_ranks)
            if seconds == HOUR:
                covered.add((run, start))
    begun = min((info.time for info in runs.values()), default=until)
    windows = _Windows(runs, phase)
    # Ranks have clocks of their own: a sample may be a little older than its run.
    at = max(end, min(begun - HOUR, until))
    for start, stop in _stretches(store, at, until):
        yield from windows.read(store, start, stop)
    yield from windows.rest()


def _stretches(store: LoadStore, at: float, until: float) -> Iterator[tuple[float, float]]:
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


def _folder(info: RunInfo, keep: int = _LEAST_WINDOWS) -> WindowFolder | None:
    """An empty folder of a run; None where its samples are in no window of any reader."""
    try:
        model = model_from_dict(dict(info.model))
        topology = topology_from_dict(dict(info.topology))
        window_bytes = 8 * model.num_layers * (model.num_experts + topology.num_ranks)
        most = max(keep, _WINDOW_BYTES // window_bytes)
        return folder_of(info, model, topology, keep=most)
    except (EplbError, LookupError, TypeError, ValueError):
        return None


class _Windows:
    """Windows of the run that is read, each given once no more of its samples are to come.

    That is a stretch after its newest sample: clocks of ranks differ. Where windows are so short
    that not all of two stretches can be held, it is earlier.
    """

    def __init__(self, runs: dict[str, RunInfo], phase: Phase | None) -> None:
        self._runs, self._phase = runs, phase
        self._order = {run: number for number, run in enumerate(runs)}
        self._run = ""
        self._follow("")

    def _follow(self, run: str) -> None:
        self._run = run
        self._folder = _folder(self._runs[run]) if run in self._runs else None
        self._given = -1  # index of the last window that was given
        self._times: dict[int, float] = {}  # of the newest sample of each window

    def read(self, store: LoadStore, since: float, until: float) -> Iterator[LoadRow]:
        """Fold the samples of a stretch of time, and give the windows that have ended."""
        cursor = 0
        while page := store.samples_before(until, since=since, after=cursor, limit=_PAGE):
            cursor = page[-1][0]
            by_run: dict[str, list[LoadSample]] = {}
            for _, sample in page:
                by_run.setdefault(sample.run, []).append(sample)
            for run in sorted(by_run, key=lambda one: self._order.get(one, -1)):
                if self._order.get(run, -1) > self._order.get(self._run, -1):
                    yield from self.rest()
                    self._follow(run)
                # Of an earlier run: sent late, after the next one began.
                if run == self._run and self._folder is not None:
                    self._take(by_run[run], self._folder)
                    newest = self._folder.newest() or 0
                    yield from self._rows(below=newest - self._folder.keep // 2)
        yield from self._rows(older_than=until - STRETCH_S)

    def rest(self) -> Iterator[LoadRow]:
        """Give all windows that are left."""
        yield from self._rows()

    def _take(self, samples: list[LoadSample], folder: WindowFolder) -> None:
        for sample in folder.add_all(samples).samples:
            index = folder.index_of(sample)
            self._times[index] = max(sample.time, self._times.get(index, sample.time))

    def _rows(self, *, below: float = inf, older_than: float = inf) -> Iterator[LoadRow]:
        """Windows in order, up to the first whose index or newest sample is past a limit."""
        for window in self._folder.windows(self._phase) if self._folder is not None else ():
            if window.index <= self._given:
                continue
            if window.index >= below or self._times[window.index] >= older_than:
                return
            self._given = window.index
            yield _of_window(window, self._times.pop(window.index))


def _of_window(window: Window, time: float) -> LoadRow:
    return LoadRow(
        window.run,
        time,
        0,
        window.first_step,
        window.last_step,
        window.phase,
        max(window.generations, default=0),
        len(window.missing_ranks),
        window.tokens,
        window.received,
    )


def _of_rollups(parts: list[Rollup], num_ranks: int) -> LoadRow:
    first = parts[0]
    return LoadRow(
        first.run,
        first.start + first.seconds,
        first.seconds,
        min(part.first_step for part in parts),
        max(part.last_step for part in parts),
        common_phase({part.phase for part in parts}),
        max(max(part.generations, default=0) for part in parts),
        num_ranks - len(frozenset[int]().union(*(part.ranks for part in parts))),
        np.sum([part.tokens for part in parts], axis=0),
        np.sum([part.received for part in parts], axis=0),
    )
