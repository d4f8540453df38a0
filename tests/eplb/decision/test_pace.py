"""Pace of the next migration: quiet ones add, a breach halves, and the bounds hold."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.decision.pace import (
    ENOUGH_BEFORE,
    ENOUGH_MOVING,
    LEAST,
    STEP,
    PaceChange,
    StepTimes,
    Throttle,
    judged,
    paced,
)
from eplb.errors import ConfigError
from eplb.migration.build import Pace

OWN = Pace(staging_experts=16, transactions_per_commit=4)
FLIP = Pace(staging_experts=0, mode="flip", spare_slots=1, transactions_per_commit=2)
PARTS = st.floats(LEAST, 1.0)


def times(slowdown: float, plan_id: int = 7) -> StepTimes:
    """Return what a rank measures whose slow steps of 10 ms became slower."""
    return StepTimes(plan_id, 100, 8.0, 10.0, 20, 8.0, 10.0 * (1 + slowdown))


def after(part: float, *slowdowns: float, budget: float = 0.05) -> PaceChange:
    return judged(7, part, budget, [times(one) for one in slowdowns])


def test_breach_halves_and_names_what_was_found_and_expected() -> None:
    reason = "plan 7 made the p95 of step time +20.0%, expected +5.0% at most: part 1 -> 0.5"

    assert after(1.0, 0.2, 0.2) == PaceChange(7, 0.2, 0.05, 1.0, 0.5, reason)


def test_migration_within_the_budget_adds_one_step() -> None:
    found = after(0.5, 0.125, budget=0.125)

    assert found.part == 0.5 + STEP
    assert found.reason == (
        "plan 7 made the p95 of step time +12.5%, expected +12.5% or less: part 0.5 -> 0.625"
    )


@settings(deadline=None, derandomize=True)
@given(PARTS, st.lists(st.floats(-0.9, 10.0), max_size=5), st.floats(0.001, 1.0), st.booleans())
def test_bounds_hold_and_a_breach_never_adds(
    part: float, slowdowns: list[float], budget: float, is_late: bool
) -> None:
    ranks = [times(one) for one in slowdowns]

    found = judged(7, part, budget, ranks, is_late=is_late)
    slowdowns = [one.slowdown for one in ranks if one.slowdown is not None]

    assert LEAST <= found.part <= 1.0
    if is_late or (slowdowns and median(slowdowns) <= budget):
        assert found.part == min(part + STEP, 1.0)
    elif not slowdowns:
        assert found.part == part
    else:
        assert found.part == max(part / 2, LEAST)


@settings(deadline=None, derandomize=True)
@given(PARTS)
def test_breaches_reach_the_least_part_and_quiet_ones_the_whole(part: float) -> None:
    low = high = part
    for _ in range(8):
        low, high = after(low, 1.0).part, after(high, 0.0).part

    assert (low, high) == (LEAST, 1.0)


def test_one_rank_with_disturbed_steps_does_not_slow_the_others() -> None:
    assert after(0.5, 0.0, 0.9, 0.01).part == 0.5 + STEP


@pytest.mark.parametrize(
    "few",
    [
        replace(times(0.9), steps_moving=ENOUGH_MOVING - 1),
        replace(times(0.9), steps_before=ENOUGH_BEFORE - 1),
        replace(times(0.9), plan_id=6),
        StepTimes(),
    ],
)
def test_migration_without_enough_steps_changes_nothing(few: StepTimes) -> None:
    found = judged(7, 0.5, 0.05, [few])

    assert (found.part, found.slowdown) == (0.5, None)
    assert found.reason.startswith("plan 7 was not judged: no rank reports 8 steps in it and 32")


def test_migration_that_was_too_slow_to_end_is_not_made_slower() -> None:
    found = judged(7, LEAST, 0.05, [times(0.9)], is_late=True)

    assert found.part == LEAST + STEP
    assert found.reason == "plan 7 did not end in time: part 0.0625 -> 0.1875"


def test_half_the_pace_is_half_of_transactions_experts_and_links() -> None:
    half = replace(OWN, transactions_per_commit=2, experts_per_transaction=4, link_part=0.5)
    half_flip = replace(FLIP, transactions_per_commit=1, layers_per_transaction=29, link_part=0.5)

    assert paced(OWN, 0.5, 58) == half
    assert paced(FLIP, 0.5, 58) == half_flip
    assert paced(OWN, 1.0, 58) is OWN


@settings(deadline=None, derandomize=True)
@given(PARTS, st.sampled_from([OWN, FLIP, Pace(1, 1), replace(FLIP, layers_per_transaction=3)]))
def test_any_part_of_a_pace_is_a_pace(part: float, own: Pace) -> None:
    found = paced(own, part, 2)

    assert 1 <= found.transactions_per_commit <= own.transactions_per_commit
    assert 0 < found.link_part <= own.link_part
    assert found.staging_experts == own.staging_experts


COPY = Pace(staging_experts=16, link_part=0.5)
FLIP_ALONE = Pace(staging_experts=0, mode="flip", spare_slots=1)


@pytest.mark.parametrize(
    ("throttle", "pace", "changed"),
    [
        (Throttle(), COPY, {}),
        (Throttle(experts_per_transaction=2), COPY, {"experts_per_transaction": 2}),
        (Throttle(experts_per_transaction=8), COPY, {}),  # half of the ring: the default
        (Throttle(experts_per_transaction=9), COPY, {}),
        (Throttle(experts_per_transaction=6), Pace(experts_per_transaction=4), {}),
        (Throttle(link_part=0.25), COPY, {"link_part": 0.25}),
        (Throttle(link_part=1.0), COPY, {}),
        (Throttle(layers_per_transaction=1), FLIP_ALONE, {"layers_per_transaction": 1}),
        (Throttle(layers_per_transaction=4), Pace(layers_per_transaction=2), {}),
        (Throttle(layers_per_transaction=1), COPY, {"layers_per_transaction": 1}),
    ],
)
def test_throttle_makes_a_pace_slower_and_never_faster(
    throttle: Throttle, pace: Pace, changed: dict[str, float]
) -> None:
    assert vars(throttle.of(pace)) == vars(pace) | changed


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"experts_per_transaction": 0}, "experts_per_transaction is 0, expected 1 or more"),
        ({"layers_per_transaction": -1}, "layers_per_transaction is -1, expected 1 or more"),
        ({"link_part": 0.0}, "link_part is 0.0, expected more than 0 and at most 1"),
        ({"link_part": 1.5}, "link_part is 1.5, expected more than 0 and at most 1"),
    ],
)
def test_throttle_out_of_range_is_refused(figures: dict[str, float], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Throttle(**figures)  # type: ignore[arg-type]


def test_experts_of_a_transaction_are_no_limit_of_flip_mode() -> None:
    with pytest.raises(ConfigError, match="in flip mode, expected layers_per_transaction"):
        Throttle(experts_per_transaction=2).of(FLIP_ALONE)
