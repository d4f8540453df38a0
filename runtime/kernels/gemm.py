"""The experts' product: every slot's rows times that slot's weights, in one launch.

Weights are read where they live, in the records of an arena, so a swap needs no copy into another
layout. Few rows a slot (decode) are bound by reading weights once; many (prefill) by arithmetic.
Tiles follow the rows that each slot has, which only the device knows.

Shapes:  n rows, C slots, K inputs of a row, N outputs of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from runtime.kernels.launch import (
    check,
    check_slots,
    describe,
    expect,
    largest_tile,
    num_multiprocessors,
)
from runtime.kernels.product import grouped_product
from runtime.kernels.quantise import GROUP, Quantised

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
    last: torch.Tensor | None = None,
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
        last: weights of the slots after those of ``weights``, which lie elsewhere; C counts both.
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
    last_too = None if last is None else Quantised(last, last)
    _launch(
        Quantised(rows, rows), Quantised(weights, weights), last_too, (starts, counts), out, tiling
    )


def grouped_gemm_fp8(
    rows: Quantised,
    weights: Quantised,
    starts: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    *,
    last: Quantised | None = None,
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
        last: weights of the slots after those of ``weights``, which lie elsewhere; C counts both.
        tiling: bears on time alone.
    """
    check(
        rows.values.dtype == weights.values.dtype == torch.float8_e4m3fn,
        f"rows {describe(rows.values)} and weights {describe(weights.values)}",
        "both float8_e4m3fn",
    )
    check(tiling.BLOCK_N <= GROUP, f"tiles of {tiling.BLOCK_N} outputs", f"at most {GROUP}")
    _check_scales(rows, len(counts))
    for one in _both(weights, last):
        _check_blocks(one)
    _launch(rows, weights, last, (starts, counts), out, tiling)


def _launch(
    rows: Quantised,
    weights: Quantised,
    last: Quantised | None,
    slots: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    tiling: Tiling,
) -> None:
    starts, counts = slots
    _check(rows.values, [one.values for one in _both(weights, last)], slots, out)
    if out.numel() == 0:
        return
    num_first, outputs, inputs = weights.values.shape
    grouped_product[(num_multiprocessors(out.device) * tiling.programs,)](
        rows.values,
        weights.values,
        rows.scales,
        weights.scales,
        None if last is None else last.values,
        None if last is None else last.scales,
        starts,
        counts,
        out,
        len(counts),
        num_first,
        rows.values.stride(0),
        weights.values.stride(0),
        0 if last is None else last.values.stride(0),
        out.stride(0),
        *_strides(rows.scales),
        weights.scales.stride(0),
        0 if last is None else last.scales.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        SLOTS=triton.next_power_of_2(len(counts)),
        IS_SCALED=rows.values.dtype == torch.float8_e4m3fn,
        GROUP=GROUP,
        BLOCK_N=largest_tile(outputs, tiling.BLOCK_N),
        TILES=_tiles(tiling, inputs),
        num_warps=tiling.num_warps,
    )


def _both(weights: Quantised, last: Quantised | None) -> tuple[Quantised, ...]:
    return (weights,) if last is None else (weights, last)


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
    weights: list[torch.Tensor],
    slots: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    starts, counts = slots
    check_slots(starts, counts)
    check(weights[0].dim() == 3, f"weights {describe(weights[0])}", "[C, N, K]")
    _, outputs, inputs = weights[0].shape
    check(
        outputs % SMALLEST_TILE == 0 and inputs % SMALLEST_TILE == 0,
        f"weights {describe(weights[0])}",
        f"N and K that are multiples of {SMALLEST_TILE}",
    )
    for name, one in zip(("weights", "last weights"), weights, strict=False):
        expect(name, one, rows.dtype, (None, outputs, inputs), (None, inputs, 1))
    num_slots = sum(len(one) for one in weights)
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
