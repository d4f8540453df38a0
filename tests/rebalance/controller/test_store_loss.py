"""A store that lost its contents while ranks serve is written anew, once, and balancing goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.monitor.monitor import Monitor
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import StaleGeneration, StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.controller.lease import ControllerLease
from rebalance.transport.local import LocalTransport
from runtime.experts import ExpertBank, ExpertSchema
from telemetry.live import LiveSettings, LiveState
from telemetry.store import Control, LoadStore, RunInfo
from telemetry.stores.redis.connection.local_server import RedisProcess
from telemetry.stores.redis.store import RedisStore
from tests.support.agent_group import AgentGroup, QuickStore, digests_of, record_of

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
MODEL = ModelShape((0,), 4, 2, hidden=8, intermediate=4)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
START = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]]), num_experts=4)
TARGETS = [
    Placement(np.array([held]), num_experts=4)
    for held in ([0, 1, 2, 2, 3, 0], [0, 1, 3, 2, 3, 1], [0, 1, 2, 2, 3, 1])
]
RECORDS = {(0, expert): record_of(SCHEMA, 0, expert, 4) for expert in range(4)}
RUN = RunInfo("run", 5.0, model_to_dict(MODEL), topology_to_dict(TOPOLOGY), window_steps=4)
QUICK = "timeout_s=0.5&deadline_s=0.5&cool_down_s=0.05"


def kinds(store: LoadStore) -> list[str]:
    return [event.kind for event in store.events()]


def restore(store: LoadStore, **changed: Any) -> bool:
    given: dict[str, Any] = {
        "run": RUN,
        "placement": START.with_generation(7),
        "live": LiveState(4, live=LiveSettings(movement=False)),
        "last_plan_id": 41,
        "reason": "lost",
    }
    given |= changed
    run, placement, live = (given.pop(name) for name in ("run", "placement", "live"))
    return store.restore(run, placement, live, **given)


# -- in every store


def test_empty_store_is_restored_with_all_that_is_needed(store: LoadStore) -> None:
    assert restore(store)

    committed = store.committed()
    assert committed is not None
    assert (committed.placement.generation, committed.placement.hash) == (7, START.hash)
    assert (store.current_run(), store.control()) == (RUN, Control(movement=False))
    assert store.live().live == LiveSettings(movement=False)
    assert store.live().revision > 1000
    assert store.next_plan_id() > 1000
    assert kinds(store) == ["restore"]
    assert store.events()[0].detail["generation"] == 7
    assert store.commit(START.with_generation(8), expected=7, reason="next")


def test_of_all_ranks_that_restore_a_store_at_once_one_writes(store: LoadStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: restore(store, last_plan_id=n), range(8)))

    assert sorted(done) == [False] * 7 + [True]
    assert kinds(store) == ["restore"]
    assert store.runs() == [RUN]


def test_store_with_a_placement_or_another_run_is_not_restored(
    store: LoadStore, open_stores: Any
) -> None:
    other = open_stores("other")
    store.commit(START, expected=None, reason="first")
    other.begin_run(RunInfo("another", 6.0, RUN.model, RUN.topology, 4))

    assert not restore(store)
    assert not restore(other)

    assert store.control() == other.control() == Control()
    assert other.committed() is None


# -- ranks on a real server


class Group(AgentGroup):
    """Two ranks on a store of the test's."""

    def __init__(self, store: Any) -> None:
        super().__init__(START, TOPOLOGY)
        self.store.close()
        self.store: Any = store
        store.commit(START, expected=None, reason="start")
        store.begin_run(RUN)
        self.banks += [ExpertBank(SCHEMA, 1, 3, num_staging=4) for _ in range(2)]
        for rank in range(2):
            self.fill(rank, RECORDS)
            self.add(LocalTransport(TOPOLOGY, rank, self.banks, RECORDS), digests_of(RECORDS))

    def move(self, target: Placement) -> None:
        """Have a placement serve and committed."""
        before = self.generation()
        self.publish(target)
        self.step_until(lambda: self.generation() > before, "a commit")

    def wait_until_restored(self, times: int) -> None:
        def is_restored() -> bool:
            try:
                return kinds(self.store).count("restore") == times
            except StoreError:  # the ranks share this client, whose breaker may still be open
                return False

        self.step_until(is_restored, "the store written anew")


@contextmanager
def serving(server: RedisProcess) -> Iterator[Group]:
    with closing(RedisStore(f"{server.url}?{QUICK}", "test")) as store:
        group = Group(store)
        group.begin()
        try:
            yield group
        finally:
            group.close()


