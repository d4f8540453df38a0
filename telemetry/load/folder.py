"""From the samples of single ranks to windows of the whole deployment.

A cut says which samples a window has, and which ranks it still lacks: ``CutBySteps``, for ranks
that sample every so many steps, or ``CutByTime``. A window is complete when no rank is missing:
planning on less would take a silent rank for an idle one. Pure: no clock, no store.

Windows of ranks that serve both phases keep decode apart from all else (``apart``): prefill routes
many more tokens than decode, so their sum would show prefill alone.

Ranks are other processes, with clocks and faults of their own. Whatever they write, the folder
continues: each sample ends in one outcome, and what cannot be counted as load is counted by reason.

Shapes:  L MoE layers, E experts, R ranks, T windows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.load import LoadHistory, LoadSample, Phase
from eplb.errors import HistoryError
from telemetry.load.counts import Outcome, Outcomes, RunShape, WindowSums, count_all, named


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

    def steps_of(self, index: int, filling: WindowSums) -> tuple[int, int]:
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

    def steps_of(self, index: int, filling: WindowSums) -> tuple[int, int]:
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


DEFAULT_KEEP = 256  # windows; 58 layers x 256 experts x 32 ranks take 34 MB
MAX_AHEAD_S = 60.0  # how far a rank's clock may be ahead of the reader's


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens of all ranks over the steps of one window, as far as their samples arrived."""

    run: str
    index: int
    first_step: int
    last_step: int  # inclusive
    phase: Phase  # "mixed" when the samples are of several
    generations: frozenset[int]  # that served; of a half-swapped migration, its base
    missing_ranks: frozenset[int]  # ranks whose samples do not cover every step
    tokens: NDArray[np.int64]  # [L, E] received by each expert, over all its replicas
    received: NDArray[np.int64]  # [L, R] received by each rank: the measured rank load

    def __post_init__(self) -> None:
        freeze(self, tokens=owned(self.tokens, np.int64), received=owned(self.received, np.int64))

    @property
    def is_complete(self) -> bool:
        """Whether every rank's samples cover every step."""
        return not self.missing_ranks


class WindowFolder:
    """Folds the samples of one run into windows, in whatever order they arrive.

    A repeated sample counts once; a late one completes its old window. Only the latest ``keep``
    windows are held, so memory is bounded; a sample of an older window is late.

    Args:
        cut: of this folder alone.
        shape: of every sample that counts.
    """

    def __init__(self, cut: Cut, shape: RunShape, *, keep: int = DEFAULT_KEEP) -> None:
        if keep < 1:
            raise HistoryError(f"keep is {keep}, expected 1 or more")
        self.shape, self.keep = shape, keep
        self.outcomes = Outcomes()  # of all samples so far
        self._cut = cut
        self._open: dict[int, WindowSums] = {}
        self._built: dict[int, dict[Phase | None, Window]] = {}  # while they still hold
        self.newest: int | None = None  # index of the newest window
        self._ahead: set[int] = set()  # ranks whose latest steps were far ahead
        self._serves_since: dict[int, tuple[int, int]] = {}  # rank -> generation, its first step
        self._highest = -1  # generation of any rank

    def add_all(self, samples: Sequence[LoadSample], now: float | None = None) -> list[LoadSample]:
        """Count samples; return those that are accepted, each of which changed a window.

        Args:
            now: the reader's clock, in seconds since the epoch. With it, samples are excluded whose
                clock or steps are far ahead, and those of a rank that missed a swap. None: whatever
                fits the run is counted.
        """
        return count_all(samples, self.shape, partial(self._place, now), self.outcomes)

    def index_of(self, sample: LoadSample) -> int:
        """Return the index of the window that has a sample.

        Raises:
            HistoryError: the sample crosses a boundary.
        """
        return self._cut.index_of(sample)

    def windows(self, phase: Phase | None = None) -> list[Window]:
        """Return the windows that have at least one sample, oldest first.

        Args:
            phase: count the samples of this phase alone, and leave windows out that have none. A
                rank is missing only where its samples of all phases leave something out.
        """
        return [
            self._window(index, phase)
            for index in sorted(self._open)
            if phase is None or phase in self._open[index].by_phase
        ]

    def _window(self, index: int, phase: Phase | None) -> Window:
        missing_ranks = self._cut.missing_ranks(index, self.shape.num_ranks) - self.shape.dead
        built = self._built[index].get(phase)
        if built is None or built.missing_ranks != missing_ranks:
            filling = self._open[index]
            built = self._built[index][phase] = Window(
                self.shape.run,
                index,
                *self._cut.steps_of(index, filling),
                phase or common_phase(set(filling.by_phase)),
                frozenset(filling.generations),
                missing_ranks,
                *filling.total(phase),
            )
        return built

    def _place(self, now: float | None, sample: LoadSample) -> WindowSums | Outcome:
        """Find the window of a sample; ``telemetry.load.counts.Place``."""
        if now is not None and sample.time > now + MAX_AHEAD_S:
            self.outcomes.reasons["future"] = (
                f"{named(sample)} was taken at {sample.time:.3f}, {sample.time - now:.3f} s ahead, "
                f"expected {MAX_AHEAD_S:g} s at most"
            )
            return "future"
        index = self._cut.index_of(sample)
        if now is not None and self._is_far_ahead(sample, index):
            return "future"
        if now is not None and self._is_outdated(sample):
            return "stale"
        if index not in self._open and not self._begin(index):
            return "late"
        if not self._cut.cover(index, sample):
            return "repeated"
        self._built[index].clear()
        return self._open[index]

    def _begin(self, index: int) -> bool:
        """Open a window, in place of the oldest if there is no room; False if it would be older."""
        if len(self._open) >= self.keep:
            oldest = min(self._open)
            if index < oldest:
                return False
            del self._open[oldest], self._built[oldest]
            self._cut.forget_before(min(self._open, default=index))
        self._open[index], self._built[index] = WindowSums(self.shape), {}
        self.newest = index if self.newest is None else max(index, self.newest)
        return True

    def _is_far_ahead(self, sample: LoadSample, index: int) -> bool:
        """Reject steps far ahead, which would push every window out, until most ranks are there."""
        if self.newest is None or index <= self.newest + self.keep:
            self._ahead.discard(sample.rank)
            return False
        self._ahead.add(sample.rank)
        if 2 * len(self._ahead) > self.shape.num_ranks:
            return False
        self.outcomes.reasons["future"] = (
            f"{named(sample)} is of window {index}, expected none past "
            f"{self.newest + self.keep} while most ranks are at {self.newest}"
        )
        return True

    def _is_outdated(self, sample: LoadSample) -> bool:
        """Detect a rank that missed a swap: all ranks swap at the same step."""
        generation, first_step = self._serves_since.get(sample.rank, (-1, 0))
        if sample.generation > generation:
            self._serves_since[sample.rank] = (sample.generation, sample.first_step)
        elif sample.generation == generation and sample.first_step < first_step:
            self._serves_since[sample.rank] = (generation, sample.first_step)
        if sample.generation >= self._highest:
            self._highest = sample.generation
            return False
        others = [since for rank, since in self._serves_since.items() if rank != sample.rank]
        newer = [g for g, step in others if g > sample.generation and step <= sample.first_step]
        if 2 * len(newer) < self.shape.num_ranks:
            return False
        self.outcomes.reasons["stale"] = (
            f"{named(sample)} is of generation {sample.generation} at step {sample.first_step}, "
            f"expected {min(newer)} or later, which most ranks served by then"
        )
        return True


