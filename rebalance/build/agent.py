"""The last step of building a rank: its agent, over experts that are in place and agreed on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from rebalance.agent import RankAgent
from rebalance.rank.parts import AgentSettings, Links, RankParts
from rebalance.types import StepCounter
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank
from runtime.routing import RoutingTable


@dataclass(frozen=True)
class HeldExperts:
    """What a rank holds when it begins to serve."""

    rank: int
    bank: ExpertBank  # filled as the placement says
    digests: torch.Tensor  # [L, E, 2] of every expert, agreed by all ranks
    placement: Placement  # of all ranks


@dataclass(frozen=True)
class WiredAgent:
    """An agent that is not started yet, and what the model needs of it."""

    agent: RankAgent
    table: RoutingTable  # chooses the slot of each routed token
    counter: SlotCounter  # counts what each slot of this rank receives


def wire_agent(
    settings: AgentSettings, held: HeldExperts, links: Links, steps: StepCounter | None = None
) -> WiredAgent:
    """Make the agent of a rank, its routing table and its counters.

    Args:
        settings: alike on every rank.
        held: what the rank holds.
        links: the rank's ways to the outside.
        steps: counts forward passes, if ``RankAgent.step`` is to be called without a number.
    """
    placement, device, batch = held.placement, held.bank.device, settings.config.batch
    table = RoutingTable(
        placement,
        max_replicas=most_replicas(placement, settings.topology),
        source_node=int(settings.topology.node_of_rank[held.rank]),
        device=device,
        topology=settings.topology if batch.split else None,
        extra_slots=batch.extra_slots,
    )
    counter = SlotCounter(
        placement.num_layers, held.bank.num_slots, device, extra_slots=batch.extra_slots
    )
    parts = RankParts(held.rank, held.bank, table, counter, steps, held.digests)
    return WiredAgent(RankAgent(settings, parts, links, placement), table, counter)


def most_replicas(placement: Placement, topology: Topology) -> int:
    """Replicas that one expert can ever have: one on each rank, while all others keep one."""
    spare = placement.num_slots - placement.num_experts
    return min(topology.num_ranks, spare + 1)
