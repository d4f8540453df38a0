"""What a rank's agent is given, and what the pieces of one agent share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eplb.clock import Clock
from eplb.core.topology import Topology
from rebalance.assembly.config import RankConfig
from rebalance.protocol.journal import JournalRecorder, JournalSink, NoJournal
from rebalance.rank.watcher import SampleSink, StoreLoss, Watcher
from rebalance.stage.mover import Mover
from rebalance.stage.share import RankSlots
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Watchdog
from rebalance.types import VoteGroup
from rebalance.weights.sources import WeightSources
from telemetry.state.store import StateStore


@dataclass(frozen=True)
class AgentSettings:
    """The configuration of ranks, and their run: equal on every rank."""

    config: RankConfig
    run: str
    topology: Topology
    membership: int = 0  # of this group of ranks: the epoch in which it started or was recorded


@dataclass(frozen=True)
class Links:
    """The agent's ways to the outside."""

    votes: VoteGroup
    sources: WeightSources
    store: StateStore
    reporter: SampleSink
    clock: Clock = time.time  # of the day; by which samples and reports are dated
    journal: JournalSink = field(default_factory=NoJournal)
    monotonic: Clock = time.monotonic  # of the mover's and the watchdog's deadlines
    threads: Callable[..., Watcher] = Watcher  # a scheduler plays them itself
    loss: StoreLoss | None = None  # None: a store that lost its contents is not restored
    serves: Callable[[], None] = lambda: None  # called at each vote: this rank serves


@dataclass
class StepCount:
    """Where serving is."""

    last: int = -1  # the step that was begun last

    def __call__(self) -> int:
        """The same, for pieces that only read it."""
        return self.last


@dataclass(frozen=True)
class RankParts:
    """What the pieces of one rank's agent share: its state, its threads, and what they work on."""

    settings: AgentSettings
    links: Links
    slots: RankSlots
    steps: StepCount
    recorder: JournalRecorder
    shared: SharedPhase
    watchdog: Watchdog
    mover: Mover
    watcher: Watcher
