"""An engine whose plug-in cannot plan is balanced by the engine itself, on all ranks alike."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.engines.common.messages import SampleOrigin
from rebalance.engines.common.store_process import StoreProcess
from telemetry import open_store
from telemetry.state.events import ENGINE_PLANS
from telemetry.state.runs import RunInfo
from tests.support.engines import failing_planner
from tests.support.engines.gauge import value_of
from tests.support.engines.installed import engine
from tests.support.engines.ranks import (
    NAME,
    NUM_RANKS,
    config_in,
    on_all,
    on_ranks,
    wait_until,
)
from tests.support.limits import NEVER_S
from tests.support.redis_servers import RedisProcess, free_port

pytestmark = pytest.mark.slow
MAPS = 3  # by the engine's own balancer


def first_engine(url: str) -> StoreProcess:
    """Rank 0 of another engine, which has its run under the deployment's name."""
    shape, topology = ModelShape((0,), 2, 1, 1, 1), Topology.uniform(1, 1, 2)
    described = model_to_dict(shape), topology_to_dict(topology)
    info = RunInfo(f"{engine.NAME}-first", time.time(), *described, 64)
    made = StoreProcess(engine.NAME, SampleOrigin(NAME, url, 0, info))
    with closing(open_store(url, NAME)) as store:
        wait_until(store.current_run)
    return made


def left(rank: int, config: Path, folder: Path, port: int, fault: str) -> dict[str, Any]:
    """Maps while there is no store for this engine, or no plan, and after that."""
    os.environ[failing_planner.FAILS] = str(folder / "fails")
    server = RedisProcess(folder / "redis", {"port": str(port)}) if rank == 0 else None
    if server is not None and fault == "store":
        server.kill()
    if fault == "planner":
        (folder / "fails").touch()
        failing_planner.plant(engine.NAME)
    url = f"redis://127.0.0.1:{port}"
    first = first_engine(url) if server is not None and fault == "other engine" else None
    made = engine.make_rank(rank, config)
    start = made.held.copy()
    made.until(lambda: made.plugin.is_handed_back)
    gauge = value_of(engine.NAME, "policy")
    made.until_maps(MAPS)  # weights match the map after each pass
    found: dict[str, Any] = {"map": made.held.tolist(), "gauge": gauge}
    found["moved"] = int((made.held != start).sum())
    if server is not None and fault == "store":
        server.start()
    elif first is not None:
        first.close(NEVER_S)
    elif server is not None:
        (folder / "fails").unlink()
    on_all(True)
    while not on_all(rank == 0 and not made.plugin.is_handed_back):
        made.steps(1)
    made.until_maps(1)
    found |= {"back": value_of(engine.NAME, "policy"), "last": made.held.tolist()}
    made.close()
    if server is not None:
        with closing(open_store(url, NAME)) as store:
            events = list(store.events_backwards((ENGINE_PLANS,)))
            found["reasons"] = [event.detail["reason"] for event in reversed(events)]
        server.kill()
    return found


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("store", "the deployment's store has not answered"),
        ("other engine", "the deployment's store has not answered"),
        ("planner", "3 plans in a row failed"),
    ],
)
def test_engine_plans_while_the_plugin_cannot_and_no_longer(
    fault: str, why: str, tmp_path: Path
) -> None:
    port = free_port()
    settings: dict[str, Any] = {"deployment__store": f"redis://127.0.0.1:{port}"}
    if fault != "planner":  # else the start of the process at the store would take longer
        settings["engine__store_deadline_s"] = 0.5
    found = on_ranks(left, config_in(tmp_path, **settings), tmp_path, port, fault)

    assert all(one["map"] == found[0]["map"] for one in found)
    assert all(one["last"] == found[0]["last"] for one in found)
    assert found[0]["moved"] > 0
    assert [one["gauge"] for one in found] == [0.0] * NUM_RANKS
    assert [one["back"] for one in found] == [1.0] * NUM_RANKS
    handed_back, taken_back = found[0]["reasons"]
    assert handed_back.startswith(why)
    assert taken_back == ""
