"""The fault matrix on a demo's processes: killed in a state of the phase machine, or damaged.

A state is held from outside. A rank that is stopped (SIGSTOP) stays where it is, and its journal,
which it writes as it goes, says where. The host's cache, stopped, keeps a plan that needs
a record of it in ``preload``; if it is withdrawn then, the rank is in ``aborted`` until it looks
whether the record is still wanted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rebalance.protocol.journal import JOURNAL_FOLDER
from telemetry import open_store
from telemetry.state.live import Control
from telemetry.state.store import StateStore
from tests.support.demo import deaths_in, shared_memory, wait_until_freed
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))
STATES = ("idle", "preload", "stage", "swap", "aborted")
HEARD_S = 0.5  # by then every rank has heard of a switch, and has reported so
# Larger experts than the smallest demo's, so that staging takes long enough to be met in it.
LARGER = {
    "hidden": 64,
    "intermediate": 1024,
    "restart_after_death": 20,
    "process_restarts": 20,
}

StartDemo = Callable[..., Any]


class Whereabouts:
    """State of the phase machine of one rank, by what its journal says so far."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._read, self._run, self.facts = 0, "", set[str]()

    def phase(self) -> str:
        with self._journal.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            entry = json.loads(line)
            if entry["run"] != self._run:
                self._run, self.facts = entry["run"], set()
            self._take(entry["what"])
        return self._found()

    def _take(self, what: str) -> None:
        if what in ("committed", "drained"):
            self.facts.clear()
        elif what == "swap ordered":
            self.facts.discard("staged")
        elif what in ("plan seen", "preloaded", "adopted by all", "staged", "aborted"):
            self.facts.add(what)

    def _found(self) -> str:
        if not self.facts or "aborted" in self.facts:
            return "aborted" if self.facts else "idle"
        if {"preloaded", "adopted by all"} <= self.facts:
            return "swap" if "staged" in self.facts else "stage"
        return "preload"


