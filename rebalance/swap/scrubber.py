"""The scrubber: verifies live slots while nothing moves, and repairs corrupted ones.

    every 64th idle step:    digest one live slot, in turn -> as agreed by all ranks? -> next
                                                           -> no: fetch the expert from elsewhere,
                                  between two steps: copy it into the slot, then verify it again

Reading is safe because live slots are not written meanwhile. Only a step swaps, and only what every
rank has prepared. This rank prepares nothing before its mover's thread does, and that thread does
the reading. So a plan that arrives meanwhile waits for the one slot, and no other rank can swap
either: a peer's slot that is fetched does not change. An engine writes live slots between
begin_update and end_update. begin_update waits for the running check, drops its result, and votes
only afterwards, so that no peer's engine writes earlier.

A repair needs no vote. Placement and tables stay; the slot's bytes become what every rank expects
there. The step's thread orders the copy, on the stream of the forward passes, and only while the
rank is idle: then no peer reads the slot. During a migration the repair is dropped and repeated
afterwards; peers that pull the corrupted bytes detect it by the digest.

The bytes come like a migration's: in chunks, from peers and then the host, verified by digest. They
are staged in a staging entry, or in an EMPTY slot of the layer where there are no entries (flip
mode): it receives no tokens, and only this rank's mover writes there. After a death nothing is
checked or repaired any more, so that only the survivors' recovery writes.

Shapes:  L MoE layers, E experts, S slots, C slots of this rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict

import numpy as np
import torch

from eplb.clock import Deadline
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError, RankError
from eplb.migration.build import Move, Source
from rebalance.protocol import phases
from rebalance.protocol.phases import Phase
from rebalance.rank.parts import RankInGroup
from rebalance.stage.lanes import Pull
from rebalance.swap.swapper import LiveSlot, Loan, Swapper
from rebalance.threads.waiting import WAIT_S
from rebalance.types import Digest
from runtime.experts import ExpertBank
from runtime.streams import Completion

MAX_REPAIRS = 2  # repairs of one slot; memory that loses its bytes a third time is broken

log = logging.getLogger(__name__)


class Scrubber:
    """Finds corrupted bytes in one rank's live slots, and the right ones to put there.

    Used by one thread at a time.

    Args:
        digests: [L, E, 2] of every expert, agreed by all ranks.
    """

    def __init__(
        self, rank: int, topology: Topology, bank: ExpertBank, digests: torch.Tensor
    ) -> None:
        self.rank, self._topology, self._bank, self._digests = rank, topology, bank, digests
        self._next = 0  # layer x C + slot
        self.suspects: dict[LiveSlot, int] = {}  # found corrupted -> repairs so far; seen to first
        self.counts = Counter(clean=0, damaged=0, repaired=0, lost=0)
        self.num_sweeps = self.num_digest_failures = 0

    def next_slot(self, placement: Placement) -> LiveSlot | None:
        """Return the next slot to verify; None when this rank holds nothing."""
        held = placement.slot_to_expert[:, self._topology.slots_on(self.rank)]
        for suspect in list(self.suspects):
            if self.holds(placement, suspect):
                return suspect
            del self.suspects[suspect]  # a migration has replaced it since
        live = np.flatnonzero(held != EMPTY)
        if not live.size:
            return None
        due = live[live >= self._next]
        place = int(due[0] if due.size else live[0])
        self._next = place + 1
        if self._next > live[-1]:
            self._next, self.num_sweeps = 0, self.num_sweeps + 1
        layer, slot = divmod(place, held.shape[1])
        return LiveSlot(layer, slot, int(held[layer, slot]))

    def holds(self, placement: Placement, where: LiveSlot) -> bool:
        """Return whether the slot still holds this expert by the placement."""
        slot = int(self._topology.first_slot[self.rank]) + where.slot
        return bool(placement.slot_to_expert[where.layer, slot] == where.expert)

    def damage(self, where: LiveSlot) -> tuple[Digest, Digest] | None:
        """Return the digest of a slot's bytes and its expert's; None where they are the same."""
        first, second = self._digests[where.layer, where.expert].tolist()
        found = self._bank.digest(where.layer, where.slot)
        if found == (first, second):
            return None
        self.num_digest_failures += 1
        return found, (first, second)

    def right_bytes(self, where: LiveSlot, placement: Placement, loan: Loan) -> Pull:
        """Return the pull that fetches a slot's expert: from peers first, then the host."""
        own_slot = int(self._topology.first_slot[self.rank]) + where.slot
        held = placement.slot_to_expert.copy()
        held[where.layer, own_slot] = EMPTY  # it is what must not be read
        return Pull(Move(where.layer, where.expert, own_slot, Source.PEER), loan.record, held)

    def staging(self, entry: int) -> Loan:
        """Return a staging entry that was borrowed."""
        return Loan(self._bank.staging(entry), entry)

    def spare(self, layer: int, placement: Placement) -> Loan | None:
        """Return an EMPTY slot of this rank in a layer, if it has one."""
        held = placement.slot_to_expert[layer, self._topology.slots_on(self.rank)]
        empty = np.flatnonzero(held == EMPTY)
        return Loan(self._bank.live(layer, int(empty[0]))) if empty.size else None


