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
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from eplb.errors import RankError
from eplb.migration import Migration, Move
from eplb.placement import EMPTY, Placement
from eplb.recovery import LastWords, Recovery
from rebalance import phases
from rebalance.digests import agree_on_digests
from rebalance.fence import Fence
from rebalance.journal import Diary
from rebalance.mover import Mover, MoverParts
from rebalance.parts import AgentSettings, Links, RankParts, StepFigures
from rebalance.phases import Phase, PlanRef, RankPhase, Swap
from rebalance.recovery import missed_verdicts
from rebalance.sampling import SampleLabel, Sampler
from rebalance.vote import NO_PLAN, Ballot, Verdict
from rebalance.voter import Voter
from rebalance.waiting import PhaseBox
from rebalance.watcher import Watcher
from runtime.streams import Completion
from telemetry.store import Control, RankState


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
        self._diary = Diary(links.journal, lambda: self._last_step)
        self._box = PhaseBox(RankPhase(generation=placement.generation), self._diary.note_change)
        self._mover = Mover(
            MoverParts(parts.rank, settings.topology, parts.bank, parts.table, parts.digests),
            links.transport,
            settings.stage,
            dead=links.votes.dead,
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
        self._voter = Voter(parts.rank, links.votes, settings.vote_deadline_s)
        self._fence = Fence()
        self._last_step = -1
        self._wants_halt = False
        self._halt_at: int | None = None
        self._closed = (NO_PLAN, 0)  # the migration that made this generation, and how much of it
        self._is_recovering = False

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
        if self._is_recovering:
            raise RankError(f"rank {self._parts.rank}: no step may follow a death in the group")
        step = self._parts.dispatcher.steps
        if step == self._last_step:
            return True
        if not self._fence.is_open:
            raise RankError(
                f"rank {self._parts.rank}: step {step} before end_update, expected no forward pass "
                "while the weights are being replaced"
            )
        if step != self._last_step + 1:
            raise RankError(
                f"rank {self._parts.rank}: step {step} follows step {self._last_step}, "
                "expected one call of step() before every forward pass"
            )
        self._last_step, self._stepped_at = step, time.monotonic()
        self._voter.refuse_if_alone(f"before step {step}")
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
        self._voter.wait_for_device(completion, self._last_step)

    def begin_update(self, version: int) -> None:
        """Stop moving experts, on every rank, so that the engine can replace all weights.

        Called by every rank between the same two steps. A migration under way is dropped by vote
        first. Then load the new weights into ``held()``, and call ``end_update``; no step between.

        Raises:
            ConfigError: an update is under way already, or versions do not grow.
            RankError: not every rank updates now, or one is dead or late.
        """
        with self._box.changed:
            self._fence.begin(version)
            plan = self._box.state.plan
        if plan is not None:
            reason = f"the weights are updated to version {version}"
            self._box.update(phases.want_abort, plan.plan_id, reason)
        self._read_vote(self._last_step, must_finish=True)
        while self._vote_on_update().newest_plan_id != NO_PLAN:
            pass  # each verdict drops what was voted on, so two are enough
        self._wait_until_idle()

    def held(self) -> Iterator[tuple[int, int, int]]:
        """Give (layer, slot of this rank, expert) of every live slot: where weights belong now.

        Not where they belonged at the start: experts have moved since.
        """
        slots = self.placement.slot_to_expert[:, self._settings.topology.slots_on(self._parts.rank)]
        for layer, slot in np.argwhere(slots != EMPTY).tolist():
            yield layer, slot, int(slots[layer, slot])

    def end_update(self) -> None:
        """Serve the weights that the engine has loaded; every rank again, before the next step.

        Raises:
            MigrationError: replicas of an expert hold different bytes.
            RankError: a rank is dead or late.
        """
        digests = agree_on_digests(
            {(layer, e): self._parts.bank.digest(layer, slot) for layer, slot, e in self.held()},
            self.placement.num_layers,
            self.placement.num_experts,
            self._links.votes,
            deadline_s=self._settings.vote_deadline_s,
        )
        self._parts.digests.copy_(digests)
        version, deadline_s = self._fence.next_version, self._settings.vote_deadline_s
        assert version is not None, "an update ends that has begun"
        self._links.transport.serve_weights(version, deadline_s)
        with self._box.changed:
            self._fence.end()
            self._box.state = phases.serve_weights(self._box.state, self._fence.version)
            self._box.changed.notify_all()

    def _vote_on_update(self) -> Verdict:
        self._cast_vote(self._last_step)
        verdict = self._read_vote(self._last_step, must_finish=True)
        assert verdict is not None, "a vote that must finish has a verdict"
        if verdict.weights_version is None:
            raise RankError(
                f"rank {self._parts.rank}: not every rank updates its weights to version "
                f"{self._fence.next_version} after step {self._last_step}, expected all to"
            )
        return verdict

    def _wait_until_idle(self) -> None:
        """Wait until nothing is being copied: the mover drains what it had begun."""
        deadline = time.monotonic() + self._settings.vote_deadline_s
        with self._box.changed:
            while self._box.state.phase is not Phase.IDLE:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise RankError(
                        f"rank {self._parts.rank}: the mover still drains the dropped migration "
                        f"after {self._settings.vote_deadline_s:.0f} s"
                    )
                self._box.changed.wait(left_s)
        self._voter.wait_for_device(self._last_swap, self._last_step)

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

    def pause_staging(self) -> None:
        """Hold weights back, during a prefill or a transfer of KV cache, say; from any thread.

        It goes on at ``resume_staging``, or after ``StageSettings.pause_deadline_s``.
        """
        self._mover.pause()

    def resume_staging(self) -> None:
        """Let weights flow again; from any thread."""
        self._mover.resume()
        self._box.wake()

    def close(self) -> None:
        """Stop the threads and leave the group. The last samples are the reporter's to flush."""
        self._watcher.close()
        self._links.votes.close()

    # -- votes

    def _cast_vote(self, step: int) -> None:
        with self._box.changed:
            state = self._box.state
            if state.plan is not None and self._last_swap.is_complete():
                # Only now: peers that read this may write what the swap freed.
                state = phases.completed(state, state.plan.plan_id, state.swapped)
                self._box.state = state
        membership = self._settings.membership
        ballot = phases.ballot(state, step=step, membership=membership, halt=self._wants_halt)
        ballot = replace(ballot, weights_version=self._fence.ballot)
        self._diary.note_ballot(ballot)
        self._voter.cast(ballot)

    def _read_vote(self, step: int, *, must_finish: bool) -> Verdict | None:
        read = self._voter.read(step, swapped=self._box.state.swapped, must_finish=must_finish)
        if read is None:
            return None
        self._obey(*read, step)
        return read[1]

    def _obey(self, cast: Ballot, verdict: Verdict, step: int) -> None:
        self._diary.note_verdict(cast, verdict)
        if verdict.halt and self._halt_at is None:
            # The next vote boundary: by then every rank has read this verdict, a late one too.
            self._halt_at = cast.step + self._settings.vote_every
        with self._box.changed:
            before = self._box.state
            state, order = phases.read_verdict(before, cast, verdict)
            self._box.state = state
            if order is not None:
                self._swap(order, step)
            elif state.phase is Phase.ABORTED and before.phase is not state.phase:
                self._drop(state)
            self._box.changed.notify_all()

    # -- swaps

    def _swap(self, order: Swap, step: int) -> None:
        """Let transactions serve, between two steps: copy what was staged, then the routing table.

        In flip mode the bytes are where they will serve, and only the table is copied.
        """
        started = time.perf_counter()
        migration = self._migration
        assert migration is not None, "a verdict orders only what this rank works on"
        self._sampler.cut(step, self.placement)  # a sample never spans a swap
        first_slot = int(self._settings.topology.first_slot[self._parts.rank])
        bank, ring, moved = self._parts.bank, self._mover.ring, list[Move]()
        is_copied = migration.pace.mode == "copy"
        for number in range(order.first, order.last):
            for move in self._mover.own_moves(migration.transactions[number]):
                if is_copied:
                    bank.swap(move.layer, move.dst_slot - first_slot, ring.entry(move))
                moved.append(move)
            serving = self._mover.serving[number]
            self._parts.table.swap(serving.table)
            self.placement = serving.placement
        self.figures.experts_moved += len(moved)
        self._last_swap = bank.mark()
        if is_copied:
            ring.release(moved, self._last_swap)
        self._box.state = phases.finish_swap(self._box.state)
        if self._box.state.plan is None:
            self._commit(migration)
        self.figures.swap_pauses_ms.append((time.perf_counter() - started) * 1e3)

    def _commit(self, migration: Migration) -> None:
        self.placement = migration.target
        self._closed = (migration.plan_id, len(migration.transactions))
        self._parts.table.generation = migration.target.generation
        self.figures.rebalances += 1
        reason = f"plan {migration.plan_id} serves on every rank"
        self._watcher.commit(migration, migration.target, "committed", reason)

    def _drop(self, state: RankPhase) -> None:
        """Keep what was swapped of a dropped migration, under a generation of its own."""
        migration = self._migration
        assert migration is not None, "a plan that is dropped was seen"
        if state.swapped:
            self._closed = (migration.plan_id, state.swapped)
            self.placement = self.placement.with_generation(state.generation)
            self._parts.table.generation = state.generation
        self._watcher.commit(migration, self.placement, "aborted", state.abort_reason)

    # -- after a death (rebalance.recovery)

    def dead(self) -> frozenset[int]:
        """Ranks that are known to be gone."""
        return self._links.votes.dead()

    def last_words(self) -> LastWords:
        """Adopt and swap nothing any more, and say how far this rank has come."""
        with self._box.changed:
            self._is_recovering = True
            state = self._box.update(phases.freeze, "a rank died")
            plan = state.plan if state.phase is not Phase.ABORTED else None
            words = LastWords(
                run=self._settings.run,
                rank=self._parts.rank,
                membership=self._settings.membership,
                generation=state.generation,
                weights_version=state.weights_version,
                plan_id=plan.plan_id if plan else NO_PLAN,
                plan_hash=plan.plan_hash if plan else 0,
                swapped=state.swapped if plan else 0,
                prepared=state.prepared if plan else 0,
                closed_plan_id=self._closed[0],
                closed_applied=self._closed[1],
                dead=tuple(sorted(self.dead())),
                time=self._links.clock(),
            )
        self._diary.note("death seen", state, dead=list(words.dead))
        self._diary.note("last words", state, swapped=words.swapped, prepared=words.prepared)
        return words

    def take_over(self, record: Recovery) -> None:
        """Swap what the record says and is not swapped here yet, and end the migration."""
        state = self._box.state
        self._diary.note("recovery", state, membership=record.membership, reason=record.reason)
        verdicts = missed_verdicts(state, record)
        if verdicts:
            self._box.update(lambda found: replace(found, abort_reason=record.reason))
        for cast, verdict in verdicts:
            self._obey(cast, verdict, self._last_step)

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
            migration.weights_version,
        )
        with self._box.changed:
            if not self._fence.is_open:
                return False  # heard again once the new weights serve
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
        stage, to_stage = self._mover.figures(), 0
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
                "bytes_by_source": dict(stage.bytes_by_source),
                "experts_moved": self.figures.experts_moved,
                "rebalances": self.figures.rebalances,
                "prepared": state.prepared,
                "staged": stage.num_staged,
                "to_stage": to_stage,
                "stage": stage.as_detail(),
                "swap_pauses_ms": self.figures.swap_pauses_ms[-256:],
                "frozen": state.frozen_reason,
                "weights_version": self._fence.version,
                "progress_age_s": round(time.monotonic() - self._stepped_at, 3),
            }
            | self.notes,
        )