class Target:
    """A demo that serves, its store, and where the two ranks of one of its hosts are."""

    def __init__(self, demo: Any, store: StateStore, host: int) -> None:
        self.demo, self.store, self._host = demo, store, host
        folder, ranks = demo.state_dir / JOURNAL_FOLDER, (2 * host, 2 * host + 1)
        self._ranks = {rank: Whereabouts(folder / f"rank-000{rank}.jsonl") for rank in ranks}

    def wait_for(self, what: str, look: Callable[[], Any], *, pause_s: float = 0.05) -> Any:
        while not (found := look()):
            assert self.demo.process.poll() is None, (
                f"ended before {what}; {self.demo.output_text()}"
            )
            time.sleep(pause_s)  # a file that grows, or a process's end: no event of the store
        return found

    def pid(self, title: str) -> int:
        return self._pids(title)[0]

    def host_cache_pid(self) -> int:
        """The host cache of the host that is watched, once it runs."""
        found = self.wait_for("a host cache", lambda: self._pids(f"host cache {self._host}"))
        return int(found[0])

    def _pids(self, title: str) -> list[int]:
        return sorted(int(pid) for pid, found in self.demo.processes().items() if found == title)

    @contextmanager
    def held_in(self, state: str) -> Iterator[str]:
        """Hold a rank of the host in a state, and the whole group, which waits for its tokens.

        Gives the rank's title.
        """
        with ExitStack() as stack:
            if state in ("preload", "aborted"):
                stack.enter_context(stopped(self.host_cache_pid()))
            if state == "idle":
                self.switch(movement=False)
            look = self._withdraw_and_stop if state == "aborted" else partial(self._stop_in, state)
            rank, pid = self.wait_for(state, look, pause_s=0.0)
            try:
                yield f"rank {rank}"
            finally:
                go_on(pid)
        if state == "idle":
            self.switch(movement=True)

    def _in_preload(self) -> list[int]:
        """Ranks that only their host keeps in preload: all others work on the plan too."""
        phases = {rank: where.phase() for rank, where in self._ranks.items()}
        adopted = [rank for rank in phases if "adopted by all" in self._ranks[rank].facts]
        return [rank for rank in adopted if phases[rank] == "preload"]

    def _withdraw_and_stop(self) -> tuple[int, int] | None:
        """Withdraw whatever is in preload, until a rank is met before it has called that off."""
        if self._in_preload() and (found := self.store.published()) is not None:
            self.store.withdraw(found.plan_id, outcome="aborted", reason="a fault: withdrawn")
        return self._stop_in("aborted")

    def _stop_in(self, state: str) -> tuple[int, int] | None:
        """Stop a rank that seems to be there, and let it go on if it is further by then."""
        for rank, where in self._ranks.items():
            is_there = rank in self._in_preload() if state == "preload" else where.phase() == state
            if is_there:
                pid = self.pid(f"rank {rank}")
                os.kill(pid, signal.SIGSTOP)
                if where.phase() == state:
                    return rank, pid
                go_on(pid)
        return None

    # -- what must be right afterwards

    def switch(self, *, movement: bool) -> None:
        self.store.set_control(Control(movement=movement), reason="the fault matrix")

    def rebalances_again(self) -> None:
        """Wait for a plan that is published from now on to be committed."""
        since = self.events()[-1].id

        def is_committed() -> bool:
            plans: dict[str, set[int]] = {"publish": set(), "commit": set()}
            for event in self.events(since):
                if event.kind in plans:
                    plans[event.kind].add(event.detail["plan_id"])
            return not plans["publish"].isdisjoint(plans["commit"])

        self.wait_for("rebalance", is_committed)

    def all_hold_what_is_committed(self) -> None:
        """With movement off every rank is idle at the store's generation, and nothing leaks."""
        self.switch(movement=False)
        begun = time.time()

        def is_so() -> bool:
            info, committed = self.store.current_run(), self.store.committed()
            assert info is not None
            assert committed is not None
            states = self.store.rank_states(info.run)
            assert not any(state.frozen for state in states), self.demo.output_text()
            found = {(state.phase, state.generation) for state in states}
            is_fresh = all(state.time > begun + HEARD_S for state in states)
            return is_fresh and found == {("idle", committed.placement.generation)}

        self.wait_for("one generation on all ranks", is_so)
        assert not orphaned_memory(self.demo.processes())
        self.switch(movement=True)

    def events(self, after: int = 0) -> list[Any]:
        return self.store.events(after=after, limit=1_000_000)

    def rejected_bytes(self) -> int:
        """Bytes that ranks have rejected of what was staged, by their own reports."""
        info = self.store.current_run()
        assert info is not None
        states = self.store.rank_states(info.run)
        return sum(int(state.detail["bytes_by_source"].get("rejected", 0)) for state in states)

    def errors(self) -> list[str]:
        return deaths_in(self.store)

    def hears_of_errors(self, number: int) -> None:
        self.wait_for("news of the kill", lambda: len(self.errors()) == number)

    def num_descriptors(self) -> int:
        """Open files of the demo's own process, which outlives what is killed."""
        return len(list(Path(f"/proc/{self.demo.process.pid}/fd").iterdir()))

    def halts_right(self) -> dict[str, Any]:
        """Halt it; all its answers were right, and it counts what it went through."""
        summary: dict[str, Any] = self.demo.halts_right()
        return summary


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        go_on(pid)


def go_on(pid: int) -> None:
    """Let a stopped process go on, unless it was killed meanwhile."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def memory_of(pid: int) -> list[Path]:
    """Descriptors of a process's own shared memory."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return [link for link in links if "memfd:eplb" in str(link.readlink())]


