"""From the samples of single ranks to windows of the whole deployment.

Window w covers the steps w * window_steps up to, not including, (w + 1) * window_steps. A window
is complete when every rank's samples cover every one of its steps: planning on less would take a
silent rank for an idle one. Pure: no clock, no store.

Shapes:  L MoE layers, E experts, R ranks, T windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.load import LoadHistory, LoadSample, Phase
from eplb.errors import HistoryError
from telemetry.windows.batch_intake import LATE, REPEATED, Taken, as_sequence, take_all, take_one
from telemetry.windows.filling import Filling
from telemetry.windows.fit import Fit, named

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


class WindowFolder:
    """Folds the samples of one run into windows of steps, in whatever order they arrive.

    A repeated sample counts once; a late one completes its old window. Only the latest ``keep``
    windows are held, so memory is bounded; a sample of an older window is counted in ``too_late``
    and is otherwise ignored.

    Args:
        num_layers: those of every sample; by default as many as the first sample has.
    """

    def __init__(
        self,
        window_steps: int,
        num_ranks: int,
        num_experts: int,
        *,
        keep: int = DEFAULT_KEEP,
        num_layers: int | None = None,
    ) -> None:
        for name, value in (("window_steps", window_steps), ("keep", keep)):
            if value < 1:
                raise HistoryError(f"{name} is {value}, expected 1 or more")
        self.window_steps = window_steps
        self.num_ranks = num_ranks
        self.num_experts = num_experts
        self.keep = keep
        self.too_late = 0
        self._fit = Fit(num_ranks, num_experts, num_layers)
        self._run = ""
        self._filling: dict[int, _StepWindow] = {}

    def add(self, sample: LoadSample) -> bool:
        """Count a sample; return whether it changed a window.

        Raises:
            HistoryError: the sample is of another run or shape, names a rank or an expert that is
                not there, has more tokens in a slot than can be added up, crosses a window
                boundary, or overlaps another sample of its rank.
        """
        return take_one(sample, self._fit, self._place)

    def add_all(self, samples: Iterable[LoadSample]) -> Taken:
        """Count samples like ``add``, much faster, and return the outcomes."""
        return take_all(as_sequence(samples), self._fit, self._place)

    def index_of(self, sample: LoadSample) -> int:
        """Return the index of the window in which a sample begins."""
        return sample.first_step // self.window_steps

    def newest(self) -> int | None:
        """Return the index of the newest window that is held, or None before the first."""
        return max(self._filling, default=None)

    def windows(self, phase: Phase | None = None) -> list[Window]:
        """Return the windows that have at least one sample, oldest first.

        Args:
            phase: count the samples of this phase alone, and leave windows out that have none. A
                rank is missing only where its samples of all phases leave a step out.
        """
        held = (self._filling[index] for index in sorted(self._filling))
        return [
            one.window(index=one.steps.start // self.window_steps, run=self._run, phase=phase)
            for one in held
            if phase is None or phase in one.filling.by_phase
        ]

    def _place(self, sample: LoadSample) -> Filling | Literal["late", "repeated"]:
        first_step, last_step = sample.first_step, sample.last_step
        index = first_step // self.window_steps
        if last_step // self.window_steps != index:
            raise HistoryError(
                f"{named(sample)} covers steps {first_step}..{last_step}, expected no step "
                f"past {(index + 1) * self.window_steps - 1}, the last of window {index}"
            )
        window = self._filling.get(index) or self._open(index, sample)
        if window is None:
            self.too_late += 1
            return LATE
        if window.filling.has(sample):
            return REPEATED
        window.cover(sample)
        return window.filling

    def _open(self, index: int, sample: LoadSample) -> _StepWindow | None:
        if len(self._filling) >= self.keep:
            oldest = min(self._filling)
            if index < oldest:
                return None
            del self._filling[oldest]
        self._run = sample.run
        first_step = index * self.window_steps
        steps = range(first_step, first_step + self.window_steps)
        window = self._filling[index] = _StepWindow(
            steps, Filling(self.num_ranks, self.num_experts)
        )
        return window


@dataclass
class _StepWindow:
    """A window that may still get samples, and the steps that they cover."""

    steps: range
    filling: Filling
    covered: dict[int, list[range]] = field(default_factory=dict)  # rank -> steps counted
    built: dict[Phase | None, Window] = field(default_factory=dict)  # while they still hold

    def cover(self, sample: LoadSample) -> None:
        covered = self.covered.setdefault(sample.rank, [])
        for steps in covered:
            if sample.first_step < steps.stop and steps.start <= sample.last_step:
                raise HistoryError(
                    f"{named(sample)} covers steps {sample.first_step}..{sample.last_step}, "
                    f"expected none of {steps.start}..{steps.stop - 1}, which another sample covers"
                )
        covered.append(range(sample.first_step, sample.last_step + 1))
        self.built.clear()

    def window(self, *, index: int, run: str, phase: Phase | None) -> Window:
        if phase not in self.built:
            counts = self.filling.total(phase)
            self.built[phase] = Window(
                run,
                index,
                self.steps.start,
                self.steps.stop - 1,
                phase or common_phase(set(self.filling.by_phase)),
                frozenset(self.filling.generations),
                self._missing_ranks(),
                counts.tokens,
                counts.received,
            )
        return self.built[phase]

    def _missing_ranks(self) -> frozenset[int]:
        # Samples of one rank never overlap, so their lengths add up to what they cover.
        covered = {rank: sum(map(len, steps)) for rank, steps in self.covered.items()}
        ranks = range(self.filling.num_ranks)
        return frozenset(rank for rank in ranks if covered.get(rank, 0) < len(self.steps))


def fold(
    samples: Iterable[LoadSample], *, window_steps: int, num_ranks: int, num_experts: int
) -> list[Window]:
    """Fold the samples of one run into windows, oldest first; see WindowFolder."""
    folder = WindowFolder(window_steps, num_ranks, num_experts)
    for sample in samples:
        folder.add(sample)
    return folder.windows()


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
