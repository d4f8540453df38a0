"""Staged rollout by the controller: observe, propose, a few layers, all, and a step back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.decision.alternatives import ENOUGH
from eplb.decision.triggers import Stage
from rebalance.controller.loop import Controller
from telemetry.state.live import LiveState, Value
from tests.support.controlled_deployment import Clock, Deployment, events
from tests.support.stores import MemoryStore

MODEL = ModelShape((0, 1, 2), 4, 2, hidden=16, intermediate=8)
START = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]] * 3), num_experts=4)
# The second layer gains most, and the last one nothing.
SKEWED = [[45_000, 25_000, 15_000, 15_000], [60_000, 20_000, 10_000, 10_000], [25_000] * 4]
# Even where each expert is on its first rank; uneven once expert 0 has a replica on rank 1.
AGAINST_REPLICAS = [[50_000, 0, 25_000, 25_000]] * 3


@pytest.fixture
def deployment(clock: Clock) -> Deployment:
    store = MemoryStore("test", clock=clock)
    store.commit(START, expected=None, reason="start")
    return Deployment(store, model=MODEL, clock=clock)


def controller_at(deployment: Deployment, stage: Stage, **changes: Any) -> Controller:
    """Return a controller of a deployment that was started at a stage."""
    return deployment.controller(stage=stage, stage_layers=1, **changes)


def changed_layers(before: Placement, after: Placement) -> list[int]:
    differs = before.slot_to_expert != after.slot_to_expert
    return np.flatnonzero(differs.any(axis=1)).tolist()


def test_rollout_goes_from_observing_to_all_layers(deployment: Deployment) -> None:
    store, controller = deployment.store, controller_at(deployment, "observe")
    deployment.decide_on(controller, SKEWED)
    assert store.published() is None
    assert "observe only" in deployment.last_plan()["reason"]

    store.change_live({"stage": "propose"}, reason="plans look right")
    deployment.decide_on(controller, SKEWED)
    assert store.published() is None
    (waiting,) = store.proposals()
    assert f"proposal {waiting.id}" in deployment.last_plan()["reason"]

    store.change_live({"stage": "layers"}, reason="a first layer")
    deployment.decide_on(controller, SKEWED)
    few = deployment.swap()
    assert changed_layers(few.base, few.target) == [1]

    store.change_live({"stage": "all"}, reason="it gave what it promised")
    deployment.decide_on(controller, SKEWED)
    rest = deployment.swap()
    assert changed_layers(rest.base, rest.target) == [0]
    stages = [event.detail["stage"] for event in events(store, "plan")]
    assert stages == ["observe", "propose", "layers", "all"]


def test_next_layers_wait_until_the_ones_before_were_judged(
    deployment: Deployment,
) -> None:
    store, controller = deployment.store, controller_at(deployment, "layers")
    deployment.decide_on(controller, SKEWED)
    deployment.swap()

    for _ in range(ENOUGH - 1):
        deployment.decide_on(controller, SKEWED)
        assert store.published() is None
    assert "on 4 windows" in deployment.last_plan()["reason"]
    deployment.decide_on(controller, SKEWED)

    assert len(events(store, "promise")) == 1
    further = deployment.swap()
    assert changed_layers(further.base, further.target) == [0]


def test_request_moves_in_propose_and_is_refused_in_observe(
    deployment: Deployment,
) -> None:
    store, controller = deployment.store, controller_at(deployment, "observe")
    deployment.serve(SKEWED)
    refused = store.submit("rebalance", {"dry_run": False})
    controller.turn()
    store.change_live({"stage": "propose"}, reason="go on")
    carried_out = store.submit("rebalance", {"dry_run": False})
    controller.turn()

    ends = [deployment.task(one.id) for one in (refused, carried_out)]
    assert [one.state for one in ends] == ["failed", "done"]
    assert "observed only" in ends[0].result.error
    assert deployment.published().target.generation == 1


@pytest.mark.parametrize(("stage", "before"), [("all", "layers"), ("layers", "propose")])
def test_plan_that_breaches_the_limit_steps_the_rollout_back(
    deployment: Deployment, stage: Stage, before: Stage
) -> None:
    # The planner answers none of what follows, so that the plan is judged as it is.
    store, controller = deployment.store, controller_at(deployment, stage, stage_loss=0.1)
    deployment.decide_on(controller, SKEWED)
    deployment.swap()
    store.change_live({"pay_back_s": 0.0}, reason="a test")

    deployment.decide_on(controller, AGAINST_REPLICAS, windows=ENOUGH - 1)
    assert store.live().effective.get("stage") is None
    deployment.decide_on(controller, AGAINST_REPLICAS)

    assert store.live().effective["stage"] == before
    (change,) = [event for event in events(store, "settings") if "stage" in event.detail["live"]]
    assert "generation 1" in change.detail["reason"]
    deployment.decide_on(controller, AGAINST_REPLICAS, windows=ENOUGH)
    assert store.live().effective["stage"] == before, "one breach is one step"


def test_plan_that_keeps_its_promise_steps_nothing_back(
    deployment: Deployment,
) -> None:
    store, controller = deployment.store, controller_at(deployment, "all", stage_loss=0.1)
    deployment.decide_on(controller, SKEWED)
    deployment.swap()

    deployment.decide_on(controller, SKEWED, windows=ENOUGH + 1)

    assert len(events(store, "promise")) == 1
    assert events(store, "settings") == []


class Operated(MemoryStore):
    """A store whose operator sets the stage just before the controller does."""

    def change_live(
        self,
        changes: Mapping[str, Value | None],
        *,
        expected: int | None = None,
        reason: str,
        lasts_s: float | None = None,
    ) -> LiveState:
        if expected is not None:
            super().change_live({"stage": "observe"}, reason="the operator's own")
        return super().change_live(changes, expected=expected, reason=reason, lasts_s=lasts_s)


def test_step_back_gives_way_to_a_change_by_an_operator(clock: Clock) -> None:
    store = Operated("test", clock=clock)
    store.commit(START, expected=None, reason="start")
    deployment = Deployment(store, model=MODEL, clock=clock)
    controller = controller_at(deployment, "all", stage_loss=0.1)
    deployment.decide_on(controller, SKEWED)
    deployment.swap()
    store.change_live({"pay_back_s": 0.0}, reason="a test")

    deployment.decide_on(controller, AGAINST_REPLICAS, windows=ENOUGH)

    assert store.live().effective["stage"] == "observe"
    assert store.live().changes["stage"].reason == "the operator's own"
