"""How much of a proposed placement the budget allows: whole layers, best gain per move first.

For policies that know nothing of budgets; those that plan step by step spend theirs in
``eplb/policies/frontier.py``.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.policies.frontier import Curve, thinned


class Offer(NamedTuple):
    """A placement that a policy proposes in place of the base."""

    base: Placement
    proposed: Placement
    before: NDArray[np.float64]  # [L] imbalance
    after: NDArray[np.float64]  # [L]
    forced: NDArray[np.bool_]  # [L] layers whose base cannot serve


def moves_per_layer(base: Placement, target: Placement) -> NDArray[np.int64]:
    """[L] weights that must move from ``base`` to ``target``."""
    new = (base.slot_to_expert != target.slot_to_expert) & (target.slot_to_expert != EMPTY)
    per_layer: NDArray[np.int64] = new.sum(axis=1)
    return per_layer


def within_budget(offer: Offer, most: int | None) -> tuple[NDArray[np.bool_], Curve]:
    """[L] the layers that ``most`` moves buy, by gain per move, and a point for each of them.

    A layer that would not get better is left out where it is not forced.
    """
    moves = moves_per_layer(offer.base, offer.proposed)
    gain = offer.before - offer.after
    order = np.lexsort((-gain / np.maximum(moves, 1), ~offer.forced))
    chosen = np.zeros(len(moves), dtype=np.bool_)
    spent, total = 0, float(offer.before.sum())
    points = [(0, total / len(moves))]
    for layer in order.tolist():
        fits = most is None or spent + moves[layer] <= most
        if not (fits and gain[layer] > 0) and not offer.forced[layer]:
            continue
        chosen[layer] = True
        spent += int(moves[layer])
        total -= float(gain[layer])
        points.append((spent, total / len(moves)))
    return chosen, thinned(points)
