"""Proposals: made by request or in the stage "propose", approved, refused, and carried out once."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.placement import EMPTY, Placement
from eplb.migration.build import Pace
from rebalance.controller.loop import Controller
from telemetry.state.live import Control
from telemetry.state.proposals import LASTS_S
from telemetry.state.tasks import Task
from tests.support.controlled_deployment import (
    EVEN,
    SKEWED,
    Clock,
    Deployment,
)

OTHER = Placement(np.array([[0, 1, 2, 2, 3, EMPTY]]), num_experts=4, generation=1)


@pytest.fixture
def controller(deployment: Deployment) -> Controller:
    return deployment.controller(stage="propose", task_expiry_s=0.0)


def ask(deployment: Deployment, controller: Controller, kind: str, **request: object) -> Task:
    """Return a task that the controller has worked off."""
    task = deployment.store.submit(kind, {"by": "alice", "reason": "hot expert"} | request)
    controller.turn()
    return deployment.task(task.id)


def propose(deployment: Deployment, controller: Controller) -> int:
    """Return the proposal that is made by request, on even load so that none is made without."""
    deployment.serve(SKEWED)
    deployment.store.set_control(Control(movement=False), reason="no plan of its own")
    task = ask(deployment, controller, "propose")
    deployment.store.set_control(Control(), reason="go on")
    assert task.state == "done", task.result.error
    return int(task.result.detail["proposal"])


def test_stage_propose_stores_one_proposal_until_it_ends(
    deployment: Deployment, controller: Controller, clock: Clock
) -> None:
    for _ in range(3):
        deployment.decide_on(controller, SKEWED)

    (first,) = deployment.store.proposals()
    assert (first.by, first.trigger, first.expires) == ("controller", "load", 1000.0 + LASTS_S)
    assert deployment.store.published() is None
    clock.now += LASTS_S
    deployment.decide_on(controller, SKEWED)
    assert [one.state for one in deployment.store.proposals()] == ["expired", "open"]


def test_approval_publishes_exactly_the_stored_target_of_an_earlier_load(
    deployment: Deployment, controller: Controller
) -> None:
    number = propose(deployment, controller)
    content = deployment.store.proposal_content(number)
    assert content is not None
    deployment.serve(EVEN)  # on which no plan would move anything

    task = ask(deployment, controller, "approve", proposal=number, by="bob", reason="go")

    assert task.state == "done", task.result.error
    migration = deployment.swap()
    assert migration.target.hash == content.target.hash
    assert migration.plan_id == task.result.plan_id
    (found,) = deployment.store.proposals()
    assert (found.state, found.ended_by, found.plan_id) == ("approved", "bob", migration.plan_id)
    last = deployment.last_plan()
    assert last["trigger"] == "approval"
    assert f"proposal {number}, approved by bob (go)" in last["reason"]


def test_approval_with_spare_slots_publishes_the_stored_target(deployment: Deployment) -> None:
    store, pace = deployment.store, Pace(mode="flip", spare_slots=1)
    controller = deployment.controller(pace=pace, task_expiry_s=0.0)
    store.set_control(Control(observe=True), reason="no plan of its own")
    deployment.serve([40_000, 10_000, 40_000, 10_000])
    deployment.serve([60_000, 30_000, 5_000, 5_000])
    task = ask(deployment, controller, "propose")
    store.set_control(Control(), reason="go on")
    number = task.result.detail.get("proposal")
    assert number is not None, task.result.error
    content = store.proposal_content(number)
    assert content is not None

    approved = ask(deployment, controller, "approve", proposal=number)

    assert approved.state == "done", approved.result.error
    assert deployment.swap().target.hash == content.target.hash


def test_approval_on_another_base_is_refused(
    deployment: Deployment, controller: Controller
) -> None:
    number = propose(deployment, controller)
    deployment.store.commit(OTHER, expected=0, reason="by hand")

    task = ask(deployment, controller, "approve", proposal=number)

    assert task.state == "failed"
    assert "found generation 1 committed, expected generation 0" in task.result.error
    assert deployment.store.published() is None


def test_approval_is_refused_while_movement_is_off_and_stays_possible(
    deployment: Deployment, controller: Controller
) -> None:
    number = propose(deployment, controller)
    deployment.store.set_control(Control(movement=False), reason="incident")

    refused = ask(deployment, controller, "approve", proposal=number)
    deployment.store.set_control(Control(), reason="over")
    carried_out = ask(deployment, controller, "approve", proposal=number)
    again = ask(deployment, controller, "approve", proposal=number)

    assert "movement is switched off" in refused.result.error
    assert carried_out.state == "done"
    assert f"proposal {number} is approved" in again.result.error


def test_proposal_survives_the_controller(deployment: Deployment, controller: Controller) -> None:
    number = propose(deployment, controller)
    successor = deployment.controller()
    deployment.store.set_control(Control(observe=True), reason="no plan of its own")
    successor.turn()
    deployment.store.set_control(Control(), reason="go on")

    task = ask(deployment, successor, "approve", proposal=number)

    assert task.state == "done", task.result.error


def test_plan_that_keeps_the_placement_is_no_proposal(
    deployment: Deployment, controller: Controller
) -> None:
    deployment.serve(EVEN)

    task = ask(deployment, controller, "propose")

    assert task.state == "failed"
    assert "KEEP" in task.result.error
    assert deployment.store.proposals() == []


@pytest.mark.parametrize("kind", ["rebalance", "rollback", "propose"])
def test_request_for_another_generation_is_refused(
    deployment: Deployment, controller: Controller, kind: str
) -> None:
    deployment.serve(SKEWED)

    task = ask(deployment, controller, kind, if_generation=7, generation=0)

    assert "found generation 0 serving, expected generation 7" in task.result.error
