"""Parts of a rank agent: settings equal on every rank, live objects, links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from eplb.clock import Clock
from eplb.core.topology import Topology
from rebalance.assembly.config import RankConfig
from rebalance.protocol.journal import JournalSink, NoJournal
from rebalance.rank.watcher import SampleSink, Watcher
from rebalance.stage.stage_settings import StageSettings
from rebalance.types import StepCounter, VoteGroup
from rebalance.weights.sources import WeightSources
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank
from runtime.routing import RoutingTable
from telemetry.state.store import StateStore


@dataclass(frozen=True)
class AgentSettings:
    """The configuration of ranks, and their run: equal on every rank."""

    config: RankConfig
    run: str
    topology: Topology
    membership: int = 0  # of this group of ranks; see ``membership_of_start``

    def __post_init__(self) -> None:
        if self.config.rank_links is not None:
            self.config.rank_links.check(self.topology.num_ranks)

    @property
    def stage(self) -> StageSettings:
        """Limits of staging; without any in the configuration, those of a CPU."""
        return self.config.stage or StageSettings()


@dataclass(frozen=True)
class RankParts:
    """The live pieces of one rank that the agent reads and changes between steps.

    ``steps`` counts forward passes; None where the engine numbers each call of ``step``.
    """

    rank: int
    bank: ExpertBank
    table: RoutingTable
    counter: SlotCounter
    steps: StepCounter | None
    digests: torch.Tensor  # [L, E, 2] of every expert


@dataclass(frozen=True)
class Links:
    """The agent's ways to the outside."""

    votes: VoteGroup
    sources: WeightSources
    store: StateStore
    reporter: SampleSink
    clock: Clock = time.time
    journal: JournalSink = field(default_factory=NoJournal)
    monotonic: Clock = time.monotonic  # of the mover's and the watchdog's deadlines
    threads: Callable[..., Watcher] = Watcher  # a scheduler plays them itself
