"""Kills a rank again and again: from the kill to the next token, and what that time consists of.

    python -m benchmarks.faults.restart [--kills 7] [--seed 1]

Two hosts with two ranks each (``deployments``; needs root). A token's time is that which
ranks write down. The parts end with entries of the journal, which have the store's time:

    agree   the kill to the record of the survivors (``recovery``)
    end     to a launcher's note of the death (``error``): its own ranks have ended, and its delay
            is over, which begins with 0.1 s and doubles with each death within a minute
    meet    to the record of the next run: ranks are forked, and have met (``run``)
    serve   to the first token: experts are loaded
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from threading import Event

from benchmarks.faults.deployments import RANKS, Hosts, TwoHostDeployment
from benchmarks.faults.observing import GRACE_S

PARTS = {"agree": "recovery", "end": "error", "meet": "run"}
STEADY_S, DEADLINE_S, POLL_S = 5.0, 120.0, 0.1


def until_steady(deployment: TwoHostDeployment) -> None:
    """Wait until all ranks have stepped for a while."""
    deadline = since = time.monotonic()
    deadline += DEADLINE_S
    while time.monotonic() - since < STEADY_S:
        deployment.look()
        if not deployment.ranks_serve(GRACE_S):
            since = time.monotonic()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not all ranks stepped for {STEADY_S} s within {DEADLINE_S} s")
        Event().wait(POLL_S)


def restarted(deployment: TwoHostDeployment, rank: int) -> dict[str, float]:
    """Kill a rank; returns the seconds of each part, and of the time without tokens."""
    until_steady(deployment)
    (pid,) = deployment.pids(f"rank {rank}")
    at, ahead_s = time.monotonic(), time.time() - time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until_steady(deployment)
    with closing(deployment.deployment.opened_store()) as store:
        events = [one for one in store.latest_events() if one.time - ahead_s >= at]
    tokens, found, ended = deployment.tokens(), dict[str, float](), at
    for part, kind in PARTS.items():
        of_ranks = [one for one in events if one.detail.get("where", "ranks") == "ranks"]
        times = [one.time - ahead_s for one in of_ranks if one.kind == kind]
        found[part], ended = min(times) - ended, min(times)
    first = min(one for one in tokens if one > ended)
    last = max(one for one in tokens if one < first)
    return found | {"serve": first - ended, "killed": first - at, "no tokens": first - last}


def main() -> None:
    """Kill ranks, and print a table of the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rng, rows = random.Random(given.seed), list[dict[str, float]]()
    with ExitStack() as stack:
        hosts = Hosts(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        deployment = TwoHostDeployment(stack, hosts, given.seed)
        print("| kill | rank | load | agree | end | meet | serve | kill to token | no tokens |")
        print("|" + "---:|" * 9)
        for number in range(given.kills):
            rank, load = rng.choice(RANKS), os.getloadavg()[0]
            rows.append(restarted(deployment, rank))
            figures = " | ".join(f"{value:.2f}" for value in rows[-1].values())
            print(f"| {number + 1} | {rank} | {load:.1f} | {figures} |", flush=True)
    for name, of in (("p50", median), ("max", max)):
        figures = " | ".join(f"{of([row[part] for row in rows]):.2f}" for part in rows[0])
        print(f"| {name} | | | {figures} |")


if __name__ == "__main__":
    main()
