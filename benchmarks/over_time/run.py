"""The planner over time: recorded routing, window by window, as the controller runs it.

    python -m benchmarks.over_time.run [--half tune|judge] [--quick] [--only TEXT] [--json FILE]

Two tables, each with its targets. The first replays every stream of ``loads.py`` under
the controller with its defaults, and under policies that plan again after every window; all are
judged on the next window. The second draws a day of windows from one load, in which nothing
changes, of single tokens and of 16 requests at once: how many experts move after the first plan,
and how often the change test alarms.

Choose defaults on ``--half tune`` only: ``judge`` is for reports.

mean       excess of the imbalance over 1 on the next window, mean over windows and layers
p99        the same, 99th percentile over windows and layers
got        what MOVEs took off the imbalance until the next change, and what they promised
won        part of the MOVEs that took off anything
net s      serving time lost by imbalance and by moves, by the prices of ``CostModel``
worse      windows that are worse than under the placement at the start, in 1,000; and by how much
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.over_time.replay import (
    DATA,
    HALVES,
    MOST_WINDOWS,
    RANKS,
    STEADY,
    TOP_K,
    Case,
    cases,
    kill,
    net_seconds,
    realised,
    replay_controller,
    replay_nothing,
    replay_policy,
    stream,
)
from eplb.core.cost import CostModel
from eplb.core.load import LoadHistory
from rebalance.controller.loop import ControllerSettings
from simulations.peers import PEERS, register_peers
from telemetry.load.drift import LOOK_BACK, last_change

# -- The tables: what was found, beside what is wanted.

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
    net_s: float  # serving time lost by imbalance and by moves
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
        **{name: float(np.mean(columns[name])) for name in ("mean", "p99", "net_s", "seconds")},
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
        "net s",
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
                f"{row.net_s:.1f}",
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
    flash = [by_planner["flashlb"] for by_planner in found.values()]
    peers = {case: _best_peer(by_planner) for case, by_planner in found.items()}
    behind = {case: by[OURS].mean - peers[case].mean for case, by in found.items()}
    worst = max(behind, key=lambda case: behind[case])
    lost = [
        case
        for case, by in found.items()
        if any(by[OURS].net_s > row.net_s for name, row in by.items() if name != OURS)
    ]
    part = float(np.mean([a.mean for a in ours]) / np.mean([b.mean for b in flash]))
    moved = sum(row.moves for row in ours) / sum(row.moves for row in flash)
    promised, got = (sum(getattr(row, name) for row in ours) for name in ("promised", "got"))
    moves, won = (sum(getattr(row, name) for row in ours) for name in ("num_moves", "won"))
    worse, windows = (sum(getattr(row, name) for row in ours) for name in ("worse", "windows"))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("what", "found", "target"):
        table.add_column(heading)
    rows = [
        ("mean excess, part of FlashLB's", f"{part:.3f}", "0.97"),
        (
            "rows behind the best peer by more than 0.003",
            f"{sum(one > 0.003 for one in behind.values())} of {len(behind)}",
            "0",
        ),
        ("furthest behind", f"{behind[worst]:+.4f}, {worst}, {peers[worst].planner}", "+0.003"),
        ("moves, part of FlashLB's", f"{moved:.3f}", "0.5"),
        ("rows not first by net seconds", f"{len(lost)}: {', '.join(lost)}", "0"),
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
    for heading in (
        "windows",
        "mean",
        "first moves",
        "moves after window 16 (target 1 plan)",
        "alarms (2 %)",
    ):
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


QUICK_WINDOWS = 40
DAY_WINDOWS, QUICK_DAY = 1440, 240  # of a minute
SETTLED = 16  # windows, after which one plan may move experts in a day of one load


def judged(job: tuple[Case, str, int, str]) -> Figures:
    """Replay one case under one planner."""
    case, half, most, name = job
    register_peers()
    load, topology = stream(case, half, most), case.topology
    begin = time.process_time()
    if name == OURS:
        replayed = replay_controller(load, topology, TOP_K[case.model])
    elif name == NOTHING:
        replayed = replay_nothing(load, topology)
    else:
        replayed = replay_policy(load, topology, name)
    seconds = time.process_time() - begin
    above = replayed.per_window - replay_nothing(load, topology).per_window
    excess = np.array(replayed.imbalance) - 1
    kept = realised(load, topology, replayed) if name == OURS else []
    return Figures(
        case.name,
        name,
        float(excess.mean()),
        float(np.percentile(excess, 99)),
        replayed.moves,
        len(replayed.changes),
        sum(promised for promised, _ in kept),
        sum(got for _, got in kept),
        len(kept),
        sum(got > 0 for _, got in kept),
        int((above > 0).sum()),
        len(above),
        net_seconds(replayed, topology, CostModel()),
        float(above.max()),
        seconds,
    )


def settled(job: tuple[tuple[str, str], str, str, int]) -> Day:
    """Serve one load for a day."""
    (model, slots), kind, half, num_windows = job
    load = STEADY[kind](model, half, num_windows)
    found = replay_controller(load, RANKS[model, slots], TOP_K[model])
    ends = range(4, len(load) + 1)
    alarms = sum(
        last_change(LoadHistory(load[max(0, end - LOOK_BACK) : end])) is not None for end in ends
    )
    moving = [change for change in found.changes if change.moves]
    later = [change.moves for change in moving if change.window >= SETTLED]
    return Day(
        f"{model} {slots}, {kind}",
        num_windows,
        sum(change.moves for change in moving) - sum(later),
        sum(later),
        len(later),
        alarms,
        len(ends),
        float(found.per_window.mean() - 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=HALVES, default="tune", help="of requests, benchmarks")
    parser.add_argument("--quick", action="store_true", help="fewer windows, one seed")
    parser.add_argument("--seeds", type=int, default=2, help="of orders that are drawn")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--limit", type=float, help="seconds; what is not done by then is left out")
    parser.add_argument("--json", type=Path, help="write all figures")
    arguments = parser.parse_args()
    if not DATA.is_dir():
        sys.exit(f"skipped: real traces are not at {DATA}: set EPLB_DATA")
    console = Console(width=150)
    settings = ControllerSettings()
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d} python {sys.version.split()[0]} numpy {np.__version__}, "
        f"half: {arguments.half}\n{settings}"
    )
    most, day = (QUICK_WINDOWS, QUICK_DAY) if arguments.quick else (MOST_WINDOWS, DAY_WINDOWS)
    seeds = 1 if arguments.quick else arguments.seeds
    chosen = [case for case in cases(seeds) if arguments.only in case.name]
    loads = [key for key in RANKS if arguments.only in f"{key[0]} {key[1]}"]
    days_of = [(key, kind, arguments.half, day) for key in loads for kind in STEADY]
    planners = (OURS, *PEERS, NOTHING)  # the slowest first, so that none begins at the end
    jobs = [(case, arguments.half, most, name) for name in planners for case in chosen]
    with ProcessPoolExecutor(arguments.workers) as pool:
        judging = {pool.submit(judged, job): job for job in jobs}
        settling = {pool.submit(settled, job): job for job in days_of}
        running = [*settling, *judging]
        late = wait(running, timeout=arguments.limit).not_done
        for future in running:
            if future in late:
                job = settling.get(future) or judging[future]
                console.print(f"left out, not done after {arguments.limit} s: {job}")
        kill(pool)
    days = [future.result() for future in settling if future not in late]
    rows = [future.result() for future in judging if future not in late]
    complete = {case: by for case, by in merged(rows).items() if is_complete(by)}
    if complete:
        show(console, complete)
        show_targets(console, complete)
    show_days(console, days)
    if arguments.json is not None:
        kept = {"rows": [asdict(row) for row in rows], "days": [asdict(one) for one in days]}
        arguments.json.write_text(json.dumps(kept, indent=1))


def is_complete(by_planner: dict[str, Figures]) -> bool:
    """Whether every planner replayed every window of a case."""
    windows = {row.windows for row in by_planner.values()}
    return {OURS, NOTHING, *PEERS} <= set(by_planner) and len(windows) == 1


if __name__ == "__main__":
    main()
