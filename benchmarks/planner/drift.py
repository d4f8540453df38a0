"""The planner on a load that drifts, plan by plan: next window's balance, moves, processor time.

    python -m benchmarks.planner.drift [--shapes 320x2 144x2 64x5 32x9] [--seed 1] [--most-ms 200]

58 x 256 experts, 16 windows of history, 48 windows; each plan is judged on the window after it.
``--most-ms`` sets the search that a plan may take without a limit of its own.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.controller.loads import drifting
from eplb import ModelShape, Topology, plan
from eplb.decision.gate import Decision
from eplb.measure.balance import imbalance
from eplb.policies import greedy

LAYERS, EXPERTS, WINDOWS, HISTORY, FIRST = 58, 256, 48, 16, 4
MODEL = ModelShape(tuple(range(3, 3 + LAYERS)), EXPERTS, 8, 7168, 2048)
TOKENS = 16 * 256  # of a rank in a window


def row(shape: str, seed: int) -> str:
    """One line of the table for ranks x slots of a rank."""
    num_ranks, num_slots = (int(part) for part in shape.split("x"))
    topology = Topology.uniform(num_ranks // 8, 8, num_slots)
    load = drifting(seed, WINDOWS, LAYERS, EXPERTS, tokens=TOKENS * num_ranks)
    first = plan(load[0], topology, model=MODEL, policy="contiguous")
    serving, unseen = first.target.with_generation(0), 0
    times, after, moves = [], [], []
    count = dict.fromkeys(Decision, 0)
    for window in range(FIRST, WINDOWS):
        past, begun = load[max(0, window - HISTORY) : window], time.process_time()
        made = plan(past, topology, model=MODEL, current=serving, unseen=unseen or None)
        times.append(1e3 * (time.process_time() - begun))
        count[made.decision] += 1
        serving = serving if made.decision is Decision.KEEP else made.target
        unseen = 1 if made.decision is Decision.MOVE else unseen + 1
        moves.append(made.num_moves)
        after.append(float(imbalance(load[window][None], serving, topology).mean()))
    decisions = " / ".join(
        str(count[decision]) for decision in (Decision.MOVE, Decision.RESPLIT, Decision.KEEP)
    )
    # The first plan leaves contiguous slots: every planner moves nearly all of them.
    return (
        f"| {shape} | {seed} | {np.median(times[1:]):.0f} | {np.percentile(times[1:], 99):.0f} "
        f"| {np.mean(after):.4f} | {sum(moves[1:])} | {decisions} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["320x2", "144x2", "64x5", "32x9"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-ms", type=float, default=greedy.MOST_MS)
    given = parser.parse_args()
    greedy.MOST_MS = given.most_ms
    print(
        "| ranks x slots | seed | processor ms: median | p99 | imbalance of the next window "
        "| moves after the first plan | MOVE / RESPLIT / KEEP |\n|---|---|---|---|---|---|---|"
    )
    for shape in given.shapes:
        print(row(shape, given.seed), flush=True)


if __name__ == "__main__":
    main()
