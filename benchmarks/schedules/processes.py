"""Simulated processes, their time, and a store that may be stopped, lost or out of reach.

A process is a thread that runs when its time has come, and no other runs meanwhile. So code that
waits and loops runs as it is, and a schedule is the same each time. ``World`` stands in for the
module ``time`` in the modules whose code is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from api import interrupts
from api.deploy import launch, local_ranks
from api.processes.supervision import Restarts
from benchmarks.schedules.mutants import replaced
from eplb.errors import EplbError, StoreError
from rebalance.assembly import rank as rank_assembly
from telemetry.state import joining
from telemetry.state.memory import MemoryBackend
from telemetry.state.store import StateStore

EPOCH = 1_800_000_000.0
STORE_TIMEOUT_S = 5.0


class Killed(BaseException):
    """Ends the thread of a process that was killed."""


class Process:
    """One process; it is used as ``subprocess.Popen`` is."""

    def __init__(self, world: World, name: str, host: int, body: Callable[[], object]) -> None:
        self.world, self.name, self.host, self._body = world, name, host, body
        self.pid = os.getpid()  # one that does not end meanwhile: a descriptor of it is polled
        self.returncode: int | None = None
        self.is_stopped = self.is_ready = self.has_left = False
        self.children: list[Process] = []
        self.go = threading.Semaphore(0)
        threading.Thread(target=self._run, name=name, daemon=True).start()
        world.wake(self, 0.0)

    def _run(self) -> None:
        self.go.acquire()
        status = 0
        try:
            if self.returncode is None:
                self._body()
        except Killed:
            pass
        except EplbError as exc:
            self.world.say(self.name, f"{type(exc).__name__}: {exc}")
            status = exc.rank_exit_status
        except SystemExit as exc:
            status = int(exc.code or 0)
        except BaseException as exc:  # a defect of this program or of the product
            self.world.defects.append(f"{self.name}: {exc!r}")
        self.returncode = status if self.returncode is None else self.returncode
        self.has_left = True
        self.world.back.release()

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.returncode

    wait = poll

    def kill(self, _: int = 0) -> None:
        """SIGKILL it, and with it its children."""
        if self.returncode is None:
            self.returncode = -9
            self.world.wake(self, 0.0)
            for child in self.children:
                child.kill()

    send_signal = kill


class World:
    """Time, the link between two hosts, the store on the first, and all processes."""

    def __init__(self, name: str) -> None:
        self.now, self.deployment_name = EPOCH, name
        self.trace, self.defects = list[str](), list[str]()
        self.back, self._numbers = threading.Semaphore(0), itertools.count()
        self._due: list[tuple[float, int, Process]] = []
        self.current: Process | None = None
        self.skew_s = [0.0, 0.0]  # of each host's ranks
        self.is_cut = self.is_store_stopped = self.is_store_down = False
        self.backend = MemoryBackend(name, clock=self.monotonic)

    def say(self, name: str, line: str) -> None:
        """Record what a process says."""
        self.trace.append(f"{self.now - EPOCH:.1f} {name}: {line}")

    # -- as the module time

    def monotonic(self) -> float:
        """Seconds, on every host alike."""
        return self.now

    def time(self) -> float:
        """The wall clock, of a rank that of its host."""
        return self.now + (self.skew_s[self.current.host] if self.current else 0.0)

    def strftime(self, form: str) -> str:
        """Format the time."""
        return time.strftime(form, time.gmtime(self.now))

    def sleep(self, seconds: float) -> None:
        """Let time pass for the process that runs; the schedule itself waits for nothing."""
        me = self.current
        if me is None:
            return
        if me.returncode is None:
            self.wake(me, max(seconds, 0.001))
            self.back.release()
            me.go.acquire()
        if me.returncode is not None:
            raise Killed

    # -- the schedule's turns

    def wake(self, process: Process, after_s: float) -> None:
        """Have a process run again."""
        heapq.heappush(self._due, (self.now + after_s, next(self._numbers), process))

    def run_for(self, seconds: float) -> None:
        """Run every process whose time comes."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            at, _, process = heapq.heappop(self._due)
            self.now = max(self.now, at)
            if process.has_left:
                continue
            if process.is_stopped and process.returncode is None:
                self.wake(process, 0.5)
                continue
            self.current = process
            process.go.release()
            self.back.acquire()
            self.current = None
        self.now = until

    def are_linked(self, a: int, b: int) -> bool:
        """Whether two hosts reach each other."""
        return a == b or not self.is_cut

    def store_of(self, host: int) -> StateStore:
        """The store, as a host reaches it."""
        return StateStore(Reached(self, host), monotonic=self.monotonic)  # type: ignore[arg-type]


