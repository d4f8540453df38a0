"""Kernels of just-in-time replicas: which experts are pulled, which tokens follow, and the pull.

    plan_pulls --+--> redirect                                   (compute stream)
                 +--> pull -> (exchange) -> count_differences    (side stream)

``plan_pulls`` repeats ``runtime.batch.pull_rule`` in two kernels, with a level in each program of
the first one. In a CUDA graph the source of a pull depends on the batch, so a kernel reads it,
through a table of the addresses at which this process has mapped its peers' memory.

Shapes:  E experts, M experts that are split, W ways, R ranks, C slots of a rank, J spare slots of
         a rank, P = R * J, K levels, T tokens, k top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from eplb.core.topology import Topology
from runtime.batch.kernels.counts import PAIRS_PER_PROGRAM, num_blocks
from runtime.batch.kernels.split import BLOCKS_AT_ONCE, LayerSplit
from runtime.batch.pull_rule import MASK, NUM_LEVELS, ODD, PullRule
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


@dataclass(frozen=True)
class Decided:
    """What ranks decide for a layer; int32 on the device, written anew for each layer."""

    tried: torch.Tensor  # [K, 4, P] source, served word, first and end by level
    busiest: torch.Tensor  # [K + 1] by level; the last entry: without any pull
    source: torch.Tensor  # [P] r * C + c of the slot that is pulled; -1
    first: torch.Tensor  # [P] first of the expert's tokens that a spare slot takes
    end: torch.Tensor  # [P]
    word: torch.Tensor  # [1] ``pulls_digest``

    @staticmethod
    def on(device: torch.device, num_spares: int) -> Decided:
        """Room for P spare slots."""
        shapes = ((NUM_LEVELS, 4, num_spares), (NUM_LEVELS + 1,), *[(num_spares,)] * 3, (1,))
        return Decided(*(torch.zeros(one, dtype=torch.int32, device=device) for one in shapes))


@dataclass(frozen=True)
class Ranks:
    """The group, on the device: int32 [R] each, and int64 addresses of live slots."""

    domain: torch.Tensor
    first_slot: torch.Tensor  # in the numbers of the wider dispatch
    num_slots: torch.Tensor  # slots that the placement fills
    bases: torch.Tensor  # [R] where this process has the live slots of each rank; 0: nowhere

    @staticmethod
    def on(
        device: torch.device,
        topology: Topology,
        domain: NDArray[np.int64],
        spare_slots: int,
        bases: Sequence[int],
    ) -> Ranks:
        """Tensors for the placement's topology, without spare slots."""
        first_slot = topology.widened(spare_slots).first_slot[:-1]
        small = [
            torch.from_numpy(np.array(one, dtype=np.int32)).to(device)
            for one in (domain, first_slot, topology.slots_of_rank)
        ]
        addresses = torch.tensor(bases, dtype=torch.int64, device=device)
        return Ranks(small[0], small[1], small[2], addresses)


def plan_pulls(
    layer: LayerSplit,
    totals: torch.Tensor,
    up_to: torch.Tensor,
    ranks: Ranks,
    rule: PullRule,
    rank: int,
    counter: torch.Tensor,
    decided: Decided,
) -> None:
    """Decide, and add what this rank's slots give away to their counters.

    Args:
        layer: a layer of the placement that serves.
        totals: [E] int32 of all sources, from ``split_batch``.
        up_to: [M, W] int32, from ``split_batch``.
        ranks: all ranks of the group.
        rule: alike on all ranks.
        rank: this one.
        counter: [at least C] int32 counters of this rank's slots.
        decided: filled.
    """
    num_ranks, per_rank = layer["fed_by"].shape
    spares, num_split = rule.spare_slots, len(layer["expert"])
    _try_levels[(NUM_LEVELS,)](
        layer["row"],
        layer["expert"],
        layer["fed_by"],
        layer["fixed"],
        layer["fixed_share"],
        totals,
        up_to,
        ranks.domain,
        decided.tried,
        decided.busiest,
        WAYS=up_to.shape[1],
        NUM_SPLIT=num_split,
        NUM_RANKS=num_ranks,
        RANKS=triton.next_power_of_2(num_ranks),
        NUM_SLOTS=per_rank,
        SLOTS=triton.next_power_of_2(per_rank),
        SPARE=spares,
        SPARES=triton.next_power_of_2(num_ranks * spares),
        LEAST_ROWS=max(rule.least_rows, 1),
        PULL_ROWS=rule.pull_rows,
        MOST_READERS=rule.most_readers,
        LEVELS=NUM_LEVELS,
        num_warps=1,
    )
    _settle[(1,)](
        decided.tried,
        decided.busiest,
        decided.source,
        decided.first,
        decided.end,
        decided.word,
        counter,
        rank,
        NUM_SLOTS=per_rank,
        SLOTS=triton.next_power_of_2(per_rank),
        NUM_SPARES=num_ranks * spares,
        SPARES=triton.next_power_of_2(num_ranks * spares),
        LEAST_GAIN=max(rule.least_gain, 1),
        LEVELS=NUM_LEVELS,
        ODD_0=ODD[0],
        ODD_1=ODD[1],
        ODD_2=ODD[2],
        MASK=MASK,
        num_warps=1,
    )


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


