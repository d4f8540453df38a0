"""The Redis store while a cluster changes under it: slots move, nodes die, replicas take over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from eplb.errors import StoreError
from telemetry.state.redis_address import Limits
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisClusterProcesses, RedisProcess
from tests.support.repository import ROOT
from tests.support.stores import PATIENT as ALWAYS_PATIENT
from tests.support.stores import kinds, make_sample, own_address, redis_store

pytestmark = pytest.mark.system

# Retried until the cluster has settled. A node that was killed answers nothing, and that must show.
PATIENT = replace(ALWAYS_PATIENT, timeout_s=Limits().timeout_s)
ONCE = replace(ALWAYS_PATIENT, deadline_s=0.001)


def slot_of(node: RedisProcess, deployment: str) -> str:
    return str(node.ask("CLUSTER KEYSLOT", f"{{{deployment}}}"))


def id_of(node: RedisProcess) -> str:
    found = node.ask("CLUSTER MYID")
    assert isinstance(found, bytes)
    return found.decode()


def owner(cluster: RedisClusterProcesses, deployment: str) -> RedisProcess:
    """The node that holds a deployment's keys."""
    (found,) = (node for node in cluster.nodes if node.ask("KEYS", f"*{{{deployment}}}*"))
    return found


def move_slot(
    source: RedisProcess, target: RedisProcess, slot: str, bystander: RedisProcess
) -> None:
    """Move a slot as ``redis-cli --cluster reshard`` does: open at both ends, key by key, close."""
    target.ask("CLUSTER SETSLOT", slot, "IMPORTING", id_of(source))
    source.ask("CLUSTER SETSLOT", slot, "MIGRATING", id_of(target))
    while keys := source.ask("CLUSTER GETKEYSINSLOT", slot, "1"):
        assert isinstance(keys, list)
        to = ("127.0.0.1", str(target.port), "", "0", "5000", "KEYS")
        source.ask("MIGRATE", *to, *keys)
    for node in (target, source, bystander):
        node.ask("CLUSTER SETSLOT", slot, "NODE", id_of(target))


class Writer:
    """Adds events and samples until told to stop."""

    def __init__(self, store: StateStore) -> None:
        self.events: list[int] = []
        self._store = store
        self._broken: StoreError | None = None
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_more(self, number: int = 20) -> None:
        with self._changed:
            most = len(self.events) + number
            self._changed.wait_for(lambda: len(self.events) >= most or self._broken)
            assert len(self.events) >= most, f"the writer stands still: {self._broken}"

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def check(self) -> None:
        """Everything written is there, once."""
        assert [event.id for event in self._store.events(limit=10**6)] == self.events
        assert self._store.sample_counts("run-1") == {0: len(self.events)}

    def _run(self) -> None:
        while not self._is_stopping and self._broken is None:
            try:
                self._store.append(
                    [make_sample(0, len(self.events), deployment=self._store.deployment)]
                )
                event = self._store.add_event("note", {})
            except StoreError as exc:
                self._broken = exc
            with self._changed:
                if self._broken is None:
                    self.events.append(event)
                self._changed.notify_all()


def test_slot_that_moves_to_another_node_under_writes_loses_nothing(
    redis_cluster: RedisClusterProcesses,
) -> None:
    address = replace(redis_cluster.address, limits=PATIENT)
    with closing(redis_store(address, "moving")) as store:
        writer = Writer(store)
        try:
            writer.wait_for_more()
            source = owner(redis_cluster, "moving")
            target, bystander = (node for node in redis_cluster.nodes if node is not source)
            move_slot(source, target, slot_of(source, "moving"), bystander)
            writer.wait_for_more()
        finally:
            writer.stop()

        writer.check()
        assert owner(redis_cluster, "moving") is target


def test_unreachable_cluster_and_a_wrong_password_are_errors(
    redis_cluster: RedisClusterProcesses,
) -> None:
    away = replace(redis_cluster.address, hosts=(("127.0.0.1", 1),), limits=ONCE)
    with pytest.raises(StoreError, match=r"redis\+cluster://127\.0\.0\.1:1 cannot be reached"):
        redis_store(away, "demo")
    wrong = replace(redis_cluster.address, username="nobody", password="wrong-secret")
    with pytest.raises(StoreError, match="login") as caught:
        redis_store(wrong, "demo")

    assert "secret" not in str(caught.value)


