"""Planning time and balance on loads sized after real models: one table, fixed seeds.

    python -m benchmarks.planner.plan [--runs 7]

"ms" is all of ``eplb.plan``: its checks, figures and gate. "ratio" is that over the plain numpy
greedy on the same load in the same run: the same idea without compiled loops and without the rule
that a rank never holds an expert twice. Times are of the calling thread's own work, so that other
programs disturb them less. Compilation is cached on disk and not counted. A target that is missed
is marked with "!"; targets are for an idle machine of two CPUs.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from time import thread_time

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eplb import Budget, Constraints, ModelShape, Placement, Topology, imbalance, plan
from eplb.planner import Plan
from eplb.precompile import compile_planner
from eplb.search.legality import first_violation

Load = NDArray[np.int64]
DEADLINE_S = 300.0
FIRST_CALL = """
import time
import numpy as np
from eplb import Topology, plan
load = np.random.default_rng(0).integers(1, 1000, (58, 256))
begin = time.thread_time()
plan(load, Topology.uniform(4, 8, 9))
print(time.thread_time() - begin)
"""


@dataclass(frozen=True)
class Case:
    """A model's size and the ranks it is spread over."""

    layers: int
    experts: int
    slots: int
    ranks: int
    load: str = "lognormal"
    groups: int = 1

    @property
    def topology(self) -> Topology:
        """Nodes of eight ranks."""
        nodes = max(1, self.ranks // 8)
        return Topology.uniform(nodes, self.ranks // nodes, self.slots // self.ranks)

    @property
    def model(self) -> ModelShape:
        """The shape as far as placing needs it."""
        layers = tuple(range(self.layers))
        return ModelShape(layers, self.experts, 8, 1, 1, num_expert_groups=self.groups)

    def draw(self) -> Load:
        """Load of seed 0; "jittered" Zipf keeps layers from being copies of one another."""
        rng = np.random.default_rng(0)
        if self.load == "lognormal":
            return np.rint(rng.lognormal(0, 1, (self.layers, self.experts)) * 1e4).astype(np.int64)
        places = np.tile(np.arange(1, self.experts + 1), (self.layers, 1))
        zipf = 1e6 / rng.permuted(places, axis=1) ** 1.2
        if self.load == "jittered":
            zipf *= rng.lognormal(0, 0.3, zipf.shape)
        return np.rint(zipf).astype(np.int64)


@dataclass(frozen=True)
class Goal:
    """What a row is to reach; infinite where nothing was promised."""

    ms: float = np.inf
    balance: float = np.inf
    moved: float = np.inf


V3 = Case(58, 256, 288, 32)
V3_ZIPF = Case(58, 256, 288, 32, "zipf")
V3_JITTERED = Case(58, 256, 288, 32, "jittered")
KIMI = Case(60, 384, 416, 32)
FRESH: tuple[tuple[str, Case, str, float | None, Goal], ...] = (
    ("V3 288/32", V3, "greedy", None, Goal(2, 1.005)),
    ("", V3, "auto", None, Goal(10, 1.0005)),
    ("zipf", V3_ZIPF, "greedy", None, Goal(balance=1.032)),
    ("", V3_ZIPF, "auto", None, Goal(25, 1.0065)),
    ("zipf, jittered", V3_JITTERED, "auto", 15.0, Goal(25, 1.0065)),
    ("", V3_JITTERED, "auto", 60.0, Goal(80, 1.0012)),
    ("Kimi-K2 416/32", KIMI, "greedy", None, Goal(3, 1.0023)),
    ("", KIMI, "auto", None, Goal(12, 1.0005)),
    ("Qwen3-235B 144/16", Case(94, 128, 144, 16), "auto", None, Goal()),
    ("4 nodes, 8 groups", Case(58, 256, 288, 32, groups=8), "auto", None, Goal(15, 1.0675)),
    ("the same, zipf", Case(58, 256, 288, 32, "zipf", 8), "auto", None, Goal(15, 1.70)),
    ("288/144", Case(58, 256, 288, 144), "auto", None, Goal()),
    ("the same, zipf", Case(58, 256, 288, 144, "zipf"), "auto", None, Goal()),
    ("320/320", Case(58, 256, 320, 320), "auto", None, Goal()),
)
GROWTH = (V3, Case(100, 512, 576, 256), Case(100, 1024, 1152, 512), Case(100, 1024, 2048, 1024))
DRIFTS = (
    (V3, 1.05, Goal(15, 1.05, 0.045)),
    (V3, 1.02, Goal(35, 1.02, 0.095)),
    (KIMI, 1.05, Goal()),
    (KIMI, 1.02, Goal()),
    (Case(58, 256, 288, 144), 1.05, Goal()),
)


def numpy_greedy(load: Load, num_slots: int, num_ranks: int) -> NDArray[np.int32]:
    """Replicate the hottest, then pack heaviest first: numpy inside, python loops outside."""
    held = np.empty((len(load), num_ranks, num_slots // num_ranks), dtype=np.int32)
    for layer, tokens in enumerate(load):
        count = np.ones(len(tokens))
        for _ in range(num_slots - len(tokens)):
            count[np.argmax(tokens / count)] += 1
        experts = np.repeat(np.arange(len(tokens)), count.astype(int))
        each = (tokens / count)[experts]
        total, used = np.zeros(num_ranks), np.zeros(num_ranks, dtype=int)
        for item in np.argsort(-each, kind="stable"):
            rank = int(np.argmin(np.where(used < held.shape[2], total, np.inf)))
            held[layer, rank, used[rank]] = experts[item]
            total[rank] += each[item]
            used[rank] += 1
    return held.reshape(len(load), num_slots)


def median_ms(call: Callable[[], object], runs: int) -> float:
    """Of the thread's own time, after one call that is not counted."""
    call()
    times = []
    for _ in range(runs):
        begin = thread_time()
        call()
        times.append((thread_time() - begin) * 1000)
    return float(np.median(times))


def plain_ms(case: Case) -> float:
    load = case.draw()
    return median_ms(lambda: numpy_greedy(load, case.slots, case.ranks), 1)


def cell(figure: float, goal: float, form: str) -> str:
    """A figure, its target beside it, and a mark if it is missed."""
    text = format(figure, form)
    if not np.isfinite(goal):
        return text
    # As printed: 1.00051 meets a target of 1.0005.
    missed = "!" if float(text.rstrip("%")) > float(format(goal, form).rstrip("%")) else ""
    return f"{text}{missed} <= {format(goal, form)}"


def add(
    table: Table, labels: tuple[str, str], ms: tuple[float, float], found: Plan, goal: Goal
) -> None:
    why = first_violation(found.problem, found.target)
    moved = found.num_moves / found.target.slot_to_expert.size
    table.add_row(
        *labels,
        cell(ms[0], goal.ms, ".1f"),
        f"{ms[0] / ms[1]:.3f}",
        cell(found.after, goal.balance, ".4f"),
        f"{np.percentile(found.after_per_layer, 99):.3f}",
        f"{found.lower_bound.mean():.3f}",
        cell(moved, goal.moved, ".1%") if found.problem.current is not None else "-",
        "yes" if why is None else why,
    )


def fresh_rows(table: Table, runs: int) -> None:
    for name, case, policy, time_ms, goal in FRESH:
        load, topology, model = case.draw(), case.topology, case.model
        constraints = Constraints(keep_groups=case.groups > 1)
        budget = Budget(time_ms=time_ms)

        def call(
            load: Load = load,
            topology: Topology = topology,
            model: ModelShape = model,
            policy: str = policy,
            budget: Budget = budget,
            constraints: Constraints = constraints,
        ) -> Plan:
            return plan(
                load, topology, model=model, policy=policy, budget=budget, constraints=constraints
            )

        label = policy if time_ms is None else f"{policy}, time_ms={time_ms:.0f}"
        add(table, (name, label), (median_ms(call, runs), plain_ms(case)), call(), goal)


def drift_rows(table: Table, runs: int) -> None:
    for case, target, goal in DRIFTS:
        load, topology = case.draw(), case.topology
        current = plan(load, topology).target
        rng = np.random.default_rng(1)
        budget = Budget(target_imbalance=target)
        drifted = np.rint(load * rng.lognormal(0, 0.2, load.shape)).astype(np.int64)

        def call(
            load: Load = drifted,
            topology: Topology = topology,
            current: Placement = current,
            budget: Budget = budget,
        ) -> Plan:
            return plan(load, topology, current=current, budget=budget)

        found = call()
        name = f"{case.slots}/{case.ranks} drift 0.2: {found.before:.3f}"
        ms = median_ms(call, runs), plain_ms(case)
        add(table, (name, f"auto to {target}"), ms, found, goal)


def growth_rows(table: Table, runs: int) -> None:
    for case in GROWTH:
        load, topology = case.draw(), case.topology
        ms = median_ms(
            lambda load=load, topology=topology: plan(load, topology, policy="greedy"), runs
        )
        per_slot = ms * 1e6 / (case.layers * case.slots)
        size = f"{case.layers}x{case.experts} {case.slots}/{case.ranks}"
        table.add_row(size, "greedy", f"{ms:.1f}", *("-" * 5), f"{per_slot:.0f} ns a slot")


def first_call_s() -> float:
    ended = subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return float(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    compile_planner()  # else the first runs are interpreted
    console = Console(width=140)
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d} python {sys.version.split()[0]} numpy {np.__version__} "
        f"{platform.machine()}, {os.cpu_count()} CPUs; medians of {runs} runs, one thread"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("case", "planner"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "ratio", "mean", "p99", "bound", "moved", "legal"):
        table.add_column(heading, justify="right", no_wrap=True)
    fresh_rows(table, runs)
    drift_rows(table, runs)
    growth_rows(table, min(runs, 3))
    console.print(table)
    published = np.array([[600, 560, 120, 120, 20, 10, 10, 10]])
    best = plan(published, Topology.uniform(1, 8, 2)).target
    busiest = float(imbalance(published, best, Topology.uniform(1, 8, 2)).mean()) * 1450 / 8
    console.print(f"FlashLB's example, busiest rank: {cell(busiest, 196.67, '.2f')}")
    console.print(f"first call in a new process, seconds: {cell(first_call_s(), 0.5, '.2f')}")


if __name__ == "__main__":
    main()
