"""Digests of expert records at memory speed: the sums of ``runtime/memory.py``.

A record is compared with its manifest before it serves. The sums are associative modulo 2**64, so
programs may add their parts in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.launch import expect, kernel
from runtime.lane_weights import LANE_BYTES, LANES_AT_ONCE, MIX_FIRST, MIX_SECOND

LANES_PER_BLOCK = 2048
BLOCKS_PER_PROGRAM = 4  # a program ends with two atomic additions: few enough not to queue


def digest_records(records: torch.Tensor, out: torch.Tensor) -> None:
    """Write the digest of each record into ``out``.

    Args:
        records: [n, record_bytes] uint8; rows may lie apart (slots of an arena), but start at and
            consist of whole 32-bit lanes.
        out: [n, 2] int64: the sum of a record's int32 lanes, and the sum of lanes times the weights
            of their places (``runtime/memory.py``), both modulo 2**64.
    """
    expect("records", records, torch.uint8, (None, None), (None, 1))
    expect("out", out, torch.int64, (len(records), 2))
    offsets = (records.shape[1], records.stride(0), records.storage_offset())
    if any(offset % LANE_BYTES for offset in offsets):
        raise ValueError(
            f"found records of {offsets[0]} bytes, {offsets[1]} bytes apart, from byte "
            f"{offsets[2]} on, expected multiples of {LANE_BYTES}"
        )
    num_records, num_lanes = records.shape[0], records.shape[1] // LANE_BYTES
    if num_records == 0:
        return
    out.zero_()
    lanes = records.view(torch.int32)
    per_program = LANES_PER_BLOCK * BLOCKS_PER_PROGRAM
    _digest[(triton.cdiv(num_lanes, per_program), num_records)](
        lanes,
        out,
        lanes.stride(0),
        NUM_LANES=num_lanes,
        BLOCK=LANES_PER_BLOCK,
        BLOCKS=BLOCKS_PER_PROGRAM,
        WEIGHTS=LANES_AT_ONCE,
        FIRST=MIX_FIRST,
        SECOND=MIX_SECOND,
        num_warps=8,
    )


@kernel()
def _mixed(numbers: tl.tensor, FIRST: tl.constexpr, SECOND: tl.constexpr) -> tl.tensor:
    """``runtime.lane_weights.mixed``, of unsigned numbers of 32 bits."""
    spread = numbers * tl.full(numbers.shape, FIRST, tl.uint32)
    spread = spread ^ (spread >> 15)
    spread = spread * tl.full(numbers.shape, SECOND, tl.uint32)
    return spread ^ (spread >> 13)


@kernel("out")
def _digest(
    lanes: tl.tensor,
    out: tl.tensor,
    record_stride: tl.tensor,
    NUM_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
) -> None:
    record = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK * BLOCKS
    plain = tl.zeros((BLOCK,), tl.int64)
    weighted = tl.zeros((BLOCK,), tl.int64)
    for block in tl.static_range(BLOCKS):
        index = first + block * BLOCK + tl.arange(0, BLOCK)
        lane = tl.load(lanes + record * record_stride + index, mask=index < NUM_LANES, other=0)
        plain += lane.to(tl.int64)
        place = (index % WEIGHTS + 1).to(tl.uint32)
        weighted += lane.to(tl.int64) * _mixed(place, FIRST, SECOND).to(tl.int64)
    # A program's lanes are of one block of weights.
    factor = _mixed((index // WEIGHTS + 1).to(tl.uint32), FIRST, SECOND).to(tl.int64) | 1
    tl.atomic_add(out + 2 * record, tl.sum(plain, 0), sem="relaxed")
    tl.atomic_add(out + 2 * record + 1, tl.sum(weighted * factor, 0), sem="relaxed")
