"""Processor time of one turn of the controller, 58 x 256 experts on 320 ranks.

    python -m benchmarks.controller.turn [--stores sqlite redis] [--windows 40]

A window has one sample of each rank. Each is written before the turn and not measured; the turn
reads and folds them, judges, plans and notes. The imbalance is that of each window under what
serves in it, mean over layers, from the fifth on. Processor time is of this process with all its
threads; that of a Redis server is shown beside it. The load drifts, and windows are drawn from it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.controller.loads import drifting
from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.problem import SETTLED_WINDOWS
from eplb.core.topology import Topology
from eplb.decision.triggers import TriggerRules
from eplb.measure import imbalance
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.planner import plan
from rebalance.controller.loop import Controller, ControllerSettings
from rebalance.controller.plans.planner_request import PlannerRequest
from telemetry import open_store
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisProcess

LAYERS, EXPERTS, RANKS, TOP_K, WINDOW_STEPS = 58, 256, 320, 8, 16
MODEL = ModelShape(tuple(range(3, 3 + LAYERS)), EXPERTS, TOP_K, 7168, 2048)
TICKS = os.sysconf("SC_CLK_TCK")


class Ranks:
    """What the ranks of a deployment would write to its store."""

    def __init__(
        self,
        store: StateStore,
        topology: Topology,
        first: Placement,
        model: ModelShape = MODEL,
        clock: Clock = time.time,
    ) -> None:
        self._store, self._topology, self._clock, self._window = store, topology, clock, 0
        described = model_to_dict(model), topology_to_dict(topology)
        store.commit(first, expected=None, reason="start")
        store.begin_run(RunInfo("run", clock(), *described, WINDOW_STEPS))
        for rank in range(topology.num_ranks):
            self.report(rank, 0)

    def report(self, rank: int, generation: int) -> None:
        """Report a rank that serves a generation at the step of the latest window."""
        step = self._window * WINDOW_STEPS
        state = RankState(
            "run", rank, self._clock(), generation, step, "idle", 0, 0, 0, weights_version=0
        )
        self._store.report(state)

    def serve(self, tokens: NDArray[np.int64]) -> float:
        """Report a window [L, E], and commit what is open, as after a swap; its imbalance."""
        committed, opened = self._store.committed(), self._store.published()
        assert committed is not None, "the first placement is"
        if opened is not None:
            base, plan_id = opened.base.generation, opened.plan_id
            self._store.commit(opened.target, expected=base, plan_id=plan_id, reason="swapped")
        placement = committed.placement if opened is None else opened.target
        held = placement.slot_to_expert
        of_slot = np.take_along_axis(tokens, np.maximum(held, 0), axis=1) * placement.slot_share
        first, window = self._window * WINDOW_STEPS, self._window
        ends = (first, first + WINDOW_STEPS - 1, "mixed", placement.generation)
        self._store.append(
            [
                LoadSample(
                    self._store.deployment,
                    "run",
                    rank,
                    window,
                    self._clock(),
                    *ends,
                    held[:, here],
                    of_slot[:, here].astype(np.int64),
                )
                for rank in range(self._topology.num_ranks)
                for here in (self._topology.slots_on(rank),)
            ]
        )
        self._window += 1
        return float(imbalance(tokens, placement, self._topology).mean())


def server_seconds(pid: int | None) -> float:
    """Processor time of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def stores(kinds: list[str], stack: ExitStack) -> Iterator[tuple[str, str, int | None]]:
    """Kind, address and server of each store."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if "sqlite" in kinds:
        yield "SQLite", f"sqlite:{folder / 'store.sqlite'}", None
    if "redis" in kinds:
        server = stack.enter_context(RedisProcess(folder / "redis"))
        assert server.process is not None, "it was started"
        yield "Redis", server.url, server.process.pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", nargs="+", default=["sqlite", "redis"])
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--slots", type=int, default=2, help="of each rank")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    topology = Topology.uniform(num_nodes=40, ranks_per_node=8, slots_per_rank=given.slots)
    load = drifting(given.seed, given.windows, LAYERS, EXPERTS, tokens=WINDOW_STEPS * RANKS * 128)
    usual = ControllerSettings()
    cases = {
        "each window is planned on": usual,
        "no trigger is due": replace(usual, triggers=TriggerRules(interval_s=1e9)),
        "each window, min_domains = 2": replace(usual, request=PlannerRequest(min_domains=2)),
    }
    first = plan(load[0], topology, model=MODEL, policy="contiguous").target.with_generation(0)
    print(
        f"python {sys.version.split()[0]}, numpy {np.__version__}, {LAYERS} x {EXPERTS}, {RANKS} "
        f"ranks x {given.slots} slots, {given.windows} windows, seed {given.seed}, load average "
        f"{os.getloadavg()[0]:.1f}\n"
        "| store | turns | processor ms: median | p99 | most | of it the plan: median | server ms: "
        "median | imbalance | decisions |\n|---|---|---|---|---|---|---|---|---|"
    )
    with ExitStack() as stack:
        for kind, url, pid in stores(given.stores, stack):
            for number, (name, settings) in enumerate(cases.items()):
                if given.only not in name:
                    continue
                with closing(open_store(url, f"turn-{number}")) as store:
                    print(row(kind, name, store, settings, topology, first, load, pid), flush=True)


def row(
    kind: str,
    name: str,
    store: StateStore,
    settings: ControllerSettings,
    topology: Topology,
    first: Placement,
    load: NDArray[np.int64],
    pid: int | None,
) -> str:
    """Measure one case; the first turn, which folds what is there and loads kernels, apart."""
    ranks = Ranks(store, topology, first)
    # Its clock tells how long a plan takes: by processor time here.
    controller = Controller(store, settings, monotonic=time.process_time)
    ranks.serve(load[0])
    controller.turn()
    own, of_server, served = [], [], []
    for tokens in load[1:]:
        served.append(ranks.serve(tokens))
        gc.collect()
        server, begun = server_seconds(pid), time.process_time()
        controller.turn()
        own.append(1e3 * (time.process_time() - begun))
        of_server.append(1e3 * (server_seconds(pid) - server))
    plans = [event.detail for event in store.events() if event.kind == "plan"]
    decided = [one["decision"] for one in plans]
    took = [1e3 * one["plan_seconds"] for one in plans[1:]]
    plan_ms = f"{np.median(took):.0f}" if took else "-"
    counts = ", ".join(f"{decided.count(one)} {one}" for one in sorted(set(decided)))
    p50, p99 = np.quantile(own, [0.5, 0.99])
    server_ms = f"{np.median(of_server):.0f}" if pid else "-"
    figures = f"{len(own)} | {p50:.0f} | {p99:.0f} | {max(own):.0f} | {plan_ms} | {server_ms}"
    figures += f" | {np.mean(served[SETTLED_WINDOWS:]):.4f}"
    return f"| {kind}, {name} | {figures} | {counts} |"


if __name__ == "__main__":
    main()
