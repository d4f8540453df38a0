"""/metrics on an address of its own: what it serves, to whom, and to a real Prometheus."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from api.access.keys import AccessKeys
from api.http.app import create_app, create_metrics_app
from api.http.server import HttpService
from api.http.service import AdminService
from benchmarks.operating.prometheus_server import PROMETHEUS, Prometheus
from eplb.errors import ConfigError
from runtime.checkpoints.checkpoint import Checkpoint
from telemetry.stores.memory import MemoryStore
from tests.support.deployments import OneHost, deployment_in
from tests.support.documents import files_of

ADMIN, SCRAPE = "token-of-the-admin", "token-of-a-scrape"
SECRET = "0123456789abcdef0123456789abcdef"
TIMEOUT_S = 60.0


class Services:
    """An admin API, and /metrics over its figures on an address of its own."""

    def __init__(self, stack: ExitStack, state_dir: Path) -> None:
        store = stack.enter_context(closing(MemoryStore("d")))
        app = create_app(store, token=ADMIN, state_dir=state_dir)
        self.service: AdminService = app.state.deployments.own.service
        self.admin = HttpService(app, is_authenticated=True)
        figures = create_metrics_app(app.state.deployments, token=SCRAPE, state_dir=state_dir)
        self.metrics = HttpService(
            figures, "127.0.0.2", limits=figures.state.limits, is_authenticated=True
        )
        for one in (self.admin, self.metrics):
            one.start()
            stack.callback(one.stop)


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(stack, tmp_path)


def get(service: HttpService, path: str, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{service.url}{path}", headers=headers, timeout=TIMEOUT_S)


def test_scrape_with_its_token_gets_the_figures_and_nothing_else(services: Services) -> None:
    found = get(services.metrics, "/metrics", SCRAPE)

    assert found.status_code == 200
    assert 'eplb_build_info{deployment="d"' in found.text
    assert (
        found.text.split("# HELP")[1]
        == (get(services.admin, "/metrics", ADMIN).text.split("# HELP")[1])
    )
    for path in ("/", "/livez", "/api/v1/state", "/api/v1/openapi.json"):
        assert get(services.metrics, path, SCRAPE).status_code == 404, path
    changed = httpx.post(
        f"{services.metrics.url}/api/v1/pause",
        json={"reason": "x"},
        headers={"authorization": f"Bearer {SCRAPE}"},
        timeout=TIMEOUT_S,
    )
    assert changed.status_code == 404


def test_token_of_one_address_is_refused_at_the_other(services: Services) -> None:
    assert get(services.metrics, "/metrics").status_code == 401
    assert get(services.metrics, "/metrics", ADMIN).status_code == 401
    assert get(services.admin, "/metrics", SCRAPE).status_code == 401
    assert get(services.admin, "/api/v1/state", SCRAPE).status_code == 401


def test_access_key_of_a_viewer_may_scrape(services: Services, tmp_path: Path) -> None:
    key = AccessKeys(tmp_path).add("scraper", "viewer")

    assert get(services.metrics, "/metrics", key).status_code == 200


def test_end_of_the_metrics_address_leaves_the_admin_api_at_work(services: Services) -> None:
    services.metrics.stop()

    assert not services.service.feed.is_closed
    assert get(services.admin, "/metrics", ADMIN).status_code == 200


def test_other_address_without_a_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http.metrics_host is 0\.0\.0\.0, which is not a loop"):
        deployment_in(tmp_path, http__metrics_host="0.0.0.0")


def test_prometheus_scrapes_with_the_token_in_a_file(services: Services, tmp_path: Path) -> None:
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed: no server scrapes the address")
    (tmp_path / "token").write_text(SCRAPE)
    credentials = {"credentials_file": str(tmp_path / "token")}

    prometheus = Prometheus(
        tmp_path, services.metrics.url.removeprefix("http://"), authorization=credentials
    )
    try:
        prometheus.wait("scrape", lambda: prometheus.query('eplb_build_info{job="eplb"}'))
        assert prometheus.query("up == 1")
    finally:
        prometheus.close()


def test_configuration_of_the_page_is_one_of_prometheus(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: the configuration of the page is not checked")
    (tmp_path / "token").write_text(SCRAPE)
    text = files_of("docs/metrics.md")["prometheus.yml"]
    named = text.replace("/etc/prometheus/eplb-metrics-token", str(tmp_path / "token"))
    (tmp_path / "prometheus.yml").write_text(named)

    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )

    assert named != text
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_command_serves_metrics_on_their_own_address(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    with ExitStack() as stack:
        host = OneHost(stack, tmp_path, small_checkpoint.path)
        named = ["--setting", "http.metrics_host=127.0.0.2", "--setting", "http.metrics_port=0"]
        serve = host.start("eplb", "serve", *named, EPLB_SECRET=SECRET)
        url = serve.wait_for("eplb serve: http://127.0.0.2:").split()[-1]
        serve.wait_for("the token of that address is in")
        token = (tmp_path / ".eplb" / "metrics-token").read_text().strip()

        refused = httpx.get(url, timeout=TIMEOUT_S)
        found = httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=TIMEOUT_S)

        assert (refused.status_code, found.status_code) == (401, 200)
        assert "eplb_build_info{" in found.text
        assert serve.ends(signal.SIGTERM) == 0, serve.lines
