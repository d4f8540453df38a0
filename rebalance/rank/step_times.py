"""Times of a rank's steps: in a migration that it stages or swaps, and before it.

The time of a step is that from one call of ``step`` to the next, so a swap counts with the forward
pass that follows it. A step of a prefill is longer than one of decode: only steps of one load phase
are compared, that of most steps in the migration.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
from numpy.typing import NDArray

from eplb.clock import Clock
from eplb.core.load import Phase as LoadPhase
from eplb.decision.pace import StepTimes
from rebalance.protocol.phases import Phase, RankPhase
from telemetry.state.runs import STEP_MS, WAIT_MS

KEPT = 512  # of the latest steps of each kind
LOAD_PHASES: tuple[LoadPhase, ...] = get_args(LoadPhase)


class _Latest:
    """The latest times; one thread adds, any thread reads."""

    def __init__(self) -> None:
        self._seconds, self.count = np.zeros(KEPT), 0

    def add(self, seconds: float) -> None:
        self._seconds[self.count % KEPT] = seconds
        self.count += 1

    def copy(self) -> NDArray[np.float64]:
        return self._seconds[: min(self.count, KEPT)].copy()


class _Around:
    """Times around one migration."""

    def __init__(self, plan_id: int, before: dict[LoadPhase, NDArray[np.float64]]) -> None:
        self.plan_id, self.before = plan_id, before
        self.moving = {phase: _Latest() for phase in LOAD_PHASES}


class StepTimer:
    """Measures steps; ``at_step`` is called by the step's thread, ``figures`` by any.

    Args:
        clock: of seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle = {phase: _Latest() for phase in LOAD_PHASES}
        self._around = _Around(0, {})
        self._last: tuple[float, LoadPhase, RankPhase] | None = None  # start of the present step
        self._steps, self._waits, self._waited_s = _Latest(), _Latest(), 0.0

    def waited(self, seconds: float) -> None:
        """Note that the present step waited for other ranks."""
        self._waited_s += seconds

    def at_step(self, state: RankPhase, load_phase: LoadPhase) -> None:
        """Note that a step begins, and of which kind its predecessor was.

        Args:
            state: of the rank's migration, before this step reads a verdict.
            load_phase: of the step that begins.
        """
        now, last = self._clock(), self._last
        self._last = now, load_phase, state
        if last is None:
            return
        begun, load_phase, before = last
        self._steps.add(now - begun)
        self._waits.add(self._waited_s)
        self._waited_s = 0.0
        # A migration may begin or end within a step.
        moving = next((one for one in (before, state) if _moves(one)), None)
        if moving is not None and moving.plan is not None:
            self._of(moving.plan.plan_id).moving[load_phase].add(now - begun)
        elif before.phase is Phase.IDLE is state.phase:
            self._idle[load_phase].add(now - begun)

    def _of(self, plan_id: int) -> _Around:
        if self._around.plan_id != plan_id:
            before = {phase: idle.copy() for phase, idle in self._idle.items()}
            self._around = _Around(plan_id, before)
        return self._around

    def latest_ms(self) -> dict[str, float]:
        """Return the median of the latest steps, and of their waits, as details of a report."""
        medians = (_percentiles_ms(one.copy())[0] for one in (self._steps, self._waits))
        return dict(zip((STEP_MS, WAIT_MS), medians, strict=True)) if self._steps.count else {}

    def figures(self) -> StepTimes:
        """Return the times around the latest migration."""
        around = self._around
        phase = max(LOAD_PHASES, key=lambda phase: around.moving[phase].count)
        moving, before = around.moving[phase].copy(), around.before.get(phase, np.zeros(0))
        return StepTimes(
            around.plan_id,
            len(before),
            *_percentiles_ms(before),
            len(moving),
            *_percentiles_ms(moving),
        )


def _moves(state: RankPhase) -> bool:
    return state.phase in (Phase.STAGE, Phase.SWAP)


def _percentiles_ms(seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Median and 95th percentile; np.percentile takes ten times as long, at each report."""
    if not len(seconds):
        return 0.0, 0.0
    ordered, last = np.sort(seconds) * 1e3, len(seconds) - 1
    p50, p95 = (round(float(ordered[round(last * part)]), 4) for part in (0.5, 0.95))
    return p50, p95
