"""Times of steps: which count as before a migration, and which as in it."""

from __future__ import annotations

from eplb.core.load import Phase as LoadPhase
from eplb.decision.pace import StepTimes
from rebalance.protocol.phases import Phase, PlanRef, RankPhase
from rebalance.rank.step_times import KEPT, StepTimer
from tests.support.simulated_time import Clock

IDLE = RankPhase(generation=0)


def at(phase: Phase, plan_id: int = 3) -> RankPhase:
    return RankPhase(generation=0, phase=phase, plan=PlanRef(plan_id, 1, 0, 2, 1))


class Steps:
    """Steps of given lengths."""

    def __init__(self) -> None:
        self._clock = Clock()
        self.timer = StepTimer(self._clock)

    def take(
        self, state: RankPhase, count: int = 1, *, ms: float, phase: LoadPhase = "decode"
    ) -> None:
        for _ in range(count):
            self.timer.at_step(state, phase)
            self._clock.now += ms / 1e3


def test_steps_that_stage_or_swap_are_apart_from_those_before() -> None:
    steps = Steps()
    steps.take(IDLE, 40, ms=10)
    steps.take(at(Phase.PRELOAD), 5, ms=500)
    steps.take(at(Phase.STAGE), 10, ms=20)
    steps.take(at(Phase.SWAP), 10, ms=30)
    steps.take(IDLE, 100, ms=70)

    # The last step of preload ended in a stage, and the last swap was made in a step.
    assert steps.timer.figures() == StepTimes(3, 40 - 1, 10.0, 10.0, 21, 30.0, 30.0)


def test_figures_of_a_migration_stay_until_the_next_one_stages() -> None:
    steps = Steps()
    steps.take(IDLE, 40, ms=10)
    steps.take(at(Phase.STAGE), 10, ms=20)
    steps.take(IDLE, 40, ms=11)
    steps.take(at(Phase.STAGE, plan_id=4), 2, ms=25)
    steps.take(IDLE, ms=1)

    assert steps.timer.figures() == StepTimes(4, 79 - 1, 10.0, 11.0, 3, 25.0, 25.0)


def test_only_steps_of_the_most_frequent_load_phase_are_compared() -> None:
    steps = Steps()
    for _ in range(40):
        steps.take(IDLE, ms=300, phase="prefill")
        steps.take(IDLE, ms=10)
    steps.take(at(Phase.STAGE), ms=400, phase="prefill")
    steps.take(at(Phase.STAGE), 10, ms=12)

    found = steps.timer.figures()

    assert (found.p95_before_ms, found.p95_moving_ms) == (10.0, 12.0)


def test_latest_steps_are_kept_and_older_ones_forgotten() -> None:
    steps = Steps()
    steps.take(IDLE, KEPT, ms=50)
    steps.take(IDLE, KEPT + 1, ms=10)
    steps.take(at(Phase.STAGE), 2, ms=10)

    found = steps.timer.figures()

    assert (found.steps_before, found.p95_before_ms) == (KEPT, 10.0)


def test_rank_without_a_migration_reports_no_steps() -> None:
    steps = Steps()
    steps.take(IDLE, 40, ms=10)

    assert steps.timer.figures() == StepTimes()


def test_report_has_the_median_of_steps_and_of_their_waits() -> None:
    steps = Steps()
    assert steps.timer.latest_ms() == {}
    for wait_s in (0.004, 0.002, 0.03):
        steps.take(IDLE, ms=20)
        steps.timer.waited(wait_s)
        steps.timer.waited(wait_s)
    steps.take(IDLE, ms=90)

    assert steps.timer.latest_ms() == {"step_ms": 20.0, "wait_ms": 8.0}
