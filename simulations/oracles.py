"""Limits that no planner on the past can reach: each looks at the window that it serves.

    oracle:force-balanced  the same tokens in every slot: what benchmarks with forced routing show
    oracle:re-plan         a fresh plan for each window before it comes; its moves cost nothing
    oracle:shares          our placement from the past, with the best shares for the window itself
    oracle:moonep          pieces of any size: the same tokens on each rank, where slots suffice
    oracle:ultraep         no piece below 1,024 tokens, threshold within 1 %

The last two are the balancers of MoonEP and UltraEP: replicas for each batch on its exact load.
First copies stay where they are. Ranks above a threshold give tokens of their heaviest experts to
ranks below it, and each piece takes one redundant slot of the rank that gets it. The lowest
threshold that the slots allow is found by bisection, as UltraEP does. Transfers cost nothing.
Written from published descriptions (Kimi-K3 report 5.2.1; UltraEP 1.0.0, MIN_TOKENS_PER_REPLICA and
EPS), not from their code. A window is taken as one batch.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.core.placement import EMPTY
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.policies.table import greedy_policy
from eplb.shares.resplitting import resplit
from simulations.schemes import Ours, Scheme, SlotLoad, SlotSplit
from simulations.windows import Tokens

ULTRA_EP_LEAST, ULTRA_EP_TOLERANCE = 1024, 0.01
EXACT = 1e-4  # of the mean rank load
Load = NDArray[np.float64]


class Piece(NamedTuple):
    """Tokens of an expert that a rank with a free slot gets."""

    slot: int  # that gives them
    rank: int  # that gets them
    tokens: float


class MoonEp(Scheme):
    """Pieces of any size."""

    is_oracle = True
    least, tolerance = 0, EXACT

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] under pieces for these tokens."""
        load = super().serve(tokens)
        for layer, row in enumerate(self.serving.slot_to_expert):
            pieces = lowest(load[layer], row, self.terms.topology, self.least, self.tolerance)
            give(pieces, load[layer], row, self.terms.topology)
        return load


class UltraEp(MoonEp):
    """Pieces of a least size."""

    least, tolerance = ULTRA_EP_LEAST, ULTRA_EP_TOLERANCE


def lowest(
    load: Load, held: NDArray[np.int32], topology: Topology, least: int, tolerance: float
) -> list[Piece]:
    """Pieces of one layer at the lowest threshold that can be reached.

    Args:
        load: [S] tokens of the slots.
        held: [S] their experts; EMPTY slots can take pieces.
        least: tokens of a piece.
        tolerance: of the threshold, relative to the mean.
    """
    serving, speed = topology.serving, topology.rank_speed
    by_rank = np.bincount(topology.rank_of_slot, load, topology.num_ranks)
    fair = by_rank.sum() / speed[serving].sum()  # time of each rank at perfect balance
    low, high = fair, float((by_rank / speed)[serving].max())
    best: list[Piece] = []
    found = pieces_at(low, load, held, topology, least)
    if found is not None:
        return found
    while high - low > tolerance * fair:
        middle = (low + high) / 2
        found = pieces_at(middle, load, held, topology, least)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def pieces_at(
    threshold: float, load: Load, held: NDArray[np.int32], topology: Topology, least: int
) -> list[Piece] | None:
    """Pieces that leave no rank above a threshold; None where the heaviest-first search finds none.

    Args:
        threshold: time of a rank, in tokens at nominal speed.
    """
    rank_of_slot = topology.rank_of_slot
    by_rank = np.bincount(rank_of_slot, load, topology.num_ranks)
    room = np.where(topology.serving, threshold * topology.rank_speed, 0.0) - by_rank
    free = np.bincount(rank_of_slot[held == EMPTY], minlength=topology.num_ranks)
    slack = 1e-9 * max(threshold, 1.0)
    pieces: list[Piece] = []
    for giver in np.argsort(room, kind="stable"):
        slots = np.flatnonzero((rank_of_slot == giver) & (held != EMPTY))
        for slot in slots[np.argsort(-load[slots], kind="stable")]:
            left = load[slot]
            while room[giver] < -slack:
                taker = int(np.argmax(np.where((free > 0) & topology.serving, room, -np.inf)))
                part = min(max(-room[giver], least), left, room[taker])
                if part < max(least, slack) or not free[taker]:
                    break
                pieces.append(Piece(int(slot), taker, float(part)))
                room[giver] += part
                room[taker] -= part
                free[taker] -= 1
                left -= part
        if room[giver] < -slack:
            return None
    return pieces


def give(
    pieces: list[Piece], load: Load, held: NDArray[np.int32], topology: Topology
) -> NDArray[np.int32]:
    """Move the tokens of pieces to free slots, in place; [S] experts of the slots then."""
    held = held.copy()
    for slot, rank, tokens in pieces:
        free = np.flatnonzero((topology.rank_of_slot == rank) & (held == EMPTY))[0]
        held[free] = held[slot]
        load[slot] -= tokens
        load[free] += tokens
    return held


class ForceBalanced(Scheme):
    """Every live rank gets the same tokens, and every slot of a rank."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] equal parts."""
        topology = self.terms.topology
        size = np.maximum(topology.slots_of_rank, 1)
        part = np.where(topology.serving, 1.0 / topology.serving.sum(), 0.0) / size
        load: SlotLoad = tokens.sum(axis=1)[:, None] * part[topology.rank_of_slot]
        return load


class RePlan(Scheme):
    """Greedy on the window itself."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] under a plan for these tokens."""
        if not tokens.any():
            return super().serve(tokens)
        problem = Problem(LoadHistory(tokens[None]), self.terms.topology, self.terms.model)
        return SlotSplit(greedy_policy(problem), self.terms).of(tokens)


class WindowShares(Ours):
    """Ours, whose replicas get the shares that suit the window itself."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] under the best shares."""
        if not tokens.any():
            return super().serve(tokens)
        topology = self.terms.topology
        placement = resplit(LoadHistory(tokens[None]), self.serving, topology, trust=1.0)
        return SlotSplit(placement, self.terms).of(tokens)


ORACLES: dict[str, type[Scheme]] = {
    "oracle:force-balanced": ForceBalanced,
    "oracle:re-plan": RePlan,
    "oracle:shares": WindowShares,
    "oracle:moonep": MoonEp,
    "oracle:ultraep": UltraEp,
}
