"""One deployment of a name in a store: a second start is refused, joins, or follows a death."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from api.processes.deployment_lease import DeploymentLease
from eplb.errors import ConfigError, StoreError
from telemetry import open_store
from telemetry.store import LoadStore
from telemetry.stores.memory import MemoryStore
from telemetry.stores.redis.connection.local_server import RedisProcess

LONG_S, SHORT_S = 30.0, 0.3


@pytest.fixture(params=["memory", "sqlite", "redis", "redis cluster"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], LoadStore]]:
    """Open one store again and again, by the real clocks."""
    stores: list[LoadStore] = []
    shared = MemoryStore("demo")
    server = "redis_cluster" if request.param == "redis cluster" else "redis_server"
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    if request.param.startswith("redis"):
        url = f"{request.getfixturevalue(server).url}?prefix={tmp_path.name}"

    def open_again() -> LoadStore:
        stores.append(shared if request.param == "memory" else open_store(url, "demo"))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()


def test_second_start_is_refused_with_who_holds_the_deployment(
    opened: Callable[[], LoadStore],
) -> None:
    first = DeploymentLease(opened(), SHORT_S)
    first.take()

    with pytest.raises(ConfigError) as refused:
        DeploymentLease(opened(), SHORT_S).take()

    sentence = str(refused.value)
    assert f"process {os.getpid()} on host {socket.gethostname()} since 20" in sentence
    assert "(--join)" in sentence
    first.check()
    first.release()


def test_second_start_joins_on_purpose_and_the_first_stays_the_owner(
    opened: Callable[[], LoadStore],
) -> None:
    store = opened()
    first, second = DeploymentLease(store, LONG_S), DeploymentLease(opened(), LONG_S, joins=True)
    first.take()
    owner = store.lease("deployment")

    second.take()
    second.check()
    second.release()

    held = store.lease("deployment")
    assert owner is not None
    assert held is not None
    assert held.holder == owner.holder
    first.release()


def test_after_an_orderly_end_the_next_starts_at_once(opened: Callable[[], LoadStore]) -> None:
    first, second = DeploymentLease(opened(), LONG_S), DeploymentLease(opened(), LONG_S)
    first.take()
    first.release()

    second.take()

    second.check()
    second.release()


def hold(pipe: Connection, url: str, ttl_s: float) -> None:
    with closing(open_store(url, "demo")) as store:
        DeploymentLease(store, ttl_s).take()
        pipe.send("taken")
        pipe.recv()


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'store.sqlite'}"
    server: RedisProcess = request.getfixturevalue("redis_server")
    return f"{server.url}?prefix={tmp_path.name}"


def test_start_on_the_same_host_after_a_kill_need_not_wait(
    url: str, fork: Callable[..., Any]
) -> None:
    owner = fork(hold, url, LONG_S)
    assert owner.receive() == "taken"
    owner.kill()

    with closing(open_store(url, "demo")) as store:
        second = DeploymentLease(store, LONG_S)
        second.take()  # within the test's time limit, and not after LONG_S
        owners = [event.detail for event in store.events() if event.kind == "lease"]

        assert [detail["of"] for detail in owners] == ["deployment"] * 2
        assert owners[1]["token"] == owners[0]["token"] + 1
        second.release()


def test_overtaken_owner_ends_and_names_the_new_holder() -> None:
    store = MemoryStore("demo")
    first = DeploymentLease(store, SHORT_S)
    first.take()
    held = store.lease("deployment")
    assert held is not None
    assert store.release_lease(held)  # as if it had stood still for too long
    assert store.acquire_lease("host:1:another", LONG_S, "deployment") is not None
    for thread in threading.enumerate():
        if thread.name == "deployment-lease":
            thread.join(LONG_S)

    with pytest.raises(StoreError, match="was taken over by 'host:1:another'"):
        first.check()
    first.release()
