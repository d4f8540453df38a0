"""Two faults at once in a deployment whose survivors serve on: does it serve, and rightly?

    python -m benchmarks.faults.serve_on_pairs --log pairs.jsonl [--count 200] [--seed 1]

The deployment of ``serve_on``: one host, real processes, SQLite. Every case kills a rank, and a
second fault comes shortly before or after it, by the seed:

    rank         another rank is killed, up to half a second later
    stage        another rank is killed once the store has the record of the recovery, while the
                 survivors form their group, load experts, commit or begin their first pass
    controller   the controller is killed
    cache        the host cache is killed, and started again after a second
    store        the store is locked for up to two seconds, and takes nothing

A case is over when exactly the ranks that have a process have stepped for a while; it is a line of
the log, and a case that is in the log is not run again. ``served on``: no other process was started
for a rank. ``gap``: the longest time without a token of any rank. After each case outputs are
compared with a reference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from benchmarks.faults.observing import gaps
from benchmarks.faults.paced_engine import tokens_of
from benchmarks.faults.pairs import note, read
from benchmarks.faults.serve_on import DEADLINE_S, GRACE_S, OneHost
from telemetry.state.events import MEMBERSHIP, RESTART
from tests.support.sessions import pids_of

STEADY_S, POLL_S, CACHE_S, LOCKED_S, APART_S = 2.0, 0.02, 1.0, 2.0, 0.5
KINDS = ("rank", "stage", "controller", "cache", "store")
LEAST_RANKS = 3  # with fewer the deployment starts anew


def wait_until(is_over: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
    """Poll until something holds, or a deadline."""
    deadline = time.monotonic() + deadline_s
    while not is_over():
        if time.monotonic() > deadline:
            return False
        Event().wait(POLL_S)
    return True


class Case:
    """One case in a deployment that serves."""

    def __init__(self, host: OneHost, kind: str, seed: int) -> None:
        self.host, self.kind = host, kind
        self.rng = random.Random(f"{seed} {kind}")
        self.before = host.living()
        self._since = 0.0

    def run(self) -> dict[str, Any]:
        """Inject both faults, and wait until all that is left serves."""
        first, second = self.rng.sample(sorted(self.before), 2)
        wall, begun = time.time(), time.monotonic()
        if self.kind == "stage":
            self.kill(first)
            self.until_recorded(wall)
            Event().wait(self.rng.uniform(0.0, APART_S / 4))
            self.kill(second)
        elif self.kind == "rank":
            self.kill(first)
            Event().wait(self.rng.choice([0.0, self.rng.uniform(0.0, APART_S)]))
            self.kill(second)
        else:
            acts = [lambda: self.kill(first), getattr(self, f"_{self.kind}")]
            self.rng.shuffle(acts)
            acts[0]()
            Event().wait(self.rng.uniform(0.0, APART_S))
            acts[1]()
        is_right = wait_until(self.is_steady)
        ended, now = time.monotonic(), self.host.living()
        kinds = self.events(wall)
        served_on = is_right and any(self.before.get(rank) == pid for rank, pid in now.items())
        found = gaps(tokens_of(self.host.tokens), begun, ended, 0.0)
        self.host.ranks = set(now)
        return {
            "outcome": ("served on" if served_on else "started again") if is_right else "down",
            "ranks": [len(self.before), len(now)],
            "gap_s": round(max((b - a for a, b in found), default=ended - begun), 2),
            "memberships": len(kinds[MEMBERSHIP]),
            "why": [event.detail["reason"] for event in kinds[RESTART]],
        }

    def kill(self, rank: int) -> None:
        """Kill a rank of those before the case."""
        with suppress(ProcessLookupError):  # it has ended: all ranks are about to start again
            os.kill(self.before[rank], signal.SIGKILL)

    def _controller(self) -> None:
        serve = self.host.processes["serve"].process
        assert serve is not None, "it was started"
        for pid in pids_of(serve.pid, "controller"):
            os.kill(pid, signal.SIGKILL)

    def _cache(self) -> None:
        self.host.processes["cache"].kill()
        Event().wait(CACHE_S)
        self.host.processes["cache"].start()

    def _store(self) -> None:
        path = self.host.prepared.deployment.settings.deployment.state_dir / "store.sqlite"
        with closing(sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)) as held:
            held.execute("BEGIN EXCLUSIVE")
            Event().wait(self.rng.uniform(0.1, LOCKED_S))
            held.execute("ROLLBACK")

    def until_recorded(self, wall: float) -> None:
        """Wait for the record of a recovery since a time."""

        def is_recorded() -> bool:
            record = store.recovery()
            return record is not None and record.time >= wall

        with closing(self.host.prepared.deployment.opened_store()) as store:
            wait_until(is_recorded, 10.0)

    def events(self, wall: float) -> dict[str, list[Any]]:
        """Events of two kinds since a time."""
        with closing(self.host.prepared.deployment.opened_store()) as store:
            every = [one for one in store.latest_events() if one.time >= wall]
        return {kind: [x for x in every if x.kind == kind] for kind in (MEMBERSHIP, RESTART)}

    def is_steady(self) -> bool:
        """Whether exactly the ranks that have a process have stepped for STEADY_S."""
        now = time.monotonic()
        stepping = {
            rank
            for rank in range(self.host.num_ranks)
            if (self.host.times(rank) or [0.0])[-1] > now - GRACE_S
        }
        if not stepping or stepping != set(self.host.living()):
            self._since = 0.0
            return False
        self._since = self._since or now
        return now - self._since > STEADY_S + GRACE_S  # a rank that died has stepped until then


def main() -> None:
    """Run the cases that the log lacks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--slots", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--silence", type=float, default=0.0)
    parser.add_argument(
        "--restarts", type=int, default=1_000_000, help="deaths of ranks that join again"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case later")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["EPLB_SECRET"] = secrets.token_hex(16)
    begun, known = time.monotonic(), {line["case"] for line in read(given.log)}
    left = [number for number in range(given.count) if number not in known]
    with tempfile.TemporaryDirectory() as folder:
        while left and time.monotonic() - begun < given.seconds:
            with ExitStack() as stack:
                host = OneHost(stack, Path(folder) / "life", given.ranks, given)
                host.until_steady()
                while left and len(host.ranks) >= LEAST_RANKS:
                    if time.monotonic() - begun > given.seconds:
                        break
                    number, checks = left.pop(0), host.num_wrong()
                    kind, load = KINDS[number % len(KINDS)], round(os.getloadavg()[0], 1)
                    line = {"case": number, "kind": kind, "load": load}
                    line |= Case(host, kind, given.seed + number).run()
                    after = host.num_wrong()
                    line |= {"checks": after[0] - checks[0], "wrong": after[1] - checks[1]}
                    note(given.log, line)
                    print(json.dumps(line), flush=True)
                    if line["outcome"] == "down":
                        break
    lines = read(given.log)
    print(table(lines))
    sys.exit(any(line["wrong"] or line["outcome"] == "down" for line in lines))


def table(lines: list[dict[str, Any]]) -> str:
    """Give the log as a table in Markdown."""
    names = "kind|cases|served on|gap p50 s|max s|started again|gap p50 s|max s|down|wrong/checks"
    rows = [f"| {names.replace('|', ' | ')} |", "|---|" + "---:|" * 9]
    for kind in (*KINDS, "all"):
        of_kind = [line for line in lines if kind in (line["kind"], "all")]
        row = [kind, len(of_kind)]
        for outcome in ("served on", "started again"):
            found = [line["gap_s"] for line in of_kind if line["outcome"] == outcome]
            row += [len(found), *([round(median(found), 2), max(found)] if found else ["-", "-"])]
        checked = [sum(line[key] for line in of_kind) for key in ("wrong", "checks")]
        row += [sum(line["outcome"] == "down" for line in of_kind), "/".join(map(str, checked))]
        rows.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
