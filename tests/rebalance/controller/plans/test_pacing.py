"""Pace by the controller: slow steps halve it, quiet ones add, and a new leader continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.decision.pace import StepTimes
from eplb.errors import ConfigError
from eplb.migration.build import Migration, Pace
from rebalance.controller.loop import Controller
from tests.support.controlled_deployment import EVEN, SETTINGS, Clock, Deployment, events
from tests.support.rank_reports import rank_report
from tests.support.stores import MemoryStore

OWN = Pace(staging_experts=8, transactions_per_commit=4)
HALF = replace(OWN, transactions_per_commit=2, experts_per_transaction=2, link_part=0.5)
# In this stage migrations are published by order alone; each order here is a way back.
PACED: dict[str, Any] = {"pace": OWN, "step_time_budget": 0.05, "stage": "propose"}
# Two experts move on the way there, and two on the way back.
HERE = Placement(np.array([[0, 1, 2, 3, 0, 1]]), num_experts=4)
THERE = Placement(np.array([[0, 1, 3, 3, 0, 2]]), num_experts=4, generation=1)


class Paced(Deployment):
    """A deployment that goes there and back, by order."""

    def next_migration(self, controller: Controller) -> Migration:
        """Order the way to the other placement, and return its migration."""
        committed = self.store.committed()
        assert committed is not None
        is_there = (committed.placement.slot_to_expert == THERE.slot_to_expert).all()
        self.serve(EVEN)
        order = {"generation": 0 if is_there else 1, "reason": "a test", "dry_run": False}
        self.store.submit("rollback", order)
        controller.turn()
        return self.published()

    def migrate(self, controller: Controller, *, slowdown: float) -> Migration:
        """Publish a migration, and commit it with the steps that ranks report."""
        migration = self.next_migration(controller)
        self.report(migration.plan_id, slowdown)
        return self.swap()

    def report(self, plan_id: int, slowdown: float) -> None:
        found = StepTimes(plan_id, 100, 9.0, 10.0, 20, 9.0, 10.0 * (1 + slowdown))
        for rank in range(2):
            self.store.report(rank_report(self.run, rank, step_times=vars(found)))


@pytest.fixture
def deployment(clock: Clock) -> Paced:
    store = MemoryStore("test", clock=clock)
    store.commit(HERE, expected=None, reason="start")
    store.commit(THERE, expected=0, reason="start")
    return Paced(store, clock=clock)


def test_slow_steps_in_a_migration_halve_the_pace_of_the_next(deployment: Paced) -> None:
    controller = deployment.controller(**PACED)
    assert deployment.migrate(controller, slowdown=0.2).pace == OWN

    slower = deployment.next_migration(controller)

    assert slower.pace == HALF
    plan, (judged,) = deployment.last_plan(), events(deployment.store, "pace")
    assert plan["pace"] == vars(HALF)
    assert judged.detail == {
        "plan_id": 1,
        "slowdown": 0.2,
        "budget": 0.05,
        "part_before": 1.0,
        "part": 0.5,
        "reason": plan["pace_reason"],
    }


def test_quiet_migrations_bring_the_pace_back_step_by_step(deployment: Paced) -> None:
    controller = deployment.controller(**PACED)
    deployment.migrate(controller, slowdown=0.2)

    parts = [deployment.migrate(controller, slowdown=0.0).pace.link_part for _ in range(6)]

    assert parts == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]


def test_new_leader_continues_with_the_pace_of_the_one_before(deployment: Paced) -> None:
    first = deployment.controller(holder="one", **PACED)
    deployment.migrate(first, slowdown=0.2)
    deployment.migrate(first, slowdown=0.2)  # judged by nobody yet
    first.close()

    second = deployment.controller(holder="two", **PACED)
    assert deployment.migrate(second, slowdown=0.0).pace.link_part == 0.25
    second.close()

    third = deployment.controller(holder="three", **PACED)
    assert deployment.next_migration(third).pace.link_part == 0.375
    assert [event.detail["plan_id"] for event in events(deployment.store, "pace")] == [1, 2, 3]


def test_migration_without_reported_steps_leaves_the_pace_as_it_is(deployment: Paced) -> None:
    controller = deployment.controller(**PACED)
    deployment.migrate(controller, slowdown=0.2)
    deployment.next_migration(controller)
    deployment.swap()  # the ranks' reports are still of the migration before

    assert deployment.next_migration(controller).pace == HALF
    assert "plan 2 was not judged" in deployment.last_plan()["pace_reason"]


def test_migration_that_does_not_end_in_time_is_not_slowed_further(deployment: Paced) -> None:
    controller = deployment.controller(**PACED)
    deployment.migrate(controller, slowdown=0.2)
    late = deployment.next_migration(controller)
    deployment.report(late.plan_id, 0.2)
    controller.turn()
    deployment.clock.now += SETTINGS.migration_deadline_s + 1
    controller.turn()
    assert deployment.store.published() is None

    assert deployment.next_migration(controller).pace.link_part == 0.625
    assert "plan 2 did not end in time" in events(deployment.store, "pace")[-1].detail["reason"]


def test_pace_without_a_budget_is_fixed_and_judges_nothing(deployment: Paced) -> None:
    controller = deployment.controller(**PACED | {"step_time_budget": 0.0})
    deployment.migrate(controller, slowdown=0.9)

    assert deployment.next_migration(controller).pace == OWN
    assert events(deployment.store, "pace") == []


def test_budget_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"step_time_budget.*-0\.1"):
        replace(SETTINGS, step_time_budget=-0.1)
