"""One rank of the demo: a serving process with a rank agent embedded in it.

This is the example to read for whoever embeds the agent in an engine: ``build_rank`` puts the parts
together, and ``_serve`` is the engine's loop with two added calls.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from api.batches import Batches
from api.check_feed import CheckFeed
from api.processes import Parent
from api.rank_device import Device, Model, device_of, to_device
from api.worker_checker import SampledStep
from api.worker_plan import DEPLOYMENT, WorkerPlan
from eplb.errors import EplbError, RankError, StoreError
from eplb.placement import Placement
from rebalance.agent import RankAgent
from rebalance.choice import KnownRecords
from rebalance.digests import agree_on_digests
from rebalance.journal import JOURNAL_FOLDER, Journal
from rebalance.links import RankMemory, fill_bank, ranks_beside
from rebalance.parts import AgentSettings, Links, RankParts
from rebalance.recovery import end_together, membership_of_start, recover, rejoin
from rebalance.slab import SlabReader
from rebalance.transport import GlooVotes
from runtime.checkpoint import Checkpoint, Weights, layer_name
from runtime.counters import SlotCounter
from runtime.dispatch import Dispatcher
from runtime.moe import Forward, MoELayer, MoEStack
from runtime.routing import RoutingTable
from runtime.streams import Completion
from telemetry import open_store
from telemetry.reporter import Reporter
from telemetry.store import LoadStore

log = logging.getLogger(__name__)

GROUP_DEADLINE_S = 60.0
START_DEADLINE_S = 120.0
FLUSH_DEADLINE_S = 20.0
DEATH_NEWS_S = 2.0
DEATH_POLL_S = 0.005
FIRST_WAITED = 1  # the step at which the first one's answer is complete
CHECKED_AFTER_COMMIT = 4  # steps after a swap that are still sampled densely


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


def run_rank(parent: Parent, plan: WorkerPlan, rank: int, checks: Connection) -> None:
    """Serve until all ranks agree to halt.

    Raises:
        RankError: a peer is dead or late.
    """
    started = threading.Event()
    agents: list[RankAgent] = []
    start_at: list[float] = []

    def on_command(command: tuple[str, Any]) -> None:
        kind, body = command
        if kind == "start":
            start_at.append(body)
            started.set()
        elif kind == "halt":
            for agent in agents:
                agent.request_halt()

    parent.listen(on_command)
    built = build_rank(plan, rank)
    agents.append(built.agent)
    parent.tell("ready")
    if not started.wait(START_DEADLINE_S):
        raise RankError(f"rank {rank}: no start within {START_DEADLINE_S:.0f} s of being ready")
    feed = CheckFeed(checks)
    built.agent.start()
    try:
        _serve(parent, plan, rank, built, feed, start_at[0])
    except RankError as exc:
        _survive(parent, plan, rank, built, exc)
        raise
    feed.close()
    built.agent.close()
    built.reporter.state(built.agent.describe())
    built.reporter.close(FLUSH_DEADLINE_S)
    built.journal.close()
    parent.tell("served", _figures(built) | {"checks_left_out": feed.num_left_out})


def build_rank(plan: WorkerPlan, rank: int) -> Rank:
    """Put a rank together, up to the point where its agent can start."""
    place = device_of(plan, rank)
    group, start_up = _join(plan, rank, place)
    model, topology = plan.model, plan.topology
    store = open_store(plan.store, DEPLOYMENT)
    committed = store.committed()
    if committed is None:
        raise StoreError("the store holds no committed placement, expected the demo's first one")
    placement = committed.placement
    bank = place.bank(group)
    slab = SlabReader(
        plan.slabs[int(topology.host_of_rank[rank])],
        model.num_experts,
        plan.schema.record_bytes,
        deadline_s=GROUP_DEADLINE_S,
        for_gpu=place.device.type == "cuda",
    )
    held = placement.slot_to_expert[:, topology.slots_on(rank)].tolist()
    votes = GlooVotes(start_up, deadline_s=GROUP_DEADLINE_S)
    digests = agree_on_digests(
        fill_bank(bank, held, slab, deadline_s=START_DEADLINE_S),
        model.num_layers,
        model.num_experts,
        votes,
        deadline_s=START_DEADLINE_S,
    )
    handles: list[str] = [""] * topology.num_ranks
    dist.all_gather_object(handles, bank.handle, group=start_up)
    known = KnownRecords(placement, topology, digests)
    memory = RankMemory(rank, bank, slab, 1 + len(ranks_beside(rank, topology)))
    transport, why = place.transport(memory, dict(enumerate(handles)), known, start_up)
    log.info("rank %d: transport: %s", rank, why)
    counter = SlotCounter(model.num_layers, bank.num_slots, place.device)
    dispatcher, why = place.dispatcher(group, counter)
    log.info("rank %d: dispatcher: %s", rank, why)
    table = RoutingTable(
        placement,
        max_replicas=most_replicas(placement, plan),
        source_node=int(topology.node_of_rank[rank]),
        device=place.device,
    )
    dense = to_device(Checkpoint(plan.weights).dense_weights(), place.device)
    experts = place.experts(bank)
    layers = [
        MoELayer(layer, model.top_k, experts, table, dispatcher, _shared(dense, layer))
        for layer in range(model.num_layers)
    ]
    serving = place.model(MoEStack(model, dense, layers), dispatcher)
    counter.drain()  # proving and warming up were no load
    reporting = plan.reporting
    reporter = Reporter(store, spool=reporting.spool_of(rank), tempo=reporting.tempo, seed=rank)
    journal = Journal(plan.state_dir / JOURNAL_FOLDER, plan.run, rank)
    agent = RankAgent(
        AgentSettings(
            DEPLOYMENT,
            plan.run,
            topology,
            plan.sample_steps,
            stage=place.stage,
            membership=membership_of_start(store),
        ),
        RankParts(rank, bank, table, counter, dispatcher, digests),
        Links(
            votes,
            transport,
            store,
            reporter,
            journal=journal,
        ),
        placement,
    )
    figures = RankFigures(dispatcher=why)
    return Rank(agent, serving, dispatcher, reporter, figures, place.device, store, journal)


def most_replicas(placement: Placement, plan: WorkerPlan) -> int:
    """Replicas that one expert can ever have: one on each rank, while all others keep one."""
    spare = placement.num_slots - placement.num_experts
    return min(plan.topology.num_ranks, spare + 1)


def _join(
    plan: WorkerPlan, rank: int, place: Device
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Join the ranks: one group for tokens, one of its own for votes and start-up."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve to anything
    timeout = timedelta(seconds=GROUP_DEADLINE_S)
    try:
        rendezvous = _rendezvous(plan)
        dist.init_process_group(
            place.backend,
            store=rendezvous,
            rank=rank,
            world_size=plan.topology.num_ranks,
            timeout=timeout,
            device_id=place.device if place.device.type == "cuda" else None,
        )
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


def _survive(parent: Parent, plan: WorkerPlan, rank: int, built: Rank, exc: RankError) -> None:
    """After a peer's death: agree with the other survivors on one placement, and end with them.

    What goes wrong here is told and no more: a start of all ranks is right without it, because it
    loads every slot anew from the placement that the store names.
    """
    if not _is_death(built.agent):
        return
    try:
        record = recover(built.agent, built.store, num_ranks=plan.topology.num_ranks)
        votes = rejoin(record, _rendezvous(plan), rank)
        end_together(votes, record, built.agent.placement, rank)
        votes.close()
        parent.tell("recovered", record)
    except EplbError as failure:
        log.warning("rank %d: no recovery after %s: %s", rank, exc, failure)
        parent.tell("warning", f"no recovery after a death: {failure}")
    built.agent.close()  # takes its leave: the others must not mourn a rank that only ends
    built.journal.close()


def _is_death(agent: RankAgent) -> bool:
    """Say whether a rank is gone; an exchange may break a moment before its lifeline does."""
    deadline = time.monotonic() + DEATH_NEWS_S
    while not agent.dead() and time.monotonic() < deadline:
        time.sleep(DEATH_POLL_S)  # the lifelines have no event to wait for
    return bool(agent.dead())


def _rendezvous(plan: WorkerPlan) -> TCPStore:
    """Reach the rendezvous in the demo's own process: rank 0 is as mortal as any other."""
    timeout = timedelta(seconds=GROUP_DEADLINE_S)
    try:
        return TCPStore("127.0.0.1", plan.rendezvous_port, is_master=False, timeout=timeout)
    except RuntimeError as exc:
        raise RankError(f"the rendezvous of the ranks cannot be reached: {exc}") from exc