@kernel()
def _lowest_where(holds: tl.tensor, number: tl.tensor) -> tl.tensor:
    return tl.min(tl.where(holds, number, 2147483647), axis=0)


@kernel()
def _try_levels(
    row_of: tl.tensor,
    expert_of: tl.tensor,
    fed_by: tl.tensor,
    fixed_of: tl.tensor,
    fixed_share: tl.tensor,
    totals: tl.tensor,
    up_to: tl.tensor,
    domain_of: tl.tensor,
    tried: tl.tensor,
    busiest: tl.tensor,
    WAYS: tl.constexpr,
    NUM_SPLIT: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SPARE: tl.constexpr,
    SPARES: tl.constexpr,
    LEAST_ROWS: tl.constexpr,
    PULL_ROWS: tl.constexpr,
    MOST_READERS: tl.constexpr,
    LEVELS: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    # Slots are the first axis: a thread then holds all of a rank, and sums over them stay within.
    r, c = tl.arange(0, RANKS)[None, :], tl.arange(0, SLOTS)[:, None]
    place = r * NUM_SLOTS + c
    is_place = (r < NUM_RANKS) & (c < NUM_SLOTS)
    feeds = tl.load(fed_by + place, mask=is_place, other=-1)
    fixed = tl.load(fixed_of + place, mask=is_place, other=-1)
    share = tl.load(fixed_share + place, mask=is_place, other=0.0)
    is_fed, is_fixed = feeds >= 0, fixed >= 0
    m, w = feeds // WAYS, feeds % WAYS
    expert = tl.load(expert_of + m, mask=is_fed, other=-1)
    expert = tl.where(is_fixed, fixed, expert)
    row = tl.load(row_of + fixed, mask=is_fixed, other=-2)
    total = tl.load(totals + expert, mask=expert >= 0, other=0)
    first = tl.load(up_to + feeds - 1, mask=is_fed & (w > 0), other=0)
    first = tl.minimum(first, total)
    end = tl.minimum(tl.load(up_to + feeds, mask=is_fed, other=2147483647), total)
    is_known = is_fed | (is_fixed & (row == -1))
    planned = (total.to(tl.float32) * share + 0.5).to(tl.int32)
    tokens = tl.where(is_known, end - first, tl.where(is_fixed, planned, 0))

    rank = tl.arange(0, RANKS)
    is_rank = rank < NUM_RANKS
    domain = tl.load(domain_of + rank, mask=is_rank, other=-1)
    own = tl.sum(tokens, axis=0)
    most = tl.max(own, axis=0)
    serving = tl.maximum(tl.sum((domain >= 0).to(tl.int32), axis=0), 1)
    fair = (tl.sum(own, axis=0) + serving - 1) // serving
    above = tl.maximum(most - fair, 0).to(tl.int64)
    level = fair + (above * number * number // (LEVELS * LEVELS)).to(tl.int32)

    left = tl.where(is_known, tokens, 0)
    got, pulled, readers = own * 0, own * 0, own * 0
    spare = tl.arange(0, SPARES)
    source, served = spare * 0 - 1, spare * 0
    firsts, ends = spare * 0, spare * 0
    worst = most
    is_open = worst >= 0
    while is_open:
        done = tl.where(is_rank, tl.maximum(own, PULL_ROWS * pulled) + got, -1)
        worst = tl.max(done, axis=0)
        giver = _lowest_where(done == worst, rank)
        of_giver = tl.max(tl.where(r == giver, left, -1), axis=1)
        most_left = tl.max(of_giver, axis=0)
        from_place = _lowest_where(of_giver == most_left, tl.arange(0, SLOTS))
        is_from = (r == giver) & (c == from_place)
        its_expert = tl.max(tl.max(tl.where(is_from, expert, -1), axis=0), axis=0)
        its_first = tl.max(tl.max(tl.where(is_from, first, 0), axis=0), axis=0)
        holds = tl.max((expert == its_expert).to(tl.int32), axis=0) > 0
        its_domain = tl.max(tl.where(rank == giver, domain, -1), axis=0)
        its_readers = tl.max(tl.where(rank == giver, readers, 0), axis=0)
        may_take = (domain >= 0) & (domain == its_domain) & (pulled < SPARE) & (holds == 0)
        room = level - tl.maximum(own, PULL_ROWS * (pulled + 1)) - got
        room = tl.where(may_take & is_rank, room, -1)
        most_room = tl.max(room, axis=0)
        taker = _lowest_where(room == most_room, rank)
        part = tl.minimum(tl.maximum(worst - level, LEAST_ROWS), most_left)
        part = tl.minimum(part, most_room)
        is_open = (worst > level) & (its_readers < MOST_READERS) & (part >= LEAST_ROWS)
        if is_open:
            nth = tl.max(tl.where(rank == taker, pulled, 0), axis=0)
            is_spare = spare == taker * SPARE + nth
            its_place = giver * NUM_SLOTS + from_place
            source = tl.where(is_spare, its_place, source)
            served = tl.where(
                is_spare, its_expert * (NUM_RANKS * NUM_SLOTS) + its_place + 1, served
            )
            ends = tl.where(is_spare, its_first + most_left, ends)
            firsts = tl.where(is_spare, its_first + most_left - part, firsts)
            left -= tl.where(is_from, part, 0)
            own -= tl.where(rank == giver, part, 0)
            readers += (rank == giver).to(tl.int32)
            got += tl.where(rank == taker, part, 0)
            pulled += (rank == taker).to(tl.int32)

    is_spare = spare < NUM_RANKS * SPARE
    at = tried + number * 4 * NUM_RANKS * SPARE + spare
    tl.store(at, source, mask=is_spare)
    tl.store(at + NUM_RANKS * SPARE, served, mask=is_spare)
    tl.store(at + 2 * NUM_RANKS * SPARE, firsts, mask=is_spare)
    tl.store(at + 3 * NUM_RANKS * SPARE, ends, mask=is_spare)
    tl.store(busiest + number, worst)
    if number == 0:
        tl.store(busiest + LEVELS, most)


@kernel("rank")
def _settle(
    tried: tl.tensor,
    busiest: tl.tensor,
    source_of: tl.tensor,
    first_of: tl.tensor,
    end_of: tl.tensor,
    word: tl.tensor,
    counter: tl.tensor,
    rank: tl.tensor,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_SPARES: tl.constexpr,
    SPARES: tl.constexpr,
    LEAST_GAIN: tl.constexpr,
    LEVELS: tl.constexpr,
    ODD_0: tl.constexpr,
    ODD_1: tl.constexpr,
    ODD_2: tl.constexpr,
    MASK: tl.constexpr,
) -> None:
    level = tl.arange(0, LEVELS)
    found = tl.load(busiest + level)
    most = tl.load(busiest + LEVELS)
    least = tl.min(found, axis=0)
    best = tl.max(tl.where(found == least, level, 0), axis=0)
    is_worth = least <= most - LEAST_GAIN
    spare = tl.arange(0, SPARES)
    is_spare = spare < NUM_SPARES
    at = tried + best * 4 * NUM_SPARES + spare
    source = tl.load(at, mask=is_spare & is_worth, other=-1)
    served = tl.load(at + NUM_SPARES, mask=is_spare & is_worth, other=0).to(tl.int64)
    first = tl.load(at + 2 * NUM_SPARES, mask=is_spare & is_worth, other=0)
    end = tl.load(at + 3 * NUM_SPARES, mask=is_spare & is_worth, other=0)
    tl.store(source_of + spare, source, mask=is_spare)
    tl.store(first_of + spare, first, mask=is_spare)
    tl.store(end_of + spare, end, mask=is_spare)

    mixed = served * ODD_0 + first.to(tl.int64) * ODD_1 + end.to(tl.int64) * ODD_2
    mixed = (mixed + spare.to(tl.int64) * ODD_0) & MASK
    mixed = ((mixed ^ (mixed >> 15)) * ODD_1) & MASK
    mixed = tl.where(source >= 0, mixed ^ (mixed >> 12), 0)
    tl.store(word, (tl.sum(mixed, axis=0) & MASK).to(tl.int32))

    c = tl.arange(0, SLOTS)
    is_mine = (source[:, None] == rank * NUM_SLOTS + c[None, :]) & (c < NUM_SLOTS)[None, :]
    moved = tl.sum(tl.where(is_mine, (end - first)[:, None], 0), axis=0)
    tl.atomic_add(counter + c, moved, mask=moved > 0)


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
