"""The kernel behind ``gemm.py``: a fixed grid of programs that share all slots' tiles.

Tiles are [A, BLOCK_K] and [B, BLOCK_K], and the sum is [A, B]. Rows are on the left, or, where they
are few, on the right, "flipped": tensor cores take 64 on the left and as few as 8 on the right.
"""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.launch import kernel
from runtime.kernels.slots import ends_of_slots, locate


@kernel("starts", "counts")
def grouped_product(
    rows: tl.tensor,
    weights: tl.tensor,
    row_scales: tl.tensor,
    weight_scales: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    num_slots: tl.tensor,
    rows_stride: tl.tensor,
    weights_stride: tl.tensor,
    out_stride: tl.tensor,
    row_scales_slot_stride: tl.tensor,
    row_scales_start_stride: tl.tensor,
    row_scales_stride: tl.tensor,
    row_scales_group_stride: tl.tensor,
    weight_scales_stride: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FLIPPED: tl.constexpr,
) -> None:
    """Write [BLOCK_M, BLOCK_N] tiles of all slots' products; scales are not read if not scaled."""
    STEPS: tl.constexpr = INPUTS // BLOCK_K
    ends = ends_of_slots(counts, num_slots, SLOTS, BLOCK_M, OUTPUTS // BLOCK_N)
    total = tl.max(ends, 0)
    inputs = tl.arange(0, BLOCK_K)
    tile = tl.program_id(0)
    while tile < total:
        slot, place, output = _corner(tile, ends, BLOCK_M, BLOCK_N, OUTPUTS)
        count = tl.load(counts + slot)
        start = tl.load(starts + slot).to(tl.int64)
        slot = slot.to(tl.int64)  # weights of a slot may begin past 2**31
        # Past the count the slot's last row is read again: cheaper than a mask in the inner loop,
        # and no row outside of the slot is touched.
        used = tl.minimum(place, count - 1)
        row_at = rows + (start + used)[:, None] * rows_stride + inputs[None, :]
        outputs = output + tl.arange(0, BLOCK_N)
        weight_at = weights + slot * weights_stride + outputs[:, None] * INPUTS + inputs[None, :]
        left_at = weight_at if IS_FLIPPED else row_at
        right_at = row_at if IS_FLIPPED else weight_at
        if IS_SCALED:
            scale_at = row_scales + slot * row_scales_slot_stride + start * row_scales_start_stride
            scale_at += used * row_scales_stride
            block_at = weight_scales + slot * weight_scales_stride
            block_at += output // GROUP * (INPUTS // GROUP)
            stride = row_scales_group_stride
            sums = _sum_scaled(left_at, right_at, scale_at, block_at, stride, STEPS, IS_FLIPPED)
        else:
            sums = _sum(left_at, right_at, STEPS)
        result = sums.to(out.dtype.element_ty)
        out_at = out + (start + place)[:, None] * out_stride + outputs[None, :]
        tl.store(out_at, result.T if IS_FLIPPED else result, mask=(place < count)[:, None])
        tile += tl.num_programs(0)


@kernel()
def _corner(
    tile: tl.tensor,
    ends: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> tl.tensor:
    """(slot, places [BLOCK_M] of rows in the slot, first output) of a tile.

    Blocks of rows turn fastest, so that programs side by side share weights in the L2 cache.
    """
    slot, first, tiles_of_slot = locate(tile, ends)
    row_blocks = tiles_of_slot // (OUTPUTS // BLOCK_N)
    place = (tile - first) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    return slot, place, (tile - first) // row_blocks * BLOCK_N


@kernel()
def _sum(left_at: tl.tensor, right_at: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    """[A, B] sums over all inputs, from pointers [A, BLOCK_K] and [B, BLOCK_K]."""
    BLOCK_K: tl.constexpr = left_at.shape[1]
    sums = tl.zeros((left_at.shape[0], right_at.shape[0]), tl.float32)
    for _ in range(STEPS):
        # "ieee" bears on float32 only, which would be cut to 19 bits otherwise.
        left, right = tl.load(left_at), tl.load(right_at)
        sums = tl.dot(left, right.T, sums, input_precision="ieee")
        left_at += BLOCK_K
        right_at += BLOCK_K
    return sums


@kernel()
def _sum_scaled(
    left_at: tl.tensor,
    right_at: tl.tensor,
    scale_at: tl.tensor,
    block_at: tl.tensor,
    group_stride: tl.tensor,
    STEPS: tl.constexpr,
    IS_FLIPPED: tl.constexpr,
) -> tl.tensor:
    """Sum as ``_sum`` does, with a scale for each row and step, and one for the step's weights.

    Adding the parts of 128 inputs outside of the tensor cores also mends their short FP8 sums
    (about 14 bits on Hopper: DeepSeek-V3 technical report, 3.3.2).
    """
    BLOCK_K: tl.constexpr = left_at.shape[1]
    sums = tl.zeros((left_at.shape[0], right_at.shape[0]), tl.float32)
    scale = tl.load(scale_at) * tl.load(block_at)
    for step in range(STEPS):
        part = tl.dot(tl.load(left_at), tl.load(right_at).T)
        # The next scales are asked for a whole step before they are needed.
        ahead = tl.minimum(step + 1, STEPS - 1)
        next_scale = tl.load(scale_at + ahead * group_stride) * tl.load(block_at + ahead)
        sums += part * (scale[None, :] if IS_FLIPPED else scale[:, None])
        scale = next_scale
        left_at += BLOCK_K
        right_at += BLOCK_K
    return sums
