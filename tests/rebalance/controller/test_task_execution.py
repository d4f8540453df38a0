"""Requests of two controllers, real processes over one store: each is executed exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

from telemetry import open_store
from telemetry.state.store import StateStore
from telemetry.state.tasks import Task
from tests.support.controlled_deployment import SKEWED, START, Deployment, events
from tests.support.controller_processes import begin, control_until_killed, wait_for
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess

NUM_TASKS = 6

pytestmark = pytest.mark.system


def ended(store: StateStore) -> list[Task]:
    return store.tasks("done") + store.tasks("failed")


def test_each_request_is_executed_once_although_the_leader_is_killed_among_them(
    url: str, fork: Callable[..., ForkedProcess]
) -> None:
    # A lease that no slow turn outlives; a death on this host ends it at once.
    crew = [fork(control_until_killed, url, NEVER_S) for _ in range(2)]
    with closing(open_store(url, "test")) as store:
        store.commit(START, expected=None, reason="start")
        deployment = Deployment(store)
        # No plan but the requested one is published.
        store.change_live({"stage": "propose", "task_expiry_s": 0.0}, reason="a test")
        controllers = begin(crew)
        deployment.serve(SKEWED)
        wait_for(store, lambda: events(store, "plan"))

        moves = store.submit("rebalance", {"dry_run": False, "reason": "now"})
        ids = [moves.id, *(store.submit("rebalance", {"n": n}).id for n in range(NUM_TASKS))]
        wait_for(store, lambda: ended(store))
        controllers[wait_for(store, store.lease).holder].kill()
        wait_for(store, lambda: len(ended(store)) == len(ids))

        ends = Counter(
            event.detail["task"]
            for event in events(store, "task")
            if event.detail["state"] in ("done", "failed")
        )
        assert ends == Counter(ids), "each ends once"
        assert len(store.tasks("failed")) <= 1, "at most the one that was running"
        assert len(events(store, "publish")) == 1
        by_task = [one for one in events(store, "plan") if one.detail["trigger"] == "request"]
        assert [one.detail["actor"] for one in by_task] == [f"task {moves.id}"]
