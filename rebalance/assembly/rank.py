"""Builds one rank of a deployment inside a serving process.

    group = join_votes(config, topology, run=run)  # the engine has formed its default group
    rank = build_rank(config, group, host_cache, model, ExpertSchema.swiglu(...), "redis://10.0.0.7")
    ...                                  # the engine makes its model over rank.bank, rank.table
    rank.start()
    while rank.step(number, "decode"):
        ...                              # a forward pass, which adds to rank.counter
    rank.close()

Every rank calls it, with one configuration. The first placement is in the store by then.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.migration.survivors import Survival
from rebalance.assembly.change import Change, committed_placement
from rebalance.assembly.config import RankConfig
from rebalance.assembly.experts import (
    first_experts,
    first_sources,
    offer_own_experts,
    reserve_memory,
    torch_failures,
)
from rebalance.protocol.journal import Journal
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.rank.watcher import POLL_S, StoreLoss
from rebalance.stage.share import RankSlots
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.start_check import KnownRecords
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema
from runtime.routing import RoutingTable
from telemetry import open_store
from telemetry.load.reporter import Reporter
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

OwnExperts = Callable[[Group, Placement], ExpertBank]  # fills the memory that it returns


def build_rank(
    config: RankConfig,
    group: Group,
    host_cache: HostCacheAddress,
    model: ModelShape,
    experts: ExpertSchema | ExpertBank | OwnExperts,
    store: StateStore | Path | str,
) -> Rank:
    """Build a rank up to the point where it can start; collective.

    Set its ``passes`` to a ``runtime.counters.PassCounter`` where one counts the forward passes of
    this process: ``step`` may then be called without a number, and refuses one that differs.

    Args:
        config: alike on every rank.
        group: of the ranks that start together; its run is on record in the store.
        host_cache: of this rank's host.
        model: the MoE layers and their experts.
        experts: what an expert consists of: memory is reserved here, and filled from the cache of
            the rank's host. Or the engine's own memory, which it has filled by the placement of the
            store (``committed_placement``), or a function that fills it by the placement.
        store: of the deployment, open or by its URL.

    Raises:
        ConfigError: configuration, model, placement and group do not fit together.
        StoreError: the store cannot be used, or has no placement to start from, or no record of
            the start.
        RankError: a rank died or was late.
        MigrationError: experts cannot be loaded, or ranks hold different bytes of one.
    """
    config.check_ranks(group.topology.num_ranks)
    if isinstance(store, Path | str):
        store = open_store(store, config.deployment)
    placement = committed_placement(store)
    group = replace(group, membership=store.epoch())
    loss = None if group.is_waiting else StoreLoss(store, group.run)
    if not isinstance(experts, ExpertSchema | ExpertBank):
        experts = experts(group, placement)
    _check_fit(model, placement, group, experts)
    assert group.control is not None, "ranks agree on their experts"
    with torch_failures(group, "its memory for experts"):
        bank, unmapped = reserve_memory(config, group, model, experts)
    with torch_failures(group, "its first experts"):
        known, cache = first_experts(
            config,
            group,
            host_cache,
            model,
            bank,
            placement,
            is_filled=isinstance(experts, ExpertBank),
        )
    rank = _make_rank(config, group, model, bank, store, placement)
    change = Change(rank, group)
    change.survival = Survival(group.topology, placement, ())
    with torch_failures(group, "its first experts"):
        if not group.is_waiting:  # else it learns the digests from those that serve
            change.prove(known)
        found = KnownRecords(placement, group.topology, change.digests)
        if cache is None:
            cache = offer_own_experts(config, group, host_cache, bank, found)
        sources = first_sources(group, bank, cache, unmapped, found)
        change.agree()
    change.enter(group, placement, sources, loss)
    return rank


def _make_rank(
    config: RankConfig,
    group: Group,
    model: ModelShape,
    bank: ExpertBank,
    store: StateStore,
    placement: Placement,
) -> Rank:
    """A rank that is in no group yet, over filled slots whose digests are not agreed on yet."""
    reporting = config.reporting
    reporter = Reporter(
        store, spool=reporting.spool_of(group.rank), tempo=reporting.tempo, seed=group.rank
    )
    reporter.clock.follow()  # the first sample is dated by it
    journal = None
    if config.journal_dir is not None:
        journal = Journal(config.journal_dir, group.run, group.rank)
    unknown = torch.zeros(model.num_layers, model.num_experts, 2, dtype=torch.int64)
    rank = Rank(
        config,
        make_slots(group.rank, group.topology, bank, unknown, placement),
        SlotCounter(placement.num_layers, bank.num_slots, bank.device),
        store,
        reporter,
        model=model,
        journal=journal,
        clock=reporter.clock,
    )
    tempo = reporting.tempo
    rank.report_every_s = POLL_S + tempo.store_interval + tempo.state_interval
    return rank


def new_run_name() -> str:
    """Name a start of the serving processes; sorts by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def record_start(
    store: StateStore, run: str, model: ModelShape, topology: Topology, windows: tuple[int, float]
) -> None:
    """Record a start of all ranks. A migration that an earlier start left open is withdrawn.

    Args:
        store: of the deployment.
        run: the start's name.
        model: the MoE layers and their experts.
        topology: all ranks.
        windows: steps of a window, and its seconds or 0.
    """
    if (open_migration := store.published()) is not None:
        reason = "the run it was made for has ended"
        store.withdraw(open_migration.plan_id, outcome="rejected", reason=reason)
    shapes = model_to_dict(model), topology_to_dict(topology)
    store.begin_run(RunInfo(run, store.backend.now(), *shapes, *windows))


def _check_fit(
    model: ModelShape, placement: Placement, group: Group, experts: ExpertSchema | ExpertBank
) -> None:
    topology = group.topology
    found = (placement.num_layers, placement.num_slots, placement.num_experts)
    expected = (model.num_layers, topology.num_slots, model.num_experts)
    if found != expected:
        raise ConfigError(
            f"the committed placement has (layers, slots, experts) {found}, expected {expected} "
            "by the model and the topology"
        )
    if isinstance(experts, ExpertBank):
        shape = (experts.num_layers, experts.num_slots)
        wanted = (model.num_layers, int(topology.slots_of_rank[group.rank]))
        if shape != wanted or experts.device.type != group.device.type:
            raise ConfigError(
                f"rank {group.rank}: a bank with (layers, slots) {shape} on {experts.device.type}, "
                f"expected {wanted} on {group.device.type}"
            )


def make_slots(
    rank: int,
    topology: Topology,
    bank: ExpertBank,
    digests: torch.Tensor,
    placement: Placement,
) -> RankSlots:
    """Make the slots of a rank with the routing table over them.

    Args:
        rank: this one.
        topology: all ranks.
        bank: its memory, filled as the placement says.
        digests: [L, E, 2] of every expert, agreed by all ranks.
        placement: of all ranks.
    """
    table = RoutingTable(
        placement,
        max_replicas=most_replicas(placement, topology),
        source_node=int(topology.node_of_rank[rank]),
        device=bank.device,
    )
    return RankSlots(rank, topology, bank, table, digests)


def most_replicas(placement: Placement, topology: Topology) -> int:
    """Replicas that one expert can ever have: one on each rank, while all others keep one."""
    spare = placement.num_slots - placement.num_experts
    return min(topology.num_ranks, spare + 1)
