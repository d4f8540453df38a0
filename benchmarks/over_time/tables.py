"""The tables of ``over_time.py``: what was found, beside what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

OURS, NOTHING, GREEDY = "controller", "nothing", "greedy_on_sum"


@dataclass(frozen=True)
class Figures:
    """How one way of planning did on one case."""

    case: str
    planner: str
    mean: float
    p99: float
    moves: int
    changes: int
    promised: float  # by MOVEs, added up
    got: float
    num_moves: int  # plans that are MOVEs
    won: int
    worse: int  # windows
    windows: int
    worst: float  # how far a window is above the same one under the placement at the start
    seconds: float


@dataclass(frozen=True)
class Day:
    """A day of windows in which nothing changes."""

    case: str
    windows: int
    first_moves: int
    later_moves: int
    later_changes: int
    alarms: int
    looks: int
    mean: float


def merged(rows: list[Figures]) -> dict[str, dict[str, Figures]]:
    """By case and planner; seeds of one case become one row."""
    found: dict[str, dict[str, list[Figures]]] = {}
    for row in rows:
        found.setdefault(row.case, {}).setdefault(row.planner, []).append(row)
    return {
        case: {name: _mean(of_seeds) for name, of_seeds in by_planner.items()}
        for case, by_planner in found.items()
    }


def _mean(rows: list[Figures]) -> Figures:
    """Means of what is a mean, sums of what is counted."""
    columns = {name: [getattr(row, name) for row in rows] for name in vars(rows[0])}
    summed = ("moves", "changes", "promised", "got", "num_moves", "won", "worse", "windows")
    return Figures(
        rows[0].case,
        rows[0].planner,
        **{name: sum(columns[name]) for name in summed},
        **{name: float(np.mean(columns[name])) for name in ("mean", "p99", "seconds")},
        worst=max(columns["worst"]),
    )


def show(console: Console, found: dict[str, dict[str, Figures]]) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("model, slots / ranks, order", no_wrap=True)
    table.add_column("planner", no_wrap=True)
    for heading in (
        "mean",
        "/ greedy's",
        "p99",
        "moves",
        "got / promised",
        "won",
        "worse, by",
        "s",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for case, by_planner in found.items():
        base = by_planner[GREEDY].mean
        for name, row in by_planner.items():
            worse = f"{1000 * row.worse / row.windows:.0f}, {row.worst:+.2f}"
            table.add_row(
                case if name == OURS else "",
                name,
                f"{row.mean:.4f}",
                f"{row.mean / base:.2f}",
                f"{row.p99:.3f}",
                f"{row.moves} / {row.changes}",
                f"{row.got:.2f} / {row.promised:.2f}" if row.num_moves else "",
                f"{row.won} of {row.num_moves}" if row.num_moves else "",
                "" if name == NOTHING else worse,
                f"{row.seconds:.1f}",
            )
        table.add_section()
    console.print(table)


def show_targets(console: Console, found: dict[str, dict[str, Figures]]) -> None:
    ours = [by_planner[OURS] for by_planner in found.values()]
    greedy = [by_planner[GREEDY] for by_planner in found.values()]
    peers = {case: _best_peer(by_planner) for case, by_planner in found.items()}
    behind = {case: by[OURS].mean - peers[case].mean for case, by in found.items()}
    worst = max(behind, key=lambda case: behind[case])
    part = float(np.mean([a.mean for a in ours]) / np.mean([b.mean for b in greedy]))
    moved = sum(row.moves for row in ours) / sum(row.moves for row in greedy)
    promised, got = (sum(getattr(row, name) for row in ours) for name in ("promised", "got"))
    moves, won = (sum(getattr(row, name) for row in ours) for name in ("num_moves", "won"))
    worse, windows = (sum(getattr(row, name) for row in ours) for name in ("worse", "windows"))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("what", "found", "target"):
        table.add_column(heading)
    rows = [
        ("mean excess, part of greedy's on the sum", f"{part:.3f}", "0.75"),
        (
            "rows behind the best peer by more than 0.005",
            f"{sum(one > 0.005 for one in behind.values())} of {len(behind)}",
            "0",
        ),
        ("furthest behind", f"{behind[worst]:+.4f}, {worst}, {peers[worst].planner}", "+0.005"),
        ("moves, part of greedy's", f"{moved:.3f}", "0.05"),
        ("MOVEs: got / promised", f"{got / promised if promised else 0:.2f}", "0.8"),
        ("MOVEs: won", f"{won / moves if moves else 0:.0%} of {moves}", "80 %"),
        ("windows worse than nothing, of 1,000", f"{1000 * worse / windows:.1f}", "0"),
        ("by at most", f"{max(row.worst for row in ours):+.3f}", "+0.1"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _best_peer(by_planner: dict[str, Figures]) -> Figures:
    peers = (row for name, row in by_planner.items() if name not in (OURS, NOTHING))
    return min(peers, key=lambda row: row.mean)


def show_days(console: Console, days: Sequence[Day]) -> None:
    table = Table(title="one load, nothing changes", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("model, slots / ranks, windows of", no_wrap=True)
    for heading in ("windows", "mean", "first moves", "later moves (target 0)", "alarms (2 %)"):
        table.add_column(heading, justify="right")
    for day in days:
        table.add_row(
            day.case,
            str(day.windows),
            f"{day.mean:.4f}",
            str(day.first_moves),
            f"{day.later_moves} in {day.later_changes}",
            f"{day.alarms / day.looks:.1%}",
        )
    console.print(table)
