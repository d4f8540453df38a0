"""What tests of controllers share: a deployment by one clock, and the stores of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.controlled_deployment import START, Clock, Deployment
from tests.support.redis_servers import RedisProcess
from tests.support.stores import MemoryStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def deployment(clock: Clock) -> Deployment:
    store = MemoryStore("test", clock=clock)
    store.commit(START, expected=None, reason="start")
    return Deployment(store, clock=clock)


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'store.sqlite'}"
    server: RedisProcess = request.getfixturevalue("redis_server")
    return f"{server.url}?prefix={tmp_path.name}"
