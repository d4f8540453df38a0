"""One rank: the object that a serving process holds to take part in balancing.

    rank.start()
    while rank.step(number, "decode"):  # between forward passes, dummy batches included
        model.forward(batch)
    rank.close()

``step`` reads the counters, votes, and applies swaps that a vote decided. Slow work runs on the
rank's own threads: one loads bytes, two access the store. A store outage or a failed migration
never fails a step. A dead peer always does, because its tokens would be lost.

A rank is in one group at a time (``enter``). What belongs to the process stays: memory, counters,
store, reporter, journal, and what the engine was told. What belongs to the group is made anew:
``voting`` (ballots and verdicts), ``swapper`` (the serving placement), ``update`` (new weights),
``scrub_schedule`` (idle steps), ``mover`` (bytes) and ``watcher`` (threads).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from eplb.clock import Clock
from eplb.core.load import Phase as LoadPhase
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.decision.expert_times import BUDGET_S, ExpertTimes
from eplb.errors import (
    BrokenGroup,
    ConfigError,
    GroupChanges,
    RankError,
)
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery, SurvivorReport
from rebalance.assembly.config import RankConfig
from rebalance.assembly.description import DeploymentDescription
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN
from rebalance.protocol.journal import JournalRecorder, JournalSink, NoJournal
from rebalance.protocol.phases import RankPhase
from rebalance.protocol.voter import Voter
from rebalance.rank.group import Group
from rebalance.rank.sampling import Sampler
from rebalance.rank.step_times import LOAD_PHASES, StepTimer
from rebalance.rank.watcher import ReadAhead, SampleSink, StoreLoss, Watcher
from rebalance.stage.mover import Mover
from rebalance.stage.share import RankSlots
from rebalance.swap.scrubber import ScrubSchedule
from rebalance.swap.swapper import StepFigures, Swapper, Voting
from rebalance.swap.weight_update import WeightUpdate
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Watchdog
from rebalance.types import SWITCHED_OFF, Record, StepCounter
from rebalance.weights.sources import WeightSources
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertBank
from runtime.group import set_deadline
from runtime.model.compute import Experts
from runtime.model.expert_times import measure_experts
from runtime.routing import RoutingTable
from runtime.streams import Completion
from telemetry.state.live import Control
from telemetry.state.runs import (
    EXPERT_TIMES,
    HAS_ENDED,
    PROGRESS_THREAD,
    REPORT_EVERY_S,
    STEP_TIMES,
    RankState,
)
from telemetry.state.store import StateStore

# Within what `eplb launch` gives ranks after a signal: what waits longer is on disk, and is written
# by the next start.
FLUSH_DEADLINE_S = 10.0
REPORT_DEADLINE_S = 5.0  # for running work to end before a rank writes its survivor report
REPORTED_PAUSES = 256  # pauses of the latest swaps

log = logging.getLogger(__name__)


class Process(Protocol):
    """The process of a rank, as the rank sees it (``rebalance/assembly/process.py``)."""

    deployment: DeploymentDescription
    has_left: bool

    def begin_group(self) -> None:
        """The rank is about to serve in the group that it has entered."""

    def survive(self) -> bool:
        """Enter another group; see ``Rank.survive``."""

    def close(self) -> None:
        """Leave the rank's place to another process."""


