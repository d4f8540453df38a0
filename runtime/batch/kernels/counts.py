"""How many tokens each expert has in a batch, of this rank and of all: two parts of a split.

    count_experts -> all-gather of the counts, or ``post`` into the peers' memory -> collect

Where ranks can write each other's memory (``PeerCounts``) the kernel that counts also
adds its counts to a word of every peer, and the next kernel waits for the words to be complete: a
collective of its own launch would take several times as long.

Shapes:  E experts, N sources (ranks that route), T tokens, K top-k, B blocks of
         ``PAIRS_PER_PROGRAM`` pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.launch import check, describe, expect, kernel

PAIRS_PER_PROGRAM = 64  # measured on an H200: at 32 tokens 2 us less than with 128

# A word of the exchange: the sum over sources of 1 << ARRIVAL | earlier << EARLIER | tokens. So all
# sources together may have fewer than 2**28 tokens in a batch.
EARLIER, ARRIVAL = tl.constexpr(28), tl.constexpr(56)
NO_PEERS = 0  # sources of a group that exchanges by a collective


def num_blocks(num_pairs: int) -> int:
    """Blocks B of a batch."""
    return int(triton.cdiv(num_pairs, PAIRS_PER_PROGRAM))


def count_experts(
    experts: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    *,
    turn: torch.Tensor | None = None,
    peers: torch.Tensor | None = None,
    source: int = 0,
) -> None:
    """Count the tokens of each expert; with ``peers`` also add the counts to every peer's words.

    Args:
        experts: [T, K] int64 expert ids; others than 0..E-1 are not counted.
        blocks: [at least B, E] int32, filled with the counts of each block.
        counts: [E] int32, zeros, to which the counts are added.
        turn: [2] int32, the number of exchanges so far, and zero.
        peers: [N] int64, addresses of the ranks' words [2, E + N] int64.
        source: this rank among them.
    """
    expect("experts", experts, torch.int64)
    num_pairs = experts.numel()
    programs = num_blocks(num_pairs)
    check(len(blocks) >= programs, f"blocks {describe(blocks)}", f"at least {programs} rows")
    num_peers = NO_PEERS if peers is None else len(peers)
    # A source without tokens posts too: the others wait for it.
    if programs or num_peers:
        _count[(max(1, programs),)](
            experts,
            blocks,
            counts,
            counts if turn is None else turn,
            counts if peers is None else peers,
            source,
            num_pairs,
            NUM_EXPERTS=len(counts),
            BINS=triton.next_power_of_2(len(counts)),
            PAIRS=PAIRS_PER_PROGRAM,
            NUM_PEERS=num_peers,
        )


@kernel("source", "num_pairs")
def _count(
    experts: tl.tensor,
    blocks: tl.tensor,
    counts: tl.tensor,
    turn: tl.tensor,
    peers: tl.tensor,
    source: tl.tensor,
    num_pairs: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    NUM_PEERS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    place = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(experts + place, mask=place < num_pairs, other=-1)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
    found = tl.histogram(expert.to(tl.int32), BINS, mask=is_expert)
    bin_ = tl.arange(0, BINS)
    is_bin = bin_ < NUM_EXPERTS
    if block * PAIRS < num_pairs:
        tl.store(blocks + block * NUM_EXPERTS + bin_, found, mask=is_bin)
        tl.atomic_add(counts + bin_, found, mask=is_bin & (found > 0))
    if NUM_PEERS > 0:
        tl.debug_barrier()  # all of this program's counts are added before it is counted as done
        if tl.atomic_add(turn + 1, 1) == tl.num_programs(0) - 1:
            number = tl.load(turn)
            # By the L2 cache, where the other programs' atomics went.
            total = tl.load(counts + bin_, mask=is_bin, other=0, volatile=True).to(tl.int64)
            width = NUM_EXPERTS + NUM_PEERS
            first = number % 2 * width
            one = tl.full((BINS,), 1, tl.int64)
            sent = tl.sum(total, axis=0)
            for peer in range(NUM_PEERS):
                words = tl.load(peers + peer).to(tl.pointer_type(tl.int64)) + first
                before = tl.where(source < peer, total, 0)
                word = (one << ARRIVAL) | (before << EARLIER) | total
                tl.atomic_add(words + bin_, word, mask=is_bin, sem="relaxed", scope="sys")
                full = (sent * 0 + NUM_PEERS) << ARRIVAL
                tl.atomic_add(words + NUM_EXPERTS + source, full | sent, sem="relaxed", scope="sys")
            tl.store(turn, number + 1)
            tl.store(turn + 1, 0)


@kernel()
def gather_totals(
    gathered: tl.tensor,
    source: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    NUM_SOURCES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOURCES: tl.constexpr,
) -> tl.tensor:
    """Tokens of all experts; fills ``totals`` and ``starts`` [E] from counts [N, E]."""
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
    return tl.sum(total, axis=0)


@kernel()
def collect_totals(
    words: tl.tensor,
    turn: tl.tensor,
    counts: tl.tensor,
    source: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    sent: tl.tensor,
    late: tl.tensor,
    most_polls: tl.tensor,
    NUM_SOURCES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WORDS: tl.constexpr,
) -> tl.tensor:
    """The same of this rank's words [2, E + N], once every source has added its counts.

    Past the deadline this rank's own counts are all, and ``late`` is counted: later calls do not
    wait again, because words that come late would be taken for those of another batch.

    One load has all words, at least one for each thread. A vector of fewer words than threads is
    held several times: each copy is loaded by itself, and warps would disagree on whether all have
    arrived.
    """
    n = tl.arange(0, WORDS)
    is_expert, is_word = n < NUM_EXPERTS, n < NUM_EXPERTS + NUM_SOURCES
    # The words of the last exchange.
    here = words + (tl.load(turn) + 1) % 2 * (NUM_EXPERTS + NUM_SOURCES)
    polls = tl.where(tl.load(late) > 0, most_polls, 0)
    missing = 1
    word = tl.zeros((WORDS,), tl.int64)
    while (missing > 0) & (polls < most_polls):
        word = tl.load(here + n, mask=is_word, other=0, volatile=True)
        has_arrived = ((word >> ARRIVAL) & 255) == NUM_SOURCES
        missing = tl.sum((is_word & ~has_arrived).to(tl.int32), axis=0)
        polls += 1
    mask = (tl.full((1,), 1, tl.int64) << EARLIER) - 1
    tokens, earlier = (word & mask).to(tl.int32), ((word >> EARLIER) & mask).to(tl.int32)
    if missing > 0:
        tl.atomic_add(late, 1)
        own = tl.load(counts + n, mask=is_expert, other=0)
        of_source = tl.where(n == NUM_EXPERTS + source, tl.sum(own, axis=0), 0)
        tokens, earlier = tl.where(is_expert, own, of_source), own * 0
    else:  # every source has read its own words of two exchanges ago before it posts again
        tl.store(here + n, tl.zeros((WORDS,), tl.int64), mask=is_word)
    tl.store(totals + n, tokens, mask=is_expert)
    tl.store(starts + n, earlier, mask=is_expert)
    tl.store(sent + n - NUM_EXPERTS, tokens, mask=is_word & ~is_expert)
    return tl.sum(tl.where(is_expert, tokens, 0), axis=0)
