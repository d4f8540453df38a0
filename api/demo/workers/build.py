"""Puts one rank of the demo together, up to the point where its agent can start.

    weights <- the host cache       votes, digests <- all ranks      placement <- the store

The order matters: every bank is filled, and its bytes agreed on, before any rank may read a peer's.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from api.demo.workers.plan import DEPLOYMENT, WorkerPlan
from api.processes.rank_device import Device, Model, device_of, to_device
from eplb.core.placement import Placement
from eplb.errors import RankError, StoreError
from rebalance.agent import RankAgent
from rebalance.preload.cache.server import HostCacheClient
from rebalance.preload.first_fill import fill_bank
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.protocol.journal import JOURNAL_FOLDER, Journal
from rebalance.rank.parts import AgentSettings, Links, RankParts
from rebalance.recovery.survivors import membership_of_start
from rebalance.stage.digest_table import agree_on_digests
from rebalance.stage.settings import StageSettings
from rebalance.transport.choice import KnownRecords
from rebalance.transport.interface import WeightTransport
from rebalance.transport.processes import RankMemory, ranks_beside
from rebalance.transport.ranks.client import OtherRanks
from rebalance.transport.ranks.wire import GroupName
from runtime.checkpoint import Checkpoint, Weights, layer_name
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher, Dispatcher
from runtime.experts import ExpertBank
from runtime.group.agreement import gathered
from runtime.group.listeners import gloo_listeners_closed
from runtime.group.rendezvous import reach
from runtime.model.moe import MoELayer, MoEStack
from runtime.routing import RoutingTable
from telemetry import open_store
from telemetry.reporter.reporter import Reporter
from telemetry.store import LoadStore

log = logging.getLogger(__name__)

GROUP_DEADLINE_S = 60.0
START_DEADLINE_S = 120.0


@dataclass
class RankFigures:
    """What a rank measured, for the summary."""

    dispatcher: str  # which one, and why
    step_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Rank:
    """The parts of one serving process."""

    agent: RankAgent
    model: Model
    dispatcher: Dispatcher
    reporter: Reporter
    figures: RankFigures
    device: torch.device
    store: LoadStore
    journal: Journal


@dataclass(frozen=True)
class _Weights:
    """What a rank holds of the experts, and how it gets more."""

    bank: ExpertBank
    digests: torch.Tensor  # [L, E, 2] of every expert
    votes: GlooVotes
    transport: WeightTransport


def build_rank(plan: WorkerPlan, rank: int) -> Rank:
    """Put a rank together, up to the point where its agent can start.

    Raises:
        StoreError: the store names no placement to start from.
        RankError: the ranks did not all meet in time.
        MigrationError: ranks hold different bytes of one expert.
    """
    place, topology = device_of(plan, rank), plan.topology
    store = open_store(plan.store, DEPLOYMENT, sample_version=plan.reporting.sample_version)
    committed = store.committed()
    if committed is None:
        raise StoreError("the store holds no committed placement, expected the demo's first one")
    placement = committed.placement
    group, start_up = _join(plan, rank, place)
    membership = membership_of_start(store)
    others = _other_ranks(plan, rank, membership)
    held = _take_weights(plan, rank, placement, place, (group, start_up), others=others)
    counter = SlotCounter(plan.model.num_layers, held.bank.num_slots, place.device)
    dispatcher, why = place.dispatcher(group, counter)
    log.info("rank %d: dispatcher: %s", rank, why)
    table = RoutingTable(
        placement,
        max_replicas=most_replicas(placement, plan),
        source_node=int(topology.node_of_rank[rank]),
        device=place.device,
    )
    model = _model(plan, place, held.bank, table, dispatcher)
    counter.drain()  # proving and warming up were no load
    if place.device.type == "cpu":  # on GPUs the lifelines and the votes tell, not the exchange
        # From now on: to meet at the start may take longer.
        distributed_c10d._set_pg_timeout(timedelta(seconds=plan.vote_deadline_s), group)
    reporting = plan.reporting
    reporter = Reporter(store, spool=reporting.spool_of(rank), tempo=reporting.tempo, seed=rank)
    journal = Journal(plan.state_dir / JOURNAL_FOLDER, plan.run, rank)
    agent = RankAgent(
        agent_settings(plan, place.stage, membership),
        RankParts(rank, held.bank, table, counter, dispatcher, held.digests),
        Links(held.votes, held.transport, store, reporter, journal=journal),
        placement,
    )
    if isinstance(dispatcher, AllToAllDispatcher) and place.device.type == "cpu":
        dispatcher.wait = agent.wait_for_exchange
    figures = RankFigures(dispatcher=why)
    return Rank(agent, model, dispatcher, reporter, figures, place.device, store, journal)


def agent_settings(plan: WorkerPlan, stage: StageSettings, membership: int) -> AgentSettings:
    """What every rank's agent is told alike."""
    return AgentSettings(
        DEPLOYMENT,
        plan.run,
        plan.topology,
        plan.sample_steps,
        stage=stage,
        membership=membership,
        vote_deadline_s=plan.vote_deadline_s,
        plan_deadline_s=plan.plan_deadline_s,
        scrub_every_steps=plan.scrub_every_steps,
        rank_links=plan.rank_links,
    )


