"""A store that lost its contents while ranks serve is written anew, once, and balancing goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
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
from runtime.experts import ExpertSchema
from telemetry.state.live import Control
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.agent_group import AgentGroup, QuickStore, records_of
from tests.support.limits import NEVER_S
from tests.support.redis_servers import RedisProcess
from tests.support.stores import redis_store

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
MODEL = ModelShape((0,), 4, 2, hidden=8, intermediate=4)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
START = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]]), num_experts=4)
TARGETS = [
    Placement(np.array([held]), num_experts=4)
    for held in ([0, 1, 2, 2, 3, 0], [0, 1, 3, 2, 3, 1], [0, 1, 2, 2, 3, 1])
]
RECORDS = records_of(SCHEMA, 1, 4)
RUN = RunInfo("run", 5.0, model_to_dict(MODEL), topology_to_dict(TOPOLOGY), window_steps=4)


def kinds(store: StateStore) -> list[str]:
    return [event.kind for event in store.events()]


class Group(AgentGroup):
    """Two ranks on a store of the test's."""

    def __init__(self, store: Any) -> None:
        super().__init__(START, TOPOLOGY)
        self.store.close()
        self.store: Any = store
        store.commit(START, expected=None, reason="start")
        store.begin_run(RUN)
        self.add_all(SCHEMA, RECORDS, num_staging=4)

    def move(self, target: Placement) -> None:
        """Have a placement serve and committed."""
        before = self.generation()
        self.publish(target)
        self.step_until(lambda: self.generation() > before)

    def is_restored(self) -> bool:
        try:
            return kinds(self.store).count("restore") == 1
        except StoreError:  # the ranks share this client, whose breaker may still be open
            return False

    def is_settled(self) -> bool:
        """No plan is under way, and the store names what serves."""
        if any(agent.phase != "idle" for agent in self.agents) or self.store.committed() is None:
            return False
        return self.generation() == self.placement.generation

    def frozen(self) -> str:
        return "".join(agent.describe().frozen for agent in self.agents)


Losing = tuple[Any, Callable[[], object]]  # a store, and what empties it
FAR_OFF = f"connect_timeout_s={NEVER_S}&timeout_s={NEVER_S}&deadline_s={NEVER_S}&cool_down_s=0.05"


@pytest.fixture(
    params=[
        "memory",
        pytest.param("redis, FLUSHALL", marks=pytest.mark.system),
        pytest.param("redis, restarted without its files", marks=pytest.mark.system),
    ]
)
def losing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Losing]:
    if request.param == "memory":
        store = QuickStore("test")
        yield store, store.backend.lose
        return
    with (
        RedisProcess(tmp_path) as server,
        closing(redis_store(f"{server.url}?{FAR_OFF}", "test")) as on_server,
    ):

        def restart() -> None:
            server.kill()
            server.start()

        is_flush = "FLUSHALL" in request.param
        yield on_server, (lambda: server.ask("FLUSHALL")) if is_flush else restart


def test_balancing_continues_after_a_store_lost_its_contents(losing: Losing) -> None:
    store, lose = losing
    with closing(Group(store)) as group:
        store.set_control(Control(observe=True), reason="a test")
        group.begin()
        group.move(TARGETS[0])
        before = store.next_plan_id()

        lose()
        group.step_until(group.is_restored)

        assert group.placement.hash == TARGETS[0].hash
        assert (group.generation(), store.control()) == (1, Control(observe=True))
        assert store.current_run() == RUN
        assert store.next_plan_id() > before
        group.move(TARGETS[1])
        assert group.placement.hash == TARGETS[1].hash
        assert (group.frozen(), kinds(store).count("restore")) == ("", 1)
        monitor = Monitor(store)
        monitor.refresh()
        assert monitor.reading().counts.total("anomalies", "store_lost") == 1


def test_store_lost_before_the_first_look_of_a_rank_is_restored(losing: Losing) -> None:
    store, lose = losing
    store.set_control(Control(observe=True), reason="a test")
    with closing(Group(store)) as group:
        lose()  # as while experts load, which no rank reports from
        group.begin()
        group.step_until(group.is_restored)

        assert store.current_run() == RUN
        assert store.control() == Control(observe=True)
        group.move(TARGETS[0])
        assert group.frozen() == ""


def test_store_that_lost_its_contents_and_got_a_first_placement_is_restored(
    losing: Losing,
) -> None:
    store, lose = losing
    with closing(Group(store)) as group:
        group.begin()
        group.move(TARGETS[0])

        lose()
        # As a service does that has waited for the store.
        first = TARGETS[1].with_generation(0)
        group.step_until(lambda: wrote(store, first))
        group.step_until(group.is_restored)

        assert group.placement.hash == TARGETS[0].hash
        assert store.current_run() == RUN
        group.move(TARGETS[2])
        assert group.frozen() == ""


