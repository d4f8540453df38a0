"""What one rank's agent is made of, put together once; each piece gets only what it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from eplb.core.placement import Placement
from rebalance.protocol.journal import JournalRecorder
from rebalance.protocol.phases import RankPhase
from rebalance.protocol.voter import Voter
from rebalance.rank.parts import AgentSettings, Links, RankParts
from rebalance.rank.sampling import Sampler
from rebalance.rank.step_times import StepTimer
from rebalance.rank.watcher import ReadAhead, WatchedAgent, Watcher
from rebalance.recovery.rank import RankRecovery
from rebalance.stage.figures import StageFigures
from rebalance.stage.mover import Mover
from rebalance.stage.share import RankSlots
from rebalance.swap.scrub_schedule import ScrubSchedule
from rebalance.swap.scrubber import Scrubber
from rebalance.swap.swapper import Swapper
from rebalance.swap.verdicts import Voting
from rebalance.swap.weight_update import WeightUpdate
from rebalance.swap.weights_fence import Fence
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Watchdog
from rebalance.weights.link.server import LinkServer
from rebalance.weights.rank_link import GroupName, Served, serve_slots
from telemetry.state.runs import BATCH_FAULTS, STEP_TIMES, RankState

REPORTED_PAUSES = 256  # of the latest swaps


@dataclass
class StepCount:
    """Where serving is."""

    last: int = -1  # the step that was begun last

    def __call__(self) -> int:
        """The same, for pieces that only read it."""
        return self.last


@dataclass(frozen=True)
class RankCore:
    """One rank's pieces, for the agent that steps them and for its report."""

    settings: AgentSettings
    parts: RankParts
    links: Links
    slots: RankSlots
    steps: StepCount
    shared: SharedPhase
    fence: Fence
    watchdog: Watchdog
    mover: Mover
    sampler: Sampler
    voter: Voter
    watcher: Watcher
    swapper: Swapper
    voting: Voting
    scrubber: Scrubber
    scrub_schedule: ScrubSchedule
    update: WeightUpdate
    recovery: RankRecovery
    read_ahead: ReadAhead
    step_timer: StepTimer

    def listen(self) -> LinkServer | None:
        """Let other ranks ask this one for what it holds, where the settings say so.

        Raises:
            MigrationError: the rank's address cannot be listened on.
        """
        settings, links = self.settings, self.settings.config.rank_links
        if links is None:
            return None

        def served() -> Served:
            # The fence first: if it was open then, the version is that of what serves.
            is_open, version = self.fence.is_open, self.fence.version
            return Served(self.slots.held(self.swapper.placement), version, is_open)

        group = GroupName(settings.run, settings.membership)
        return serve_slots(links, self.slots.rank, group, self.slots.bank, served)

    def report(self, notes: Mapping[str, Any]) -> RankState:
        """Return the rank's report to the store; ``notes`` are fields that the engine adds."""
        swapper = self.swapper
        with self.shared.changed:
            state = self.shared.state
            share = swapper.share if state.plan is not None else None
        to_stage = sum(map(len, share.moves)) if share is not None else 0
        stage, oldest = self.mover.figures(), self.watchdog.oldest()
        return RankState(
            run=self.settings.run,
            rank=self.slots.rank,
            time=self.links.clock(),
            step=max(self.steps.last, 0),
            generation=state.generation,
            phase=state.phase.value,
            plan_id=state.plan.plan_id if state.plan else 0,
            applied=state.applied,
            sequence=self.sampler.num_cut,
            weights_version=self.fence.version,
            prepared=state.prepared,
            frozen=state.frozen_reason,
            digest_failures=stage.num_wrong_digests + self.scrubber.num_digest_failures,
            mover_failures=self.watcher.num_mover_failures,
            progress_age_s=round(oldest.age_s, 3),
            progress_of=str(oldest),
            detail={"to_stage": to_stage} | self._measured(stage) | dict(notes),
        )

    def _measured(self, stage: StageFigures) -> dict[str, Any]:
        swapper, scrubber = self.swapper, self.scrubber
        return {
            "bytes_by_source": dict(stage.bytes_by_source),
            BATCH_FAULTS: dict(self.sampler.faults.counts),
            "experts_moved": swapper.figures.experts_moved,
            "rebalances": swapper.figures.rebalances,
            "staged": stage.num_staged,
            "stage": stage.as_detail(),
            STEP_TIMES: vars(self.step_timer.figures()),
            "swap_pauses_ms": swapper.figures.swap_pauses_ms[-REPORTED_PAUSES:],
            "scrubbed": dict(scrubber.counts),
            "sweeps": scrubber.num_sweeps,
        }


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
    rank, steps = parts.rank, StepCount()
    watchdog = Watchdog(settings.config.plan_deadline_s, links.monotonic)
    slots = RankSlots(rank, settings.topology, parts.bank, parts.table, parts.digests)
    recorder = JournalRecorder(links.journal, steps)
    shared = SharedPhase(RankPhase(generation=placement.generation), recorder.note_change)
    fence = Fence()
    voter = Voter(rank, links.votes, settings.config.vote_deadline_s, links.monotonic)
    mover = Mover(
        slots,
        links.sources,
        settings.stage,
        dead=links.votes.dead,
        clock=links.monotonic,
        beat=watchdog.mover,
    )
    watcher = links.threads(links.store, listener, mover, shared, links.reporter, watchdog)
    sampler = Sampler(settings, parts, links)
    swapper = Swapper(
        placement,
        slots,
        shared,
        fence,
        mover,
        orders=watcher,
        cut=sampler.cut,
        clock=links.monotonic,
    )
    voting = Voting(
        voter,
        swapper,
        shared,
        fence,
        recorder,
        membership=settings.membership,
        vote_every=settings.config.vote_every,
    )
    scrubber = Scrubber(rank, settings.topology, parts.bank, parts.digests)
    scrub_schedule = ScrubSchedule(
        scrubber,
        swapper,
        mover,
        shared,
        watcher,
        recorder=recorder,
        every_steps=settings.config.scrub_every_steps,
        clock=links.monotonic,
    )
    update = WeightUpdate(
        slots,
        swapper,
        voting,
        scrub_schedule,
        links,
        voter,
        deadline_s=settings.config.vote_deadline_s,
        shared=shared,
        fence=fence,
        beat=watchdog.step,
        last_step=steps,
    )
    recovery = RankRecovery(
        settings,
        rank,
        links,
        swapper,
        voting,
        scrub_schedule,
        shared=shared,
        recorder=recorder,
        beat=watchdog.step,
        last_step=steps,
    )
    read_ahead = ReadAhead(
        rank,
        settings.topology,
        links.store,
        lambda records: watcher.do(partial(mover.read_ahead, records)),
    )
    return RankCore(
        settings,
        parts,
        links,
        slots,
        steps,
        shared,
        fence,
        watchdog,
        mover,
        sampler,
        voter,
        watcher,
        swapper,
        voting,
        scrubber,
        scrub_schedule,
        update,
        recovery,
        read_ahead,
        StepTimer(links.monotonic),
    )
