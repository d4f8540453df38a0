"""What a plan costs and what the effort brings: one table of rows with their targets.

    python -m benchmarks.planner.effort [--runs 9] [--unlimited] [--half judged]

Times are of the calling thread's own work. Other programs slow a thread down all the same, so the
column "idle" divides by how much slower than ``--idle-ms`` the greedy plan of 58 x 256 experts was
just before, which took 3.4 ms on the idle machine when the targets were set; give
``--idle-ms 0`` on a machine that is idle. A target that is missed is marked with "!".

The last rows plan on up to 16 windows of recorded routing and are judged on the window after them,
many ranks, few slots. Requests (V2-Lite) and benchmarks (gpt-oss) are split in two halves: choices
were made on one, ``--half judged`` shows the other. FlashLB is there where ``simulations.peers``
has it.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from time import perf_counter, thread_time
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.planner.heldout import DATA, Tokens, history_of, windows
from benchmarks.planner.plan import Case
from eplb import Budget, Placement, Topology, imbalance, plan
from eplb.deepseek import rebalance_experts
from eplb.planner import Plan

V3 = Case(58, 256, 288, 32)
LARGE = (
    ("1,152 slots on 128 ranks", Case(100, 1024, 1152, 128)),
    ("2,048 on 1,024", Case(100, 1024, 2048, 1024)),
    ("1,024 on 1,024", Case(100, 1024, 1024, 1024)),
)
THREE_EACH = Topology.uniform(4, 8, 3)
INF = float("inf")
Found = TypeVar("Found")
Planner = Callable[[Tokens, Topology], Placement]


@dataclass(frozen=True, eq=False)
class Many:
    """Recorded routing on many ranks."""

    name: str
    expert_ids: NDArray[np.int64]  # [L, tokens, K]
    request_len: NDArray[np.int64]
    half: NDArray[np.int64]  # [requests] 0: choices were made on it, 1: judged
    num_experts: int
    topology: Topology
    tokens: int  # of a window


class Report:
    """One table, filled row by row."""

    def __init__(self, idle_ms: float) -> None:
        self.idle_ms = idle_ms
        self.table = Table(box=SIMPLE_HEAD, padding=(0, 1))
        self.table.add_column("row", no_wrap=True)
        for heading in ("ms", "idle", "target", "imbalance", "moves", "more"):
            self.table.add_column(heading, justify="right", no_wrap=True)

    def slowness(self) -> float:
        """How much slower than idle this thread is now."""
        if not self.idle_ms:
            return 1.0
        load = V3.draw()
        return median_ms(lambda: plan(load, V3.topology, policy="greedy"), 5)[0] / self.idle_ms

    def add(self, name: str, ms: tuple[float, float], target: float, *cells: str) -> None:
        """One row of a timed call."""
        missed = "!" if ms[1] > target else ""
        wanted = f"<= {target:g}" if target < INF else ""
        self.table.add_row(name, f"{ms[0]:.1f}", f"{ms[1]:.1f}{missed}", wanted, *cells)


def median_ms(call: Callable[[], Found], runs: int) -> tuple[float, Found]:
    """Of the thread's own time, after a call that is not counted where there are several."""
    if runs > 1:
        call()
    times = []
    for _ in range(runs):
        begin = thread_time()
        found = call()
        times.append((thread_time() - begin) * 1000)
    return float(np.median(times)), found


def plan_row(
    report: Report, name: str, call: Callable[[], Plan], runs: int, target: float = INF
) -> None:
    slow = report.slowness()
    ms, found = median_ms(call, runs)
    after = f"{found.before:.4f} -> {found.after:.4f}"
    cells = after, str(found.num_moves), found.decision.value
    report.add(name, (ms, ms / slow), target, *cells)


def drifted(load: NDArray[np.int64]) -> NDArray[np.int64]:
    rng = np.random.default_rng(1)
    return np.rint(load * rng.lognormal(0, 0.2, load.shape)).astype(np.int64)


