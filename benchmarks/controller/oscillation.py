"""Loads that alternate: does the controller move experts to and fro for ever?

    python -m benchmarks.controller.oscillation [--windows 240] [--plot FILE.svg]

Two loads in turn, each for some windows. Moves of each quarter of the run show whether they are
bounded. Beside the controller, greedy planning on the latest window after each window, as a rule by
steps alone would have it. Simulated time, the controller's own code over its shipped store.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
COLOURS = ("#1f6fb4", "#d9822b", "#8a8f98")
PANEL_WIDTH, PANEL_HEIGHT, MARGIN, COLUMNS = 220, 150, 64, 3
POWERS = range(2, 6)  # of ten, of the moves that the axis shows

Moves = NDArray[np.int64]  # [T] moves after each window, summed up


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


def summed_moves(found: Replayed, windows: int) -> Moves:
    """[T] moves up to each window."""
    moves = np.zeros(windows, dtype=np.int64)
    for change in found.changes:
        moves[change.window] += change.moves
    return np.cumsum(moves)


def drawing(moved: dict[int, dict[str, Moves]], windows: int) -> str:
    """Moves over the run as SVG, a panel for each period."""
    wide, high = PANEL_WIDTH + MARGIN, PANEL_HEIGHT + MARGIN + 20
    size = wide * COLUMNS + MARGIN // 2, high * -(-len(moved) // COLUMNS) + 2 * MARGIN - 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#2b2f36">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="24" font-size="15" font-weight="600">'
        "Moves since the start, two loads in turn</text>",
    ]
    for number, (name, colour) in enumerate(zip(next(iter(moved.values())), COLOURS, strict=True)):
        x = MARGIN + 260 * number
        parts.append(f'<path d="M{x} 42h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="46">{name}</text>')
    for number, (period, of_way) in enumerate(moved.items()):
        left = MARGIN + number % COLUMNS * wide
        top = 2 * MARGIN + number // COLUMNS * high
        parts += panel(left, top, period, list(of_way.values()), windows)
    return "\n".join([*parts, "</svg>", ""])


def panel(left: int, top: int, period: int, ways: list[Moves], windows: int) -> list[str]:
    """One panel: windows to the right, moves upwards by powers of ten."""
    unit = PANEL_HEIGHT / (POWERS[-1] - POWERS[0])
    every = "window" if period == 1 else f"{period} windows"
    parts = [
        f'<text x="{left}" y="{top - 10}" font-weight="600">the other load every {every}</text>'
    ]
    for power in POWERS:
        y = top + PANEL_HEIGHT - (power - POWERS[0]) * unit
        parts.append(f'<path d="M{left} {y:.1f}h{PANEL_WIDTH}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    for window in (0, windows // 2, windows):
        x = left + PANEL_WIDTH * window / windows
        y = top + PANEL_HEIGHT + 16
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{window}</text>')
    for moves, colour in zip(ways, COLOURS, strict=True):
        above = np.log10(np.maximum(moves, 10 ** POWERS[0])) - POWERS[0]
        points = " ".join(
            f"{left + PANEL_WIDTH * (at + 1) / windows:.1f},{top + PANEL_HEIGHT - one * unit:.1f}"
            for at, one in enumerate(above.tolist())
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="SVG file that is written")
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
    moved: dict[int, dict[str, Moves]] = {period: {} for period in PERIODS}
    for period in PERIODS:
        load = alternating(given.seed, given.windows, LAYERS, EXPERTS, tokens=TOKENS, period=period)
        for name, way in ways.items():
            found = way(load)
            quarter = given.windows / 4
            moved[period][name] = summed_moves(found, given.windows)
            ends = moved[period][name][[round(quarter * one) - 1 for one in (1, 2, 3, 4)]]
            moves = np.diff(ends, prepend=0).tolist()
            migrations = sum(change.moves > 0 for change in found.changes)
            last = found.per_window[-int(quarter) :].mean()
            shown = ", ".join(map(str, moves))
            print(
                f"| {period} | {name} | {migrations} | {shown} | {found.per_window.mean():.3f} | "
                f"{last:.3f} |",
                flush=True,
            )
    if given.plot is not None:
        given.plot.write_text(drawing(moved, given.windows))


if __name__ == "__main__":
    main()
