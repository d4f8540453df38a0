"""Kills ranks whose survivors serve on: from the kill to the next token, stage by stage.

    python -m benchmarks.faults.serve_on [--ranks 8] [--kills 50] [--seed 1] [--stop]
    python -m benchmarks.faults.serve_on --device cuda --ranks 2 --slots 6

One host, real processes, weights and engine of ``eplb demo`` (``agent.serve_on``), SQLite. Ranks
are killed until half of them are left; then the deployment starts again. With ``--stop`` a rank is
stopped by SIGSTOP, and known by its silence. A token's time is that which ranks write down; answers
are compared with a reference in another process. The stages are those of the survivors' own event;
what lies before it is the detection.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event
from typing import Any

from api.config.tree import load
from api.demo.checking import checks_in
from api.demo.options import DEFAULTS, Options
from api.demo.setup import prepare
from api.demo.state_dir import StateDir
from api.processes.commands import own_command
from benchmarks.faults.deployments import Process
from benchmarks.faults.paced_engine import TOKENS_VARIABLE
from telemetry.state.events import MEMBERSHIP, SERVE_ON_STAGES
from tests.support.deployments import clean_environ, free_ports
from tests.support.repository import ROOT
from tests.support.sessions import pids_of

STEADY_S, DEADLINE_S, POLL_S, GRACE_S = 3.0, 120.0, 0.02, 1.0


class OneHost:
    """One life of a deployment on one host."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        num_ranks: int,
        given: Any,
        wanted: Sequence[int] | None = None,
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        (tokens := folder / "tokens").mkdir(parents=True)
        self.tokens, self.num_ranks = tokens, num_ranks
        (port,) = free_ports(1)
        is_cpu = given.device == "cpu"
        named = {
            "topology.nodes": 1,
            "topology.ranks_per_node": num_ranks,
            "model.layers": 3,
            "model.experts": 2 * num_ranks,
            "model.top_k": 2,
            "topology.device": given.device,
            "model.precision": "float32" if is_cpu else "bfloat16",
            "model.hidden": 32 if is_cpu else 1024,
            "model.intermediate": 32 if is_cpu else 512,
            "telemetry.window_steps": 16,
            "topology.slots_per_rank": given.slots,
            "http.port": port,
            "agent.serve_on": True,
            "agent.silence_s": given.silence,
            "deployment.name": f"serve-on-{os.getpid()}",
            # Beyond it a dead rank is started again, to join the others, only after a minute.
            "supervision.restart_after_death": given.restarts,
            "deployment.state_dir": folder / "state",
        }
        settings = load({}, config=None, environ={}, named=named, defaults=DEFAULTS)
        texts = [ROOT / "LICENSE", ROOT / "README.md"]
        options = Options(
            tokens_per_rank=64,
            text=texts,
            seed=given.seed,
            check_every=2,
            dispatcher="auto" if is_cpu else "all_to_all",
        )
        state = StateDir(settings.deployment.state_dir)
        try:
            self.prepared = prepare(options, settings, state)
        finally:
            state.close()
        self.ranks = set(range(num_ranks) if wanted is None else wanted)
        self._checks_read, self.checks = 0, list[Any]()
        if wanted is not None:
            self.want(wanted, "start")
        engine = str(self.prepared.engine_path)
        paced = ("--module", "benchmarks.faults.paced_engine", "--", engine)
        commands = {
            "serve": own_command("serve"),
            "cache": own_command("host-cache", "--host", "0"),
            "checker": [sys.executable, "-P", "-m", "api.demo.checking", engine],
            "launch": own_command("launch", "--host", "0", *paced),
        }
        more = {"PYTHONPATH": str(ROOT), TOKENS_VARIABLE: str(tokens)}
        environ = clean_environ(**dict(self.prepared.environ) | more)
        self.processes = {
            name: Process(name, words, environ, folder / f"{name}.txt")
            for name, words in commands.items()
        }
        for one in self.processes.values():
            one.start()
            stack.callback(one.kill)

    def want(self, ranks: Iterable[int], name: str) -> None:
        """Ask for these ranks to serve."""
        with closing(self.prepared.deployment.opened_store()) as store:
            store.change_membership(
                name, list(ranks), asked=name, members=self.ranks, reason=name, by="benchmark"
            )

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return self.living()[rank]

    def living(self) -> dict[int, int]:
        """The processes of ranks, by rank."""
        launcher = self.processes["launch"].process
        assert launcher is not None, "it was started"
        found = {rank: pids_of(launcher.pid, f"rank {rank}") for rank in range(self.num_ranks)}
        return {rank: pids[0] for rank, pids in found.items() if pids}

    def times(self, rank: int) -> list[float]:
        """Monotonic times of a rank's steps."""
        path = self.tokens / f"rank-{rank}"
        return [at for (at,) in struct.iter_unpack("d", path.read_bytes())] if path.exists() else []

    def until_steady(self) -> None:
        """Wait until all ranks that are left have stepped for a while."""
        since, deadline = time.monotonic(), time.monotonic() + DEADLINE_S
        while (now := time.monotonic()) - since < STEADY_S:
            latest = [(self.times(rank) or [0.0])[-1] for rank in self.ranks]
            if min(latest) < now - GRACE_S:
                since = now
            if now > deadline:
                words = {name: one.last_words() for name, one in self.processes.items()}
                raise TimeoutError(f"not all of {self.ranks} stepped for {STEADY_S} s: {words}")
            for name, one in self.processes.items():
                if not one.is_up:
                    raise RuntimeError(f"{name} has ended: {one.last_words()}")
            Event().wait(POLL_S)

    def lose(self, rank: int, signal_number: int) -> dict[str, float]:
        """Kill or stop a rank; returns seconds to the next token, and of each stage."""
        self.until_steady()
        at, wall = time.monotonic(), time.time()
        os.kill(self.pid(rank), signal_number)
        self.ranks.discard(rank)
        self.until_steady()
        with closing(self.prepared.deployment.opened_store()) as store:
            (event,) = [
                one for one in store.latest_events() if one.kind == MEMBERSHIP and one.time >= wall
            ]
        seconds = event.detail["seconds"]
        found = {"detect": event.detail["broke_at"] - wall, **seconds}
        # No pass of the new group ends before this rank begins its first one.
        begun = at + found["detect"] + sum(seconds.values()) - seconds["first pass"]
        firsts = [min(t for t in self.times(one) if t > begun) for one in self.ranks]
        found |= {"first token": min(firsts) - at, "all ranks": max(firsts) - at}
        return found | {"refills": event.detail["refills"]}

    def num_wrong(self) -> tuple[int, int]:
        """Checked steps, and those of them whose outputs were not the reference's."""
        results = self.prepared.engine.checks.results
        found, self._checks_read = checks_in(results, self._checks_read)
        self.checks += found
        precision = self.prepared.engine.checks.precision
        return len(self.checks), sum(not one.is_right(precision) for one in self.checks)


