"""Imbalance by wall-clock time over a day, whether or not anyone looks.

The windows of the last hour are kept as they are, older ones as means of a minute. What was before
this process began comes from the samples that the store still has, and from its roll-ups of a
minute. A roll-up is scored by the sums of its minute, so its noise is less than that of windows.

A range is cut into bins. A point is joined to the one before it unless nothing was heard for
longer than the windows take, so that a gap is drawn as a gap; a new run alone breaks no line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Literal, NamedTuple

from api.monitor.state import EPOCH, WindowScore
from eplb.declared import Meaning

MINUTE_S = 60.0
KEPT_S = 24 * 3600.0
RECENT_S = 3600.0
KEPT_RECENT = 16_384  # windows: 0.25 s each for an hour
KEPT_MARKS = 2000
GAP_BINS, GAP_SPACINGS = 2.5, 3.0  # without a point for longer than both: a gap

MarkKind = Literal["restart", "death", "MOVE", "RESPLIT", "HELD", "ROLLBACK", "pause", "resume"]


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
    is_joined: Annotated[bool, Meaning("to the point before it; false: there is a gap")]
    windows: int


class _Piece(NamedTuple):
    """A window, or the sum of those of a minute."""

    time: float
    measured: float  # sums over the windows with tokens
    contiguous: float
    counted: int  # windows with tokens
    windows: int
    generation: int
    run: str
    is_migrating: bool

    def plus(self, other: _Piece) -> _Piece:
        later = max(self, other, key=lambda piece: piece.time)
        return _Piece(
            later.time,
            self.measured + other.measured,
            self.contiguous + other.contiguous,
            self.counted + other.counted,
            self.windows + other.windows,
            later.generation,
            later.run,
            self.is_migrating or other.is_migrating,
        )


class History:
    """Keeps the scores of windows of all runs. Its owner serialises calls."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, int], _Piece] = {}
        self._minutes: dict[float, _Piece] = {}  # by start
        self._marks: deque[HistoryMark] = deque(maxlen=KEPT_MARKS)

    def note(self, run: str, score: WindowScore) -> None:
        """Keep a complete window; the same window again replaces what was known of it."""
        if score.is_complete and score.time is not None:
            self._recent[run, score.index] = _piece(run, score.time, score)

    def note_minutes(self, scores: Iterable[tuple[str, WindowScore]]) -> None:
        """Keep roll-ups of a minute with their runs, where no window of that minute is known."""
        known = {_minute(piece.time) for piece in self._recent.values()} | self._minutes.keys()
        for run, score in scores:
            assert score.time is not None, "a roll-up ends at a time"
            start = score.time - MINUTE_S
            if start not in known:
                known.add(start)
                self._minutes[start] = _piece(run, score.time, score)

    def mark(self, mark: HistoryMark) -> None:
        """Keep something that happened."""
        self._marks.append(mark)

    def age(self, now: float) -> None:
        """Fold windows of more than an hour ago into minutes, and forget what is over a day old."""
        old = [key for key, piece in self._recent.items() if piece.time < now - RECENT_S]
        old += list(self._recent)[: max(0, len(self._recent) - len(old) - KEPT_RECENT)]
        for key in dict.fromkeys(old):
            piece = self._recent.pop(key)
            start = _minute(piece.time)
            known = self._minutes.get(start)
            self._minutes[start] = piece if known is None else known.plus(piece)
        for start in [start for start in self._minutes if start < now - KEPT_S - MINUTE_S]:
            del self._minutes[start]

    def points(self, since: float, until: float, most: int) -> list[HistoryPoint]:
        """Give the points of a range, oldest first, at most about ``most`` of them."""
        every = [*self._minutes.values(), *self._recent.values()]
        pieces = sorted(piece for piece in every if since <= piece.time <= until)
        if not pieces:
            return []
        bin_s = max((until - since) / most, 1e-3)
        spacing_s = _spacing(pieces)
        binned: dict[float, _Piece] = {}
        for piece in pieces:
            at = piece.time // bin_s
            binned[at] = binned[at].plus(piece) if at in binned else piece
        return list(_joined(binned.values(), max(GAP_BINS * bin_s, GAP_SPACINGS * spacing_s)))

    def marks(self, since: float, until: float) -> list[HistoryMark]:
        """Give what happened in a range, oldest first."""
        return [mark for mark in self._marks if since <= mark.time <= until]


def _minute(time: float) -> float:
    return time // MINUTE_S * MINUTE_S


def _piece(run: str, time: float, score: WindowScore) -> _Piece:
    measured, contiguous = score.measured, score.contiguous
    counted = measured is not None and contiguous is not None
    return _Piece(
        time,
        measured or 0.0,
        contiguous or 0.0,
        int(counted),
        1,
        score.generation,
        run,
        score.is_migrating,
    )


def _spacing(pieces: list[_Piece]) -> float:
    """The usual time between two pieces; of one piece, none is known."""
    gaps = [later.time - earlier.time for earlier, later in pairwise(pieces)]
    return median(gaps) if gaps else 0.0


def _joined(pieces: Iterable[_Piece], gap_s: float) -> Iterator[HistoryPoint]:
    before: float | None = None
    for piece in pieces:
        yield HistoryPoint(
            time=piece.time,
            measured=piece.measured / piece.counted if piece.counted else None,
            contiguous=piece.contiguous / piece.counted if piece.counted else None,
            generation=piece.generation,
            run=piece.run,
            is_migrating=piece.is_migrating,
            is_joined=before is not None and piece.time - before <= gap_s,
            windows=piece.windows,
        )
        before = piece.time