def small_rows(report: Report, runs: int) -> None:
    load, topology = V3.draw(), V3.topology
    slow = report.slowness()
    ms, found = median_ms(lambda: rebalance_experts(load, 288, 8, 4, 32), runs)
    held = np.asarray(found[0])
    even = imbalance(load, Placement(held.astype(np.int32), 256), topology).mean()
    report.add("58 x 256, 288/32, drop-in", (ms, ms / slow), 20.0, f"{even:.4f}", "", "8 groups")
    for policy, target in (("greedy", 2.0), ("auto", 4.0)):
        plan_row(report, policy, partial(plan, load, topology, policy=policy), runs, target)
    current = plan(load, topology).target
    plan_row(
        report, "auto, drift", lambda: plan(drifted(load), topology, current=current), runs, 20.0
    )
    sixteen = np.rint(load * np.random.default_rng(2).lognormal(0, 0.3, (16, *load.shape))).astype(
        np.int64
    )
    for name, budget in (
        ("16 windows, time_ms=20", Budget(time_ms=20.0)),
        ("16 windows, default", Budget()),
    ):
        plan_row(report, name, partial(plan, sixteen, topology, budget=budget), 3)


def large_rows(report: Report, unlimited: bool) -> None:
    for name, case in LARGE:
        large_case(report, name, case, unlimited)


def large_case(report: Report, name: str, case: Case, unlimited: bool) -> None:
    load, topology = case.draw(), case.topology
    current, later = plan(load, topology, policy="greedy").target, drifted(load)
    limits = [(Budget(), 1000.0, "")]
    if unlimited:
        limits.append((Budget(time_ms=INF), INF, ", no limit"))
    for budget, target, words in limits:

        def fresh(budget: Budget = budget) -> Plan:
            return plan(load, topology, budget=budget)

        def again(budget: Budget = budget) -> Plan:
            return plan(later, topology, current=current, budget=budget)

        plan_row(report, f"100 x 1,024, {name}{words}", fresh, 1, target)
        plan_row(report, f"drift{words}", again, 1, target)


def thread_rows(report: Report) -> None:
    case = LARGE[1][1]
    load, topology = case.draw(), case.topology
    hashes = {}
    for num_threads in (1, 2, 4):
        begin = perf_counter()
        found = plan(load, topology, budget=Budget(num_threads=num_threads))
        hashes[num_threads] = found.hash
        passed = (perf_counter() - begin) * 1000
        same = "the same plan" if found.hash == hashes[1] else "ANOTHER PLAN"
        name = f"2,048 on 1,024, {num_threads} threads"
        report.table.add_row(name, f"{passed:.0f} wall", "", "", "", "", same)


def traces() -> list[Many]:
    lite = [np.load(DATA / f"dsv2lite_{domain}.npz") for domain in ("intent", "summary")]
    ids = [domain["expert_ids"].astype(np.int64) for domain in lite]
    lengths = [domain["request_len"] for domain in lite]
    ids.append(np.concatenate(ids, axis=1))
    lengths.append(np.concatenate(lengths))
    found = [
        Many(f"V2-Lite {name} 96/32", one, length, np.arange(len(length)) % 2, 64, THREE_EACH, 1024)
        for name, one, length in zip(("intent", "summary", "both"), ids, lengths, strict=True)
    ]
    gpt = np.load(DATA / "gptoss20b_decode.npz")
    one, length = gpt["expert_ids"].astype(np.int64).transpose(1, 0, 2), gpt["request_len"]
    is_mmlu = np.array([str(subject).startswith("mmlu") for subject in gpt["subject"]])
    half = is_mmlu.astype(np.int64)
    gpt_ranks = {"64/32": Topology.uniform(4, 8, 2), "48/16": Topology.uniform(2, 8, 3)}
    return found + [
        Many(f"gpt-oss {name}, {tokens} tokens", one, length, half, 32, topology, tokens)
        for name, topology in gpt_ranks.items()
        for tokens in (1024, 4096)
    ]


