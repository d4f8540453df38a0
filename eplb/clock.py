"""Time as an argument: what tells it, and how much is left until a deadline.

Nothing in this package reads a clock of its own; a caller passes ``time.monotonic``, or a clock
that a test moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]  # seconds; they only grow, unless they are said to be of the day


@dataclass(frozen=True)
class Deadline:
    """A moment of a clock."""

    at: float
    clock: Clock

    @staticmethod
    def after(seconds: float, clock: Clock) -> Deadline:
        """Return the deadline that is so many seconds from now."""
        return Deadline(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self.at - self.clock())

    @property
    def has_passed(self) -> bool:
        """Whether that moment is reached."""
        return self.clock() >= self.at
