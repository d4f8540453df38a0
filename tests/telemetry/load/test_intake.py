"""Every sample ends in one counted outcome, and no sample ends the reader."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.core.load import LoadSample
from telemetry.load.counts import Outcome, RunShape
from telemetry.load.folder import Cut, CutBySteps, CutByTime, WindowFolder
from tests.support.stores import make_sample as make_any_sample

NOW = 1000.0
SHAPE = RunShape("demo", "run-1", num_ranks=4, num_experts=2, num_layers=1)


def make_sample(rank: int, window: int, **changes: Any) -> LoadSample:
    steps = {"first_step": window * 10, "last_step": window * 10 + 9}
    fields = steps | {"time": NOW, "tokens": [[3, 4]]}
    return make_any_sample(rank, window, **(fields | changes))


class Intake(WindowFolder):
    """A folder for samples that arrive at NOW."""

    def __init__(self, cut: Cut | None = None, keep: int = 8) -> None:
        super().__init__(cut or CutBySteps(10), SHAPE, keep=keep)

    def take(self, samples: list[LoadSample]) -> dict[Outcome, int]:
        """Number of these samples by outcome."""
        before = self.outcomes.counts.copy()
        self.add_all(samples, NOW)
        return self.outcomes.counts - before


def every_rank(window: int, **changes: Any) -> list[LoadSample]:
    return [make_sample(rank, window, **changes) for rank in range(4)]


def nonzero(intake: Intake) -> dict[str, int]:
    return {name: number for name, number in intake.outcomes.counts.items() if number}


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"run": "run-2"}, "('demo', 'run-2')"),
    ({"slot_to_expert": [[0, 1]] * 2, "tokens": [[1, 1]] * 2}, "2 layers"),
    ({"rank": 4}, "rank 0..3"),
    ({"rank": -1}, "rank 0..3"),
    ({"slot_to_expert": [[0, -2]]}, "expert -2"),
    ({"tokens": [[2**63 - 1, 0]]}, "9223372036854775807 tokens"),
    ({"time": float("nan")}, "at nan"),
    ({"time": -float("inf")}, "at -inf"),
]


@pytest.mark.parametrize(("changes", "reason"), MALFORMED)
def test_malformed_sample_is_counted_and_the_others_are_folded(
    changes: dict[str, Any], reason: str
) -> None:
    intake = Intake()
    rank = changes.get("rank", 0)
    bad = make_sample(rank, 0, **{name: value for name, value in changes.items() if name != "rank"})

    intake.take([bad, *every_rank(0)])

    assert nonzero(intake) == {"accepted": 4, "malformed": 1}
    assert reason in intake.outcomes.reasons["malformed"]


def test_sample_that_overlaps_another_is_malformed() -> None:
    intake = Intake()

    intake.take([*every_rank(0), make_sample(0, 0, sequence=9, first_step=5)])

    assert nonzero(intake) == {"accepted": 4, "malformed": 1}


def test_clock_far_ahead_is_reported_and_one_slightly_ahead_is_not() -> None:
    intake = Intake()

    intake.take([make_sample(0, 0, time=NOW + 60.0), make_sample(1, 0, time=NOW + 61.0)])

    assert nonzero(intake) == {"accepted": 1, "future": 1}
    assert "61.000 s ahead, expected 60 s" in intake.outcomes.reasons["future"]


def test_wild_steps_of_one_rank_push_no_window_out() -> None:
    intake = Intake(keep=8)
    intake.take(every_rank(0))

    wild = [make_sample(3, window) for window in range(10**6, 10**6 + 20)]
    intake.take([*wild, make_sample(0, 1)])

    assert nonzero(intake) == {"accepted": 5, "future": 20}
    assert "window 1000019, expected none past 8" in intake.outcomes.reasons["future"]


def test_once_most_ranks_are_far_ahead_their_windows_count() -> None:
    intake = Intake(keep=8)
    intake.take(every_rank(0))

    intake.take(every_rank(500))
    assert nonzero(intake) == {"accepted": 6, "future": 2}

    intake.take(every_rank(501))
    assert nonzero(intake) == {"accepted": 10, "future": 2}


def test_sample_of_a_window_that_is_held_no_more_is_late() -> None:
    intake = Intake(keep=2)

    intake.take([make_sample(0, window) for window in (0, 1, 2)])
    intake.take([make_sample(1, 0)])

    assert nonzero(intake) == {"accepted": 3, "late": 1}


def test_rank_that_missed_a_swap_is_stale() -> None:
    intake = Intake()
    intake.take(every_rank(0))
    intake.take([make_sample(rank, 1, generation=2) for rank in (0, 1, 2)])

    intake.take([make_sample(3, 1), make_sample(3, 2)])

    assert nonzero(intake) == {"accepted": 7, "stale": 2}
    assert "generation 1 at step 20, expected 2" in intake.outcomes.reasons["stale"]

    intake.take([make_sample(3, 3, generation=2)])
    assert intake.outcomes.counts["accepted"] == 8


def test_rank_with_a_wrong_generation_does_not_make_others_stale() -> None:
    intake = Intake()
    intake.take([make_sample(0, 0, generation=2**60)])

    intake.take([sample for window in (0, 1) for sample in every_rank(window)])

    assert intake.outcomes.counts["stale"] == 0


def test_windows_of_seconds_use_the_same_intake() -> None:
    intake = Intake(CutByTime(5.0))

    intake.take([*every_rank(0), make_sample(0, 1, time=1e300)])

    assert nonzero(intake) == {"accepted": 4, "future": 1}
    assert [window.index for window in intake.windows()] == [200]
