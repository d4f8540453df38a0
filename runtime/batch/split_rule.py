"""The split of a batch's own tokens among replicas that are already there.

What placement from history leaves is mostly not knowing the batch. Its counts are known once the
router has chosen, and then the busiest rank's tokens are a small linear program. Here it is
approached by rounds of waterfill, from the planned shares on: an expert in turn spreads its tokens
over the ranks that hold it, so that those it uses end level. Experts that share no rank take their
turn together, which makes a round a handful of steps of one warp. Each step goes a little past the
level (over-relaxation): otherwise load diffuses slowly along chains of experts.

A split costs time, and a batch that the plan had balanced gains none: ``SplitSwitch`` turns it off
by what it saved. ``runtime/batch/kernels/split.py`` repeats this arithmetic on a GPU.

Shapes:  E experts, S slots, R ranks, M experts that are split, W ways: ranks that hold one of them,
         C slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY

PLANNED = -2  # the row of an expert that keeps its planned shares
MOST_WAYS = 8  # an expert on more ranks keeps its planned shares
ROUNDS = 4  # at most
PAST_LEVEL = 1.4  # times the way to the level; the last round goes to the level
FILLS = 2  # passes of a waterfill; each drops the ranks above the level, few remain after two
# Rounds end where the busiest rank is this close to a lower bound of its tokens, or where a round
# changed its tokens by less than this part.
CLOSE = 1.005
SETTLED = 5e-3
# Tokens that a way gets at least, or none: the smallest tile of the experts' product. A step leaves
# fewer to the expert's largest way, and the weights of a way without tokens are not read.
LEAST_TOKENS = 16

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SplitLayout:
    """What a layer's placement says about a split, in arrays of fixed shape.

    Entries of nothing are -1.
    """

    row: Ints  # [E] row m of an expert that is split; -1: one replica; PLANNED
    expert: Ints  # [M] experts on more than one rank
    turn: Ints  # [M] experts of one turn share no rank
    rank: Ints  # [M, W] ranks of each
    slot: Ints  # [M, W] and its slot there; of two replicas on one rank the first serves
    share: Floats  # [M, W] part of the expert's tokens, as planned
    fed_by: Ints  # [R, C] entries m * W + w that put tokens on a rank
    fixed: Ints  # [R, C] experts that put a fixed share of their tokens on a rank
    fixed_share: Floats  # [R, C]

    @property
    def num_turns(self) -> int:
        """Turns of a round."""
        return int(self.turn.max(initial=-1)) + 1


def split_layout(
    expert_to_slots: NDArray[np.integer],
    slot_share: NDArray[np.floating],
    rank_of_slot: NDArray[np.integer],
    *,
    num_split: int,
    ways: int,
) -> SplitLayout:
    """Work out the layout of one layer.

    Args:
        expert_to_slots: [E, Rmax], padded with EMPTY.
        slot_share: [S] planned shares, which an expert on more than ``ways`` ranks keeps.
        rank_of_slot: [S], ascending.
        num_split: M, at least the number of experts on more than one rank.
        ways: W.

    Raises:
        ValueError: more experts are on several ranks than ``num_split``.
    """
    num_ranks = int(rank_of_slot[-1]) + 1
    first_slot = np.searchsorted(rank_of_slot, np.arange(num_ranks))
    place = np.arange(len(rank_of_slot)) - first_slot[rank_of_slot]  # place of a slot on its rank
    by_slot = (num_ranks, int(place.max()) + 1)
    layout = SplitLayout(
        np.full(len(expert_to_slots), -1, np.int32),
        np.full(num_split, -1, np.int32),
        np.full(num_split, -1, np.int32),
        np.full((num_split, ways), -1, np.int32),
        np.full((num_split, ways), -1, np.int32),
        np.zeros((num_split, ways), np.float32),
        np.full(by_slot, -1, np.int32),
        np.full(by_slot, -1, np.int32),
        np.zeros(by_slot, np.float32),
    )
    # A replica without a share gets no tokens, whatever the batch: its rank may be dead.
    takes = (expert_to_slots != EMPTY) & (slot_share[np.maximum(expert_to_slots, 0)] > 0)
    experts, replicas = np.nonzero(takes)
    slots = expert_to_slots[experts, replicas]
    layout.fixed[rank_of_slot[slots], place[slots]] = experts
    layout.fixed_share[rank_of_slot[slots], place[slots]] = slot_share[slots]
    layout.row[(expert_to_slots != EMPTY).sum(axis=1) > 1] = PLANNED

    ranks_by_turn: list[set[int]] = []
    num_chosen = 0
    num_replicas = takes.sum(axis=1)
    # Those on many ranks first: they fit into few turns.
    in_order = np.argsort(-num_replicas, kind="stable")
    for expert in in_order[num_replicas[in_order] > 1].tolist():
        held = expert_to_slots[expert, takes[expert]]
        ranks, first, way = np.unique(rank_of_slot[held], return_index=True, return_inverse=True)
        if not 1 < len(ranks) <= ways:
            continue
        if num_chosen == num_split:
            raise ValueError(f"found more than {num_split} experts on several ranks, expected none")
        row = num_chosen
        layout.row[expert], layout.expert[row] = row, expert
        layout.rank[row, : len(ranks)], layout.slot[row, : len(ranks)] = ranks, held[first]
        planned = np.bincount(way, slot_share[held])
        layout.share[row, : len(ranks)] = planned / planned.sum()
        layout.fixed[rank_of_slot[held], place[held]] = -1
        layout.fed_by[ranks, place[held[first]]] = row * ways + np.arange(len(ranks))
        layout.turn[row] = _first_turn(ranks_by_turn, set(ranks.tolist()))
        num_chosen += 1
    return layout


def _first_turn(ranks_by_turn: list[set[int]], ranks: set[int]) -> int:
    for turn, taken in enumerate(ranks_by_turn):
        if not taken & ranks:
            taken |= ranks
            return turn
    ranks_by_turn.append(set(ranks))
    return len(ranks_by_turn) - 1


@dataclass(frozen=True)
class SplitRule:
    """How near to the optimum a split goes, and when it is worth its time.

    The default ``worth`` is 12 us, what a split costs on an H200, by the time of a token at an
    FP8 expert of DeepSeek-V3's shape there, 0.11 us
    (benchmarks/reports/2026-11-24-batch-split.md).
    """

    rounds: int = ROUNDS
    least: int = LEAST_TOKENS  # tokens of a way that is used
    worth: float = 110.0  # tokens of the busiest rank that a split must save; -inf: always on
    num_tried: int = 8  # batches after which it is judged, of each layer by itself
    num_off: int = 256  # batches until it is tried again
    least_rows: int = 128  # rows of a slot, below which a captured graph holds no split


EVERY_BATCH = SplitRule(worth=-inf, least_rows=0)


@dataclass(frozen=True)
class SplitSwitch:
    """Whether a layer's batches are split: by the tokens that the split saved the busiest rank.

    A function of the batches' counts alone, so that all ranks switch at the same batch.
    """

    saved: float = 0.0  # tokens of the busiest rank, moving average since the split is on
    seen: int = 0  # batches since it is on; negative: batches that it stays off

    @property
    def is_on(self) -> bool:
        """Whether the next batch is split."""
        return self.seen >= 0

    def after(self, saved: float, rule: SplitRule) -> SplitSwitch:
        """The switch after a batch, of which ``saved`` counts only where it is on."""
        if not self.is_on:
            return SplitSwitch(0.0, self.seen + 1)
        mean = saved if self.seen == 0 else self.saved + (saved - self.saved) / rule.num_tried
        seen = min(self.seen + 1, rule.num_tried)
        return SplitSwitch(mean, -rule.num_off if self._fails(mean, seen, rule) else seen)

    @staticmethod
    def _fails(mean: float, seen: int, rule: SplitRule) -> bool:
        return seen == rule.num_tried and mean < rule.worth


@dataclass(frozen=True)
class BatchShares:
    """A batch's split, and what it brought."""

    tokens: NDArray[np.float64]  # [M, W] tokens of each split expert on each of its ranks
    rank_load: NDArray[np.float64]  # [R] tokens of each rank
    saved: float  # tokens of the busiest rank, against the planned shares


