"""Builds one rank of a deployment inside a serving process.

    groups = join_votes(config.network)  # the engine has formed its default group
    place = RankPlace(rank, run, topology, groups, device, host_cache)
    rank = build_rank(config, place, model, ExpertSchema.swiglu(...), "redis://10.0.0.7")
    ...                                  # the engine makes its model over rank.bank, rank.table
    rank.agent.start()
    while rank.agent.step(number, "decode"):
        ...                              # a forward pass, which adds to rank.counter
    rank.close()

Every rank calls it, with one configuration. The first placement is in the store by then.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.decision.expert_times import BUDGET_S
from eplb.errors import ConfigError, StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.agent import RankAgent
from rebalance.assembly.config import RankConfig
from rebalance.assembly.experts import RankPlace, take_experts
from rebalance.protocol.journal import Journal, NoJournal
from rebalance.rank.parts import AgentSettings, Links
from rebalance.rank.watcher import POLL_S, StoreLoss
from rebalance.stage.share import RankSlots
from rebalance.types import StepCounter
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.compute import Experts
from runtime.model.expert_times import measure_experts
from runtime.routing import RoutingTable
from telemetry import open_store
from telemetry.load.reporter import Reporter
from telemetry.state.runs import HAS_ENDED, RunInfo
from telemetry.state.store import StateStore

FLUSH_DEADLINE_S = 20.0

OwnExperts = Callable[[RankPlace, Placement], ExpertBank]  # fills the memory that it returns

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltRank:
    """One rank, ready to start."""

    agent: RankAgent
    bank: ExpertBank  # the live slots, which the model's kernels read
    table: RoutingTable  # chooses the slot of each routed token
    counter: SlotCounter  # counts what each slot of this rank receives
    store: StateStore
    reporter: Reporter
    journal: Journal | None
    config: RankConfig
    place: RankPlace
    model: ModelShape

    def measure_experts(
        self, experts: Experts, *, fp8_rows: bool = False, budget_s: float = BUDGET_S
    ) -> None:
        """Measure the time of this rank's experts by their rows; once, before the agent starts.

        The controller plans by the curve of all ranks. See ``runtime.model.expert_times``.

        Args:
            experts: what serves.
            fp8_rows: whether the dispatcher delivers rows in FP8, with scales.
            budget_s: for all points.
        """
        found = measure_experts(
            experts,
            self.bank,
            self.model.hidden,
            fp8_rows=fp8_rows,
            budget_s=budget_s,
        )
        self.agent.expert_times = found
        points = dict(zip(found.rows, found.us, strict=True))
        log.info("us of a slot by rows, in %.2f s, of %s: %s", found.seconds, found.of, points)

    def close(self, flush_deadline_s: float = FLUSH_DEADLINE_S) -> None:
        """End the agent, and write what it still has to report. The store stays open."""
        self.agent.close()
        self.agent.notes[HAS_ENDED] = True
        self.reporter.state(self.agent.describe())
        try:
            self.reporter.close(flush_deadline_s)
        finally:
            self.close_journal()

    def close_journal(self) -> None:
        """Write the notes that wait, if there is a journal."""
        if self.journal is not None:
            self.journal.close()


def build_rank(
    config: RankConfig,
    place: RankPlace,
    model: ModelShape,
    experts: ExpertSchema | ExpertBank | OwnExperts,
    store: StateStore | Path | str,
    passes: StepCounter | None = None,
) -> BuiltRank:
    """Build a rank up to the point where its agent can start; collective.

    Args:
        config: alike on every rank.
        place: where this rank runs.
        model: the MoE layers and their experts.
        experts: what an expert consists of: memory is reserved here, and filled from the cache of
            the rank's host. Or the engine's own memory, which it has filled by the placement of the
            store (``committed_placement``), or a function that fills it by the placement.
        store: of the deployment, open or by its URL; the start ``place.run`` is on record there.
        passes: counts the forward passes of this process: a ``runtime.counters.PassCounter``.
            ``step`` may then be called without a number, and refuses one that differs from the
            count.

    Raises:
        ConfigError: configuration, model, placement and place do not fit together.
        StoreError: the store cannot be used, or has no placement to start from, or no record of
            the start.
        RankError: a rank died or was late.
        MigrationError: experts cannot be loaded, or ranks hold different bytes of one.
    """
    config.check_ranks(place.topology.num_ranks)
    if isinstance(store, Path | str):
        store = open_store(store, config.deployment)
    placement = committed_placement(store)
    membership = store.epoch()
    loss = None if place.joins else StoreLoss(store, place.run)
    if not isinstance(experts, ExpertSchema | ExpertBank):
        experts = experts(place, placement)
    _check_fit(model, placement, place, experts)
    bank, digests, votes, sources = take_experts(config, place, model, experts, placement)
    reporting = config.reporting
    reporter = Reporter(
        store, spool=reporting.spool_of(place.rank), tempo=reporting.tempo, seed=place.rank
    )
    reporter.clock.follow()  # the first sample is dated by it
    journal = None
    if config.journal_dir is not None:
        journal = Journal(config.journal_dir, place.run, place.rank)
    agent = wire_agent(
        AgentSettings(config, place.run, place.topology, membership),
        Links(
            votes,
            sources,
            store,
            reporter,
            reporter.clock,
            journal or NoJournal(),
            loss=loss,
            serves=votes.begin_beats,
        ),
        rank=place.rank,
        bank=bank,
        digests=digests,
        placement=placement,
        steps=passes,
    )
    tempo = reporting.tempo
    agent.report_every_s = POLL_S + tempo.store_interval + tempo.state_interval
    return BuiltRank(
        agent, bank, agent.table, agent.counter, store, reporter, journal, config, place, model
    )


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


def committed_placement(store: StateStore) -> Placement:
    """The placement that ranks start from.

    Raises:
        StoreError: there is none.
    """
    committed = store.committed()
    if committed is None:
        raise StoreError(
            f"the store holds no committed placement of deployment {store.deployment!r}, "
            "expected one to start from"
        )
    return committed.placement


def _check_fit(
    model: ModelShape, placement: Placement, place: RankPlace, experts: ExpertSchema | ExpertBank
) -> None:
    topology = place.topology
    found = (placement.num_layers, placement.num_slots, placement.num_experts)
    expected = (model.num_layers, topology.num_slots, model.num_experts)
    if found != expected:
        raise ConfigError(
            f"the committed placement has (layers, slots, experts) {found}, expected {expected} "
            "by the model and the topology"
        )
    if isinstance(experts, ExpertBank):
        shape = (experts.num_layers, experts.num_slots)
        wanted = (model.num_layers, int(topology.slots_of_rank[place.rank]))
        if shape != wanted or experts.device.type != place.device.type:
            raise ConfigError(
                f"rank {place.rank}: a bank with (layers, slots) {shape} on {experts.device.type}, "
                f"expected {wanted} on {place.device.type}"
            )


def wire_agent(
    settings: AgentSettings,
    links: Links,
    *,
    rank: int,
    bank: ExpertBank,
    digests: torch.Tensor,
    placement: Placement,
    steps: StepCounter | None = None,
) -> RankAgent:
    """Make the agent of a rank, its routing table and its counters; it is not started yet.

    Args:
        settings: alike on every rank.
        links: the rank's ways to the outside.
        rank: this one.
        bank: its slots, filled as the placement says.
        digests: [L, E, 2] of every expert, agreed by all ranks.
        placement: of all ranks.
        steps: counts forward passes, if ``RankAgent.step`` is to be called without a number.
    """
    topology, device = settings.topology, bank.device
    table = RoutingTable(
        placement,
        max_replicas=most_replicas(placement, topology),
        source_node=int(topology.node_of_rank[rank]),
        device=device,
    )
    counter = SlotCounter(placement.num_layers, bank.num_slots, device)
    slots = RankSlots(rank, topology, bank, table, digests)
    return RankAgent(settings, slots, counter, links, placement, steps)


def most_replicas(placement: Placement, topology: Topology) -> int:
    """Replicas that one expert can ever have: one on each rank, while all others keep one."""
    spare = placement.num_slots - placement.num_experts
    return min(topology.num_ranks, spare + 1)
