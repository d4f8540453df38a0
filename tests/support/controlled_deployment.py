"""A deployment as its controller sees it: what its ranks would write to a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from eplb.core.load import LoadSample, Phase
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.migration.build import Migration
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.controller.loop import Controller, ControllerSettings
from telemetry.state.events import Event
from telemetry.state.live import Control
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from telemetry.state.tasks import Task
from tests.support.rank_reports import rank_report

# One layer of four experts over two ranks of three slots: one spare slot each.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
MODEL = ModelShape((0,), 4, 2, hidden=16, intermediate=8)
START = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]]), num_experts=4)
WINDOW_STEPS = 4
EVEN = [25_000, 25_000, 25_000, 25_000]
SKEWED = [60_000, 20_000, 10_000, 10_000]  # rank 0 gets 80 %: imbalance 1.6
SETTINGS = ControllerSettings(migration_deadline_s=30.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Deployment:
    """What the ranks would do to the store."""

    def __init__(
        self,
        store: StateStore,
        run: str = "run-1",
        window_seconds: float = 0.0,
        topology: Topology = TOPOLOGY,
        model: ModelShape = MODEL,
        clock: Clock | None = None,
    ) -> None:
        self.store, self.run, self.next_window = store, run, 0
        self.clock = clock or Clock()  # of its controllers
        self.topology = topology
        described = model_to_dict(model), topology_to_dict(topology)
        store.begin_run(RunInfo(run, 1.0, *described, WINDOW_STEPS, window_seconds))
        for rank in range(topology.num_ranks):
            store.report(rank_report(run, rank))

    def controller(
        self, *, holder: str = "one", monotonic: Clock | None = None, **changes: Any
    ) -> Controller:
        """Make a controller that is told the time by the test, with changes of ``SETTINGS``."""
        settings, clock = replace(SETTINGS, **changes), self.clock
        return Controller(
            self.store, settings, holder=holder, clock=clock, monotonic=monotonic or clock
        )

    def serve(
        self,
        load: list[int] | list[list[int]],
        *,
        windows: int = 1,
        silent: int | None = None,
        phase: Phase = "mixed",
    ) -> None:
        """Report windows in which each expert got ``load`` tokens; a silent rank reports none.

        Args:
            load: of every layer, or a list for each.
        """
        committed = self.store.committed()
        assert committed is not None
        placement = committed.placement
        held = np.maximum(placement.slot_to_expert, 0)
        of_layer = np.broadcast_to(load, (len(held), placement.num_experts))
        tokens = np.take_along_axis(of_layer, held, axis=1) * placement.slot_share
        for _ in range(windows):
            samples = [
                self.sample(rank, placement, tokens) for rank in self.ranks if rank != silent
            ]
            self.store.append([replace(sample, phase=phase) for sample in samples])
            self.next_window += 1

    def decide_on(self, controller: Controller, load: Any, **served: Any) -> None:
        """Report windows as ``serve`` does, and give a controller its turn."""
        self.serve(load, **served)
        controller.turn()

    @property
    def ranks(self) -> range:
        return range(self.topology.num_ranks)

    def sample(self, rank: int, placement: Placement, tokens: Any, **changes: int) -> LoadSample:
        first = self.next_window * WINDOW_STEPS
        sample = LoadSample(
            self.store.deployment,
            self.run,
            rank,
            self.next_window,
            float(first),
            first,
            first + WINDOW_STEPS - 1,
            "mixed",
            placement.generation,
            placement.slot_to_expert[:, self.topology.slots_on(rank)],
            tokens[:, self.topology.slots_on(rank)].astype(np.int64),
        )
        return replace(sample, **changes)

    def swap(self) -> Migration:
        """Commit the open migration as the ranks do after their swap."""
        migration = self.published()
        self.store.commit(
            migration.target,
            expected=migration.base.generation,
            plan_id=migration.plan_id,
            reason="swapped",
        )
        return migration

    def published(self) -> Migration:
        migration = self.store.published()
        assert migration is not None
        return migration

    def task(self, task_id: int) -> Task:
        found = self.store.task(task_id)
        assert found is not None
        return found

    def last_plan(self) -> dict[str, Any]:
        """What was recorded of the latest decision."""
        return dict(events(self.store, "plan")[-1].detail)


@contextmanager
def planned_by_request(store: StateStore, model: ModelShape = MODEL) -> Iterator[Deployment]:
    """Give ranks that served skewed load, with a controller at work that plans when it is asked.

    Movement is off, so that it publishes no plan of its own.
    """
    start = Placement(np.repeat(START.slot_to_expert, model.num_layers, axis=0), num_experts=4)
    store.commit(start, expected=None, reason="start")
    served = Deployment(store, model=model)
    served.serve(SKEWED)
    store.set_control(Control(movement=False), reason="no plan of its own")
    controller = Controller(store, replace(SETTINGS, stage="propose", task_expiry_s=0.0))
    controller.turn()
    stopping = threading.Event()
    thread = threading.Thread(target=controller.run, args=(stopping.is_set,))
    thread.start()
    try:
        yield served
    finally:
        stopping.set()
        thread.join()


def events(store: StateStore, kind: str) -> list[Event]:
    return [event for event in store.events() if event.kind == kind]


def decisions(store: StateStore) -> list[str]:
    return [event.detail["decision"] for event in events(store, "plan")]


def worked_off(deployment: Deployment, kind: str = "rebalance", **request: object) -> Task:
    task = deployment.store.submit(kind, request)
    # The age of a task is by one clock.
    Controller(deployment.store, SETTINGS, holder="one", clock=lambda: task.time).turn()
    return deployment.task(task.id)
