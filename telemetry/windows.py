"""From the samples of single ranks to windows of the whole deployment.

Window w covers the steps w * window_steps up to, not including, (w + 1) * window_steps. A window
is complete when every rank's samples cover every one of its steps: planning on less would take a
silent rank for an idle one. Pure: no clock, no store.

Shapes:  L MoE layers, E experts, R ranks, T windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eplb.arrays import freeze, owned
from eplb.errors import HistoryError
from eplb.load import LoadHistory, LoadSample, Phase
from eplb.placement import EMPTY

DEFAULT_KEEP = 256  # windows; 58 layers x 256 experts x 32 ranks take 34 MB


@dataclass(frozen=True, eq=False)
class Window:
    """What all ranks received over the steps of one window, as far as their samples arrived."""

    run: str
    index: int
    first_step: int
    last_step: int  # inclusive
    phase: Phase  # "mixed" when the samples are of several
    generations: frozenset[int]  # placements that served during the window
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
    windows are held, so memory is bounded; a sample of an older window is counted in ``too_late``
    and is otherwise ignored.
    """

    def __init__(
        self, window_steps: int, num_ranks: int, num_experts: int, *, keep: int = DEFAULT_KEEP
    ) -> None:
        for name, value in (("window_steps", window_steps), ("keep", keep)):
            if value < 1:
                raise HistoryError(f"{name} is {value}, expected 1 or more")
        self.window_steps = window_steps
        self.num_ranks = num_ranks
        self.num_experts = num_experts
        self.keep = keep
        self.too_late = 0
        self._first: LoadSample | None = None
        self._filling: dict[int, _Filling] = {}

    def add(self, sample: LoadSample) -> bool:
        """Count a sample; return whether it changed a window.

        Raises:
            HistoryError: the sample is of another run or shape, names a rank or an expert that is
                not there, crosses a window boundary, or overlaps another sample of its rank.
        """
        where = f"sample {sample.sequence} of rank {sample.rank}"
        self._check(sample, where)
        index = sample.first_step // self.window_steps
        window = self._filling.get(index) or self._open(index, sample)
        if window is None:
            self.too_late += 1
            return False
        if sample.sequence in window.sequences.setdefault(sample.rank, set()):
            return False
        window.add(sample, where)
        return True

    def windows(self) -> list[Window]:
        """Return the windows that have at least one sample, oldest first."""
        return [self._filling[index].window() for index in sorted(self._filling)]

    def _open(self, index: int, sample: LoadSample) -> _Filling | None:
        if len(self._filling) >= self.keep:
            oldest = min(self._filling)
            if index < oldest:
                return None
            del self._filling[oldest]
        first_step = index * self.window_steps
        num_layers = len(sample.tokens)
        window = _Filling(
            sample.run,
            index,
            range(first_step, first_step + self.window_steps),
            tokens=np.zeros((num_layers, self.num_experts), dtype=np.int64),
            received=np.zeros((num_layers, self.num_ranks), dtype=np.int64),
        )
        self._filling[index] = window
        return window

    def _check(self, sample: LoadSample, where: str) -> None:
        first = self._first or sample
        belongs, expected = (sample.deployment, sample.run), (first.deployment, first.run)
        if belongs != expected:
            raise HistoryError(f"{where} is of deployment and run {belongs}, expected {expected}")
        if len(sample.tokens) != len(first.tokens):
            raise HistoryError(
                f"{where} has {len(sample.tokens)} layers, expected {len(first.tokens)}"
            )
        if not 0 <= sample.rank < self.num_ranks:
            raise HistoryError(f"{where}: expected rank 0..{self.num_ranks - 1}")
        index = sample.first_step // self.window_steps
        if sample.last_step // self.window_steps != index:
            raise HistoryError(
                f"{where} covers steps {sample.first_step}..{sample.last_step}, expected no step "
                f"past {(index + 1) * self.window_steps - 1}, the last of window {index}"
            )
        self._check_slots(sample, where)
        self._first = first

    def _check_slots(self, sample: LoadSample, where: str) -> None:
        held = sample.slot_to_expert
        wrong = np.argwhere((held < EMPTY) | (held >= self.num_experts))
        if wrong.size:
            layer, slot = wrong[0]
            raise HistoryError(
                f"{where}: layer {layer} slot {slot} holds expert {held[layer, slot]}, "
                f"expected 0..{self.num_experts - 1}, or {EMPTY} for an empty slot"
            )
        lost = np.argwhere((held == EMPTY) & (sample.tokens > 0))
        if lost.size:
            layer, slot = lost[0]
            raise HistoryError(
                f"{where}: layer {layer} slot {slot} received {sample.tokens[layer, slot]} tokens, "
                "expected none in an empty slot"
            )


