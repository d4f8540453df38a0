"""Step time of ranks while experts move: at a fixed pace, and by a step-time budget.

    python -m benchmarks.ranks.pace --runs 3 --budget 0.25

Real ranks over gloo on CPUs decode; the pace is the controller's own (``Pacing``). After
``QUIET_STEPS`` steps without a migration, a random placement of all layers follows. Runs of the two
arms alternate, with the same seeds. The first migrations of each run are left out, in both
arms: the rule begins at the deployment's own pace.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
import typer

from api.demo.workers.build import Rank
from api.demo.workers.host_cache import run_host_cache
from api.demo.workers.plan import DEPLOYMENT, WorkerPlan
from api.processes.children import Parent, preload_modules
from benchmarks.publishing import Publisher
from benchmarks.ranks.plans import POLL_S
from benchmarks.ranks.processes import BenchmarkProcesses, Interrupts
from benchmarks.ranks.rank import Length, decode
from benchmarks.ranks.soak import Soak, serve, wait_until_ready
from benchmarks.ranks.workers import begin_run, plan_of, random_placement
from benchmarks.result_table import Row, show
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.migration.build import Migration, Pace, build_migration
from rebalance.controller.plans.pacing import Pacing
from rebalance.controller.settings import ControllerSettings
from runtime.group.rendezvous import Rendezvous
from telemetry import open_store
from telemetry.store import Event, LoadStore

MODEL = ModelShape(tuple(range(12)), 16, 2, hidden=256, intermediate=512)
NUM_RANKS = 2
TOKENS = 8  # of a rank in each step
QUIET_STEPS = 48
LEFT_OUT = 3  # migrations at the start of a run
PACE = Pace(staging_experts=16, transactions_per_commit=2)
MEASURED = "measured"  # kind of the event: a migration and its ranks' steps
PROGRESS_S = 60.0


@dataclass(frozen=True)
class Arm:
    """One arm of a run."""

    budget: float  # of step time; 0: the pace is fixed
    steps: int
    seed: int


class Measured(NamedTuple):
    """One migration."""

    part: float
    slowdown: float
    p95_before_ms: float
    p95_moving_ms: float
    seconds: float  # from its publication to its commit
    moves: int


class PacedPlans:
    """Makes migrations of all layers at the pace that the controller would give them."""

    def __init__(
        self, store: LoadStore, plan: WorkerPlan, arm: Arm, steps: Callable[[], int]
    ) -> None:
        self._store, self._plan, self._steps = store, plan, steps
        self._settings = ControllerSettings(pace=PACE, step_time_budget=arm.budget)
        self._pacing = Pacing(store)
        self._random = np.random.default_rng(1 + arm.seed)  # 0: of the first placement
        self._last: Migration | None = None
        self._due: int | None = None

    def next(self, base: Placement) -> Migration | None:
        """Lead to a random placement once enough quiet steps were served."""
        if self._due is None:
            self._due = self._steps() + QUIET_STEPS
        if self._steps() < self._due:
            return None
        self._due = None
        self._note_steps()
        plan = self._plan
        target = random_placement(plan, self._random)
        pace = self._pacing.next(plan.run, plan.model.num_layers, self._settings).pace
        plan_id = self._store.next_plan_id()
        self._last = build_migration(base, target, plan.topology, plan_id=plan_id, pace=pace)
        return self._last

    def _note_steps(self) -> None:
        """Write down what the ranks report of the migration before."""
        if self._last is None:
            return
        reports = [state.step_times for state in self._store.rank_states(self._plan.run)]
        found = [one for one in reports if one is not None and one.plan_id == self._last.plan_id]
        judged = [one for one in found if one.slowdown is not None]
        if judged:
            slowdown = median(one.slowdown for one in judged if one.slowdown is not None)
            detail = {
                "plan_id": self._last.plan_id,
                "part": self._last.pace.link_part,
                "slowdown": slowdown,
                "p95_before_ms": median(one.p95_before_ms for one in judged),
                "p95_moving_ms": median(one.p95_moving_ms for one in judged),
                "moves": len(self._last.moves),
            }
            self._store.add_event(MEASURED, detail)


def run_paced(parent: Parent, plan: WorkerPlan, rank: int, arm: Arm) -> None:
    """Serve as one rank of an arm."""

    def publisher(built: Rank) -> Publisher:
        store = open_store(plan.store, DEPLOYMENT)
        plans = PacedPlans(store, plan, arm, lambda: built.passes.steps)
        return Publisher(store, plans.next, poll_s=POLL_S)

    decode(parent, plan, rank, Length(arm.steps), publisher)


def measure(arm: Arm, interrupts: Interrupts) -> list[Measured]:
    """Serve one run, and return its migrations.

    Raises:
        SystemExit: a process failed, in its words; or interrupted before the ranks served.
    """
    rendezvous = Rendezvous()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = plan_of(
            folder, NUM_RANKS, rendezvous.handle, device="cpu", precision="float32", model=MODEL
        )
        plan = replace(plan, tokens_per_rank=TOKENS, staging_experts=PACE.staging_experts)
        store = begin_run(plan)
        stack.callback(store.close)
        processes = BenchmarkProcesses()
        stack.callback(processes.end)
        host_cache = processes.start("host_cache", run_host_cache, plan, 0)
        wait_until_ready(processes, [host_cache], interrupts)
        ranks = [
            processes.start(f"rank {rank}", run_paced, plan, rank, arm) for rank in range(NUM_RANKS)
        ]
        wait_until_ready(processes, ranks, interrupts)
        serve(processes, ranks, Soak(ranks, interrupts, PROGRESS_S))
        host_cache.command("end")
        processes.let_end([*ranks, host_cache])
        return measured(store.events(limit=100_000))


def measured(events: list[Event]) -> list[Measured]:
    """Return the migrations that events describe, in order, less the first ones."""
    times = {
        (event.kind, event.detail["plan_id"]): event.time
        for event in events
        if event.kind in ("publish", "commit")
    }
    found = []
    for event in events:
        if event.kind != MEASURED:
            continue
        detail, plan_id = event.detail, event.detail["plan_id"]
        took_s = times["commit", plan_id] - times["publish", plan_id]
        figures = (float(detail[name]) for name in Measured._fields[:4])
        found.append(Measured(*figures, took_s, int(detail["moves"])))
    return found[LEFT_OUT:]


def rows_of(name: str, runs: list[list[Measured]]) -> list[Row]:
    """Sum up an arm: over all migrations of its runs, and the median of each run."""
    found = [one for run in runs for one in run]
    if not found:
        return [(name, "no migration was measured: serve more steps", "-")]
    slowdowns = sorted(one.slowdown for one in found)
    of_runs = ", ".join(f"{median(one.slowdown for one in run):+.0%}" for run in runs if run)
    before, moving = (
        median(getattr(one, field) for one in found) for field in ("p95_before_ms", "p95_moving_ms")
    )
    seconds, parts = [one.seconds for one in found], [one.part for one in found]
    return [
        (
            f"{name}: p95 of step time, before -> in a migration",
            f"{before:.1f} -> {moving:.1f} ms"
            f" ({len(found)} migrations, {median(one.moves for one in found):.0f} experts each)",
            "-",
        ),
        (
            "  slowdown, median (of each run); worst",
            f"{median(slowdowns):+.0%} ({of_runs}); {slowdowns[-1]:+.0%}",
            "-",
        ),
        (
            "  seconds of a migration, median; longest",
            f"{median(seconds):.2f}; {max(seconds):.2f}",
            "-",
        ),
        ("  part of the pace, median; least", f"{median(parts):g}; {min(parts):g}", "-"),
    ]


def main(
    runs: Annotated[int, typer.Option(help="of each arm")] = 3,
    steps: Annotated[int, typer.Option(help="of a run")] = 3000,
    budget: Annotated[float, typer.Option(help="of the rule's arm")] = 0.25,
) -> None:
    """Print the rows of both arms."""
    found: dict[float, list[list[Measured]]] = {0.0: [], budget: []}
    preload_modules("api.demo.workers.rank", "api.demo.workers.host_cache")
    with Interrupts() as interrupts:
        for seed in range(runs):
            for one in found:
                found[one].append(measure(Arm(one, steps, seed), interrupts))
                if interrupts.found is not None:
                    raise SystemExit(128 + interrupts.found)
                print(f"seed {seed}, budget {one:g}: {len(found[one][-1])} migrations", flush=True)
    show(rows_of("fixed pace", found[0.0]), 58)
    show(rows_of(f"budget {budget:.0%}", found[budget]), 58)


if __name__ == "__main__":
    typer.run(main)
