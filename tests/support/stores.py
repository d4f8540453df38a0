"""Stores under test: one in memory for decisions, one of each kind for the contract that all keep.

``store`` is in memory. ``any_store`` is of each kind in turn; a cluster of Redis servers takes
part in ``make test-all``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from telemetry.store import LoadStore
from telemetry.stores.memory import MemoryStore
from telemetry.stores.redis.connection.address import RedisAddress
from telemetry.stores.redis.store import RedisStore
from telemetry.stores.sqlite.store import SqliteStore


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


OpenStore = Callable[[str], LoadStore]  # of a deployment; the same again sees the same store
Place = Callable[[pytest.FixtureRequest, StoreClock], OpenStore]


def _in_memory(_: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    opened: dict[str, LoadStore] = {}
    return lambda deployment: opened.setdefault(
        deployment, MemoryStore(deployment, clock=clock, monotonic=clock.monotonic)
    )


def _in_sqlite(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    path = request.getfixturevalue("tmp_path") / "store.sqlite"
    return lambda deployment: SqliteStore(path, deployment, clock=clock, monotonic=clock.monotonic)


_prefixes = (f"test-{number}" for number in itertools.count())


def _on_server(address: RedisAddress, clock: StoreClock) -> OpenStore:
    """Open stores on a server that tests share, under a prefix that no other test has."""
    own = replace(address, prefix=next(_prefixes))
    return lambda deployment: RedisStore(own, deployment, clock=clock, monotonic=clock.monotonic)


def _in_redis(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    return _on_server(request.getfixturevalue("redis_server").address, clock)


def _in_redis_cluster(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    return _on_server(request.getfixturevalue("redis_cluster").address, clock)


@dataclass(frozen=True)
class StoreKind:
    """A kind of store under test.

    ``place`` makes the function that opens stores; a fixture that it needs (a server, say) it asks
    of the request. Where leases follow a server's clock, time passes by waiting.
    """

    place: Place
    has_own_clock: bool = False


# One line for each kind: the tests of the contract run over all of these.
STORE_KINDS = {
    "memory": StoreKind(_in_memory),
    "sqlite": StoreKind(_in_sqlite),
    "redis": StoreKind(_in_redis),
    "redis cluster": StoreKind(_in_redis_cluster),
}


@pytest.fixture(
    params=[
        pytest.param(kind, marks=[pytest.mark.system] if kind == "redis cluster" else [])
        for kind in STORE_KINDS
    ]
)
def store_kind(request: pytest.FixtureRequest) -> StoreKind:
    return STORE_KINDS[request.param]


@pytest.fixture
def store_clock() -> StoreClock:
    return StoreClock()


@pytest.fixture
def open_stores(
    request: pytest.FixtureRequest, store_kind: StoreKind, store_clock: StoreClock
) -> Iterator[OpenStore]:
    """Open stores of one place: ``open_stores(deployment)``, again for another look at the same."""
    place, opened = store_kind.place(request, store_clock), list[LoadStore]()

    def open_one(deployment: str) -> LoadStore:
        opened.append(place(deployment))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def any_store(open_stores: OpenStore) -> LoadStore:
    """A new store of each kind, of the deployment "demo"."""
    return open_stores("demo")


@pytest.fixture
def store(store_clock: StoreClock) -> Iterator[LoadStore]:
    """A new store in memory, of the deployment "demo"."""
    opened = MemoryStore("demo", clock=store_clock, monotonic=store_clock.monotonic)
    yield opened
    opened.close()


@pytest.fixture
def pass_time(store_kind: StoreKind, store_clock: StoreClock) -> Callable[[float], None]:
    """Let seconds pass for stores; few, because some kinds of store really wait."""

    def wait_for(seconds: float) -> None:
        store_clock.now += seconds
        store_clock.passed += seconds
        if store_kind.has_own_clock:
            threading.Event().wait(seconds)

    return wait_for
