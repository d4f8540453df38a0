"""A day of 5 s windows of 58 x 256 experts on 288 slots of 32 ranks: processor time and memory.

    python -m benchmarks.simulator.speed [--policy auto] [--hours 24] [--times]

Plans come at most every five minutes. The generation of loads is counted apart. One thread. Prints
one row of a table: the target is 120 s and 1 GB.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from dataclasses import replace

from eplb import Topology, preset
from simulations.cost.migration import MigrationCost
from simulations.inputs import step_model_of
from simulations.replay import Scenario, replay_all
from simulations.traffic import Traffic, traffic_windows
from simulations.windows import Tokens, Windows

WINDOW_S, PLAN_S = 5.0, 300.0


class Timed:
    """Windows of a source, and the processor time that making them took."""

    def __init__(self, source: Windows) -> None:
        self.source, self.seconds = source, 0.0

    def read(self) -> Iterator[Tokens]:
        """The windows, timed."""
        windows = self.source.read()
        while True:
            begun = time.process_time()
            tokens = next(windows, None)
            self.seconds += time.process_time() - begun
            if tokens is None:
                return
            yield tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--times", action="store_true", help="with times of steps and of moves")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, topology = preset("deepseek-v3"), Topology.uniform(4, 8, 9)
    count = round(arguments.hours * 3600 / WINDOW_S)
    traffic = Traffic(windows=count, window_s=WINDOW_S, tokens=400_000)
    warm = traffic_windows(replace(traffic, windows=130), 1)
    names = arguments.policy.split(",")
    every = round(PLAN_S / WINDOW_S)
    replay_all(Scenario(warm, topology, model, plan_every=every), names)  # compiles
    timed = Timed(traffic_windows(traffic, arguments.seed))
    step_model = step_model_of(model, topology, "h200") if arguments.times else None
    scenario = Scenario(
        replace(timed.source, read=timed.read),
        topology,
        model,
        seed=arguments.seed,
        plan_every=every,
        step_model=step_model,
        migration=MigrationCost(model, step_model.hardware) if step_model else None,
    )
    begun = time.process_time()
    found = replay_all(scenario, names)
    seconds = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    balance = ", ".join(f"{one.policy} {one.mean:.4f} ({one.moves:,} moved)" for one in found)
    print(
        f"| {arguments.policy}{', with times' if step_model else ''} | {count:,} | "
        f"{seconds - timed.seconds:.1f} s | {timed.seconds:.1f} s | {peak:.2f} GB | {balance} |"
    )


if __name__ == "__main__":
    main()