def split_batch(
    counts: NDArray[np.integer], layout: SplitLayout, rule: SplitRule = SplitRule()
) -> BatchShares:
    """Split the tokens of a batch; sums over ways are the experts' counts.

    Args:
        counts: [E] tokens of the batch, of all ranks.
        layout: of the layer.
        rule: more rounds come closer to the optimum of the linear program.
    """
    is_way = layout.rank >= 0
    tokens = np.where(layout.expert >= 0, counts[layout.expert], 0).astype(np.float64)
    split = tokens[:, None] * layout.share
    fixed = (np.where(layout.fixed >= 0, counts[layout.fixed], 0) * layout.fixed_share).sum(axis=1)
    enough = max(counts.sum() / len(fixed), fixed.max()) * CLOSE
    planned = float((fixed + _fed(split, layout)).max())
    before = np.inf
    for number in range(rule.rounds):
        most = (fixed + _fed(split, layout)).max()
        if most <= enough or abs(before - most) < SETTLED * most:
            break
        before = most
        step = PAST_LEVEL if number + 1 < rule.rounds else 1.0
        for turn in range(layout.num_turns):
            load = fixed + _fed(split, layout)
            others = np.where(is_way, load[layout.rank] - split, np.inf)
            level = _level(tokens, others, is_way)
            target = np.maximum(0.0, np.where(is_way, level[:, None] - others, 0.0))
            moved = np.maximum(0.0, split + step * (target - split))
            is_largest = moved == moved.max(axis=1, keepdims=True)
            moved = np.where((moved >= rule.least) | is_largest, moved, 0.0)
            total = moved.sum(axis=1)
            moved *= (tokens / np.where(total > 0, total, 1.0))[:, None]
            split = np.where((layout.turn == turn)[:, None], moved, split)
    load = fixed + _fed(split, layout)
    return BatchShares(split, load, planned - float(load.max()))


def _fed(split: NDArray[np.float64], layout: SplitLayout) -> NDArray[np.float64]:
    by_slot = np.where(layout.fed_by >= 0, split.reshape(-1)[layout.fed_by], 0.0)
    fed: NDArray[np.float64] = by_slot.sum(axis=1)
    return fed


def _level(
    tokens: NDArray[np.float64], others: NDArray[np.float64], is_way: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """[M] the load at which an expert's tokens just fill the ranks below it."""
    is_used = is_way
    level = np.full(len(tokens), np.inf)
    for _ in range(FILLS):
        below = np.where(is_used, others, 0.0).sum(axis=1)
        num_used = is_used.sum(axis=1)
        level = (tokens + below) / np.maximum(num_used, 1)
        is_used = is_way & (others < level[:, None])
    return level
