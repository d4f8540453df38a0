"""What is shown of whole processes: who is there, who is gone, and how long no token was served."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from eplb.versions import CONTROLLER, HOST_CACHE, LAUNCHER, RANKS, SERVICE
from rebalance.assembly.places import holder_of
from runtime.checkpoints.checkpoint import Checkpoint
from telemetry import open_store
from telemetry.state.events import outage_of
from telemetry.state.store import StateStore
from tests.support.deployments import OneHost
from tests.support.redis_servers import RedisProcess

pytestmark = pytest.mark.slow

EVERYBODY = sorted([CONTROLLER, HOST_CACHE, LAUNCHER, RANKS, SERVICE, CONTROLLER])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def wait_for(store: StateStore, is_so: Callable[[], bool]) -> None:
    while not is_so():
        store.wait(store.version(), 0.2)


def test_all_processes_announce_again_to_an_emptied_store_and_a_dead_one_is_told(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    server = stack.enter_context(RedisProcess(tmp_path / "redis"))
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    host.environ |= {"EPLB_STORE": server.url, "EPLB_SECRET": "0123456789abcdef" * 2}
    serve = host.start("eplb", "serve")
    serve.wait_for("eplb serve: http")
    host.start("eplb", "controller").wait_for("eplb controller: ready")
    host.start_cache()
    launch = host.start("eplb", "launch", "--", sys.executable, "engine.py")
    launch.wait_for("engine: generation 0 serves")
    store = stack.enter_context(closing(open_store(server.url, host.name)))

    def announced() -> list[str]:
        return sorted(one.component for one in store.announced())

    wait_for(store, lambda: announced() == EVERYBODY)
    server.ask("FLUSHALL")
    wait_for(store, lambda: announced() == EVERYBODY)

    killed = holder_of(host.name, 1)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    launch.wait_for("engine: generation", times=2)
    wait_for(store, lambda: any(one.kind == "outage" for one in store.events()))
    (outage,) = filter(None, map(outage_of, store.events()))
    (death,) = (one for one in store.events() if one.kind == "recovery")
    assert outage.start <= death.time <= outage.end
    assert outage.reason == death.detail["reason"]
    assert outage.unserved_s == pytest.approx(outage.end - outage.start, abs=0.001)

    serve.kill()
    told = f"no report from the service, process {serve.process.pid} on host "
    while told not in host.says("eplb", "status"):
        store.wait(store.version(), 1.0)
    assert launch.ends(signal.SIGTERM) == 0, launch.lines
    wait_for(store, lambda: LAUNCHER not in announced())  # it ended on purpose
