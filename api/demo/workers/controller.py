"""The controller's process. It may be killed and restarted at any moment."""

from __future__ import annotations

import threading

import numpy as np

from api.demo.workers.plan import DEPLOYMENT, WorkerPlan
from api.processes.children import Parent, Turns
from eplb.core.topology import Topology
from eplb.errors import StoreError
from eplb.planner import plan as make_plan
from rebalance.controller.loop import Controller
from telemetry import open_store

RETRY_S = 0.5


def run_controller(parent: Parent, plan: WorkerPlan) -> None:
    """Plan until stopped; a store that fails is retried."""
    is_stopping = threading.Event()
    parent.listen(lambda _: is_stopping.set())
    store = open_store(plan.store, DEPLOYMENT)
    warm_up(plan.controller.policy)
    controller = Controller(store, plan.controller, holder=plan.holder)
    turns = Turns(parent)
    parent.send("ready")

    def has_to_stop() -> bool:  # asked once in each turn of the controller
        turns.report()
        return is_stopping.is_set()

    while not is_stopping.is_set():
        try:
            controller.run(has_to_stop, poll_s=plan.controller_poll_s)
        except StoreError as exc:
            parent.send("warning", f"the controller cannot use the store, trying again: {exc}")
            is_stopping.wait(RETRY_S)
    store.close()


def warm_up(policy: str) -> None:
    """Have the planner's kernels compiled: ten seconds, once for each checkout of the project."""
    load = np.array([[[8, 4, 2, 1]], [[8, 4, 2, 2]]])
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
    fresh = make_plan(load, ranks, policy=policy)
    make_plan(load[:, :, ::-1], ranks, policy=policy, current=fresh.target)
