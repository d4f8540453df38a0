"""A clock that a test moves, and copies that land when it has come far enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from runtime.streams import Completion


@dataclass
class Clock:
    """Seconds that pass when the test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SkippingClock:
    """The real monotonic clock, which a test may set forward: no deadline passes but by a skip.

    Give components deadlines that are far off, so that a busy machine cannot reach them.
    """

    skipped: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped

    def skip(self, seconds: float) -> None:
        """Let so many seconds pass at once."""
        self.skipped += seconds


class Landing(Completion):
    """Bytes that land at a time of the clock."""

    def __init__(self, clock: Clock, due: float, write: Callable[[], object]) -> None:
        super().__init__(is_cuda=False)
        self.due, self._clock, self._write = due, clock, write
        self.has_landed = False

    def is_complete(self) -> bool:
        if not self.has_landed and self._clock() >= self.due:
            self.has_landed = True
            self._write()
        return self.has_landed
