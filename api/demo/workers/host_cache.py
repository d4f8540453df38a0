"""The preload process of one host."""

from __future__ import annotations

import threading

from api.demo.workers.plan import WorkerPlan
from api.processes.children import Parent, Turns
from api.processes.supervision import TURN_S
from rebalance.build.host_cache import build_host_cache


def run_host_cache(parent: Parent, plan: WorkerPlan, host: int) -> None:
    """Serve records to the ranks of a host until stopped."""
    is_stopping = threading.Event()
    parent.listen(lambda _: is_stopping.set())
    host_cache = build_host_cache(
        plan.host_cache, plan.host_caches[host], plan.model, plan.schema, plan.weights, host=host
    )
    turns = Turns(parent)
    parent.send("ready")
    while not is_stopping.wait(TURN_S):
        host_cache.stats()  # takes the cache's lock: a deadlock is no turn
        turns.report()
    host_cache.close()