def lose(server: RedisProcess, how: str) -> None:
    if how == "FLUSHALL":
        server.ask("FLUSHALL")
    else:
        server.kill()
        server.start()


@pytest.mark.parametrize("how", ["FLUSHALL", "restarted without its files"])
def test_balancing_continues_after_a_store_lost_its_contents(tmp_path: Path, how: str) -> None:
    with RedisProcess(tmp_path) as server, serving(server) as group:
        group.move(TARGETS[0])
        group.store.set_control(Control(observe=True), reason="a test")
        # Every rank has heard of the switches before the loss.
        version = group.store.version()
        for _ in range(2):
            group.step_until(lambda: all(a.describe().phase == "idle" for a in group.agents))
            group.store.wait(version, 0.5)
        before = group.store.next_plan_id()

        lose(server, how)
        group.wait_until_restored(1)

        assert group.placement.hash == TARGETS[0].hash
        assert (group.generation(), group.store.control()) == (1, Control(observe=True))
        assert group.store.current_run() == RUN
        assert group.store.next_plan_id() > before
        group.move(TARGETS[1])
        assert group.placement.hash == TARGETS[1].hash
        assert [agent.describe().frozen for agent in group.agents] == ["", ""]
        assert kinds(group.store).count("restore") == 1


def test_store_lost_during_a_migration_is_restored_without_a_freeze(
    tmp_path: Path,
) -> None:
    with RedisProcess(tmp_path) as server, serving(server) as group:
        group.move(TARGETS[0])
        group.publish(TARGETS[1])
        group.step_until(lambda: any(agent.phase != "idle" for agent in group.agents), "adoption")

        server.ask("FLUSHALL")
        group.wait_until_restored(1)
        group.step_until(lambda: all(agent.phase == "idle" for agent in group.agents), "its end")
        group.step_until(
            lambda: (
                group.store.committed() is not None
                and group.generation() == group.placement.generation
            ),
            "what serves in the store",
        )

        group.move(TARGETS[2])
        assert [agent.describe().frozen for agent in group.agents] == ["", ""]


class LostWhileCommitting(QuickStore):
    """A store that is empty when the first commit after a swap comes, and restored right after."""

    def __init__(self, deployment: str) -> None:
        super().__init__(deployment)
        self.refused = 0

    def commit(self, placement: Placement, **given: Any) -> bool:
        if placement.generation > 0 and self.refused == 0:
            self.refused += 1
            raise StaleGeneration("generation 1 follows generation 0, found None committed")
        return super().commit(placement, **given)


def test_commit_refused_by_a_store_restored_since_is_retried() -> None:
    with closing(Group(LostWhileCommitting("test"))) as group:
        group.begin()
        group.move(TARGETS[0])

        assert group.store.refused == 1
        assert group.generation() == group.placement.generation == 1
        assert [agent.describe().frozen for agent in group.agents] == ["", ""]


class RestoredWhileCommitting(QuickStore):
    """A store that is empty when the first commit after a swap comes.

    Another rank, which serves the same placement, restores the store before this rank reads it.
    """

    def __init__(self, deployment: str) -> None:
        super().__init__(deployment)
        self.refused = 0

    def commit(self, placement: Placement, **given: Any) -> bool:
        is_new = super().commit(placement, **given)
        if placement.generation > 0 and self.refused == 0:
            self.refused += 1
            raise StaleGeneration("generation 1 follows generation 0, found None committed")
        return is_new


def test_commit_refused_by_a_store_restored_to_the_same_placement_is_done() -> None:
    with closing(Group(RestoredWhileCommitting("test"))) as group:
        group.begin()
        group.move(TARGETS[0])
        group.move(TARGETS[1])

        assert group.store.refused == 1
        assert group.generation() == group.placement.generation == 2
        assert [agent.describe().frozen for agent in group.agents] == ["", ""]


def test_token_from_before_a_store_loss_is_not_reused(
    tmp_path: Path,
) -> None:
    with RedisProcess(tmp_path) as server, closing(RedisStore(server.url, "test")) as store:
        tokens = []
        for _ in range(5):
            lease = store.acquire_lease("one", 30.0)
            assert lease is not None
            tokens.append(lease.token)
            server.ask("FLUSHALL")
        leader = ControllerLease(store, "two", 30.0)
        assert leader.is_held()

        assert len({*tokens, leader.token}) == 6
        assert leader.token >> 31 >= tokens[0] >> 31


def test_store_loss_has_its_own_anomaly_metric(store: LoadStore) -> None:
    monitor = Monitor(store)
    restore(store)

    monitor.refresh()

    assert monitor.snapshot().anomalies["store_lost"] == 1
