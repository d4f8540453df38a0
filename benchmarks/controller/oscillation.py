"""Loads that alternate: does the controller move experts to and fro for ever?

    python -m benchmarks.controller.oscillation [--windows 240]

Two loads in turn, each for some windows. Moves of each quarter of the run show whether they are
bounded. Beside the controller, greedy planning on the latest window after each window, as a rule by
steps alone would have it. Simulated time, the controller's own code over its shipped store.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.controller.loads import alternating
from benchmarks.over_time.replay import Change, Replayed, Tokens, replay_controller, start_of
from eplb import Topology, imbalance
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.decision.allowance import moves_per_layer
from eplb.decision.triggers import TriggerRules
from rebalance.controller.loop import ControllerSettings
from simulations.peers.replans import greedy_on_last

LAYERS, EXPERTS, TOP_K, TOKENS = 8, 64, 6, 200_000
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=8, slots_per_rank=5)
PERIODS = (1, 2, 4, 8, 16, 40)


def replay_greedy(load: Tokens) -> Replayed:
    """Greedy on the latest window, after each window; always taken."""
    found, current = Replayed(), start_of(TOPOLOGY, load[0])
    for window, tokens in enumerate(load):
        if window:
            found.imbalance.append(imbalance(tokens, current, TOPOLOGY))
        proposed = greedy_on_last(Problem(LoadHistory(tokens[None]), TOPOLOGY, current=current))
        moves = int(moves_per_layer(current, proposed).sum())
        found.changes.append(Change(window, "MOVE", moves, 0.0, current, proposed))
        current = proposed
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    usual = ControllerSettings()
    rules = TriggerRules(start_imbalance=1.2, rearm_imbalance=1.1, cool_down_s=600.0)
    ways = {
        "controller": lambda load: replay_controller(load, TOPOLOGY, TOP_K, usual),
        "controller, cool-down of 10 windows": lambda load: replay_controller(
            load, TOPOLOGY, TOP_K, replace(usual, triggers=rules)
        ),
        "greedy on each window": replay_greedy,
    }
    print(
        f"{LAYERS} x {EXPERTS} on {TOPOLOGY.num_ranks} ranks x 5 slots, {given.windows} windows, "
        f"seed {given.seed}\n"
        "| period | way | migrations | moves of each quarter | mean imbalance | last quarter |\n"
        "|---|---|---|---|---|---|"
    )
    for period in PERIODS:
        load = alternating(given.seed, given.windows, LAYERS, EXPERTS, tokens=TOKENS, period=period)
        for name, way in ways.items():
            found = way(load)
            quarter = given.windows / 4
            moves = [0, 0, 0, 0]
            for change in found.changes:
                moves[min(3, int(change.window / quarter))] += change.moves
            migrations = sum(change.moves > 0 for change in found.changes)
            last = found.per_window[-int(quarter) :].mean()
            shown = ", ".join(map(str, moves))
            print(
                f"| {period} | {name} | {migrations} | {shown} | {found.per_window.mean():.3f} | "
                f"{last:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
