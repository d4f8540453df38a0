"""The thread of a rank that talks to the store; a store that is gone costs the engine nothing.

Samples wait in memory, or in the spool of ``telemetry.spool_dir``. Rank 0 also holds the
controller's lease, works off tasks of kind ``rebalance``, obeys the deployment's switches, and
writes the maps that serve. While another controller holds the lease, tasks are left to it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import EplbError, StaleGeneration
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.versions import CONTROLLER, Announcement
from rebalance.engines.common.gauge import set_part
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.sglang.planner.link import MOST_WAITING, Outcome, PlannerLink, Question
from rebalance.engines.sglang.windows import Shape, Window
from rebalance.engines.switches import why_kept, why_refused
from telemetry import open_store
from telemetry.load.reporter import Reporter
from telemetry.load.spool import Spool
from telemetry.state.lease import Lease
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from telemetry.state.tasks import TaskResult

log = logging.getLogger(__name__)

TICK_S = 0.1
MOST_EVENTS = 1000  # while the store does not answer
LEASE_S = 30.0
BACK_OFF_S = 2.0  # from one failure of the store to the next try


class StoreLink:
    """Samples and placements out, tasks and switches in; other threads only append to queues."""

    def __init__(self, settings: PluginSettings, shape: Shape, planner: PlannerLink | None) -> None:
        self._settings, self._shape, self._planner = settings, shape, planner
        self._windows: deque[Window] = deque(maxlen=MOST_WAITING)
        self.placements: deque[tuple[Placement, str, Question | None]] = deque()
        self.events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_EVENTS)
        self._sequence = 0
        self._store: StateStore | None = None
        self._reporter: Reporter | None = None
        self._lease: Lease | None = None
        self._end = Event()
        self._thread = Thread(target=self._run, name="eplb-store-link", daemon=True)
        self._thread.start()

    def add(self, window: Window) -> None:
        """Hand over a window. Never blocks."""
        self._windows.append(window)

    def close(self) -> None:
        """End the thread, and write what still waits if the store answers."""
        self._end.set()
        self._thread.join(15.0)

    def _run(self) -> None:
        tick_s = TICK_S
        is_last = False
        while not is_last:
            is_last = self._end.wait(tick_s)
            try:
                self._turn()
                set_part("sglang", "store", is_on=True)
                tick_s = TICK_S
            except (EplbError, OSError) as exc:
                if tick_s == TICK_S:
                    log.warning("the store cannot be used: %s; the engine serves on", exc)
                set_part("sglang", "store", is_on=False)
                tick_s = BACK_OFF_S
            except Exception:
                set_part("sglang", "store", is_on=False)
                log.exception("the store's thread ends; the engine serves on")
                return
        if self._reporter is not None:
            with suppress(EplbError):
                self._reporter.close(5.0)
        if self._store is not None:
            with suppress(EplbError):
                if self._lease is not None:
                    self._store.release_lease(self._lease)
            self._store.close()

    def _turn(self) -> None:
        store = self._store
        if store is None:
            store = self._opened()
        self._offer()
        while self.events:
            store.add_event(*self.events[0])
            self.events.popleft()
        if self._planner is None:
            return
        lease, before = store.acquire_lease(self._holder, LEASE_S), self._lease
        if lease is not None and (before is None or before.token != lease.token):
            store.announce(Announcement(CONTROLLER, self._holder))
        self._lease = lease
        kept = why_kept(store)
        if kept != self._planner.why_kept:
            log.info("the map is kept: %s" if kept else "plans may move experts%s", kept)
        self._planner.why_kept = kept
        self._commit(store)
        if self._lease is None:
            return
        self._finish(store, self._lease.token)
        if not self._planner.questions and (task := store.claim(fence=self._lease.token)):
            if task.kind == "rebalance" and (refusal := why_refused(task.request)):
                error = f"task {task.id}: {refusal}"
                store.finish(task.id, "failed", TaskResult(error), fence=self._lease.token)
            elif task.kind == "rebalance":
                is_dry = bool(task.request.get("dry_run", True))
                self._planner.questions.append(Question("task", task.id, is_dry))
            else:
                error = f"task {task.id} is of kind {task.kind!r}, expected 'rebalance'"
                store.finish(task.id, "failed", TaskResult(error), fence=self._lease.token)

    @property
    def _holder(self) -> str:
        return f"{self._shape.run}-rank-{self._shape.rank}"

    def _opened(self) -> StateStore:
        settings, shape = self._settings, self._shape
        store = open_store(settings.store, settings.deployment)
        try:
            self._begin(store)
            folder = settings.spool_dir
            spool = Spool(folder / f"rank-{shape.rank:04d}") if folder is not None else None
            self._reporter = Reporter(store, spool=spool, seed=shape.rank)
        except BaseException:
            store.close()
            raise
        self._store = store
        return store

    def _begin(self, store: StateStore) -> None:
        if self._planner is None:
            return
        shape = self._shape
        layers = tuple(int(row) for row in shape.movable.nonzero()[0])
        model = ModelShape(
            layers, shape.num_experts, 1, 1, 1, 0, shape.num_groups, shape.expert_bytes
        )
        window = self._settings.window_steps
        ranks, nodes = shape.num_ranks, shape.num_nodes
        topology = Topology.uniform(nodes, ranks // nodes, shape.num_slots // ranks)
        run = store.current_run()
        if run is None or run.run != shape.run:
            described = model_to_dict(model), topology_to_dict(topology)
            store.begin_run(RunInfo(shape.run, time.time(), *described, window))

    def _offer(self) -> None:
        assert self._reporter is not None, "the store is open"
        while self._windows:
            sample = self._windows.popleft().sample(self._shape, self._sequence)
            self._sequence += 1
            self._reporter.offer(sample)

    def _commit(self, store: StateStore) -> None:
        """Write maps that serve, oldest first; one that cannot be written waits for the store."""
        while self.placements:
            placement, reason, question = self.placements[0]
            serving = store.committed()
            expected = None if serving is None else serving.placement.generation
            if expected is None or expected < placement.generation:
                try:
                    store.commit(placement, expected=expected, reason=reason)
                except StaleGeneration as exc:
                    log.warning("the placement that serves cannot be written: %s", exc)
            self.placements.popleft()
            if question is not None and self._planner is not None:
                self._planner.outcomes.append(Outcome(question, None))

    def _finish(self, store: StateStore, fence: int) -> None:
        assert self._planner is not None, "rank 0 plans"
        while self._planner.outcomes:
            outcome = self._planner.outcomes[0]
            detail = _figures(outcome) | {"dry_run": outcome.question.is_dry}
            if outcome.kept:
                detail["kept"] = outcome.kept
            if outcome.question.task_id:
                result = TaskResult(outcome.error, 0, detail)
                state = "failed" if outcome.error else "done"
                store.finish(outcome.question.task_id, state, result, fence=fence)  # type: ignore[arg-type]
            elif outcome.error:
                store.add_event("engine_plan_failed", {"error": outcome.error})
            self._planner.outcomes.popleft()


def _figures(outcome: Outcome) -> dict[str, object]:
    if outcome.planned is None:
        return {}
    names = ("moves", "reason", "before", "after", "booked", "effective")
    return {name: getattr(outcome.planned, name) for name in names}
