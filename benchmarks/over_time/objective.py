"""What a plan balances: tokens, or their time by the curve, under the controller, by batch size.

    python -m benchmarks.over_time.objective [--half tune|judge] [--only TEXT] [--rows 16 64]
    python -m benchmarks.over_time.objective --plan

The first form serves recorded windows under the controller (``replay.py``), once for each
objective, and judges the next window. A window has ``STEPS`` steps: its tokens are multiplied so
that a slot has the given rows in a step, so that routing, and how it changes, is that of the trace
at every batch size. One more stream is drawn: 58 layers of 256 experts whose load drifts.

    excess     imbalance - 1 on the next window, mean over windows and layers
    time       of the slowest rank on the next window, by the curve, over that of objective="tokens"
    moves      experts moved, without those of the first plan

The second form times ``eplb.plan``: 58 x 256 experts, 288 slots on 32 ranks, fresh and after drift.
Traces lie where EPLB_DATA points. Defaults are chosen on ``--half tune``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from benchmarks.controller.loads import drifting
from benchmarks.over_time.replay import (
    HALVES,
    MOST_WINDOWS,
    TOP_K,
    Case,
    Replayed,
    Tokens,
    cases,
    kill,
    replay_controller,
    start_of,
    stream,
)
from eplb import Placement, Topology, plan
from eplb.core.cost import Objective
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.decision.score import measured
from rebalance.controller.loop import ControllerSettings
from rebalance.controller.plans.planner_request import PlannerRequest

if TYPE_CHECKING:
    from benchmarks.planner.plan import Case as Load

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
ROWS = (16, 64, 256, 768)  # of a slot in a step
STEPS = 64  # of a window
DRAWN = "drawn 58x256"
DRAWN_WINDOWS, DRAWN_TOKENS = 32, 2**20  # routed in each layer of a window
RUNS = 7


@dataclass(frozen=True)
class Judged:
    """One stream under one objective."""

    case: str
    rows: int
    objective: str
    excess: float
    time: float  # over the time of experts that are split evenly at no cost
    first_moves: int
    moves: int  # of later plans
    decisions: int  # plans that were taken
    cpu_s: float


Stream = tuple[str, Topology, int, Tokens]  # name, ranks, experts of a token, windows


def stream_of(case: Case | int, half: str, most: int) -> Stream:
    """A recorded stream, or the drawn one of a seed."""
    if isinstance(case, Case):
        return case.name, case.topology, TOP_K[case.model], stream(case, half, most)
    windows = drifting(case, DRAWN_WINDOWS, 58, 256, tokens=DRAWN_TOKENS, jump_every=16)
    return f"{DRAWN} 288/32, seed {case}", Topology.uniform(4, 8, 9), 8, windows


def of_batch(tokens: Tokens, topology: Topology, rows: int) -> Tokens:
    """[T, L, E] the same routing with so many rows of a slot in each of the window's steps."""
    routed = tokens.sum(axis=2).mean()
    return np.rint(tokens * (rows * STEPS * topology.num_slots / routed)).astype(np.int64)


def judged(job: tuple[Case | int, str, int, int, Objective]) -> Judged:
    """Serve a stream under the controller with an objective."""
    case, half, most, rows, objective = job
    name, topology, top_k, tokens = stream_of(case, half, most)
    load = of_batch(tokens, topology, rows)
    settings = ControllerSettings(request=PlannerRequest(objective=objective))
    begun = time.process_time()
    found = replay_controller(load, topology, top_k, settings, STEPS)
    cpu_s = time.process_time() - begun
    moves = [change.moves for change in found.changes if change.moves] or [0]
    return Judged(
        name,
        rows,
        objective,
        float(np.mean(found.imbalance) - 1),
        times(load, topology, found),
        moves[0],
        sum(moves[1:]),
        len(found.changes),
        cpu_s,
    )


def times(load: Tokens, topology: Topology, found: Replayed) -> float:
    """Mean time of the slowest rank, over windows 1, 2, ... and layers."""
    serving, changes = start_of(topology, load[0]), {one.window: one for one in found.changes}
    seconds = []
    for window in range(1, len(load)):
        if window - 1 in changes:
            serving = changes[window - 1].new
        one = LoadHistory(load[window][None], np.array([0]), np.array([STEPS - 1]))
        problem = Problem(one, topology, objective="time")
        seconds.append(measured(problem, serving).mean())
    return float(np.mean(seconds))


