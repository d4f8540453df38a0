"""A real Prometheus that scrapes one target."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from api.metrics.observability import ALERTS

PROMETHEUS = shutil.which("prometheus")
DEADLINE_S = 120.0
SCRAPE_S = 1
LOOK_EVERY_S = 0.1  # Prometheus tells nobody of a change: it is asked


class Prometheus:
    """A server in a folder of its own, with the shipped rules and one target.

    Args:
        scrape: further settings of the scrape, such as its credentials.
    """

    def __init__(self, folder: Path, target: str, **scrape: object) -> None:
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_S}s",
                "scrape_timeout": f"{SCRAPE_S}s",
                "evaluation_interval": f"{SCRAPE_S}s",
            },
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {"job_name": "eplb", "static_configs": [{"targets": [target]}], **scrape}
            ],
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
        """Return the data of an answer of its API."""
        with urllib.request.urlopen(
            f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}", timeout=DEADLINE_S
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression has now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def alerts(self) -> set[str]:
        """Names of alerts that are pending or firing, with the type of an anomaly."""
        return {
            " ".join(filter(None, (one["labels"]["alertname"], one["labels"].get("type"))))
            for one in self.ask("alerts")["alerts"]
        }

    def wait(self, what: str, look: Callable[[], Any]) -> Any:
        """Wait until ``look`` finds something, and return it."""
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
        """End it."""
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        self._log.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
