"""Eight ranks on two hosts that rebalance at every chance, for half an hour, with Redis between.

    python -m benchmarks.faults.hosts_soak [--minutes 30] [--ranks 8] [--seed 1] [--json FILE]

Two network namespaces (``deployments``; needs root). The gate is open, a plan takes one
window, and host caches keep eight records, so that experts come from ranks and caches of the other
host too. Compared are sampled outputs of all ranks, samples that ranks cut with those that the
store took, what served in each step on all ranks, and memory, open files and files on disk of the
four quarters.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from benchmarks.faults.deployments import Hosts, TwoHostDeployment
from benchmarks.faults.injected import generation_of
from benchmarks.faults.observing import GRACE_S, gaps
from benchmarks.faults.paced_engine import STEP_VARIABLE, different_maps, served_in
from benchmarks.result_table import Row, keep, show
from telemetry.state.redis_address import parse_address
from telemetry.state.redis_link import RedisLink
from tests.support.sessions import processes_of

GIVEN: dict[str, Any] = {
    "planner.target_imbalance": 1.0,
    "planner.plan_windows": 1,
    "controller.back_off_s": 0.1,
    "host_cache.records": 8,
    "telemetry.keep_samples_s": 120.0,  # so that the store is full early
    "telemetry.keep_events": 500,
}
START_S, END_S, READ_EVERY_S = 180.0, 120.0, 10.0
WIDTH = 34


def usage(deployment: TwoHostDeployment) -> dict[str, int]:
    """Memory that no file is behind, in KiB, and open files of each process; what hosts hold."""
    found = Counter[str]()
    for name, one in deployment.processes.items():
        for pid, title in processes_of(one.process.pid).items() if one.process else ():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            except (FileNotFoundError, ProcessLookupError):
                continue
            (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
            found[f"{name}: {title}, KiB"] += int(line.split()[1])
            found[f"{name}: {title}, open files"] += num_files
    for host, path in enumerate(deployment.hosts.state_dirs):
        files = [one for one in path.rglob("*") if one.is_file()]
        found[f"host {host}: state folder, files"] = len(files)
        found[f"host {host}: state folder, bytes"] = sum(one.stat().st_size for one in files)
    with closing(RedisLink(parse_address(deployment.store))) as link:
        info = link.ask("", "INFO")
    found["redis: used memory, KiB"] = int(info["used_memory"]) // 1024
    found["redis: connections"] = int(info["connected_clients"])
    found["redis: connections so far"] = int(info["total_connections_received"])
    return found


def usage_rows(readings: list[dict[str, int]]) -> list[Row]:
    """Medians of each quarter, and the change from the second to the last."""
    rows, size = list[Row](), max(1, len(readings) // 4)
    quarters = [readings[at : at + size] or readings for at in range(0, 4 * size, size)]
    for name in sorted(set().union(*readings)):
        found = [round(median(one.get(name, 0) for one in of)) for of in quarters]
        shown = " -> ".join(f"{one:,}" for one in found)
        rows.append((f"  {name}", f"{shown} ({found[3] - found[1]:+,})", "flat"))
    return rows


def samples(deployment: TwoHostDeployment) -> tuple[int, int, Counter[str]]:
    """Samples that ranks cut, samples that the store took, and bytes of moves by source."""
    figures = [json.loads(p.read_text()) for p in deployment.prepared.engine.figures.glob("*.json")]
    with closing(deployment.deployment.opened_store()) as store:
        runs = {one["run"] for one in figures}
        taken = sum(sum(store.sample_counts(run).values()) for run in runs)
    sources = Counter[str]()
    for one in figures:
        sources.update(one["bytes_by_source"])
    return sum(one["samples"] for one in figures), taken, sources


def soak(deployment: TwoHostDeployment, minutes: float) -> list[Row]:
    """Serve for a time, end all ranks together, and give the rows."""
    begun, deadline = time.monotonic(), time.monotonic() + START_S
    while not deployment.ranks_serve(GRACE_S):
        if time.monotonic() > deadline:
            words = {name: one.last_words() for name, one in deployment.processes.items()}
            raise SystemExit(f"not all ranks served within {START_S:g} s: {words}")
        Event().wait(0.5)
    started, readings, loads = time.monotonic(), list[dict[str, int]](), list[float]()
    while (now := time.monotonic()) < started + 60 * minutes:
        Event().wait(min(READ_EVERY_S, started + 60 * minutes - now))
        for name, one in deployment.processes.items():
            if not one.is_up:
                raise SystemExit(f"{name} ended: {one.last_words()}")
        readings.append(usage(deployment))
        loads.append(os.getloadavg()[0])
        deployment.read_checks()
        done = f"{(time.monotonic() - started) / 60:.1f} min, load {loads[-1]:.1f}"
        wrong = f"{deployment.num_wrong()} wrong of {len(deployment.checks)}"
        print(f"{done}: {wrong}", file=sys.stderr, flush=True)
    ended = time.monotonic()
    with closing(deployment.deployment.opened_store()) as store:
        num_rebalances = generation_of(store)
    for host in (1, 0):  # the end of one launcher's ranks is that of all
        launcher = deployment.processes[f"launch-{host}"].process
        assert launcher is not None, "it was up"
        if host == 1:
            launcher.terminate()
        launcher.wait(END_S)
    cut, taken, sources = samples(deployment)
    served = served_in(deployment.hosts.tokens)
    of_step, told = defaultdict[int, set[int]](set), different_maps(served)
    groups = {(one.run, one.membership) for one in served}
    for one in served:
        of_step[one.step].add(one.rank)
    ranks_of_steps = Counter(map(len, of_step.values()))
    deployment.read_checks()
    errors = [one.max_error for one in deployment.checks]
    stalls = [b - a for a, b in gaps(deployment.tokens(), started, ended, 1.0)]
    moved = ", ".join(f"{name} {n / 1e6:.1f} MB" for name, n in sorted(sources.items()))
    return [
        ("served", f"{ended - started:.0f} s, {len(of_step)} steps", "-"),
        ("start", f"{started - begun:.0f} s", "-"),
        ("load, median / largest", f"{median(loads):.1f} / {max(loads):.1f}", "-"),
        ("rebalances", f"{num_rebalances}", "-"),
        ("bytes moved, by source", moved, "-"),
        ("wrong outputs", f"{deployment.num_wrong()} of {len(errors)} compared steps", "0"),
        ("largest error, relative", f"{max(errors):.1e}", "1e-4"),
        ("samples lost", f"{cut - taken} of {cut}", "0"),
        ("different maps", f"{told or 0}", "0"),
        ("groups of ranks: more are false alarms", f"{len(groups)}", "1"),
        ("steps by ranks that served them", f"{dict(ranks_of_steps)}", "all by all"),
        ("gaps without a token, > 1 s", f"{[round(one, 1) for one in stalls]}", "-"),
        *usage_rows(readings),
    ]


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step", type=float, default=0.1, help="seconds from a step to the next")
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ[STEP_VARIABLE] = str(given.step)
    with ExitStack() as stack:
        hosts = Hosts(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        # With the default of agent.silence_s: a rank that is taken for dead is a false alarm.
        settings = GIVEN | {"topology.ranks_per_node": given.ranks // 2, "agent.serve_on": True}
        rows = soak(TwoHostDeployment(stack, hosts, given.seed, settings), given.minutes)
    show(rows, WIDTH)
    keep(rows, given.json)


if __name__ == "__main__":
    main()
