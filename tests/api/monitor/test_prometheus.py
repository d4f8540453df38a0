"""Alerts in a real Prometheus that scrapes a deployment through an incident."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployments import free_ports

from api.metrics.observability import ALERTS

pytestmark = pytest.mark.slow  # a demo with its ranks, which die and start again

PROMETHEUS = shutil.which("prometheus")
DEADLINE_S = 120.0
SCRAPE_S = 1
LOOK_EVERY_S = 0.1  # Prometheus tells nobody of a change: it is asked


class Prometheus:
    """A server in a folder of its own, with the shipped rules and one target."""

    def __init__(self, folder: Path, target: str) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}/api/v1"
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_S}s",
                "scrape_timeout": f"{SCRAPE_S}s",
                "evaluation_interval": f"{SCRAPE_S}s",
            },
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "eplb", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(
            f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}", timeout=DEADLINE_S
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def alerts(self) -> set[str]:
        """Names of alerts that are pending or firing, with the type of an anomaly."""
        return {
            " ".join(filter(None, (one["labels"]["alertname"], one["labels"].get("type"))))
            for one in self.ask("alerts")["alerts"]
        }

    def wait(self, what: str, look: Any) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                if found := look():
                    return found
            except OSError:  # it does not listen yet
                assert self._process.poll() is None, "Prometheus ended"
            assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s: {self.alerts()}"
            time.sleep(LOOK_EVERY_S)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        self._log.close()


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
    assert not prometheus.alerts() & faults

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
