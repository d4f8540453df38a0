"""Which curve a plan uses: the user's, that of the ranks, or the constant; and its points."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.core.cost import GROUPED_GEMM_H200
from eplb.decision.expert_times import LEAST_LAST, POINTS, ExpertTimes, chosen_curve
from eplb.decision.score import ridge
from eplb.errors import ConfigError


def times(us: list[float], rows: tuple[int, ...] = (1, 64, 1024)) -> ExpertTimes:
    return ExpertTimes(list(rows), us, "a GPU, GroupedExperts", 0.3)


def test_curve_of_the_user_wins_over_what_ranks_measured() -> None:
    own = ((1.0, 5.0), (512.0, 40.0))

    found = chosen_curve(own, [times([1.0, 2.0, 3.0])])

    assert (found.curve, found.source) == (own, "given by the configuration")


def test_curve_of_the_ranks_is_their_median_at_each_point() -> None:
    disturbed = times([90.0, 90.0, 90.0])

    found = chosen_curve(
        GROUPED_GEMM_H200, [times([10.0, 12.0, 80.0]), disturbed, times([11.0, 13.0, 82.0])]
    )

    assert found.curve == ((1.0, 11.0), (64.0, 13.0), (1024.0, 82.0))
    assert found.source == "measured at the start by 3 ranks: a GPU, GroupedExperts"


def test_times_that_fall_by_chance_become_one_level() -> None:
    found = chosen_curve(GROUPED_GEMM_H200, [times([12.0, 10.0, 80.0])])

    assert found.curve == ((1.0, 11.0), (64.0, 11.0), (1024.0, 80.0))


def test_points_that_some_rank_left_out_are_not_in_the_curve() -> None:
    short = times([10.0, 80.0], (1, 1024))

    found = chosen_curve(GROUPED_GEMM_H200, [times([10.0, 12.0, 80.0]), short])

    assert found.curve == ((1.0, 10.0), (1024.0, 80.0))


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        ([], "no rank measured its experts"),
        ([times([9.0, 9.5], (1, 64))], f"up to 64 rows, expected two points and {LEAST_LAST} rows"),
        ([times([9.0], (1024,))], "up to 1024 rows, expected two points"),
        ([times([9.0], (1,)), times([9.0], (4,))], "nothing that all ranks measured"),
    ],
)
def test_ranks_without_a_usable_curve_leave_the_constant(
    measured: list[ExpertTimes], why: str
) -> None:
    found = chosen_curve(GROUPED_GEMM_H200, measured)

    assert found.curve == GROUPED_GEMM_H200
    assert found.source.startswith("the constant, of DeepSeek-V3's experts in FP8 on an H200: ")
    assert why in found.source


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": [64, 1, 1024]},
        {"rows": [0, 64, 1024]},
        {"rows": [1, 64]},
        {"us": [1.0, 2.0, float("inf")]},
        {"us": [0.0, 2.0, 3.0]},
    ],
)
def test_times_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"rows": [1, 64, 1024], "us": [1.0, 2.0, 3.0]}
    with pytest.raises(ConfigError, match=r"times of experts: rows .* expected as many times"):
        ExpertTimes(**given | wrong, of="a GPU", seconds=0.1)


def test_each_run_of_points_up_to_a_deadline_has_the_coarse_ones() -> None:
    assert set(POINTS[:4]) == {1, 16, 256, 4096}
    assert len(set(POINTS)) == len(POINTS)


def test_ridge_is_where_reading_takes_as_long_as_products() -> None:
    assert ridge(((1.0, 10.0), (100.0, 10.0), (200.0, 20.0))) == pytest.approx(100.0)
    assert 100 < ridge(GROUPED_GEMM_H200) < 130
    assert ridge(((1.0, 10.0), (200.0, 10.0))) == 200.0  # flat up to its end: 200 at least
