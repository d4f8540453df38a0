"""Deployments and batches of the schedules, and what the real decision makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY
from eplb.shares.pulls import (
    NO_SLOT,
    Ints,
    PullRule,
    SlotTokens,
    moved_by_slot,
    plan_pulls,
    pulls_digest,
)
from runtime.pulls.readers import Read

NUM_RANKS, NUM_SLOTS, NUM_LAYERS, NUM_EXPERTS = 3, 3, 2, 6
NUM_DEPLOYMENTS, NUM_BATCHES = 16, 24
DOMAIN = np.zeros(NUM_RANKS, np.int64)


class Rows(NamedTuple):
    """Rows that a source sends to a slot; slots from ``NUM_SLOTS`` on are spare."""

    source: int
    expert: int
    rank: int
    slot: int
    tokens: int


@dataclass(frozen=True)
class Decision:
    """What a rank decides by the counts that it gathered."""

    rows: tuple[Rows, ...]  # of all sources
    reads: tuple[tuple[Read, ...], ...]  # of each rank
    moved: Ints  # [R, C]
    digest: int


@dataclass(frozen=True)
class Deployment:
    """Two placements that a migration leads between, and a rule."""

    held: tuple[NDArray[np.int32], NDArray[np.int32]]  # [L, R, C] each
    rule: PullRule


@cache
def deployment(number: int) -> Deployment:
    """Every expert somewhere, never twice on a rank."""
    rng = np.random.default_rng(number)
    rule = PullRule(1 + number % 2, least_rows=1, least_gain=1, most_readers=1 + number % 3)
    first, second = (_held(rng) for _ in range(2))
    return Deployment((first, second), rule)


def _held(rng: np.random.Generator) -> NDArray[np.int32]:
    held = np.full((NUM_LAYERS, NUM_RANKS, NUM_SLOTS), EMPTY, np.int32)
    for layer in held:
        layer[:, :2] = rng.permutation(NUM_EXPERTS).reshape(NUM_RANKS, 2)
        for rank in layer:
            if rng.random() < 0.6:
                rank[2] = rng.choice(np.setdiff1d(np.arange(NUM_EXPERTS), rank))
    return held


@cache
def decide(number: int, which: int, layer: int, batch: int, is_altered: bool) -> Decision:
    """Of a batch under a placement; altered: as a rank with other counts decides."""
    made = deployment(number)
    held = made.held[which][layer]
    counts = _counts(number, layer, batch)
    seen = np.roll(counts, 1, axis=1) if is_altered else counts
    served = _served(held, seen.sum(axis=0))
    pulls = plan_pulls(served, DOMAIN, made.rule)
    reads = tuple(
        tuple(
            Read(*divmod(int(source), NUM_SLOTS), spare)
            for spare, source in enumerate(of_rank)
            if source != NO_SLOT
        )
        for of_rank in pulls.source
    )
    # (expert, rank, slot, first, end): runs of the slots, cut where spare slots take their end.
    runs: list[tuple[int, int, int, int, int]] = []
    moved = moved_by_slot(pulls, NUM_SLOTS)
    for rank, slot in np.argwhere(served.tokens > 0):
        first = int(served.first[rank, slot])
        end = first + int(served.tokens[rank, slot] - moved[rank, slot])
        runs.append((int(held[rank, slot]), int(rank), int(slot), first, end))
    for rank, spare in np.argwhere(pulls.source != NO_SLOT):
        expert = int(held.reshape(-1)[pulls.source[rank, spare]])
        first, end = int(pulls.first[rank, spare]), int(pulls.end[rank, spare])
        runs.append((expert, int(rank), NUM_SLOTS + int(spare), first, end))
    return Decision(_rows(runs, counts, held), reads, moved, pulls_digest(pulls, served))


def _counts(number: int, layer: int, batch: int) -> Ints:
    rng = np.random.default_rng((number, layer, batch))
    hot = rng.permutation(NUM_EXPERTS)
    share = np.full(NUM_EXPERTS, 0.02)
    share[hot[: 1 + batch % 3]] = 1.0
    tokens = rng.choice([0, 0, 20, 40], size=NUM_RANKS)
    return np.stack([rng.multinomial(n, share / share.sum()) for n in tokens]).astype(np.int64)


def _served(held: NDArray[np.int32], totals: Ints) -> SlotTokens:
    first, tokens = np.zeros(held.shape, np.int64), np.zeros(held.shape, np.int64)
    for expert, total in enumerate(totals.tolist()):
        places = np.argwhere(held == expert)
        ends = [total * (n + 1) // len(places) for n in range(len(places))]
        for (rank, slot), begin, end in zip(places, [0, *ends], ends, strict=False):
            first[rank, slot], tokens[rank, slot] = begin, end - begin
    return SlotTokens(held.astype(np.int64), first, tokens, tokens > 0)


def _rows(
    runs: list[tuple[int, int, int, int, int]], counts: Ints, held: NDArray[np.int32]
) -> tuple[Rows, ...]:
    """Each source's part of the runs. No position is past an expert's last replica."""
    found = []
    starts = np.cumsum(counts, axis=0) - counts
    left = counts.copy()
    for expert, rank, slot, first, end in runs:
        for source in range(NUM_RANKS):
            begin = int(starts[source, expert])
            tokens = min(end, begin + int(counts[source, expert])) - max(first, begin)
            if tokens > 0:
                found.append(Rows(source, expert, rank, slot, tokens))
                left[source, expert] -= tokens
    for source, expert in np.argwhere(left > 0).tolist():
        rank, slot = np.argwhere(held == expert)[-1].tolist()
        found.append(Rows(source, expert, rank, slot, int(left[source, expert])))
    return tuple(found)


def random_batch(rng: random.Random) -> int:
    """The number of a batch."""
    return rng.randrange(NUM_BATCHES)
