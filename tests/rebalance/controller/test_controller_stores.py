"""Rollback, expiry and cancellation by the controller, over every kind of store."""

from __future__ import annotations

import numpy as np
import pytest

from telemetry.state.store import StateStore
from tests.support.controlled_deployment import SETTINGS, SKEWED, START, Deployment, events


@pytest.fixture
def deployment(any_store: StateStore) -> Deployment:
    any_store.commit(START, expected=None, reason="start")
    deployment = Deployment(any_store)
    deployment.serve(SKEWED)
    return deployment


def test_ordered_rollback_serves_the_earlier_placement(deployment: Deployment) -> None:
    store, controller = deployment.store, deployment.controller()
    controller.turn()
    deployment.swap()
    deployment.serve(SKEWED)
    task = store.submit("rollback", {"generation": 0, "reason": "bad text", "dry_run": False})

    controller.turn()
    migration = deployment.swap()

    committed, ended = store.committed(), deployment.task(task.id)
    assert committed is not None
    assert committed.placement.generation == 2
    assert np.array_equal(committed.placement.slot_to_expert, START.slot_to_expert)
    assert (ended.state, ended.result.plan_id) == ("done", migration.plan_id)
    last = deployment.last_plan()
    assert (last["trigger"], last["actor"]) == ("rollback", f"task {task.id}")


def test_request_that_is_stale_or_cancelled_is_refused_and_a_new_one_is_carried_out(
    deployment: Deployment,
) -> None:
    store, clock = deployment.store, deployment.clock
    asked = {"dry_run": False, "reason": "now"}
    old, cancelled = (store.submit("rebalance", asked) for _ in range(2))
    assert store.cancel(cancelled.id, reason="the maintenance was moved")
    clock.now = old.time + SETTINGS.task_expiry_s + 1
    controller = deployment.controller(stage="propose")

    controller.turn()
    clock.now = old.time
    new = store.submit("rebalance", asked)
    controller.turn()

    ends = [deployment.task(one.id) for one in (old, cancelled, new)]
    assert [one.state for one in ends] == ["failed", "failed", "done"]
    assert "301 s" in ends[0].result.error
    assert ends[1].result.error == "cancelled: the maintenance was moved"
    assert len(events(store, "publish")) == 1
