"""Planning time and balance on loads sized after real models: one table, fixed seed.

    python benchmarks/plan.py [--runs 7]

"ms" times the policy; "plan ms" is the whole call, with its checks, figures and gate. The
plain numpy greedy beside them is the same idea without compiled loops and the rule that a
rank never holds an expert twice. Compilation is not counted; it is cached on disk. The mean and
p99 that follow are imbalance over layers. The planner runs on one thread.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eplb import Budget, ModelShape, Placement, Problem, Topology, lower_bound, plan
from eplb.balance import imbalance
from eplb.load import as_history
from eplb.placement import EMPTY, duplicate_replicas
from eplb.policies import POLICIES

Load = NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """A model's size and the ranks it is spread over."""

    name: str
    layers: int
    experts: int
    slots: int
    ranks: int
    groups: int = 1
    load: str = "lognormal"

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


CASES = (
    Case("DeepSeek-V3", 58, 256, 288, 32),
    Case("DeepSeek-V3 zipf", 58, 256, 288, 32, load="zipf"),
    Case("DeepSeek-V3 groups", 58, 256, 288, 32, groups=8),
    Case("DeepSeek-V3 groups zipf", 58, 256, 288, 32, groups=8, load="zipf"),
    Case("DeepSeek-V3 EP144", 58, 256, 288, 144),
    Case("Kimi-K2", 60, 384, 416, 32),
    Case("Qwen3-235B", 94, 128, 144, 16),
)


def draw(case: Case, seed: int) -> Load:
    rng = np.random.default_rng(seed)
    if case.load == "zipf":
        ranks = np.tile(np.arange(1, case.experts + 1), (case.layers, 1))
        return np.rint(1e6 / rng.permuted(ranks, axis=1) ** 1.2).astype(np.int64)
    return np.rint(rng.lognormal(0, 1, (case.layers, case.experts)) * 1e4).astype(np.int64)


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


def timed(call: Callable[[], object], runs: int) -> tuple[float, float]:
    """(median, p99) in milliseconds, after one call that is not counted."""
    call()
    times = []
    for _ in range(runs):
        begin = perf_counter()
        call()
        times.append((perf_counter() - begin) * 1000)
    return float(np.median(times)), float(np.percentile(times, 99))


def row(
    table: Table,
    labels: tuple[str, str],
    times: tuple[tuple[float, float], tuple[float, float] | None],
    judged: tuple[Load, Placement, Topology],
    base: Placement | None = None,
) -> None:
    load, placement, topology = judged
    ratio = imbalance(load, placement, topology)
    moved = "-"
    if base is not None:
        new = base.slot_to_expert != placement.slot_to_expert
        moved = f"{(new & (placement.slot_to_expert != EMPTY)).mean():.1%}"
    policy, whole = times
    table.add_row(
        *labels,
        f"{policy[0]:.1f}",
        f"{policy[1]:.1f}",
        f"{whole[0]:.1f}" if whole is not None else "-",
        f"{ratio.mean():.4f}",
        f"{np.percentile(ratio, 99):.3f}",
        f"{lower_bound(load, topology).mean():.3f}",
        str(len(duplicate_replicas(placement, topology))),
        moved,
    )


def run_case(table: Table, case: Case, runs: int) -> None:
    load, topology, model = draw(case, seed=0), case.topology, case.model
    problem = Problem(as_history(load), topology, model)
    assert problem.scaled.size, "scaled is cached before anything is timed"
    slow = timed(lambda: numpy_greedy(load, case.slots, case.ranks), min(runs, 2))
    plain = Placement(numpy_greedy(load, case.slots, case.ranks), case.experts)
    row(table, (case.name, "numpy greedy, global"), (slow, None), (load, plain, topology))
    for policy in ("greedy", "auto"):
        target = plan(load, topology, model=model, policy=policy).target
        times = (
            timed(lambda name=policy: POLICIES[name](problem), runs),
            timed(lambda name=policy: plan(load, topology, model=model, policy=name), runs),
        )
        row(table, ("", f"{policy}, fresh"), times, (load, target, topology))
    current = plan(load, topology, model=model).target
    rng = np.random.default_rng(1)
    drifted = np.rint(load * rng.lognormal(0, 0.2, load.shape)).astype(np.int64)
    row(table, ("", "drift 0.2, stale"), ((0, 0), None), (drifted, current, topology), current)
    for goal in (1.05, 1.02):
        again = Problem(
            as_history(drifted), topology, model, current, Budget(target_imbalance=goal)
        )
        assert again.scaled.size, "scaled is cached before anything is timed"
        target = POLICIES["auto"](again)
        times = (
            timed(lambda again=again: POLICIES["auto"](again), runs),
            timed(
                lambda again=again: plan(
                    drifted, topology, model=model, current=current, budget=again.budget
                ),
                runs,
            ),
        )
        row(table, ("", f"auto to {goal}"), times, (drifted, target, topology), current)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    console = Console(width=118)
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d} python {sys.version.split()[0]} numpy {np.__version__} "
        f"{platform.machine()}, {os.cpu_count()} CPUs; median and p99 of {runs} runs, one thread"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("case", "planner"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "p99", "plan ms", "mean", "p99", "bound", "double", "moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in CASES:
        run_case(table, case, runs)
    console.print(table)


if __name__ == "__main__":
    main()
