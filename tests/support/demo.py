"""``eplb demo`` as a process: what it prints, what it stores, and all processes that it starts."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from telemetry import open_store
from telemetry.state.events import Event
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.sessions import pids_of, processes_of

if TYPE_CHECKING:
    import httpx

C_LIBRARY = ctypes.CDLL(None)  # found before any fork: a child loads nothing
PR_SET_PDEATHSIG = 1  # of linux/prctl.h; the thread that forks is the main one here

# The smallest demo that still has everything: two hosts, replicas, and a plan every few steps.
SMALL_DEMO = {
    "ranks_per_node": 2,
    "nodes": 2,
    "layers": 2,
    "experts": 8,
    "top_k": 2,
    "hidden": 32,
    "intermediate": 32,
    "window_steps": 4,
    "pay_back_s": 1e9,
    "port": 0,
    # None of these may fire because the machine is busy; tests of one of them set it.
    "hung_after_s": NEVER_S,
    "start_deadline_s": NEVER_S,
    "vote_deadline_s": NEVER_S,
    "plan_deadline_s": NEVER_S,
    "migration_deadline_s": NEVER_S,
    "lease_ttl_s": NEVER_S,  # of a holder on this host, its end is seen at once
}
OPTIONS = {"seconds": 2, "tokens_per_rank": 64, "view": "plain"}  # of the command, not settings


def events_of(store: StateStore, kind: str, *, after: int = 0) -> list[Event]:
    """All events of a kind, in order."""
    return [event for event in store.events(after=after, limit=1_000_000) if event.kind == kind]


def deaths_in(store: StateStore) -> list[str]:
    """What was noted of each process that was killed.

    Other notes do not count: a rank that a busy machine leaves behind is noted too.
    """
    notes = [str(event.detail["message"]) for event in events_of(store, "error")]
    return [note for note in notes if "killed by" in note]


def shared_memory() -> set[str]:
    """Names of shared memory on this machine; other processes have some too."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def wait_until_freed(before: set[str]) -> None:
    """Wait until shared memory that is new since ``before`` is gone, or is a living process's."""
    left = shared_memory() - before
    while left := {name for name in left & shared_memory() if not _is_mapped(name)}:
        threading.Event().wait(0.05)