def tests_of(trace: Many, half: int, seeds: int) -> Iterator[tuple[Tokens, Tokens]]:
    """(history [T, L, E], the window after it [L, E]) of requests in recorded and drawn orders."""
    ends = np.cumsum(trace.request_len)
    requests = [
        np.arange(end - size, end)
        for end, size, which in zip(ends, trace.request_len, trace.half, strict=True)
        if which == half
    ]
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(requests))
        if seed == 0:
            order = np.arange(len(requests))
        chosen = trace.expert_ids[:, np.concatenate([requests[place] for place in order])]
        load = windows(chosen, trace.tokens, trace.num_experts)
        history = history_of(len(load))
        if history < 2:
            return
        spaced = np.linspace(history, len(load) - 1, min(6, len(load) - history))
        for window in np.unique(np.rint(spaced).astype(int)).tolist():
            yield load[window - history : window], load[window]


def planners() -> dict[str, Planner]:
    """Ours, ours without perturbation, greedy, and FlashLB where it is."""

    def ours(policy: str, budget: Budget | None = None) -> Planner:
        return lambda history, topology: (
            plan(history, topology, policy=policy, budget=budget).target
        )

    found = {"auto": ours("auto"), "auto, 20 ms": ours("auto", Budget(time_ms=20.0))}
    found["greedy"] = ours("greedy")
    try:
        peers = import_module("simulations.peers")
    except ModuleNotFoundError:
        return found
    peers.register_peers()
    return found | {name: ours(name) for name in peers.PEERS if "flash" in name}


def held_out_rows(console: Console, half: int, seeds: int) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("next window, imbalance", no_wrap=True)
    known = planners()
    for heading in ("tests", *known):
        table.add_column(heading, justify="right", no_wrap=True)
    for trace in traces():
        found: dict[str, list[float]] = {name: [] for name in known}
        times: dict[str, list[float]] = {name: [] for name in known}
        for history, following in tests_of(trace, half, seeds):
            for name, planner in known.items():
                begin = thread_time()
                placement = planner(history, trace.topology)
                times[name].append((thread_time() - begin) * 1000)
                ratio = imbalance(following, placement, trace.topology)
                found[name].append(float(ratio.mean()))
        first = np.array(found["auto"])
        cells = []
        for name, ratios in found.items():
            off = np.array(ratios) - first
            error = off.std() / max(len(off) - 1, 1) ** 0.5
            beside = "" if name == "auto" else f" ({off.mean():+.3f} +- {error:.3f})"
            cells.append(f"{np.mean(ratios):.3f}{beside}, {np.median(times[name]):.0f} ms")
        table.add_row(trace.name, str(len(first)), *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--idle-ms", type=float, default=3.4)
    parser.add_argument("--unlimited", action="store_true", help="large problems without a limit")
    parser.add_argument("--half", choices=("chosen", "judged"), default="judged")
    parser.add_argument("--seeds", type=int, default=3, help="orders of requests")
    parser.add_argument("--skip", nargs="*", default=(), help="small, large, threads, heldout")
    options = parser.parse_args()
    console = Console(width=160)
    console.print(f"python {sys.version.split()[0]} numpy {np.__version__}, {os.cpu_count()} CPUs")
    report = Report(options.idle_ms)
    if "small" not in options.skip:
        small_rows(report, options.runs)
    if "large" not in options.skip:
        large_rows(report, options.unlimited)
    if "threads" not in options.skip:
        thread_rows(report)
    console.print(report.table)
    if "heldout" in options.skip:
        return
    if not DATA.is_dir():
        sys.exit(f"skipped: real traces are not at {DATA}: set EPLB_DATA")
    held_out_rows(console, int(options.half == "judged"), options.seeds)


if __name__ == "__main__":
    main()
