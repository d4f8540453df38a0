"""Just-in-time replicas: which experts of a layer are pulled into spare slots for one batch.

Where the batch's own split ends, some ranks are still above the mean: no replica of their hot
experts lies on a light rank. Each rank has a few spare slots that no placement fills. A light rank
pulls a hot expert's record from the rank that serves it, and takes the last tokens of that slot.

A piece is (slot that gives, spare slot that takes, a run of the expert's tokens). Pieces are chosen
for a level: the busiest rank gives tokens of its fullest slot to the rank with most room below the
level, until no rank is above it. A low level needs more pieces than there are spare slots; so
several levels are tried, all at once on a GPU, and the one with the lowest busiest rank is taken.

All figures are integers, and equal figures go to the lowest index: ranks that have the same counts
decide alike. ``runtime/batch/kernels/pulls.py`` repeats this arithmetic on a GPU.

Shapes:  E experts, R ranks, C slots of a rank, J spare slots of a rank, M experts that are split,
         W ways, K levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.errors import ConfigError
from runtime.batch.split_rule import SplitLayout

NUM_LEVELS = 16
NO_SLOT = -1
MASK = 2**31 - 1
ODD = (0x1E3779B1, 0x2C1B3C6D, 0x297A2D39)
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PullRule:
    """What a pull must bring, and what it costs. All ranks of a group have the same.

    Raises:
        ConfigError: a figure is negative, or nobody may read.
    """

    spare_slots: int = 1  # J
    least_rows: int = 64  # rows of a piece: below a tile of the expert kernel, time does not fall
    least_gain: int = 64  # rows that the busiest rank must lose, or nothing is pulled
    # Rows whose product takes as long as the pull of one record: a spare slot cannot be served
    # earlier than that.
    pull_rows: int = 0
    most_readers: int = 2  # readers of one rank's memory: they share its links

    def __post_init__(self) -> None:
        figures = (self.spare_slots, self.least_rows, self.least_gain, self.pull_rows)
        if min(figures) < 0 or self.most_readers < 1:
            raise ConfigError(f"{self}: expected no negative figure and most_readers of at least 1")


@dataclass(frozen=True)
class SlotTokens:
    """Tokens of a layer's slots under the split of the batch; [R, C] each.

    Slot (r, c) serves the tokens ``first`` up to ``first + tokens`` of its expert, as numbered over
    all sources.
    """

    expert: Ints  # -1: empty
    first: Ints
    tokens: Ints
    may_give: NDArray[np.bool_]  # false for planned shares: their runs are not known


@dataclass(frozen=True)
class Pulls:
    """What each spare slot serves in this layer of this batch; [R, J] each."""

    source: Ints  # r * C + c of the slot whose record is pulled; NO_SLOT
    first: Ints  # first of the expert's tokens that it takes
    end: Ints
    busiest: int  # rows until the last rank is done, a pull counted as ``pull_rows``


def slot_tokens(counts: Ints, layout: SplitLayout, ends: Ints) -> SlotTokens:
    """Work out the tokens of all slots of a layer.

    Args:
        counts: [E] tokens of the batch, of all ranks.
        layout: of the layer.
        ends: [M, W] position up to which a way takes its expert's tokens, ascending.
    """
    ways = layout.rank.shape[1]
    is_fed, is_fixed = layout.fed_by >= 0, layout.fixed >= 0
    row, way = np.divmod(np.maximum(layout.fed_by, 0), ways)
    expert = np.where(is_fed, layout.expert[row], np.where(is_fixed, layout.fixed, -1))
    total = np.where(expert >= 0, counts[expert], 0).astype(np.int64)
    first = np.where(is_fed & (way > 0), np.minimum(ends[row, np.maximum(way - 1, 0)], total), 0)
    end = np.where(is_fed, np.minimum(ends[row, way], total), total)
    planned = (total.astype(np.float32) * layout.fixed_share + np.float32(0.5)).astype(np.int64)
    is_alone = is_fixed & (layout.row[layout.fixed] == -1)
    tokens = np.where(is_fed | is_alone, end - first, np.where(is_fixed, planned, 0))
    return SlotTokens(
        expert.astype(np.int64), first.astype(np.int64), tokens, (is_fed | is_alone) & (tokens > 0)
    )


def plan_pulls(slots: SlotTokens, domain: Ints, rule: PullRule) -> Pulls:
    """Choose what is pulled for this batch; often nothing.

    Args:
        slots: of the layer, under the split of the batch.
        domain: [R] ranks of one domain can read each other's memory; -1: takes and gives nothing.
        rule: alike on all ranks.
    """
    load = slots.tokens.sum(axis=1)
    most, fair = int(load.max()), -(-int(load.sum()) // max(1, int((domain >= 0).sum())))
    above = max(0, most - fair)
    levels = [fair + above * k * k // NUM_LEVELS**2 for k in range(NUM_LEVELS)]
    tried = [pulls_at(level, slots, domain, rule) for level in levels]
    # Of equal ones the highest level: it has the fewest pieces.
    best = min(reversed(tried), key=lambda one: one.busiest)
    if best.busiest > most - max(1, rule.least_gain):
        nothing = np.zeros((len(domain), rule.spare_slots), np.int64)
        return Pulls(nothing + NO_SLOT, nothing, nothing, most)
    return best


def pulls_at(level: int, slots: SlotTokens, domain: Ints, rule: PullRule) -> Pulls:
    """Pieces that bring ranks down to a level, busiest first, as far as spare slots allow."""
    num_ranks, per_rank = slots.expert.shape
    left = np.where(slots.may_give, slots.tokens, 0)
    own, got = slots.tokens.sum(axis=1), np.zeros(num_ranks, np.int64)
    pulled, readers = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    source = np.full((num_ranks, rule.spare_slots), NO_SLOT, np.int64)
    first, end = np.zeros_like(source), np.zeros_like(source)
    while True:
        done = np.maximum(own, rule.pull_rows * pulled) + got
        giver = int(done.argmax())
        place = int(left[giver].argmax())
        expert = slots.expert[giver, place]
        may_take = (domain >= 0) & (domain == domain[giver]) & (pulled < rule.spare_slots)
        may_take &= ~(slots.expert == expert).any(axis=1)
        room = level - np.maximum(own, rule.pull_rows * (pulled + 1)) - got
        room = np.where(may_take, room, -1)
        taker = int(room.argmax())
        wanted = max(int(done[giver]) - level, rule.least_rows, 1)
        part = min(wanted, int(left[giver, place]), int(room[taker]))
        is_above = done[giver] > level and readers[giver] < rule.most_readers
        if not is_above or part < max(rule.least_rows, 1):
            return Pulls(source, first, end, int(done[giver]))
        spare = (taker, int(pulled[taker]))
        source[spare] = giver * per_rank + place
        end[spare] = slots.first[giver, place] + left[giver, place]
        first[spare] = end[spare] - part
        left[giver, place] -= part
        own[giver] -= part
        got[taker] += part
        pulled[taker] += 1
        readers[giver] += 1


def moved_by_slot(pulls: Pulls, per_rank: int) -> Ints:
    """[R, C] tokens that slots give to spare slots: telemetry counts them where they came from."""
    moved = np.zeros((len(pulls.source), per_rank), np.int64)
    is_pulled = pulls.source != NO_SLOT
    np.add.at(moved.reshape(-1), pulls.source[is_pulled], (pulls.end - pulls.first)[is_pulled])
    return moved


def pulls_digest(pulls: Pulls, slots: SlotTokens) -> int:
    """31 bits of what every spare slot serves: its source, the expert there, the run of tokens."""
    expert = slots.expert.reshape(-1)[np.maximum(pulls.source, 0)]
    served = expert * slots.expert.size + pulls.source + 1
    words = np.stack([served, pulls.first, pulls.end], axis=-1).reshape(-1, 3)
    mixed = (words @ np.array(ODD) + np.arange(len(words)) * ODD[0]) & MASK
    mixed = ((mixed ^ (mixed >> 15)) * ODD[1]) & MASK
    is_pulled = pulls.source.reshape(-1) != NO_SLOT
    return int(np.where(is_pulled, mixed ^ (mixed >> 12), 0).sum()) & MASK
