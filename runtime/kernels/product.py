"""The kernel behind ``gemm.py``: a fixed grid of programs that share all slots' tiles.

One tile for all rows cannot suit uneven slots: a large one is mostly padding where a slot has few
rows or ends with few, a small one reads a busy slot's weights over and over. So a slot's rows are
cut into blocks of the largest tile, and the rest takes the smallest tile that holds it. A launch
for each kind of tile would cost about 2 us, as much as it saves in decode, and end in a tail of its
own: each program branches by the rows of its next tile.

Tiles are [A, BLOCK_K] and [B, BLOCK_K], and the sum is [A, B]. Rows are on the left, or, where they
are few, on the right, "flipped": tensor cores take 64 on the left and as few as 8 on the right.
"""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.launch import ends_of_slots, kernel, locate


@kernel("starts", "counts")
def grouped_product(
    rows: tl.tensor,
    weights: tl.tensor,
    row_scales: tl.tensor,
    weight_scales: tl.tensor,
    last_weights: tl.tensor,
    last_scales: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    num_slots: tl.tensor,
    num_first: tl.tensor,
    rows_stride: tl.tensor,
    weights_stride: tl.tensor,
    last_weights_stride: tl.tensor,
    out_stride: tl.tensor,
    row_scales_slot_stride: tl.tensor,
    row_scales_start_stride: tl.tensor,
    row_scales_stride: tl.tensor,
    row_scales_group_stride: tl.tensor,
    weight_scales_stride: tl.tensor,
    last_scales_stride: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Write all slots' products; scales are not read if not scaled.

    Slots from ``num_first`` on have the last weights, where there are any.

    TILES has (least rows, BLOCK_M, BLOCK_K, flipped, stages), most rows first: a block takes the
    branch of the rows that are left in it. The branches share registers and buffers, so those that
    are not taken cost nothing but the largest of both. Blocks of rows turn fastest, so that
    programs side by side share weights in the L2 cache.
    """
    BLOCK: tl.constexpr = TILES[0][1]
    ends = ends_of_slots(counts, num_slots, SLOTS, BLOCK, OUTPUTS // BLOCK_N)
    total = tl.max(ends, 0)
    tile = tl.program_id(0)
    while tile < total:
        slot, first, tiles_of_slot = locate(tile, ends)
        count = tl.load(counts + slot)
        blocks = tiles_of_slot // (OUTPUTS // BLOCK_N)
        first_row = (tile - first) % blocks * BLOCK
        output = (tile - first) // blocks * BLOCK_N
        left = tl.minimum(count - first_row, BLOCK)
        weights_at = _of_slot(
            slot, num_first, weights, weights_stride, last_weights, last_weights_stride
        )
        scales_at = _of_slot(
            slot, num_first, weight_scales, weight_scales_stride, last_scales, last_scales_stride
        )
        for entry in tl.static_range(len(TILES)):
            most = BLOCK if entry == 0 else TILES[entry - 1][0] - 1
            if (left >= TILES[entry][0]) & (left <= most):
                _write_tile(
                    slot,
                    count,
                    first_row,
                    output,
                    rows,
                    weights_at,
                    row_scales,
                    scales_at,
                    starts,
                    out,
                    rows_stride,
                    out_stride,
                    row_scales_slot_stride,
                    row_scales_start_stride,
                    row_scales_stride,
                    row_scales_group_stride,
                    INPUTS,
                    IS_SCALED,
                    GROUP,
                    BLOCK_N,
                    *TILES[entry],
                )
        tile += tl.num_programs(0)


@kernel()
def _of_slot(
    slot: tl.tensor,
    num_first: tl.tensor,
    tensors: tl.tensor,
    stride: tl.tensor,
    last: tl.tensor,
    last_stride: tl.tensor,
) -> tl.tensor:
    """Where the tensor of a slot begins."""
    slot = slot.to(tl.int64)  # weights of a slot may begin past 2**31
    begin = tensors + slot * stride
    if last is not None:
        begin = tl.where(slot < num_first, begin, last + (slot - num_first) * last_stride)
    return begin


@kernel()
def _write_tile(
    slot: tl.tensor,
    count: tl.tensor,
    first_row: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    row_scales: tl.tensor,
    weight_scales: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    rows_stride: tl.tensor,
    out_stride: tl.tensor,
    row_scales_slot_stride: tl.tensor,
    row_scales_start_stride: tl.tensor,
    row_scales_stride: tl.tensor,
    row_scales_group_stride: tl.tensor,
    INPUTS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FLIPPED: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write the [BLOCK_M, BLOCK_N] tile that begins at a row and an output of a slot.

    ``weights`` and ``weight_scales`` are those of the slot.
    """
    STEPS: tl.constexpr = INPUTS // BLOCK_K
    place = first_row + tl.arange(0, BLOCK_M)
    inputs = tl.arange(0, BLOCK_K)
    start = tl.load(starts + slot).to(tl.int64)
    slot = slot.to(tl.int64)  # its scales may begin past 2**31
    # Past the count the slot's last row is read again: cheaper than a mask in the inner loop, and
    # no row outside of the slot is touched.
    used = tl.minimum(place, count - 1)
    row_at = rows + (start + used)[:, None] * rows_stride + inputs[None, :]
    outputs = output + tl.arange(0, BLOCK_N)
    weight_at = weights + outputs[:, None] * INPUTS + inputs[None, :]
    left_at = weight_at if IS_FLIPPED else row_at
    right_at = row_at if IS_FLIPPED else weight_at
    if IS_SCALED:
        scale_at = row_scales + slot * row_scales_slot_stride + start * row_scales_start_stride
        scale_at += used * row_scales_stride
        block_at = weight_scales + output // GROUP * (INPUTS // GROUP)
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
