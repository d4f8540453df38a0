"""A deployment that is planned by request, and the service of its store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from api.http.app import create_app
from telemetry import open_store
from tests.support.controlled_deployment import Deployment, planned_by_request
from tests.support.http import client_of
from tests.support.limits import NEVER_S


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with (
        closing(open_store(tmp_path / "store.sqlite", "test")) as store,
        planned_by_request(store) as served,
    ):
        yield served


@pytest.fixture
def client(deployment: Deployment, tmp_path: Path) -> Iterator[httpx.Client]:
    app = create_app(deployment.store, plan_wait_s=NEVER_S, state_dir=tmp_path)
    with client_of(app) as opened:
        yield opened
