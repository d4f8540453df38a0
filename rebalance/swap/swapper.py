"""Phase three, swap: what serves on this rank, and how verdicts change it between two steps.

The swapper works with the phase machine's shared state held, on the step's thread, but for
``adopt``, which the watcher's thread calls.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from eplb.core.placement import Placement
from eplb.migration.build import Migration, Move
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN, Ballot, Verdict
from rebalance.protocol.phases import Phase, PlanRef, RankPhase, Swap
from rebalance.protocol.voter import Voter
from rebalance.rank.parts import RankInGroup
from rebalance.stage.share import Share
from runtime.streams import Completion

KEPT_PAUSES = 4096  # a rank serves for months


@dataclass
class StepFigures:
    """Statistics of a rank."""

    experts_moved: int = 0
    rebalances: int = 0
    _pauses_ms: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_PAUSES))

    def swapped(self, num_experts: int, *, pause_ms: float) -> None:
        """Count a swap, and the time that it delayed the step."""
        self.experts_moved += num_experts
        self._pauses_ms.append(pause_ms)

    @property
    def swap_pauses_ms(self) -> list[float]:
        """Of the latest swaps, oldest first."""
        return list(self._pauses_ms)


@dataclass(frozen=True)
class LiveSlot:
    """A slot of this rank, and the expert that it holds by the placement."""

    layer: int
    slot: int  # of this rank, 0..C-1
    expert: int

    def __str__(self) -> str:
        return f"layer {self.layer} slot {self.slot} expert {self.expert}"


@dataclass(frozen=True)
class Loan:
    """Borrowed memory for a repair: a staging entry, or an EMPTY slot of the layer."""

    record: torch.Tensor  # [record_bytes]
    entry: int | None = None  # None: an EMPTY slot


class Swapper:
    """One rank's placement, and the migration that is on its way to change it.

    Args:
        rank: whose slots they are.
        placement: the placement that serves at the start.
        cut: called with (step, placement) before a swap: what was counted is of that placement.
    """

    def __init__(
        self, rank: RankInGroup, placement: Placement, cut: Callable[[int, Placement], None]
    ) -> None:
        self.placement = placement  # a legal mix in mid-migration
        self._slots, self._shared, self._mover = rank.slots, rank.shared, rank.mover
        self._orders, self._cut, self._clock = rank.watcher, cut, rank.monotonic
        self.figures = StepFigures()
        self.share: Share | None = None  # of the newest migration that was adopted
        self.last_swap = self._slots.bank.mark()
        self.closed = (NO_PLAN, 0)  # the migration that made this generation, how much of it

    def adopt(self, migration: Migration) -> bool:
        """Start on a migration; False while the last swap is still being copied."""
        plan = PlanRef(
            migration.plan_id,
            migration.vote_hash,
            migration.base.generation,
            len(migration.transactions),
            migration.pace.transactions_per_commit,
            migration.weights_version,
        )
        with self._shared.changed:
            if self._shared.state.next_weights is not None:
                return False  # called again once the new weights serve
            if migration.base.hash != self.placement.hash:
                return True  # made for another placement: withdrawn once its maker sees the commit
            if not self.last_swap.is_complete():
                return False  # a peer that saw this rank adopt a plan may read its live slots
            state = phases.see_plan(self._shared.state, plan)
            if state is not self._shared.state:
                self.share = Share(migration, self._slots)
                self._shared.state = state
                self._shared.changed.notify_all()
                self._orders.bring(self.share)
        return True

    def swap(self, order: Swap, step: int) -> None:
        """Apply transactions between two steps: copy staged bytes, then the routing table.

        In flip mode the bytes are where they will serve, and only the table is copied.
        """
        started = self._clock()
        share = self.share
        assert share is not None, "a verdict orders only what this rank works on"
        self._cut(step, self.placement)  # a sample never spans a swap
        bank, ring, moved = self._slots.bank, self._mover.ring, list[Move]()
        is_copied = share.migration.pace.mode == "copy"
        for number in range(order.first, order.last):
            for move in share.moves[number]:
                if is_copied:
                    bank.swap(move.layer, move.dst_slot - self._slots.first_slot, ring.entry(move))
                moved.append(move)
            placement, table = share.serving[number]
            self._slots.table.swap(table)
            self.placement = placement
        self.last_swap = bank.mark()
        if is_copied:
            ring.release(moved, self.last_swap)
        self._shared.state = phases.finish_swap(self._shared.state)
        if self._shared.state.plan is None:
            self._commit(share.migration)
        self.figures.swapped(len(moved), pause_ms=(self._clock() - started) * 1e3)

    def _commit(self, migration: Migration) -> None:
        self.placement = migration.target
        self.closed = (migration.plan_id, len(migration.transactions))
        self._slots.table.generation = migration.target.generation
        self.figures.rebalances += 1
        reason = f"plan {migration.plan_id} serves on every rank"
        self._orders.commit(migration, migration.target, "committed", reason)

    def drop(self, state: RankPhase) -> None:
        """Keep the swapped part of a dropped migration, as a new generation."""
        assert self.share is not None, "a plan that is dropped was seen"
        migration = self.share.migration
        if state.swapped:
            self.closed = (migration.plan_id, state.swapped)
            self.placement = self.placement.with_generation(state.generation)
            self._slots.table.generation = state.generation
        self._orders.commit(migration, self.placement, "aborted", state.abort_reason)

    def settled(self) -> tuple[Placement, int]:
        """Return the committed placement and the newest plan id, as known to this rank."""
        with self._shared.changed:
            state, share = self._shared.state, self.share
            migration = share.migration if share is not None else None
            newest = max(state.refused_up_to, self.closed[0], migration.plan_id if migration else 0)
            if state.plan is None or migration is None:
                return self.placement, newest
            return migration.base, newest

    # -- what the scrubber needs

    def at_rest(self) -> Placement | None:
        """The serving placement if nothing writes live slots, else None."""
        state = self._shared.state
        is_idle = state.phase is Phase.IDLE and state.next_weights is None
        return self.placement if is_idle and self.last_swap.is_complete() else None

    def put_back(self, where: LiveSlot, loan: Loan) -> Completion:
        """Order the copy of the right bytes into a slot that lost them."""
        bank = self._slots.bank
        if loan.entry is not None:
            bank.swap(where.layer, where.slot, loan.entry)
        else:
            bank.live(where.layer, where.slot).copy_(loan.record)
        # No plan is adopted before it is complete: peers may read the slot then, and this rank's
        # mover may write to what it was copied from.
        self.last_swap = bank.mark()
        return self.last_swap


class Voting:
    """One rank's votes, on the step's thread.

    Args:
        rank: which votes.
        voter: casts and reads.
        swapper: does what a verdict orders.
    """

    def __init__(self, rank: RankInGroup, voter: Voter, swapper: Swapper) -> None:
        self._voter, self._swapper = voter, swapper
        self._shared, self._recorder = rank.shared, rank.recorder
        self._membership, self._vote_every = rank.group.membership, rank.config.vote_every
        self._rank = weakref.proxy(rank)  # a rank that was closed is freed at once
        self.halt_at: int | None = None  # the step before which all ranks stop
        self.newest_plan_id = NO_PLAN  # that a rank worked on at the latest verdict
        self.next_group = 0  # proposal of a next group that this rank is ready for; 0: none
        self.switch_at: int | None = None  # the step before which all ranks leave their group

    def cast(self, step: int) -> None:
        """Vote by how this rank stands."""
        with self._shared.changed:
            state = self._shared.state
            if state.plan is not None and self._swapper.last_swap.is_complete():
                # Only now: peers that read this may write what the swap freed.
                state = phases.completed(state, state.plan.plan_id, state.swapped)
                self._shared.state = state
        ballot = phases.ballot(
            state,
            step=step,
            membership=self._membership,
            halt=self._rank.wants_halt,
            next_group=self.next_group,
        )
        self._recorder.note_ballot(ballot)
        self._voter.cast(ballot)

    def read(self, step: int, *, must_finish: bool) -> Verdict | None:
        """Read the vote under way and apply its verdict; None if it may be read later.

        Raises:
            RankError: a rank is dead or too late, or ranks are at different steps.
        """
        swapped = self._shared.state.swapped
        found = self._voter.read(step, swapped=swapped, must_finish=must_finish)
        if found is None:
            return None
        self.apply_verdict(*found, step)
        return found[1]

    def apply_verdict(self, cast: Ballot, verdict: Verdict, step: int) -> None:
        """Apply a verdict on this rank's ballot, before ``step``."""
        self._recorder.note_verdict(cast, verdict)
        self.newest_plan_id = verdict.newest_plan_id
        if verdict.halt and self.halt_at is None:
            # The next vote boundary: by then every rank has read this verdict, a late one too.
            self.halt_at = cast.step + self._vote_every
        with self._shared.changed:
            before = self._shared.state
            # While no plan is worked on, as no rank that is ready begins one: all leave the group
            # with one placement.
            is_idle = verdict.newest_plan_id == NO_PLAN and before.next_weights is None
            if verdict.next_group and is_idle and self.switch_at is None:
                self.switch_at = cast.step + self._vote_every
            state, order = phases.read_verdict(before, cast, verdict)
            self._shared.state = state
            if order is not None:
                self._swapper.swap(order, step)
            elif state.phase is Phase.ABORTED and before.phase is not state.phase:
                self._swapper.drop(state)
            self._shared.changed.notify_all()
