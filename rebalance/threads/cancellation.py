"""Waiting for somebody else only as long as the answer is wanted.

Whoever waits is on another thread than whoever calls it off, and waits for a foreign process's
answer, which no condition can join. So it looks, between slices of its wait, whether to go on.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK_S = 0.25  # how late it may notice that nobody wants the answer any more

IsWanted = Callable[[], bool]


class CalledOff(Exception):
    """Nobody wants the answer any more. No refusal of anybody's: no other source is to be tried."""


def always() -> bool:
    """Wait for the answer up to the deadline, whatever happens meanwhile."""
    return True
