"""The kernel behind ``gemm.py``: a fixed grid of programs that share all slots' tiles.

One tile for all slots cannot suit uneven rows: sized for busy slots it is mostly padding in others,
sized for the others it reads a busy slot's weights over and over. A launch for each kind of tile
would cost about 2 us, as much as it saves in decode, and end in a tail of its own. So each program
branches by the rows of the slot that its next tile belongs to.

Tiles are [A, BLOCK_K] and [B, BLOCK_K], and the sum is [A, B]. Rows are on the left, or, where they
are few, on the right, "flipped": tensor cores take 64 on the left and as few as 8 on the right.
"""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.launch import kernel
from runtime.kernels.slots import locate


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
    TILES: tl.constexpr,
) -> None:
    """Write all slots' products; scales are not read if not scaled.

    TILES has (least rows, most rows, BLOCK_M, BLOCK_N, BLOCK_K, flipped, stages): a tile of a slot
    takes the branch of the slot's rows. The branches share registers and buffers, so those that
    are not taken cost nothing but the largest of both.
    """
    slots = tl.arange(0, SLOTS)
    held = tl.load(counts + slots, mask=slots < num_slots, other=0)
    ends = tl.cumsum(_tiles_of(held, OUTPUTS, TILES), 0)
    total = tl.max(ends, 0)
    tile = tl.program_id(0)
    while tile < total:
        slot, first, tiles_of_slot = locate(tile, ends)
        count = tl.load(counts + slot)
        for entry in tl.static_range(len(TILES)):
            if (count >= TILES[entry][0]) & (count <= TILES[entry][1]):
                _write_tile(
                    slot,
                    count,
                    tile - first,
                    tiles_of_slot,
                    rows,
                    weights,
                    row_scales,
                    weight_scales,
                    starts,
                    out,
                    rows_stride,
                    weights_stride,
                    out_stride,
                    row_scales_slot_stride,
                    row_scales_start_stride,
                    row_scales_stride,
                    row_scales_group_stride,
                    weight_scales_stride,
                    OUTPUTS,
                    INPUTS,
                    IS_SCALED,
                    GROUP,
                    *TILES[entry],
                )
        tile += tl.num_programs(0)


@kernel()
def _tiles_of(held: tl.tensor, OUTPUTS: tl.constexpr, TILES: tl.constexpr) -> tl.tensor:
    """[SLOTS] tiles of slots with so many rows."""
    tiles = tl.zeros_like(held)
    for entry in tl.static_range(len(TILES)):
        blocks = (held + TILES[entry][2] - 1) // TILES[entry][2] * (OUTPUTS // TILES[entry][3])
        tiles = tl.where((held >= TILES[entry][0]) & (held <= TILES[entry][1]), blocks, tiles)
    return tiles


@kernel()
def _write_tile(
    slot: tl.tensor,
    count: tl.tensor,
    tile: tl.tensor,
    tiles_of_slot: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    row_scales: tl.tensor,
    weight_scales: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
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
    IS_SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FLIPPED: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write the [BLOCK_M, BLOCK_N] tile of this number in its slot.

    Blocks of rows turn fastest, so that programs side by side share weights in the L2 cache.
    """
    STEPS: tl.constexpr = INPUTS // BLOCK_K
    row_blocks = tiles_of_slot // (OUTPUTS // BLOCK_N)
    place = tile % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tile // row_blocks * BLOCK_N
    inputs = tl.arange(0, BLOCK_K)
    start = tl.load(starts + slot).to(tl.int64)
    slot = slot.to(tl.int64)  # weights of a slot may begin past 2**31
    # Past the count the slot's last row is read again: cheaper than a mask in the inner loop, and
    # no row outside of the slot is touched.
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
        sums = _sum_scaled(left_at, right_at, scale_at, block_at, stride, STEPS, STAGES, IS_FLIPPED)
    else:
        sums = _sum(left_at, right_at, STEPS, STAGES)
    result = sums.to(out.dtype.element_ty)
    out_at = out + (start + place)[:, None] * out_stride + outputs[None, :]
    tl.store(out_at, result.T if IS_FLIPPED else result, mask=(place < count)[:, None])


@kernel()
def _sum(
    left_at: tl.tensor, right_at: tl.tensor, STEPS: tl.constexpr, STAGES: tl.constexpr
) -> tl.tensor:
    """[A, B] sums over all inputs, from pointers [A, BLOCK_K] and [B, BLOCK_K]."""
    BLOCK_K: tl.constexpr = left_at.shape[1]
    sums = tl.zeros((left_at.shape[0], right_at.shape[0]), tl.float32)
    for _ in tl.range(STEPS, num_stages=STAGES):
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
    STAGES: tl.constexpr,
    IS_FLIPPED: tl.constexpr,
) -> tl.tensor:
    """Sum as ``_sum`` does, with a scale for each row and step, and one for the step's weights.

    Adding the parts of 128 inputs outside of the tensor cores also mends their short FP8 sums
    (about 14 bits on Hopper: DeepSeek-V3 technical report, 3.3.2).
    """
    BLOCK_K: tl.constexpr = left_at.shape[1]
    sums = tl.zeros((left_at.shape[0], right_at.shape[0]), tl.float32)
    scale = tl.load(scale_at) * tl.load(block_at)
    for step in tl.range(STEPS, num_stages=STAGES):
        part = tl.dot(tl.load(left_at), tl.load(right_at).T)
        # The next scales are asked for a whole step before they are needed.
        ahead = tl.minimum(step + 1, STEPS - 1)
        next_scale = tl.load(scale_at + ahead * group_stride) * tl.load(block_at + ahead)
        sums += part * (scale[None, :] if IS_FLIPPED else scale[:, None])
        scale = next_scale
        left_at += BLOCK_K
        right_at += BLOCK_K
    return sums
