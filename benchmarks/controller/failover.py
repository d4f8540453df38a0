"""A controller killed in the middle of a migration while another stands by, many times.

    python -m benchmarks.controller.failover [--rounds 50] [--stores sqlite redis]

Controllers are processes; one is killed by SIGKILL once the ranks have taken its migration up. The
ranks are played by this process: in every second round they finish, in the others they never do,
and the new leader has to withdraw the migration after its deadline. Holders have names that do not
show their process, so that a takeover waits for the lease, as on another host.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.controller.loop import Controller, ControllerSettings
from telemetry import open_store
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisProcess

TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
MODEL = ModelShape((0,), 4, 2, hidden=16, intermediate=8)
START = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]]), num_experts=4)
LOADS = [[60_000, 20_000, 10_000, 10_000], [10_000, 10_000, 20_000, 60_000]]
TTL_S, DEADLINE_S, MIGRATION_S, WAIT_S = 2.0, 120.0, 3.0, 0.05
SETTINGS = ControllerSettings(lease_ttl_s=TTL_S, migration_deadline_s=MIGRATION_S, back_off_s=0.0)


def control(url: str, holder: str, is_ready: Event) -> None:
    """A controller's process, until it is killed."""
    with closing(open_store(url, "failover")) as store:
        controller = Controller(store, SETTINGS, holder=holder)
        controller.turn()
        is_ready.set()
        controller.run(lambda: False, poll_s=WAIT_S)


class Crew:
    """Two controllers over one store; one that was killed is replaced under another name."""

    def __init__(self, url: str) -> None:
        self._url, self._number = url, 0
        self.processes: dict[str, BaseProcess] = {}
        self._ready: dict[str, Event] = {}
        for _ in range(2):
            self.add()

    def add(self) -> None:
        """Start one more."""
        self._number += 1
        name = f"controller-{self._number}"
        context = multiprocessing.get_context("spawn")
        self._ready[name] = ready = context.Event()
        given = (self._url, name, ready)
        self.processes[name] = context.Process(target=control, args=given, daemon=True)
        self.processes[name].start()

    def wait(self) -> None:
        """Wait until all have made a turn: one leads, the other stands by."""
        for name in self.processes:
            if not self._ready[name].wait(DEADLINE_S):
                raise SystemExit(f"{name} has not made a turn in {DEADLINE_S:g} s")

    def kill(self, name: str) -> None:
        """SIGKILL one."""
        process = self.processes.pop(name)
        process.kill()
        process.join()

    def end(self) -> None:
        """Kill all."""
        for name in list(self.processes):
            self.kill(name)


class Ranks:
    """What two ranks would write."""

    def __init__(self, store: StateStore) -> None:
        self.store, self._window = store, 0
        store.commit(START, expected=None, reason="start")
        described = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
        store.begin_run(RunInfo("run", time.time(), *described, window_steps=4))
        self.report(0, "idle")

    def report(self, plan_id: int, phase: str) -> None:
        """Report the migration that they work on."""
        now = time.time()
        idle = RankState("run", 0, now, 0, 0, phase, plan_id, 0, 0, weights_version=0)
        for rank in range(2):
            self.store.report(replace(idle, rank=rank))

    def serve(self, load: list[int]) -> None:
        """Report one window."""
        committed = self.store.committed()
        assert committed is not None, "the first placement is"
        held, share = committed.placement.slot_to_expert, committed.placement.slot_share
        tokens = (np.array(load)[np.maximum(held, 0)] * share).astype(np.int64)
        first = 4 * self._window
        for rank in range(2):
            here = TOPOLOGY.slots_on(rank)
            start = ("failover", "run", rank, self._window, time.time(), first, first + 3, "mixed")
            generation = committed.placement.generation
            self.store.append([LoadSample(*start, generation, held[:, here], tokens[:, here])])
        self._window += 1


def wait_for(store: StateStore, what: str, look: Callable[[], Any]) -> Any:
    """Look with each change of the store until something is found."""
    deadline, version = time.monotonic() + DEADLINE_S, -1
    while not (found := look()):
        if time.monotonic() > deadline:
            raise SystemExit(f"no {what} within {DEADLINE_S:g} s")
        version = store.wait(version, WAIT_S)
    return found


def measure(url: str, rounds: int) -> dict[str, Any]:
    """Kill the leader in so many migrations."""
    takeovers, unclean, ends = [], 0, {"committed": 0, "withdrawn": 0}
    with closing(open_store(url, "failover")) as store, ExitStack() as stack:
        ranks, crew = Ranks(store), Crew(url)
        stack.callback(crew.end)
        for number in range(rounds):
            finishes = number % 2 == 0
            # The load changes when a migration was finished; one that was dropped is planned again.
            load = LOADS[(number + 1) // 2 % 2]
            crew.wait()
            leader = wait_for(store, "leader", store.lease).holder

            def served(load: list[int] = load) -> Any:
                ranks.serve(load)
                return store.published()

            opened = wait_for(store, f"migration {number}", served)
            ranks.report(opened.plan_id, "stage")
            killed = time.monotonic()
            crew.kill(leader)
            lease = wait_for(store, "takeover", lambda leader=leader: _other(store, leader))
            takeovers.append(time.monotonic() - killed)
            crew.add()
            if finishes:
                base = opened.base.generation
                reason = "swapped"
                store.commit(opened.target, expected=base, plan_id=opened.plan_id, reason=reason)
            wait_for(store, "end of the migration", lambda: store.published() is None)
            ranks.report(0, "idle")
            outcomes = [
                event.kind
                for event in store.latest_events(limit=200)
                if event.kind in ("commit", "abort", "reject")
                and event.detail.get("plan_id") == opened.plan_id
            ]
            ends["committed" if finishes else "withdrawn"] += 1
            unclean += outcomes != ["commit" if finishes else "abort"] or lease.holder == leader
    figures = np.quantile(takeovers, [0.5, 0.99])
    return {"takeovers": takeovers, "quantiles": figures, "unclean": unclean} | ends


def _other(store: StateStore, leader: str) -> Any:
    lease = store.lease()
    return lease if lease is not None and lease.holder != leader else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--stores", nargs="+", default=["sqlite", "redis"])
    given = parser.parse_args()
    print(
        f"time to live {TTL_S:g} s, deadline of a migration {MIGRATION_S:g} s, load average "
        f"{os.getloadavg()[0]:.1f}\n| store | kills | finished | withdrawn | unclean | takeover s: "
        "median | p99 | most | over one lease |\n|---|---|---|---|---|---|---|---|---|"
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in given.stores:
            url = f"sqlite:{folder / 'store.sqlite'}"
            if kind == "redis":
                url = stack.enter_context(RedisProcess(folder / "redis")).url
            found = measure(url, given.rounds)
            times = found["takeovers"]
            p50, p99 = found["quantiles"]
            late = sum(one > TTL_S + WAIT_S for one in times)
            counts = f"{found['committed']} | {found['withdrawn']} | {found['unclean']}"
            print(
                f"| {kind} | {len(times)} | {counts} | {p50:.2f} | {p99:.2f} | {max(times):.2f} | "
                f"{late} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
