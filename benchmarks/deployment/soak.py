"""An hour of a whole deployment: ``eplb serve``, a host cache, Redis, four ranks, no rest.

    python -m benchmarks.deployment.soak --seconds 3600 --log soak.jsonl

Everything is started by its command. The ranks serve a tiny DeepSeek-V3 of the ``transformers``
library; the gate is open and the load changes every second window, so that a rebalance is begun at
every chance. Every layer output and every logit is compared with the library's. Memory, open files
and threads of every process are read all the time. A log that exists is continued if it is of the
same commit. Ends with a table, and with status 1 if an output was wrong, if anything grew, or if a
process ended. Low rate: ``--period`` seconds for a step. Seeded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

from benchmarks.deployment.process_readings import name_of, read_process, session_processes
from benchmarks.deployment.soak_log import judge, read_log, served_seconds
from benchmarks.result_table import show
from telemetry import open_store
from telemetry.store import LoadStore
from telemetry.stores.redis.connection.local_server import RedisProcess, free_port

ROOT = Path(__file__).parents[2]
EPLB = Path(sys.executable).with_name("eplb")
NUM_RANKS, WINDOW_STEPS, DRIFT_WINDOWS = 4, 8, 2
START_DEADLINE_S, END_DEADLINE_S = 600.0, 90.0
MAX_SILENCE_S = 60.0  # of a rank
CONFIG = """
[deployment]
name = "{name}"
store = "{store}"
[model]
checkpoint = "model"
layout = "transformers"
[topology]
ranks_per_node = 4
slots_per_rank = 5
device = "cpu"
[network]
rendezvous_port = {port}
join_deadline_s = 120.0
[planner]
plan_windows = 1
pay_back_s = 1e9  # every gain pays
target_imbalance = 1.0
[controller]
stage = "all"
[telemetry]
window_steps = {window_steps}
sample_steps = 4
keep_samples_s = 120.0  # so that the store is full early, and shows whether it grows
keep_minutes_s = 300.0
keep_hours_s = 600.0
keep_events = 500
[http]
port = 0
[supervision]
start_deadline_s = 600.0  # kernels are compiled at a first start
restart_after_death = 0
process_restarts = 0
"""


class Command:
    """One command in a session of its own, with its output in a file."""

    def __init__(self, role: str, words: Sequence[str], folder: Path) -> None:
        self.role, self.output = role, folder / f"{role}.log"
        with self.output.open("wb") as printed:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=os.environ | {"EPLB_CONFIG": "eplb.toml", "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, words: str) -> None:
        """Wait until it has printed these words.

        Raises:
            SystemExit: it ended, or was too late.
        """
        deadline = time.monotonic() + START_DEADLINE_S
        while words not in (text := self.output.read_text()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.role} has not printed {words!r} but:\n{text[-2000:]}")
            Event().wait(0.1)

    def end(self) -> int:
        """Ask it to end; returns the exit status."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_DEADLINE_S)

    def kill(self) -> None:
        """End all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_DEADLINE_S)


class Deployment:
    """The commands of one deployment, and what is seen of them."""

    def __init__(self, stack: ExitStack, folder: Path, given: argparse.Namespace) -> None:
        self._folder = folder
        self.redis = stack.enter_context(RedisProcess(folder / "redis"))
        name = f"soak-{os.getpid()}"
        config = {"store": self.redis.url, "port": free_port(), "window_steps": WINDOW_STEPS}
        (folder / "eplb.toml").write_text(CONFIG.format(name=name, **config))
        self.commands: list[Command] = []
        self._stack = stack
        self._start("serve", "serve").wait_for("eplb serve: http://")
        self._start("host-cache", "host-cache").wait_for("ready: ")
        options = ["--period", str(given.period), "--drift", str(DRIFT_WINDOWS * WINDOW_STEPS)]
        options += ["--break-at", str(given.break_at)]
        engine = [sys.executable, "-m", "benchmarks.deployment.soak_engine", str(folder)]
        launch = self._start("launch", "launch", "--", *engine, *options)
        self.store: LoadStore = stack.enter_context(closing(open_store(self.redis.url, name)))
        deadline = time.monotonic() + START_DEADLINE_S
        while len(self.ranks()) < NUM_RANKS:
            if launch.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the ranks do not serve:\n{launch.output.read_text()[-2000:]}")
            Event().wait(0.1)

    def _start(self, role: str, *words: str) -> Command:
        command = Command(role, [str(EPLB), *words], self._folder)
        self._stack.callback(command.kill)
        self.commands.append(command)
        return command

    def ranks(self) -> dict[str, Any]:
        """What each rank has written last."""
        found = {}
        for path in sorted(self._folder.glob("rank-*.json")):
            body = json.loads(path.read_text())
            body["age_s"] = round(time.time() - path.stat().st_mtime, 1)
            found[path.stem.removeprefix("rank-")] = body
        return found

    def processes(self) -> dict[str, Any]:
        """Readings of all processes by name."""
        assert self.redis.process is not None, "it is killed at the end"
        listed = [(self.redis.process.pid, "redis")]
        for command in self.commands:
            listed += [
                (pid, command.role) for pid in sorted(session_processes(command.process.pid))
            ]
        found: dict[str, Any] = {}
        for pid, role in listed:
            if (reading := read_process(pid)) is not None:
                name = name_of(pid, role)
                while name in found:
                    name += "'"
                found[name] = asdict(reading)
        return found

    def problems(self, ranks: dict[str, Any]) -> list[str]:
        """Name what must not happen."""
        found = [
            f"{one.role} ended with status {one.process.returncode}"
            for one in self.commands
            if one.process.poll() is not None
        ]
        for rank, body in ranks.items():
            if body["age_s"] > MAX_SILENCE_S:
                found.append(f"rank {rank} has not reported for more than {MAX_SILENCE_S:.0f} s")
        events = self.store.events(after=0, limit=100_000)
        errors = [event for event in events if event.kind == "error"]
        return found + [f"event {event.id}: {event.detail}"[:500] for event in errors]

    def wait_for_rebalance(self) -> None:
        """Wait until every rank has had one: the planner's kernels are compiled by then.

        Raises:
            SystemExit: it did not come in time.
        """
        deadline = time.monotonic() + START_DEADLINE_S
        while not all(body["rebalances"] for body in self.ranks().values()):
            if time.monotonic() > deadline:
                raise SystemExit(f"no rebalance within {START_DEADLINE_S:.0f} s: {self.ranks()}")
            Event().wait(0.5)

    def end(self) -> list[str]:
        """Ask how it stands, end the ranks and the rest in order; names what went wrong."""
        environ = os.environ | {"EPLB_CONFIG": "eplb.toml"}
        asked = subprocess.run(
            [str(EPLB), "status"],
            cwd=self._folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=END_DEADLINE_S,
        )
        found = [] if asked.returncode == 0 else [f"eplb status: {asked.stdout}{asked.stderr}"]
        for command in reversed(self.commands):
            if status := command.end():
                text = command.output.read_text()[-1000:]
                found.append(f"{command.role} ended with status {status}: {text}")
        return found


def commit_of() -> str:
    """The commit that runs; files that differ from it are told."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def run(given: argparse.Namespace, commit: str, part: int, seconds: float) -> None:
    """Serve for some seconds, and write a line at every sample."""
    stop = Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: stop.set())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        write = [sys.executable, "-c", WRITE_MODEL, str(folder / "model"), str(given.seed)]
        subprocess.run(write, cwd=ROOT, check=True)
        deployment = Deployment(stack, folder, given)
        deployment.wait_for_rebalance()
        began, is_last = time.monotonic(), False
        while not is_last:
            is_last = stop.wait(given.sample_s) or time.monotonic() - began >= seconds
            ranks, processes = deployment.ranks(), deployment.processes()
            problems = deployment.problems(ranks)
            is_last = is_last or any("ended with" in text for text in problems)
            elapsed = round(time.monotonic() - began, 1)
            if is_last:
                problems += deployment.end()
                ranks = deployment.ranks()
            line = {"commit": commit, "part": part, "time": round(time.time(), 1)}
            line |= {"elapsed_s": elapsed, "generation": _generation(deployment.store)}
            line |= {"ranks": ranks, "processes": processes, "problems": problems}
            with given.log.open("a") as log:
                log.write(json.dumps(line) + "\n")


def _generation(store: LoadStore) -> int:
    committed = store.committed()
    return -1 if committed is None else committed.placement.generation


# In a process of its own: this one loads no torch, and is not what is measured.
WRITE_MODEL = (
    "import sys; from pathlib import Path; from benchmarks.deployment.tiny_model import "
    "write_tiny_model; write_tiny_model(Path(sys.argv[1]), int(sys.argv[2]))"
)


def main() -> None:
    """Serve, and print the table of the whole log."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all parts together")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--period", type=float, default=0.25, help="seconds of a step")
    parser.add_argument("--sample-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--break-at", type=int, default=-1, help="step: damage a live weight")
    given = parser.parse_args()
    commit = commit_of()
    before = read_log(given.log, commit)
    left = given.seconds - served_seconds(before)
    if left > 0:
        run(given, commit, 1 + max((line["part"] for line in before), default=0), left)
    rows, wrong = judge(read_log(given.log, commit))
    print(f"commit {commit}")
    show(rows, max(len(row[0]) for row in rows))
    for text in wrong:
        print(f"WRONG: {text}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
