"""Cancellation of waits for another process.

The waiting thread is not the cancelling one, and it waits for another process's answer, which no
condition can signal. So it polls, between slices of its wait, whether to continue.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK_S = 0.25  # latency of a cancellation

IsWanted = Callable[[], bool]


class CalledOff(Exception):
    """The wait was cancelled. Not a failure of the source: no other source is tried."""


def always() -> bool:
    """Wait for the answer up to the deadline, whatever happens meanwhile."""
    return True
