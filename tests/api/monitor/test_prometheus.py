"""Alerts in a real Prometheus that scrapes a deployment through an incident."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operating.prometheus_server import PROMETHEUS, Prometheus

pytestmark = pytest.mark.slow  # a demo with its ranks, which die and start again


@pytest.fixture
def demo(tmp_path: Path, start_demo: Any) -> Any:
    (tmp_path / "demo").mkdir()
    return start_demo(tmp_path / "demo", serve=True)


@pytest.fixture
def prometheus(tmp_path: Path, demo: Any) -> Iterator[Prometheus]:
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed: alerts are not evaluated by a server")
    address = demo.wait_for_line("eplb demo: http://").split("http://")[1].split("/")[0].strip()
    started = Prometheus(tmp_path, address)
    yield started
    started.close()


def serves(prometheus: Prometheus) -> None:
    prometheus.wait(
        "serving deployment with a controller",
        lambda: prometheus.query(
            'eplb_verdict{verdict="serving"} == 1 and on () eplb_controller_leads == 1'
        ),
    )


def test_each_fault_of_an_incident_raises_its_alert(demo: Any, prometheus: Prometheus) -> None:
    faults = {"EplbAnomaly rank_death", "EplbRankSilent", "EplbNoLeader", "EplbTargetLost"}
    serves(prometheus)
    # A rule may have been evaluated last before the controller led.
    prometheus.wait("end of alerts", lambda: not prometheus.alerts() & faults)

    demo.kill("rank 1")
    prometheus.wait("alert of a death", lambda: "EplbAnomaly rank_death" in prometheus.alerts())
    serves(prometheus)
    # The ranks that started again did not wipe it out.
    assert "EplbAnomaly rank_death" in prometheus.alerts()

    demo.kill("rank 2", signal.SIGSTOP)
    prometheus.wait("alert of a silent rank", lambda: "EplbRankSilent" in prometheus.alerts())
    serves(prometheus)

    demo.kill("controller", signal.SIGSTOP)
    prometheus.wait("alert of no leader", lambda: "EplbNoLeader" in prometheus.alerts())
    serves(prometheus)

    demo.process.send_signal(signal.SIGINT)
    assert demo.ends() == 0
    prometheus.wait("alert of a lost target", lambda: "EplbTargetLost" in prometheus.alerts())
