"""Entry point of a rank: the object that a serving process holds to take part in balancing.

    agent.start()
    while agent.step(number, "decode"):  # between forward passes, dummy batches included
        model.forward(batch)
    agent.close()

``step`` reads the counters, votes, and applies swaps that a vote decided. Slow work runs on the
agent's own threads: one loads bytes, two access the store. A store outage or a failed migration
never fails a step. A dead peer always does, because its tokens would be lost.

Its pieces: ``voting`` (ballots and verdicts), ``swapper`` (the serving placement), ``update`` (new
weights), ``scrub_schedule`` (idle steps), ``mover`` (bytes) and ``watcher`` (threads).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from eplb.core.load import Phase as LoadPhase
from eplb.core.placement import Placement
from eplb.decision.expert_times import ExpertTimes
from eplb.errors import BrokenGroup, ConfigError, GroupChanges, RankError
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery, SurvivorReport
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN
from rebalance.protocol.journal import JournalRecorder
from rebalance.protocol.phases import RankPhase
from rebalance.protocol.voter import Voter
from rebalance.rank.parts import AgentSettings, Links, RankParts, StepCount
from rebalance.rank.sampling import Sampler
from rebalance.rank.step_times import LOAD_PHASES, StepTimer
from rebalance.rank.watcher import ReadAhead
from rebalance.stage.mover import Mover
from rebalance.stage.share import RankSlots
from rebalance.swap.scrubber import ScrubSchedule
from rebalance.swap.swapper import StepFigures, Swapper, Voting
from rebalance.swap.weight_update import WeightUpdate
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Watchdog
from rebalance.types import SWITCHED_OFF, StepCounter
from runtime.counters import SlotCounter
from runtime.streams import Completion
from telemetry.state.live import Control
from telemetry.state.runs import (
    EXPERT_TIMES,
    PROGRESS_THREAD,
    REPORT_EVERY_S,
    STEP_TIMES,
    RankState,
)

REPORT_DEADLINE_S = 5.0  # for running work to end before a rank writes its survivor report
REPORTED_PAUSES = 256  # pauses of the latest swaps


class RankAgent:
    """A rank's part in balancing: counts out, migrations in, swaps by vote.

    Args:
        settings: alike on every rank.
        slots: the rank's slots, and what they must hold.
        counter: counts what each slot of the rank receives.
        links: the rank's ways to the outside.
        placement: the placement that serves at the start.
        steps: counts forward passes; None where the engine numbers each call of ``step``.
    """

    def __init__(
        self,
        settings: AgentSettings,
        slots: RankSlots,
        counter: SlotCounter,
        links: Links,
        placement: Placement,
        steps: StepCounter | None = None,
    ) -> None:
        self.table, self.counter, self._steps = slots.table, counter, steps
        self._settings, self._links = settings, links
        self._rank = slots.rank
        self.on_halt: Callable[[], None] = lambda: None  # called once, when serving has ended
        self.on_look: Callable[[], None] = lambda: None  # called at each look at the store
        self.report_every_s = 0.0  # longest time between two reports; 0: unknown
        self.expert_times: ExpertTimes | None = None  # measured before the start; None: it was not
        self.membership = settings.membership  # grows when it agrees with survivors
        self._survivors: frozenset[int] | None = None
        self.notes: dict[str, Any] = {}  # what the engine adds to this rank's reports

        self._last = StepCount()
        self._watchdog = watchdog = Watchdog(settings.config.plan_deadline_s, links.monotonic)
        self._recorder = recorder = JournalRecorder(links.journal, self._last)
        initial = RankPhase(generation=placement.generation)
        self.shared = shared = SharedPhase(initial, recorder.note_change)
        self.mover = mover = Mover(
            slots,
            links.sources,
            settings.config.stage_on(slots.bank.device.type),
            dead=links.votes.dead,
            clock=links.monotonic,
            beat=watchdog.mover,
        )
        # Weakly: an agent that another one has replaced is freed at once, with its mapped memory,
        # and not by the next full collection.
        self.watcher = watcher = links.threads(
            links.store, weakref.proxy(self), mover, shared, links.reporter, watchdog, links.loss
        )
        # For reports and inspection, as all that has no underscore below; an engine needs none of
        # it.
        self.parts = parts = RankParts(
            settings, links, slots, self._last, recorder, shared, watchdog, mover, watcher
        )
        self.voter = Voter(
            self._rank, links.votes, settings.config.vote_deadline_s, links.monotonic
        )
        self._sampler = Sampler(parts, counter)
        self.swapper = Swapper(parts, placement, self._sampler.cut)
        self.voting = Voting(parts, self.voter, self.swapper)
        self.scrub_schedule = ScrubSchedule(parts, self.swapper)
        self.update = WeightUpdate(
            parts, self.voter, self.swapper, self.voting, self.scrub_schedule
        )
        self._read_ahead = ReadAhead(
            self._rank,
            settings.topology,
            links.store,
            lambda records: watcher.do(partial(mover.read_ahead, records)),
        )
        self._step_timer = StepTimer(links.monotonic)
        # Number of a pass, and what is called once that is over.
        self._first_pass: tuple[int, Callable[[], None]] | None = None
        self._is_recovering = False  # after a death: no step of this agent may follow
        self._has_ended = False  # on every rank, by vote
        self._has_failed = False  # the last call, by an error of this rank's own
        watchdog.step.busy("before the first step")

    # -- what the serving process calls

    def start(self) -> None:
        """Start the threads."""
        self.watcher.start()

    def step(self, step: int | None = None, phase: LoadPhase | None = None) -> bool:
        """Do what is due between two forward passes; False when serving ends on every rank.

        Calling it twice between the same two passes does nothing the second time. Once serving has
        ended it stays so.

        Args:
            step: number of the forward pass that is about to begin, from 0 on, alike on every rank.
                Micro-batches, speculative steps and dummy batches are part of one pass. None: the
                count of ``steps``; with both, they must agree.
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
                f"rank {self._rank}: a forward pass of phase {phase!r}, "
                f"expected one of: {', '.join(LOAD_PHASES)}"
            )
        if self._has_ended:
            return False
        step = self._number(step)
        if not self._may_begin(step):
            return True
        self._last.last = step
        if self._first_pass is not None and step > self._first_pass[0]:
            self._first_pass[1]()
            self._first_pass = None
        load_phase = phase or self._settings.config.load_phase
        self._step_timer.at_step(self.shared.state, load_phase)
        self._watchdog.step.busy(f"before step {step}")
        self.voter.raise_if_peer_dead(f"before step {step}")
        if step % self._settings.config.sample_steps == 0:
            self._sampler.cut(step, self.placement)
        is_vote_due = step % self._settings.config.vote_every == 0
        self.voting.read(step, must_finish=is_vote_due)
        if step in (self.voting.halt_at, self.voting.switch_at):
            self._sampler.cut(step, self.placement)
            self.voter.wait_for_device(self._sampler.arrival, step, is_halting=True)
            self._sampler.hand_over(wait=True)
            if step != self.voting.halt_at:
                self._watchdog.step.busy("changing the group")
                raise GroupChanges(f"rank {self._rank}: the group changes before step {step}")
            self._watchdog.step.idle("serving has ended")
            self._has_ended = True
            self.on_halt()
            return False
        self._sampler.hand_over()
        self.scrub_schedule.at_step()
        if is_vote_due:
            self._watch_over()
            self._links.serves()
            self.voting.cast(step)
        self._sampler.begin_pass(load_phase)
        self._watchdog.step.busy(f"in step {step}")
        return True

    def _number(self, given: int | None) -> int:
        """The number of the step that is about to begin: the engine's, the counter's, or both."""
        rank = self._rank
        counted = None if self._steps is None else self._steps.steps
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
        rank, last = self._rank, self._last.last
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
        rank, state, ended = self._rank, self.shared.state, self.watcher.ended()
        if ended:
            reason = f"rank {rank}: thread {' and '.join(ended)} exited unexpectedly"
            self.shared.update(phases.freeze, reason)
        objection = self._watchdog.objection(state)
        if objection and state.plan is not None:
            self.shared.update(phases.want_abort, state.plan.plan_id, f"rank {rank}: {objection}")
        if ended or self._watchdog.is_watcher_stuck:
            # Otherwise the watcher's task, which has stopped.
            self._links.reporter.state(self.describe())

    def wait(self, completion: Completion) -> None:
        """Wait for the device; raise as soon as a peer is known to be dead.

        A dispatch kernel may wait minutes for a dead rank (DeepEP v1.2.1: about 100 s) and block
        the host. The liveness connections on the host detect the death within milliseconds.

        Raises:
            BrokenGroup: a peer is dead, or the device is not done before the vote's deadline.
        """
        self.voter.wait_for_device(completion, self._last.last)

    def wait_for_exchange(self, exchange: dist.Work) -> None:
        """Wait for an exchange of tokens on the host, but not for one that lacks a dead peer.

        Raises:
            BrokenGroup: a peer is dead.
        """
        begun = self._links.monotonic()
        self.voter.wait_for_exchange(exchange, self._last.last)
        self._step_timer.waited(self._links.monotonic() - begun)

    def begin_update(self, version: int) -> None:
        """Stop moving experts, on every rank, so that the engine can replace all weights.

        Called by every rank between the same two steps. A migration under way is dropped by vote
        first. Then load the new weights into ``held()``, and call ``end_update``; no step between.

        Raises:
            ConfigError: an update is under way already, or versions do not grow.
            RankError: not every rank updates now, or one is dead or late.
        """
        with self._failures():
            self.update.begin(version)

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
        self.voting.wants_halt = True

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

    def close(self) -> None:
        """Stop the threads and leave the group. The caller flushes the reporter.

        After an error of this rank's own the others detect a death; else it is an orderly leave.
        """
        self.watcher.close()
        self._links.votes.close(is_failure=self._has_failed)
        self.voter.pending = None  # its exchange keeps the group's sockets open

    # -- after a death (rebalance.recovery, rebalance.assembly.survivors)

    def go_on_from(
        self, before: RankAgent, step: int, on_first_pass: Callable[[], None] = lambda: None
    ) -> None:
        """Continue what the agent of a broken group did in this process; before the start.

        Args:
            before: that agent, which is closed.
            step: number of the next forward pass, alike on all survivors.
            on_first_pass: called once, when that pass is over.
        """
        state = before.shared.state
        self.shared.update(
            lambda mine: replace(
                mine, weights_version=state.weights_version, refused_up_to=before.settled()[1]
            )
        )
        self._last.last, self._first_pass = step - 1, (step, on_first_pass)
        self._sampler.begin_at(step)
        self._steps = before._steps
        self.on_halt, self.report_every_s = before.on_halt, before.report_every_s
        self.expert_times, self.notes = before.expert_times, before.notes
        self.voting.wants_halt = before.voting.wants_halt

    @property
    def changes_group(self) -> bool:
        """Whether its last step found that the group ends as planned."""
        return self._last.last == self.voting.switch_at

    @property
    def members(self) -> frozenset[int]:
        """Ranks of the group; after a recovery the survivors."""
        alive = frozenset(np.flatnonzero(self._settings.topology.alive).tolist())
        return alive if self._survivors is None else self._survivors

    def dead(self) -> frozenset[int]:
        """Ranks that are known to be dead."""
        return self._links.votes.dead()

    def survivor_report(self, deadline_s: float = REPORT_DEADLINE_S) -> SurvivorReport:
        """Stop adopting, swapping and repairing; return how far this rank has come.

        Args:
            deadline_s: for the running check of the scrubber to end. The report is written by then
                in any case, because a rank without a report counts as dead.
        """
        self._is_recovering = True
        self.watcher.stop_watching()
        self._watchdog.step.busy("recovering after a death")
        self.shared.update(phases.freeze, "a rank died")
        # What was found corrupted is not repaired, and slots that are rolled forward are not looked
        # at.
        has_ended = self.scrub_schedule.end_look(deadline_s)
        with self.shared.changed:
            state, closed = self.shared.state, self.swapper.closed
            # An aborted plan counts as none, as in the votes.
            voted = phases.ballot(state, step=0, membership=self.membership, halt=False)
            report = SurvivorReport(
                run=self._settings.run,
                rank=self._rank,
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
                time=self._links.clock(),
            )
        # The mover's thread looks, and stages only after it: nothing can be rolled forward here.
        assert has_ended or not report.prepared, "who looks at a slot has staged nothing"
        self._recorder.note("death detected", state, dead=list(report.dead))
        self._recorder.note(
            "survivor report", state, swapped=report.swapped, prepared=report.prepared
        )
        return report

    def apply_recovery(self, record: Recovery) -> None:
        """Apply what the record includes beyond this rank's swaps, and end the migration."""
        state = self.shared.state
        self._recorder.note("recovery", state, membership=record.membership, reason=record.reason)
        self.membership, self._survivors = record.membership, frozenset(record.survivors)
        verdicts = phases.missed_verdicts(state, record)
        if verdicts:
            self.shared.update(lambda found: replace(found, abort_reason=record.reason))
        for cast, verdict in verdicts:
            self.voting.apply_verdict(cast, verdict, self._last.last)

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
        """Return whether no rank was known to work on a plan when the ranks voted last."""
        return published is None or published.plan_id != self.voting.newest_plan_id

    def _is_open(self, plan_id: int, published: Migration | None) -> bool:
        """Return whether a plan is published, or was already committed by faster ranks.

        Then the verdict that they have read is on its way to this one.
        """
        if published is not None and published.plan_id == plan_id:
            return True
        committed = self._links.store.committed()
        return committed is not None and committed.plan_id == plan_id

    def settled(self) -> tuple[Placement, int]:
        """Return the committed placement and the newest plan id, as known to this rank."""
        return self.swapper.settled()

    def describe(self) -> RankState:
        """Return how this rank stands, for the store."""
        with self.shared.changed:
            state = self.shared.state
            share = self.swapper.share if state.plan is not None else None
        stage, oldest = self.mover.figures, self._watchdog.oldest()
        figures, scrubber = self.figures, self.scrub_schedule.scrubber
        times = {} if self.expert_times is None else {EXPERT_TIMES: vars(self.expert_times)}
        return RankState(
            run=self._settings.run,
            rank=self._rank,
            time=self._links.clock(),
            step=max(self._last.last, 0),
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
