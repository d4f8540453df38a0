"""Triggers of a plan: interval, imbalance with hysteresis, change, membership, cool-down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb.core.cost import CostModel, Decision
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.decision.triggers import (
    Observed,
    Trigger,
    TriggerRules,
    TriggerState,
    breach,
    due,
    for_few_layers,
    stage_before,
)
from eplb.errors import ConfigError
from eplb.planner import Plan, plan

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


def seen(**values: list[float]) -> list[Observed]:
    """Calm windows but for one figure."""
    ((name, figures),) = values.items()
    return [replace(CALM, **{name: figure}) for figure in figures]


HIGH = replace(CALM, imbalance=1.6)


@pytest.mark.parametrize(
    ("rules", "windows", "expected"),
    [
        (TriggerRules(), [CALM, CALM], ["load", "load"]),
        (
            TriggerRules(interval_tokens=300),
            [CALM] * 7,
            [None, None, "interval", None, None, "interval", None],
        ),
        (
            TriggerRules(interval_s=60.0),
            seen(now=[1059.0, 500.0, 559.0, 560.0]),
            [None, None, None, "interval"],
        ),
        (
            TriggerRules(start_imbalance=1.5, rearm_imbalance=1.3),
            seen(imbalance=[1.4, 1.6, 1.6, 1.4, 1.6, 1.2, 1.6]),
            [None, "imbalance", None, None, None, None, "imbalance"],
        ),
        (
            TriggerRules(start_imbalance=1.5),
            [HIGH, HIGH, replace(HIGH, generation=4)],
            ["imbalance", None, "imbalance"],
        ),
        (TriggerRules(cool_down_s=30.0), seen(committed_at=[5000.0]), ["load"]),
    ],
    ids=[
        "without rules each window",
        "tokens count from the last plan",
        "a clock that was set back",
        "once until below the lower limit",
        "again after a commit",
        "a commit in the future does not cool down",
    ],
)
def test_windows_are_planned_on_by_the_rules(
    rules: TriggerRules, windows: list[Observed], expected: list[Trigger | None]
) -> None:
    assert fired(rules, windows) == expected


def test_cool_down_holds_back_load_but_neither_membership_nor_a_drain() -> None:
    rules = TriggerRules(cool_down_s=30.0)
    cooling = replace(CALM, committed_at=990.0)

    assert fired(rules, [cooling, replace(cooling, now=1020.0)]) == [None, "load"]
    state = replace(PLANNED, is_member_change=True)
    assert due(rules, state, cooling)[0] == "membership"
    assert due(rules, PLANNED, replace(cooling, is_draining=True))[0] == "drain"
    assert due(rules, PLANNED, replace(cooling, is_rebalanced=False))[0] == "load"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"interval_s": -1.0}, "interval_s is -1.0, expected at least 0"),
        ({"cool_down_s": float("nan")}, "cool_down_s is nan"),
        ({"start_imbalance": 1.2, "rearm_imbalance": 1.3}, "expected at most start_imbalance"),
    ],
)
def test_rules_that_cannot_be_met_are_refused(values: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TriggerRules(**values)  # type: ignore[arg-type]


RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
TOKENS = np.array([[60, 20, 10, 10], [70, 10, 10, 10], [25, 25, 25, 25], [55, 15, 15, 15]]) * 1000


@pytest.fixture
def whole() -> Plan:
    current = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]] * 4), num_experts=4)
    return plan(TOKENS, RANKS, current=current, cost=CostModel(pay_back_s=1e6))


def changed_layers(found: Plan) -> list[int]:
    """Return the layers whose slots change."""
    differs = found.base.slot_to_expert != found.target.slot_to_expert
    return np.flatnonzero(differs.any(axis=1)).tolist()


def test_few_layers_are_those_that_gain_most(whole: Plan) -> None:
    gain = whole.before_per_layer - whole.after_per_layer
    best = int(np.argmax(gain))
    assert len(changed_layers(whole)) == 3

    few = for_few_layers(whole, 1)

    assert changed_layers(few) == [best]
    assert few.target.generation == whole.target.generation
    assert few.decision is Decision.MOVE
    assert few.before - few.after == pytest.approx(gain[best] / 4)
    assert few.reason.endswith("; 1 of 3 layers, those that gain most")


def test_stages_go_back_one_step_and_end_at_observe() -> None:
    assert [stage_before(one) for one in ("all", "layers", "propose", "observe")] == [
        "layers",
        "propose",
        "observe",
        "observe",
    ]


def test_breach_names_what_was_measured_and_0_is_no_limit() -> None:
    assert "gave -0.300" in breach(-0.3, 0.2)
    assert breach(-0.1, 0.2) == breach(-0.3, 0.0) == ""
