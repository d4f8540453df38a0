"""Whether a rank's threads get on, and if not, what each is at and since when.

An asynchronous balancer was once dead for hours while its engine's health check said all was well
(vLLM issue 57883). Here every thread that matters says what it does. A thread at rest is in order
for ever; one that is at work and says nothing new grows old, and its age and words are in every
report of the rank:

    progress_age_s = 31.2    progress_of = "mover: pulling layer 3 expert 17 from rank 2"

The step is always at work: while a rank serves, one follows the other.

A migration is held up by a thread of some rank, and that rank sees it best. So a rank that merely
waits for the others does not grow impatient with them, with one exception: a rank that never takes
up a plan has nothing to be stuck in, and the others ask for the plan to be dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rebalance.protocol.phases import Phase, RankPhase


@dataclass(frozen=True)
class Standing:
    """What a thread is at, and for how long it has said nothing new."""

    thread: str
    doing: str
    age_s: float  # 0 for a thread at rest

    def __str__(self) -> str:
        return f"{self.thread}: {self.doing}"


class Heartbeat:
    """What one thread does. It writes, any other thread reads."""

    def __init__(self, thread: str, clock: Callable[[], float] = time.monotonic) -> None:
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
    """The heartbeats of one rank, and what follows from them.

    Args:
        plan_deadline_s: how long a migration may stand still before it is to be dropped.
    """

    def __init__(self, plan_deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s, self.clock = plan_deadline_s, clock
        self.step = Heartbeat("step", clock)
        self.watcher = Heartbeat("watcher", clock)
        self.mover = Heartbeat("mover", clock)
        self.commit_writer = Heartbeat("commit writer", clock)
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
