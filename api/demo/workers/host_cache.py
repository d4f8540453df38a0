"""The preload process of one host."""

from __future__ import annotations

import threading

from api.demo.workers.plan import WorkerPlan
from api.processes.children import Parent, ProgressReports
from api.processes.supervision import REPORT_PERIOD_S
from rebalance.build.host_cache import build_host_cache


def run_host_cache(parent: Parent, plan: WorkerPlan, host: int) -> None:
    """Serve records to the ranks of a host until stopped."""
    is_stopping = threading.Event()
    parent.receive_commands(lambda _: is_stopping.set())
    host_cache = build_host_cache(
        plan.host_cache, plan.host_caches[host], plan.model, plan.schema, plan.weights, host=host
    )
    progress = ProgressReports(parent)
    parent.send("ready")
    while not is_stopping.wait(REPORT_PERIOD_S):
        host_cache.stats()  # takes the cache's lock: in a deadlock no progress is reported
        progress.report()
    host_cache.close()
