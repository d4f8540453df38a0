"""The check of live slots against digests that all ranks agreed on at the start.

Digests of every expert's tensors are taken after the weights were loaded and before anything moved,
while map and weights are known to match: from then on a slot is right if it has its expert's
digests, wherever the expert is. Replicas that differ already at that time, and factors that differ
between ranks, are faults of loading. Later the check looks at one live slot now and then, within a
part of the time, and never waits for a device.

Shapes:  E experts, C slots of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rebalance.engines.common.fsck.report import Fault
from rebalance.engines.common.fsck.tensors import EngineView, as_bytes
from rebalance.types import Digest
from runtime.memory.digests import PendingDigests, RecordDigests
from runtime.memory.shared import digest

# All ranks' values, which JSON can express, in order of ranks: a collective.
Gather = Callable[[Any], list[Any]]

PART = 0.001  # of the time that the check may take
BYTES_PER_S = 2e12  # at which a device reads a record; the host does not see that time
BUSY = 2.0  # times what an idle pass has saved, from which a busy pass is used too


@dataclass(eq=False)
class References:
    """What each expert's tensors, and each layer's factors, must be."""

    of_slot: dict[tuple[int, str], dict[int, Digest]] = field(default_factory=dict)
    of_factor: dict[tuple[int, str], Digest] = field(default_factory=dict)

    def expert_with(self, row: int, name: str, found: Digest) -> int | None:
        """Return the expert whose tensor has this digest."""
        experts = self.of_slot.get((row, name), {})
        return next((expert for expert, known in experts.items() if known == found), None)


# Of one rank: by layer, digests of each tensor by slot, and of each factor.
Own = dict[int, tuple[dict[str, list[Digest]], dict[str, Digest]]]


def to_message(own: Own) -> list[Any]:
    """Digests as lists, for JSON."""
    return [[row, slots, factors] for row, (slots, factors) in own.items()]


def from_message(message: list[Any]) -> Own:
    """Digests of another rank, from its message."""
    return {
        int(row): (
            {name: [_digest(found) for found in digests] for name, digests in slots.items()},
            {name: _digest(found) for name, found in factors.items()},
        )
        for row, slots, factors in message
    }


def _digest(found: list[int]) -> Digest:
    plain, weighted = found
    return int(plain), int(weighted)


def digests_of(view: EngineView) -> Own:
    """Digest all slots of this rank."""
    own: Own = {}
    for row in view.rows:
        found = view.tensors(row)
        each = len(view.held(row)) // view.num_ranks
        slots = {
            one.name: [digest(one.record(slot)) for slot in range(each)] for one in found.slots
        }
        own[row] = slots, {name: digest(as_bytes(tensor)) for name, tensor in found.factors}
    return own


def agreed(view: EngineView, by_rank: list[Own]) -> tuple[References, list[Fault]]:
    """References from the digests of all ranks, and what differs between them.

    An expert's tensor whose replicas differ has no reference, and is not checked later.
    """
    references, faults = References(), []
    for row in view.rows:
        held = np.asarray(view.held(row))
        ranks = [own[row] for own in by_rank]
        faults += _names_differ(row, [sorted({*slots, *factors}) for slots, factors in ranks])
        for name in ranks[0][0]:
            slots = [found[0].get(name, []) for found in ranks]
            faults += _of_slots(references, row, name, held, slots)
        for name, first in ranks[0][1].items():
            odd = [rank for rank, found in enumerate(ranks) if found[1].get(name, first) != first]
            if not odd:
                references.of_factor[row, name] = first
                continue
            what = (
                f"has another value on ranks {odd} than on rank 0, expected one on all: an "
                "expert that moves there is computed with another factor"
            )
            faults.append(Fault("factor", row, -1, -1, name, what))
    return references, faults


def _names_differ(row: int, ranks: list[list[str]]) -> list[Fault]:
    return [
        Fault("tensors", row, -1, -1, f"rank {rank}", f"has {names}, expected {ranks[0]}")
        for rank, names in enumerate(ranks)
        if names != ranks[0]
    ]


def _of_slots(
    references: References, row: int, name: str, held: NDArray[Any], slots: list[list[Digest]]
) -> list[Fault]:
    each = len(held) // len(slots)  # a rank without this tensor has no digests
    seen: dict[int, dict[int, Digest]] = {}
    for rank, digests in enumerate(slots):
        for place, found in enumerate(digests):
            slot = rank * each + place
            seen.setdefault(int(held[slot]), {})[slot] = found
    experts = references.of_slot.setdefault((row, name), {})
    faults = []
    for expert, replicas in seen.items():
        first = next(iter(replicas))
        odd = [slot for slot, found in replicas.items() if found != replicas[first]]
        if odd:
            what = f"differs from the replica in slot {first}, expected the same bytes"
            faults += [Fault("replicas", row, slot, expert, name, what) for slot in odd]
        else:
            experts[expert] = replicas[first]
    return faults


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

    def forget_look(self) -> None:
        """Judge nothing of a slot that was looked at: slots have other bytes by now."""
        self._looked = None

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
