"""The experts' product: every slot's rows times that slot's weights, in one launch.

Weights are read where they live, in the records of an arena, so a swap needs no copy into another
layout. Few rows a slot (decode) are bound by reading weights once; many (prefill) by arithmetic.
Tiles follow the rows that each slot has, which only the device knows.

A fixed grid of programs shares all slots' tiles. One tile for all rows cannot suit uneven slots: a
large one is mostly padding where a slot has few rows or ends with few, a small one reads a busy
slot's weights over and over. So a slot's rows are cut into blocks of the largest tile, and the rest
takes the smallest tile that holds it. A launch for each kind of tile would cost about 2 us, as much
as it saves in decode, and end in a tail of its own: each program branches by the rows of its next
tile.

Tiles are [A, BLOCK_K] and [B, BLOCK_K], and the sum is [A, B]. Rows are on the left, or, where they
are few, on the right, "flipped": tensor cores take 64 on the left and as few as 8 on the right.

Shapes:  n rows, C slots, K inputs of a row, N outputs of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from runtime.kernels.launch import (
    check,
    check_slots,
    describe,
    ends_of_slots,
    expect,
    kernel,
    largest_tile,
    locate,
    num_multiprocessors,
)
from runtime.kernels.quantise import GROUP, Quantised


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
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Write all slots' products; scales are not read if not scaled.

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
        # In 64 bits: weights of a slot may begin past 2**31.
        weights_at = weights + slot.to(tl.int64) * weights_stride
        scales_at = weight_scales + slot.to(tl.int64) * weight_scales_stride
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


SMALLEST_TILE = 64  # K and N must be multiples: the smallest tile that tensor cores take well


@dataclass(frozen=True)
class Tile:
    """Tile of so many rows of a slot."""

    BLOCK_M: int  # rows
    BLOCK_K: int  # inputs of one pipeline stage
    IS_FLIPPED: bool  # weights on the left: tensor cores want 64 there, few rows would be padding
    STAGES: int  # buffers in flight


@dataclass(frozen=True)
class Tiling:
    """Tiles of one launch, most rows first, and no two of the same.

    Slots are cut into blocks of the first; the last block of a slot takes the last tile that holds
    its rows. All share the launch's outputs of a tile, warps, and programs of a multiprocessor, and
    the largest of their buffers counts for all.
    """

    tiles: tuple[Tile, ...]
    BLOCK_N: int  # outputs
    num_warps: int
    programs: int


# Two programs share a multiprocessor's 227 KiB of shared memory, each with 48 to 64 KiB of weights
# under way: 4 TB/s times 1 us of latency, spread over 132 multiprocessors, is 30 KiB. Tiles of 128
# outputs keep the reading of rows, from the L2 cache, low. In FP8 this is faster for prefill too
# than one program with tiles of 128 rows (benchmarks/reports/2026-11-23-experts-uneven.md).
FP8_TILES = Tiling(
    (Tile(64, 128, False, 4), Tile(32, 128, True, 4), Tile(16, 128, True, 4)),
    BLOCK_N=128,
    num_warps=4,
    programs=2,
)
BF16_DECODE = Tiling(
    (Tile(64, 64, False, 4), Tile(32, 64, True, 5), Tile(16, 128, True, 3)),
    BLOCK_N=128,
    num_warps=4,
    programs=2,
)
BF16_PREFILL = Tiling(
    (Tile(128, 64, False, 4), Tile(64, 64, True, 4), Tile(32, 64, True, 4), Tile(16, 64, True, 4)),
    BLOCK_N=256,
    num_warps=8,
    programs=1,
)
MOST_DECODE_ROWS = 192  # rows of a busy slot, twice the mean; BF16_PREFILL is faster with more


def grouped_gemm(
    rows: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    *,
    tiling: Tiling = BF16_DECODE,
) -> None:
    """Write rows of slot c times ``weights[c]`` transposed, for every slot.

    Sums are float32. Rows of no slot stay as they are in ``out``.

    Args:
        rows: [n, K] BF16, or float32 for checks. Rows of slot c: ``starts[c]`` up to ``starts[c] +
            counts[c]``.
        weights: [C, N, K] of the rows' type; slots may lie any distance apart.
        starts: [C] int32.
        counts: [C] int32; 0 for a slot without rows.
        out: [n, N] of any floating type.
        tiling: bears on time alone; BF16_PREFILL for slots of usually more than MOST_DECODE_ROWS.
    """
    check(
        rows.dtype == weights.dtype and rows.dtype in (torch.bfloat16, torch.float32),
        f"rows {describe(rows)} and weights {describe(weights)}",
        "both bfloat16 (or both float32)",
    )
    if rows.dtype == torch.float32:  # twice the bytes would not fit into shared memory
        tiles = tuple(replace(tile, BLOCK_K=32, STAGES=2) for tile in tiling.tiles)
        tiling = replace(tiling, tiles=tiles, BLOCK_N=64)
    _launch(Quantised(rows, rows), Quantised(weights, weights), (starts, counts), out, tiling)


def grouped_gemm_fp8(
    rows: Quantised,
    weights: Quantised,
    starts: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    *,
    tiling: Tiling = FP8_TILES,
) -> None:
    """Do what ``grouped_gemm`` does, with e4m3 inputs that have float32 scales.

    Args:
        rows: values [n, K]; scales [n, K / 128] of any strides, or, where every slot has M rows of
            its own, [C, M, K / 128] of any strides (DeepEP's low-latency mode gives those).
        weights: values [C, N, K]; scales [C, N / 128, K / 128]. Slots of each may lie any distance
            apart.
        starts: [C] int32.
        counts: [C] int32.
        out: [n, N] of any floating type.
        tiling: bears on time alone.
    """
    check(
        rows.values.dtype == weights.values.dtype == torch.float8_e4m3fn,
        f"rows {describe(rows.values)} and weights {describe(weights.values)}",
        "both float8_e4m3fn",
    )
    check(tiling.BLOCK_N <= GROUP, f"tiles of {tiling.BLOCK_N} outputs", f"at most {GROUP}")
    _check_scales(rows, len(counts))
    _check_blocks(weights)
    _launch(rows, weights, (starts, counts), out, tiling)


def _launch(
    rows: Quantised,
    weights: Quantised,
    slots: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    tiling: Tiling,
) -> None:
    starts, counts = slots
    _check(rows.values, weights.values, slots, out)
    if out.numel() == 0:
        return
    _, outputs, inputs = weights.values.shape
    grouped_product[(num_multiprocessors(out.device) * tiling.programs,)](
        rows.values,
        weights.values,
        rows.scales,
        weights.scales,
        starts,
        counts,
        out,
        len(counts),
        rows.values.stride(0),
        weights.values.stride(0),
        out.stride(0),
        *_strides(rows.scales),
        weights.scales.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        SLOTS=triton.next_power_of_2(len(counts)),
        IS_SCALED=rows.values.dtype == torch.float8_e4m3fn,
        GROUP=GROUP,
        BLOCK_N=largest_tile(outputs, tiling.BLOCK_N),
        TILES=_tiles(tiling, inputs),
        num_warps=tiling.num_warps,
    )


def _tiles(tiling: Tiling, inputs: int) -> tuple[tuple[int, ...], ...]:
    """(least rows, BLOCK_M, BLOCK_K, flipped, stages) with BLOCK_K that divides K."""
    fewer = (*(tile.BLOCK_M for tile in tiling.tiles[1:]), 0)
    return tuple(
        (less + 1, tile.BLOCK_M, largest_tile(inputs, tile.BLOCK_K), tile.IS_FLIPPED, tile.STAGES)
        for tile, less in zip(tiling.tiles, fewer, strict=True)
    )


def _strides(row_scales: torch.Tensor) -> tuple[int, int, int, int]:
    """Steps of a scale per slot, per row that the slot starts at, per row in it, per group."""
    if row_scales.dim() == 3:
        slot, row, group = row_scales.stride()
        return slot, 0, row, group
    row, group = row_scales.stride()
    return 0, row, row, group


def _check(
    rows: torch.Tensor,
    weights: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    starts, counts = slots
    check_slots(starts, counts)
    check(weights.dim() == 3, f"weights {describe(weights)}", "[C, N, K]")
    num_slots, outputs, inputs = weights.shape
    check(
        outputs % SMALLEST_TILE == 0 and inputs % SMALLEST_TILE == 0,
        f"weights {describe(weights)}",
        f"N and K that are multiples of {SMALLEST_TILE}",
    )
    expect("weights", weights, rows.dtype, (None, outputs, inputs), (None, inputs, 1))
    check(len(counts) == num_slots, f"counts of {len(counts)} slots", f"{num_slots}, as weights")
    expect("rows", rows, rows.dtype, (None, inputs), (None, 1))
    expect("out", out, out.dtype, (len(rows), outputs), (None, 1))


def _check_blocks(weights: Quantised) -> None:
    num_slots, outputs, inputs = weights.values.shape
    check(
        outputs % GROUP == 0 and inputs % GROUP == 0,
        f"weights {describe(weights.values)}",
        f"N and K that are multiples of {GROUP}, as each block of them has a scale",
    )
    blocks = (num_slots, outputs // GROUP, inputs // GROUP)
    expect("weight scales", weights.scales, torch.float32, blocks, (None, blocks[2], 1))


def _check_scales(rows: Quantised, num_slots: int) -> None:
    num_rows, groups = len(rows.values), rows.values.shape[1] // GROUP
    of_rows, of_slots = (num_rows, groups), (num_slots, num_rows // num_slots, groups)
    check(
        rows.scales.dtype == torch.float32 and tuple(rows.scales.shape) in (of_rows, of_slots),
        f"row scales {describe(rows.scales)}",
        f"float32 {list(of_rows)} or {list(of_slots)}",
    )