def wrote(store: Any, first: Placement) -> bool:
    """Whether the store has a placement, after a first one was offered to it."""
    try:
        if store.committed() is None:
            store.commit(first, expected=None, reason="first placement")
        return True
    except StoreError:  # it is not back, or a rank was first
        return False


def test_store_lost_during_a_migration_is_restored_without_a_freeze(losing: Losing) -> None:
    store, lose = losing
    with closing(Group(store)) as group:
        group.begin()
        group.move(TARGETS[0])
        group.publish(TARGETS[1])
        group.step_until(lambda: any(agent.phase != "idle" for agent in group.agents))

        lose()
        group.step_until(group.is_restored)
        group.step_until(group.is_settled)

        group.move(TARGETS[2])
        assert group.frozen() == ""


class ForgetfulStore(QuickStore):
    """A store that can go back to what it remembered, and gives no id out again."""

    def remember(self) -> None:
        with self.backend._lock:
            self._kept = self.backend._database.serialize()

    def go_back(self) -> None:
        with self.backend._lock:  # threads of the ranks read over the same connection
            self.backend._database.deserialize(self._kept)
        self.backend.decide("ids", lambda c: c.give_out("plan_id", c.last("plan_id") + 1000))


GoingBack = tuple[Any, Callable[[], object], Callable[[], object]]  # a store; remember; go back


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.system)])
def going_back(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GoingBack]:
    if request.param == "memory":
        store = ForgetfulStore("test")
        yield store, store.remember, store.go_back
        return
    with (
        RedisProcess(tmp_path) as server,
        closing(redis_store(f"{server.url}?{FAR_OFF}", "test")) as on_server,
    ):

        def restart() -> None:
            server.kill()
            server.start()  # it reads what it saved

        yield on_server, (lambda: server.ask("SAVE")), restart


def is_back(group: Group) -> bool:
    """Whether the store names what serves, whatever it forgot."""
    try:
        return group.is_settled()
    except StoreError:  # as in Group.is_restored
        return False


def test_store_that_went_back_has_what_serves_again_and_balancing_continues(
    going_back: GoingBack,
) -> None:
    store, remember, go_back = going_back
    with closing(Group(store)) as group:
        group.begin()
        group.move(TARGETS[0])
        remember()
        group.move(TARGETS[1])
        group.move(TARGETS[2])

        go_back()
        group.step_until(lambda: is_back(group))

        assert group.placement.hash == TARGETS[2].hash
        group.move(TARGETS[0])
        assert group.frozen() == ""
        (told,) = (e for e in store.events() if "went back" in str(e.detail.get("reason")))
        assert told.detail["generation"] == 3


def test_store_that_went_back_during_a_migration_has_its_end(going_back: GoingBack) -> None:
    store, remember, go_back = going_back
    with closing(Group(store)) as group:
        group.begin()
        group.move(TARGETS[0])
        remember()
        group.move(TARGETS[1])
        group.publish(TARGETS[2])
        group.step_until(lambda: any(agent.phase != "idle" for agent in group.agents))

        go_back()
        group.step_until(lambda: is_back(group))

        group.move(TARGETS[0])
        assert group.frozen() == ""


class LostWhileCommitting(QuickStore):
    """A store that is empty when the first commit after a swap comes, and restored right after.

    ``by_another``: by a rank that serves the same placement already.
    """

    by_another = False
    num_refused = 0

    def commit(self, placement: Placement, **given: Any) -> bool:
        if placement.generation == 0 or self.num_refused:
            return super().commit(placement, **given)
        self.num_refused += 1
        if self.by_another:
            super().commit(placement, **given)
        raise StaleGeneration("generation 1 follows generation 0, found None committed")


@pytest.mark.parametrize("by_another", [False, True])
def test_commit_refused_by_a_store_restored_since_is_retried_unless_it_is_done(
    by_another: bool,
) -> None:
    store = LostWhileCommitting("test")
    store.by_another = by_another
    with closing(Group(store)) as group:
        group.begin()
        group.move(TARGETS[0])
        group.move(TARGETS[1])

        assert store.num_refused == 1
        assert group.generation() == group.placement.generation == 2
        assert group.frozen() == ""


@pytest.mark.system
def test_token_from_before_a_store_loss_is_not_reused(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server, closing(redis_store(server.url, "test")) as store:
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
