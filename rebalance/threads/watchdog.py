"""Progress of a rank's threads: what each one does, and since when.

An asynchronous balancer was once dead for hours while its engine's health check passed (vLLM issue
57883). Here every thread that matters reports what it does. An idle thread has age 0. A busy one
without a new report ages. The oldest activity and its age are in every report of the rank:

    progress_age_s = 31.2    progress_of = "mover: pulling layer 3 expert 17 from rank 2"

The step is always busy: while a rank serves, one follows the other.

A stalled thread of some rank blocks a migration, and that rank detects it first. So a rank that
only waits for the others does not request an abort, with one exception: a rank that never adopts a
plan detects nothing, so the others request the abort.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from eplb.clock import Clock
from rebalance.protocol.phases import Phase, RankPhase
from telemetry.state.runs import STEP_THREAD


@dataclass(frozen=True)
class Standing:
    """What a thread does, and the time since its last report."""

    thread: str
    doing: str
    age_s: float  # 0 for an idle thread

    def __str__(self) -> str:
        return f"{self.thread}: {self.doing}"


class ThreadActivity:
    """Activity of one thread, which writes it; any other thread reads it."""

    def __init__(self, thread: str, clock: Clock = time.monotonic) -> None:
        self._thread, self._clock = thread, clock
        # Replaced whole: a reader never sees the words of one beat with the time of another.
        self._beat: tuple[str, float | None] = ("at rest", None)

    def busy(self, doing: str) -> None:
        """Begin something that must end; each call is progress."""
        self._beat = (doing, self._clock())

    def idle(self, doing: str = "at rest") -> None:
        """Begin to wait for something that need never come."""
        self._beat = (doing, None)

    def standing(self) -> Standing:
        """Return what the thread is at, and since when."""
        doing, since = self._beat
        age_s = 0.0 if since is None else max(0.0, self._clock() - since)
        return Standing(self._thread, doing, age_s)


class Watchdog:
    """The heartbeats of one rank, and the aborts that follow from them.

    Args:
        plan_deadline_s: a migration without progress for so long is aborted.
    """

    def __init__(self, plan_deadline_s: float, clock: Clock = time.monotonic) -> None:
        self._deadline_s, self.clock = plan_deadline_s, clock
        self.step = ThreadActivity(STEP_THREAD, clock)
        self.watcher = ThreadActivity("watcher", clock)
        self.mover = ThreadActivity("mover", clock)
        self.commit_writer = ThreadActivity("commit writer", clock)
        self._not_adopted: tuple[int, float] | None = None  # plan, and when that was first seen

    def oldest(self) -> Standing:
        """Return the thread that has made no progress for longest."""
        beats = (self.step, self.watcher, self.mover, self.commit_writer)
        return max((beat.standing() for beat in beats), key=lambda standing: standing.age_s)

    @property
    def is_watcher_stuck(self) -> bool:
        """Return whether the thread that reports this rank has stood still."""
        return self.watcher.standing().age_s > self._deadline_s

    def objection(self, state: RankPhase) -> str:
        """Return why the plan of this rank must be dropped; "" while it makes progress."""
        if state.plan is None or state.phase is Phase.ABORTED:
            self._not_adopted = None
            return ""
        standing = self.mover.standing()
        if standing.age_s > self._deadline_s:
            return f"{standing} for {standing.age_s:.1f} s, expected at most {self._deadline_s:g} s"
        if not state.is_adopted and self._waits_too_long(state.plan.plan_id):
            return (
                f"plan {state.plan.plan_id} was not adopted by every rank within "
                f"{self._deadline_s:g} s"
            )
        return ""

    def _waits_too_long(self, plan_id: int) -> bool:
        now = self.clock()
        if self._not_adopted is None or self._not_adopted[0] != plan_id:
            self._not_adopted = (plan_id, now)
        return now - self._not_adopted[1] > self._deadline_s
