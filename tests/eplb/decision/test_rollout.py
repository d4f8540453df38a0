"""Stages of a rollout: a few layers of a plan, and the step back."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.cost import CostModel, Decision
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.decision.triggers import breach, for_few_layers, stage_before
from eplb.planner import Plan, plan

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


def test_plan_of_few_layers_is_left_as_it_is(whole: Plan) -> None:
    assert for_few_layers(whole, 3) is whole


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
