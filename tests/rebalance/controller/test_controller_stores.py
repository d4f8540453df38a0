"""Rollback, expiry and cancellation by the controller, over every kind of store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from eplb.decision.promises import ENOUGH
from eplb.measure.balance import imbalance
from rebalance.controller.loop import Controller
from telemetry.store import LoadStore
from tests.support.controlled_deployment import (
    SETTINGS,
    SKEWED,
    START,
    TOPOLOGY,
    Deployment,
    events,
)

# Even where each expert is on its first rank; 1.5 once expert 0 has a replica on rank 1.
AGAINST_REPLICAS = [50_000, 0, 25_000, 25_000]


class Now:
    """The controller's clock: the store's, and a test may add to it."""

    def __init__(self, store: LoadStore) -> None:
        self._store, self.later_s = store, 0.0

    def __call__(self) -> float:
        newest = self._store.latest_events(limit=1)
        return newest[0].time + self.later_s if newest else 1000.0


@pytest.fixture
def deployment(open_stores: Callable[[str], LoadStore]) -> Deployment:
    store = open_stores("test")
    store.commit(START, expected=None, reason="start")
    return Deployment(store)


def moved(deployment: Deployment) -> Controller:
    """Return the controller of a deployment whose generation 1 serves."""
    controller = Controller(deployment.store, SETTINGS, clock=Now(deployment.store))
    deployment.serve(SKEWED)
    controller.turn()
    deployment.swap()
    return controller


def test_ordered_rollback_serves_the_earlier_placement(deployment: Deployment) -> None:
    controller, store = moved(deployment), deployment.store
    deployment.serve(SKEWED)
    task = store.submit("rollback", {"generation": 0, "reason": "bad text", "dry_run": False})

    controller.turn()
    migration = deployment.swap()

    committed, ended = store.committed(), store.task(task.id)
    assert committed is not None
    assert ended is not None
    assert committed.placement.generation == 2
    assert np.array_equal(committed.placement.slot_to_expert, START.slot_to_expert)
    assert (ended.state, ended.result.plan_id) == ("done", migration.plan_id)
    last = events(store, "plan")[-1].detail
    assert (last["trigger"], last["actor"]) == ("rollback", f"task {task.id}")
    assert last["reason"].startswith("rollback to generation 0 (bad text): ")


def test_plan_that_made_its_windows_worse_is_taken_back_in_the_fourth(
    deployment: Deployment,
) -> None:
    controller, store = moved(deployment), deployment.store
    # No plan of the planner pays; the rule asks for no pay-back.
    store.change_live({"rollback_loss": 0.2, "pay_back_s": 0.0}, reason="a test")
    for _ in range(ENOUGH - 1):
        deployment.serve(AGAINST_REPLICAS)
        controller.turn()
    assert store.published() is None
    deployment.serve(AGAINST_REPLICAS)
    controller.turn()

    migration = deployment.swap()

    load = np.array([AGAINST_REPLICAS])
    assert imbalance(load, migration.base, TOPOLOGY).mean() == pytest.approx(1.5)
    assert imbalance(load, migration.target, TOPOLOGY).mean() == pytest.approx(1.0)
    last = events(store, "plan")[-1].detail
    assert (last["trigger"], last["actor"]) == ("rollback", "controller")


def test_stale_request_is_refused_and_a_new_one_is_carried_out(deployment: Deployment) -> None:
    store = deployment.store
    deployment.serve(SKEWED)
    old = store.submit("rebalance", {"dry_run": False, "reason": "now"})
    clock = Now(store)
    clock.later_s = SETTINGS.task_expiry_s + 1
    controller = Controller(store, replace(SETTINGS, stage="propose"), clock=clock)

    controller.turn()
    clock.later_s = 0.0
    new = store.submit("rebalance", {"dry_run": False, "reason": "again"})
    controller.turn()

    ends = [store.task(one.id) for one in (old, new)]
    assert [one.state for one in ends if one is not None] == ["failed", "done"]
    assert ends[0] is not None
    assert "expired: found it queued for 301 s" in ends[0].result.error
    assert len(events(store, "publish")) == 1


def test_cancelled_request_is_not_carried_out(deployment: Deployment) -> None:
    store = deployment.store
    deployment.serve(SKEWED)
    task = store.submit("rebalance", {"dry_run": False, "reason": "now"})
    assert store.cancel(task.id, reason="the maintenance was moved")

    controller = Controller(store, replace(SETTINGS, stage="propose"), clock=Now(store))
    controller.turn()

    ended = store.task(task.id)
    assert ended is not None
    assert (ended.state, ended.result.error) == ("failed", "cancelled: the maintenance was moved")
    assert events(store, "publish") == []
