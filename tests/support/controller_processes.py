"""Controllers as real processes over one store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

from rebalance.controller.loop import Controller, ControllerSettings
from telemetry import open_store
from telemetry.store import LoadStore

DEADLINE_S = 30.0


def control_until_killed(pipe: Connection, url: str, holder: str, ttl_s: float) -> None:
    """Run a controller from the first message on, until the process is killed."""
    pipe.recv()
    pipe.send(os.getpid())
    with closing(open_store(url, "test")) as store:
        settings = ControllerSettings(lease_ttl_s=ttl_s)
        Controller(store, settings, holder=holder).run(lambda: False, poll_s=0.05)


def wait_for(store: LoadStore, what: str, look: Callable[[], Any]) -> Any:
    """Look at the store with each of its changes, until something is found."""
    deadline, version = time.monotonic() + DEADLINE_S, -1
    while not (found := look()):
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S:g} s"
        version = store.wait(version, 0.2)
    return found
