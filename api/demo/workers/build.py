"""Builds one rank of the demo: its process groups, its rank of the balancer, its model.

    join_ranks -> build_rank (rebalance.build) -> dispatcher -> model over the rank's slots

What is specific to the demo is its device, its checkpoint and its model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from api.demo.workers.plan import DEPLOYMENT, WorkerPlan
from api.processes.rank_device import Device, Model, device_of, to_device
from eplb.errors import RankError
from rebalance.agent import RankAgent
from rebalance.build.experts import RankPlace
from rebalance.build.group import join_ranks
from rebalance.build.rank import BuiltRank, build_rank
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import Weights, layer_name
from runtime.counters import PassCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher, Dispatcher
from runtime.group import reach
from runtime.model.moe import MoELayer, MoEStack
from telemetry import open_store
from telemetry.load.reporter import Reporter
from telemetry.state.store import StateStore

log = logging.getLogger(__name__)

START_DEADLINE_S = 120.0  # from a rank being ready to the start of all ranks


@dataclass
class RankFigures:
    """Measurements of a rank for the summary."""

    dispatcher: str  # which one, and why
    step_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Rank:
    """The parts of one serving process."""

    parts: BuiltRank
    model: Model
    dispatcher: Dispatcher
    figures: RankFigures
    device: torch.device
    passes: PassCounter

    @property
    def agent(self) -> RankAgent:
        """The rank's agent."""
        return self.parts.agent

    @property
    def reporter(self) -> Reporter:
        """Writes the rank's samples and state to the store."""
        return self.parts.reporter

    @property
    def store(self) -> StateStore:
        """The store of the deployment."""
        return self.parts.store

    def begin_step(self) -> bool:
        """Call the agent before the next forward pass; False when serving ends."""
        return self.agent.step()


def build_demo_rank(plan: WorkerPlan, rank: int) -> Rank:
    """Build a rank, up to the point where its agent can start.

    Raises:
        StoreError: the store has no placement to start from.
        RankError: not all ranks joined in time.
        MigrationError: ranks hold different bytes of one expert.
    """
    device, topology, config = device_of(plan, rank), plan.topology, plan.rank_config
    store = open_store(plan.store, DEPLOYMENT)
    rendezvous = reach_rendezvous(plan)
    groups = join_ranks(config.network, rendezvous, rank, topology.num_ranks, device.device)
    host_cache = plan.host_caches[int(topology.host_of_rank[rank])]
    place = RankPlace(rank, plan.run, topology, groups, device.device, host_cache)
    passes = PassCounter()
    built = build_rank(config, place, plan.model, plan.schema, store, passes)
    dispatcher, why = device.dispatcher(groups.tokens, built.counter)
    log.info("rank %d: dispatcher: %s", rank, why)
    model = _model(plan, device, built, dispatcher)
    built.counter.drain()  # proving and warming up were no load
    if device.device.type == "cpu":  # on GPUs liveness connections and votes detect a dead peer
        # From now on: to meet at the start may take longer.
        distributed_c10d._set_pg_timeout(timedelta(seconds=plan.vote_deadline_s), groups.tokens)
        if isinstance(dispatcher, AllToAllDispatcher):
            dispatcher.wait = built.agent.wait_for_exchange
    return Rank(built, model, dispatcher, RankFigures(dispatcher=why), device.device, passes)


def _model(plan: WorkerPlan, device: Device, built: BuiltRank, dispatcher: Dispatcher) -> Model:
    dense = to_device(Checkpoint(plan.weights).dense_weights(), device.device)
    experts = device.experts(built.bank)
    if device.device.type == "cuda":  # a CPU computes in proportion to rows
        built.measure_experts(experts)
    layers = [
        MoELayer(number, plan.model.top_k, experts, built.table, dispatcher, _shared(dense, layer))
        for number, layer in enumerate(plan.model.layer_ids)
    ]
    return device.model(MoEStack(plan.model, dense, layers), dispatcher)


def _shared(dense: Weights, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    name = f"{layer_name(layer)}.mlp.shared_experts"
    if f"{name}.gate_proj.weight" not in dense:
        return None
    gate_up = torch.cat([dense[f"{name}.gate_proj.weight"], dense[f"{name}.up_proj.weight"]])
    return gate_up, dense[f"{name}.down_proj.weight"]


def reach_rendezvous(plan: WorkerPlan) -> Store:
    """Connect to the rendezvous in the demo's own process, because rank 0 may exit too."""
    try:
        return reach(plan.rendezvous, plan.rank_config.network.join_deadline_s)
    except RuntimeError as exc:
        raise RankError(f"the rendezvous of the ranks cannot be reached: {exc}") from exc
