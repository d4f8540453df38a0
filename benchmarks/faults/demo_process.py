"""``eplb demo`` under faults: its processes by title, the state in its store, and what it leaves.

Faults come from outside the processes (signals, files, memory through /proc), and results come from
the store, the error stream and /proc.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from telemetry import open_store
from telemetry.state.events import Event
from telemetry.state.store import StateStore
from tests.support.sessions import pids_of, processes_of

ROOT = Path(__file__).resolve().parents[2]
RANKS, NODES = 4, 2
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
    "process_restarts": 1_000_000,
    "port": 0,
}
# Two seconds of one turn of the load's drift; it serves on.
OPTIONS = ["--serve", "--seconds", "2", "--tokens-per-rank", "64", "--view", "off"]
POLL_S = 0.1
START_DEADLINE_S = 120.0
END_DEADLINE_S = 60.0

Found = TypeVar("Found")


class Ended(Exception):
    """The demo ended without a request."""


class TooLate(Exception):
    """A wait timed out, which counts as a hang."""


class FaultyDemo:
    """One deployment over any number of starts; each continues from the last placement."""

    def __init__(self, folder: Path, seed: int, settings: Mapping[str, Any] | None = None) -> None:
        self.folder, self.state_dir = folder, folder / "state"
        self._settings = dict(SETTINGS) | dict(settings or {})
        self._seed, self._lives, self._told_before = seed, 0, 0
        self.store: StateStore

    # -- a life

    def start(self) -> None:
        """Start it, and wait until every rank steps."""
        self._lives += 1
        self.json_path = self.folder / f"summary-{self._lives}.json"
        given = {"state_dir": self.state_dir} | self._settings
        path = self.state_dir / "store.sqlite"
        command = [sys.executable, "-m", "api.cli.main", "demo", *OPTIONS]
        command += ["--json", str(self.json_path), "--seed", str(self._seed)]
        command += ["--resume"] * path.exists()
        command += ["--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md")]
        command += [word for item in given.items() for word in ("--setting", "{}={}".format(*item))]
        self.errors_path = self.folder / f"errors-{self._lives}.txt"
        known = self._runs(path)
        with self.errors_path.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={name: text for name, text in os.environ.items() if name[:5] != "EPLB_"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
            )
        self.wait_for("a store", lambda: path.exists() or None, START_DEADLINE_S)
        if self._lives == 1:
            self.store = self.wait_for("a whole store", lambda: self._opened(path), 20.0)
        self.wait_for(
            "a first step of every rank",
            lambda: (info := self.store.current_run()) and info.run not in known and self.steps(),
            START_DEADLINE_S,
        )

    def _runs(self, path: Path) -> set[str]:
        info = self.store.current_run() if self._lives > 1 and path.exists() else None
        return {info.run} if info else set()

    @staticmethod
    def _opened(path: Path) -> StateStore | None:
        return open_store(path, "demo") if path.stat().st_size else None

    def halt(self) -> int:
        """End it as a user would; return its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(END_DEADLINE_S)

    def kill(self) -> None:
        """End all of it at once."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(END_DEADLINE_S)

    def last_output(self) -> str:
        """The last line of its error stream."""
        lines = self.errors_path.read_text().splitlines()
        return lines[-1] if lines else "nothing"

    def news(self) -> list[str]:
        """Lines of the error stream since the last call."""
        lines = self.errors_path.read_text().splitlines()
        fresh, self._told_before = lines[self._told_before :], len(lines)
        return fresh

    # -- waiting

    def wait_for(self, what: str, look: Callable[[], Found | None], deadline_s: float) -> Found:
        """Return the first true answer of ``look``.

        Raises:
            Ended: the demo ended meanwhile.
            TooLate: the deadline passed.
        """
        deadline = time.monotonic() + deadline_s
        while not (found := look()):
            if self.process.poll() is not None:
                raise Ended(f"status {self.process.returncode}: {self.last_output()}")
            if time.monotonic() >= deadline:
                raise TooLate(f"no {what} within {deadline_s:.0f} s")
            time.sleep(POLL_S)  # steps and reports are no events of the store
        return found

    # -- what the store says

    def steps(self) -> dict[int, int] | None:
        """Step of every rank of the current run; None until each is past the first."""
        info = self.store.current_run()
        states = self.store.rank_states(info.run) if info else []
        steps = {state.rank: state.step for state in states}
        return steps if len(steps) == RANKS and min(steps.values()) > 1 else None

    def last_event(self) -> int:
        """Id of the newest event."""
        events, last = self.store.events(limit=100_000), 0
        while events:
            last = events[-1].id
            events = self.store.events(after=last, limit=100_000)
        return last

    def events_after(self, event_id: int) -> list[Event]:
        """Every event since."""
        return self.store.events(after=event_id, limit=100_000)

    def ask_for_migration(self) -> None:
        """Order a rollback by one generation, unless a migration is open or ordered already.

        The demo's load drifts within the windows of a plan. The gate learns that no gain lasts and
        keeps, and after an aborted migration it waits. An order of an operator does not wait.
        """
        committed = self.store.committed()
        if committed is None or committed.placement.generation == 0 or self.store.published():
            return
        if not self.store.tasks("queued") and not self.store.tasks("running"):
            asked = {"generation": committed.placement.generation - 1, "dry_run": False}
            self.store.submit("rollback", asked | {"reason": "faults: migrate"})

    # -- processes and what they leave

    def processes(self) -> dict[int, str]:
        """Title of each living process of its session, by id, in the order of their ids."""
        return processes_of(self.process.pid)

    def leaves_nothing(self, deadline_s: float) -> None:
        """Wait until every process of its session is gone.

        Raises:
            TooLate: one outlives it.
        """
        deadline = time.monotonic() + deadline_s
        while left := self.processes():
            if time.monotonic() >= deadline:
                raise TooLate(f"{left} outlive the demo by {deadline_s:.0f} s")
            time.sleep(POLL_S)

    def pids(self, title: str) -> list[int]:
        """Ids of the processes with a title, oldest first."""
        return pids_of(self.process.pid, title)

    def num_descriptors(self) -> int:
        """Open files of the demo's own process, which outlives all faults but its last."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def orphaned_memory(self) -> set[int]:
        """Shared memory that living processes map and whose owner is gone, by inode."""
        mapped, owned = set(), set()
        for pid in self.processes():
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                mapped |= {int(line.split()[4]) for line in lines if "/memfd:eplb" in line}
                owned |= {Path(f"/proc/{pid}/fd/{fd}").stat().st_ino for fd in memory_files(pid)}
        return mapped - owned


def memory_files(pid: int, name: str = "eplb") -> list[int]:
    """Descriptors of a process's own shared memory."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if re.match(rf"/memfd:{name}", str(link.readlink())):
                found.append(int(link.name))
    return found


def shared_memory_names() -> set[str]:
    """Names in the host's shared memory; the project leaves none."""
    return {path.name for path in Path("/dev/shm").iterdir()}
