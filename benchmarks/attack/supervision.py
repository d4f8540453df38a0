"""Hangs and kills processes that do not serve: serving continues, and they are restarted.

Faults come from outside the processes of an ``eplb demo``, and results from its store, its summary
and /proc. ``benchmarks/faults/pairs.py`` has faults of a whole deployment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.attack import Attack, Outcome
from telemetry import open_store
from telemetry.state.events import Event
from telemetry.state.store import StateStore
from tests.support.repository import ROOT
from tests.support.sessions import pids_of, processes_of

RANKS, NODES = 4, 2
DEADLINE_S, START_DEADLINE_S, END_DEADLINE_S = 40.0, 120.0, 60.0
POLL_S = 0.1
KILLS_OF_CONTROLLER, KILLS = 25, 3
HUNG_AFTER_S = 4.0
SETTINGS: Mapping[str, Any] = {
    "ranks_per_node": RANKS // NODES,
    "nodes": NODES,
    "layers": 3,
    "experts": 16,
    "top_k": 2,
    "hidden": 32,
    "intermediate": 32,
    "window_steps": 4,  # a plan at every opportunity
    "pay_back_s": 1e9,
    "restart_after_death": 1_000_000,
    "port": 0,
    "restart_delay_s": 0.1,
    "process_restarts": 100,
    "hung_after_s": HUNG_AFTER_S,
}
# Two seconds of one turn of the load's drift; it serves on.
OPTIONS = ["--serve", "--seconds", "2", "--tokens-per-rank", "64", "--view", "off", "--seed", "1"]

Found = TypeVar("Found")


class TooLate(Exception):
    """A wait timed out, which counts as a hang, or the demo ended meanwhile."""


class FaultyDemo:
    """A demo that serves and moves experts all the time."""

    def __init__(self, folder: Path) -> None:
        self.json_path, self._errors_path = folder / "summary.json", folder / "errors.txt"
        self._path = folder / "state" / "store.sqlite"
        given = {"state_dir": self._path.parent} | dict(SETTINGS)
        command = [sys.executable, "-m", "api.cli.main", "demo", *OPTIONS]
        command += ["--output", str(self.json_path)]
        command += ["--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md")]
        command += [word for item in given.items() for word in ("--setting", "{}={}".format(*item))]
        with self._errors_path.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={name: text for name, text in os.environ.items() if name[:5] != "EPLB_"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
            )
        self.store: StateStore

    def serve(self) -> None:
        """Wait until every rank steps."""
        self.store = self.wait_for("a whole store", self._opened, START_DEADLINE_S)
        self.wait_for("a first step of every rank", self.steps, START_DEADLINE_S)

    def _opened(self) -> StateStore | None:
        is_there = self._path.exists() and self._path.stat().st_size
        return open_store(self._path, "demo") if is_there else None

    def halt(self) -> int:
        """End it as a user would; return its exit status."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(END_DEADLINE_S)

    def kill(self) -> None:
        """End all of it at once."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(END_DEADLINE_S)

    def last_output(self) -> str:
        """The last line of its error stream."""
        lines = self._errors_path.read_text().splitlines()
        return lines[-1] if lines else "nothing"

    def wait_for(self, what: str, look: Callable[[], Found | None], deadline_s: float) -> Found:
        """Return the first true answer of ``look``.

        Raises:
            TooLate: the deadline passed, or the demo ended.
        """
        deadline = time.monotonic() + deadline_s
        while not (found := look()):
            if self._process.poll() is not None:
                raise TooLate(f"status {self._process.returncode}: {self.last_output()}")
            if time.monotonic() >= deadline:
                raise TooLate(f"no {what} within {deadline_s:.0f} s")
            time.sleep(POLL_S)  # steps and reports are no events of the store
        return found

    def steps(self) -> dict[int, int] | None:
        """Step of every rank of the current run; None until each is past the first."""
        info = self.store.current_run()
        states = self.store.rank_states(info.run) if info else []
        steps = {state.rank: state.step for state in states}
        return steps if len(steps) == RANKS and min(steps.values()) > 1 else None

    def last_event(self) -> int:
        """Id of the newest event."""
        events = self.events_after(0)
        return events[-1].id if events else 0

    def events_after(self, event_id: int) -> list[Event]:
        """Every event since."""
        return self.store.events(after=event_id, limit=100_000)

    def processes(self) -> dict[int, str]:
        """Title of each living process of its session, by id, in the order of their ids."""
        return processes_of(self._process.pid)

    def pids(self, title: str) -> list[int]:
        """Ids of the processes with a title, oldest first."""
        return pids_of(self._process.pid, title)


@contextmanager
def deployment(folder: Path) -> Iterator[FaultyDemo]:
    demo = FaultyDemo(folder)
    try:
        demo.serve()
        yield demo
    finally:
        demo.kill()


def strike(demo: FaultyDemo, title: str, how: signal.Signals) -> None:
    """Signal the oldest process of a title, once there is one."""
    pid = demo.wait_for(title, lambda: demo.pids(title), DEADLINE_S)[0]
    os.kill(pid, how)
    if how is signal.SIGKILL:
        demo.wait_for("its exit", lambda: pid not in demo.processes() or None, DEADLINE_S)


def notes(demo: FaultyDemo, words: str) -> int:
    events = demo.events_after(0)
    return sum(words in e.detail["message"] for e in events if e.kind == "error")


def moves_again(demo: FaultyDemo) -> None:
    """Wait until every rank steps on, and a plan is committed that was published from now on."""
    since, before = demo.last_event(), demo.steps()

    def are_there() -> bool:
        found: dict[str, set[int]] = {"publish": set(), "commit": set()}
        for event in demo.events_after(since):
            if event.kind in found:
                found[event.kind].add(event.detail["plan_id"])
        steps = demo.steps()
        return bool(found["publish"] & found["commit"]) and steps != before

    demo.wait_for("a rebalance", lambda: are_there() or None, DEADLINE_S)


def outcome_of(folder: Path, attack: Callable[[FaultyDemo], str]) -> Outcome:
    """Run an attack on a deployment; held: it serves on, and every answer is right."""
    with deployment(folder) as demo:
        try:
            figure = attack(demo)
            moves_again(demo)
        except TooLate as exc:
            return Outcome(False, str(exc))
        status = demo.halt()
        if status:
            return Outcome(False, f"{figure}; status {status}: {demo.last_output()}")
        summary: dict[str, Any] = json.loads(demo.json_path.read_text())
    checks, wrong = summary["reference_checks"], summary["reference_failures"]
    shown = f"{figure}; {wrong} of {checks} answers wrong, {summary['unserved_s']} s without tokens"
    held = checks > 0 and not wrong and not summary["unserved_s"] and not summary["samples_lost"]
    return Outcome(held, shown)


def hang(title: str) -> Callable[[Path], Outcome]:
    def attack(demo: FaultyDemo) -> str:
        moves_again(demo)  # at its start a process is given longer than when it has had a turn
        stopped = time.monotonic()
        strike(demo, title, signal.SIGSTOP)
        words = "killed by SIGKILL; restarting"
        demo.wait_for("its end", lambda: notes(demo, words) or None, DEADLINE_S)
        return f"killed after {time.monotonic() - stopped:.1f} s, deadline {HUNG_AFTER_S:g} s"

    return lambda folder: outcome_of(folder, attack)


def kill(title: str, times: int) -> Callable[[Path], Outcome]:
    def attack(demo: FaultyDemo) -> str:
        for _ in range(times):
            strike(demo, title, signal.SIGKILL)
        return f"killed {times} times"

    return lambda folder: outcome_of(folder, attack)


ATTACKS = [
    Attack(
        "hung-controller",
        "a controller that hangs is reported, killed and started again; serving goes on",
        hang("controller"),
    ),
    Attack(
        "hung-checker",
        "a reference checker that hangs is killed and started again; serving goes on",
        hang("reference check"),
    ),
    Attack(
        "host-cache-killed",
        "a killed host cache process comes back and moves resume; serving goes on",
        kill("host cache 0", KILLS),
    ),
    Attack(
        "controller-killed",
        "a controller that is killed again and again never ends serving",
        kill("controller", KILLS_OF_CONTROLLER),
    ),
    Attack(
        "checker-killed",
        "a reference checker that is killed again and again never ends serving",
        kill("reference check", KILLS),
    ),
]