class Rank:
    """A rank's part in balancing: counts out, migrations in, swaps by vote.

    It serves nowhere before it has entered a group.

    Args:
        config: alike on every rank.
        slots: its slots, and what they must hold.
        counter: counts what each slot of the rank receives.
        store: of the deployment.
        reporter: takes samples and reports.
        model: the MoE layers and their experts; needed to measure these.
        passes: counts forward passes; None where the engine numbers each call of ``step``.
        journal: takes notes for the analysis of a failure.
        clock: of the day; by which samples and reports are dated.
        monotonic: of the mover's and the watchdog's deadlines.
    """

    new_watcher: type[Watcher] = Watcher  # a scheduler plays the threads itself

    # Of the group that it is in, made anew by ``enter``.
    sources: WeightSources
    membership: int  # grows when it agrees with survivors
    watchdog: Watchdog
    recorder: JournalRecorder
    shared: SharedPhase
    mover: Mover
    watcher: Watcher
    voter: Voter
    swapper: Swapper
    voting: Voting
    scrub_schedule: ScrubSchedule
    update: WeightUpdate
    last_step: int  # that was begun

    def __init__(
        self,
        config: RankConfig,
        slots: RankSlots,
        counter: SlotCounter,
        store: StateStore,
        reporter: SampleSink,
        *,
        model: ModelShape | None = None,
        passes: StepCounter | None = None,
        journal: JournalSink | None = None,
        clock: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        self.config, self.slots, self.counter, self.model = config, slots, counter, model
        self.store, self.reporter, self.journal = store, reporter, journal or NoJournal()
        self.clock, self.monotonic, self.passes = clock, monotonic, passes
        self.on_halt: Callable[[], None] = lambda: None  # called once, when serving has ended
        self.on_look: Callable[[], None] = lambda: None  # called at each look at the store
        self.report_every_s = 0.0  # longest time between two reports; 0: unknown
        self.expert_times: ExpertTimes | None = None  # measured before the start; None: it was not
        self.notes: dict[str, Any] = {}  # what the engine adds to this rank's reports
        self.process: Process | None = None  # of a deployment that `eplb launch` has started
        self.dispatchers: list[AllToAllDispatcher] = []  # that exchange tokens in its group
        self.wants_halt = False  # of this process: a group that it enters is told too
        self._group: Group | None = None
        self._has_ended = False  # on every rank, by vote

    def enter(
        self,
        group: Group,
        placement: Placement,
        sources: WeightSources,
        *,
        loss: StoreLoss | None = None,
        step: int = 0,
        on_first_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """Be a member of a group; ``start`` starts its threads.

        A group that this rank was in before is left already (``leave``).

        Args:
            group: of which all members enter it.
            placement: that serves in it.
            sources: where experts come from.
            loss: restores a store that lost its contents; None: it is not restored.
            step: number of the next forward pass, alike on all members.
            on_first_pass: called once, when that pass is over.
        """
        config, monotonic = self.config, self.monotonic
        weights_version = refused_up_to = 0
        if self._group is not None:
            weights_version = self.shared.state.weights_version
            refused_up_to = self.settled()[1]
        self._group, self.sources = group, sources
        self.slots = slots = replace(self.slots, topology=group.topology)
        self.membership = group.membership
        self._survivors: frozenset[int] | None = None
        self._is_recovering = False  # after a death: no step in this group may follow
        self._has_failed = False  # the last call, by an error of this rank's own
        self._first_pass: tuple[int, Callable[[], None]] | None = (step, on_first_pass)
        self.on_look = lambda: None
        self.watchdog = Watchdog(config.plan_deadline_s, monotonic)
        self.recorder = JournalRecorder(self.journal)
        self._begin(step - 1)
        initial = RankPhase(
            generation=placement.generation,
            weights_version=weights_version,
            refused_up_to=refused_up_to,
        )
        self.shared = SharedPhase(initial, self.recorder.note_change)
        self.mover = Mover(
            slots,
            sources,
            config.stage_on(slots.bank.device.type),
            dead=group.votes.dead,
            clock=monotonic,
            beat=self.watchdog.mover,
        )
        # Weakly: a rank that was closed is freed at once, with its mapped memory, and not by the
        # next full collection.
        self.watcher = self.new_watcher(
            self.store,
            weakref.proxy(self),
            self.mover,
            self.shared,
            self.reporter,
            self.watchdog,
            loss,
        )
        self.voter = Voter(self.number, group.votes, config.vote_deadline_s, monotonic)
        self._sampler = Sampler(self, step)
        self.swapper = Swapper(self, placement, self._sampler.cut)
        self.voting = Voting(self, self.voter, self.swapper)
        self.scrub_schedule = ScrubSchedule(self, self.swapper)
        self.update = WeightUpdate(self, self.voter, self.swapper, self.voting, self.scrub_schedule)
        self._read_ahead = ReadAhead(
            self.number, group.topology, self.store, partial(_read_ahead, self.watcher, self.mover)
        )
        self._step_timer = StepTimer(monotonic)
        self.watchdog.step.busy("before the first step")

    @property
    def group(self) -> Group:
        """The group that it is in."""
        assert self._group is not None, "it has entered a group"
        return self._group

    @property
    def deployment(self) -> DeploymentDescription:
        """What every rank is given, where ``build_rank_from_env`` has built this one."""
        assert self.process is not None, "it is a rank of a deployment"
        return self.process.deployment

    @property
    def number(self) -> int:
        """Its number in the deployment."""
        return self.slots.rank

    @property
    def topology(self) -> Topology:
        """All ranks; the members of its group are alive."""
        return self.slots.topology

    @property
    def bank(self) -> ExpertBank:
        """The live slots, which the model's kernels read."""
        return self.slots.bank

    @property
    def table(self) -> RoutingTable:
        """Chooses the slot of each routed token."""
        return self.slots.table

    def measure_experts(
        self, experts: Experts, *, fp8_rows: bool = False, budget_s: float = BUDGET_S
    ) -> None:
        """Measure the time of this rank's experts by their rows; once, before the start.

        The controller plans by the curve of all ranks. See ``runtime.model.expert_times``.

        Args:
            experts: what serves.
            fp8_rows: whether the dispatcher delivers rows in FP8, with scales.
            budget_s: for all points.
        """
        assert self.model is not None, "a rank that measures has a model"
        times = measure_experts(
            experts, self.bank, self.model.hidden, fp8_rows=fp8_rows, budget_s=budget_s
        )
        self.expert_times = times
        points = dict(zip(times.rows, times.us, strict=True))
        log.info("us of a slot by rows, in %.2f s, of %s: %s", times.seconds, times.of, points)

    def _begin(self, step: int) -> None:
        """Note the step that has begun, here and in the journal."""
        self.last_step = self.recorder.step = step

    # -- what the serving process calls

    def start(self) -> None:
        """Start the threads of the group that it has entered."""
        if self.process is not None:  # only now: the engine has made its dispatcher
            self.process.begin_group()
        self.watcher.start()

    def step(self, step: int | None = None, phase: LoadPhase | None = None) -> bool:
        """Do what is due between two forward passes; False when serving ends on every rank.

        Calling it twice between the same two passes does nothing the second time. Once serving has
        ended it stays so.

        Args:
            step: number of the forward pass that is about to begin, from 0 on, alike on every rank.
                Micro-batches, speculative steps and dummy batches are part of one pass. None: the
                count of ``passes``; with both, they must agree.
            phase: what the pass is; None: ``RankConfig.load_phase``. A sample of passes that
                differ is "mixed".

        Raises:
            BrokenGroup: a peer is dead or late. Run no further forward pass.
            GroupChanges: a BrokenGroup of which no peer is the cause: the next group is formed.
            RankError: ranks are out of step, this rank must not serve on, or nothing numbers the
                step.
            ConfigError: there is no such phase.
        """
        with self._failures():
            return self._step(step, phase)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Note whether this rank's last call failed by itself: it then leaves as a dead one.

        Else the others would wait for its votes up to their deadline.
        """
        try:
            yield
            self._has_failed = False
        except BrokenGroup:
            raise
        except Exception:
            self._has_failed = True
            raise

    def _step(self, step: int | None, phase: LoadPhase | None) -> bool:
        if phase is not None and phase not in LOAD_PHASES:
            raise ConfigError(
                f"rank {self.number}: a forward pass of phase {phase!r}, "
                f"expected one of: {', '.join(LOAD_PHASES)}"
            )
        if self._has_ended:
            return False
        step = self._number(step)
        if not self._may_begin(step):
            return True
        self._begin(step)
        if self._first_pass is not None and step > self._first_pass[0]:
            self._first_pass[1]()
            self._first_pass = None
        load_phase = phase or self.config.load_phase
        self._step_timer.at_step(self.shared.state, load_phase)
        self.watchdog.step.busy(f"before step {step}")
        self.voter.raise_if_peer_dead(f"before step {step}")
        if step % self.config.sample_steps == 0:
            self._sampler.cut(step, self.placement)
        is_vote_due = step % self.config.vote_every == 0
        self.voting.read(step, must_finish=is_vote_due)
        if step in (self.voting.halt_at, self.voting.switch_at):
            self._sampler.cut(step, self.placement)
            self.voter.wait_for_device(self._sampler.arrival, step, is_halting=True)
            self._sampler.hand_over(wait=True)
            if step != self.voting.halt_at:
                self.watchdog.step.busy("changing the group")
                raise GroupChanges(f"rank {self.number}: the group changes before step {step}")
            self.watchdog.step.idle("serving has ended")
            self._has_ended = True
            self.on_halt()
            return False
        self._sampler.hand_over()
        self.scrub_schedule.at_step()
        if is_vote_due:
            self._watch_over()
            self.group.votes.begin_beats()
            self.voting.cast(step)
        self._sampler.begin_pass(load_phase)
        self.watchdog.step.busy(f"in step {step}")
        return True

    def _number(self, given: int | None) -> int:
        """The number of the step that is about to begin: the engine's, the counter's, or both."""
        rank = self.number
        counted = None if self.passes is None else self.passes.steps
        if given is None and counted is None:
            raise RankError(
                f"rank {rank}: step() without a number, expected one: "
                "this rank was given no counter of forward passes"
            )
        if given is not None and counted not in (None, given):
            raise RankError(
                f"rank {rank}: step {given} after {counted} forward passes, expected step "
                f"{counted}: a call of step() or a forward pass was skipped"
            )
        return given if given is not None else counted  # type: ignore[return-value]

    def _may_begin(self, step: int) -> bool:
        """Return whether a step is new; reject one that must not run."""
        rank, last = self.number, self.last_step
        if self._is_recovering:
            raise RankError(f"rank {rank}: no step may follow a death in the group")
        if step == last:
            return False
        if self.shared.state.next_weights is not None:
            raise RankError(
                f"rank {rank}: step {step} before end_update, expected no forward pass "
                "while the weights are being replaced"
            )
        if step != last + 1:
            raise RankError(
                f"rank {rank}: step {step} follows step {last}, "
                "expected one call of step() before every forward pass"
            )
        return True

    def _watch_over(self) -> None:
        """Detect stopped threads and stalled plans: freeze migrations, or request an abort."""
        rank, state, ended = self.number, self.shared.state, self.watcher.ended()
        if ended:
            reason = f"rank {rank}: thread {' and '.join(ended)} exited unexpectedly"
            self.shared.update(phases.freeze, reason)
        objection = self.watchdog.objection(state)
        if objection and state.plan is not None:
            self.shared.update(phases.want_abort, state.plan.plan_id, f"rank {rank}: {objection}")
        if ended or self.watchdog.is_watcher_stuck:
            # Otherwise the watcher's task, which has stopped.
            self.reporter.state(self.describe())

    def wait(self, completion: Completion) -> None:
        """Wait for the device; raise as soon as a peer is known to be dead.

        A dispatch kernel may wait minutes for a dead rank (DeepEP v1.2.1: about 100 s) and block
        the host. The liveness connections on the host detect the death within milliseconds.

        Raises:
            BrokenGroup: a peer is dead, or the device is not done before the vote's deadline.
        """
        self.voter.wait_for_device(completion, self.last_step)

    def wait_for_exchange(self, exchange: dist.Work) -> None:
        """Wait for an exchange of tokens on the host, but not for one that lacks a dead peer.

        An own dispatcher waits by it too: what the transport raises at a death is translated here.

        Raises:
            BrokenGroup: a peer is dead, or the exchange failed or missed its group's deadline.
        """
        begun = self.monotonic()
        self.voter.wait_for_exchange(exchange, self.last_step)
        self._step_timer.waited(self.monotonic() - begun)

    def begin_update(self, version: int) -> None:
        """Stop moving experts, on every rank, so that the engine can replace all weights.

        Called by every rank between the same two steps. A migration under way is dropped by vote
        first. Then load the new weights into ``held()``, and call ``end_update``; no step between.

        Raises:
            ConfigError: an update is under way already, or versions do not grow.
            RankError: not every rank updates now, or one is dead or late.
        """
        with self._failures():
            self.update.begin(version, self.last_step)

    def held(self) -> Iterator[tuple[int, int, int]]:
        """Return (layer, slot of this rank, expert) of every live slot: where weights belong now.

        Layers are counted from 0 over the MoE layers; ``ModelShape.layer_ids`` has the model's own.
        Not where they belonged at the start: experts have moved since.
        """
        return self.update.held()

    def end_update(self) -> None:
        """Serve the weights that the engine has loaded; every rank again, before the next step.

        Raises:
            MigrationError: replicas of an expert hold different bytes.
            RankError: a rank is dead or late.
        """
        with self._failures():
            self.update.end()

    @property
    def placement(self) -> Placement:
        """The serving placement; valid also in the middle of a migration."""
        return self.swapper.placement

    @property
    def figures(self) -> StepFigures:
        """Statistics of this rank's swaps."""
        return self.swapper.figures

    @property
    def phase(self) -> str:
        """Phase of the migration that this rank works on; "idle" without one."""
        return self.shared.state.phase.value

    @property
    def num_samples(self) -> int:
        """Samples cut so far, and handed to the reporter or about to be."""
        return self._sampler.num_cut

    def request_halt(self) -> None:
        """Ask all ranks to stop serving, at one step; ``step`` then returns False on each."""
        self.wants_halt = True

    def pause_staging(self, of: object = None) -> None:
        """Pause staging, for example during a prefill or a transfer of KV cache. Thread-safe.

        Chunks that are under way still land. Staging resumes once every pause has ended, by
        ``resume_staging`` or after ``StageSettings.pause_deadline_s``.

        Args:
            of: whose pause it is, such as the id of a transfer; a second call restarts that one.
        """
        self.mover.pause(of)

    def resume_staging(self, of: object = None) -> None:
        """End the pause of ``of``. Thread-safe."""
        self.mover.resume(of)
        self.shared.wake()

    def leave(self) -> None:
        """Stop the threads and leave the group.

        After an error of this rank's own the others detect a death; else it is an orderly leave.
        """
        self.watcher.close()
        self.group.votes.close(is_failure=self._has_failed)
        self.voter.pending = None  # its exchange keeps the group's sockets open

    def close(self, flush_deadline_s: float = FLUSH_DEADLINE_S) -> None:
        """Leave the group after the last step, and write what this rank still has to report.

        Raises:
            RankError: the store did not take it in time. All ranks have ended at one step all the
                same, and nothing of this rank is left open.
        """
        self.leave()
        self.notes[HAS_ENDED] = True
        self.reporter.state(self.describe())
        try:
            self.reporter.close(flush_deadline_s)
        finally:
            self.journal.close()
            if self.process is not None:
                self.store.close()
                self.process.close()

    # -- changes of the group

    def all_to_all(self) -> AllToAllDispatcher:
        """Make the plain dispatcher, over the group of the ranks; it ends at a peer's death."""
        group = self.group
        assert group.tokens is not None, "a rank that exchanges tokens has a group for it"
        made = AllToAllDispatcher(group.topology, group.tokens, self.number, self.counter)
        if group.device.type == "cpu":
            set_deadline(group.tokens, self.config.vote_deadline_s)
            made.wait = self.wait_for_exchange
        else:
            made.wait = self._wait_for_kernel
        self.dispatchers.append(made)
        return made

    def _wait_for_kernel(self, exchange: dist.Work) -> None:
        """Wait for an exchange of NCCL, whose own wait with a deadline would end the group."""
        exchange.wait()  # of the stream, not of the host
        self.wait(Completion(is_cuda=True))

    def survive(self) -> bool:
        """After ``BrokenGroup``: agree with the other ranks, and serve on if that is possible.

        The group may also have ended as planned, and a rank that joins waits here until the others
        admit it.

        Returns:
            Whether it serves on, in another group. Else it has ended, and its process must: with
            status 0 if it ``has_left``. After a death a start of all ranks is right then: each
            loads its slots from the placement of the store.
        """
        assert self.process is not None, "a rank of a deployment has a process"
        return self.process.survive()

    @property
    def has_left(self) -> bool:
        """Whether it has left as planned, so that its process is to end, with status 0."""
        return self.process is not None and self.process.has_left

    @property
    def changes_group(self) -> bool:
        """Whether its last step found that the group ends as planned."""
        return self.last_step == self.voting.switch_at

    @property
    def members(self) -> frozenset[int]:
        """Ranks of the group; after a recovery the survivors."""
        return frozenset(self.group.members) if self._survivors is None else self._survivors

    def dead(self) -> frozenset[int]:
        """Ranks that are known to be dead."""
        return self.group.votes.dead()

    def survivor_report(self, deadline_s: float = REPORT_DEADLINE_S) -> SurvivorReport:
        """Stop adopting, swapping and repairing; return how far this rank has come.

        Args:
            deadline_s: for the running check of the scrubber to end. The report is written by then
                in any case, because a rank without a report counts as dead.
        """
        self._is_recovering = True
        self.watcher.stop_watching()
        self.watchdog.step.busy("recovering after a death")
        self.shared.update(phases.freeze, "a rank died")
        # What was found corrupted is not repaired, and slots that are rolled forward are not looked
        # at.
        has_ended = self.scrub_schedule.end_look(deadline_s)
        with self.shared.changed:
            state, closed = self.shared.state, self.swapper.closed
            # An aborted plan counts as none, as in the votes.
            voted = phases.ballot(state, step=0, membership=self.membership, halt=False)
            report = SurvivorReport(
                run=self.group.run,
                rank=self.number,
                membership=voted.membership,
                generation=state.generation,
                weights_version=state.weights_version,
                plan_id=voted.plan_id,
                plan_hash=voted.plan_hash,
                swapped=state.swapped if voted.plan_id != NO_PLAN else 0,
                prepared=voted.prepared,
                closed_plan_id=closed[0],
                closed_applied=closed[1],
                dead=tuple(sorted(self.dead())),
                time=self.clock(),
            )
        # The mover's thread looks, and stages only after it: nothing can be rolled forward here.
        assert has_ended or not report.prepared, "who looks at a slot has staged nothing"
        self.recorder.note("death detected", state, dead=list(report.dead))
        self.recorder.note(
            "survivor report", state, swapped=report.swapped, prepared=report.prepared
        )
        return report

    def apply_recovery(self, record: Recovery) -> None:
        """Apply what the record includes beyond this rank's swaps, and end the migration."""
        state = self.shared.state
        self.recorder.note("recovery", state, membership=record.membership, reason=record.reason)
        self.membership = self.watcher.membership = record.membership
        self._survivors = frozenset(record.survivors)
        verdicts = phases.missed_verdicts(state, record)
        if verdicts:
            self.shared.update(lambda found: replace(found, abort_reason=record.reason))
        for cast, verdict in verdicts:
            self.voting.apply_verdict(cast, verdict, self.last_step)

    # -- what the watcher calls, on its own thread

    def on_store_update(self, control: Control, published: Migration | None) -> bool:
        """Process an update of the store; return False to be called again soon."""
        self.on_look()
        state = self.shared.state
        if state.plan is not None:
            if not control.movement:
                self.shared.update(phases.want_abort, state.plan.plan_id, SWITCHED_OFF)
            elif not self._is_open(state.plan.plan_id, published):
                self.shared.update(phases.want_abort, state.plan.plan_id, "the plan was withdrawn")
        elif self.voting.next_group and self._is_new(published):
            return False  # the next group serves soon
        elif published is not None and control.movement:
            return self.swapper.adopt(published)
        elif control.movement:
            self._read_ahead.look()
        return True

    def _is_new(self, published: Migration | None) -> bool:
        """Return whether nothing is published that a rank worked on at the last vote."""
        return published is None or published.plan_id != self.voting.newest_plan_id

    def _is_open(self, plan_id: int, published: Migration | None) -> bool:
        """Return whether a plan is published, or was already committed by faster ranks.

        Then the verdict that they have read is on its way to this one.
        """
        if published is not None and published.plan_id == plan_id:
            return True
        committed = self.store.committed()
        return committed is not None and committed.plan_id == plan_id

    def settled(self) -> tuple[Placement, int]:
        """Return the committed placement and the newest plan id, as known to this rank."""
        return self.swapper.settled()

    def describe(self) -> RankState:
        """Return how this rank stands, for the store."""
        with self.shared.changed:
            state = self.shared.state
            share = self.swapper.share if state.plan is not None else None
        stage, oldest = self.mover.figures, self.watchdog.oldest()
        figures, scrubber = self.figures, self.scrub_schedule.scrubber
        times = {} if self.expert_times is None else {EXPERT_TIMES: vars(self.expert_times)}
        return RankState(
            run=self.group.run,
            rank=self.number,
            time=self.clock(),
            step=max(self.last_step, 0),
            generation=state.generation,
            phase=state.phase.value,
            plan_id=state.plan.plan_id if state.plan else 0,
            applied=state.applied,
            sequence=self._sampler.num_cut,
            weights_version=state.weights_version,
            prepared=state.prepared,
            frozen=state.frozen_reason,
            digest_failures=stage.num_wrong_digests + scrubber.num_digest_failures,
            mover_failures=self.watcher.num_mover_failures,
            progress_age_s=round(oldest.age_s, 3),
            progress_of=str(oldest),
            detail={
                "to_stage": sum(map(len, share.moves)) if share is not None else 0,
                "bytes_by_source": dict(stage.bytes_by_source),
                "experts_moved": figures.experts_moved,
                "rebalances": figures.rebalances,
                "staged": stage.num_staged,
                STEP_TIMES: vars(self._step_timer.figures()),
                "swap_pauses_ms": figures.swap_pauses_ms[-REPORTED_PAUSES:],
                "scrubbed": dict(scrubber.counts),
                "sweeps": scrubber.num_sweeps,
                REPORT_EVERY_S: self.report_every_s,
                PROGRESS_THREAD: oldest.thread,
            }
            | self._step_timer.latest_ms()
            | times
            | self.notes,
        )


def _read_ahead(watcher: Watcher, mover: Mover, records: Sequence[Record]) -> None:
    watcher.do(partial(mover.read_ahead, records))
