"""From the samples of single ranks to windows of the whole deployment.

A cut says which samples a window has, and which ranks it still lacks: ``CutBySteps``, for ranks
that sample every so many steps, or ``CutByTime``. A window is complete when no rank is missing:
planning on less would take a silent rank for an idle one. Pure: no clock, no store.

Ranks are other processes, with clocks and faults of their own. Whatever they write, the folder
continues: each sample ends in one outcome, and what cannot be counted as load is counted by reason.

Shapes:  L MoE layers, E experts, R ranks, T windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.load import LoadHistory, LoadSample, Phase
from eplb.errors import HistoryError
from telemetry.load.counts import Filling, Outcome, Outcomes, RunShape, count_all, named
from telemetry.load.cuts import Cut

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
        self._open: dict[int, Filling] = {}
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
        missing_ranks = self._cut.missing_ranks(index, self.shape.num_ranks)
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

    def _place(self, now: float | None, sample: LoadSample) -> Filling | Outcome:
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
        self._open[index], self._built[index] = Filling(self.shape), {}
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
    return LoadHistory(
        np.stack([window.tokens for window in complete]),
        np.array([window.first_step for window in complete]),
        np.array([window.last_step for window in complete]),
        common_phase({window.phase for window in complete}),
    )


def common_phase(phases: set[Phase]) -> Phase:
    """Return the one phase of samples, or "mixed" when there are several."""
    return next(iter(phases)) if len(phases) == 1 else "mixed"
