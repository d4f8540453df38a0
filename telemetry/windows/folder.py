"""From the samples of single ranks to windows of the whole deployment.

A cut says which samples a window has, and which ranks it still lacks: ``CutBySteps``, for ranks
that sample every so many steps, or ``CutByTime``. A window is complete when no rank is missing:
planning on less would take a silent rank for an idle one. Pure: no clock, no store.

Shapes:  L MoE layers, E experts, R ranks, T windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.load import LoadHistory, LoadSample, Phase
from eplb.errors import HistoryError
from telemetry.windows.batch_intake import LATE, REPEATED, Taken, as_sequence, take_all, take_one
from telemetry.windows.filling import Filling
from telemetry.windows.fit import Fit

DEFAULT_KEEP = 256  # windows; 58 layers x 256 experts x 32 ranks take 34 MB


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


class Cut(Protocol):
    """Cuts the samples of one run into windows; of one folder, because it notes what they cover."""

    def index_of(self, sample: LoadSample) -> int:
        """Return the index of the window in which a sample begins."""

    def index_of_all(self, sample: LoadSample) -> int:
        """Return the index of the window that has all of a sample.

        Raises:
            HistoryError: the sample crosses a boundary.
        """

    def cover(self, index: int, sample: LoadSample) -> bool:
        """Note a sample of a window; False if that very sample was noted before.

        Raises:
            HistoryError: it overlaps another sample of its rank.
        """

    def forget_before(self, index: int) -> None:
        """Forget what was noted for windows before this one."""

    def steps_of(self, index: int, filling: Filling) -> tuple[int, int]:
        """Return the first and the last step of a window."""

    def missing_ranks(self, index: int, num_ranks: int) -> frozenset[int]:
        """Return the ranks whose part of a window is not complete."""


class WindowFolder:
    """Folds the samples of one run into windows, in whatever order they arrive.

    A repeated sample counts once; a late one completes its old window. Only the latest ``keep``
    windows are held, so memory is bounded; a sample of an older window is counted in ``too_late``
    and is otherwise ignored.

    Args:
        cut: of this folder alone.
        num_layers: those of every sample; by default as many as the first sample has.
    """

    def __init__(
        self,
        cut: Cut,
        num_ranks: int,
        num_experts: int,
        *,
        keep: int = DEFAULT_KEEP,
        num_layers: int | None = None,
    ) -> None:
        if keep < 1:
            raise HistoryError(f"keep is {keep}, expected 1 or more")
        self._cut = cut
        self.num_ranks = num_ranks
        self.num_experts = num_experts
        self.keep = keep
        self.too_late = 0
        self._fit = Fit(num_ranks, num_experts, num_layers)
        self._run = ""
        self._open: dict[int, _OpenWindow] = {}

    def add(self, sample: LoadSample) -> bool:
        """Count a sample; return whether it changed a window.

        Raises:
            HistoryError: the sample is of another run or shape, names a rank or an expert that is
                not there, has more tokens in a slot than can be added up, or the cut refuses it.
        """
        return take_one(sample, self._fit, self._place)

    def add_all(self, samples: Iterable[LoadSample]) -> Taken:
        """Count samples like ``add``, much faster, and return the outcomes."""
        return take_all(as_sequence(samples), self._fit, self._place)

    def index_of(self, sample: LoadSample) -> int:
        """Return the index of the window in which a sample begins.

        Raises:
            HistoryError: its time is no finite number, where windows are of time.
        """
        return self._cut.index_of(sample)

    def newest(self) -> int | None:
        """Return the index of the newest window that is held, or None before the first."""
        return max(self._open, default=None)

    def windows(self, phase: Phase | None = None) -> list[Window]:
        """Return the windows that have at least one sample, oldest first.

        Args:
            phase: count the samples of this phase alone, and leave windows out that have none. A
                rank is missing only where its samples of all phases leave something out.
        """
        return [
            self._window(index, phase)
            for index in sorted(self._open)
            if phase is None or phase in self._open[index].filling.by_phase
        ]

    def _window(self, index: int, phase: Phase | None) -> Window:
        one, missing_ranks = self._open[index], self._cut.missing_ranks(index, self.num_ranks)
        built = one.built.get(phase)
        if built is None or built.missing_ranks != missing_ranks:
            filling, counts = one.filling, one.filling.total(phase)
            built = one.built[phase] = Window(
                self._run,
                index,
                *self._cut.steps_of(index, filling),
                phase or common_phase(set(filling.by_phase)),
                frozenset(filling.generations),
                missing_ranks,
                counts.tokens,
                counts.received,
            )
        return built

    def _place(self, sample: LoadSample) -> Filling | Literal["late", "repeated"]:
        index = self._cut.index_of_all(sample)
        window = self._open.get(index) or self._begin(index, sample)
        if window is None:
            self.too_late += 1
            return LATE
        if not self._cut.cover(index, sample):
            return REPEATED
        window.built.clear()
        return window.filling

    def _begin(self, index: int, sample: LoadSample) -> _OpenWindow | None:
        if len(self._open) >= self.keep:
            oldest = min(self._open)
            if index < oldest:
                return None
            del self._open[oldest]
            self._cut.forget_before(min(self._open, default=index))
        self._run = sample.run
        window = self._open[index] = _OpenWindow(Filling(self.num_ranks, self.num_experts))
        return window


@dataclass
class _OpenWindow:
    """A window that may still get samples."""

    filling: Filling
    built: dict[Phase | None, Window] = field(default_factory=dict)  # while they still hold


def history(windows: Sequence[Window], *, last: int) -> LoadHistory | None:
    """The ``last`` latest complete windows as a history, or None when there is none.

    Incomplete windows are left out; ``excluded`` lists them with the reasons.
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


def excluded(windows: Sequence[Window]) -> list[str]:
    """One sentence for each window that ``history`` leaves out."""
    return [
        f"window {window.index} (steps {window.first_step}..{window.last_step}) is incomplete: "
        f"no samples of every step from ranks {', '.join(map(str, sorted(window.missing_ranks)))}"
        for window in windows
        if not window.is_complete
    ]


def common_phase(phases: set[Phase]) -> Phase:
    """Return the one phase of samples, or "mixed" when there are several."""
    return next(iter(phases)) if len(phases) == 1 else "mixed"