class Reached:
    """The backend of the store as a host reaches it; nobody closes its memory."""

    kind = "memory"

    def __init__(self, world: World, host: int) -> None:
        self._world, self._host, self.deployment = world, host, world.deployment_name

    def __getattr__(self, name: str) -> Any:
        if name == "unreadable":  # no access to the store: what was found in its records
            return self._world.backend.unreadable
        return partial(self._act, name)

    def _act(self, name: str, *given: Any, **named: Any) -> Any:
        world = self._world
        if world.is_store_stopped or not world.are_linked(0, self._host):
            world.sleep(STORE_TIMEOUT_S)
            raise StoreError("the store does not answer, expected an answer within the timeout")
        if world.is_store_down:
            raise StoreError("the store cannot be reached: connection refused")
        return getattr(world.backend, name)(*given, **named)

    def wait(self, version: int, timeout_s: float) -> int:
        """Look now and then until the version differs."""
        until = self._world.now + timeout_s
        while (found := self._act("version")) == version and self._world.now < until:
            self._world.sleep(min(0.25, until - self._world.now))
        return int(found)

    def close(self) -> None:
        """Keep it."""


class NoSignals(interrupts.StopSignals):
    """Threads receive none."""

    def __init__(self) -> None:
        self.received = 0


class Never:
    """An event that nobody sets, and a poll of descriptors: their waits are simulated."""

    def __init__(self, world: Callable[[], World]) -> None:
        self._world, self._poll = world, select.poll()
        self.register = self._poll.register

    def wait(self, seconds: float) -> bool:
        """Let time pass."""
        self._world().sleep(seconds)
        return False

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        """Let time pass, then look at the descriptors."""
        self._world().sleep(timeout_ms / 1e3)
        return self._poll.poll(0)


class SimulatedThread:
    """A thread of the process that runs, as ``threading.Thread``: it ends with the process."""

    ident: int | None = None

    def __init__(self, world: Callable[[], World], **given: Any) -> None:
        self._world, self._given = world, given

    def start(self) -> None:
        """Begin it."""
        me, self.ident = self._world().current, 1
        assert me is not None, "a process starts it"
        act = partial(self._given["target"], *self._given.get("args", ()))
        me.children.append(Process(self._world(), f"thread of {me.name}", me.host, act))

    def join(self, _: float = 0.0) -> None:
        """Do not wait: it ends at its next look."""


class SimulatedEvent(Never):
    """An event that may be set."""

    _is_set = False

    def set(self) -> None:
        """Set it."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait for it, and look twice a second."""
        until = self._world().now + seconds
        while not self._is_set and self._world().now < until:
            super().wait(min(0.5, until - self._world().now))
        return self._is_set


class Names:
    """A module some of whose names are others."""

    def __init__(self, module: object, **others: object) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def simulated(world: Callable[[], World], rank: object) -> Iterator[None]:
    """Have launchers wait in the time of a world, and start ``rank`` in place of processes.

    ``run_ranks`` takes no clock, no signals and no factory of processes, so names of its modules
    are replaced meanwhile.
    """
    now, never = Names(None), partial(Never, world)
    for name in ("monotonic", "time", "strftime"):
        setattr(now, name, lambda *given, name=name: getattr(world(), name)(*given))
    others: list[tuple[Any, str, object]] = [
        (launch, "Restarts", partial(Restarts, clock=now.monotonic)),
        (launch, "StopSignals", NoSignals),
        (local_ranks, "ForkedRank", rank),
        (local_ranks, "select", Names(select, poll=never)),
        (interrupts, "Event", never),
        (joining, "Event", partial(SimulatedEvent, world)),
        (joining, "Thread", partial(SimulatedThread, world)),
    ]
    timed = (launch, local_ranks, interrupts, joining, rank_assembly)
    with ExitStack() as stack:
        for module, name, other in [*others, *((one, "time", now) for one in timed)]:
            stack.enter_context(replaced(module, name, other))
        yield