def orphaned_memory(pids: Any) -> set[int]:
    """Shared memory that these processes map and none of them owns, by inode."""
    mapped, owned = set(), set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            owned |= {link.stat().st_ino for link in memory_of(pid)}
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended just now
        mapped |= {int(line.split()[4]) for line in lines if "/memfd:eplb" in line}
    return mapped - owned


@pytest.fixture
def serve(tmp_path: Path, start_demo: StartDemo) -> Iterator[Callable[..., Target]]:
    """Start a demo that serves until halted, and wait until it rebalances."""
    with ExitStack() as stack:

        def start(*flags: str, host: int = 0) -> Target:
            demo = start_demo(tmp_path, "--serve", *flags, *TEXT, **LARGER)
            demo.sees("the start", lambda store: store.current_run())
            store = open_store(demo.state_dir / "store.sqlite", "demo")
            target = Target(demo, stack.enter_context(closing(store)), host)
            target.rebalances_again()
            return target

        names = shared_memory()
        yield start
        wait_until_freed(names)


def damage_host_records(pid: int) -> None:
    """Turn a byte of each page that the host holds of records, as a stray write would."""
    memory = next(link for link in memory_of(pid) if "eplb-host-cache" in str(link.readlink()))
    with memory.open("r+b", buffering=0) as arena:
        for at in range(17, os.fstat(arena.fileno()).st_size, 4096):
            byte = os.pread(arena.fileno(), 1, at)
            if byte != b"\0":  # a place that was never filled holds nothing to damage
                os.pwrite(arena.fileno(), bytes([byte[0] ^ 255]), at)


@pytest.mark.slow
def test_outputs_stay_right_with_a_bad_host_a_slow_rank_and_no_controller(
    serve: Callable[..., Target],
) -> None:
    target = serve()
    damage_host_records(target.host_cache_pid())
    with target.held_in("swap"):
        target.demo.kill("controller")
        target.hears_of_errors(1)
    target.wait_for("a damaged record to be met", lambda: target.rejected_bytes() > 0)
    target.rebalances_again()
    target.all_hold_what_is_committed()

    reported = [error.partition(" in ")[0] for error in target.errors()]
    assert reported == ["the controller was killed by SIGKILL; restarting"]
    assert target.halts_right()["controller_restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("the controller", "controller"), ("the host cache of host 0", "host_cache")],
    ids=["controller", "host cache"],
)
def test_process_that_does_not_serve_is_replaced_when_killed_in_any_state(
    serve: Callable[..., Target], name: str, kind: str
) -> None:
    target = serve()
    descriptors = target.num_descriptors()
    for number, state in enumerate(STATES, start=1):
        pid = target.host_cache_pid() if kind == "host_cache" else target.pid(kind)
        with target.held_in(state):
            os.kill(pid, signal.SIGKILL)
            target.hears_of_errors(number)
        target.rebalances_again()
        target.all_hold_what_is_committed()

    assert target.num_descriptors() == descriptors
    reported = [error.partition(" in ")[0] for error in target.errors()]
    assert reported == [f"{name} was killed by SIGKILL; restarting"] * len(STATES)
    summary = target.halts_right()
    assert summary["restarts"][kind] == len(STATES)
    assert summary["deaths"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_rank_of_any_host_killed_in_any_state_is_survived(
    serve: Callable[..., Target], host: int
) -> None:
    target, killed = serve(host=host), list[str]()
    descriptors = target.num_descriptors()
    for number, state in enumerate(STATES, start=1):
        with target.held_in(state) as title:
            os.kill(target.pid(title), signal.SIGKILL)
            killed.append(title)
        target.hears_of_errors(number)
        target.rebalances_again()
        target.all_hold_what_is_committed()
        record = target.store.recovery()
        assert record is not None
        assert record.reason == f"{title} died"

    assert target.num_descriptors() == descriptors
    told = [f"{t} was killed by SIGKILL; restarting the ranks of host {host}" for t in killed]
    assert target.errors() == told
    assert target.halts_right()["deaths"] == 5