def history(windows: Sequence[Window], *, last: int) -> LoadHistory | None:
    """The ``last`` latest complete windows as a history, or None when there is none.

    Incomplete windows are left out.
    """
    complete = [window for window in windows if window.is_complete][-last:]
    if not complete:
        return None
    return _history_of(complete)


def common_phase(phases: set[Phase]) -> Phase:
    """Return the one phase of samples, or "mixed" when there are several."""
    return next(iter(phases)) if len(phases) == 1 else "mixed"


class Apart(NamedTuple):
    """The windows of a run by phase, each oldest first."""

    others: list[Window]  # prefill, and what the engine does not tell apart
    decode: list[Window]


def apart(folder: WindowFolder, windows: Sequence[Window]) -> Apart:
    """Divide windows of all phases, as ``folder.windows()`` returns them."""
    decode = {window.index: window for window in folder.windows("decode")}
    undivided = {window.index for window in folder.windows("mixed")}
    found = Apart([], [])
    for window in windows:
        part = decode.get(window.index)
        if part is None:
            found.others.append(window)
            continue
        found.decode.append(part)
        if window.phase != "decode":
            phase: Phase = "mixed" if window.index in undivided else "prefill"
            rest = window.tokens - part.tokens
            found.others.append(replace(window, tokens=rest, phase=phase))
    return found


def weighted(windows: Apart, decode_weight: float) -> LoadHistory | None:
    """Return both phases as one history; None without a window.

    Args:
        windows: complete ones.
        decode_weight: part of the history's windows that are of decode, above 0 and below 1, as
            nearly as whole windows allow. Where one phase is missing the other has all.
    """
    others, decode = windows
    if not others or not decode:
        return history(others or decode, last=len(others or decode))
    ratio = decode_weight / (1 - decode_weight)
    num_others, num_decode = len(others), len(decode)
    if num_decode >= num_others * ratio:
        num_decode = max(1, round(num_others * ratio))
    else:
        num_others = max(1, round(num_decode / ratio))
    pieces = _summed(others, num_others) + _summed(decode, num_decode)
    pieces.sort(key=lambda piece: piece.last_step)
    return _history_of(pieces, tuple(piece.phase for piece in pieces))


def _history_of(windows: Sequence[Window], phases: tuple[Phase, ...] = ()) -> LoadHistory:
    return LoadHistory(
        np.stack([window.tokens for window in windows]),
        np.array([window.first_step for window in windows]),
        np.array([window.last_step for window in windows]),
        common_phase({window.phase for window in windows}),
        phases=phases,
    )


def _summed(windows: Sequence[Window], number: int) -> list[Window]:
    """That many windows, each the sum of neighbours, all of one phase."""
    phase = common_phase({window.phase for window in windows})
    runs = np.array_split(np.arange(len(windows)), number)
    return [
        replace(
            windows[run[-1]],
            first_step=windows[run[0]].first_step,
            phase=phase,
            tokens=np.sum([windows[place].tokens for place in run], axis=0),
        )
        for run in runs
    ]
