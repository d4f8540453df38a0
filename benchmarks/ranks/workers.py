"""What the benchmarks of live ranks share: a small model, its plan, its start, its messages."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from api.demo.workers.plan import DEPLOYMENT, WorkerPlan
from api.processes.children import Child
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.build.description import schema_of
from rebalance.controller.loop import ControllerSettings
from rebalance.preload.cache.local_socket import HostCacheAddress
from runtime.checkpoints.own_model import write_random_checkpoint
from telemetry import open_store
from telemetry.store import LoadStore, RunInfo

SPARE_SLOTS = 2  # of a rank, for replicas
VOCABULARY = 4096
GPU_MODEL = ModelShape(tuple(range(6)), 32, 6, hidden=2048, intermediate=768)
CPU_MODEL = ModelShape(tuple(range(6)), 32, 6, hidden=64, intermediate=128)


def plan_of(
    folder: Path,
    num_ranks: int,
    rendezvous: str,
    *,
    device: str = "cuda",
    precision: str = "bfloat16",
    model: ModelShape | None = None,
) -> WorkerPlan:
    """Write seeded weights of a small model, and lay out what every process is given."""
    model = model or (GPU_MODEL if device == "cuda" else CPU_MODEL)
    slots_per_rank = -(-model.num_experts // num_ranks) + SPARE_SLOTS
    schema = schema_of(model.hidden, model.intermediate, precision)
    model = replace(model, expert_bytes=schema.record_bytes)
    weights = folder / "weights"
    if not weights.exists():
        write_random_checkpoint(weights, model, schema, vocabulary=VOCABULARY, seed=3)
    run = f"bench-{secrets.token_hex(3)}"
    return WorkerPlan(
        run=run,
        store=folder / "store.sqlite",
        weights=weights,
        text=None,
        trace=None,
        model=model,
        topology=Topology.uniform(1, num_ranks, slots_per_rank),
        host_caches=(HostCacheAddress(run, secrets.token_bytes(16)),),
        rendezvous=rendezvous,
        tokens_per_rank=128,
        window_steps=64,
        sample_steps=16,
        check_every=8,
        drift_period_s=60.0,
        seed=3,
        staging_experts=8,
        device=device,
        precision=precision,
        dispatcher="deepep_low_latency",
        controller=ControllerSettings(),
    )


def begin_run(plan: WorkerPlan) -> LoadStore:
    """Open the store with a random first placement and this run in it."""
    store = open_store(plan.store, DEPLOYMENT)
    start = random_placement(plan, np.random.default_rng(0))
    store.commit(start, expected=None, reason="start")
    model, topology = model_to_dict(plan.model), topology_to_dict(plan.topology)
    store.begin_run(RunInfo(plan.run, time.time(), model, topology, plan.window_steps))
    return store


def random_placement(plan: WorkerPlan, rng: np.random.Generator) -> Placement:
    """Every expert somewhere, other slots filled at random, never twice on a rank."""
    num_ranks, num_experts = plan.topology.num_ranks, plan.model.num_experts
    slots_per_rank = plan.topology.num_slots // num_ranks
    held = np.full((plan.model.num_layers, num_ranks, slots_per_rank), EMPTY)
    for layer in held:
        for number, expert in enumerate(rng.permutation(num_experts)):
            layer[number % num_ranks, number // num_ranks] = expert
        for slots in layer:
            spare = np.flatnonzero(slots == EMPTY)
            absent = np.setdiff1d(np.arange(num_experts), slots)
            slots[spare] = rng.choice(absent, size=len(spare), replace=False)
    return Placement(held.reshape(plan.model.num_layers, -1), num_experts)


def received_message(child: Child, kind: str, deadline_s: float) -> Any:
    """Wait for one message of a child."""
    until = time.monotonic() + deadline_s
    message: tuple[str, Any] | None = ("progress", None)
    while message is not None and message[0] == "progress":
        if not child.messages.poll(max(0.0, until - time.monotonic())):
            raise SystemExit(f"{child.name} sent no {kind} in {deadline_s:.0f} s")
        message = child.receive()
    if message is None or message[0] != kind:
        child.process.join(2)
        raise SystemExit(f"{child.name} sent {message}: {child.exit_text()}")
    return message[1]
