"""Memory of a controller that moves at every chance, and of a service that is asked, by windows.

    python -m benchmarks.controller.memory [--windows 12000] [--trace] [--json FILE]

Ranks of ``eplb demo``'s model (3 x 16 experts on 8 ranks) are written to a Redis: a window of 16
steps, then a turn of the controller in a process of its own, which publishes a plan, then the
commit of the ranks. A service in another process is asked as by an open page. Each process takes a
window for ``--window-s`` seconds, so that an hour of windows passes in minutes; ages, minutes and
pruning follow that clock. Shown is memory that no file is behind (``RssAnon``), by eighths.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from api.app import create_app
from api.http.server import HttpService
from api.processes.commands import settle
from benchmarks.controller.loads import drifting
from benchmarks.controller.turn import WINDOW_STEPS, Ranks
from benchmarks.result_table import Row, keep, show
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.planner import plan
from rebalance.controller.loop import Controller, ControllerSettings
from telemetry.load.pruning import Retention
from telemetry.state.redis import RedisBackend
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisProcess

MODEL = ModelShape((0, 1, 2), 16, 2, 64, 32)
RANKS, SLOTS, DEPLOYMENT = 8, 4, "memory"
ASKED_EVERY = {"state": 2, "heat": 4, "history?seconds=900&points=300": 5, "events?latest=100": 5}
ASKED_EVERY |= {"imbalance": 5, "placements?limit=2": 20, "ranks": 5, "anomalies?limit=50": 20}
READ_EVERY = 50  # windows


def resident_kib() -> int:
    """Memory of this process that no file is behind."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1])


def reading(trace: bool) -> dict[str, Any]:
    """What one process holds now."""
    found: dict[str, Any] = {"KiB": resident_kib(), "blocks": sys.getallocatedblocks()}
    if trace:
        gc.collect()
        every = tracemalloc.take_snapshot().statistics("lineno")
        found["traced"] = {str(one.traceback): (one.size, one.count) for one in every[:4000]}
    return found


def serve_process(
    made: Callable[[str, Callable[[], float]], Any],
    url: str,
    now: Any,
    link: Connection,
    trace: bool,
) -> None:
    """Make the part of a process, and take a turn or give a reading as it is asked."""
    if trace:
        tracemalloc.start(1)
    begin, turn = made(url, lambda: float(now.value))
    settle()
    link.send(begin)
    while (asked := link.recv()) != "end":
        if asked == "read":
            link.send(reading(trace))
        else:
            turn()
            link.send(None)
    os._exit(0)


def controller_part(url: str, clock: Callable[[], float]) -> Any:
    """A controller that moves at every chance."""
    store = StateStore(RedisBackend(url, DEPLOYMENT, clock=clock))
    usual = ControllerSettings()
    settings = replace(
        usual,
        cost=replace(usual.cost, pay_back_s=1e9),
        budget=replace(usual.budget, target_imbalance=1.0),
        plan_windows=1,
        back_off_s=0.1,
        retention=Retention(keep_samples_s=120.0, keep_events=500),
    )
    return None, Controller(store, settings, clock=clock).turn


def service_part(url: str, clock: Callable[[], float]) -> Any:
    """A service on a port of its own."""
    app = create_app(StateStore(RedisBackend(url, DEPLOYMENT, clock=clock)), is_watching=False)
    (one,) = app.state.deployments.all()
    one.monitor.clock = clock
    service = HttpService(app)
    service.start()
    return service.url, lambda: None


class Process:
    """A process of the deployment, and its readings."""

    def __init__(
        self, name: str, made: Callable[..., Any], url: str, now: Any, trace: bool
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        given = (made, url, now, theirs, trace)
        self._process = context.Process(target=serve_process, args=given, name=name, daemon=True)
        self._process.start()
        self.name, self.begun = name, self._link.recv()
        self.readings: list[dict[str, Any]] = []

    def turn(self) -> None:
        """Have it take a turn."""
        self._link.send("turn")
        self._link.recv()

    def read(self) -> None:
        """Take a reading of it."""
        self._link.send("read")
        self.readings.append(self._link.recv())

    def end(self) -> None:
        """End it."""
        self._link.send("end")
        self._process.join()

    def rows(self, hours: float) -> list[Row]:
        """Its medians by eighths, and its rises of each quarter's hour."""
        rows, size = list[Row](), len(self.readings) // 8
        for what in ("KiB", "blocks"):
            of = [
                round(median(one[what] for one in self.readings[at : at + size]))
                for at in range(0, 8 * size, size)
            ]
            shown = " -> ".join(f"{one:,}" for one in of)
            an_hour = (of[7] - of[3]) / (hours / 2)
            rows.append((f"{self.name}, {what}", f"{shown} ({an_hour:+,.0f} an hour)", "flat"))
        if "traced" in self.readings[-1]:
            half, last = (self.readings[at]["traced"] for at in (len(self.readings) // 2, -1))
            grown = {
                line: (size - half.get(line, (0, 0))[0], count - half.get(line, (0, 0))[1])
                for line, (size, count) in last.items()
            }
            for line, (size, count) in sorted(grown.items(), key=lambda one: -one[1][0])[:12]:
                rows.append((f"  {line[-60:]}", f"{size:+,} bytes, {count:+,} blocks", "-"))
        return rows


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=12_000)
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--trace", action="store_true", help="what has grown, by line of code")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args()
    topology = Topology.uniform(num_nodes=2, ranks_per_node=RANKS // 2, slots_per_rank=SLOTS)
    load = drifting(given.seed, 512, 3, 16, tokens=WINDOW_STEPS * RANKS * 128)
    first = plan(load[0], topology, model=MODEL, policy="contiguous").target.with_generation(0)
    now = multiprocessing.get_context("spawn").Value("d", time.time())
    with ExitStack() as stack:
        server = stack.enter_context(
            RedisProcess(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        )

        def clock() -> float:
            return float(now.value)

        store = stack.enter_context(
            closing(StateStore(RedisBackend(server.url, DEPLOYMENT, clock=clock)))
        )
        ranks = Ranks(store, topology, first, MODEL, clock)
        controller, service = (
            Process(name, made, server.url, now, given.trace)
            for name, made in (("controller", controller_part), ("service", service_part))
        )
        client = stack.enter_context(httpx.Client(base_url=f"{service.begun}/api/v1/", timeout=60))
        begun = time.monotonic()
        for window in range(given.windows):
            now.value += given.window_s
            ranks.serve(load[window % len(load)])
            serving = store.committed()
            assert serving is not None, "the first placement is"
            for rank in range(RANKS):
                ranks.report(rank, serving.placement.generation)
            controller.turn()
            for path, every in ASKED_EVERY.items():
                if window % every == 0:
                    client.get(path).raise_for_status()
            if window % READ_EVERY == READ_EVERY - 1:
                controller.read()
                service.read()
                if window % 1000 == 999:
                    kib = [one.readings[-1]["KiB"] for one in (controller, service)]
                    print(
                        window + 1,
                        f"{time.monotonic() - begun:.0f} s",
                        kib,
                        file=sys.stderr,
                        flush=True,
                    )
        moves = store.committed()
        rows: list[Row] = [
            ("windows", f"{given.windows}, {given.windows * given.window_s / 3600:.1f} h", "-"),
            ("rebalances", str(moves and moves.placement.generation), "-"),
            ("load average", f"{os.getloadavg()[0]:.1f}", "-"),
        ]
        for one in (controller, service):
            rows += one.rows(given.windows * given.window_s / 3600)
            one.end()
    show(rows, 34)
    keep(rows, given.json)


if __name__ == "__main__":
    main()
