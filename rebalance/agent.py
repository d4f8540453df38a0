"""The one object that a serving process holds: a rank's part in balancing.

    agent.start()
    while agent.step():        # between forward passes, on every rank, dummy batches included
        model.forward(batch)
    agent.close()

``step`` reads the counters, votes, and swaps what the vote decided. Everything slow happens on the
agent's own two threads: one brings bytes, one talks to the store. A dead store or a failed
migration never fails a step; a dead peer always does, because its tokens would be lost.
"""

from __future__ import annotations

import time
from typing import Any

from eplb.errors import RankError
from eplb.migration import Migration, Move
from eplb.placement import Placement
from rebalance import phases
from rebalance.mover import Mover, PhaseBox
from rebalance.parts import AgentSettings, Links, RankParts, StepFigures
from rebalance.phases import PlanRef, RankPhase, Swap
from rebalance.sampling import SampleLabel, Sampler
from rebalance.transport import PendingVote
from rebalance.vote import Ballot, Outcome, Verdict
from rebalance.watcher import Watcher
from runtime.streams import Completion
from telemetry.store import Control, RankState

DEVICE_POLL_S = 50e-6
VOTE_POLL_S = 0.02  # how often a late vote's wait looks whether a rank is gone


class RankAgent:
    """A rank's part in balancing: counts out, migrations in, swaps by vote."""

    def __init__(
        self, settings: AgentSettings, parts: RankParts, links: Links, placement: Placement
    ) -> None:
        self._settings, self._parts, self._links = settings, parts, links
        self.placement = placement  # what serves now; a legal mix in mid-migration
        self.figures = StepFigures()
        self.notes: dict[str, Any] = {}  # what the engine adds to this rank's reports
        self._stepped_at = time.monotonic()
        self._box = PhaseBox(RankPhase(generation=placement.generation))
        self._mover = Mover(
            parts.rank,
            settings.topology,
            parts.bank,
            parts.table,
            links.transport,
            parts.digests,
        )
        self._sampler = Sampler(
            SampleLabel(settings.deployment, settings.run, parts.rank, settings.load_phase),
            settings.topology,
            parts.counter,
            parts.table.strays,
            links.reporter,
            links.clock,
        )
        self._watcher = Watcher(links.store, self, self._mover, self._box, links.reporter)
        self._migration: Migration | None = None
        self._last_swap = parts.bank.mark()
        self._pending: tuple[Ballot, PendingVote] | None = None
        self._last_step = -1
        self._wants_halt = False
        self._halt_at: int | None = None

    # -- what the serving process calls

    def start(self) -> None:
        """Start the threads."""
        self._watcher.start()

    def step(self) -> bool:
        """Do what is due between two forward passes; False when serving ends on every rank.

        Calling it twice between the same two passes does nothing the second time.

        Raises:
            RankError: a peer is dead, or ranks are out of step. Run no further forward pass.
        """
        step = self._parts.dispatcher.steps
        if step == self._last_step:
            return True
        if step != self._last_step + 1:
            raise RankError(
                f"rank {self._parts.rank}: step {step} follows step {self._last_step}, "
                "expected one call of step() before every forward pass"
            )
        self._last_step, self._stepped_at = step, time.monotonic()
        self._refuse_if_alone(f"before step {step}")
        if step % self._settings.sample_steps == 0:
            self._sampler.cut(step, self.placement)
        is_vote_due = step % self._settings.vote_every == 0
        self._read_vote(step, must_finish=is_vote_due)
        if step == self._halt_at:
            self._sampler.cut(step, self.placement)
            self._sampler.hand_over(wait=True)
            return False
        self._sampler.hand_over()
        if is_vote_due:
            self._cast_vote(step)
        return True

    def wait(self, completion: Completion) -> None:
        """Wait for the device, but not for one that waits for a dead peer.

        A kernel of a dispatch may wait minutes for a rank that is gone (DeepEP v1.2.1: about 100 s)
        and take the host with it. The lifelines, which are the host's, know within milliseconds.

        Raises:
            RankError: a peer is dead, or the device is not done before the vote's deadline.
        """
        deadline = time.monotonic() + self._settings.vote_deadline_s
        while not completion.is_complete():
            self._refuse_if_alone(f"while the device was in step {self._last_step} or the last")
            if time.monotonic() >= deadline:
                raise RankError(
                    f"rank {self._parts.rank}: the device is not done with step {self._last_step} "
                    f"after {self._settings.vote_deadline_s:.0f} s; a peer is dead or late"
                )
            # A device's event can be asked or waited for without end, nothing between: a wait with
            # a deadline, and with an eye on the vote, has to ask.
            time.sleep(DEVICE_POLL_S)

    def _refuse_if_alone(self, when: str) -> None:
        dead = self._links.votes.dead()
        if dead:
            raise RankError(f"rank {self._parts.rank}: rank {min(dead)} died {when}")

    @property
    def phase(self) -> str:
        """Phase of the migration that this rank works on; "idle" without one."""
        return self._box.state.phase.value

    @property
    def num_samples(self) -> int:
        """Samples cut so far, and handed to the reporter or about to be."""
        return self._sampler.num_cut

    def request_halt(self) -> None:
        """Ask all ranks to stop serving, at one step; ``step`` then returns False on each."""
        self._wants_halt = True

    def close(self) -> None:
        """Stop the threads and leave the group. The last samples are the reporter's to flush."""
        self._watcher.close()
        self._links.votes.close()

    # -- votes

    def _cast_vote(self, step: int) -> None:
        state = self._box.state
        ballot = phases.ballot(
            state, step=step, membership=0, weights_version=0, halt=self._wants_halt
        )
        self._pending = (ballot, self._links.votes.cast(ballot.encode()))

    def _read_vote(self, step: int, *, must_finish: bool) -> None:
        """Read the vote of an earlier boundary, if it is due and there.

        A rank that had prepared nothing may skip a late vote: the verdict's ``prepared`` is the
        smallest of all, so nobody can have swapped by it. A rank that had must wait, and if the
        vote never ends it must not serve: others may have swapped.
        """
        if self._pending is None:
            return
        cast, vote = self._pending
        may_skip = cast.prepared == self._box.state.swapped and not must_finish
        outcome, reduced = vote.poll(0.0) if may_skip else self._wait_for_vote(vote, step)
        if outcome is Outcome.LATE and may_skip:
            return
        if outcome is not Outcome.VALUE:
            raise RankError(
                f"rank {self._parts.rank}: the vote of step {cast.step} is {outcome.value} at step "
                f"{step}; a peer is dead or more than {self._settings.vote_deadline_s:.0f} s late"
            )
        self._pending = None
        self._obey(cast, Verdict.decode(reduced), step)

    def _wait_for_vote(self, vote: PendingVote, step: int) -> tuple[Outcome, list[int]]:
        deadline = time.monotonic() + self._settings.vote_deadline_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            outcome, reduced = vote.poll(min(left_s, VOTE_POLL_S))
            if outcome is not Outcome.LATE or left_s <= VOTE_POLL_S:
                return outcome, reduced
            # A reduction around a ring breaks at the dead rank's neighbours alone.
            self._refuse_if_alone(f"before it had voted for step {step}")

    def _obey(self, cast: Ballot, verdict: Verdict, step: int) -> None:
        if verdict.halt and self._halt_at is None:
            # The next vote boundary: by then every rank has read this verdict, a late one too.
            self._halt_at = cast.step + self._settings.vote_every
        with self._box.changed:
            before = self._box.state
            state, order = phases.read_verdict(before, cast, verdict)
            self._box.state = state
            if order is not None:
                self._swap(order, step)
            elif state.phase is phases.Phase.ABORTED and before.phase is not state.phase:
                self._drop(state)
            self._box.changed.notify_all()

    # -- swaps

    def _swap(self, order: Swap, step: int) -> None:
        """Copy staged records into live slots and the routing table, between two steps."""
        started = time.perf_counter()
        migration = self._migration
        assert migration is not None, "a verdict orders only what this rank works on"
        self._sampler.cut(step, self.placement)  # a sample never spans a swap
        first_slot = int(self._settings.topology.first_slot[self._parts.rank])
        bank, ring, moved = self._parts.bank, self._mover.ring, list[Move]()
        for number in range(order.first, order.last):
            for move in self._mover.own_moves(migration.transactions[number]):
                bank.swap(move.layer, move.dst_slot - first_slot, ring.entry(move))
                moved.append(move)
            serving = self._mover.serving[number]
            self._parts.table.swap(serving.table)
            self.placement = serving.placement
        self.figures.experts_moved += len(moved)
        self._last_swap = bank.mark()
        ring.release(moved, self._last_swap)
        self._box.state = phases.completed(self._box.state, migration.plan_id, order.last)
        self._box.state = phases.finish_swap(self._box.state)
        if self._box.state.plan is None:
            self._commit(migration)
        self.figures.swap_pauses_ms.append((time.perf_counter() - started) * 1e3)

    def _commit(self, migration: Migration) -> None:
        self.placement = migration.target
        self._parts.table.generation = migration.target.generation
        self.figures.rebalances += 1
        reason = f"plan {migration.plan_id} serves on every rank"
        self._watcher.commit(migration, migration.target, "committed", reason)

    def _drop(self, state: RankPhase) -> None:
        """Keep what was swapped of a dropped migration, under a generation of its own."""
        migration = self._migration
        assert migration is not None, "a plan that is dropped was seen"
        if state.swapped:
            self.placement = self.placement.with_generation(state.generation)
            self._parts.table.generation = state.generation
        self._watcher.commit(migration, self.placement, "aborted", state.abort_reason)

    # -- what the watcher calls, on its own thread

    def hear(self, control: Control, published: Migration | None) -> bool:
        """Take in what the store says now; False to be told again soon."""
        state = self._box.state
        if state.plan is not None:
            if not control.movement:
                self._box.update(phases.want_abort, state.plan.plan_id, "movement is switched off")
            elif published is None or published.plan_id != state.plan.plan_id:
                self._box.update(phases.want_abort, state.plan.plan_id, "the plan was withdrawn")
        elif published is not None and control.movement:
            return self._adopt(published)
        return True

    def _adopt(self, migration: Migration) -> bool:
        """Start on a migration; False while the last swap is still being copied."""
        plan = PlanRef(
            migration.plan_id,
            migration.vote_hash,
            migration.base.generation,
            len(migration.transactions),
            migration.pace.transactions_per_commit,
        )
        with self._box.changed:
            if migration.base.hash != self.placement.hash:
                return True  # made for another placement: withdrawn once its maker sees the commit
            if not self._last_swap.is_complete():
                return False  # a peer that saw this rank adopt a plan may read its live slots
            state = phases.see_plan(self._box.state, plan)
            if state is not self._box.state:
                self._migration = migration
                self._box.state = state
                self._box.changed.notify_all()
                self._watcher.bring(migration)
        return True

    def describe(self) -> RankState:
        """Say how this rank stands, for the store."""
        with self._box.changed:
            state = self._box.state
            migration = self._migration if state.plan is not None else None
        to_stage = 0
        if migration is not None:
            to_stage = sum(len(self._mover.own_moves(txn)) for txn in migration.transactions)
        return RankState(
            run=self._settings.run,
            rank=self._parts.rank,
            time=self._links.clock(),
            step=max(self._last_step, 0),
            generation=state.generation,
            phase=state.phase.value,
            plan_id=state.plan.plan_id if state.plan else 0,
            applied=state.applied,
            sequence=self._sampler.num_cut,
            detail={
                "bytes_by_source": dict(self._mover.bytes_by_source),
                "experts_moved": self.figures.experts_moved,
                "rebalances": self.figures.rebalances,
                "prepared": state.prepared,
                "staged": self._mover.num_staged,
                "to_stage": to_stage,
                "swap_pauses_ms": self.figures.swap_pauses_ms[-256:],
                "frozen": state.frozen_reason,
                "progress_age_s": round(time.monotonic() - self._stepped_at, 3),
            }
            | self.notes,
        )
