"""One deployment of a name in a store: a second start is refused, or follows a death."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from api.processes.deployment_lease import DeploymentLease
from eplb.errors import ConfigError, StoreError
from telemetry import open_store
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.redis_servers import RedisProcess
from tests.support.stores import OpenStore, StoreClock

# An owner renews at a sixth of the time to live. The clocks of stores stand still here: no lease
# runs out because its owner is late.
OFTEN_S = 0.3


def test_second_start_is_refused_with_who_holds_the_deployment(
    open_stores: OpenStore,
) -> None:
    first = DeploymentLease(open_stores("demo"), OFTEN_S)
    first.take()

    with pytest.raises(ConfigError) as refused:
        DeploymentLease(open_stores("demo"), OFTEN_S).take()

    sentence = str(refused.value)
    assert f"process {os.getpid()} on host {socket.gethostname()} since " in sentence
    first.check()
    first.release()


def test_after_an_orderly_end_the_next_starts_at_once(open_stores: OpenStore) -> None:
    first, second = (DeploymentLease(open_stores("demo"), NEVER_S) for _ in range(2))
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
    owner = fork(hold, url, NEVER_S)
    assert owner.receive() == "taken"
    owner.kill()

    with closing(open_store(url, "demo")) as store:
        second = DeploymentLease(store, NEVER_S)
        second.take()
        owners = [event.detail for event in store.events() if event.kind == "lease"]

        assert [detail["of"] for detail in owners] == ["deployment"] * 2
        assert owners[1]["token"] == owners[0]["token"] + 1
        second.release()


def test_overtaken_owner_ends_and_names_the_new_holder(
    store: StateStore, store_clock: StoreClock
) -> None:
    first = DeploymentLease(store, OFTEN_S)
    first.take()
    while store.acquire_lease("host:1:another", NEVER_S, "deployment") is None:
        store_clock.passed += OFTEN_S  # until it is not renewed in between
    for thread in threading.enumerate():
        if thread.name == "deployment-lease":
            thread.join()

    with pytest.raises(StoreError, match="'host:1:another'"):
        first.check()
    first.release()
