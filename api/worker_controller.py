"""The controller's process. It may be killed and started again at any moment."""

from __future__ import annotations

import logging
import threading

from api.processes import Parent
from api.worker_plan import DEPLOYMENT, WorkerPlan
from eplb.errors import StoreError
from rebalance.controller import Controller
from telemetry import open_store

RETRY_S = 0.5


def run_controller(parent: Parent, plan: WorkerPlan) -> None:
    """Decide until told to stop; a store that fails is tried again."""
    logging.basicConfig(level=logging.WARNING)
    is_stopping = threading.Event()
    parent.listen(lambda _: is_stopping.set())
    store = open_store(plan.store, DEPLOYMENT)
    parent.tell("ready")
    while not is_stopping.is_set():
        try:
            Controller(store, plan.controller).run(is_stopping.is_set)
        except StoreError as exc:
            parent.tell("warning", f"the controller cannot use the store, trying again: {exc}")
            is_stopping.wait(RETRY_S)
    store.close()
