"""The ranks that compute a batch's shared expert: at home, or where routed tokens leave room.

Every token runs through the shared expert, which is the same on every rank. So once a batch's
routed tokens are split among ranks, the tokens of the shared expert can go wherever there is room,
and the least load of the busiest rank has a closed form: the mean of all tokens, or the most routed
tokens of a rank where that is more. No token moves beyond what this level needs.

All figures are whole numbers, so that every rank and device decides alike.
``runtime/batch/kernels/shared_expert.py`` repeats this arithmetic on a GPU.

Shapes:  R ranks, each of which is a source of tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNIT = 64  # load of a routed token; a shared token's is a whole number near UNIT times its weight
# Tokens that a rank gives away at least. Below a tile of the experts' product its time is flat.
LEAST = 64
FILLS = 4  # passes of the waterfill of the ranks that take; each drops those above the level

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SharedSplit:
    """Where the tokens of the shared expert go, by their places.

    The first tokens of each source stay. The others of all sources, source by source, are one line,
    of which each rank takes a run.
    """

    kept: Ints  # [R] tokens of each source that stay at home
    start: Ints  # [R] place in the line of the first token that a source gives away
    up_to: Ints  # [R] place in the line up to which a rank takes tokens

    @property
    def taken(self) -> Ints:
        """[R] tokens that a rank takes from others."""
        return np.diff(self.up_to, prepend=0)

    def targets(self, source: int, place: Ints, num_tokens: int) -> Ints:
        """Ranks of a source's tokens by their places 0, 1, ... among its tokens.

        Places from ``num_tokens`` on, of which the split did not know, stay at home.
        """
        moves = (place >= self.kept[source]) & (place < num_tokens)
        in_line = place - self.kept[source] + self.start[source]
        return np.where(moves, np.searchsorted(self.up_to, in_line, side="right"), source)


def split_shared(
    rank_load: NDArray[np.floating],
    tokens: NDArray[np.integer],
    takes: NDArray[np.bool_],
    *,
    weight: float = 1.0,
    least: int = LEAST,
) -> SharedSplit:
    """Divide the tokens of the shared expert among ranks.

    Args:
        rank_load: [R] routed tokens of each rank.
        tokens: [R] tokens of each source, a rank's own.
        takes: [R] whether a rank serves. Another, such as a drained one, keeps its own tokens and
            takes none.
        weight: work of a token of the shared expert, in routed tokens.
        least: tokens that a rank gives away, or none.
    """
    token = token_units(weight)
    load = np.floor(rank_load.astype(np.float32) + np.float32(0.5)).astype(np.int64) * UNIT
    own = tokens.astype(np.int64)
    total = load + token * own
    mean = -(-total[takes].sum() // max(1, takes.sum()))
    level = max(mean, load[takes].max(initial=0))
    given = np.where(takes, np.maximum(total - level, 0) // token, 0)
    given[given < least] = 0
    moved = given.sum()

    is_below = takes & (total < level)
    is_used, fill = is_below, level
    for _ in range(FILLS):
        fill = -(-(moved * token + total[is_used].sum()) // max(1, is_used.sum()))
        is_used = is_below & (total < fill)
    room = np.cumsum(np.where(is_used, fill - total, 0))
    return SharedSplit(own - given, np.cumsum(given) - given, moved * room // max(1, room[-1]))


def token_units(weight: float) -> int:
    """Load of a shared token in units."""
    return max(1, round(weight * UNIT))
