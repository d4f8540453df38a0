"""Ranks join and leave while the others serve: how long the longest step is, and from when on.

    python -m benchmarks.faults.membership [--ranks 4] [--joins 20] [--seed 1]
    python -m benchmarks.faults.membership --ranks 8 --scale 4,6,3

Without ``--scale`` a rank by the seed is killed; the launcher starts it again, and it joins the
others. With it the deployment starts with the first number of ranks and is asked for the others in
turn. One host, real processes, as ``benchmarks/faults/serve_on.py``.

The times of steps are those that ranks write down themselves. Steps are due every 50 ms, so a
longer interval is a pause.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from benchmarks.faults.serve_on import DEADLINE_S, POLL_S, OneHost, percentile
from telemetry.state.events import REGROUPED

BEFORE_S, AFTER_S = 1.0, 2.0  # seconds of steps before and after a change that are compared
SETTLED_S = 0.5  # after a death: its pause is not that of the join


def regrouped(host: OneHost, since: float) -> dict[str, Any]:
    """Wait for the next planned change; its event."""
    deadline = time.monotonic() + DEADLINE_S
    with closing(host.prepared.deployment.opened_store()) as store:
        while time.monotonic() < deadline:
            for one in store.latest_events():
                if one.kind == REGROUPED and one.time >= since:
                    return dict(one.detail) | {"at": one.time}
            Event().wait(POLL_S)
    words = {name: one.last_words() for name, one in host.processes.items()}
    raise TimeoutError(f"the group did not change: {words}")


def intervals(host: OneHost, ranks: set[int], since: float, until: float) -> list[float]:
    """Seconds between two steps of a rank, of those that served before."""
    found = []
    for rank in ranks:
        times = [at for at in host.times(rank) if since <= at < until]
        found += [after - before for before, after in pairwise(times)]
    return found


def change(
    host: OneHost, before: set[int], wall: float, began: float, since: float
) -> dict[str, float]:
    """Follow one change of the group; its figures.

    Args:
        host: the deployment.
        before: ranks that serve.
        wall: seconds since the epoch, before the change.
        began: monotonic time of what leads to it.
        since: monotonic time from which on steps are looked at.
    """
    event = regrouped(host, wall)
    host.ranks = set(event["survivors"])
    Event().wait(AFTER_S)
    host.until_steady()
    stayed = before & host.ranks
    found = intervals(host, stayed, since, time.monotonic())
    usual = intervals(host, stayed, began - BEFORE_S, began)
    joined = event["joined"]
    firsts = [min(at for at in host.times(rank) if at > since) for rank in joined]
    return {
        "ranks": len(host.ranks),
        "load": os.getloadavg()[0],
        "median step": median(usual),
        "longest before": max(usual),
        "longest step": max(found),
        **event["seconds"],
        "first token": max(firsts) - began if joined else 0.0,
    }


def joins(folder: Path, given: Any, rng: random.Random) -> tuple[list[dict[str, float]], Any]:
    """Kill a rank, and have it join again, so many times."""
    rows = []
    with ExitStack() as stack:
        host = OneHost(stack, folder, given.ranks, given)
        for _ in range(given.joins):
            host.until_steady()
            rank = rng.choice(sorted(host.ranks))
            wall, at = time.time(), time.monotonic()
            os.kill(host.pid(rank), signal.SIGKILL)
            host.ranks.discard(rank)
            while not all(host.times(r)[-1] > at + SETTLED_S for r in host.ranks):
                Event().wait(POLL_S)
            rows.append(change(host, set(host.ranks), wall, at, at + SETTLED_S))
            show(rows[-1], len(rows) == 1)
        return rows, host.num_wrong()


def scale(folder: Path, given: Any) -> tuple[list[dict[str, float]], Any]:
    """Ask for one number of ranks after the other."""
    rows, (first, *others) = [], map(int, given.scale.split(","))
    with ExitStack() as stack:
        host = OneHost(stack, folder, given.ranks, given, wanted=range(first))
        for number, count in enumerate(others):
            host.until_steady()
            wall, at, before = time.time(), time.monotonic(), set(host.ranks)
            host.want(range(count), f"change {number}")
            rows.append(change(host, before, wall, at, at))
            show(rows[-1], number == 0)
            if host.ranks != set(range(count)):
                raise RuntimeError(f"ranks {host.ranks} serve, expected {count}")
        return rows, host.num_wrong()


def show(row: dict[str, float], is_first: bool) -> None:
    """Print a row of the table."""
    if is_first:
        print("| " + " | ".join(row) + " |")
        print("|" + "---:|" * len(row))
    print("| " + " | ".join(f"{value:.3g}" for value in row.values()) + " |", flush=True)


def main() -> None:
    """Change the ranks that serve, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--joins", type=int, default=20)
    parser.add_argument("--scale", default="", help="numbers of ranks, for example 4,6,3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--silence", type=float, default=0.0, help="agent.silence_s")
    given = parser.parse_args()
    given.restarts, given.device = given.joins, "cpu"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["EPLB_SECRET"] = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "life"
        rng = random.Random(given.seed)
        rows, checked = scale(folder, given) if given.scale else joins(folder, given, rng)
    for part, words in ((0.5, "p50"), (1.0, "max")):
        shown = [f"{percentile([row[key] for row in rows], part):.3g}" for key in rows[0]]
        print(f"| {words}: " + " | ".join(shown) + " |")
    print(f"{checked[0]} checked steps, {checked[1]} wrong")


if __name__ == "__main__":
    main()
