"""Controllers as real processes over one store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

from rebalance.controller.loop import Controller, ControllerSettings
from telemetry import open_store
from telemetry.state.holder import new_holder
from telemetry.state.store import StateStore
from tests.support.processes import ForkedProcess


def control_until_killed(pipe: Connection, url: str, ttl_s: float) -> None:
    """Run a controller from the first message on, until the process is killed."""
    holder = new_holder()
    pipe.recv()
    pipe.send(holder)
    with closing(open_store(url, "test")) as store:
        settings = ControllerSettings(lease_ttl_s=ttl_s)
        Controller(store, settings, holder=holder).run(lambda: False, poll_s=0.05)


def begin(crew: list[ForkedProcess]) -> dict[str, ForkedProcess]:
    """Let forked controllers begin; return them by the name that each has in leases."""
    for controller in crew:
        controller.send("begin")
    return {controller.receive(): controller for controller in crew}


def wait_for(store: StateStore, look: Callable[[], Any]) -> Any:
    """Look at the store with each of its changes, until something is found."""
    version = -1
    while not (found := look()):
        version = store.wait(version, 0.2)
    return found
