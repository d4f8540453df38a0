"""Digests of every expert's tensors, agreed by all ranks while map and weights are known to match.

They are taken after the weights were loaded and before anything moved: from then on a slot is right
if it has its expert's digests, wherever the expert is. Replicas that differ already at that time,
and factors that differ between ranks, are faults of loading.

Shapes:  E experts, C slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rebalance.engines.fsck.faults import Fault
from rebalance.engines.fsck.tensors import EngineView, as_bytes
from rebalance.types import Digest
from runtime.memory.shared import digest


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
