"""Phase three, swap: what serves on this rank, and how migrations change it between two steps.

Everything here happens with the phase machine's shared state held, on the step's thread, but for
``adopt``, which the watcher's thread calls.
"""

from __future__ import annotations

import time

from eplb.core.placement import Placement
from eplb.migration.build import Migration, Move
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN
from rebalance.protocol.phases import Phase, PlanRef, RankPhase, Swap
from rebalance.rank.core import RankCore
from rebalance.rank.parts import StepFigures
from rebalance.swap.scrubber import LiveSlot, Loan
from runtime.streams import Completion


class Swapper:
    """One rank's placement, and the migration that is on its way to change it."""

    def __init__(self, core: RankCore, placement: Placement) -> None:
        self._core, self.placement = core, placement  # a legal mix in mid-migration
        self.figures = StepFigures()
        self.migration: Migration | None = None  # the newest that was adopted
        self.last_swap = core.parts.bank.mark()
        self.closed = (NO_PLAN, 0)  # the migration that made this generation, how much of it

    def adopt(self, migration: Migration) -> bool:
        """Start on a migration; False while the last swap is still being copied."""
        core = self._core
        plan = PlanRef(
            migration.plan_id,
            migration.vote_hash,
            migration.base.generation,
            len(migration.transactions),
            migration.pace.transactions_per_commit,
            migration.weights_version,
        )
        with core.shared.changed:
            if not core.fence.is_open:
                return False  # called again once the new weights serve
            if migration.base.hash != self.placement.hash:
                return True  # made for another placement: withdrawn once its maker sees the commit
            if not self.last_swap.is_complete():
                return False  # a peer that saw this rank adopt a plan may read its live slots
            state = phases.see_plan(core.shared.state, plan)
            if state is not core.shared.state:
                self.migration = migration
                core.shared.state = state
                core.shared.changed.notify_all()
                core.watcher.bring(migration)
        return True

    def swap(self, order: Swap, step: int) -> None:
        """Apply transactions between two steps: copy staged bytes, then the routing table.

        In flip mode the bytes are where they will serve, and only the table is copied.
        """
        started = time.perf_counter()
        core, migration = self._core, self.migration
        assert migration is not None, "a verdict orders only what this rank works on"
        core.sampler.cut(step, self.placement)  # a sample never spans a swap
        bank, ring, moved = core.parts.bank, core.mover.ring, list[Move]()
        is_copied = migration.pace.mode == "copy"
        for number in range(order.first, order.last):
            for move in core.mover.own_moves(migration.transactions[number]):
                if is_copied:
                    bank.swap(move.layer, move.dst_slot - core.first_slot, ring.entry(move))
                moved.append(move)
            serving = core.mover.serving[number]
            core.parts.table.swap(serving.table)
            self.placement = serving.placement
        self.last_swap = bank.mark()
        if is_copied:
            ring.release(moved, self.last_swap)
        core.shared.state = phases.finish_swap(core.shared.state)
        if core.shared.state.plan is None:
            self._commit(migration)
        self.figures.swapped(len(moved), pause_ms=(time.perf_counter() - started) * 1e3)

    def _commit(self, migration: Migration) -> None:
        self.placement = migration.target
        self.closed = (migration.plan_id, len(migration.transactions))
        self._core.parts.table.generation = migration.target.generation
        self.figures.rebalances += 1
        reason = f"plan {migration.plan_id} serves on every rank"
        self._core.watcher.commit(migration, migration.target, "committed", reason)

    def drop(self, state: RankPhase) -> None:
        """Keep the swapped part of a dropped migration, as a new generation."""
        migration = self.migration
        assert migration is not None, "a plan that is dropped was seen"
        if state.swapped:
            self.closed = (migration.plan_id, state.swapped)
            self.placement = self.placement.with_generation(state.generation)
            self._core.parts.table.generation = state.generation
        self._core.watcher.commit(migration, self.placement, "aborted", state.abort_reason)

    def settled(self) -> tuple[Placement, int]:
        """Return the committed placement and the newest plan id, as known to this rank."""
        with self._core.shared.changed:
            state, migration = self._core.shared.state, self.migration
            newest = max(state.refused_up_to, self.closed[0], migration.plan_id if migration else 0)
            if state.plan is None or migration is None:
                return self.placement, newest
            return migration.base, newest

    # -- what the scrubber needs

    def at_rest(self) -> Placement | None:
        """The serving placement if nothing writes live slots, else None."""
        is_idle = self._core.shared.state.phase is Phase.IDLE and self._core.fence.is_open
        return self.placement if is_idle and self.last_swap.is_complete() else None

    def put_back(self, where: LiveSlot, loan: Loan) -> Completion:
        """Order the copy of the right bytes into a slot that lost them."""
        bank = self._core.parts.bank
        if loan.entry is not None:
            bank.swap(where.layer, where.slot, loan.entry)
        else:
            bank.live(where.layer, where.slot).copy_(loan.record)
        # No plan is adopted before it is complete: peers may read the slot then, and this rank's
        # mover may write to what it was copied from.
        self.last_swap = bank.mark()
        return self.last_swap
