"""Three kernels that send a batch's tokens to replicas by the batch's own counts.

    count_experts -> (all-gather of the counts) -> split_batch -> choose_by_split

``split_batch`` repeats ``eplb.shares.batch.split_batch``, in one program: the layer's split is too
small for more.

Shapes:  E experts, M experts that are split, W ways, R ranks, C slots of a rank, N sources (ranks
         that route), T tokens, K top-k, B blocks of ``PAIRS_PER_PROGRAM`` (token, k) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eplb.shares.batch import CLOSE, FILLS, PAST_LEVEL, PLANNED, SETTLED
from runtime.kernels.launch import check, describe, kernel

PAIRS_PER_PROGRAM = 64  # measured on an H200: at 32 tokens 2 us less than with 128
SOURCES_AT_ONCE = 32
BLOCKS_AT_ONCE = 8
SHARE_ONE = 65536


@dataclass(frozen=True)
class LayerSplit:
    """Tensors of one layer on the device: ``eplb.shares.batch.SplitLayout`` and room for results.

    All are contiguous int32, ``fixed_share`` is float32; entries of nothing are -1.
    """

    row: torch.Tensor  # [E]
    expert: torch.Tensor  # [M]
    turn: torch.Tensor  # [M]
    rank: torch.Tensor  # [M, W]
    slot: torch.Tensor  # [M, W]
    fed_by: torch.Tensor  # [R, C]
    fixed: torch.Tensor  # [R, C]
    fixed_share: torch.Tensor  # [R, C]
    num_turns: torch.Tensor  # [1]


def num_blocks(num_tokens: int, top_k: int) -> int:
    """Blocks B of a batch."""
    return int(triton.cdiv(num_tokens * top_k, PAIRS_PER_PROGRAM))


def count_experts(experts: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor) -> None:
    """Count the tokens of each expert.

    Args:
        experts: [T, K] int64 expert ids; others than 0..E-1 are not counted.
        blocks: [at least B, E] int32, filled with the counts of each block.
        counts: [E] int32, zeros, to which the counts are added.
    """
    _check_int32(blocks=blocks, counts=counts)
    check(
        experts.is_contiguous() and experts.dtype == torch.int64, describe(experts), "int64 [T, K]"
    )
    programs = num_blocks(*experts.shape)
    check(len(blocks) >= programs, f"blocks {describe(blocks)}", f"at least {programs} rows")
    if programs:
        _count[(programs,)](
            experts,
            blocks,
            counts,
            experts.numel(),
            NUM_EXPERTS=len(counts),
            BINS=triton.next_power_of_2(len(counts)),
            PAIRS=PAIRS_PER_PROGRAM,
        )


def split_batch(
    layer: LayerSplit,
    gathered: torch.Tensor,
    source: int,
    starts: torch.Tensor,
    totals: torch.Tensor,
    up_to: torch.Tensor,
    *,
    rounds: int,
) -> None:
    """Split the tokens of all sources among the ranks of each expert.

    Args:
        layer: of the placement that serves.
        gathered: [N, E] int32 counts of each source.
        source: this rank's row of ``gathered``.
        starts: [E] int32, filled with the tokens of the sources before this one.
        totals: [E] int32, filled with the tokens of all sources.
        up_to: [M, W] int32, filled with the position up to which a way takes an expert's tokens;
            no position is past the last way.
        rounds: as in ``eplb.shares.batch.split_batch``.
    """
    _check_int32(gathered=gathered, starts=starts, totals=totals, up_to=up_to)
    check(up_to.shape == layer.rank.shape, f"up_to {describe(up_to)}", f"{describe(layer.rank)}")
    num_split, ways = layer.rank.shape
    num_ranks, slots_per_rank = layer.fed_by.shape
    _split[(1,)](
        layer.expert,
        layer.turn,
        layer.rank,
        layer.fed_by,
        layer.fixed,
        layer.fixed_share,
        layer.num_turns,
        gathered,
        source,
        starts,
        totals,
        up_to,
        NUM_SOURCES=len(gathered),
        NUM_EXPERTS=gathered.shape[1],
        EXPERTS=triton.next_power_of_2(gathered.shape[1]),
        SOURCES=min(SOURCES_AT_ONCE, triton.next_power_of_2(len(gathered))),
        NUM_SPLIT=num_split,
        SPLIT=triton.next_power_of_2(num_split),
        WAYS=ways,
        NUM_RANKS=num_ranks,
        RANKS=triton.next_power_of_2(num_ranks),
        NUM_SLOTS=slots_per_rank,
        SLOTS=triton.next_power_of_2(slots_per_rank),
        ROUNDS=rounds,
        PAST_LEVEL=PAST_LEVEL,
        FILLS=FILLS,
        CLOSE=CLOSE,
        SETTLED=SETTLED,
        num_warps=2 if num_ranks <= 32 else 4,  # measured on an H200
    )


def choose_by_split(
    layer: LayerSplit,
    slots: torch.Tensor,
    cumulative: torch.Tensor,
    experts: torch.Tensor,
    blocks: torch.Tensor,
    starts: torch.Tensor,
    totals: torch.Tensor,
    up_to: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    strays: torch.Tensor,
) -> None:
    """Write the slot of every (token, k) into ``out`` [T, K] int64; -1 for ids of no expert.

    An expert's tokens are numbered over all sources, and each way takes a run of them. Experts that
    are not split follow the planned shares. ``counts`` are zeroed for the next batch.
    """
    check(experts.shape == out.shape, f"out {describe(out)}", f"{describe(experts)}")
    num_pairs = experts.numel()
    if num_pairs == 0:
        return
    _choose[(num_blocks(*experts.shape),)](
        layer.row,
        layer.slot,
        slots,
        cumulative,
        experts,
        blocks,
        starts,
        totals,
        up_to,
        counts,
        out,
        strays,
        num_pairs,
        NUM_EXPERTS=len(totals),
        EXPERTS=triton.next_power_of_2(len(totals)),
        REPLICAS=slots.shape[1],
        REPLICAS_PADDED=triton.next_power_of_2(slots.shape[1]),
        WAYS=layer.slot.shape[1],
        PAIRS=PAIRS_PER_PROGRAM,
        BLOCKS=BLOCKS_AT_ONCE,
        PLANNED=PLANNED,
        ONE=SHARE_ONE,
    )


def _check_int32(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        check(
            tensor.dtype == torch.int32 and tensor.is_contiguous(),
            f"{name} {describe(tensor)}",
            "contiguous int32",
        )


@kernel("num_pairs")
def _count(
    experts: tl.tensor,
    blocks: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    place = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(experts + place, mask=place < num_pairs, other=-1)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
    found = tl.histogram(expert.to(tl.int32), BINS, mask=is_expert)
    bin_ = tl.arange(0, BINS)
    tl.store(blocks + block * NUM_EXPERTS + bin_, found, mask=bin_ < NUM_EXPERTS)
    tl.atomic_add(counts + bin_, found, mask=(bin_ < NUM_EXPERTS) & (found > 0))


@kernel("source")
def _split(
    expert_of: tl.tensor,
    turn_of: tl.tensor,
    rank_of: tl.tensor,
    fed_by: tl.tensor,
    fixed_of: tl.tensor,
    fixed_share: tl.tensor,
    num_turns_of: tl.tensor,
    gathered: tl.tensor,
    source: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    up_to: tl.tensor,
    NUM_SOURCES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOURCES: tl.constexpr,
    NUM_SPLIT: tl.constexpr,
    SPLIT: tl.constexpr,
    WAYS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    PAST_LEVEL: tl.constexpr,
    FILLS: tl.constexpr,
    CLOSE: tl.constexpr,
    SETTLED: tl.constexpr,
) -> None:
    # Ways and slots are the first axis: a thread then holds all of an expert or of a rank, and sums
    # over them take no exchange between threads.
    m, w = tl.arange(0, SPLIT)[None, :], tl.arange(0, WAYS)[:, None]
    way = m * WAYS + w
    rank = tl.load(rank_of + way, mask=m < NUM_SPLIT, other=-1)
    row = tl.arange(0, SPLIT)
    expert = tl.load(expert_of + row, mask=row < NUM_SPLIT, other=-1)
    turn = tl.load(turn_of + row, mask=row < NUM_SPLIT, other=-1)
    num_turns = tl.load(num_turns_of)
    r, c = tl.arange(0, RANKS)[None, :], tl.arange(0, SLOTS)[:, None]
    place = r * NUM_SLOTS + c
    is_place = (r < NUM_RANKS) & (c < NUM_SLOTS)
    feeds = tl.load(fed_by + place, mask=is_place, other=-1)
    fixed = tl.load(fixed_of + place, mask=is_place, other=-1)
    share = tl.load(fixed_share + place, mask=is_place, other=0.0)

    e = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, NUM_SOURCES, SOURCES):
        s = first + tl.arange(0, SOURCES)
        is_count = (s < NUM_SOURCES)[:, None] & (e < NUM_EXPERTS)[None, :]
        found = tl.load(gathered + s[:, None] * NUM_EXPERTS + e[None, :], mask=is_count, other=0)
        total += tl.sum(found, axis=0)
        earlier += tl.sum(tl.where((s < source)[:, None], found, 0), axis=0)
    tl.store(totals + e, total, mask=e < NUM_EXPERTS)
    tl.store(starts + e, earlier, mask=e < NUM_EXPERTS)
    tl.debug_barrier()  # the totals are read below by other threads than those that wrote them

    base = tl.load(totals + fixed, mask=fixed >= 0, other=0).to(tl.float32)
    base = tl.sum(base * share, axis=0)
    mean = tl.sum(total, axis=0).to(tl.float32) / NUM_RANKS
    enough = tl.maximum(mean, tl.max(base, axis=0)) * CLOSE
    tokens = tl.load(totals + expert, mask=expert >= 0, other=0).to(tl.float32)
    is_way = rank >= 0
    size = tl.maximum(tl.sum(is_way.to(tl.int32), axis=0), 1)
    split = tl.where(is_way, (tokens / size.to(tl.float32))[None, :], 0.0)
    at_rank = tl.reshape(tl.maximum(rank, 0), (WAYS * SPLIT,))
    # From m * W + w, as the layout counts, to w * M + m, as the split lies here.
    at_feed = tl.reshape(tl.maximum(feeds % WAYS * SPLIT + feeds // WAYS, 0), (SLOTS * RANKS,))
    is_fed = feeds >= 0
    number = 0
    before = mean * 0.0 - 1.0  # of no round
    while number < ROUNDS:
        step = tl.where(number + 1 < ROUNDS, PAST_LEVEL, 1.0)
        current = 0
        while current < num_turns:
            flat = tl.reshape(split, (WAYS * SPLIT,))
            fed = tl.reshape(tl.gather(flat, at_feed, 0), (SLOTS, RANKS))
            load = base + tl.sum(tl.where(is_fed, fed, 0.0), axis=0)
            if current == 0:
                most = tl.max(load, axis=0)
                if (most <= enough) | (tl.abs(before - most) < SETTLED * most):
                    number = ROUNDS
                before = most
            others = tl.reshape(tl.gather(load, at_rank, 0), (WAYS, SPLIT)) - split
            is_used = is_way
            level = tokens
            for _ in tl.static_range(FILLS):
                below = tl.sum(tl.where(is_used, others, 0.0), axis=0)
                used = tl.maximum(tl.sum(is_used.to(tl.int32), axis=0), 1)
                level = (tokens + below) / used.to(tl.float32)
                is_used = is_way & (others < level[None, :])
            target = tl.where(is_way, tl.maximum(level[None, :] - others, 0.0), 0.0)
            moved = tl.maximum(split + step * (target - split), 0.0)
            whole = tl.sum(moved, axis=0)
            moved *= (tokens / tl.where(whole > 0.0, whole, 1.0))[None, :]
            takes = (turn == current) & (number < ROUNDS)
            split = tl.where(takes[None, :], moved, split)
            current = tl.where(number < ROUNDS, current + 1, num_turns)
        number += 1

    ends = (tl.cumsum(split, axis=0) + 0.5).to(tl.int32)
    ends = tl.where(w + 1 < size[None, :], ends, 2147483647)
    tl.store(up_to + way, ends, mask=m < NUM_SPLIT)


@kernel("num_pairs")
def _choose(
    row_of: tl.tensor,
    slot_of: tl.tensor,
    slots: tl.tensor,
    cumulative: tl.tensor,
    experts: tl.tensor,
    blocks: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    up_to: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    strays: tl.tensor,
    num_pairs: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    REPLICAS: tl.constexpr,
    REPLICAS_PADDED: tl.constexpr,
    WAYS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLANNED: tl.constexpr,
    ONE: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    nth = tl.arange(0, PAIRS)
    place = block * PAIRS + nth
    expert = tl.load(experts + place, mask=place < num_pairs, other=-1)
    num_strays = tl.sum((expert >= NUM_EXPERTS).to(tl.int32), axis=0)
    if num_strays > 0:
        tl.atomic_add(strays, num_strays)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
    used = tl.where(is_expert, expert, 0).to(tl.int32)
    # The position among the expert's tokens: of other sources, of blocks before, of this block.
    others = tl.load(experts + place, mask=place < num_pairs, other=-1).to(tl.int32)
    is_before = (others[None, :] == used[:, None]) & (nth[None, :] < nth[:, None])
    position = tl.sum(is_before.to(tl.int32), axis=1) + tl.load(starts + used)
    first = 0
    while first < block:
        for nth_block in tl.static_range(BLOCKS):  # loads that do not wait for each other
            earlier = first + nth_block
            position += tl.load(
                blocks + earlier * NUM_EXPERTS + used, mask=is_expert & (earlier < block), other=0
            )
        first += BLOCKS

    row = tl.load(row_of + used)
    is_split = row >= 0
    w = tl.arange(0, WAYS)
    at_way = tl.maximum(row, 0)[:, None] * WAYS + w[None, :]
    ends = tl.load(up_to + at_way)
    way = tl.minimum(tl.sum((ends <= position[:, None]).to(tl.int32), axis=1), WAYS - 1)
    by_split = tl.load(slot_of + tl.maximum(row, 0) * WAYS + way)
    planned = tl.load(slots + used * REPLICAS)
    if tl.max((row == PLANNED).to(tl.int32), axis=0) > 0:
        total = tl.maximum(tl.load(totals + used), 1)
        draw = tl.minimum((position.to(tl.int64) * ONE // total).to(tl.int32), ONE - 1)
        entry = tl.arange(0, REPLICAS_PADDED)
        shares = tl.load(
            cumulative + used[:, None] * REPLICAS + entry[None, :],
            mask=(entry < REPLICAS)[None, :] & (row == PLANNED)[:, None],
            other=ONE,
        )
        replica = tl.sum((shares <= draw[:, None]).to(tl.int32), axis=1)
        planned = tl.load(slots + used * REPLICAS + replica)
    chosen = tl.where(is_split, by_split, planned).to(tl.int64)
    tl.store(out + place, tl.where(is_expert, chosen, -1), mask=place < num_pairs)
    if block == 0:
        e = tl.arange(0, EXPERTS)
        tl.store(counts + e, tl.zeros((EXPERTS,), tl.int32), mask=e < NUM_EXPERTS)
