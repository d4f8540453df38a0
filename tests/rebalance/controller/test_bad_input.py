"""Orders against constraints, ranks that are gone, clocks that jump, late stores.

Each is refused with its reason or bounded, and nothing that was committed is lost.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.decision.alternatives import ENOUGH
from eplb.errors import StoreError
from eplb.migration.build import Migration
from telemetry.state.proposals import Approval
from tests.support.controlled_deployment import (
    EVEN,
    SETTINGS,
    SKEWED,
    START,
    Clock,
    Deployment,
    events,
    worked_off,
)
from tests.support.stores import MemoryStore

HOUR_S = 3600.0


# -- orders against constraints


def test_rollback_against_a_pin_names_it_and_the_next_plan_restores_it(
    deployment: Deployment,
) -> None:
    store, controller = deployment.store, deployment.controller()
    store.change_live({"pins": "0/0:1"}, reason="its users are near rank 1")
    deployment.decide_on(controller, EVEN)
    assert 0 in deployment.swap().target.slot_to_expert[0, 3:]
    deployment.serve(EVEN)
    store.submit("rollback", {"generation": 0, "reason": "look", "dry_run": False})
    controller.turn()

    assert 0 not in deployment.swap().target.slot_to_expert[0, 3:]
    assert "layer 0: expert 0 is pinned to rank 1" in deployment.last_plan()["reason"]
    deployment.decide_on(controller, EVEN)
    assert 0 in deployment.published().target.slot_to_expert[0, 3:]


def test_under_a_constraint_that_no_plan_can_meet_only_a_rollback_is_carried_out(
    deployment: Deployment,
) -> None:
    deployment.serve(SKEWED)
    deployment.controller().turn()
    deployment.swap()
    deployment.store.change_live({"redundancy": "0:99"}, reason="a typing error")
    deployment.serve(SKEWED)

    task = worked_off(deployment, "rebalance", dry_run=False)
    assert task.state == "failed"
    assert "layer 0 99" in task.result.error
    assert deployment.store.published() is None

    task = worked_off(deployment, "rollback", generation=0, reason="slow", dry_run=False)
    assert task.state == "done"
    assert np.array_equal(deployment.published().target.slot_to_expert, START.slot_to_expert)
    assert "layer 0 99" in deployment.last_plan()["reason"]


# -- ranks that are gone


def test_rollback_to_a_generation_whose_rank_is_gone_is_refused(clock: Clock) -> None:
    three = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=2)
    store = MemoryStore("test", clock=clock)
    store.commit(Placement(np.array([[0, 1, 2, 3, 0, 1]]), 4), expected=None, reason="start")
    without_2 = Placement(np.array([[0, 1, 2, 3, EMPTY, EMPTY]]), 4, 1)
    store.commit(without_2, expected=0, reason="rank 2 died")
    survivors = Deployment(store, "run-2", topology=replace(three, alive=[True, True, False]))
    survivors.serve(EVEN)

    task = worked_off(survivors, "rollback", generation=0, reason="as before", dry_run=False)

    assert task.state == "failed"
    assert "slot 4 holds expert 0 on rank 2" in task.result.error
    assert store.published() is None


# -- times that jump


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["ahead", "back"])
def test_migration_has_its_deadline_although_the_clock_jumps(
    deployment: Deployment, jump_s: float
) -> None:
    monotonic = Clock()
    controller = deployment.controller(monotonic=monotonic)
    deployment.serve(SKEWED)
    for _ in range(2):  # it is published, and then first seen open
        controller.turn()

    deployment.clock.now += jump_s
    controller.turn()
    still_open = deployment.store.published()
    monotonic.now += SETTINGS.migration_deadline_s + 1
    controller.turn()

    assert still_open is not None
    assert deployment.store.published() is None


def test_committed_placements_survive_samples_and_clocks_that_jump(
    deployment: Deployment,
) -> None:
    controller = deployment.controller()
    for jump_s in (0.0, HOUR_S, -2 * HOUR_S, 4 * HOUR_S):
        deployment.clock.now += jump_s
        deployment.decide_on(controller, SKEWED if jump_s >= 0 else SKEWED[::-1], windows=ENOUGH)
        if deployment.store.published() is not None:
            deployment.swap()

    generations = [one.placement.generation for one in deployment.store.placements()]
    assert generations == sorted(generations, reverse=True)
    assert generations[-1] == 0
    assert len(generations) >= 2
    (refused,) = events(deployment.store, "error")  # samples from before the clock was set back
    assert refused.detail["samples"]["future"] > 0


# -- a store that answers late


class LateStore(MemoryStore):
    """A store whose first answer to ``publish`` comes after its caller has given up."""

    is_late = True

    def publish(
        self,
        migration: Migration,
        *,
        fence: int | None = None,
        approval: Approval | None = None,
    ) -> None:
        super().publish(migration, fence=fence, approval=approval)
        if self.is_late:
            self.is_late = False
            raise StoreError("no answer within 5 s, expected one")


@pytest.fixture
def late(clock: Clock) -> Deployment:
    store = LateStore("test", clock=clock)
    store.commit(START, expected=None, reason="start")
    return Deployment(store, clock=clock)


def test_plan_whose_publication_is_answered_late_is_published_and_judged_once(
    late: Deployment,
) -> None:
    store, controller = late.store, late.controller()
    late.serve(SKEWED)
    with pytest.raises(StoreError):
        controller.turn()

    controller.turn()
    assert len(events(store, "publish")) == 1
    late.swap()
    late.decide_on(controller, SKEWED, windows=ENOUGH)

    (judged,) = events(store, "promise")
    assert judged.detail["generation"] == 1
    assert len(events(store, "publish")) == 1


def test_request_whose_publication_is_answered_late_does_not_end_before_its_outcome_is_known(
    late: Deployment,
) -> None:
    store, controller = late.store, late.controller()
    late.decide_on(controller, EVEN)
    late.serve(SKEWED)
    task = store.submit("rebalance", {"dry_run": False, "reason": "hot expert"})
    with pytest.raises(StoreError):
        controller.turn()
    assert late.task(task.id).state == "running"

    controller.turn()

    ended = late.task(task.id)
    assert ended.state == "failed"
    assert "a look at the open migration" in ended.result.error
    assert len(events(store, "publish")) == 1
