"""The faults that are injected into a deployment on two hosts, and what is expected of each."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.deployments import RESTART_S, TwoHostDeployment
from benchmarks.faults.observing import GRACE_S
from telemetry.state.store import StateStore

STOPPED_S, CUT_S, SHORT_S = 60.0, 90.0, 0.7  # the last: no outage yet
DAMAGED_BYTES = 64
SKEW_S = 3600.0
Mend = Callable[[], object]


class NotThere(Exception):
    """The process that a fault is to happen to is not there now."""


@dataclass
class Draw:
    """What a fault happens to."""

    deployment: TwoHostDeployment
    rank: int
    host: int

    def signal(self, title: str, number: int) -> int:
        """Signal a process by its title; returns its id."""
        pids = self.deployment.pids(title)
        if not pids:
            raise NotThere(title)
        try:
            os.kill(pids[0], number)
        except ProcessLookupError:
            raise NotThere(title) from None
        return pids[0]

    def kill_command(self, name: str) -> None:
        """Kill a command that the service manager starts again."""
        one = self.deployment.processes[name]
        if not one.is_up or one.process is None:
            raise NotThere(name)
        one.process.kill()


def _nothing() -> None:
    pass


def kill_rank(draw: Draw) -> Mend:
    draw.signal(f"rank {draw.rank}", signal.SIGKILL)
    return _nothing


def stop_rank(draw: Draw) -> Mend:
    pid = draw.signal(f"rank {draw.rank}", signal.SIGSTOP)

    def mend() -> None:
        with suppress(ProcessLookupError):  # its launcher has killed it
            os.kill(pid, signal.SIGCONT)

    return mend


def kill_controller(draw: Draw) -> Mend:
    draw.signal("controller", signal.SIGKILL)
    return _nothing


def killed(name: str) -> Callable[[Draw], Mend]:
    def kill(draw: Draw) -> Mend:
        draw.kill_command(name.format(host=draw.host))
        return _nothing

    return kill


def stop_store(draw: Draw) -> Mend:
    server = draw.deployment.redis.process
    if server is None:
        raise NotThere("redis-server")
    server.send_signal(signal.SIGSTOP)
    return lambda: server.send_signal(signal.SIGCONT)  # a killed server ignores it


def empty_store(draw: Draw) -> Mend:
    draw.deployment.redis.kill()
    return draw.deployment.redis.start


def fill_disks(draw: Draw) -> Mend:
    free = draw.deployment.fill_disks()
    draw.deployment.order("pause")  # the one change that a full disk takes

    def mend() -> None:
        free()
        draw.deployment.order("resume")

    return mend


def damage_records(draw: Draw) -> Mend:
    """Turn bytes of the records that a host cache holds, where they lie."""
    cache = draw.deployment.processes[f"cache-{draw.host}"].process
    if cache is None:
        raise NotThere("cache")
    descriptor = memory_files(cache.pid, "eplb-host-cache")[0]  # a mapping keeps one of its own
    rng = random.Random(draw.host)
    with Path(f"/proc/{cache.pid}/fd/{descriptor}").open("r+b", buffering=0) as memory:
        size, damaged = os.fstat(memory.fileno()).st_size, 0
        while damaged < DAMAGED_BYTES:
            at = rng.randrange(size)
            byte = os.pread(memory.fileno(), 1, at)
            if byte != b"\0":  # a place that was never filled holds nothing to damage
                os.pwrite(memory.fileno(), bytes([byte[0] ^ 255]), at)
                damaged += 1
    return _nothing


def generation_of(store: StateStore) -> int:
    """The generation that is committed; 0: none is."""
    committed = store.committed()
    return committed.placement.generation if committed else 0


def order_move(store: StateStore) -> None:
    """Order a rollback by one generation, unless a migration is open or ordered already.

    The load drifts within the windows of a plan. The gate learns that no gain lasts and keeps, and
    after an aborted migration the controller waits. An order of an operator does not wait.
    """
    if not (generation := generation_of(store)) or store.published():
        return
    if not store.tasks("queued") and not store.tasks("running"):
        asked = {"generation": generation - 1, "dry_run": False}
        store.submit("rollback", asked | {"reason": "faults: move"})


def withdraw_plan(draw: Draw) -> Mend:
    with closing(draw.deployment.deployment.opened_store()) as store:
        order_move(store)
        found = store.published()
        reason = "a fault: withdrawn"
        if found is None or not store.withdraw(found.plan_id, outcome="aborted", reason=reason):
            raise NotThere("plan")
    return _nothing


def switch_movement(draw: Draw) -> Mend:
    draw.deployment.order("pause")
    return lambda: draw.deployment.order("resume")


def skew(ahead_s: float) -> Callable[[Draw], Mend]:
    def set_clock(draw: Draw) -> Mend:
        draw.deployment.set_clock(draw.host, ahead_s)
        return lambda: draw.deployment.set_clock(draw.host, 0.0)

    return set_clock


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Args:
        inject: begins it; returns what ends it.
        lasts_s: for how long; of a process that the service manager starts again, until then.
        told_s: by when the verdict is to be another than serving; None: that is not required.
    """

    inject: Callable[[Draw], Mend]
    lasts_s: float
    told_s: float | None


