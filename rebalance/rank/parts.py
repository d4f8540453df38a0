"""Parts of a rank agent: settings equal on every rank, live objects, links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from eplb.clock import Clock
from eplb.core.load import Phase as LoadPhase
from eplb.core.topology import Topology
from rebalance.protocol.journal import JournalSink, NoJournal
from rebalance.rank.watcher import SampleSink, Watcher
from rebalance.stage.stage_settings import StageSettings
from rebalance.types import StepCounter, VoteGroup
from rebalance.weights.link.rank_link_settings import RankLinkSettings
from rebalance.weights.sources import WeightSources
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank
from runtime.routing import RoutingTable
from telemetry.state.store import StateStore


@dataclass(frozen=True)
class AgentSettings:
    """Settings that must be equal on every rank."""

    deployment: str
    run: str
    topology: Topology
    sample_steps: int  # steps per sample; a divisor of the window
    vote_every: int = 2  # steps from one vote to the next; 2 leaves a vote one whole step of time
    vote_deadline_s: float = 30.0
    plan_deadline_s: float = 30.0  # a migration without progress for so long is aborted
    scrub_every_steps: int = 64  # idle steps from one digested live slot to the next; 0: never
    load_phase: LoadPhase = "mixed"
    stage: StageSettings = field(default_factory=StageSettings)
    membership: int = 0  # of this group of ranks; see ``membership_of_start``
    rank_links: RankLinkSettings | None = None  # None: no rank gives its slots over the network
    splits_batches: bool = False  # the routing table holds what ``BatchSplit`` needs
    extra_slots: int = 0  # of each rank after the placement's, such as one for ``SharedSpread``

    def __post_init__(self) -> None:
        if self.rank_links is not None:
            self.rank_links.check(self.topology.num_ranks)


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
