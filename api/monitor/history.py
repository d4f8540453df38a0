"""Imbalance by wall-clock time over a day, whether or not anyone looks.

The windows of the last hour are kept as they are, older ones as means of a minute. What was before
this process began comes from the samples that the store still has, and from its roll-ups of a
minute. A roll-up is scored by the sums of its minute, so its noise is less than that of windows.

A range is cut into bins. A point is joined to the one before it unless nothing was heard for
longer than the windows take, so that a gap is drawn as a gap; a new run by itself breaks no line.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Annotated, Literal

from api.monitor.state import EPOCH, WindowScore
from eplb.declared import Meaning

MINUTE_S = 60.0
KEPT_S = 24 * 3600.0
RECENT_S = 3600.0
KEPT_RECENT = 16_384  # windows: 0.25 s each for an hour
KEPT_MARKS = 2000
GAP_BINS, GAP_SPACINGS = 2.5, 3.0  # without a point for longer than both: a gap

MarkKind = Literal["restart", "death", "MOVE", "RESPLIT", "ROLLBACK", "pause", "resume"]


@dataclass(frozen=True)
class HistoryMark:
    """A restart, a death, a rebalance or a switch."""

    time: Annotated[float, Meaning("when it happened", unit=EPOCH)]
    kind: MarkKind
    text: str
    generation: int | None = None


@dataclass(frozen=True)
class HistoryPoint:
    """The windows of one stretch of time."""

    time: Annotated[float, Meaning("time of the last window in it", unit=EPOCH)]
    measured: Annotated[float | None, Meaning("mean imbalance of its windows; null: no tokens")]
    contiguous: float | None
    generation: int
    run: str
    is_migrating: bool
    is_joined: Annotated[bool, Meaning("to the point before it; false: there is a gap")] = False
    windows: int = 1


class History:
    """Keeps the scores of windows of all runs. Its owner serialises calls."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, int], HistoryPoint] = {}
        self._minutes: dict[float, HistoryPoint] = {}  # start of the minute -> point
        self._marks: deque[HistoryMark] = deque(maxlen=KEPT_MARKS)

    def note(self, run: str, score: WindowScore) -> None:
        """Keep a complete window; the same window again replaces what was known of it."""
        if score.is_complete and score.time is not None:
            self._recent[run, score.index] = _point(run, score)

    def note_minutes(self, scores: Iterable[tuple[str, WindowScore]]) -> None:
        """Keep roll-ups of a minute with their runs, where no window of that minute is known."""
        known = {_minute(point.time) for point in self._recent.values()} | self._minutes.keys()
        for run, score in scores:
            assert score.time is not None, "a roll-up ends at a time"
            start = score.time - MINUTE_S
            if start not in known:
                known.add(start)
                self._minutes[start] = _point(run, score)

    def mark(self, mark: HistoryMark) -> None:
        """Keep something that happened."""
        self._marks.append(mark)

    def age(self, now: float) -> None:
        """Fold windows of more than an hour ago into minutes; remove what is over a day old."""
        old = [key for key, point in self._recent.items() if point.time < now - RECENT_S]
        young = self._recent.keys() - set(old)
        most = [key for key in self._recent if key in young]
        old += most[: max(0, len(most) - KEPT_RECENT)]
        folded: defaultdict[float, list[HistoryPoint]] = defaultdict(list)
        for key in old:
            point = self._recent.pop(key)
            folded[_minute(point.time)].append(point)
        for start, points in folded.items():
            known = self._minutes.get(start)
            self._minutes[start] = _joined([known, *points] if known else points)
        for start in [start for start in self._minutes if start < now - KEPT_S - MINUTE_S]:
            del self._minutes[start]

    def points(self, since: float, until: float, most: int) -> list[HistoryPoint]:
        """Give the points of a range, oldest first, at most about ``most`` of them."""
        every = [*self._minutes.values(), *self._recent.values()]
        found = sorted(
            (one for one in every if since <= one.time <= until), key=lambda one: one.time
        )
        if not found:
            return []
        bin_s = max((until - since) / most, 1e-3)
        # The usual time between two points; of one point, none is known.
        spacing_s = median([later.time - one.time for one, later in pairwise(found)] or [0.0])
        by_bin = groupby(found, key=lambda one: one.time // bin_s)
        shown = [_joined(points) for _, points in by_bin]
        gap_s = max(GAP_BINS * bin_s, GAP_SPACINGS * spacing_s)
        return shown[:1] + [
            replace(later, is_joined=later.time - one.time <= gap_s)
            for one, later in pairwise(shown)
        ]

    def marks(self, since: float, until: float) -> list[HistoryMark]:
        """Give what happened in a range, oldest first."""
        return [mark for mark in self._marks if since <= mark.time <= until]


def _minute(time: float) -> float:
    return time // MINUTE_S * MINUTE_S


def _point(run: str, score: WindowScore) -> HistoryPoint:
    assert score.time is not None, "what is kept has a time"
    return HistoryPoint(
        score.time, score.measured, score.contiguous, score.generation, run, score.is_migrating
    )


def _joined(points: Iterable[HistoryPoint]) -> HistoryPoint:
    """Join points to one; those without tokens have no part in its means."""
    every = list(points)
    figures = [
        (one.measured, one.contiguous, one.windows)
        for one in every
        if one.measured is not None and one.contiguous is not None
    ]
    measured, contiguous, weights = zip(*figures, strict=True) if figures else ((), (), ())
    return replace(
        max(every, key=lambda one: one.time),
        measured=fmean(measured, weights) if figures else None,
        contiguous=fmean(contiguous, weights) if figures else None,
        is_migrating=any(one.is_migrating for one in every),
        windows=sum(one.windows for one in every),
    )
