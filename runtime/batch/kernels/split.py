"""Two kernels that send a batch's tokens to replicas by the batch's own counts.

    count_experts -> (exchange of the counts) -> split_batch -> choose_by_split

``split_batch`` repeats ``runtime.batch.split_rule.split_batch``, in one program: the layer's split
is too small for more. ``runtime/batch/kernels/counts.py`` has what comes before.

Shapes:  E experts, M experts that are split, W ways, R ranks, C slots of a rank, N sources (ranks
         that route), T tokens, K top-k, B blocks of (token, k) pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from runtime.batch.counts import BatchTensors, PeerCounts
from runtime.batch.kernels.counts import (
    PAIRS_PER_PROGRAM,
    collect_totals,
    gather_totals,
    num_blocks,
)
from runtime.batch.split_rule import CLOSE, FILLS, PAST_LEVEL, PLANNED, SETTLED, SplitRule
from runtime.kernels.launch import expect, kernel

SOURCES_AT_ONCE = 32
BLOCKS_AT_ONCE = 32
SHARE_ONE = 65536
THREADS_OF_WARP = 32


# A layer's views of ``RoutingTable.split``, on the device: names, shapes and types are those of
# ``runtime.batch.split_rule.SplitLayout``, and ``num_turns`` is [1]. All are contiguous.
LayerSplit = Mapping[str, torch.Tensor]


def split_batch(
    layer: LayerSplit,
    batch: BatchTensors,
    switch: tuple[torch.Tensor, torch.Tensor],
    source: int,
    *,
    exchanged: torch.Tensor | PeerCounts,
    rule: SplitRule,
) -> None:
    """Split the tokens of all sources among the ranks of each expert.

    Args:
        layer: a layer of the placement that serves.
        batch: ``counts`` are read; ``starts``, ``totals``, ``sent``, ``up_to`` and ``rank_load``
            are filled.
        switch: ``saved`` [1] float32 and ``seen`` [1] int32 of the layer's ``SplitSwitch``.
        source: this rank's number among the sources.
        exchanged: [N, E] int32 counts of each source, or the words that the sources add to.
        rule: as in ``runtime.batch.split_rule.split_batch``.
    """
    num_split, ways = layer["rank"].shape
    num_ranks, slots_per_rank = layer["fed_by"].shape
    num_sources, num_experts = len(batch.sent), len(batch.counts)
    by_words = isinstance(exchanged, PeerCounts)
    if isinstance(exchanged, PeerCounts):
        words, late, most_polls = exchanged.words, exchanged.late, exchanged.most_polls
        turn = exchanged.turn
    else:
        expect("gathered", exchanged, torch.int32)
        words = turn = late = exchanged
        most_polls = 0
    num_warps = _warps(num_experts, num_ranks)
    _split[(1,)](
        layer["expert"],
        layer["turn"],
        layer["rank"],
        layer["share"],
        layer["fed_by"],
        layer["fixed"],
        layer["fixed_share"],
        layer["num_turns"],
        words,
        turn,
        late,
        most_polls,
        source,
        batch.counts,
        batch.starts,
        batch.totals,
        batch.sent,
        batch.up_to,
        batch.rank_load,
        *switch,
        rule.worth,
        rule.least,
        BY_WORDS=by_words,
        NUM_SOURCES=num_sources,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        SOURCES=min(SOURCES_AT_ONCE, triton.next_power_of_2(num_sources)),
        WORDS=max(triton.next_power_of_2(num_experts + num_sources), THREADS_OF_WARP * num_warps),
        NUM_SPLIT=num_split,
        SPLIT=triton.next_power_of_2(num_split),
        WAYS=ways,
        NUM_RANKS=num_ranks,
        RANKS=triton.next_power_of_2(num_ranks),
        NUM_SLOTS=slots_per_rank,
        SLOTS=triton.next_power_of_2(slots_per_rank),
        ROUNDS=rule.rounds,
        NUM_TRIED=rule.num_tried,
        NUM_OFF=rule.num_off,
        PAST_LEVEL=PAST_LEVEL,
        FILLS=FILLS,
        CLOSE=CLOSE,
        SETTLED=SETTLED,
        num_warps=num_warps,
    )


def _warps(num_experts: int, num_ranks: int) -> int:
    """Warps of the split's one program, as measured on an H200: few threads wait less."""
    if num_experts <= 64:
        return 1
    return 4 if num_ranks <= 32 else 2


def choose_by_split(
    layer: LayerSplit,
    replicas: tuple[torch.Tensor, torch.Tensor],
    experts: torch.Tensor,
    batch: BatchTensors,
    out: torch.Tensor,
    strays: torch.Tensor,
) -> None:
    """Write the slot of every (token, k) into ``out`` [T, K] int64; -1 for ids of no expert.

    An expert's tokens are numbered over all sources, and each way takes a run of them. Experts that
    are not split follow the planned shares. ``batch.counts`` are zeroed for the next batch.

    Args:
        replicas: the layer's slots and cumulative shares of a ``RoutingTable``, [E, Rmax] each.
    """
    num_pairs, num_experts = experts.numel(), len(batch.totals)
    slots, cumulative = replicas
    # One program at least, which clears the counts.
    _choose[(max(1, num_blocks(num_pairs)),)](
        layer["row"],
        layer["slot"],
        slots,
        cumulative,
        experts,
        batch.blocks,
        batch.starts,
        batch.totals,
        batch.up_to,
        batch.counts,
        out,
        strays,
        num_pairs,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        REPLICAS=slots.shape[1],
        REPLICAS_PADDED=triton.next_power_of_2(slots.shape[1]),
        WAYS=layer["slot"].shape[1],
        PAIRS=PAIRS_PER_PROGRAM,
        BLOCKS=BLOCKS_AT_ONCE,
        PLANNED=PLANNED,
        ONE=SHARE_ONE,
    )


