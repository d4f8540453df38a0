"""Waits of generators that must not block: what to wait for before the next step.

A wait is over at the earliest of three events: one of its completions has arrived, its time has
come, or the shared state changed. Resuming too early is harmless: the generator checks, and waits
again. So its driver may schedule the steps in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eplb.clock import Clock
from rebalance.protocol.phases import Phase, RankPhase
from runtime.streams import Completion

WAIT_S = 1.0  # a lost wake-up costs this long, not for ever
FIRST_POLL_S, LONGEST_POLL_S = 20e-6, 1e-3


@dataclass(frozen=True)
class Wait:
    """A wait of a generator: for a completion or a deadline."""

    what: str  # for messages
    until: float  # time of the generator's clock: look again then at the latest
    completions: tuple[Completion, ...] = ()  # any of them ends the wait

    def is_over(self, now: float) -> bool:
        """Return whether the deadline has passed or a completion has arrived."""
        return now >= self.until or any(done.is_complete() for done in self.completions)


class SharedPhase:
    """The phase machine's state, shared by the threads of one rank.

    Args:
        state: the initial one.
        on_change: called with (before, after) for every change, under the lock.
    """

    def __init__(
        self, state: RankPhase, on_change: Callable[[RankPhase, RankPhase], None] | None = None
    ) -> None:
        self.changed = threading.Condition()
        self.is_closing = False  # the rank halts: what was not swapped yet never will be
        self.version = 0  # grows with each change
        self._state, self._on_change = state, on_change

    @property
    def state(self) -> RankPhase:
        """Where the rank stands."""
        return self._state

    @state.setter
    def state(self, after: RankPhase) -> None:
        before, self._state = self._state, after
        self.version += 1
        if self._on_change is not None and after is not before:
            self._on_change(before, after)

    def is_live(self, plan_id: int) -> bool:
        """Return whether a verdict on a plan may still come."""
        state = self._state
        is_current = state.plan is not None and state.plan.plan_id == plan_id
        return is_current and state.phase is not Phase.ABORTED and not self.is_closing

    def is_wanted(self, plan_id: int) -> bool:
        """Return whether work on a plan is still wanted."""
        return self.is_live(plan_id) and not self._state.abort_reason

    def close(self) -> None:
        """End every wait: no step follows that could change the state."""
        with self.changed:
            self.is_closing = True
            self.wake()

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self.changed:
            self.version += 1
            self.changed.notify_all()

    def update(self, transition: Callable[..., RankPhase], *news: object) -> RankPhase:
        """Apply a transition of ``rebalance.protocol.phases`` and wake all waiting threads."""
        with self.changed:
            self.state = transition(self.state, *news)
            self.changed.notify_all()
            return self.state


def drive(work: Iterator[Wait], shared: SharedPhase, clock: Clock) -> None:
    """Run a generator to its end on this thread, resting where it waits."""
    while True:
        seen = shared.version  # before it checks: later changes must end the wait
        wait = next(work, None)
        if wait is None:
            return
        _rest(wait, shared, seen, clock)


def _rest(wait: Wait, shared: SharedPhase, seen: int, clock: Clock) -> None:
    # A device's event sends no notification: it is polled, ever less often, lest polling takes the
    # interpreter from the step.
    poll_s = FIRST_POLL_S if wait.completions else WAIT_S
    while not wait.is_over(now := clock()):
        with shared.changed:
            if shared.version != seen:
                return
            shared.changed.wait(min(poll_s, wait.until - now))
        if wait.completions:
            poll_s = min(2 * poll_s, LONGEST_POLL_S)
