"""Windows of seconds: a rank's sequences tell whether its part of a window is whole."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.core.load import LoadSample
from eplb.errors import HistoryError
from telemetry.load.counts import RunShape
from telemetry.load.folder import CutByTime, WindowFolder
from tests.support.stores import make_sample as make_any_sample


def make_sample(rank: int, sequence: int, time: float) -> LoadSample:
    steps = {"first_step": sequence * 10, "last_step": sequence * 10 + 9}
    return make_any_sample(rank, sequence, time=time, tokens=[[1, sequence]], **steps)


SHAPE = RunShape("demo", "run-1", num_ranks=2, num_experts=2, num_layers=1)


def folder_of(*samples: LoadSample, **changes: Any) -> WindowFolder:
    folder = WindowFolder(CutByTime(5.0), SHAPE, **changes)
    folder.add_all(samples)
    return folder


def missing(folder: WindowFolder) -> dict[int, set[int]]:
    return {window.index: set(window.missing_ranks) for window in folder.windows()}


def both(sequence: int, time: float) -> list[LoadSample]:
    return [make_sample(rank, sequence, time) for rank in (0, 1)]


def test_samples_count_in_the_window_in_which_they_were_taken() -> None:
    folder = folder_of(*both(0, 1.0), *both(1, 4.9), *both(2, 5.0))

    first, second = folder.windows()
    assert (first.index, first.tokens.tolist(), first.received.tolist()) == (0, [[4, 2]], [[3, 3]])
    assert (second.index, second.tokens.tolist()) == (1, [[2, 4]])
    assert (first.first_step, first.last_step) == (0, 19)


def test_window_is_complete_once_every_rank_is_past_its_end() -> None:
    folder = folder_of(*both(0, 1.0), make_sample(0, 1, 6.0))
    assert missing(folder) == {0: {1}, 1: {0, 1}}

    folder.add_all([make_sample(1, 1, 6.5)])

    assert missing(folder) == {0: set(), 1: {0, 1}}


def test_lost_sample_leaves_both_windows_that_it_may_be_of_incomplete() -> None:
    folder = folder_of(*both(0, 1.0), *both(1, 6.0), make_sample(1, 2, 8.0), *both(3, 11.0))
    folder.add_all(both(4, 16.0))

    assert missing(folder) == {0: set(), 1: {0}, 2: {0}, 3: {0, 1}}

    folder.add_all([make_sample(0, 2, 9.0)])
    assert missing(folder) == {0: set(), 1: set(), 2: set(), 3: {0, 1}}


def test_rank_without_tokens_does_not_count_as_missing() -> None:
    folder = folder_of(
        *both(0, 1.0), make_sample(0, 1, 6.0), make_sample(0, 2, 11.0), make_sample(1, 1, 12.0)
    )

    assert missing(folder)[1] == set()
    assert folder.windows()[1].received.tolist() == [[2, 0]]


def test_sequences_before_the_first_known_sample_are_missing() -> None:
    folder = folder_of(*both(7, 1.0), *both(8, 6.0), *both(9, 11.0))

    assert missing(folder) == {0: {0, 1}, 1: set(), 2: {0, 1}}


def test_repeated_and_late_samples_change_nothing() -> None:
    folder = folder_of(*both(0, 1.0), *both(1, 6.0), *both(2, 11.0), keep=2)

    assert folder.add_all([make_sample(0, 1, 6.0)]) == []
    assert folder.add_all([make_sample(0, 0, 1.0)]) == []
    assert folder.add_all([make_sample(1, 1, 6.0), make_sample(1, 0, 1.0)]) == []

    counts = folder.outcomes.counts
    assert (counts["repeated"], counts["late"]) == (2, 2)
    assert folder.windows()[0] is folder.windows()[0]
    assert [window.index for window in folder.windows()] == [1, 2]
    assert folder.windows()[0].is_complete


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -float("inf")])
def test_time_that_is_none_is_refused(time: float) -> None:
    folder = folder_of(make_sample(0, 0, time))

    assert folder.windows() == []
    assert "sample 0 of rank 0" in folder.outcomes.reasons["malformed"]


@pytest.mark.parametrize(
    ("seconds", "keep", "expected"), [(0.0, 2, "more than 0"), (5.0, 0, "1 or more")]
)
def test_window_of_no_length_is_refused(seconds: float, keep: int, expected: str) -> None:
    with pytest.raises(HistoryError, match=expected):
        WindowFolder(CutByTime(seconds), SHAPE, keep=keep)