@kernel("words", "most_polls", "source", "saved_of", "seen_of", "worth", "least")
def _split(
    expert_of: tl.tensor,
    turn_of: tl.tensor,
    rank_of: tl.tensor,
    share_of: tl.tensor,
    fed_by: tl.tensor,
    fixed_of: tl.tensor,
    fixed_share: tl.tensor,
    num_turns_of: tl.tensor,
    words: tl.tensor,
    exchanges: tl.tensor,
    late: tl.tensor,
    most_polls: tl.tensor,
    source: tl.tensor,
    counts: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    sent: tl.tensor,
    up_to: tl.tensor,
    rank_load: tl.tensor,
    saved_of: tl.tensor,
    seen_of: tl.tensor,
    worth: tl.tensor,
    least: tl.tensor,
    BY_WORDS: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOURCES: tl.constexpr,
    WORDS: tl.constexpr,
    NUM_SPLIT: tl.constexpr,
    SPLIT: tl.constexpr,
    WAYS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    NUM_TRIED: tl.constexpr,
    NUM_OFF: tl.constexpr,
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

    if BY_WORDS:
        num_tokens = collect_totals(
            words,
            exchanges,
            counts,
            source,
            starts,
            totals,
            sent,
            late,
            most_polls,
            NUM_SOURCES,
            NUM_EXPERTS,
            WORDS,
        )
    else:
        num_tokens = gather_totals(
            words, source, starts, totals, NUM_SOURCES, NUM_EXPERTS, EXPERTS, SOURCES
        )
    tl.debug_barrier()  # the totals are read below by other threads than those that wrote them

    base = tl.load(totals + fixed, mask=fixed >= 0, other=0).to(tl.float32)
    base = tl.sum(base * share, axis=0)
    mean = num_tokens.to(tl.float32) / NUM_RANKS
    enough = tl.maximum(mean, tl.max(base, axis=0)) * CLOSE
    tokens = tl.load(totals + expert, mask=expert >= 0, other=0).to(tl.float32)
    is_way = rank >= 0
    size = tl.maximum(tl.sum(is_way.to(tl.int32), axis=0), 1)
    split = tokens[None, :] * tl.load(share_of + way, mask=m < NUM_SPLIT, other=0.0)
    at_rank = tl.reshape(tl.maximum(rank, 0), (WAYS * SPLIT,))
    # From m * W + w, as the layout counts, to w * M + m, as the split lies here.
    at_feed = tl.reshape(tl.maximum(feeds % WAYS * SPLIT + feeds // WAYS, 0), (SLOTS * RANKS,))
    is_fed = feeds >= 0
    seen = tl.load(seen_of)
    number = tl.where(seen < 0, ROUNDS, 0)
    before = mean * 0.0 - 1.0  # no round was before
    planned = before
    while number < ROUNDS:
        step = tl.where(number + 1 < ROUNDS, PAST_LEVEL, 1.0)
        current = 0
        while current < num_turns:
            flat = tl.reshape(split, (WAYS * SPLIT,))
            fed = tl.reshape(tl.gather(flat, at_feed, 0), (SLOTS, RANKS))
            load = base + tl.sum(tl.where(is_fed, fed, 0.0), axis=0)
            if current == 0:
                most = tl.max(load, axis=0)
                planned = tl.where(number == 0, most, planned)
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
            is_largest = moved == tl.max(moved, axis=0)[None, :]
            moved = tl.where((moved >= least) | is_largest, moved, 0.0)
            whole = tl.sum(moved, axis=0)
            moved *= (tokens / tl.where(whole > 0.0, whole, 1.0))[None, :]
            takes = (turn == current) & (number < ROUNDS)
            split = tl.where(takes[None, :], moved, split)
            current = tl.where(number < ROUNDS, current + 1, num_turns)
        number += 1

    flat = tl.reshape(split, (WAYS * SPLIT,))
    fed = tl.reshape(tl.gather(flat, at_feed, 0), (SLOTS, RANKS))
    load = base + tl.sum(tl.where(is_fed, fed, 0.0), axis=0)
    rank_at = tl.arange(0, RANKS)
    tl.store(rank_load + rank_at, load, mask=rank_at < NUM_RANKS)
    # As ``SplitSwitch.after``.
    most = tl.max(load, axis=0)
    saved = tl.where(planned < 0.0, 0.0, planned - most)  # negative: no expert is split
    former = tl.load(saved_of)
    saved = tl.where(seen == 0, saved, former + (saved - former) / NUM_TRIED)
    tried = tl.minimum(seen + 1, NUM_TRIED)
    fails = (tried == NUM_TRIED) & (saved < worth)
    tl.store(saved_of, tl.where(seen < 0, 0.0, saved))
    tl.store(seen_of, tl.where(seen < 0, seen + 1, tl.where(fails, -NUM_OFF, tried)))

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