def percentile(values: list[float], part: float) -> float:
    """The value below which a part of all lies."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> None:
    """Kill ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--silence", type=float, default=0.0, help="agent.silence_s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stop", action="store_true", help="SIGSTOP in place of SIGKILL")
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args()
    given.restarts = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["EPLB_SECRET"] = secrets.token_hex(16)
    rng, rows, num_checks, num_wrong = random.Random(given.seed), list[dict[str, float]](), 0, 0
    number = signal.SIGSTOP if given.stop else signal.SIGKILL
    names = ("ranks", "rank", "load", "detect", *SERVE_ON_STAGES)
    names += ("first token", "all ranks", "refills")
    print("| " + " | ".join(names) + " |")
    print("|" + "---:|" * len(names), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        while len(rows) < given.kills:
            with ExitStack() as stack:
                host = OneHost(stack, Path(folder) / "life", given.ranks, given)
                while len(host.ranks) > given.ranks // 2 and len(rows) < given.kills:
                    rank, load_1 = rng.choice(sorted(host.ranks)), os.getloadavg()[0]
                    row = {"ranks": len(host.ranks), "rank": rank, "load": load_1}
                    row |= host.lose(rank, number)
                    rows.append(row)
                    shown = [f"{row[name]:.3g}" for name in names]
                    print("| " + " | ".join(shown) + " |", flush=True)
                checks, wrong = host.num_wrong()
                num_checks, num_wrong = num_checks + checks, num_wrong + wrong
    for part, words in ((0.5, "p50"), (0.99, "p99")):
        shown = [f"{percentile([row[name] for row in rows], part):.3g}" for name in names[2:]]
        print(f"| {words} | | " + " | ".join(shown) + " |")
    print(f"{num_checks} checked steps, {num_wrong} wrong")
    if given.json is not None:
        given.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
