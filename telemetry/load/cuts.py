"""The two ways in which samples are cut into windows: by the engine's steps, or by time of day."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from operator import itemgetter

from eplb.core.load import LoadSample
from eplb.errors import HistoryError
from telemetry.load.counts import Filling, named


class CutBySteps:
    """Cuts into ``window_steps`` steps each; of one folder, because it notes what samples cover.

    Window w covers the steps w * window_steps up to, not including, (w + 1) * window_steps. A rank
    is missing as long as its samples do not cover every one of them.
    """

    def __init__(self, window_steps: int) -> None:
        if window_steps < 1:
            raise HistoryError(f"window_steps is {window_steps}, expected 1 or more")
        self._width = window_steps
        # By window and rank: the steps of each sequence, and how many there are in all.
        self._steps: defaultdict[int, dict[int, dict[int, range]]] = defaultdict(dict)
        self._num_steps: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def index_of(self, sample: LoadSample) -> int:
        """Return the index of the window that has all steps of a sample.

        Raises:
            HistoryError: the sample crosses a boundary.
        """
        index = sample.first_step // self._width
        if sample.last_step // self._width != index:
            raise HistoryError(
                f"{named(sample)} covers steps {sample.first_step}..{sample.last_step}, expected "
                f"no step past {(index + 1) * self._width - 1}, the last of window {index}"
            )
        return index

    def cover(self, index: int, sample: LoadSample) -> bool:
        """Note the steps of a sample; False if that very sample was noted before.

        Raises:
            HistoryError: it overlaps another sample of its rank.
        """
        of_rank = self._steps[index].setdefault(sample.rank, {})
        if sample.sequence in of_rank:
            return False
        for steps in of_rank.values():
            if sample.first_step < steps.stop and steps.start <= sample.last_step:
                raise HistoryError(
                    f"{named(sample)} covers steps {sample.first_step}..{sample.last_step}, "
                    f"expected none of {steps.start}..{steps.stop - 1}, which another sample covers"
                )
        steps = of_rank[sample.sequence] = range(sample.first_step, sample.last_step + 1)
        # Samples of one rank never overlap, so their lengths add up to what they cover.
        lengths = self._num_steps[index]
        lengths[sample.rank] = lengths.get(sample.rank, 0) + len(steps)
        return True

    def forget_before(self, index: int) -> None:
        """Forget the steps of older windows."""
        for old in [window for window in self._steps if window < index]:
            del self._steps[old], self._num_steps[old]

    def steps_of(self, index: int, filling: Filling) -> tuple[int, int]:
        """Return the first and the last step of a window, inclusive, whatever its samples cover."""
        return index * self._width, (index + 1) * self._width - 1

    def missing_ranks(self, index: int, num_ranks: int) -> frozenset[int]:
        """Return the ranks whose samples do not cover every step."""
        lengths = self._num_steps[index]
        return frozenset(r for r in range(num_ranks) if lengths.get(r, 0) < self._width)


class CutByTime:
    """Cuts into ``window_seconds`` each, for ranks that sample by time; of one folder.

    Window w covers the seconds w * window_seconds up to, not including, (w + 1) * window_seconds. A
    sample belongs to the window in which it was taken, by its rank's clock. There are no steps to
    be covered, so sequences show what is missing: a rank's part of a window is complete when its
    samples follow one another without a gap, from the last before the window to the first past its
    end. A rank that sent nothing, and lost nothing, had nothing to count: it is not missing.
    """

    def __init__(self, window_seconds: float) -> None:
        if not window_seconds > 0:
            raise HistoryError(f"window_seconds is {window_seconds}, expected more than 0")
        self._width = window_seconds
        self._taken: dict[int, list[tuple[int, float]]] = {}  # rank -> (sequence, time), in order

    def index_of(self, sample: LoadSample) -> int:
        """Return the index of the window in which a sample was taken."""
        return int(sample.time // self._width)

    def cover(self, index: int, sample: LoadSample) -> bool:
        """Note when a sample was taken; False if that very sample was noted before."""
        taken = self._taken.setdefault(sample.rank, [])
        place = bisect_left(taken, (sample.sequence,))
        if place < len(taken) and taken[place][0] == sample.sequence:
            return False
        insort(taken, (sample.sequence, sample.time))
        return True

    def forget_before(self, index: int) -> None:
        """Forget when samples were taken, but for the last before the windows that are kept."""
        for taken in self._taken.values():
            del taken[: max(0, bisect_left(taken, index * self._width, key=_time) - 1)]

    def steps_of(self, index: int, filling: Filling) -> tuple[int, int]:
        """Return the first and the last step that the samples of a window cover."""
        return filling.first_step, filling.last_step

    def missing_ranks(self, index: int, num_ranks: int) -> frozenset[int]:
        """Return the ranks with a gap, and those that have sent nothing past the window's end."""
        start, end = index * self._width, (index + 1) * self._width
        return frozenset(r for r in range(num_ranks) if not self._is_whole(r, start, end))

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


_time = itemgetter(1)

Cut = CutBySteps | CutByTime