def _other_ranks(plan: WorkerPlan, rank: int, membership: int) -> OtherRanks | None:
    """Make the way to ranks whose memory is not mapped here, if there is to be one."""
    if plan.rank_links is None:
        return None
    group = GroupName(plan.run, membership)
    return OtherRanks(plan.rank_links, rank, group, plan.schema.record_bytes)


def _take_weights(
    plan: WorkerPlan,
    rank: int,
    placement: Placement,
    place: Device,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    *,
    others: OtherRanks | None,
) -> _Weights:
    """Fill this rank's slots from the host cache; agree on all digests with the other ranks."""
    model, topology, (group, start_up) = plan.model, plan.topology, groups
    bank = place.bank(group)
    host_cache = HostCacheClient(
        plan.host_caches[int(topology.host_of_rank[rank])],
        model.num_experts,
        plan.schema.record_bytes,
        deadline_s=GROUP_DEADLINE_S,
        for_gpu=place.device.type == "cuda",
    )
    experts = placement.slot_to_expert[:, topology.slots_on(rank)].tolist()
    votes = GlooVotes(start_up, host=plan.host_of(rank), deadline_s=GROUP_DEADLINE_S)
    digests = agree_on_digests(
        fill_bank(bank, experts, host_cache, deadline_s=START_DEADLINE_S),
        model.num_layers,
        model.num_experts,
        votes,
        deadline_s=START_DEADLINE_S,
    )
    handles = [str(handle) for handle in gathered(bank.handle, start_up)]
    known = KnownRecords(placement, topology, digests)
    memory = RankMemory(rank, bank, host_cache, 1 + len(ranks_beside(rank, topology)), others)
    transport, why = place.transport(memory, dict(enumerate(handles)), known, start_up)
    log.info("rank %d: transport: %s", rank, why)
    return _Weights(bank, digests, votes, transport)


def _model(
    plan: WorkerPlan, place: Device, bank: ExpertBank, table: RoutingTable, dispatcher: Dispatcher
) -> Model:
    dense = to_device(Checkpoint(plan.weights).dense_weights(), place.device)
    experts = place.experts(bank)
    layers = [
        MoELayer(layer, plan.model.top_k, experts, table, dispatcher, _shared(dense, layer))
        for layer in range(plan.model.num_layers)
    ]
    return place.model(MoEStack(plan.model, dense, layers), dispatcher)


def most_replicas(placement: Placement, plan: WorkerPlan) -> int:
    """Replicas that one expert can ever have: one on each rank, while all others keep one."""
    spare = placement.num_slots - placement.num_experts
    return min(plan.topology.num_ranks, spare + 1)


def _join(
    plan: WorkerPlan, rank: int, place: Device
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Join the ranks: one group for tokens, one of its own for votes and start-up."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve to anything
    timeout, is_cuda = timedelta(seconds=GROUP_DEADLINE_S), place.device.type == "cuda"
    try:
        rendezvous = reach_rendezvous(plan)
        with ExitStack() as formed:
            if not is_cuda:
                formed.enter_context(gloo_listeners_closed())
            dist.init_process_group(
                place.backend,
                store=rendezvous,
                rank=rank,
                world_size=plan.topology.num_ranks,
                timeout=timeout,
                device_id=place.device if is_cuda else None,
            )
            if is_cuda:  # only now: NCCL goes on connecting ranks of the first group
                formed.enter_context(gloo_listeners_closed())
            votes = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as exc:
        raise RankError(f"rank {rank} could not join the others: {exc}") from exc
    assert dist.group.WORLD is not None, "init_process_group sets it"
    assert isinstance(votes, dist.ProcessGroup), "every rank is a member"
    return dist.group.WORLD, votes


def _shared(dense: Weights, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    name = f"{layer_name(layer)}.mlp.shared_experts"
    if f"{name}.gate_proj.weight" not in dense:
        return None
    gate_up = torch.cat([dense[f"{name}.gate_proj.weight"], dense[f"{name}.up_proj.weight"]])
    return gate_up, dense[f"{name}.down_proj.weight"]


def reach_rendezvous(plan: WorkerPlan) -> Store:
    """Reach the rendezvous in the demo's own process: rank 0 is as mortal as any other."""
    try:
        return reach(plan.rendezvous, GROUP_DEADLINE_S)
    except RuntimeError as exc:
        raise RankError(f"the rendezvous of the ranks cannot be reached: {exc}") from exc
