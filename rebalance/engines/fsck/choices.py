"""Whether ranks choose replicas so that every token's expert is computed once.

With an all-to-all, each rank dispatches its own tokens, and its slot must hold the expert. Without
one, all ranks run the experts over the same tokens and add their parts: if they choose different
replicas, an expert is added several times or not at all, and the output is wrong without an error.

Shapes:  N tokens, K experts of a token, S slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rebalance.engines.fsck.faults import Fault

IntArray = NDArray[np.int64]


def check_choices(
    row: int, experts: IntArray, chosen: Sequence[IntArray], held: IntArray, *, is_shared: bool
) -> list[Fault]:
    """Compare slots that ranks chose for the same tokens.

    Args:
        row: layer.
        experts: [N, K] that the router chose.
        chosen: of each rank, [N, K] slots.
        held: [S] experts by slot.
        is_shared: whether ranks run the experts over the same tokens.
    """
    faults = []
    for rank, slots in enumerate(chosen):
        is_slot = (slots >= 0) & (slots < len(held))
        wrong = ~is_slot | (held[np.where(is_slot, slots, 0)] != experts)
        for place in np.argwhere(wrong)[:1]:
            slot, expert = int(slots[tuple(place)]), int(experts[tuple(place)])
            what = f"of rank {rank} is for another expert, expected a slot that holds it"
            faults.append(Fault("choice", row, slot, expert, "the choice", what))
        differs = np.argwhere(slots != chosen[0])
        if is_shared and len(differs):
            place = tuple(differs[0])
            what = (
                f"of rank {rank} differs from rank 0's slot {chosen[0][place]} for {len(differs)} "
                f"of {slots.size} choices, expected the same on all ranks: without an all-to-all "
                "ranks add their parts, so the output is wrong"
            )
            slot, expert = int(slots[place]), int(experts[place])
            faults.append(Fault("choice", row, slot, expert, "the choice", what))
    return faults