@dataclass
class _Filling:
    """A window that may still get samples."""

    run: str
    index: int
    steps: range
    tokens: NDArray[np.int64]  # [L, E]
    received: NDArray[np.int64]  # [L, R]
    sequences: dict[int, set[int]] = field(default_factory=dict)  # rank -> sequences counted
    covered: dict[int, list[range]] = field(default_factory=dict)  # rank -> steps counted
    phases: set[Phase] = field(default_factory=set)
    generations: set[int] = field(default_factory=set)
    folded: Window | None = None  # what window() returned last, while it still holds

    def add(self, sample: LoadSample, where: str) -> None:
        covered = self.covered.setdefault(sample.rank, [])
        for steps in covered:
            if sample.first_step < steps.stop and steps.start <= sample.last_step:
                raise HistoryError(
                    f"{where} covers steps {sample.first_step}..{sample.last_step}, expected none "
                    f"of {steps.start}..{steps.stop - 1}, which another sample covers"
                )
        covered.append(range(sample.first_step, sample.last_step + 1))
        self.sequences[sample.rank].add(sample.sequence)
        self.phases.add(sample.phase)
        self.generations.add(sample.generation)
        layer, slot = np.nonzero(sample.slot_to_expert != EMPTY)
        expert = sample.slot_to_expert[layer, slot]
        np.add.at(self.tokens, (layer, expert), sample.tokens[layer, slot])
        self.received[:, sample.rank] += sample.tokens.sum(axis=1)
        self.folded = None

    def window(self) -> Window:
        if self.folded is None:
            self.folded = Window(
                self.run,
                self.index,
                self.steps.start,
                self.steps.stop - 1,
                _common_phase(self.phases),
                frozenset(self.generations),
                self._missing_ranks(),
                self.tokens,
                self.received,
            )
        return self.folded

    def _missing_ranks(self) -> frozenset[int]:
        _, num_ranks = self.received.shape
        # Samples of one rank never overlap, so their lengths add up to what they cover.
        covered = {rank: sum(map(len, steps)) for rank, steps in self.covered.items()}
        return frozenset(r for r in range(num_ranks) if covered.get(r, 0) < len(self.steps))


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

    Incomplete windows are left out; ``left_out`` says which and why.
    """
    complete = [window for window in windows if window.is_complete][-last:]
    if not complete:
        return None
    return LoadHistory(
        np.stack([window.tokens for window in complete]),
        np.array([window.first_step for window in complete]),
        np.array([window.last_step for window in complete]),
        _common_phase({window.phase for window in complete}),
    )


def left_out(windows: Sequence[Window]) -> list[str]:
    """One sentence for each window that ``history`` leaves out."""
    return [
        f"window {window.index} (steps {window.first_step}..{window.last_step}) is incomplete: "
        f"no samples of every step from ranks {', '.join(map(str, sorted(window.missing_ranks)))}"
        for window in windows
        if not window.is_complete
    ]


def _common_phase(phases: set[Phase]) -> Phase:
    return next(iter(phases)) if len(phases) == 1 else "mixed"