FAULTS: dict[str, Fault] = {
    "rank-killed": Fault(kill_rank, 0.0, GRACE_S),
    "rank-stopped": Fault(stop_rank, STOPPED_S, 10.0 + GRACE_S),  # a rank is silent after 10 s
    "cache-killed": Fault(killed("cache-{host}"), RESTART_S, 15.0 + GRACE_S),  # heartbeat
    "controller-killed": Fault(kill_controller, 0.0, None),
    "serve-killed": Fault(killed("serve"), RESTART_S, GRACE_S),
    "launcher-killed": Fault(killed("launch-{host}"), RESTART_S, GRACE_S),
    "store-stopped": Fault(stop_store, STOPPED_S, 10.0 + GRACE_S),
    "store-empty": Fault(empty_store, RESTART_S, None),
    "disk-full": Fault(fill_disks, STOPPED_S, None),
    "clock-ahead": Fault(skew(SKEW_S), STOPPED_S, None),
    "clock-behind": Fault(skew(-SKEW_S), STOPPED_S, None),
    "link-cut": Fault(lambda draw: draw.deployment.hosts.spaces.cut_link(), CUT_S, 10.0 + GRACE_S),
}
OF_MOVES: dict[str, Fault] = {  # faults of the ways that experts move
    "rank-stopped-shortly": Fault(stop_rank, SHORT_S, None),
    "records-damaged": Fault(damage_records, 0.0, None),
    "plan-withdrawn": Fault(withdraw_plan, 0.0, None),
    "movement-off": Fault(switch_movement, SHORT_S, None),
}
EVERY = FAULTS | OF_MOVES
CLOCKS = {"clock-ahead", "clock-behind"}  # never a reason for another verdict
NO_OUTAGE = CLOCKS | {"cache-killed", "controller-killed", "serve-killed", "disk-full"}
NO_OUTAGE |= {"store-stopped", "store-empty", "records-damaged", "plan-withdrawn", "movement-off"}


def memory_files(pid: int, name: str = "eplb") -> list[int]:
    """Descriptors of a process's own shared memory."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if str(link.readlink()).startswith(f"/memfd:{name}"):
                found.append(int(link.name))
    return found


def orphaned_memory(deployment: TwoHostDeployment) -> set[int]:
    """Shared memory that living processes map and whose owner is gone, by inode."""
    mapped, owned = set[int](), set[int]()
    for pid in deployment.pids():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if "/memfd:eplb" in line}
            owned |= {Path(f"/proc/{pid}/fd/{fd}").stat().st_ino for fd in memory_files(pid)}
    return mapped - owned
