"""Entry point of a rank: the object that a serving process holds to take part in balancing.

    agent.start()
    while agent.step(number, "decode"):  # between forward passes, dummy batches included
        model.forward(batch)
    agent.close()

``step`` reads the counters, votes, and applies swaps that a vote decided. Slow work runs on the
agent's own threads: one loads bytes, two access the store. A store outage or a failed migration
never fails a step. A dead peer always does, because its tokens would be lost.

The parts (``rebalance.rank.core``): ``voting`` (ballots and verdicts), ``swapper`` (the serving
placement), ``update`` (new weights), ``recovery`` (after a death), ``scrub_schedule`` (idle steps),
``report``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from eplb.core.load import Phase as LoadPhase
from eplb.core.placement import Placement
from eplb.decision.expert_times import ExpertTimes
from eplb.errors import BrokenGroup, ConfigError, RankError
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery, SurvivorReport
from rebalance.protocol import phases
from rebalance.protocol.voter import Exchange
from rebalance.rank.core import make_core
from rebalance.rank.parts import AgentSettings, Links, RankParts
from rebalance.rank.step_times import LOAD_PHASES
from rebalance.recovery.survivors import REPORT_DEADLINE_S
from rebalance.swap.swapper import StepFigures
from rebalance.weights.link.server import LinkServer
from runtime.streams import Completion
from telemetry.state.live import Control
from telemetry.state.runs import EXPERT_TIMES, REPORT_EVERY_S, RankState


class RankAgent:
    """A rank's part in balancing: counts out, migrations in, swaps by vote."""

    def __init__(
        self, settings: AgentSettings, parts: RankParts, links: Links, placement: Placement
    ) -> None:
        self._settings, self._parts = settings, parts
        self.on_halt: Callable[[], None] = lambda: None  # called once, when serving has ended
        self.report_every_s = 0.0  # longest time between two reports; 0: unknown
        self.expert_times: ExpertTimes | None = None  # measured before the start; None: it was not
        self.notes: dict[str, Any] = {}  # what the engine adds to this rank's reports
        # For reports and inspection; an engine needs none of it.
        self.core = core = make_core(settings, parts, links, placement, self)
        self._shared, self._watchdog, self._sampler = core.shared, core.watchdog, core.sampler
        self._swapper, self._voting, self._scrub_schedule = (
            core.swapper,
            core.voting,
            core.scrub_schedule,
        )
        self._update, self._recovery = core.update, core.recovery
        self._link_server: LinkServer | None = None
        self._has_ended = False  # on every rank, by vote
        self._has_failed = False  # the last call, by an error of this rank's own
        self._watchdog.step.busy("before the first step")

    # -- what the serving process calls

    def start(self) -> None:
        """Start the threads, and let other ranks ask for what this one holds, if they may.

        Raises:
            MigrationError: the address at which they ask cannot be listened on.
        """
        self._link_server = self.core.listen()
        self.core.watcher.start()

    def step(self, step: int | None = None, phase: LoadPhase | None = None) -> bool:
        """Do what is due between two forward passes; False when serving ends on every rank.

        Calling it twice between the same two passes does nothing the second time. Once serving has
        ended it stays so.

        Args:
            step: number of the forward pass that is about to begin, from 0 on, alike on every rank.
                Micro-batches, speculative steps and dummy batches are part of one pass. None: the
                count of ``RankParts.steps``; with both, they must agree.
            phase: what the pass is; None: ``RankConfig.load_phase``. A sample of passes that
                differ is "mixed".

        Raises:
            BrokenGroup: a peer is dead or late. Run no further forward pass.
            RankError: ranks are out of step, this rank must not serve on, or nothing numbers the
                step.
            ConfigError: there is no such phase.
        """
        with self._failures():
            return self._step(step, phase)

    def watch_faults(self, counters: Mapping[str, torch.Tensor]) -> None:
        """Read these counters of the device with each sample; once, before the start.

        Args:
            counters: ``runtime.batch.parts.BatchParts.faults``. Different pulls raise ``RankError``
                in ``step``; late counts are a warning, and part of this rank's reports.
        """
        self._sampler.faults.watch(counters)

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
                f"rank {self._parts.rank}: a forward pass of phase {phase!r}, "
                f"expected one of: {', '.join(LOAD_PHASES)}"
            )
        if self._has_ended:
            return False
        step = self._number(step)
        if not self._may_begin(step):
            return True
        self.core.steps.last = step
        load_phase = phase or self._settings.config.load_phase
        self.core.step_timer.at_step(self._shared.state, load_phase)
        self._watchdog.step.busy(f"before step {step}")
        self.core.voter.raise_if_peer_dead(f"before step {step}")
        if step % self._settings.config.sample_steps == 0:
            self._sampler.cut(step, self.placement)
        is_vote_due = step % self._settings.config.vote_every == 0
        self._voting.read(step, must_finish=is_vote_due)
        if step == self._voting.halt_at:
            self._sampler.cut(step, self.placement)
            self.core.voter.wait_for_device(self._sampler.arrival, step, is_halting=True)
            self._sampler.hand_over(wait=True)
            self._watchdog.step.idle("serving has ended")
            self._has_ended = True
            self.on_halt()
            return False
        self._sampler.hand_over()
        self._scrub_schedule.at_step()
        if is_vote_due:
            self._watch_over()
            self._voting.cast(step)
        self._sampler.begin_pass(load_phase)
        self._watchdog.step.busy(f"in step {step}")
        return True

    def _number(self, given: int | None) -> int:
        """The number of the step that is about to begin: the engine's, the counter's, or both."""
        rank = self._parts.rank
        counted = None if self._parts.steps is None else self._parts.steps.steps
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
        rank, last = self._parts.rank, self.core.steps.last
        if self._recovery.is_recovering:
            raise RankError(f"rank {rank}: no step may follow a death in the group")
        if step == last:
            return False
        if not self.core.fence.is_open:
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
        rank, state, ended = self._parts.rank, self._shared.state, self.core.watcher.ended()
        if ended:
            reason = f"rank {rank}: thread {' and '.join(ended)} exited unexpectedly"
            self._shared.update(phases.freeze, reason)
        objection = self._watchdog.objection(state)
        if objection and state.plan is not None:
            self._shared.update(phases.want_abort, state.plan.plan_id, f"rank {rank}: {objection}")
        if ended or self._watchdog.is_watcher_stuck:
            # Otherwise the watcher's task, which has stopped.
            self.core.links.reporter.state(self.describe())

    def wait(self, completion: Completion) -> None:
        """Wait for the device; raise as soon as a peer is known to be dead.

        A dispatch kernel may wait minutes for a dead rank (DeepEP v1.2.1: about 100 s) and block
        the host. The liveness connections on the host detect the death within milliseconds.

        Raises:
            BrokenGroup: a peer is dead, or the device is not done before the vote's deadline.
        """
        self.core.voter.wait_for_device(completion, self.core.steps.last)

    def wait_for_exchange(self, exchange: Exchange) -> None:
        """Wait for an exchange of tokens on the host, but not for one that lacks a dead peer.

        Raises:
            BrokenGroup: a peer is dead.
        """
        self.core.voter.wait_for_exchange(exchange, self.core.steps.last)

    def begin_update(self, version: int) -> None:
        """Stop moving experts, on every rank, so that the engine can replace all weights.

        Called by every rank between the same two steps. A migration under way is dropped by vote
        first. Then load the new weights into ``held()``, and call ``end_update``; no step between.

        Raises:
            ConfigError: an update is under way already, or versions do not grow.
            RankError: not every rank updates now, or one is dead or late.
        """
        with self._failures():
            self._update.begin(version)

    def held(self) -> Iterator[tuple[int, int, int]]:
        """Return (layer, slot of this rank, expert) of every live slot: where weights belong now.

        Not where they belonged at the start: experts have moved since.
        """
        return self._update.held()

    def end_update(self) -> None:
        """Serve the weights that the engine has loaded; every rank again, before the next step.

        Raises:
            MigrationError: replicas of an expert hold different bytes.
            RankError: a rank is dead or late.
        """
        with self._failures():
            self._update.end()

    @property
    def placement(self) -> Placement:
        """The serving placement; valid also in the middle of a migration."""
        return self._swapper.placement

    @property
    def figures(self) -> StepFigures:
        """Statistics of this rank's swaps."""
        return self._swapper.figures

    @property
    def phase(self) -> str:
        """Phase of the migration that this rank works on; "idle" without one."""
        return self._shared.state.phase.value

    @property
    def num_samples(self) -> int:
        """Samples cut so far, and handed to the reporter or about to be."""
        return self._sampler.num_cut

    def request_halt(self) -> None:
        """Ask all ranks to stop serving, at one step; ``step`` then returns False on each."""
        self._voting.wants_halt = True

    def pause_staging(self, of: object = None) -> None:
        """Pause staging, for example during a prefill or a transfer of KV cache. Thread-safe.

        Chunks that are under way still land. Staging resumes once every pause has ended, by
        ``resume_staging`` or after ``StageSettings.pause_deadline_s``.

        Args:
            of: whose pause it is, such as the id of a transfer; a second call restarts that one.
        """
        self.core.mover.pause(of)

    def resume_staging(self, of: object = None) -> None:
        """End the pause of ``of``. Thread-safe."""
        self.core.mover.resume(of)
        self._shared.wake()

    def close(self) -> None:
        """Stop the threads and leave the group. The caller flushes the reporter.

        After an error of this rank's own the others detect a death; else it is an orderly leave.
        """
        self.core.watcher.close()
        self.core.links.sources.close()
        if self._link_server is not None:
            self._link_server.close()
        self.core.links.votes.close(is_failure=self._has_failed)

    # -- after a death (rebalance.recovery.survivors)

    def dead(self) -> frozenset[int]:
        """Ranks that are known to be dead."""
        return self.core.links.votes.dead()

    def survivor_report(self, deadline_s: float = REPORT_DEADLINE_S) -> SurvivorReport:
        """Stop adopting and swapping; return this rank's survivor report within the deadline."""
        return self._recovery.survivor_report(deadline_s)

    def apply_recovery(self, record: Recovery) -> None:
        """Apply what the record includes beyond this rank's swaps, and end the migration."""
        self._recovery.apply_recovery(record)

    # -- what the watcher calls, on its own thread

    def on_store_update(self, control: Control, published: Migration | None) -> bool:
        """Process an update of the store; return False to be called again soon."""
        state = self._shared.state
        if state.plan is not None:
            if not control.movement:
                self._shared.update(
                    phases.want_abort, state.plan.plan_id, "movement is switched off"
                )
            elif not self._is_open(state.plan.plan_id, published):
                self._shared.update(phases.want_abort, state.plan.plan_id, "the plan was withdrawn")
        elif published is not None and control.movement:
            return self._swapper.adopt(published)
        elif control.movement:
            self.core.read_ahead.look()
        return True

    def _is_open(self, plan_id: int, published: Migration | None) -> bool:
        """Return whether a plan is published, or was already committed by faster ranks.

        Then the verdict that they have read is on its way to this one.
        """
        if published is not None and published.plan_id == plan_id:
            return True
        committed = self.core.links.store.committed()
        return committed is not None and committed.plan_id == plan_id

    def settled(self) -> tuple[Placement, int]:
        """Return the committed placement and the newest plan id, as known to this rank."""
        return self._swapper.settled()

    def describe(self) -> RankState:
        """Return how this rank stands, for the store."""
        times = {} if self.expert_times is None else {EXPERT_TIMES: vars(self.expert_times)}
        own = {REPORT_EVERY_S: self.report_every_s} | times
        return self.core.report(own | self.notes)
