"""Kernels of just-in-time replicas: which tokens go to spare slots, and the pull itself.

    plan_pulls --+--> redirect                                   (compute stream)
                 +--> pull -> (exchange) -> count_differences    (side stream)

In a CUDA graph the source of a pull depends on the batch, so a kernel reads it, through a table of
the addresses at which this process has mapped its peers' memory.

Shapes:  E experts, R ranks, C slots of a rank, J spare slots of a rank, T tokens, k top-k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.batch.kernels.counts import PAIRS_PER_PROGRAM, num_blocks
from runtime.batch.kernels.pull_plan import Decided, Ranks
from runtime.batch.kernels.split import BLOCKS_AT_ONCE
from runtime.kernels.launch import expect, kernel, num_multiprocessors

SPARES_AT_ONCE = 32


# How one program of a pull copies; measured: benchmarks/reports/2026-11-24-just-in-time.md. A pull
# runs beside the experts' product, whose programs fill the multiprocessors. So a program of a pull
# has few registers, and its buffers are shared memory that the product leaves. It needs some of
# that: a multiprocessor divides one memory between L1 cache and shared memory, and while a kernel
# without shared memory runs there, none that needs much of it can begin.
WORDS = 1024  # int32 of a buffer
STAGES = 6  # buffers, one of which is written while the others are read
WARPS = 2


def redirect(
    experts: torch.Tensor,
    blocks: torch.Tensor,
    starts: torch.Tensor,
    ranks: Ranks,
    decided: Decided,
    per_rank: int,
    slots: torch.Tensor,
) -> None:
    """Send the tokens of runs to spare slots, in place.

    Args:
        experts: [T, k] int64.
        blocks: filled by ``count_experts`` for the same experts.
        starts: [E] int32 from ``split_batch``.
        ranks: all ranks of the group.
        decided: by ``plan_pulls``.
        per_rank: C.
        slots: [T, k] int64 of the wider dispatch, from ``choose_by_split``.
    """
    if experts.numel() == 0:
        return
    num_spares = decided.source.numel()
    _redirect[(num_blocks(experts.numel()),)](
        experts,
        blocks,
        starts,
        ranks.first_slot,
        ranks.num_slots,
        decided.source,
        decided.first,
        decided.end,
        slots,
        experts.numel(),
        NUM_EXPERTS=len(starts),
        NUM_SLOTS=per_rank,
        NUM_SPARES=num_spares,
        SPARE=num_spares // len(ranks.domain),
        SPARES=min(SPARES_AT_ONCE, triton.next_power_of_2(num_spares)),
        PAIRS=PAIRS_PER_PROGRAM,
        BLOCKS=BLOCKS_AT_ONCE,
    )


def pull(
    layer: int,
    rank: int,
    ranks: Ranks,
    decided: Decided,
    per_rank: int,
    records: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Copy the records of this rank's spare slots out of the peers' live slots.

    Args:
        layer: index of the layer in the bank.
        rank: this one.
        ranks: all ranks of the group, with the addresses of their banks.
        decided: by ``plan_pulls``.
        per_rank: C.
        records: [J, record bytes] uint8, this rank's spare records.
        programs: for each spare slot; by default one for each multiprocessor, over all slots.
    """
    expect("records", records, torch.uint8)
    words = records.view(torch.int32)
    programs = programs or max(1, num_multiprocessors(records.device) // len(records))
    _pull[(len(records), programs)](
        ranks.bases,
        ranks.num_slots,
        decided.source,
        words,
        layer,
        rank,
        RECORD_WORDS=words.shape[1],
        NUM_SLOTS=per_rank,
        SPARE=len(records),
        WORDS=WORDS,
        PROGRAMS=programs,
        STAGES=STAGES,
        num_warps=WARPS,
    )


def count_differences(words: torch.Tensor, differences: torch.Tensor) -> None:
    """Add the number of words [N, 1] that are not the first one to ``differences`` [1], int32."""
    _count_differences[(1,)](
        words, differences, NUM=words.numel(), WORDS=triton.next_power_of_2(words.numel())
    )


@kernel("num_pairs")
def _redirect(
    experts: tl.tensor,
    blocks: tl.tensor,
    starts: tl.tensor,
    first_slot: tl.tensor,
    num_slots: tl.tensor,
    source_of: tl.tensor,
    first_of: tl.tensor,
    end_of: tl.tensor,
    slots: tl.tensor,
    num_pairs: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_SPARES: tl.constexpr,
    SPARE: tl.constexpr,
    SPARES: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    nth = tl.arange(0, PAIRS)
    place = block * PAIRS + nth
    expert = tl.load(experts + place, mask=place < num_pairs, other=-1).to(tl.int32)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
    used = tl.where(is_expert, expert, 0)
    given = tl.load(slots + place, mask=place < num_pairs, other=-1).to(tl.int32)
    # The position among the expert's tokens: as ``choose_by_split`` has numbered them.
    others = tl.load(experts + place, mask=place < num_pairs, other=-1).to(tl.int32)
    is_before = (others[None, :] == used[:, None]) & (nth[None, :] < nth[:, None])
    position = tl.sum(is_before.to(tl.int32), axis=1) + tl.load(starts + used)
    earlier = 0
    while earlier < block:
        for nth_block in tl.static_range(BLOCKS):
            before = earlier + nth_block
            position += tl.load(
                blocks + before * NUM_EXPERTS + used, mask=is_expert & (before < block), other=0
            )
        earlier += BLOCKS

    chosen = given
    for begin in range(0, NUM_SPARES, SPARES):
        spare = begin + tl.arange(0, SPARES)
        source = tl.load(source_of + spare, mask=spare < NUM_SPARES, other=-1)
        if tl.max(source, axis=0) >= 0:
            is_pulled = source >= 0
            giver, taker = source // NUM_SLOTS, spare // SPARE
            taken = tl.load(first_slot + giver, mask=is_pulled, other=-2) + source % NUM_SLOTS
            target = tl.load(first_slot + taker, mask=is_pulled, other=0) + spare % SPARE
            target += tl.load(num_slots + taker, mask=is_pulled, other=0)
            first = tl.load(first_of + spare, mask=is_pulled, other=0)
            end = tl.load(end_of + spare, mask=is_pulled, other=0)
            goes = is_pulled[None, :] & is_expert[:, None] & (given[:, None] == taken[None, :])
            goes &= (position[:, None] >= first[None, :]) & (position[:, None] < end[None, :])
            to = tl.max(tl.where(goes, target[None, :], -1), axis=1)
            chosen = tl.where(to >= 0, to, chosen)
    tl.store(slots + place, chosen.to(tl.int64), mask=(place < num_pairs) & (chosen != given))


@kernel("layer", "rank")
def _pull(
    bases: tl.tensor,
    num_slots: tl.tensor,
    source_of: tl.tensor,
    records: tl.tensor,
    layer: tl.tensor,
    rank: tl.tensor,
    RECORD_WORDS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SPARE: tl.constexpr,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    spare, program = tl.program_id(0), tl.program_id(1)
    source = tl.load(source_of + rank * SPARE + spare)
    if source >= 0:
        giver = source // NUM_SLOTS
        slot = (layer * tl.load(num_slots + giver) + source % NUM_SLOTS).to(tl.int64)
        base = tl.load(bases + giver).to(tl.pointer_type(tl.int32))
        record = tl.multiple_of(base + slot * RECORD_WORDS, 16)
        into = records + spare.to(tl.int64) * RECORD_WORDS
        for turn in tl.range(tl.cdiv(RECORD_WORDS, PROGRAMS * WORDS), num_stages=STAGES):
            word = (turn * PROGRAMS + program) * WORDS + tl.arange(0, WORDS)
            found = tl.load(record + word, mask=word < RECORD_WORDS)
            tl.store(into + word, found, mask=word < RECORD_WORDS)


@kernel()
def _count_differences(
    words: tl.tensor, differences: tl.tensor, NUM: tl.constexpr, WORDS: tl.constexpr
) -> None:
    word = tl.arange(0, WORDS)
    found = tl.load(words + word, mask=word < NUM, other=0)
    differs = (found != tl.load(words)) & (word < NUM)
    num_different = tl.sum(differs.to(tl.int32), axis=0)
    if num_different > 0:
        tl.atomic_add(differences, num_different)
