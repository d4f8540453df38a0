"""A deployment that serves skewed load, and the service of its store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from telemetry import open_store
from telemetry.state.store import StateStore
from tests.support.controlled_deployment import SKEWED, START, Deployment, planned_by_request
from tests.support.http import client_of
from tests.support.limits import NEVER_S
from tests.support.stores import MemoryStore


def serving_in(store: StateStore) -> Deployment:
    store.commit(START, expected=None, reason="start")
    served = Deployment(store)
    served.serve(SKEWED)
    return served


@pytest.fixture
def deployment() -> Deployment:
    """Its ranks serve, and no controller is at work."""
    return serving_in(MemoryStore("test"))


@pytest.fixture
def client(deployment: Deployment, tmp_path: Path) -> Iterator[httpx.Client]:
    with client_of(create_app(deployment.store, plan_wait_s=0.0, state_dir=tmp_path)) as opened:
        yield opened


@pytest.fixture
def planned() -> Iterator[Deployment]:
    """A controller plans for it by request."""
    with planned_by_request(MemoryStore("test")) as served:
        yield served


@pytest.fixture
def planning_client(planned: Deployment, tmp_path: Path) -> Iterator[httpx.Client]:
    with client_of(create_app(planned.store, plan_wait_s=NEVER_S, state_dir=tmp_path)) as opened:
        yield opened


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[list[str]]:
    """Options of a command that name the deployment in a store of this host."""
    path = tmp_path / "store.sqlite"
    with closing(open_store(path, "test")) as store:
        serving_in(store)
        yield ["--store", str(path), "--deployment", "test"]
