"""The part of a proposed placement within the budget: whole layers, best gain per move first.

For policies without support for budgets; those that plan step by step apply theirs in
``eplb/policies/frontier.py``.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import Placement, changed_slots
from eplb.policies.frontier import Curve, thinned


class Offer(NamedTuple):
    """A placement that a policy proposes to replace the base."""

    base: Placement
    proposed: Placement
    before: NDArray[np.float64]  # [L] imbalance
    after: NDArray[np.float64]  # [L]
    forced: NDArray[np.bool_]  # [L] layers whose base cannot serve


def moves_per_layer(base: Placement, target: Placement) -> NDArray[np.int64]:
    """[L] weights that must move from ``base`` to ``target``."""
    per_layer: NDArray[np.int64] = changed_slots(base, target).sum(axis=1)
    return per_layer


def within_budget(offer: Offer, most: int | None) -> tuple[NDArray[np.bool_], Curve]:
    """[L] the layers within ``most`` moves, by gain per move, and a point for each of them.

    A layer without gain is not selected unless it is forced.
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
