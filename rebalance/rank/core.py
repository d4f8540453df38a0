"""Collaborators of one rank's agent: made once, passed to each part."""

from __future__ import annotations

from dataclasses import dataclass

from eplb.core.placement import Placement
from rebalance.protocol.journal import JournalRecorder
from rebalance.protocol.phases import RankPhase
from rebalance.protocol.voter import Voter
from rebalance.rank.parts import AgentSettings, Links, RankParts
from rebalance.rank.sampling import SampleLabel, Sampler
from rebalance.rank.watcher import WatchedAgent, Watcher
from rebalance.stage.mover import Mover, MoverParts
from rebalance.swap.weights_fence import Fence
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Watchdog


@dataclass
class StepCount:
    """Where serving is."""

    last: int = -1  # the step that was begun last


@dataclass(frozen=True)
class RankCore:
    """One rank's collaborators."""

    settings: AgentSettings
    parts: RankParts
    links: Links
    steps: StepCount
    recorder: JournalRecorder
    shared: SharedPhase
    fence: Fence
    watchdog: Watchdog
    mover: Mover
    sampler: Sampler
    voter: Voter
    watcher: Watcher

    @property
    def rank(self) -> int:
        """The rank that this is the core of."""
        return self.parts.rank

    @property
    def first_slot(self) -> int:
        """The first of this rank's slots among those of all ranks."""
        return int(self.settings.topology.first_slot[self.rank])


def make_core(
    settings: AgentSettings,
    parts: RankParts,
    links: Links,
    placement: Placement,
    listener: WatchedAgent,
) -> RankCore:
    """Build a rank's collaborators; no thread runs yet.

    Args:
        settings: alike on every rank.
        parts: the rank's live pieces.
        links: the rank's ways to the outside.
        placement: what serves at the start.
        listener: receives the store's updates, on the watcher's thread.
    """
    steps, watchdog = StepCount(), Watchdog(settings.plan_deadline_s, links.monotonic)
    recorder = JournalRecorder(links.journal, lambda: steps.last)
    shared = SharedPhase(RankPhase(generation=placement.generation), recorder.note_change)
    mover = Mover(
        MoverParts(parts.rank, settings.topology, parts.bank, parts.table, parts.digests),
        links.transport,
        settings.stage,
        dead=links.votes.dead,
        clock=links.monotonic,
        beat=watchdog.mover,
    )
    return RankCore(
        settings,
        parts,
        links,
        steps,
        recorder,
        shared,
        Fence(),
        watchdog,
        mover,
        _sampler(settings, parts, links),
        Voter(parts.rank, links.votes, settings.vote_deadline_s),
        links.threads(links.store, listener, mover, shared, links.reporter, watchdog),
    )


def _sampler(settings: AgentSettings, parts: RankParts, links: Links) -> Sampler:
    return Sampler(
        SampleLabel(settings.deployment, settings.run, parts.rank, settings.load_phase),
        settings.topology,
        parts.counter,
        parts.table.strays,
        links.reporter,
        links.clock,
    )
