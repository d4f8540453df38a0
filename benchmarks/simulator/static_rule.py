"""SGLang's ``static`` dispatch over the published plan: booked, served, and served before 0.5.7.

The table was measured with the engine's own code on 12 lognormal layers of another draw. Old rule,
written from its description: the first replica of the own GPU, else the first of the own node, else
an even split over all.

Shapes:  L layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.dispatch_rules import Case
from benchmarks.planner.plan import numpy_greedy
from eplb import DispatchRule, Placement, Topology, effective_shares, imbalance

MEASURED_ON = 12  # layers of the published means
NEAR = 0.03
COLUMNS = ("none", "booked", "static", "old static")
PUBLISHED = {
    Case(128, 144, 8, 8, 0.6): (1.26, 1.003, 1.009, 1.16),
    Case(128, 144, 8, 8, 1.0): (1.52, 1.002, 1.025, 1.27),
    Case(128, 144, 8, 8, 1.4): (1.92, 1.001, 1.081, 1.30),
    Case(256, 288, 16, 8, 1.0): (1.69, 1.002, 1.094, 1.16),
    Case(256, 288, 32, 8, 0.6): (1.62, 1.007, 1.015, 1.07),
    Case(256, 288, 32, 8, 1.0): (2.28, 1.005, 1.101, 1.14),
    Case(256, 288, 32, 8, 1.4): (3.40, 1.002, 1.222, 1.26),
    Case(256, 288, 32, 32, 1.0): (2.28, 1.005, 1.019, 1.84),
    Case(256, 320, 64, 8, 1.0): (3.21, 1.018, 1.155, 1.16),
}


def old_shares(held: NDArray[np.int32], topology: Topology) -> NDArray[np.float64]:
    """[L, S] part of its expert's tokens that each slot gets under the old rule."""
    shares = np.ones(held.shape)
    ranks, nodes = topology.rank_of_slot, topology.node_of_slot
    for layer, row in enumerate(held):
        experts, counts = np.unique(row, return_counts=True)
        for expert in experts[counts > 1]:
            slots = np.flatnonzero(row == expert)
            shares[layer, slots] = 0.0
            for rank, node in enumerate(topology.node_of_rank):
                near = slots[ranks[slots] == rank]
                near = near if near.size else slots[nodes[slots] == node]
                chosen = near[:1] if near.size else slots
                shares[layer, chosen] += 1.0 / topology.num_ranks / chosen.size
    return shares


def measured(case: Case, layers: int, seed: int) -> NDArray[np.float64]:
    """[4, L] imbalance of each layer, by COLUMNS."""
    load, topology = case.draw(layers, seed), case.topology
    once = Topology.uniform(1, case.ranks, case.experts // case.ranks)
    in_order = Placement(np.tile(np.arange(case.experts), (layers, 1)), case.experts)
    held = numpy_greedy(load, case.slots, case.ranks)
    booked = Placement(held, case.experts)
    static = effective_shares(booked, topology, DispatchRule.SGLANG_STATIC)
    served = (
        Placement(held, case.experts, slot_share=share)
        for share in (static, old_shares(held, topology))
    )
    return np.array(
        [
            imbalance(load, in_order, once),
            imbalance(load, booked, topology),
            *(imbalance(load, one, topology) for one in served),
        ]
    )


def main(layers: int, seed: int) -> None:
    """Print found against published; "!" marks what is off by more than both limits."""
    print(f"| E/slots/EP/ranks per node | {' | '.join(COLUMNS)} |")
    for case, published in PUBLISHED.items():
        found = measured(case, layers, seed)
        error = found.std(axis=1, ddof=1) * (1 / layers + 1 / MEASURED_ON) ** 0.5
        cells = [
            f"{mean:.3f} +- {one:.3f} of {wanted}"
            + ("" if abs(mean - wanted) <= max(NEAR, 2 * one) else " !")
            for mean, one, wanted in zip(found.mean(axis=1), error, published, strict=True)
        ]
        name = f"{case.experts}/{case.slots}/{case.ranks}/{case.per_node} sigma {case.sigma}"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
