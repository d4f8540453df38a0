"""The controller's process. It may be killed and restarted at any moment."""

from __future__ import annotations

import threading

from api.demo.workers.plan import DEPLOYMENT, WorkerPlan
from api.processes.children import Parent, Turns
from eplb.errors import StoreError
from rebalance.build.controller import build_controller
from telemetry import open_store

RETRY_S = 0.5


def run_controller(parent: Parent, plan: WorkerPlan) -> None:
    """Plan until stopped; a store that fails is retried."""
    is_stopping = threading.Event()
    parent.listen(lambda _: is_stopping.set())
    store = open_store(plan.store, DEPLOYMENT)
    controller = build_controller(plan.controller, store, DEPLOYMENT, holder=plan.holder)
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