def _is_mapped(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False


class DemoProcess:
    """``eplb demo`` in a session of its own: what it says, what it keeps, all its processes."""

    def __init__(
        self,
        folder: Path,
        flags: tuple[str, ...],
        settings: Mapping[str, Any],
        before_exec: Callable[[], object] | None,
    ) -> None:
        self.state_dir, self._json = folder / "state", folder / "summary.json"
        self._errors = folder / "errors.txt"
        options = {name: settings.get(name, usual) for name, usual in OPTIONS.items()}
        given = {"state_dir": self.state_dir} | SMALL_DEMO
        given |= {name: value for name, value in settings.items() if name not in OPTIONS}
        command = [str(Path(sys.executable).with_name("eplb")), "demo", *flags]
        command += ["--output", str(self._json)]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        command += [word for item in given.items() for word in ("--setting", "{}={}".format(*item))]
        environ = {name: text for name, text in os.environ.items() if not name.startswith("EPLB_")}

        def prepare() -> None:
            # A shell's background job ignores Ctrl-C, and all that it starts would too.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # A test run that is killed leaves no demo behind, which would slow all later ones.
            C_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if before_exec is not None:
                before_exec()

        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self._lines: list[str] = []
        self._is_silent = False  # it has closed its output
        self._said = threading.Condition()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None, "it was asked for"
        with self.process.stdout as lines:
            for line in lines:
                with self._said:
                    self._lines.append(line)
                    self._said.notify_all()
        with self._said:
            self._is_silent = True
            self._said.notify_all()

    def wait_for_line(self, words: str) -> str:
        """Wait for a line with these words, and return it."""

        def found() -> list[str]:
            return [line for line in self._lines if words in line]

        with self._said:
            self._said.wait_for(lambda: found() or self._is_silent)
        assert found(), f"no {words!r} before its end; {self.output_text()}"
        return found()[0]

    def sees(self, what: str, look: Callable[[StateStore], Any]) -> Any:
        """Wait until it serves and ``look`` finds something in the store; return that."""
        self.wait_for_line(" ranks, ")
        version = -1
        with closing(open_store(self.state_dir / "store.sqlite", "demo")) as store:
            while True:
                has_ended = self.process.poll() is not None  # first: what it wrote last counts
                if found := look(store):
                    break
                assert not has_ended, f"ended before {what}; {self.output_text()}"
                version = store.wait(version, 0.2)
            return found

    def ends(self) -> int:
        """Wait for its end, and return the exit status. Nothing that it started outlives it."""
        status = self.process.wait()
        self.leaves_nothing()
        return status

    def ends_right(self) -> dict[str, Any]:
        """Wait for its end; all its answers were right. Return the summary."""
        assert self.ends() == 0, self.output_text()
        assert "Traceback" not in self.errors
        summary = self.summary()
        assert summary["reference_checks"] > 0
        assert (summary["reference_failures"], summary["samples_lost"]) == (0, 0)
        return summary

    def halts_right(self) -> dict[str, Any]:
        """Interrupt its own process; all its answers were right. Return the summary."""
        self.process.send_signal(signal.SIGINT)
        return self.ends_right()

    def leaves_nothing(self) -> None:
        """Wait until every process of the session is gone, and its words are all read."""
        while running := self.processes():
            with ExitStack() as stack:
                poll = select.poll()
                try:
                    handle = os.pidfd_open(next(iter(running)))
                except ProcessLookupError:
                    continue
                stack.callback(os.close, handle)
                poll.register(handle, select.POLLIN)
                poll.poll()
        self._listener.join()

    def processes(self) -> dict[int, str]:
        """Title of each living process of the session, by id."""
        return processes_of(self.process.pid)

    def kill(self, title: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Signal one process of a demo that serves, by its title; return its id."""
        pid = pids_of(self.process.pid, title)[0]
        os.kill(pid, how)
        return pid

    @property
    def url(self) -> str:
        """Of its HTTP service, once that has begun."""
        return self.wait_for_line("eplb demo: http").split()[-1]

    def get(self, path: str) -> httpx.Response:
        """Ask its HTTP service."""
        import httpx  # late: the environments of engines load this module, and lack it

        return httpx.get(f"{self.url}{path}", timeout=None, trust_env=False)

    def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> httpx.Response:
        """Ask its HTTP service for a change."""
        import httpx

        given = {"json": body, "headers": headers, "timeout": None, "trust_env": False}
        return httpx.post(f"{self.url}{path}", **given)

    @property
    def errors(self) -> str:
        """What it said on the standard error stream."""
        return self._errors.read_text()

    def output_text(self) -> str:
        """All that it said, for a test that fails."""
        return f"output:\n{''.join(self._lines)}errors:\n{self.errors}"

    def summary(self) -> dict[str, Any]:
        """Read the summary that it wrote."""
        summary: dict[str, Any] = json.loads(self._json.read_text())
        return summary


StartDemo = Callable[..., DemoProcess]


@pytest.fixture(scope="session")
def start_demo() -> Iterator[StartDemo]:
    """Start demos: ``start_demo(folder, *flags, before_exec=None, **settings)``."""
    started: list[DemoProcess] = []

    def start(
        folder: Path, *flags: str, before_exec: Callable[[], object] | None = None, **settings: Any
    ) -> DemoProcess:
        started.append(DemoProcess(folder, flags, settings, before_exec))
        return started[-1]

    yield start
    for demo in started:
        for pid in demo.processes():
            os.kill(pid, signal.SIGKILL)
        demo.process.wait()
        demo.leaves_nothing()


@pytest.fixture(scope="module")
def watched_demo(
    tmp_path_factory: pytest.TempPathFactory, start_demo: StartDemo
) -> Iterator[DemoProcess]:
    """A demo that serves, for every test that only watches; its folder has ``.eplb``, its state.

    It ends with the file: its ranks compute all the time, beside every other test of the worker.
    It logs in JSON, and moves nothing by itself: no migration is open when a test asks for a plan.
    A test leaves the switches as they were.
    """
    folder = tmp_path_factory.mktemp("watched")
    given = {"log.format": "json", "log.level": "info"}
    # A rank counts as silent after three such intervals; its state goes with its samples meanwhile.
    given["state_interval"] = str(NEVER_S)
    demo = start_demo(folder, "--serve", pay_back_s=0, **given)
    (folder / ".eplb").symlink_to(demo.state_dir)
    demo.sees("a plan", lambda store: events_of(store, "plan"))
    demo.sees("that all ranks report", lambda _: demo.get("/readyz").is_success)
    yield demo
    demo.process.send_signal(signal.SIGINT)
    demo.ends()