class ScrubSchedule:
    """Passes the work from the step to the mover's thread and back.

    Args:
        rank: whose slots are looked at.
        swapper: knows the placement that serves, and writes the right bytes.
    """

    def __init__(self, rank: RankInGroup, swapper: Swapper) -> None:
        slots = rank.slots
        self.scrubber = Scrubber(slots.rank, slots.topology, slots.bank, slots.digests)
        self._swapper, self._mover = swapper, rank.mover
        self._shared, self._orders, self._recorder = rank.shared, rank.watcher, rank.recorder
        self._every_steps = rank.config.scrub_every_steps  # idle steps; 0: never
        self._clock = rank.monotonic
        self._idle_steps = 0
        self.is_looking = False  # set by the step, cleared by the mover's thread
        self._is_stopping = False
        self._staged: tuple[LiveSlot, Loan] | None = None  # a repair to be made

    # -- the step's thread

    def at_step(self) -> None:
        """Run the scrubber's part between two steps."""
        if not self._every_steps or self.is_looking:
            return
        if self._staged is not None:
            self._repair(*self._staged)
            return
        self._idle_steps += self._shared.state.phase is Phase.IDLE
        is_due = self._idle_steps >= self._every_steps or self.scrubber.suspects
        if is_due and self._orders.has_mover():
            with self._shared.changed:
                if self._swapper.at_rest() is not None:
                    self._idle_steps, self.is_looking = 0, True
                    self._orders.do(self._look)

    def stop(self, deadline_s: float) -> None:
        """End the look under way and forget what it found: live slots are going to be written.

        Raises:
            RankError: it did not end in time.
        """
        if not self.end_look(deadline_s):
            raise RankError(
                f"rank {self.scrubber.rank}: the check of a live slot did not end within "
                f"{deadline_s:.0f} s ({self._mover.beat.standing()})"
            )

    def end_look(self, deadline_s: float) -> bool:
        """End the look under way and forget what it found; False if it has not ended in time.

        One that has not will end as soon as it can: what it waits for may take minutes (a host
        that reads a disk), and it begins nothing more.
        """
        shared, deadline = self._shared, Deadline.after(deadline_s, self._clock)
        with shared.changed:
            self._is_stopping = True
            shared.wake()
            while self.is_looking and self._orders.has_mover():
                if deadline.has_passed:
                    return False
                shared.changed.wait(min(deadline.left_s, WAIT_S))
            self._is_stopping = False
            if self._staged is not None:
                self._give_back(self._staged[1])
            self._staged = None
            self.scrubber.suspects.clear()
            return True

    def _repair(self, where: LiveSlot, loan: Loan) -> None:
        """Copy the right bytes into the slot, unless something else has begun since."""
        with self._shared.changed:
            self._staged, done = None, None
            serving = self._swapper.at_rest()
            if serving is not None and self.scrubber.holds(serving, where):
                done = self._swapper.put_back(where, loan)
                self.scrubber.suspects[where] = self.scrubber.suspects.get(where, 0) + 1
            self._give_back(loan, done)
            self._shared.wake()  # the mover may be waiting for the entry

    def _give_back(self, loan: Loan, done: Completion | None = None) -> None:
        if loan.entry is not None:
            self._mover.ring.give_back(loan.entry, done)

    # -- the mover's thread

    def _look(self) -> None:
        try:
            with self._shared.changed:
                serving = None if self._shared.is_closing else self._swapper.at_rest()
            where = self.scrubber.next_slot(serving) if serving else None
            if serving is not None and where is not None:
                self._look_at(where, serving)
        finally:
            with self._shared.changed:
                self.is_looking = False
                self._shared.wake()

    def _look_at(self, where: LiveSlot, serving: Placement) -> None:
        scrubber = self.scrubber
        self._mover.beat.busy(f"scrubbing {where}")
        damage = scrubber.damage(where)
        if damage is None:
            scrubber.counts["clean"] += 1
            if scrubber.suspects.pop(where, 0):
                self._report("repaired", where, "digest correct after the repair")
            return
        if where not in scrubber.suspects:
            scrubber.suspects[where] = 0
            self._report("damaged", where, "digest mismatch", damage)
        if scrubber.suspects[where] >= MAX_REPAIRS:
            self._give_up(where, f"{where}: digest mismatch after {MAX_REPAIRS} repairs")
        else:
            self._stage(where, serving)

    def _stage(self, where: LiveSlot, serving: Placement) -> None:
        """Bring the right bytes to where the step can copy them from."""
        loan, is_right = None, False
        try:
            loan = self._borrow(where, serving)
            if loan is not None:
                pull = self.scrubber.right_bytes(where, serving, loan)
                is_right = self._mover.fetch(pull, self._shared, self._is_wanted)
        except MigrationError as exc:
            self._give_up(where, f"{where}: digest mismatch, repair failed: {exc}")
        finally:
            with self._shared.changed:
                # Otherwise the check was cancelled, and its canceller does not return the loan.
                if loan is not None and is_right and self._is_wanted():
                    self._staged = (where, loan)
                elif loan is not None and self._mover.is_drained:
                    self._give_back(loan)

    def _borrow(self, where: LiveSlot, serving: Placement) -> Loan | None:
        """Find room for right bytes; None while all entries are still being copied from.

        Raises:
            MigrationError: there is none.
        """
        ring = self._mover.ring
        if ring.num_entries:
            with self._shared.changed:
                entry = ring.borrow()
            # A suspect is looked at again at once.
            return None if entry is None else self.scrubber.staging(entry)
        spare = self.scrubber.spare(where.layer, serving)
        if spare is None:
            raise MigrationError(
                f"no memory for the repair: found 0 staging entries and no EMPTY slot in "
                f"layer {where.layer}"
            )
        return spare

    def _is_wanted(self) -> bool:
        return not (self._is_stopping or self._shared.is_closing)

    def _give_up(self, where: LiveSlot, why: str) -> None:
        """Freeze migrations on this rank: the slot cannot be repaired."""
        del self.scrubber.suspects[where]
        self._report("lost", where, why)
        self._shared.update(phases.freeze, f"rank {self.scrubber.rank}: {why}")

    def _report(
        self,
        result: str,
        where: LiveSlot,
        words: str,
        damage: tuple[Digest, Digest] | None = None,
    ) -> None:
        self.scrubber.counts[result] += 1
        rank = self.scrubber.rank
        log.warning("rank %d: scrub=%s %s: %s", rank, result, where, words)
        detail = {"rank": rank, "result": result, "reason": words} | asdict(where)
        if damage is not None:
            detail |= {"found": in_hex(damage[0]), "expected": in_hex(damage[1])}
        self._recorder.note(f"scrub {result}", self._shared.state, **detail)
        self._orders.report_event("scrub", detail)


def in_hex(digest: Digest) -> str:
    """Write a digest as text: its sums are larger than the numbers that JSON readers keep exact."""
    return "".join(f"{part % 2**64:016x}" for part in digest)
