"""Whether the default price is right at any number of slots a rank: net seconds over a grid.

    python -m benchmarks.planner.price [--windows 24] [--seed 5]

Generated load that drifts, 6 layers of 256 experts; one rank group for each shape. The planner runs
with pay-back times around the default. Net seconds: what the windows take, each of ``WINDOW_S`` at
perfect balance, with the busiest rank's part of it as the cost model has it, and what the moves and
rebalances cost at the model's figures, whatever the planner was told. Less is better.

A second table has the dead zone on and off, at several batches. There a window takes the slowest
rank's time by the curve of a grouped GEMM, which is flat where a replica has few tokens in a step:
imbalance is no time then, and a rebalance gains nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from eplb import CostModel, Topology
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.policies.objectives import measured
from simulations.replay import Replay, Scenario, replay
from simulations.workloads import Workload, generate

SHAPES = ((144, 2), (72, 4), (32, 9), (8, 40))  # ranks, slots of each
PAY_BACK_S = (7.5, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0)
WINDOW_S = 10.0
STEPS = 200  # of a window, where the batch matters
BATCHES = (16, 128, 384, 1024)  # tokens of a replica in a step, on average
COST = CostModel()


def net_seconds(found: Replay, num_ranks: int) -> float:
    """Serving time of all judged windows, and what the rebalances took of it."""
    served = WINDOW_S * (1 + COST.expert_part * (found.per_window - 1)).sum()
    moving = found.moves / num_ranks * COST.move_seconds(0)
    return float(served + moving + COST.seconds_per_rebalance * len(found.rebalances))


def net_seconds_by_curve(found: Replay, history: LoadHistory, topology: Topology) -> float:
    """The same, where the curve says what imbalance makes of a step."""
    ratio = np.array(
        [
            measured(Problem(window, topology, cost=COST, objective="time"), placement).mean()
            for window, placement in zip(_judged(history), found.placements, strict=True)
        ]
    )
    served = WINDOW_S * (1 + COST.expert_part * (ratio - 1)).sum()
    moving = found.moves / topology.num_ranks * COST.move_seconds(0)
    return float(served + moving + COST.seconds_per_rebalance * len(found.rebalances))


def _judged(history: LoadHistory) -> Iterator[LoadHistory]:
    for window in range(1, history.num_windows):
        yield history.first(window + 1).latest(1)


def in_steps(history: LoadHistory) -> LoadHistory:
    """The same windows, each of STEPS steps."""
    first = np.arange(history.num_windows) * STEPS
    return LoadHistory(history.tokens, first, first + STEPS - 1)


def dead_zones(num_windows: int, seed: int) -> None:
    """Net seconds with the dead zone off and on, at each batch."""
    print(
        "\n| ranks x slots | tokens of a replica in a step | off: net s (imbalance, moves) | on |"
    )
    print("|---|---|---|---|")
    for ranks, slots in SHAPES:
        topology = Topology.uniform(ranks // 8, 8, slots)
        for batch in BATCHES:
            workload = Workload(
                "gamma",
                layers=6,
                experts=256,
                top_k=8,
                windows=num_windows,
                tokens=batch * ranks * slots * STEPS // 8,
                requests=64,
            )
            history = in_steps(generate(workload, seed))
            cells = []
            for is_on in (False, True):
                cost = replace(COST, dead_zone=is_on)
                scenario = Scenario(history, topology, cost=cost, keep_placements=True)
                found = replay(scenario, "auto")
                net = net_seconds_by_curve(found, history, topology)
                cells.append(f"{net:.2f} ({found.per_window.mean():.3f}, {found.moves})")
            print(f"| {ranks} x {slots} | {batch} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    workload = Workload(
        "gamma",
        layers=6,
        experts=256,
        top_k=8,
        windows=arguments.windows,
        tokens=65536,
        requests=64,
    )
    history: LoadHistory = generate(workload, arguments.seed)
    print("| ranks x slots | " + " | ".join(f"{one:g} s" for one in PAY_BACK_S) + " | default |")
    for ranks, slots in SHAPES:
        topology = Topology.uniform(ranks // 8, 8, slots)
        rows = [
            replay(Scenario(history, topology, cost=CostModel(pay_back_s=one)), "auto")
            for one in PAY_BACK_S
        ]
        net = np.array([net_seconds(row, ranks) for row in rows])
        cells = [
            f"{seconds:.1f} ({row.per_window.mean():.3f}, {row.moves})"
            for seconds, row in zip(net, rows, strict=True)
        ]
        above = net[PAY_BACK_S.index(COST.pay_back_s)] / net.min() - 1
        print(f"| {ranks} x {slots} | " + " | ".join(cells) + f" | +{above:.2%} |", flush=True)
    dead_zones(arguments.windows, arguments.seed)


if __name__ == "__main__":
    main()