def planning_rows() -> None:
    """Processor time of ``eplb.plan``: medians, both objectives in turn."""
    from benchmarks.planner.plan import V3, V3_ZIPF  # late: it needs rich, which GPU hosts may lack

    print(
        "| load | windows | rows | plan | tokens, ms | time, ms | ratio | by the curve: tokens "
        "| time | moves of either |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for case, windows in ((V3, 1), (V3_ZIPF, 1), (V3, 16), (V3_ZIPF, 16)):
        for rows in ROWS:
            load, rng = drawn(case, windows, rows), np.random.default_rng(1)
            tokens = np.rint(load.tokens * rng.lognormal(0, 0.2, load.tokens.shape[1:]))
            again = replace(load, tokens=tokens.astype(np.int64))
            serving = {one: plan(load, case.topology, objective=one).target for one in OBJECTIVES}
            print(planning_row(case, "fresh", load, {}, rows))
            print(planning_row(case, "again", again, serving, rows), flush=True)


def drawn(case: Load, windows: int, rows: int) -> LoadHistory:
    """Windows that differ as 10 % noise makes them."""
    rng, topology = np.random.default_rng(2), case.topology
    tokens = case.draw()[None] * rng.lognormal(0, 0.1, (windows, case.layers, case.experts))
    first = np.arange(windows) * STEPS
    return LoadHistory(of_batch(tokens, topology, rows), first, first + STEPS - 1)


def planning_row(
    case: Load,
    kind: str,
    history: LoadHistory,
    current: Mapping[Objective, Placement],
    rows: int,
) -> str:
    """One line of the table."""
    took: dict[Objective, list[float]] = {objective: [] for objective in OBJECTIVES}
    made = {}
    for run in range(RUNS + 1):
        for objective in OBJECTIVES:
            begun = time.thread_time()
            made[objective] = plan(
                history, case.topology, current=current.get(objective), objective=objective
            )
            if run:  # the first one compiles or reads the compiler's cache
                took[objective].append(1e3 * (time.thread_time() - begun))
    ms = {objective: float(np.median(found)) for objective, found in took.items()}
    problem = Problem(history, case.topology, objective="time")
    slowest = [measured(problem, made[one].target).mean() for one in OBJECTIVES]
    moves = " ".join(str(made[one].num_moves) for one in OBJECTIVES) if current else "-"
    return (
        f"| {case.load} | {history.num_windows} | {rows} | {kind} | {ms['tokens']:.1f} "
        f"| {ms['time']:.1f} | {ms['time'] / ms['tokens']:.2f} | {slowest[0]:.4f} "
        f"| {slowest[1]:.4f} | {moves} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="time eplb.plan")
    parser.add_argument("--half", choices=HALVES, default="tune", help="of requests, benchmarks")
    parser.add_argument("--seeds", type=int, default=1, help="of orders that are drawn")
    parser.add_argument("--only", default="", help="streams whose name has this text")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--most", type=int, default=MOST_WINDOWS, help="windows of a stream")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--limit", type=float, help="seconds; what is not done is left out")
    parser.add_argument("--json", type=Path, help="write all figures")
    given = parser.parse_args()
    if given.plan:
        planning_rows()
        return
    chosen: list[Case | int] = [one for one in cases(given.seeds) if given.only in one.name]
    if given.only in DRAWN:
        chosen += range(given.seeds)
    jobs = [
        (case, given.half, given.most, rows, objective)
        for case in sorted(chosen, key=lambda one: isinstance(one, Case))  # the slowest first
        for rows in given.rows
        for objective in OBJECTIVES
    ]
    with ProcessPoolExecutor(given.workers) as pool:
        running = {pool.submit(judged, job): job for job in jobs}
        late = wait(running, timeout=given.limit).not_done
        for future in late:
            print(f"left out, not done after {given.limit} s: {running[future]}")
        kill(pool)
    found = [future.result() for future in running if future not in late]
    if given.json is not None:
        given.json.write_text(json.dumps([vars(one) for one in found], indent=1))
    show(found)


def show(found: list[Judged]) -> None:
    """Print a line for each stream and batch, then means of each batch."""
    by = {(one.case, one.rows, one.objective): one for one in found}
    print(
        "| stream | rows | excess: tokens | time | moves: tokens | time | time / tokens "
        "| processor s: tokens | time |\n|---|---|---|---|---|---|---|---|---|"
    )
    ratios: dict[int, list[float]] = {}
    for case, rows in dict.fromkeys((one.case, one.rows) for one in found):
        plain, timed = (by.get((case, rows, objective)) for objective in OBJECTIVES)
        if plain is None or timed is None:
            continue
        ratios.setdefault(rows, []).append(timed.time / plain.time)
        print(
            f"| {case} | {rows} | {plain.excess:.3f} | {timed.excess:.3f} "
            f"| {plain.first_moves} + {plain.moves} | {timed.first_moves} + {timed.moves} "
            f"| {timed.time / plain.time:.4f} | {plain.cpu_s:.1f} | {timed.cpu_s:.1f} |"
        )
    for rows, all_of in ratios.items():
        mean = np.exp(np.mean(np.log(all_of)))
        print(f"{rows} rows: time over tokens {mean:.4f}, {min(all_of):.4f} to {max(all_of):.4f}")


if __name__ == "__main__":
    main()
