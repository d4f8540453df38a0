"""Work distribution over a fixed grid when only the device knows the number of rows.

Rows of slot c are ``starts[c]`` up to ``starts[c] + counts[c]``. That covers rows grouped one slot
after another, and padded blocks of M rows a slot, flattened, with ``starts = c * M``. Work is cut
into blocks of rows, numbered through all slots; each program takes every n-th. A grid sized by the
most rows that a slot could hold would consist of idle programs instead: with 64 slots of at most
512 rows, 97 % of them when the mean is 16.

Shapes:  C slots.
"""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.launch import kernel


@kernel()
def ends_of_slots(
    counts: tl.tensor,
    num_slots: tl.tensor,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """[SLOTS] pieces of work up to and with each slot: PARTS for each block of BLOCK rows."""
    slot = tl.arange(0, SLOTS)
    count = tl.load(counts + slot, mask=slot < num_slots, other=0)
    return tl.cumsum((count + BLOCK - 1) // BLOCK * PARTS, 0)


@kernel()
def locate(piece: tl.tensor, ends: tl.tensor) -> tl.tensor:
    """(slot, first piece of the slot, pieces of the slot) for a piece of work."""
    is_before = ends <= piece
    slot = tl.sum(is_before.to(tl.int32), 0)
    first = tl.max(tl.where(is_before, ends, 0), 0)
    # Of the slots that are not before, the piece's own ends first.
    end = tl.min(tl.where(is_before, tl.max(ends, 0), ends), 0)
    return slot, first, end - first