def _serve(
    parent: Parent, plan: WorkerPlan, rank: int, built: Rank, feed: CheckFeed, start_at: float
) -> None:
    batches = Batches(plan, rank, built.device)
    in_flight = Completion(is_cuda=built.device.type == "cuda")
    sample_until = 0
    while built.agent.step():
        started = time.perf_counter()
        step = built.dispatcher.steps
        token_ids, forced = batches.at(step, time.monotonic() - start_at)
        answer = built.model.forward(token_ids, salt=_salt(plan, rank, step), forced=forced)
        built.agent.wait(in_flight)  # the host may be one step ahead of the device, not more
        if step == FIRST_WAITED:
            parent.tell("serving")
        in_flight = Completion(is_cuda=built.device.type == "cuda")
        phase = built.agent.phase
        if phase != "idle":
            sample_until = step + CHECKED_AFTER_COMMIT
        if _is_sampled(plan, rank, step, is_dense=step < sample_until):
            built.agent.wait(in_flight)  # first: the copy below would wait without asking the vote
            on_host = Forward(answer.hidden.cpu(), answer.experts.cpu())
            feed.offer(SampledStep(rank, step, phase, token_ids.cpu(), on_host, forced is not None))
        built.figures.step_ms.append((time.perf_counter() - started) * 1e3)
        reported = built.reporter.stats()
        built.agent.notes = {
            "step_ms": round(median(built.figures.step_ms[-50:]), 2),
            "samples_lost": reported.dropped,
            "store_errors": reported.errors,
        }


def _is_sampled(plan: WorkerPlan, rank: int, step: int, *, is_dense: bool) -> bool:
    """One rank in turn: every step around a migration, else every ``check_every`` steps."""
    turn = step if is_dense else step // plan.check_every
    is_due = is_dense or step % plan.check_every == 0
    return is_due and turn % plan.topology.num_ranks == rank


def _salt(plan: WorkerPlan, rank: int, step: int) -> int:
    return plan.seed + 1_000_003 * step + 7919 * rank


def _figures(built: Rank) -> dict[str, Any]:
    return {
        "steps": built.dispatcher.steps,
        "dispatcher": built.figures.dispatcher,
        "step_ms": built.figures.step_ms,
        "swap_pauses_ms": built.agent.figures.swap_pauses_ms,
        "samples": built.agent.num_samples,
        "experts_moved": built.agent.figures.experts_moved,
        "bytes_by_source": dict(built.agent.describe().detail["bytes_by_source"]),
    }
