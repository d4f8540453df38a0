"""Who leads a deployment, and since when none does: state, readiness and metrics."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.http.problems import ProblemType, Refused
from api.http.service import AdminService
from api.metrics.exposition import metrics_text
from api.monitor.verdict import leadership
from telemetry.state.runs import REPORT_EVERY_S
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.rank_reports import rank_report
from tests.support.stores import MemoryStore
from tests.support.two_ranks import FIRST, begin_run

TTL_S = NEVER_S  # however busy the machine is


class Clock:
    """Of the store; real time less so many seconds."""

    def __init__(self) -> None:
        self.ago_s = 0.0

    def __call__(self) -> float:
        return time.time() - self.ago_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> StateStore:
    """Two ranks that serve."""
    opened = MemoryStore("d", clock=clock)
    begin_run(opened)
    opened.commit(FIRST, expected=None, reason="start")
    for rank in range(2):
        now = {"time": time.time(), "step": 7, REPORT_EVERY_S: NEVER_S}
        opened.report(rank_report("a", rank, generation=1, **now))
    return opened


def metric(service: AdminService, name: str) -> float | None:
    families = text_string_to_metric_families(metrics_text([service.metrics])[0].decode())
    found = [sample.value for one in families for sample in one.samples if sample.name == name]
    return found[0] if found else None


def led(store: StateStore, clock: Clock, *ago_s: float) -> AdminService:
    """The service once a controller has had its turns, the last of them so long ago."""
    for ago in ago_s:
        clock.ago_s = ago
        store.acquire_lease("one", TTL_S)
    clock.ago_s = 0.0
    return AdminService(store)


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=NEVER_S / 10)  # real time passes too


def test_leader_is_shown_with_the_age_of_its_last_turn(store: StateStore, clock: Clock) -> None:
    service = led(store, clock, 3000.0, 2000.0)

    found = service.reader.reading().state.processes.controller

    assert found.leader == "'one'"
    assert (found.led_s, found.turn_age_s) == (about(3000.0), about(2000.0))
    assert metric(service, "eplb_controller_leads") == 1
    assert metric(service, "eplb_controller_lease_age_seconds") == about(2000.0)
    assert service.readiness().startswith("2 ranks")


def test_leader_that_is_gone_is_not_ready_and_raises_the_alert(
    store: StateStore, clock: Clock
) -> None:
    service = led(store, clock, 100_000.0)

    with pytest.raises(Refused, match="no controller leads: the lease of 'one'") as refused:
        service.readiness()

    assert refused.value.kind is ProblemType.NOT_READY
    assert metric(service, "eplb_controller_leads") == 0
    assert metric(service, "eplb_controller_lease_age_seconds") == about(100_000.0)
    told = "no controller leads: the lease of 'one'"
    assert [one for one in service.reader.reading().state.problems if one.startswith(told)]


def test_lease_that_was_given_up_has_the_age_of_its_end(store: StateStore, clock: Clock) -> None:
    lease = store.acquire_lease("one", TTL_S)
    assert lease is not None
    released = clock()
    store.release_lease(lease)

    found = leadership(store, released + 55.0)

    assert found.leader == ""
    assert found.turn_age_s == pytest.approx(55.0, abs=1.0)


def test_deployment_that_never_had_a_controller_is_ready(store: StateStore) -> None:
    service = AdminService(store)

    assert service.readiness().startswith("2 ranks")
    assert service.reader.reading().state.processes.controller.turn_age_s is None
    assert metric(service, "eplb_controller_lease_age_seconds") is None
    assert metric(service, "eplb_controller_leads") == 0
