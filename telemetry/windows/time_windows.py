"""Windows of wall-clock time, for engines whose ranks sample by the clock and not by steps.

Window w covers the seconds w * window_seconds up to, not including, (w + 1) * window_seconds. A
sample belongs to the window in which it was taken, by its rank's clock. There are no steps to be
covered, so sequences show what is missing: a rank's part of a window is complete when its samples
follow one another without a gap, from the last before the window to the first past its end.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from eplb.core.load import LoadSample, Phase
from eplb.errors import HistoryError
from telemetry.windows.batch_intake import LATE, REPEATED, Taken, as_sequence, take_all, take_one
from telemetry.windows.filling import Filling
from telemetry.windows.fit import Fit, named
from telemetry.windows.step_windows import DEFAULT_KEEP, Window, common_phase


class TimeFolder:
    """Folds the samples of one run into windows of time; else as WindowFolder.

    A rank that sent nothing in a window, and lost nothing, had nothing to count: it is not missing.
    """

    def __init__(
        self,
        window_seconds: float,
        num_ranks: int,
        num_experts: int,
        *,
        keep: int = DEFAULT_KEEP,
        num_layers: int | None = None,
    ) -> None:
        for name, value in (("window_seconds", window_seconds), ("keep", keep)):
            if not value > 0:
                raise HistoryError(f"{name} is {value}, expected more than 0")
        self.window_seconds = window_seconds
        self.num_ranks = num_ranks
        self.num_experts = num_experts
        self.keep = keep
        self.too_late = 0
        self._fit = Fit(num_ranks, num_experts, num_layers)
        self._run = ""
        self._filling: dict[int, _TimeWindow] = {}
        self._taken: dict[int, list[tuple[int, float]]] = {}  # rank -> (sequence, time), in order

    def add(self, sample: LoadSample) -> bool:
        """Count a sample; return whether it changed a window.

        Raises:
            HistoryError: as WindowFolder.add, but for steps, which may be any.
        """
        return take_one(sample, self._fit, self._place)

    def add_all(self, samples: Iterable[LoadSample]) -> Taken:
        """Count samples like ``add``, much faster, and return the outcomes."""
        return take_all(as_sequence(samples), self._fit, self._place)

    def index_of(self, sample: LoadSample) -> int:
        """Return the index of the window in which a sample was taken.

        Raises:
            HistoryError: its time is no finite number.
        """
        if not isfinite(sample.time):
            raise HistoryError(f"{named(sample)} was taken at {sample.time}, expected a time")
        return int(sample.time // self.window_seconds)

    def newest(self) -> int | None:
        """Return the index of the newest window that is held, or None before the first."""
        return max(self._filling, default=None)

    def windows(self, phase: Phase | None = None) -> list[Window]:
        """Return the windows that have at least one sample, oldest first; see WindowFolder."""
        return [
            one.window(index, self._run, phase, self._missing_ranks(index))
            for index, one in sorted(self._filling.items())
            if phase is None or phase in one.filling.by_phase
        ]

    def _place(self, sample: LoadSample) -> Filling | Literal["late", "repeated"]:
        index = self.index_of(sample)
        window = self._filling.get(index) or self._open(index, sample)
        if window is None:
            self.too_late += 1
            return LATE
        taken = self._taken.setdefault(sample.rank, [])
        place = bisect_left(taken, (sample.sequence,))
        if place < len(taken) and taken[place][0] == sample.sequence:
            return REPEATED
        insort(taken, (sample.sequence, sample.time))
        window.built.clear()
        return window.filling

    def _open(self, index: int, sample: LoadSample) -> _TimeWindow | None:
        if len(self._filling) >= self.keep:
            oldest = min(self._filling)
            if index < oldest:
                return None
            del self._filling[oldest]
            self._forget_before(min(self._filling, default=index))
        self._run = sample.run
        window = _TimeWindow(Filling(self.num_ranks, self.num_experts))
        self._filling[index] = window
        return window

    def _forget_before(self, index: int) -> None:
        """Forget when samples were taken, but for the last before the windows that are held."""
        start = index * self.window_seconds
        for taken in self._taken.values():
            del taken[: max(0, bisect_left(taken, start, key=_time) - 1)]

    def _missing_ranks(self, index: int) -> frozenset[int]:
        start, end = index * self.window_seconds, (index + 1) * self.window_seconds
        ranks = range(self.num_ranks)
        return frozenset(rank for rank in ranks if not self._is_whole(rank, start, end))

    def _is_whole(self, rank: int, start: float, end: float) -> bool:
        """Whether a rank's samples run from before ``start`` to past ``end`` without a gap."""
        taken = self._taken.get(rank, [])
        last = bisect_left(taken, end, key=_time)
        if last == len(taken):
            return False  # more may come
        first = max(0, bisect_left(taken, start, key=_time) - 1)
        # Nothing is known of what came before the first sample, unless it is a rank's very first.
        is_from_the_start = taken[first][1] < start or taken[first][0] == 0
        return is_from_the_start and taken[last][0] - taken[first][0] == last - first


def _time(taken: tuple[int, float]) -> float:
    return taken[1]


@dataclass
class _TimeWindow:
    """A window that may still get samples."""

    filling: Filling
    built: dict[Phase | None, Window] = field(default_factory=dict)  # while they still hold

    def window(
        self, index: int, run: str, phase: Phase | None, missing_ranks: frozenset[int]
    ) -> Window:
        built = self.built.get(phase)
        if built is None or built.missing_ranks != missing_ranks:
            filling, counts = self.filling, self.filling.total(phase)
            built = self.built[phase] = Window(
                run,
                index,
                filling.first_step,
                filling.last_step,
                phase or common_phase(set(filling.by_phase)),
                frozenset(filling.generations),
                missing_ranks,
                counts.tokens,
                counts.received,
            )
        return built
