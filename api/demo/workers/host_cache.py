"""The preload process of one host."""

from __future__ import annotations

import threading
from dataclasses import replace

from api.demo.workers.plan import WorkerPlan
from api.processes.children import Parent, Turns
from api.processes.supervision import TURN_S
from rebalance.preload.cache.server import HostCacheServer
from runtime.checkpoint import Checkpoint


def run_host_cache(parent: Parent, plan: WorkerPlan, host: int) -> None:
    """Serve records to the ranks of a host until told to stop."""
    is_stopping = threading.Event()
    parent.listen(lambda _: is_stopping.set())
    checkpoint = Checkpoint(plan.weights)
    settings = plan.host_cache
    if settings.links is not None:
        links = replace(settings.links, listen=settings.links.hosts[host])
        settings = replace(settings, links=links)
    host_cache = HostCacheServer(
        plan.host_caches[host], checkpoint, plan.model, plan.schema, settings
    )
    turns = Turns(parent)
    parent.tell("ready")
    while not is_stopping.wait(TURN_S):
        host_cache.stats()  # takes the cache's lock: a deadlock is no turn
        turns.report()
    host_cache.close()
