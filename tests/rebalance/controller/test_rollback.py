"""Rollback to an earlier generation, back-off after failed migrations, and expired requests."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.placement import EMPTY, Placement
from eplb.decision.alternatives import ENOUGH
from eplb.measure import imbalance
from eplb.migration.build import Pace
from rebalance.controller.due import back_off
from rebalance.controller.loop import PAUSE_WINDOWS, Controller
from telemetry.state.live import Control
from tests.support.controlled_deployment import (
    EVEN,
    SKEWED,
    START,
    TOPOLOGY,
    Deployment,
    decisions,
    events,
    worked_off,
)

# Even where each expert is on its first rank; 1.5 once expert 0 has a replica on rank 1.
AGAINST_REPLICAS = [50_000, 0, 25_000, 25_000]


def moved(deployment: Deployment) -> Controller:
    """Return the controller of a deployment whose generation 1 serves."""
    controller = deployment.controller()
    deployment.decide_on(controller, SKEWED)
    deployment.swap()
    return controller


# -- ordered


def test_rollback_is_a_dry_run_by_default_and_has_its_price(
    deployment: Deployment,
) -> None:
    moved(deployment)
    deployment.serve(SKEWED)

    task = worked_off(deployment, "rollback", generation=0, reason="look")

    assert (task.state, task.result.plan_id) == ("done", 0)
    assert task.result.detail["dry_run"]
    assert task.result.detail["after"] == pytest.approx(1.6)
    assert deployment.store.published() is None


def test_rollback_to_what_serves_is_kept(deployment: Deployment) -> None:
    moved(deployment)
    deployment.serve(SKEWED)

    task = worked_off(deployment, "rollback", generation=1, reason="x", dry_run=False)

    assert task.result.detail["decision"] == "KEEP"
    assert deployment.store.published() is None


def test_rollback_with_spare_slots_is_a_flip(deployment: Deployment) -> None:
    controller = deployment.controller(pace=Pace(mode="flip", spare_slots=1))
    deployment.decide_on(controller, SKEWED)
    there = deployment.swap()
    deployment.serve(SKEWED)
    deployment.store.submit("rollback", {"generation": 0, "reason": "x", "dry_run": False})
    controller.turn()

    back = deployment.swap()

    assert back.base.hash == there.target.hash
    held = back.target.slot_to_expert.reshape(2, 3)
    assert [sorted(set(row.tolist()) - {EMPTY}) for row in held] == [[0, 1], [2, 3]]
    assert (held == EMPTY).sum(axis=1).tolist() == [1, 1]


def test_rollback_to_another_number_of_slots_is_refused(deployment: Deployment) -> None:
    wider = Placement(np.array([[0, 1, EMPTY, EMPTY, 2, 3, EMPTY, EMPTY]]), 4, 1)
    deployment.store.commit(wider, expected=0, reason="another start")
    deployment.store.commit(START.with_generation(2), expected=1, reason="and back")
    deployment.serve(EVEN)

    task = worked_off(deployment, "rollback", generation=1, reason="x", dry_run=False)

    assert "8 slots a layer, the topology has 6" in task.result.error


# -- by rule


def test_plan_that_made_its_windows_worse_is_taken_back_once(
    deployment: Deployment,
) -> None:
    controller = moved(deployment)
    # No plan of the planner pays; the rule asks for no pay-back.
    changes = {"rollback_loss": 0.2, "pay_back_s": 0.0}
    deployment.store.change_live(changes, reason="a test")
    deployment.decide_on(controller, AGAINST_REPLICAS, windows=ENOUGH - 1)
    assert deployment.store.published() is None
    deployment.decide_on(controller, AGAINST_REPLICAS)

    migration = deployment.swap()

    assert np.array_equal(migration.target.slot_to_expert, START.slot_to_expert)
    load = np.array([AGAINST_REPLICAS])
    assert imbalance(load, migration.base, TOPOLOGY).mean() == pytest.approx(1.5)
    assert imbalance(load, migration.target, TOPOLOGY).mean() == pytest.approx(1.0)
    last = deployment.last_plan()
    assert (last["trigger"], last["actor"]) == ("rollback", "controller")
    assert "gave -0.500" in last["reason"]

    # The planner wants the same plan for the next text, and waits.
    deployment.store.change_live({"pay_back_s": None}, reason="a test")
    deployment.decide_on(controller, SKEWED, windows=PAUSE_WINDOWS - 1)
    assert "pause after a rollback" in deployment.last_plan()["reason"]
    deployment.decide_on(controller, SKEWED, windows=2)
    assert deployment.published().base.generation == 2


@pytest.mark.parametrize(
    ("loss", "control"),
    [(0.0, Control()), (0.6, Control()), (0.2, Control(observe=True))],
    ids=["off", "above what was lost", "observed"],
)
def test_plan_within_the_limit_of_the_rule_or_only_observed_is_not_taken_back(
    deployment: Deployment, loss: float, control: Control
) -> None:
    controller = moved(deployment)
    changes = {"rollback_loss": loss, "pay_back_s": 0.0}
    deployment.store.change_live(changes, reason="a test")
    deployment.store.set_control(control, reason="a test")

    deployment.decide_on(controller, AGAINST_REPLICAS, windows=ENOUGH)

    assert deployment.store.published() is None
    assert len(events(deployment.store, "promise")) == 1


# -- back-off


def fail_migration(deployment: Deployment) -> None:
    """Ranks drop the open migration."""
    plan_id = deployment.published().plan_id
    deployment.store.withdraw(plan_id, outcome="aborted", reason="rank 1 cannot stage")


def test_plan_after_a_failed_migration_waits_twice_as_long_each_time(
    deployment: Deployment,
) -> None:
    controller = deployment.controller()
    deployment.decide_on(controller, SKEWED)
    waits = []
    for _ in range(3):
        fail_migration(deployment)
        failed_at = deployment.clock.now
        while deployment.store.published() is None and deployment.clock.now < failed_at + 100:
            deployment.clock.now += 5
            deployment.decide_on(controller, SKEWED)
        waits.append(deployment.clock.now - failed_at)

    assert waits == [10, 20, 40]


def test_back_off_of_a_clock_that_was_set_back_begins_again(
    deployment: Deployment,
) -> None:
    controller = deployment.controller()
    deployment.decide_on(controller, SKEWED)
    fail_migration(deployment)

    deployment.clock.now -= 500
    deployment.decide_on(controller, SKEWED)
    assert deployment.store.published() is None
    deployment.clock.now += 10
    deployment.decide_on(controller, SKEWED)

    assert deployment.store.published() is not None


def test_new_leader_continues_the_back_off_and_a_commit_ends_it(deployment: Deployment) -> None:
    deployment.serve(SKEWED)
    deployment.controller().turn()
    fail_migration(deployment)

    deployment.serve(SKEWED)
    other = deployment.controller()
    other.turn()
    assert deployment.store.published() is None
    reason = deployment.last_plan()["reason"]
    assert "failed 1 time, the latest: rank 1 cannot stage; 10 s" in reason
    deployment.clock.now += 10
    deployment.decide_on(other, SKEWED)
    deployment.swap()
    deployment.decide_on(other, SKEWED[::-1], windows=4)

    assert deployment.published().base.generation == 1


def test_migration_ended_by_the_kill_switch_is_no_failure(
    deployment: Deployment,
) -> None:
    controller = deployment.controller()
    deployment.decide_on(controller, SKEWED)
    deployment.store.set_control(Control(movement=False), reason="stop")
    controller.turn()
    assert deployment.store.published() is None
    deployment.store.set_control(Control(), reason="go on")

    deployment.decide_on(controller, SKEWED)

    assert decisions(deployment.store) == ["MOVE", "MOVE"]
    assert deployment.store.published() is not None


def test_request_is_carried_out_during_the_back_off(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.decide_on(controller, SKEWED)
    fail_migration(deployment)
    deployment.store.submit("rebalance", {"dry_run": False, "reason": "mended"})

    controller.turn()

    assert deployment.store.published() is not None


def test_back_off_doubles_up_to_its_limit() -> None:
    assert [back_off(n, 10.0) for n in (0, 1, 2, 3, 7, 10_000)] == [0, 10, 20, 40, 600, 600]
    assert back_off(2, 0.0) == 0.0
    assert back_off(1, 900.0) == 900.0


# -- expiry


@pytest.mark.parametrize(("expiry_s", "state"), [(300.0, "failed"), (0.0, "done")])
def test_request_older_than_the_limit_is_refused_if_there_is_one(
    deployment: Deployment, expiry_s: float, state: str
) -> None:
    deployment.serve(SKEWED)
    task = deployment.store.submit("rebalance", {"dry_run": True, "reason": "now"})
    deployment.clock.now += 301

    deployment.controller(task_expiry_s=expiry_s).turn()

    ended = deployment.task(task.id)
    assert ended.state == state
    assert ("301 s, expected 300 s" in ended.result.error) == (state == "failed")
