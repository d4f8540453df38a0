"""Stores under test: one in memory for decisions, one of each kind for the contract that all keep.

``store`` is in memory. ``any_store`` is of each kind in turn; a cluster of Redis servers takes
part in ``make test-all``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from telemetry.state.memory import MemoryBackend
from telemetry.state.redis import RedisBackend
from telemetry.state.redis_address import Limits, RedisAddress
from telemetry.state.sqlite import SqliteBackend
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.repository import ROOT

# A busy server is waited for; what happens when one is not waited for has tests of its own.
PATIENT = Limits(
    connect_timeout_s=NEVER_S, timeout_s=NEVER_S, deadline_s=NEVER_S, breaker_failures=1_000_000
)


class MemoryStore(StateStore):
    """A store in memory, with the clocks of a test; ``clock`` alone is the monotonic one too."""

    def __init__(
        self, deployment: str, *, clock: Clock | None = None, monotonic: Clock | None = None
    ) -> None:
        self.backend = MemoryBackend(deployment, clock=clock)
        super().__init__(self.backend, monotonic=monotonic or clock)


def sqlite_store(
    path: str | Path,
    deployment: str,
    *,
    busy_timeout_s: float = 10.0,
    clock: Clock | None = None,
    monotonic: Clock | None = None,
) -> StateStore:
    """Open a store in a file, with the clocks of a test."""
    backend = SqliteBackend(path, deployment, busy_timeout_s=busy_timeout_s, clock=clock)
    return StateStore(backend, monotonic=monotonic or clock)


def redis_store(
    url: str | RedisAddress,
    deployment: str,
    *,
    clock: Clock | None = None,
    monotonic: Clock | None = None,
) -> StateStore:
    """Open a store on a server, with the clocks of a test."""
    return StateStore(RedisBackend(url, deployment, clock=clock), monotonic=monotonic or clock)


def make_sample(rank: int, sequence: int, /, **changes: Any) -> LoadSample:
    """A sample of one step, one layer and two slots; ``changes`` by the names of its fields."""
    fields: dict[str, Any] = {
        "deployment": "demo",
        "run": "run-1",
        "rank": rank,
        "sequence": sequence,
        "time": float(sequence),
        "first_step": sequence,
        "last_step": sequence,
        "phase": "decode",
        "generation": 1,
        "slot_to_expert": [[0, 1]],
        "tokens": [[rank, sequence]],
    }
    return LoadSample(**(fields | changes))


def make_placement(generation: int, held: list[int] | None = None) -> Placement:
    """A placement of three experts in four slots of one layer."""
    return Placement(np.array([held or [0, 1, 0, 2]]), num_experts=3, generation=generation)


def sequences(store: StateStore, run: str = "run-1") -> list[int]:
    """Sequences of all samples of a run, in order of arrival."""
    return [sample.sequence for _, sample in store.samples(run, limit=1_000_000)]


def kinds(store: StateStore) -> list[str]:
    """Kinds of all events, oldest first."""
    return [event.kind for event in store.events(limit=1_000_000)]


class StoreClock:
    """The clocks of the stores under test. They stand still until a test makes time pass.

    ``now`` is of the day, and may be set; ``passed`` only grows.
    """

    def __init__(self) -> None:
        self.now, self.passed = 1000.0, 0.0

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.passed


OpenStore = Callable[[str], StateStore]  # of a deployment; the same again sees the same store
Place = Callable[[pytest.FixtureRequest, StoreClock], OpenStore]


def _in_memory(_: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    opened: dict[str, StateStore] = {}
    return lambda deployment: opened.setdefault(
        deployment, MemoryStore(deployment, clock=clock, monotonic=clock.monotonic)
    )


def _in_sqlite(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    path = request.getfixturevalue("tmp_path") / "store.sqlite"
    return lambda deployment: sqlite_store(
        path, deployment, busy_timeout_s=NEVER_S, clock=clock, monotonic=clock.monotonic
    )


_prefixes = (f"eplb:test-{number}" for number in itertools.count())


def own_address(address: RedisAddress) -> RedisAddress:
    """A place that no other test has on a server that tests share."""
    return replace(address, prefix=next(_prefixes), limits=PATIENT)


def _on_server(address: RedisAddress, clock: StoreClock) -> OpenStore:
    own = own_address(address)
    return lambda deployment: redis_store(own, deployment, clock=clock, monotonic=clock.monotonic)


def documented_rules(password: str) -> str:
    """The rules of the user that docs/telemetry.md tells to set up."""
    page = (ROOT / "docs" / "telemetry.md").read_text()
    _, _, rules = page.partition("```text\nACL SETUSER eplb ")
    return " ".join(rules.partition("\n```")[0].split()).replace("PASSWORD", password)


def _in_redis(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    """As the documented user, who may do all that a store does, and no more."""
    server = request.getfixturevalue("redis_server")
    server.ask("ACL SETUSER", "eplb", *documented_rules("a-secret").split())
    return _on_server(replace(server.address, username="eplb", password="a-secret"), clock)


def _in_redis_cluster(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    return _on_server(request.getfixturevalue("redis_cluster").address, clock)


# One line for each kind: the tests of the contract run over all of these. The function opens
# stores; a fixture that it needs (a server, say) it asks of the request.
STORE_KINDS: dict[str, Place] = {
    "memory": _in_memory,
    "sqlite": _in_sqlite,
    "redis": _in_redis,
    "redis cluster": _in_redis_cluster,
}


@pytest.fixture
def store_clock() -> StoreClock:
    return StoreClock()


@pytest.fixture(
    params=[
        pytest.param(kind, marks=[pytest.mark.system] if kind == "redis cluster" else [])
        for kind in STORE_KINDS
    ]
)
def open_stores(request: pytest.FixtureRequest, store_clock: StoreClock) -> Iterator[OpenStore]:
    """Open stores of one place: ``open_stores(deployment)``, again for another look at the same."""
    place, opened = STORE_KINDS[request.param](request, store_clock), list[StateStore]()

    def open_one(deployment: str) -> StateStore:
        opened.append(place(deployment))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def any_store(open_stores: OpenStore) -> StateStore:
    """A new store of each kind, of the deployment "demo"."""
    return open_stores("demo")


@pytest.fixture
def store(store_clock: StoreClock) -> Iterator[StateStore]:
    """A new store in memory, of the deployment "demo"."""
    opened = MemoryStore("demo", clock=store_clock, monotonic=store_clock.monotonic)
    yield opened
    opened.close()


@pytest.fixture
def pass_time(store_clock: StoreClock) -> Callable[[float], None]:
    """Let seconds pass for stores."""

    def wait_for(seconds: float) -> None:
        store_clock.now += seconds
        store_clock.passed += seconds

    return wait_for
