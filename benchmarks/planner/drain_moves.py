"""How many experts move when ranks leave, against the fewest that can.

    python -m benchmarks.planner.drain_moves [--layers 8] [--seeds 5] [--tokens 2000,200]

A placement is planned for a load, and serves it; then ranks chosen by ``wanted_for`` are drained.
*needed* are experts that no other rank holds: they have to move whatever the balance. *balance* are
the moves that the planner then makes, by the same price, from a placement in which just those have
moved (``survive``). *planned* are the moves of the one plan that the controller makes for a drain.
The target is planned <= 1.1 x (needed + balance); "!" marks a row that misses it.

Loads are Dirichlet(0.5) over experts, the same in 16 windows but for Poisson noise; ``--tokens`` of
a window for each expert of a layer. Costs are the planner's own, experts of 44 MB.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from eplb import ModelShape, Topology, plan
from eplb.migration.membership import leavers, wanted_for
from eplb.migration.survivors import survive

WINDOWS, UNSEEN = 16, 8
EXPERT_BYTES = 44_000_000
TARGET = 1.1


class Case(NamedTuple):
    """A deployment, and to how many ranks it is scaled."""

    nodes: int
    ranks_per_node: int
    slots: int
    experts: int
    to: int

    @property
    def name(self) -> str:
        """The row's name."""
        ranks = self.nodes * self.ranks_per_node
        return f"{self.experts} experts, {ranks} ranks x {self.slots} -> {self.to}"


CASES = [
    Case(1, 4, 22, 64, 3),
    Case(1, 8, 10, 64, 7),
    Case(1, 8, 19, 128, 7),
    Case(2, 4, 22, 128, 6),
    Case(1, 6, 22, 64, 3),
    Case(4, 8, 9, 256, 31),
    Case(4, 8, 12, 256, 24),
]


class Moves(NamedTuple):
    """Figures of a row."""

    needed: int
    planned: int
    balance: int
    before: float  # imbalance with just the needed moves
    after: float

    @property
    def ratio(self) -> float:
        """Of the planned moves to the least."""
        return self.planned / (self.needed + self.balance)


def drained(case: Case, layers: int, tokens: int, seed: int) -> Moves:
    """Drain the ranks of a case under one load."""
    rng = np.random.default_rng(seed)
    topology = Topology.uniform(case.nodes, case.ranks_per_node, case.slots)
    model = ModelShape(tuple(range(layers)), case.experts, 8, 7168, 2048, expert_bytes=EXPERT_BYTES)
    part = rng.dirichlet(np.full(case.experts, 0.5), size=layers)
    load = np.stack([rng.poisson(part * case.experts * tokens) for _ in range(WINDOWS)])
    serving = plan(load, topology, model=model).target
    wanted = wanted_for(case.to, range(topology.num_ranks), serving, topology)
    leaving = leavers(wanted, topology)
    left = replace(topology, drained=np.isin(np.arange(topology.num_ranks), leaving))
    planned = plan(load, left, model=model, current=serving, unseen=UNSEEN)
    least = survive(serving, topology, leaving)
    balanced = plan(load, left, model=model, current=least.target, unseen=UNSEEN)
    needed = len(least.refills)
    return Moves(needed, planned.num_moves, balanced.num_moves, balanced.before, planned.after)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", default="2000,200")
    given = parser.parse_args()
    head = ("needed", "balance", "planned", "ratio", "uneven", "after")
    print(f"{'case, tokens of an expert':<44}" + "".join(f"{name:>9}" for name in head))
    for case in CASES:
        for tokens in map(int, given.tokens.split(",")):
            rows = [drained(case, given.layers, tokens, seed) for seed in range(given.seeds)]
            needed, planned, balance, before, after = np.median(rows, axis=0)
            ratio = float(np.median([one.ratio for one in rows]))
            mark = " !" if ratio > TARGET else ""
            print(
                f"{f'{case.name}, {tokens}':<44}{needed:>9.0f}{balance:>9.0f}{planned:>9.0f}"
                f"{ratio:>9.2f}{before:>9.3f}{after:>9.3f}{mark}",
                flush=True,
            )


if __name__ == "__main__":
    main()
