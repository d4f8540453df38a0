"""What tests of controllers as real processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from telemetry.stores.redis.connection.local_server import RedisProcess


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'store.sqlite'}"
    server: RedisProcess = request.getfixturevalue("redis_server")
    return f"{server.url}?prefix={tmp_path.name}"
