"""Windows of load as the replay takes them: one after another, never all at once.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, Phase
from eplb.core.model import ModelShape
from eplb.errors import HistoryError
from telemetry.load.drift import LOOK_BACK

Tokens = NDArray[np.int64]  # [L, E] of one window


@dataclass(frozen=True)
class RecordedDeployment:
    """What a source tells about the deployment that it was recorded on; None: nothing."""

    model: ModelShape | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    window_s: float | None = None  # serving time of a window


@dataclass(frozen=True)
class WindowSeries:
    """A source of windows that can be read from the start again and again.

    Args:
        read: begins a new reading.
        num_windows: None where only reading tells.
        steps: forward passes of a window.
        phase: of all of them.
        skipped: windows of the source that are left out, because ranks are missing in them.
        deployment: that the source was recorded on.
        notes: what was left out, or counts as even load.
    """

    num_layers: int
    num_experts: int
    read: Callable[[], Iterator[Tokens]]
    num_windows: int | None = None
    steps: int = 1
    phase: Phase = "mixed"
    skipped: int = 0
    deployment: RecordedDeployment = RecordedDeployment()
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Tokens]:
        """Every window, checked.

        Raises:
            HistoryError: a window of another shape, or with negative counts.
        """
        for number, tokens in enumerate(self.read()):
            if tokens.shape != (self.num_layers, self.num_experts):
                raise HistoryError(
                    f"window {number} has shape {tokens.shape}, "
                    f"expected ({self.num_layers}, {self.num_experts})"
                )
            if tokens.min() < 0:
                raise HistoryError(
                    f"window {number} has {tokens.min()} tokens of an expert, expected 0 or more"
                )
            yield tokens


def of_history(history: LoadHistory) -> WindowSeries:
    """The windows of a history that every rank reported."""
    complete = [not missing for missing in history.missing_ranks]
    kept = int(np.count_nonzero(complete))
    return WindowSeries(
        history.num_layers,
        history.num_experts,
        lambda: (one for one, whole in zip(history.tokens, complete, strict=True) if whole),
        kept,
        max(1, round(float(np.median(history.steps_per_window)))),
        history.phase,
        len(complete) - kept,
    )


def mean_by_tokens(imbalance: NDArray[np.float64], tokens: NDArray[np.number]) -> float:
    """Mean of windows [T], each by its tokens, as its imbalance costs time; 1.0 without any."""
    return float(np.average(imbalance, weights=tokens)) if tokens.any() else 1.0


class LatestWindows:
    """The latest windows, as many as any plan looks at.

    Args:
        routed_per_step: tokens of a layer in a step, in place of those that the source has; a
            window has at least one step.
    """

    def __init__(
        self, most: int, source: WindowSeries, routed_per_step: float | None = None
    ) -> None:
        self._steps, self._phase = source.steps, source.phase
        self._routed_per_step = routed_per_step
        self._windows: deque[Tokens] = deque(maxlen=max(most, LOOK_BACK))
        self._history: LoadHistory | None = None

    def add(self, tokens: Tokens) -> None:
        """Take one more window; the oldest one leaves."""
        self._windows.append(tokens)
        self._history = None

    @property
    def history(self) -> LoadHistory:
        """The windows, oldest first; built once for all that plan after the same window."""
        if self._history is None:
            windows = np.stack(self._windows)
            steps = np.full(len(windows), self._steps)
            if self._routed_per_step is not None:
                routed = windows.sum(axis=2).mean(axis=1)
                steps = np.maximum(np.rint(routed / self._routed_per_step), 1).astype(np.int64)
            end = np.cumsum(steps)
            self._history = LoadHistory(windows, end - steps, end - 1, self._phase)
        return self._history