def test_cluster_node_under_a_server_url_is_an_error(redis_cluster: RedisClusterProcesses) -> None:
    found = []
    for node in redis_cluster.nodes:
        try:
            redis_store(node.url + "?prefix=single", "demo").close()
        except StoreError as exc:
            found.append(str(exc))

    # The node that holds the slot answers as any server would.
    assert len(found) == len(redis_cluster.nodes) - 1
    assert all("redis+cluster://" in told for told in found)


def test_all_keys_of_a_deployment_lie_in_one_slot(redis_cluster: RedisClusterProcesses) -> None:
    address = own_address(redis_cluster.address)
    with closing(redis_store(address, "r1-decode")) as store:
        store.add_event("note", {})
        store.append([make_sample(0, 0, deployment="r1-decode")])
    names = [node.ask("KEYS", f"{address.prefix}:*") for node in redis_cluster.nodes]

    assert [bool(held) for held in names].count(True) == 1


def test_user_of_the_docs_may_do_all_that_a_store_does(
    redis_cluster: RedisClusterProcesses,
) -> None:
    page = (ROOT / "docs" / "telemetry.md").read_text()
    _, _, rule = page.partition("ACL SETUSER eplb ")
    more = page.partition("For a cluster add `")[2].partition("`")[0]
    words = [
        *rule.partition("\n```")[0].replace("PASSWORD", "writer-secret").split(),
        *more.split(),
    ]
    for node in redis_cluster.nodes:
        node.ask("ACL SETUSER", "eplb", *words)

    login = replace(redis_cluster.address, username="eplb", password="writer-secret")
    with closing(redis_store(login, "guarded")) as store:
        assert store.add_event("note", {}) > 0
        assert store.append([make_sample(0, 0, deployment="guarded")]) == 1
        assert store.wait(store.version(), 0.0) == store.version()


# -- clusters that break


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisClusterProcesses]:
    with RedisClusterProcesses(tmp_path / "cluster") as started:
        yield started


@pytest.mark.slow
def test_cluster_with_a_missing_node_is_reported_and_used_after_recovery(
    cluster: RedisClusterProcesses,
) -> None:
    address = replace(cluster.address, limits=replace(PATIENT, deadline_s=0.5))
    with closing(redis_store(address, "demo")) as store:
        store.add_event("before", {})
        other = next(node for node in cluster.nodes if node is not owner(cluster, "demo"))
        other.kill()
        told = ""
        while "is down as a cluster" not in told:
            try:
                store.add_event("while one is away", {})
            except StoreError as exc:
                told = str(exc)

        other.start()
        cluster.wait_until_ok()
        assert store.events()[0].kind == "before"
        store.add_event("after", {})


@pytest.mark.slow
def test_replica_takes_over_after_the_primary_is_killed(
    cluster: RedisClusterProcesses, tmp_path: Path
) -> None:
    address = replace(cluster.address, limits=PATIENT)
    settings = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
    with (
        RedisProcess(tmp_path / "replica", settings) as replica,
        closing(redis_store(address, "demo")) as store,
    ):
        before = store.next_plan_id()
        primary = owner(cluster, "demo")
        replica.ask("CLUSTER MEET", "127.0.0.1", str(primary.port))
        wait_until(lambda: is_made_replica(replica, primary))
        store.add_event("before", {})
        wait_until(lambda: bool(replica.ask("KEYS", "*events")))
        for node in cluster.nodes:
            wait_until(partial(knows_a_replica, node))

        primary.kill()
        store.add_event("after", {})

        assert kinds(store) == ["before", "after"]
        assert store.next_plan_id() > before + 1000


def is_made_replica(replica: RedisProcess, primary: RedisProcess) -> bool:
    """Whether it has heard of the primary, and follows it."""
    try:
        replica.ask("CLUSTER REPLICATE", id_of(primary))
    except StoreError:
        return False
    return True


def knows_a_replica(node: RedisProcess) -> bool:
    known = node.ask("CLUSTER NODES")
    assert isinstance(known, dict)
    return any("slave" in found["flags"] for found in known.values())


def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        threading.Event().wait(0.05)
