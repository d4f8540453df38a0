"""The planner over time: recorded routing, window by window, as the controller runs it.

    python -m benchmarks.over_time.run [--half tune|judge] [--quick] [--only TEXT] [--json FILE]

Two tables, each with its targets. The first replays every stream of ``over_time_loads.py`` under
the controller with its defaults, and under policies that plan again after every window; all are
judged on the next window. The second draws a day of windows from one load, in which nothing
changes, of single tokens and of 16 requests at once: how many experts move after the first plan,
and how often the change test alarms.

Choose defaults on ``--half tune`` only: ``judge`` is for reports.

mean       excess of the imbalance over 1 on the next window, mean over windows and layers
p99        the same, 99th percentile over windows and layers
got        what MOVEs took off the imbalance until the next change, and what they promised
won        part of the MOVEs that took off anything
worse      windows that are worse than under the placement at the start, in 1,000; and by how much
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.over_time.loads import (
    DATA,
    HALVES,
    MOST_WINDOWS,
    RANKS,
    STEADY,
    TOP_K,
    Case,
    cases,
    stream,
)
from benchmarks.over_time.pools import kill
from benchmarks.over_time.replay import (
    realised,
    replay_controller,
    replay_nothing,
    replay_policy,
)
from benchmarks.over_time.tables import (
    NOTHING,
    OURS,
    Day,
    Figures,
    merged,
    show,
    show_days,
    show_targets,
)
from eplb.core.load import LoadHistory
from rebalance.controller.loop import ControllerSettings
from simulations.peers import PEERS, register_peers
from telemetry.drift.detector import LOOK_BACK, last_change

QUICK_WINDOWS = 40
DAY_WINDOWS, QUICK_DAY = 1440, 240  # of a minute
SETTLED = 1  # plans that may move experts in a day of one load


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
    moving = [change.moves for change in found.changes if change.moves]
    return Day(
        f"{model} {slots}, {kind}",
        num_windows,
        sum(moving[:SETTLED]),
        sum(moving[SETTLED:]),
        len(moving[SETTLED:]),
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
        settling = {pool.submit(settled, job): job for job in days_of}
        judging = {pool.submit(judged, job): job for job in jobs}
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
