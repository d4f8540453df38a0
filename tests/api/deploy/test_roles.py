"""``eplb controller``, ``eplb host-cache`` and ``eplb serve`` as processes of one host."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from api.deploy.deployment import Deployment
from api.deploy.first_placement import ensure_first_placement
from api.deploy.launch import Launch, prepare_store
from api.deploy.roles import run_host_cache
from api.deploy.serve import serve
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import EplbError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from runtime.checkpoints.checkpoint import Checkpoint
from telemetry import open_store
from telemetry.state.events import WAITING, Event
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.deployments import OneHost, deployment_in
from tests.support.sessions import pids_of

SECRET = "0123456789abcdef0123456789abcdef"
MODEL = ModelShape((0, 1), 8, 2, hidden=16, intermediate=8)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


@pytest.fixture
def host(tmp_path: Path, small_checkpoint: Checkpoint) -> Iterator[OneHost]:
    with ExitStack() as stack:
        yield OneHost(stack, tmp_path, small_checkpoint.path)


@pytest.fixture
def store(host: OneHost) -> Iterator[StateStore]:
    (host.folder / ".eplb").mkdir()
    with closing(open_store(host.folder / ".eplb" / "store.sqlite", host.name)) as opened:
        yield opened


def next_event(store: StateStore, is_it: Callable[[Event], bool], after: int = 0) -> Event:
    """Wait for an event."""
    while True:
        version = store.version()
        for event in store.events(after=after, limit=10_000):
            if is_it(event):
                return event
        store.wait(version, 0.5)


def leads(event: Event) -> bool:
    found = (event.kind, event.detail.get("of"), event.detail.get("state"))
    return found == ("lease", "controller", "leads")


def begin_run(store: StateStore) -> None:
    """A controller leads ranks that have begun to serve."""
    shapes = model_to_dict(MODEL), topology_to_dict(Topology.uniform(1, 2, 5))
    store.begin_run(RunInfo("a", time.time(), *shapes, window_steps=4))


@pytest.mark.slow
def test_controller_of_serve_is_started_again_after_it_was_killed(
    host: OneHost, store: StateStore
) -> None:
    serve = host.start("eplb", "serve")
    serve.wait_for("eplb serve: wrote the first placement, generation 0")
    begin_run(store)
    first = next_event(store, leads)

    os.kill(pids_of(serve.process.pid, "controller")[0], signal.SIGKILL)
    death = next_event(store, lambda one: one.kind == "error")
    third = host.start("eplb", "controller")
    third.wait_for(f"eplb controller: ready for {host.name} in ")

    assert death.detail["where"] == "the controller"
    assert death.detail["message"].startswith("the controller was killed by SIGKILL; restarting")
    while not pids_of(serve.process.pid, "controller"):  # it sets its title once it is imported
        threading.Event().wait(0.05)
    assert serve.ends(signal.SIGTERM) == 0, serve.lines
    holder = first.detail["holder"]  # the other stood by until this one gave the lease up
    next_event(store, lambda one: leads(one) and one.detail["holder"] != holder, after=death.id)
    assert third.ends(signal.SIGTERM) == 0, third.lines
    lease = store.lease()
    assert lease is None or not lease.ttl_s


@pytest.mark.slow
def test_second_host_cache_and_another_secret_are_refused(host: OneHost) -> None:
    host.start_cache()
    serve = host.start("eplb", "serve")
    serve.wait_for("eplb serve: wrote the first placement")

    second = host.start("eplb", "host-cache")
    other = host.start("eplb", "controller", EPLB_SECRET=SECRET)

    assert second.ends() == 2
    words = f"eplb: the host cache {host.name}-host0-127.0.0.1 cannot listen: process "
    assert second.lines[-1].startswith(words), second.lines
    assert other.ends() == 2
    assert "was started with a secret of fingerprint " in other.lines[-1], other.lines
    assert SECRET not in other.lines[-1]


@pytest.mark.slow
def test_host_cache_of_a_half_copied_checkpoint_starts_once_the_copy_is_whole(
    host: OneHost, store: StateStore, small_checkpoint: Checkpoint
) -> None:
    weights = host.folder / "copy"
    shutil.copytree(small_checkpoint.path, weights)
    checkpoint = {"EPLB_MODEL__CHECKPOINT": str(weights)}
    begin_run(store)  # ranks have served, and those that start wait for the cache
    file = max(weights.glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])

    alone = host.start("eplb", "host-cache", **checkpoint)
    supervised = host.start("eplb", "host-cache", NOTIFY_SOCKET="@nobody", **checkpoint)
    assert alone.ends() == 2, alone.lines
    supervised.wait_for(f"trying again once {weights} or eplb.toml changes")
    told = next_event(store, lambda event: event.kind == WAITING)
    file.write_bytes(whole)
    supervised.wait_for("ready: 16 records")

    assert told.detail["message"].startswith("host cache of host 0 waits for a change of ")
    assert str(file) in told.detail["message"]
    assert supervised.ends(signal.SIGTERM) == 0, supervised.lines


@pytest.mark.slow
def test_port_of_the_http_service_in_use_is_refused(host: OneHost) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        serve = host.start("eplb", "serve", "--setting", f"http.port={port}")
        status = serve.ends()

    assert status == 2
    (line,) = serve.lines
    assert line.startswith(f"eplb: port {port} of 127.0.0.1 (http.port, http.host) ")
    assert not (host.folder / ".eplb" / "store.sqlite").exists()


@pytest.mark.parametrize("start", ["serve", "launch", "host-cache"])
@pytest.mark.parametrize(
    ("changes", "environ", "refusal"),
    [
        ({}, {"EPLB_SECRET": SECRET}, "was started with a secret of fingerprint"),
        ({"model__checkpoint": "other"}, {}, "has other bytes, of tensor"),
    ],
    ids=["another secret", "another checkpoint"],
)
def test_start_that_a_store_refuses_writes_nothing_to_it(
    tmp_path: Path,
    small_checkpoint: Checkpoint,
    start: str,
    changes: dict[str, Any],
    environ: dict[str, str],
    refusal: str,
) -> None:
    weights = shutil.copytree(small_checkpoint.path, tmp_path / "other")
    with sorted(weights.glob("*.safetensors"))[0].open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))
    known = deployment_in(tmp_path, model__checkpoint=small_checkpoint.path)
    given = {"model__checkpoint": small_checkpoint.path, "planner__pay_back_s": 77.0} | changes
    if "model__checkpoint" in changes:
        given["model__checkpoint"] = weights
    other = deployment_in(tmp_path, environ, **given)
    with closing(known.opened_store()) as store:
        ensure_first_placement(store, known, "eplb serve")
        before = contents(store)

        with pytest.raises(EplbError, match=refusal):
            START[start](other)

        assert contents(store) == before


START: dict[str, Callable[[Deployment], object]] = {
    "serve": lambda deployment: serve(deployment, ["true"], print),
    "launch": lambda deployment: prepare_store(Launch(deployment, 0, ["true"], {})),
    "host-cache": lambda deployment: run_host_cache(deployment, 0, print),
}


def contents(store: StateStore) -> list[Any]:
    """What a start may write."""
    placed = [(one.placement.generation, one.reason) for one in store.placements()]
    return [store.events(), store.live(), placed, store.announced()]
