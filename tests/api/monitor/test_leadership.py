"""Who leads a deployment, and since when none does: state, readiness and metrics."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.http.service import AdminService, Refused
from api.metrics.exposition import metrics_text
from api.monitor.health import leadership
from telemetry.stores.memory import MemoryStore
from tests.support.rank_reports import rank_report
from tests.support.two_ranks import FIRST, begin_run

TTL_S = 9.0


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
def store(clock: Clock) -> MemoryStore:
    """Two ranks that serve."""
    opened = MemoryStore("d", clock=clock)
    begin_run(opened)
    opened.commit(FIRST, expected=None, reason="start")
    for rank in range(2):
        opened.report(rank_report("a", rank, time=time.time(), step=7, generation=1))
    return opened


def metric(service: AdminService, name: str) -> float | None:
    families = text_string_to_metric_families(metrics_text([service.metrics])[0].decode())
    found = [sample.value for one in families for sample in one.samples if sample.name == name]
    return found[0] if found else None


def test_leader_is_shown_with_the_age_of_its_last_turn(store: MemoryStore, clock: Clock) -> None:
    clock.ago_s = 8.0
    store.acquire_lease("one", TTL_S)
    clock.ago_s = 5.0
    store.acquire_lease("one", TTL_S)
    clock.ago_s = 0.0
    service = AdminService(store)

    state = service.state()

    assert state.leader == "'one'"
    assert state.led_s == pytest.approx(8.0, abs=1.0)
    assert state.turn_age_s == pytest.approx(5.0, abs=1.0)
    assert metric(service, "eplb_controller_leads") == 1
    age_s = metric(service, "eplb_controller_lease_age_seconds")
    assert age_s == pytest.approx(5.0, abs=1.0)
    assert service.readiness().detail == "2 ranks serve, at step 7"


def test_leader_that_is_gone_is_not_ready_and_raises_the_alert(
    store: MemoryStore, clock: Clock
) -> None:
    clock.ago_s = 100.0
    store.acquire_lease("one", TTL_S)
    clock.ago_s = 0.0
    service = AdminService(store)

    with pytest.raises(Refused) as refused:
        service.readiness()

    assert refused.value.kind.status == 503
    assert str(refused.value).startswith("no controller leads: the lease of 'one' ran out 9")
    assert "; the last turn of one is 10" in str(refused.value)
    assert metric(service, "eplb_controller_leads") == 0
    assert metric(service, "eplb_controller_lease_age_seconds") == pytest.approx(100.0, abs=1.0)
    told = "no controller leads: the lease of 'one'"
    assert [one for one in service.state().problems if one.startswith(told)]


def test_gap_of_one_takeover_leaves_the_deployment_ready(store: MemoryStore, clock: Clock) -> None:
    clock.ago_s = TTL_S + 2.0
    store.acquire_lease("one", TTL_S)
    clock.ago_s = 0.0
    service = AdminService(store)

    assert service.readiness().detail == "2 ranks serve, at step 7"
    assert metric(service, "eplb_controller_leads") == 0


def test_lease_that_was_given_up_has_the_age_of_its_end(store: MemoryStore, clock: Clock) -> None:
    clock.ago_s = 60.0
    lease = store.acquire_lease("one", TTL_S)
    assert lease is not None
    clock.ago_s = 55.0
    store.release_lease(lease)
    clock.ago_s = 0.0

    found = leadership(store, time.time())

    assert found.leader == ""
    assert found.turn_age_s == pytest.approx(55.0, abs=1.0)


def test_deployment_that_never_had_a_controller_is_ready(store: MemoryStore) -> None:
    service = AdminService(store)

    assert service.readiness().detail == "2 ranks serve, at step 7"
    assert service.state().turn_age_s is None
    assert metric(service, "eplb_controller_lease_age_seconds") is None
    assert metric(service, "eplb_controller_leads") == 0
