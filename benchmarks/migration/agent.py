"""A real rank agent on made-up weights, and migrations that go back and forth for it.

Two placements lie four experts a rank and layer apart, and each migration leads to the other one,
so that a benchmark can move experts for as long as it likes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.migration.big_rank import BigRank, Shapes, first_slots
from benchmarks.publishing import Publisher
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.migration.build import Migration, Pace, Source, build_migration, copy_transactions
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.agent import RankAgent
from rebalance.assembly.config import RankConfig
from rebalance.assembly.rank import most_replicas, wire_agent
from rebalance.rank.parts import AgentSettings, Links
from rebalance.stage.share import RankSlots
from rebalance.stage.stage_settings import StageSettings
from rebalance.types import StepCounter
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank
from runtime.routing import RoutingTable
from telemetry import open_store
from telemetry.load.reporter import Reporter
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

DEPLOYMENT = "bench"
POLL_S = 0.005


@dataclass
class Clockwork:
    """Counts steps of many graph replays each: the agent's clock here."""

    steps: int = 0


def begin_store(path: Path, shapes: Shapes, num_ranks: int) -> None:
    """A store with the first placement and a run."""
    topology = Topology.uniform(1, num_ranks, shapes.slots_on_gpu)
    store = open_store(path, DEPLOYMENT)
    first = Placement(first_slots(shapes, num_ranks), shapes.model.num_experts)
    store.commit(first, expected=None, reason="start")
    model = replace(shapes.model, expert_bytes=shapes.schema.record_bytes)
    info = (model_to_dict(model), topology_to_dict(topology), 64)
    store.begin_run(RunInfo("bench", time.time(), *info))
    store.close()


def agent_of(big: BigRank, path: Path, transport: Any) -> tuple[RankAgent, Clockwork]:
    """The real agent, over a clock that counts whole steps."""
    store, clock = open_store(path, DEPLOYMENT), Clockwork()
    budget = big.shapes.bytes_per_second
    stage = StageSettings() if budget == math.inf else StageSettings.while_serving(budget)
    settings = AgentSettings(RankConfig(DEPLOYMENT, 16, 1, stage=stage), "bench", big.topology)
    held: dict[str, Any] = {
        "rank": big.rank,
        "bank": big.bank,
        "digests": big.digests,
        "placement": big.placement,
    }
    links = Links(big.votes, transport, store, Reporter(store))
    if big.shapes.ranks_per_gpu > 1:
        return wire_emulated(settings, links, group=big.group, steps=clock, **held), clock
    return wire_agent(settings, links, steps=clock, **held), clock


def wire_emulated(
    settings: AgentSettings,
    links: Links,
    *,
    group: Topology,
    rank: int,
    bank: ExpertBank,
    digests: torch.Tensor,
    placement: Placement,
    steps: StepCounter | None = None,
) -> RankAgent:
    """The agent of one rank whose slots stand for those of all ranks of ``group``.

    As ``wire_agent``, but the routing table knows the group: batches are split among its ranks.
    """
    table = RoutingTable(
        placement,
        max_replicas=most_replicas(placement, group),
        device=bank.device,
        topology=group,
    )
    counter = SlotCounter(placement.num_layers, bank.num_slots, bank.device)
    slots = RankSlots(rank, settings.topology, bank, table, digests)
    return RankAgent(settings, slots, counter, links, placement, steps)


def emulated_migration(
    base: Placement, target: Placement, topology: Topology, plan_id: int, pace: Pace
) -> Migration:
    """``build_migration`` in copy mode, for one rank that holds an expert in several slots.

    A planned placement never does that; the slots of an emulated group's ranks do.
    """
    transactions = copy_transactions(base, target, topology, pace)
    return Migration(plan_id, base, target.with_generation(base.generation + 1), transactions, pace)


@dataclass
class BackAndForth:
    """The way to the other of two placements, in turns.

    Args:
        store: numbers the plans.
        mode: copy, flip, or host: copy mode with every byte from the host.
    """

    store: StateStore
    big: BigRank
    mode: str
    _ends: tuple[Placement, Placement] = field(init=False)
    _num_made: int = 0

    def __post_init__(self) -> None:
        there = rotated(self.big.placement, self.big.group, self.big.moves)
        self._ends = (self.big.placement, there)

    def next(self, base: Placement) -> Migration:
        """Lead from ``base``, which is committed, to the end where it does not stand."""
        self._num_made += 1
        other, shapes = self._ends[self._num_made % 2], self.big.shapes
        pace = Pace(
            shapes.staging_experts,
            mode="flip" if shapes.spare_slots else "copy",
            spare_slots=shapes.spare_slots,
        )
        plan_id, topology = self.store.next_plan_id(), self.big.topology
        if shapes.ranks_per_gpu > 1:
            made = emulated_migration(base, other, topology, plan_id, pace)
        else:
            made = build_migration(base, other, topology, plan_id=plan_id, pace=pace)
        return from_host(made) if self.mode == "host" else made


def publisher_of(big: BigRank, path: Path, mode: str) -> Publisher:
    """Publish back and forth once it is wanted."""
    store = open_store(path, DEPLOYMENT)
    return Publisher(store, BackAndForth(store, big, mode).next, poll_s=POLL_S)


def rotated(placement: Placement, topology: Topology, num_moves: int) -> Placement:
    """Each rank hands ``num_moves`` experts of each layer to the next, which lacks them."""
    held = placement.slot_to_expert.copy()
    for layer in range(len(held)):
        parts = [held[layer, topology.slots_on(r)].copy() for r in range(topology.num_ranks)]
        given = []
        for rank, part in enumerate(parts):
            after = parts[(rank + 1) % len(parts)]
            sole = [s for s, e in enumerate(part) if e != EMPTY and e not in after]
            given.append(sole[:num_moves])
        for rank, slots in enumerate(given):
            target = (rank + 1) % len(parts)
            into = given[target]
            span = topology.slots_on(target)
            for source, slot in zip(slots, into, strict=True):
                held[layer, span.start + slot] = parts[rank][source]
    return Placement(held, placement.num_experts, placement.generation)


def from_host(migration: Migration) -> Migration:
    """The same, every byte from the host."""
    transactions = tuple(
        replace(
            txn,
            rounds=tuple(
                tuple(replace(m, source=Source.HOST, src_slot=EMPTY) for m in one_round)
                for one_round in txn.rounds
            ),
        )
        for txn in migration.transactions
    )
    return replace(migration, transactions=transactions)
