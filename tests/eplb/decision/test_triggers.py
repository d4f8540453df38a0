"""Triggers of a plan: interval, imbalance with hysteresis, change, membership, cool-down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eplb.decision.triggers import Observed, Trigger, TriggerRules, TriggerState, due
from eplb.errors import ConfigError

CALM = Observed(
    now=1000.0,
    tokens=100,
    imbalance=1.1,
    generation=3,
    committed_at=0.0,
    is_rebalanced=True,
    is_changed=False,
)
PLANNED = TriggerState(planned_at=1000.0, generation=3)


def fired(rules: TriggerRules, seen: list[Observed]) -> list[Trigger | None]:
    """Return the trigger at each window, after a plan at the start."""
    state, found = PLANNED, []
    for one in seen:
        trigger, state = due(rules, state, one)
        found.append(trigger)
    return found


def test_without_rules_each_window_is_planned_on() -> None:
    assert fired(TriggerRules(), [CALM, CALM]) == ["load", "load"]


def test_first_plan_is_due_at_once() -> None:
    assert due(TriggerRules(interval_tokens=1000), TriggerState(), CALM)[0] == "first"


def test_interval_of_tokens_counts_from_the_last_plan() -> None:
    found = fired(TriggerRules(interval_tokens=300), [CALM] * 7)

    assert found == [None, None, "interval", None, None, "interval", None]


def test_interval_of_seconds_ignores_a_clock_that_was_set_back() -> None:
    seen = [replace(CALM, now=now) for now in (1059.0, 500.0, 559.0, 560.0)]

    assert fired(TriggerRules(interval_s=60.0), seen) == [None, None, None, "interval"]


def test_imbalance_triggers_once_until_it_fell_below_the_lower_limit() -> None:
    rules = TriggerRules(start_imbalance=1.5, rearm_imbalance=1.3)
    seen = [replace(CALM, imbalance=one) for one in (1.4, 1.6, 1.6, 1.4, 1.6, 1.2, 1.6)]

    assert fired(rules, seen) == [None, "imbalance", None, None, None, None, "imbalance"]


def test_imbalance_triggers_again_after_a_commit() -> None:
    rules = TriggerRules(start_imbalance=1.5)
    high = replace(CALM, imbalance=1.6)

    assert fired(rules, [high, high, replace(high, generation=4)]) == [
        "imbalance",
        None,
        "imbalance",
    ]


def test_cool_down_holds_back_load_but_not_membership() -> None:
    rules = TriggerRules(cool_down_s=30.0)
    cooling = replace(CALM, committed_at=990.0)

    assert fired(rules, [cooling, replace(cooling, now=1020.0)]) == [None, "load"]
    state = replace(PLANNED, is_member_change=True)
    assert due(rules, state, cooling)[0] == "membership"
    assert due(rules, PLANNED, replace(cooling, is_rebalanced=False))[0] == "load"


def test_commit_in_the_future_of_the_clock_does_not_cool_down() -> None:
    rules = TriggerRules(cool_down_s=30.0)

    assert fired(rules, [replace(CALM, committed_at=5000.0)]) == ["load"]


def test_alternating_load_makes_as_many_plans_as_the_interval_allows() -> None:
    rules = TriggerRules(start_imbalance=1.5, rearm_imbalance=1.2, cool_down_s=100.0)
    state, plans, committed_at, generation = PLANNED, 0, 0.0, 3
    for window in range(100):  # one a second; each commit is against the next window
        high = replace(
            CALM,
            now=1000.0 + window,
            imbalance=1.1 if window % 2 else 1.6,
            committed_at=committed_at,
            generation=generation,
        )
        trigger, state = due(rules, state, high)
        if trigger is not None:
            plans, committed_at, generation = plans + 1, high.now, generation + 1

    assert plans == 1


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"interval_s": -1.0}, "interval_s is -1.0, expected a number, 0 or more"),
        ({"cool_down_s": float("nan")}, "cool_down_s is nan"),
        ({"start_imbalance": 1.2, "rearm_imbalance": 1.3}, "expected at most start_imbalance"),
    ],
)
def test_rules_that_cannot_be_met_are_refused(values: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TriggerRules(**values)  # type: ignore[arg-type]
