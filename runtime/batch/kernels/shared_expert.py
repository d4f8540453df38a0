"""Two kernels that give every token of a batch a slot of the shared expert.

    split_batch -> weigh_ranks -> append_shared

``append_shared`` repeats ``runtime.batch.shared_rule.split_shared`` in each of its programs: that
takes less time than another launch would.

Shapes:  E experts, M experts that are split, W ways, R ranks, each of which is a source of tokens,
         C slots of a rank, T tokens, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runtime.batch.kernels.split import LayerSplit
from runtime.batch.shared_rule import FILLS, UNIT
from runtime.kernels.launch import expect, kernel

TOKENS_PER_PROGRAM = 64
EARLIER_AT_ONCE = 256  # tokens of which a program counts the real ones before its own


@dataclass(frozen=True)
class RankTokens:
    """What the ranks have of a batch."""

    load: torch.Tensor  # [R] float32 routed tokens
    tokens: torch.Tensor  # [R] int32 tokens that begin there
    takes: torch.Tensor  # [R] int32 1 where the layer has slots that get tokens

    @staticmethod
    def empty(num_ranks: int, device: torch.device) -> RankTokens:
        """Room for the figures."""
        load = torch.zeros(num_ranks, dtype=torch.float32, device=device)
        return RankTokens(load, *(torch.zeros_like(load, dtype=torch.int32) for _ in range(2)))


def weigh_ranks(
    layer: LayerSplit,
    gathered: torch.Tensor,
    totals: torch.Tensor,
    up_to: torch.Tensor,
    ranks: RankTokens,
    *,
    top_k: int,
) -> None:
    """Fill ``ranks`` by what ``split_batch`` wrote.

    Args:
        layer: that was split.
        gathered: [R, any] int32 counts of each source, of which the sum is taken.
        totals: [E] int32.
        up_to: [M, W] int32.
        ranks: to be filled.
        top_k: K, by which counts become tokens.
    """
    num_ranks, slots_per_rank = layer["fed_by"].shape
    _weigh[(num_ranks,)](
        layer["expert"],
        layer["fed_by"],
        layer["fixed"],
        layer["fixed_share"],
        gathered,
        totals,
        up_to,
        ranks.load,
        ranks.tokens,
        ranks.takes,
        NUM_EXPERTS=gathered.shape[1],
        EXPERTS=triton.next_power_of_2(gathered.shape[1]),
        WAYS=up_to.shape[1],
        NUM_SLOTS=slots_per_rank,
        SLOTS=triton.next_power_of_2(slots_per_rank),
        TOP_K=top_k,
    )


def append_shared(
    ranks: RankTokens,
    slot_of_rank: torch.Tensor,
    source: int,
    experts: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    *,
    num_experts: int,
    token_units: int,
    least: int,
) -> None:
    """Write slots and weights with one more column, that of the shared expert.

    Args:
        ranks: what the ranks have of the batch.
        slot_of_rank: [R] int64 slot of the shared expert on each rank.
        source: this rank.
        experts: [T, K] int64 ids; a token without any in 0..E-1 is padding.
        slots: [T, K] int64 of its routed experts.
        weights: [T, K] of any floating type.
        out: slots [T, K + 1] and weights [T, K + 1] of the same types. The weight of the shared
            expert is 1; padding has the slot -1.
        num_experts: E.
        token_units: load of a shared token, as ``runtime.batch.shared_rule.token_units`` has it.
        least: tokens that a rank gives away, or none.
    """
    num_tokens, top_k = experts.shape
    for name, tensor in (("experts", experts), ("slots", slots), ("weights", weights)):
        expect(name, tensor, tensor.dtype, experts.shape)
    if num_tokens == 0:
        return
    num_ranks = len(ranks.load)
    _append[(triton.cdiv(num_tokens, TOKENS_PER_PROGRAM),)](
        ranks.load,
        ranks.tokens,
        ranks.takes,
        slot_of_rank,
        source,
        experts,
        slots,
        weights,
        *out,
        num_tokens,
        token_units,
        least,
        NUM_EXPERTS=num_experts,
        NUM_RANKS=num_ranks,
        RANKS=triton.next_power_of_2(num_ranks),
        TOP_K=top_k,
        COLUMNS=triton.next_power_of_2(top_k),
        TOKENS=TOKENS_PER_PROGRAM,
        EARLIER=EARLIER_AT_ONCE,
        UNIT=UNIT,
        FILLS=FILLS,
    )


@kernel()
def _weigh(
    expert_of: tl.tensor,
    fed_by: tl.tensor,
    fixed_of: tl.tensor,
    fixed_share: tl.tensor,
    gathered: tl.tensor,
    totals: tl.tensor,
    up_to: tl.tensor,
    load: tl.tensor,
    tokens: tl.tensor,
    takes: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WAYS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
) -> None:
    rank = tl.program_id(0)
    e, c = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    counts = tl.load(gathered + rank * NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=0)
    place = rank * NUM_SLOTS + c
    feeds = tl.load(fed_by + place, mask=c < NUM_SLOTS, other=-1)
    fixed = tl.load(fixed_of + place, mask=c < NUM_SLOTS, other=-1)
    share = tl.load(fixed_share + place, mask=c < NUM_SLOTS, other=0.0)
    found = tl.load(totals + fixed, mask=fixed >= 0, other=0).to(tl.float32) * share
    is_fed = feeds >= 0
    expert = tl.load(expert_of + feeds // WAYS, mask=is_fed, other=0)
    total = tl.load(totals + expert, mask=is_fed, other=0)
    end = tl.load(up_to + feeds, mask=is_fed, other=0)
    begin = tl.load(up_to + feeds - 1, mask=is_fed & (feeds % WAYS > 0), other=0)
    fed = tl.minimum(end, total) - tl.minimum(begin, total)
    tl.store(load + rank, tl.sum(found + fed.to(tl.float32), axis=0))
    tl.store(tokens + rank, (tl.sum(counts, axis=0) + TOP_K - 1) // TOP_K)
    tl.store(takes + rank, tl.max((is_fed | (fixed >= 0)).to(tl.int32), axis=0))


@kernel()
def _num_real(
    experts: tl.tensor,
    token: tl.tensor,
    most: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """1 for each of the tokens below ``most`` that has an expert."""
    k = tl.arange(0, COLUMNS)
    is_given = (token < most)[:, None] & (k < TOP_K)[None, :]
    id_ = tl.load(experts + token[:, None] * TOP_K + k[None, :], mask=is_given, other=-1)
    return tl.max(((id_ >= 0) & (id_ < NUM_EXPERTS)).to(tl.int32), axis=1)


@kernel("source", "num_tokens", "token_units", "least")
def _append(
    load_of: tl.tensor,
    tokens_of: tl.tensor,
    takes_of: tl.tensor,
    slot_of_rank: tl.tensor,
    source: tl.tensor,
    experts: tl.tensor,
    slots: tl.tensor,
    weights: tl.tensor,
    out_slots: tl.tensor,
    out_weights: tl.tensor,
    num_tokens: tl.tensor,
    token_units: tl.tensor,
    least: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLIER: tl.constexpr,
    UNIT: tl.constexpr,
    FILLS: tl.constexpr,
) -> None:
    # The division, in 64 bits: units of a batch pass 2**31.
    r = tl.arange(0, RANKS)
    is_rank = r < NUM_RANKS
    takes = tl.load(takes_of + r, mask=is_rank, other=0) > 0
    own = tl.load(tokens_of + r, mask=is_rank, other=0).to(tl.int64)
    load = tl.load(load_of + r, mask=is_rank, other=0.0)
    load = tl.floor(load + 0.5).to(tl.int64) * UNIT
    token = token_units.to(tl.int64)
    total = load + token * own
    num = tl.maximum(tl.sum(takes.to(tl.int64), axis=0), 1)
    mean = (tl.sum(tl.where(takes, total, 0), axis=0) + num - 1) // num
    level = tl.maximum(mean, tl.max(tl.where(takes, load, 0), axis=0))
    given = tl.where(takes, tl.maximum(total - level, 0) // token, 0)
    given = tl.where(given >= least, given, 0)
    moved = tl.sum(given, axis=0)
    is_below = takes & (total < level)
    is_used = is_below
    fill = level
    for _ in tl.static_range(FILLS):
        num = tl.maximum(tl.sum(is_used.to(tl.int64), axis=0), 1)
        fill = (moved * token + tl.sum(tl.where(is_used, total, 0), axis=0) + num - 1) // num
        is_used = is_below & (total < fill)
    room = tl.where(is_used, fill - total, 0)
    up_to = moved * tl.cumsum(room, axis=0) // tl.maximum(tl.sum(room, axis=0), 1)
    up_to = tl.where(is_rank, up_to, 9223372036854775807)
    known = tl.sum(tl.where(r == source, own, 0), axis=0)
    kept = known - tl.sum(tl.where(r == source, given, 0), axis=0)
    start = tl.sum(tl.where(r < source, given, 0), axis=0)

    # The place of each token among the real ones of this source.
    block = tl.program_id(0) * TOKENS
    t = block + tl.arange(0, TOKENS)
    is_real = _num_real(experts, t, num_tokens, NUM_EXPERTS, TOP_K, COLUMNS)
    before = tl.cumsum(is_real, axis=0) - is_real
    first = 0
    while first < block:
        earlier = first + tl.arange(0, EARLIER)
        before += tl.sum(_num_real(experts, earlier, block, NUM_EXPERTS, TOP_K, COLUMNS), axis=0)
        first += EARLIER

    place = before.to(tl.int64)
    in_line = place - kept + start
    target = tl.sum((up_to[None, :] <= in_line[:, None]).to(tl.int32), axis=1)
    moves = (place >= kept) & (place < known)
    target = tl.where(moves, target, source)
    slot = tl.load(slot_of_rank + tl.minimum(target, NUM_RANKS - 1))
    is_token = t < num_tokens
    last = t.to(tl.int64) * (TOP_K + 1) + TOP_K
    tl.store(out_slots + last, tl.where(is_real > 0, slot, -1), mask=is_token)
    tl.store(out_weights + last, (is_real * 0 + 1).to(weights.dtype.element_ty), mask=is_token)
    k = tl.arange(0, COLUMNS)
    is_pair = is_token[:, None] & (k < TOP_K)[None, :]
    pair = t[:, None] * TOP_K + k[None, :]
    into = t[:, None].to(tl.int64) * (TOP_K + 1) + k[None, :]
    tl.store(out_slots + into, tl.load(slots + pair, mask=is_pair), mask=is_pair)
    tl.store(out_weights + into, tl.load(weights + pair, mask=is_pair), mask=is_pair)
