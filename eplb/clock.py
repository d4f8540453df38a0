"""Time as an argument: what tells it, and how much is left until a deadline.

Nothing in this package reads a clock of its own; a caller passes ``time.monotonic``, or a clock
that a test moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isinf

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


UNITS = (  # seconds, and the name; the largest that a time reaches is shown
    (31_557_600.0, "years"),
    (86_400.0, "days"),
    (3600.0, "h"),
    (60.0, "min"),
    (1.0, "s"),
    (1e-3, "ms"),
    (1e-6, "us"),
)


def figure_text(number: float) -> str:
    """Return a number, 0 or more, for people: three figures and never an exponent."""
    return f"{number:.3g}" if 1e-4 <= number < 999.5 or not number else f"{number:,.0f}"


def duration_text(seconds: float) -> str:
    """Return a time for people, with three figures and never an exponent: 2.87 s, 4 min."""
    if isinf(seconds):
        return "without end"
    size = abs(seconds)
    unit_s, name = next((unit for unit in UNITS if size >= unit[0]), (1.0, "s"))
    figure = size / unit_s if size >= UNITS[-1][0] else 0.0
    sign = "-" if seconds < 0 and figure > 0 else ""
    return f"{sign}{figure_text(figure)} {name}"
