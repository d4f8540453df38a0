"""Reasons of refused tasks, and throttles of requests, with a real controller."""

from __future__ import annotations

from typing import Any

import pytest

from telemetry.state.live import Control
from telemetry.state.tasks import Refusal
from tests.support.controlled_deployment import (
    SETTINGS,
    SKEWED,
    Deployment,
    worked_off,
)


@pytest.mark.parametrize(
    ("kind", "asked", "refusal"),
    [
        ("rollback", {"generation": 7}, Refusal.NO_SUCH_PLACEMENT),
        ("explain", {"layer": 0, "expert": 9}, Refusal.NO_SUCH_EXPERT),
        ("rebalance", {"if_generation": 7}, Refusal.GENERATION_MOVED_ON),
        ("approve", {"proposal": 7}, Refusal.PROPOSAL_ENDED),
        ("rebalance", {"throttle": {"link_part": 2.0}}, Refusal.IMPOSSIBLE_THROTTLE),
        ("rebalance", {"policy": "best"}, Refusal.NO_PLAN),
        ("dance", {}, None),
    ],
)
def test_refused_task_has_a_reason_to_act_on(
    deployment: Deployment, kind: str, asked: dict[str, Any], refusal: Refusal | None
) -> None:
    deployment.serve(SKEWED)

    ended = worked_off(deployment, kind, **asked)

    assert ended.state == "failed"
    assert ended.result.refusal == (refusal or "")
    assert ended.result.error


def test_task_without_load_or_movement_has_its_reason(deployment: Deployment) -> None:
    assert worked_off(deployment).result.refusal == Refusal.NO_LOAD
    deployment.serve(SKEWED)
    deployment.store.set_control(Control(movement=False), reason="test")
    assert worked_off(deployment, dry_run=False).result.refusal == Refusal.MOVEMENT_OFF
    deployment.store.set_control(Control(observe=True), reason="test")
    assert worked_off(deployment, dry_run=False).result.refusal == Refusal.MOVEMENT_OFF
    deployment.store.set_control(Control(), reason="test")
    assert worked_off(deployment, dry_run=False).state == "done"
    assert worked_off(deployment, dry_run=False).result.refusal == Refusal.MIGRATION_OPEN
    queued = deployment.store.submit("rebalance", {})
    deployment.store.cancel(queued.id, reason="not now")
    assert deployment.task(queued.id).result.refusal == Refusal.CANCELLED


def test_throttle_is_of_one_request_and_not_of_the_next_plan(deployment: Deployment) -> None:
    deployment.serve(SKEWED)

    ended = worked_off(deployment, dry_run=False, throttle={"layers_per_transaction": 1})
    assert ended.state == "done", ended.result.error
    assert deployment.swap().pace.layers_per_transaction == 1

    deployment.serve(SKEWED[::-1], windows=4)
    deployment.controller().turn()
    assert deployment.published().pace == SETTINGS.pace
