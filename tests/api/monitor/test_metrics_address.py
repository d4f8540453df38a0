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
from fastapi import FastAPI

from api.access.keys import AccessKeys
from api.app import create_app, create_metrics_app
from benchmarks.operating.prometheus_server import PROMETHEUS, Prometheus
from eplb.errors import ConfigError
from runtime.checkpoints.checkpoint import Checkpoint
from tests.support.deployments import OneHost, deployment_in
from tests.support.documents import files_of
from tests.support.http import client_of, serving
from tests.support.stores import MemoryStore

ADMIN, SCRAPE = "token-of-the-admin", "token-of-a-scrape"
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    """An admin API, whose figures the metrics address has too."""
    with closing(MemoryStore("d")) as store:
        yield create_app(store, token=ADMIN, state_dir=tmp_path)


@pytest.fixture
def figures(app: FastAPI, tmp_path: Path) -> FastAPI:
    return create_metrics_app(app.state.deployments, token=SCRAPE, state_dir=tmp_path)


@pytest.fixture
def admin(app: FastAPI) -> Iterator[httpx.Client]:
    with client_of(app) as client:
        yield client


@pytest.fixture
def metrics(figures: FastAPI) -> Iterator[httpx.Client]:
    with client_of(figures) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_scrape_with_its_token_gets_the_figures_and_nothing_else(
    admin: httpx.Client, metrics: httpx.Client
) -> None:
    found = metrics.get("/metrics", headers=bearer(SCRAPE))
    same = admin.get("/metrics", headers=bearer(ADMIN))

    assert found.status_code == 200
    assert 'eplb_build_info{deployment="d"' in found.text
    assert found.text.split("# HELP")[1] == same.text.split("# HELP")[1]
    for path in ("/", "/livez", "/api/v1/state", "/api/v1/openapi.json"):
        assert metrics.get(path, headers=bearer(SCRAPE)).status_code == 404, path
    pause = metrics.post("/api/v1/pause", json={"reason": "x"}, headers=bearer(SCRAPE))
    assert pause.status_code == 404


def test_token_of_one_address_is_refused_at_the_other_and_a_viewer_may_scrape(
    admin: httpx.Client, metrics: httpx.Client, tmp_path: Path
) -> None:
    assert metrics.get("/metrics").status_code == 401
    assert metrics.get("/metrics", headers=bearer(ADMIN)).status_code == 401
    for path in ("/metrics", "/api/v1/state"):
        assert admin.get(path, headers=bearer(SCRAPE)).status_code == 401
    key = AccessKeys(tmp_path).add("scraper", "viewer", force=True)
    assert metrics.get("/metrics", headers=bearer(key)).status_code == 200


def test_end_of_the_metrics_address_leaves_the_admin_api_at_work(
    app: FastAPI, admin: httpx.Client, figures: FastAPI
) -> None:
    with serving(figures, "127.0.0.2", limits=figures.state.limits, is_authenticated=True):
        pass

    assert not app.state.deployments.is_closing
    assert admin.get("/metrics", headers=bearer(ADMIN)).status_code == 200


def test_other_address_without_a_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics_host.*0\.0\.0\.0"):
        deployment_in(tmp_path, http__metrics_host="0.0.0.0")


@pytest.mark.system
def test_prometheus_scrapes_with_the_token_in_a_file(figures: FastAPI, tmp_path: Path) -> None:
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed: no server scrapes the address")
    (tmp_path / "token").write_text(SCRAPE)
    credentials = {"credentials_file": str(tmp_path / "token")}

    with (
        serving(figures, "127.0.0.2", is_authenticated=True) as service,
        closing(
            Prometheus(tmp_path, service.url.removeprefix("http://"), authorization=credentials)
        ) as prometheus,
    ):
        prometheus.wait("scrape", lambda: prometheus.query('eplb_build_info{job="eplb"}'))
        assert prometheus.query("up == 1")


def test_configuration_of_the_page_is_one_of_prometheus(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: the configuration of the page is not checked")
    (tmp_path / "token").write_text(SCRAPE)
    text = files_of("docs/rest.md")["prometheus.yml"]
    named = text.replace("/etc/prometheus/eplb-metrics-token", str(tmp_path / "token"))
    (tmp_path / "prometheus.yml").write_text(named)

    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
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

        refused = httpx.get(url, timeout=None)
        found = httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=None)

        assert (refused.status_code, found.status_code) == (401, 200)
        assert "eplb_build_info{" in found.text
        assert serve.ends(signal.SIGTERM) == 0, serve.lines
