"""A deadline is a moment of the clock that it was made with."""

from __future__ import annotations

from eplb.clock import Deadline
from tests.support.simulated_time import Clock


def test_deadline_passes_at_its_moment_and_not_before() -> None:
    clock = Clock(5.0)
    deadline = Deadline.after(2.0, clock)

    assert (deadline.left_s, deadline.has_passed) == (2.0, False)
    clock.now = 6.5
    assert (deadline.left_s, deadline.has_passed) == (0.5, False)
    clock.now = 7.0
    assert (deadline.left_s, deadline.has_passed) == (0.0, True)
    clock.now = 9.0
    assert (deadline.left_s, deadline.has_passed) == (0.0, True)
