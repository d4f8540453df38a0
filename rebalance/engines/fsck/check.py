"""Looks at one live slot now and then, within a part of the time, and never waits for a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rebalance.engines.fsck.faults import Fault
from rebalance.engines.fsck.references import (
    References,
    agreed,
    digests_of,
    from_message,
    to_message,
)
from rebalance.engines.fsck.tensors import EngineView, as_bytes
from rebalance.types import Digest
from runtime.memory.digests import PendingDigests, RecordDigests
from runtime.memory.shared import digest

# All ranks' values, which JSON can express, in order of ranks: a collective.
Gather = Callable[[Any], list[Any]]

PART = 0.001  # of the time that the check may take
BYTES_PER_S = 2e12  # at which a device reads a record; the host does not see that time
BUSY = 2.0  # times what an idle pass has saved, from which a busy pass is used too


def begin_check(
    make_view: Callable[[], EngineView], gather: Gather, clock: Callable[[], float]
) -> tuple[PlacementCheck | None, list[Fault], str]:
    """Agree on references with all ranks; collective, and it takes part whatever fails here.

    Returns:
        The check, or None where some rank cannot; the faults found; why some rank cannot.
    """
    view, own, reason = None, None, ""
    try:
        view = make_view()
        own = to_message(digests_of(view))
    except Exception as exc:
        reason = f"{type(exc).__name__}: {exc}"
    by_rank = gather((own, reason))
    refused = [f"rank {rank}: {why}" for rank, (found, why) in enumerate(by_rank) if found is None]
    if refused or view is None:
        return None, [], refused[0]
    references, faults = agreed(view, [from_message(found) for found, _ in by_rank])
    return PlacementCheck(view, references, clock, PART), faults, ""


@dataclass(frozen=True, eq=False)
class _Looked:
    """A slot, or a layer's factors, whose digests may still be on their way."""

    row: int
    slot: int  # of this rank
    expert: int
    digests: list[tuple[str, Digest | PendingDigests]]
    factors: list[tuple[str, Digest | PendingDigests]]


class PlacementCheck:
    """Goes round this rank's live slots. The thread that runs passes uses it, between passes.

    Args:
        view: the engine's tensors and map.
        references: agreed by all ranks.
        clock: seconds.
        part: of the time between visits that they may take.
    """

    def __init__(
        self,
        view: EngineView,
        references: References,
        clock: Callable[[], float],
        part: float,
    ) -> None:
        self._view, self._references, self._clock, self._part = view, references, clock, part
        self._digests = RecordDigests()
        self._looked: _Looked | None = None
        self._place = 0
        self._since, self._cost_s = clock(), 0.0
        self.num_checked = 0  # slots
        self.num_rounds = 0  # of all slots of this rank

    @property
    def num_slots(self) -> int:
        """Slots of this rank in all layers."""
        rows = self._view.rows
        return len(rows) * (len(self._view.held(rows[0])) // self._view.num_ranks) if rows else 0

    def visit(self, *, is_idle: bool) -> list[Fault]:
        """Judge the slot that was looked at, or look at the next one, if there is time for it."""
        begin = self._clock()
        need = self._cost_s * (1.0 if is_idle else BUSY) / self._part
        if not self.num_slots or begin - self._since < need:
            return []
        faults: list[Fault] = []
        if self._looked is None:
            self._looked = self._look()
        elif all(
            not isinstance(one, PendingDigests) or one.is_complete()
            for _, one in self._looked.digests + self._looked.factors
        ):
            faults = self._judged(self._looked)
            self._looked = None
        self._since = self._clock()
        self._cost_s = self._since - begin + self._device_s()
        return faults

    def sweep(self) -> list[Fault]:
        """Look at every slot once, and wait for it: for a command, not for serving."""
        self._looked, faults = None, []
        for _ in range(self.num_slots):
            looked = self._look()
            for _, one in looked.digests + looked.factors:
                for done in one.completions if isinstance(one, PendingDigests) else ():
                    done.wait_until(math.inf)
            faults += self._judged(looked)
        return list(dict.fromkeys(faults))  # a layer's factors are looked at with each slot

    def _look(self) -> _Looked:
        view = self._view
        each = self.num_slots // len(view.rows)
        row, slot = view.rows[self._place // each], self._place % each
        self._place = (self._place + 1) % self.num_slots
        self.num_rounds += self._place == 0
        tensors = view.tensors(row)
        return _Looked(
            row,
            slot,
            int(view.held(row)[view.rank * each + slot]),
            [(one.name, self._order(one.record(slot))) for one in tensors.slots],
            [(name, self._order(as_bytes(tensor))) for name, tensor in tensors.factors],
        )

    def _order(self, record: torch.Tensor) -> Digest | PendingDigests:
        return self._digests.order([record], []) if record.is_cuda else digest(record)

    def _device_s(self) -> float:
        looked = self._looked
        pending = [] if looked is None else [one for _, one in looked.digests]
        return sum(
            one.records[0].numel() / BYTES_PER_S
            for one in pending
            if isinstance(one, PendingDigests)
        )

    def _judged(self, looked: _Looked) -> list[Fault]:
        row, rank = looked.row, self._view.rank
        found = [(name, self._read(one)) for name, one in looked.digests]
        factors = [(name, self._read(one)) for name, one in looked.factors]
        held = self._view.held(row)
        slot = rank * (len(held) // self._view.num_ranks) + looked.slot
        self.num_checked += 1
        faults = []
        for name, value in factors:
            expected = self._references.of_factor.get((row, name))
            if expected not in (None, value):
                what = f"of rank {rank} has changed since all ranks agreed on it"
                faults.append(Fault("factor", row, -1, -1, name, what))
        if held[slot] != looked.expert:
            return faults  # it moved meanwhile
        for name, value in found:
            expected = self._references.of_slot.get((row, name), {}).get(looked.expert)
            if expected in (None, value):
                continue
            other = self._references.expert_with(row, name, value)
            whose = "of no expert" if other is None else f"of expert {other}"
            what = f"has the bytes {whose}, expected those of the expert that the map names"
            faults.append(Fault("slot", row, slot, looked.expert, name, what))
        return faults

    def _read(self, one: Digest | PendingDigests) -> Digest:
        return self._digests.read(one)[0] if isinstance(one, PendingDigests) else one
