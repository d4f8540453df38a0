"""The replica that each source rank uses, compiled: the rules of SGLang and of vllm-ascend.

SGLang 0.5.23 (``static``), for each layer, expert and source rank in order: the only replica; else
one on the rank itself; else the first one on its node, if not all are there; else a fair draw over
the remaining ranks, in which replicas differ by one rank at most. vllm-ascend: the source rank's
number modulo replicas. Replicas are in order of their slots in both.

Shapes:  L MoE layers, E experts, S slots, R ranks, W 32-bit words of the random generator, M most
replicas of an expert.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit
from eplb.core.kernels import FloatArray, IntArray

Words = NDArray[np.uint32]
START = cast(int, np.int64(0))


class Sources(NamedTuple):
    """Source ranks of tokens."""

    part: FloatArray  # [R] of the tokens
    node: IntArray  # [R]
    rank: IntArray  # [S]
    nearest: bool  # SGLang's rule; else vllm-ascend's


@jit
def replica_slots(held: IntArray, num_experts: int) -> tuple[IntArray, IntArray]:
    """[E, M] slots of each expert of a layer [S] in order, padded with -1, and [E] their number."""
    count = np.zeros(num_experts, dtype=np.int64)
    slots = np.full((num_experts, len(held) - num_experts + 1), -1)
    for slot in range(len(held)):
        expert = held[slot]
        if expert >= 0:
            slots[expert, count[expert]] = slot
            count[expert] += 1
    return slots, count


@jit
def nearest(slots: IntArray, count: int, source: int, sources: Sources) -> int:
    """Index of the replica that a source rank uses without a draw; -1 if it draws."""
    if not sources.nearest:
        return source % count
    if count == 1:
        return 0
    first, near = -1, 0
    for place in range(count):
        rank = sources.rank[slots[place]]
        if rank == source:
            return place
        if sources.node[rank] == sources.node[source]:
            near += 1
            if first < 0:
                first = place
    return first if near < count else -1


@jit
def draw_layer(
    slots: IntArray, count: IntArray, sources: Sources, words: Words, at: int, drawn: IntArray
) -> int:
    """Fill in ``drawn`` [E, R + 1] and return the index of the next layer's first word.

    The first entry of a row is the number of ranks that draw, the others their replicas in order.
    """
    num_ranks = len(sources.part)
    for expert in range(len(count)):
        left = 0
        if sources.nearest and count[expert] > 1:
            for source in range(num_ranks):
                left += nearest(slots[expert], count[expert], source, sources) < 0
        drawn[expert, 0] = left
        if left > 0:
            at = _fair(drawn[expert, 1:], left, count[expert], words, at)
    return at


@jit
def _fair(drawn: IntArray, left: int, count: int, words: Words, at: int) -> int:
    """All replicas equally often, the remainder by a sample without repeats, then shuffled."""
    often, rest = left // count, left % count
    for place in range(often * count):
        drawn[place] = place % count
    enough = 21
    if rest > 5:
        power = 1
        while power < 3 * rest:
            power *= 4
        enough += power
    pool = np.arange(count)
    for place in range(rest):
        if count <= enough:
            pick, at = _below(count - place, words, at)
            drawn[often * count + place] = pool[pick]
            pool[pick] = pool[count - place - 1]
        else:
            pick, at = _below(count, words, at)
            while pool[pick] < 0:
                pick, at = _below(count, words, at)
            drawn[often * count + place] = pick
            pool[pick] = -1
    for place in range(left - 1, 0, -1):
        pick, at = _below(place + 1, words, at)
        drawn[place], drawn[pick] = drawn[pick], drawn[place]
    return at


@jit
def _below(number: int, words: Words, at: int) -> tuple[int, int]:
    """A draw below a number from the top bits of words; draws that are too large are rejected."""
    bits = 0
    while number >> bits:
        bits += 1
    while True:
        assert at < len(words), "there are words for all draws"
        draw = int(words[at]) >> (32 - bits)
        at += 1
        if draw < number:
            return draw, at


@jit
def fill_shares(
    slots: IntArray, count: int, drawn: IntArray, sources: Sources, share: FloatArray
) -> None:
    """Fill in ``share`` [M] of one expert; the expected ones where ``drawn`` is not valid.

    A row of draws is valid for one number of replicas and one number of ranks that draw.
    """
    for place in range(count):
        share[place] = 0.0
    if count == 1:
        share[0] = 1.0
        return
    left, open_part = 0, 0.0
    for source in range(len(sources.part)):
        place = nearest(slots, count, source, sources)
        if place >= 0:
            share[place] += sources.part[source]
            continue
        left += 1
        open_part += sources.part[source]
    if left == 0:
        return
    if left != drawn[0]:
        for place in range(count):
            share[place] += open_part / count
        return
    left = 0
    for source in range(len(sources.part)):
        if nearest(slots, count, source, sources) < 0:
            left += 1
            share[drawn[left]] += sources.part[source]


@jit
def shares_by_choice(
    held: IntArray, num_experts: int, sources: Sources, words: Words
) -> FloatArray:
    """[L, S] part of its expert's tokens that each slot gets."""
    num_layers, num_slots = held.shape
    by_slot = np.zeros((num_layers, num_slots))
    drawn = np.zeros((num_experts, len(sources.part) + 1), dtype=np.int64)
    share = np.zeros(num_slots)
    at = START
    for layer in range(num_layers):
        slots, count = replica_slots(held[layer], num_experts)
        at = draw_layer(slots, count, sources, words, at, drawn)
        for expert in range(num_experts):
            fill_shares(slots[expert], count[expert], drawn[expert], sources, share)
            for place in range(count[expert]):
                by_slot[layer, slots[expert, place]] = share[place]
    return by_slot
