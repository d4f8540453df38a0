"""What the pieces of a rank share in one group: its memory, its links, its state and threads."""

from __future__ import annotations

from typing import Protocol

from eplb.clock import Clock
from rebalance.assembly.config import RankConfig
from rebalance.protocol.journal import JournalRecorder
from rebalance.rank.group import Group
from rebalance.rank.watcher import SampleSink, Watcher
from rebalance.stage.mover import Mover
from rebalance.stage.share import RankSlots
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Watchdog
from rebalance.weights.sources import WeightSources
from runtime.counters import SlotCounter


class RankInGroup(Protocol):
    """A ``Rank``, as its own pieces see it. They keep what they need of it, and not the rank."""

    config: RankConfig
    slots: RankSlots
    counter: SlotCounter
    reporter: SampleSink
    clock: Clock  # of the day
    monotonic: Clock
    sources: WeightSources
    watchdog: Watchdog
    recorder: JournalRecorder
    shared: SharedPhase
    wants_halt: bool  # serving is to end on all ranks
    mover: Mover
    watcher: Watcher

    @property
    def group(self) -> Group:
        """The group that it is in."""
