"""The step between the experts' two products: gate, and quantisation to 8 bits.

FP8 here is e4m3 with one float32 scale for every row and 128 columns: value = fp8 * scale. Rows of
no slot are neither read nor written.

Shapes:  n rows, C slots, H columns of a row, M intermediate.
Source:  tiles of 1 x 128 for activations, DeepSeek-V3 technical report (arXiv 2412.19437), 3.3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runtime.kernels.launch import (
    check,
    check_slots,
    ends_of_slots,
    expect,
    kernel,
    largest_tile,
    locate,
    num_multiprocessors,
)

GROUP = 128  # columns that share a scale
LARGEST_E4M3 = 448.0
SMALLEST_AMAX = 1e-4  # a row of zeros has a scale too
COLUMNS_PER_PROGRAM = 1024
PROGRAMS_PER_MULTIPROCESSOR = 16


class Quantised(NamedTuple):
    """FP8 values and their float32 scales: [n, H] with [n, H / 128], or weights with blocks."""

    values: torch.Tensor
    scales: torch.Tensor


def quantise_rows(
    rows: torch.Tensor,
    into: Quantised,
    *,
    starts: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Write rows [n, H] as FP8 with scales [n, H / 128] of any strides.

    Without ``starts`` and ``counts`` (both [C] int32) all rows are written, otherwise those of the
    slots: ``starts[c]`` up to ``starts[c] + counts[c]``.
    """
    _transform(rows, (starts, counts), into, is_gated=False)


def silu_times_up(
    gate_up: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, out: torch.Tensor
) -> None:
    """Write silu(gate) * up into ``out`` [n, M], for the slots' rows of ``gate_up`` [n, 2 M].

    The gate is the first half of a row. Computed in float32, rounded once.
    """
    _transform(gate_up, (starts, counts), Quantised(out, out), is_gated=True)


def silu_times_up_fp8(
    gate_up: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, into: Quantised
) -> None:
    """Write silu(gate) * up as FP8 [n, M] with scales [n, M / 128], in one pass.

    The product is quantised from float32, so a value may differ in its last bit from that of
    ``silu_times_up`` followed by ``quantise_rows``, which rounds to BF16 in between.
    """
    _transform(gate_up, (starts, counts), into, is_gated=True)


def _transform(
    rows: torch.Tensor,
    slots: tuple[torch.Tensor | None, torch.Tensor | None],
    into: Quantised,
    *,
    is_gated: bool,
) -> None:
    starts, counts = slots
    num_rows, columns = into.values.shape
    is_scaled = into.values.dtype == torch.float8_e4m3fn
    _check(rows, into, is_gated=is_gated)
    check((starts is None) == (counts is None), "one of starts and counts", "both or neither")
    num_slots = 1
    if starts is not None and counts is not None:
        check_slots(starts, counts)
        num_slots = len(counts)
    if num_rows == 0:
        return
    group = GROUP if is_scaled else largest_tile(columns, GROUP)
    groups = largest_tile(columns // group, COLUMNS_PER_PROGRAM // group)
    _rows[(num_multiprocessors(rows.device) * PROGRAMS_PER_MULTIPROCESSOR,)](
        rows,
        starts,
        counts,
        into.values,
        into.scales,
        num_rows,
        num_slots,
        rows.stride(0),
        into.values.stride(0),
        into.scales.stride(0),
        into.scales.stride(1),
        COLUMNS=columns,
        GROUP=group,
        GROUPS=groups,
        SLOTS=triton.next_power_of_2(num_slots),
        IS_GATED=is_gated,
        IS_SCALED=is_scaled,
        LARGEST=LARGEST_E4M3,
        SMALLEST=SMALLEST_AMAX,
    )


def _check(rows: torch.Tensor, into: Quantised, *, is_gated: bool) -> None:
    values, scales = into
    num_rows, columns = values.shape
    given = (num_rows, 2 * columns if is_gated else columns)
    expect("rows", rows, rows.dtype, given, (None, 1))
    if scales is values:
        expect("out", values, rows.dtype, None, (None, 1))
        return
    check(columns % GROUP == 0, f"{columns} columns", f"a multiple of {GROUP}")
    expect("values", values, torch.float8_e4m3fn, None, (None, 1))
    expect("scales", scales, torch.float32, (num_rows, columns // GROUP), (None, None))


@kernel("starts", "counts", "num_rows")
def _rows(
    rows: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    num_slots: tl.tensor,
    rows_stride: tl.tensor,
    values_stride: tl.tensor,
    scales_stride: tl.tensor,
    scales_group_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    # A piece of work is GROUPS groups of one row.
    PARTS: tl.constexpr = COLUMNS // (GROUP * GROUPS)
    if counts is None:
        total = num_rows * PARTS
    else:
        ends = ends_of_slots(counts, num_slots, SLOTS, 1, PARTS)
        total = tl.max(ends, 0)
    piece = tl.program_id(0)
    while piece < total:
        if counts is None:
            row = (piece // PARTS).to(tl.int64)
            part = piece % PARTS
        else:
            slot, first, _ = locate(piece, ends)
            row = (tl.load(starts + slot) + (piece - first) // PARTS).to(tl.int64)
            part = (piece - first) % PARTS
        group = part * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        value = tl.load(rows + row * rows_stride + column).to(tl.float32)
        if IS_GATED:
            up = tl.load(rows + row * rows_stride + COLUMNS + column).to(tl.float32)
            value = value / (1 + tl.exp(-value)) * up
        if IS_SCALED:
            scale = tl.maximum(tl.max(tl.abs(value), axis=1), SMALLEST) / LARGEST
            tl.store(scales + row * scales_stride + group * scales_group_stride, scale)
            value = value / scale[:, None]
        tl.store(values + row * values_stride + column, value.to(values.dtype.element_ty))
        piece += tl.num_programs(0)
