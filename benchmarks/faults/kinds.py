"""The kinds of faults that ``benchmarks/faults/live.py`` draws from, each injected from outside."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from benchmarks.faults.demo_process import NODES, RANKS, FaultyDemo, memory_files
from telemetry.store import Control

DEADLINE_S = 90.0  # for what a fault needs to be there, and for an end that it brings
DAMAGED_BYTES = 64


class Fault:
    """One draw: a kind, a moment, and what the kind needs."""

    def __init__(self, seed: int, number: int) -> None:
        self.number = number
        draw = random.Random(seed * 1_000_003 + number)
        self.kind = draw.choice(sorted(INJECT))
        self.after_s = draw.uniform(0.0, 0.5)
        self.rank, self.host = draw.randrange(RANKS), draw.randrange(NODES)
        self.for_s = draw.uniform(0.2, 2.0)
        self.random = draw

    def wait(self, seconds: float) -> None:
        """Let time pass: no event says "a random moment", the wait is the experiment itself."""
        threading.Event().wait(seconds)


def kill_rank(demo: FaultyDemo, fault: Fault) -> str:
    (pid,) = demo.pids(f"rank {fault.rank}")
    os.kill(pid, signal.SIGKILL)
    return f"rank {fault.rank}"


def kill_controller(demo: FaultyDemo, fault: Fault) -> str:
    (pid,) = demo.wait_for("a controller", lambda: demo.pids("controller"), DEADLINE_S)
    os.kill(pid, signal.SIGKILL)
    return "the controller"


def kill_host_cache(demo: FaultyDemo, fault: Fault) -> str:
    pids = demo.wait_for(
        "all preload processes",
        lambda: (found := demo.pids("preload process")) and len(found) == NODES and found,
        DEADLINE_S,
    )
    os.kill(pids[fault.host], signal.SIGKILL)
    return f"host process {fault.host}"


def stop_rank(demo: FaultyDemo, fault: Fault) -> str:
    (pid,) = demo.pids(f"rank {fault.rank}")
    os.kill(pid, signal.SIGSTOP)
    try:
        fault.wait(fault.for_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    return f"rank {fault.rank} for {fault.for_s:.2f} s"


def damage_host_cache(demo: FaultyDemo, fault: Fault) -> str:
    """Turn bytes of the records that a host holds, where they lie."""
    pid = demo.pids("preload process")[fault.host]
    descriptor = memory_files(pid, "eplb-host-cache")[0]  # of two: a mapping keeps one of its own
    with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as memory:
        size, damaged = os.fstat(memory.fileno()).st_size, 0
        while damaged < DAMAGED_BYTES:
            at = fault.random.randrange(size)
            byte = os.pread(memory.fileno(), 1, at)
            if byte != b"\0":  # a place that was never filled holds nothing to damage
                os.pwrite(memory.fileno(), bytes([byte[0] ^ 255]), at)
                damaged += 1
    return f"host {fault.host}"


def withdraw_plan(demo: FaultyDemo, fault: Fault) -> str:
    def withdrawn() -> str | None:
        found = demo.store.published()
        if found is None:
            demo.ask_for_migration()
            return None
        is_done = demo.store.withdraw(found.plan_id, outcome="aborted", reason="a fault: withdrawn")
        return f"plan {found.plan_id}" if is_done else None

    return demo.wait_for("an open plan to withdraw", withdrawn, DEADLINE_S)


def switch_movement(demo: FaultyDemo, fault: Fault) -> str:
    demo.store.set_control(Control(movement=False), reason="a fault: off")
    fault.wait(fault.for_s)
    demo.store.set_control(Control(movement=True), reason="a fault: on again")
    return f"for {fault.for_s:.2f} s"


def lock_store(demo: FaultyDemo, fault: Fault) -> str:
    with closing(sqlite3.connect(demo.state_dir / "store.sqlite", timeout=20.0)) as other:
        other.isolation_level = None
        other.execute("BEGIN IMMEDIATE")
        fault.wait(fault.for_s)
        other.execute("ROLLBACK")
    return f"for {fault.for_s:.2f} s"


INJECT: dict[str, Callable[[FaultyDemo, Fault], str]] = {
    "kill a rank": kill_rank,
    "kill the controller": kill_controller,
    "kill a preload process": kill_host_cache,
    "stop a rank for a while": stop_rank,
    "damage host records": damage_host_cache,
    "withdraw the plan": withdraw_plan,
    "movement off and on": switch_movement,
    "lock the store": lock_store,
}
