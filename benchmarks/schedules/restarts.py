"""All ordered pairs of twelve faults over launchers, caches, a controller and ranks, simulated.

    python -m benchmarks.schedules.restarts [--gaps 3] [--seed 1] [--only rank-killed,link-cut]

Real are the decisions: ``run_ranks`` and ``LocalRanks`` of the launchers with ``once_reached`` and
``Restarts``, the start and the heartbeat of host caches, the supervision of the controller and its
turns, the record of a run and of a recovery, ``StoreLoss``, the state store over memory, and the
monitor with its verdict. Simulated are time, the store's outages, the link, and the ranks: when
they meet, what they wait for, and when their group breaks. A service manager starts again what was
killed, after 20 s.

The property: once all causes have passed, the verdict is serving and stays so. Not covered, for
want of a seam: the start of ``eplb serve``, which opens sockets and starts its controller as a
process; and the disk, which no decision here reads or writes.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from api.deploy import launch, local_ranks, roles
from api.deploy.deployment import Deployment
from api.deploy.first_placement import ensure_first_placement
from api.monitor.monitor import Monitor
from api.processes.commands import REFUSED, Notifier, once_reached
from api.processes.supervision import Supervised, SupervisionView, note_in
from benchmarks.schedules.mutants import replaced
from benchmarks.schedules.processes import Never, NoSignals, Process, World, simulated
from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.errors import BrokenGroup, EplbError, MigrationError, RankError, StoreError
from eplb.migration.recovery import SurvivorReport, decide
from eplb.versions import HOST_CACHE, RANKS, Announcement
from rebalance.assembly import places
from rebalance.assembly.change import committed_placement
from rebalance.assembly.rank import new_run_name, record_start
from rebalance.controller.loop import Controller
from rebalance.rank.watcher import StoreLoss
from telemetry.state.joining import Heartbeat, check_versions
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore
from tests.support.deployments import deployment_in

NUM_RANKS, HOSTS = 4, range(2)
COMMANDS = ("serve", "cache-0", "cache-1", "launch-0", "launch-1")
RESTART_S, LIMIT_S, STEADY_S, MOST_GAP_S = 20.0, 900.0, 20.0, 60.0
STEP_S, LOOK_S, START_S = 0.5, 1.0, 1.0
JOIN_DEADLINE_S, VOTE_DEADLINE_S, REPORTS_S = 60.0, 30.0, 5.0  # as the product's defaults


class Restarted(World):
    """The world of one schedule."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment.name)
        self.deployment = deployment
        self.commands: dict[str, Process] = {}
        self.ranks: dict[int, Rank] = {}  # the latest process of each
        self.last_token = 0.0


WORLDS: list[Restarted] = []  # the last is that of the schedule that runs


def world() -> Restarted:
    """The world of the schedule that runs: code that is simulated as it is takes none."""
    return WORLDS[-1]


class SimulatedDeployment(Deployment):
    """A deployment whose store is the world's."""

    def opened_store(self) -> StateStore:
        """Reach the store, as the process that runs."""
        store = world().store_of(world().current.host if world().current else 0)  # type: ignore[union-attr]
        store.version()  # a client that connects asks it something
        return store


def reached_store(name: str) -> StateStore:
    """Wait for the store, as all commands do."""
    say = partial(world().say, name)
    store = once_reached(world().deployment.opened_store, NoSignals(), Notifier(), say)
    assert store is not None, "no signal comes"
    return store


# -- the ranks: a model


class Group:
    """Ranks that have met."""

    def __init__(self, members: Mapping[int, Rank]) -> None:
        self.members, self.run, self.refusal, self.is_broken = dict(members), "", "", False


class Rank(Process):
    """What a rank waits for, when its group breaks, and what it writes into the store."""

    placement: Placement
    membership: int
    loss: StoreLoss
    state: RankState

    def __init__(self, _: object, argv: object, environ: Mapping[str, str]) -> None:
        self.number, self._environ = int(environ["RANK"]), environ
        self.group: Group | None = None
        self.is_meeting = self.is_exchanging = False
        launcher = world().current
        assert launcher is not None, "it is started by one"
        world().ranks[self.number] = self
        launcher.children.append(self)
        self._store = world().store_of(launcher.host)
        super().__init__(world(), f"rank {self.number}", launcher.host, self._live)

    def _live(self) -> None:
        self.world.sleep(START_S)
        group = self._met()
        try:
            self._start(group)
            self._serve(group)
        except BrokenGroup:
            self._recover(group)
            sys.exit(1)
        finally:
            group.is_broken = True  # its connections close with it

    def _until(self, is_there: Callable[[], bool], deadline_s: float, error: EplbError) -> None:
        deadline = self.world.now + deadline_s
        while not is_there():
            if self.world.now >= deadline:
                raise error
            self.world.sleep(0.25)

    def _met(self) -> Group:
        """As ``rebalance/assembly/meeting.py``; rank 0 is where ranks meet."""
        self.is_meeting = True

        def have_met() -> bool:
            there = {number: one for number, one in world().ranks.items() if self._meets(one)}
            if self.number == 0 and len(there) == NUM_RANKS:
                group = Group(there)
                for one in there.values():
                    one.group = group
            return self.group is not None

        missing = RankError(f"rank {self.number}: not all of {NUM_RANKS} ranks met in time")
        self._until(have_met, JOIN_DEADLINE_S, missing)
        self.is_meeting = False
        assert self.group is not None, "it was waited for"
        return self.group

    def _meets(self, other: Rank) -> bool:
        is_there = other.is_meeting and other.returncode is None and not other.is_stopped
        return is_there and self.world.are_linked(self.host, other.host)

    def _start(self, group: Group) -> None:
        """As ``_begun_run`` and ``build_rank``: a run of the store, and experts of the cache."""
        if self.number == 0:
            run, deployment = new_run_name(), world().deployment
            try:
                check_versions(self._store, Announcement(RANKS, run), clock=self.world.time)
                shapes = deployment.model, deployment.topology
                record_start(self._store, run, *shapes, (1_000_000, 0.0))
                group.run = run
            except EplbError as exc:
                group.refusal = str(exc)
        lost = RankError("a rank died while the start was recorded")
        self._until(lambda: bool(group.run or group.refusal or group.is_broken), 60.0, lost)
        if group.refusal or group.is_broken:
            raise RankError(f"rank 0 could not record the start: {group.refusal}")
        places.report_run(self.number, group.run, self._environ)
        self.placement = committed_placement(self._store)
        self.membership = self._store.epoch()
        self.loss = StoreLoss(self._store, group.run)
        no_cache = MigrationError(f"the cache of host {self.host} does not answer")
        self._until(self._has_cache, JOIN_DEADLINE_S, no_cache)
        self.world.sleep(START_S)
        places.report_ready(self.number, self._environ)

    def _has_cache(self) -> bool:
        cache = world().commands[f"cache-{self.host}"]
        return cache.is_ready and cache.returncode is None

    def _serve(self, group: Group) -> None:
        """Step with all others; report, and watch the store, as the threads of a rank do."""
        step = sequence = 0
        looked = last_step = self.world.now
        self.is_exchanging = True
        others = group.members.values()
        while True:
            if group.is_broken or any(one.returncode is not None for one in others):
                raise BrokenGroup(f"rank {self.number}: a rank died")
            if all(map(self._steps_with, others)):
                step, last_step = step + 1, self.world.now
                world().last_token = self.world.now
            elif self.world.now - last_step > VOTE_DEADLINE_S:
                raise BrokenGroup(f"rank {self.number}: a vote is late")
            if self.world.now - looked >= LOOK_S:
                looked = self.world.now
                found = (group.run, self.number, self.world.time(), step, self.placement.generation)
                detail = {"report_every_s": LOOK_S}
                self.state = RankState(*found, "idle", 0, 0, sequence, 0, detail=detail)
                try:
                    self.loss.restore_if_lost(self._store.live(), self)  # type: ignore[arg-type]
                    self._store.report(self.state)
                    if last_step == self.world.now:
                        sequence += self._store.append([self._sample(group.run, step, sequence)])
                except StoreError as exc:  # the threads of a rank try again
                    self.world.say(self.name, str(exc))
            self.world.sleep(STEP_S)

    def _steps_with(self, other: Rank) -> bool:
        is_linked = self.world.are_linked(self.host, other.host)
        return is_linked and other.is_exchanging and not other.is_stopped

    def describe(self) -> RankState:
        """For ``StoreLoss``."""
        return self.state

    def settled(self) -> tuple[Placement, int]:
        """For ``StoreLoss``."""
        return self.placement, 0

    def _sample(self, run: str, step: int, sequence: int) -> LoadSample:
        held = self.placement.slot_to_expert[:, world().deployment.topology.slots_on(self.number)]
        tokens = (held >= 0).astype(np.int64)  # none in an empty slot
        of_rank = (self.world.deployment_name, run, self.number, sequence, self.world.time())
        generation = self.placement.generation
        return LoadSample(*of_rank, step, step, "mixed", generation, held, tokens)

    def _recover(self, group: Group) -> None:
        """As ``recover``: reports, and one record, in which launchers read who is excluded."""
        dead = tuple(n for n, one in group.members.items() if one.returncode is not None)
        key = (group.run, self.number, self.membership, self.placement.generation)
        report = SurvivorReport(*key, 0, 0, 0, 0, 0, 0, 0, dead, self.world.time())
        everyone = set(range(NUM_RANKS))
        try:
            self._store.add_survivor_report(report)
            until = self.world.now + REPORTS_S
            while True:
                found = self._store.survivor_reports(group.run, self.membership)
                silent = everyone - {one.rank for one in found} - set(dead)
                if not silent or self.world.now >= until:
                    break
                self.world.sleep(0.25)
            record = decide(found, dead, silent)
            record = self._store.recover(record, expected_membership=self.membership) or record
        except EplbError as exc:
            self.world.say(self.name, f"no recovery: {exc}")
            return
        self.world.say(self.name, f"recovered: {record.reason}")


# -- the commands


def run_launcher(host: int) -> None:
    """The loop of a launcher, as it is."""
    deployment, say = world().deployment, partial(world().say, f"launch-{host}")
    given = launch.Launch(deployment, host, [], dict(os.environ), __name__)
    sys.exit(launch.run_ranks(given, deployment.settings.supervision, say))


def run_cache(host: int) -> None:
    """The start of a host cache, and its heartbeat."""
    heart = Heartbeat(world().deployment.opened_store, HOST_CACHE, str(host))
    roles._join_store(world().deployment, heart.mine)
    world().sleep(START_S)
    world().commands[f"cache-{host}"].is_ready = True
    with heart:
        Never(world).wait(1e9)


class Serve(Process):
    """A supervised controller, and the monitor; the start waits for the store as others do."""

    controller: Process | None = None
    monitor: Monitor | None = None
    supervised: Supervised

    def __init__(self) -> None:
        super().__init__(world(), "serve", 0, self._live)

    def _live(self) -> None:
        store, deployment = reached_store("serve"), world().deployment
        ensure_first_placement(store, deployment, "eplb serve", clock=self.world.time)
        parts = "the controller", "controller", self._start_controller, note_in(store)
        settings, clock = deployment.settings.supervision, self.world.monotonic
        supervised = self.supervised = Supervised(*parts, settings, clock=clock)
        supervised.begin()
        self.monitor = Monitor(
            store, clock=clock, supervision=lambda: SupervisionView((supervised.view(),))
        )
        while True:
            if self.controller is not None and self.controller.returncode is not None:
                how, self.controller = f"it exited with {self.controller.returncode}", None
                self.supervised.ended(how)
            self.supervised.check()
            self.world.sleep(0.25)

    def _start_controller(self) -> Callable[[], None]:
        self.controller = Process(self.world, "controller", 0, self._control)
        self.children.append(self.controller)
        return self.controller.kill

    def _control(self) -> None:
        holder = f"controller-{len(self.children)}-{self.world.now}"
        given, clock = world().deployment.controller, self.world.monotonic
        store = reached_store("controller")
        controller = Controller(store, given, holder=holder, clock=clock, monotonic=clock)
        while True:
            self.supervised.reported()
            try:
                controller.turn()
            except StoreError:
                self.world.sleep(0.5)
            self.world.sleep(0.5)


# -- the faults


@dataclass(frozen=True)
class Fault:
    """How a fault begins and ends, given a rank and a host, and how long it lasts."""

    begin: Callable[[int, int], object]
    end: Callable[[int, int], object] = lambda rank, host: None
    lasts_s: float = 0.0


def _set(name: str, lasts_s: float) -> Fault:
    return Fault(
        lambda rank, host: setattr(world(), name, True),
        lambda rank, host: setattr(world(), name, False),
        lasts_s,
    )


def _kill(name: str) -> Fault:
    return Fault(
        lambda rank, host: world().commands[name.format(host=host)].kill(), lasts_s=RESTART_S
    )


def _stop(is_stopped: bool, rank: int) -> None:
    if rank in world().ranks:
        world().ranks[rank].is_stopped = is_stopped


def _kill_controller(rank: int, host: int) -> None:
    controller = getattr(world().commands["serve"], "controller", None)
    if controller is not None:
        controller.kill()


def _lose_store(rank: int, host: int) -> None:
    world().is_store_down = True
    world().backend.lose()


def _skew(ahead_s: float) -> Fault:
    def skew(host: int, by_s: float) -> None:
        world().skew_s[host] = by_s

    return Fault(lambda rank, host: skew(host, ahead_s), lambda rank, host: skew(host, 0.0), 60.0)


FAULTS = {
    "rank-killed": Fault(lambda rank, host: world().ranks[rank].kill()),
    "rank-stopped": Fault(
        lambda rank, host: _stop(True, rank), lambda rank, host: _stop(False, rank), 60.0
    ),
    "cache-killed": _kill("cache-{host}"),
    "controller-killed": Fault(_kill_controller),
    "serve-killed": _kill("serve"),
    "launcher-killed": _kill("launch-{host}"),
    "store-stopped": _set("is_store_stopped", 60.0),
    "store-empty": Fault(
        _lose_store, lambda rank, host: setattr(world(), "is_store_down", False), RESTART_S
    ),
    "disk-full": Fault(lambda rank, host: None, lasts_s=60.0),
    "clock-ahead": _skew(3600.0),
    "clock-behind": _skew(-3600.0),
    "link-cut": _set("is_cut", 90.0),
}


# -- a schedule


class Schedule:
    """A deployment, its service manager, and faults one after another."""

    def __init__(self, deployment: Deployment, names: tuple[str, ...], seed: str) -> None:
        WORLDS[:] = [Restarted(deployment)]
        self._names, self._rng = names, random.Random(seed)
        self._restart_at: dict[str, float] = {}
        self._ends: list[tuple[float, Callable[[], object]]] = []
        for name in COMMANDS:
            self._start(name)

    def _start(self, name: str) -> None:
        kind, _, number = name.partition("-")
        if kind == "serve":
            world().commands[name] = Serve()
            return
        run = partial(run_cache if kind == "cache" else run_launcher, int(number))
        world().commands[name] = Process(world(), name, int(number), run)

    def pass_s(self, seconds: float) -> None:
        """Let time pass; end faults, and start again what was killed."""
        until = world().now + seconds
        while world().now < until:
            world().run_for(min(STEP_S, until - world().now))
            for due in [one for one in self._ends if one[0] <= world().now]:
                self._ends.remove(due)
                due[1]()
            for name, one in world().commands.items():
                if one.returncode in (None, 0, REFUSED):
                    continue
                if world().now >= self._restart_at.setdefault(name, world().now + RESTART_S):
                    del self._restart_at[name]
                    self._start(name)

    def verdict(self) -> tuple[str, str]:
        """The verdict of now, and its reason."""
        serve = world().commands["serve"]
        assert isinstance(serve, Serve), "as it was made"
        if serve.returncode is not None or serve.monitor is None:
            return "unreachable", f"eplb serve has status {serve.returncode}"
        try:
            serve.monitor.refresh()
        except StoreError as exc:
            return "blind", str(exc)
        state = serve.monitor.reading().state
        return state.verdict.value, state.reason

    def becomes_serving(self, within_s: float) -> float | None:
        """Wait until tokens are served, and the verdict is serving and stays so; when it was."""
        begun = since = world().now
        while world().now - begun < within_s:
            self.pass_s(LOOK_S)
            has_tokens = world().now - world().last_token < 3 * LOOK_S
            if self._ends or self.verdict()[0] != "serving" or not has_tokens:
                since = world().now
            elif world().now - since >= STEADY_S:
                return since - begun
        return None

    def run(self) -> tuple[str, float]:
        """Suffer the faults; returns the violation, and the time from the last cause on."""
        if self.becomes_serving(120.0) is None:
            return f"no start: {self.verdict()}", 0.0
        for number, name in enumerate(self._names):
            self.pass_s(self._rng.uniform(0.0, MOST_GAP_S) if number else 0.0)
            given = self._rng.randrange(NUM_RANKS), self._rng.choice(HOSTS)
            FAULTS[name].begin(*given)
            world().say("fault", f"{name} of rank, host {given}")
            self._ends.append(
                (world().now + FAULTS[name].lasts_s, partial(FAULTS[name].end, *given))
            )
        while self._ends:
            self.pass_s(STEP_S)
        served_s = self.becomes_serving(LIMIT_S)
        violations = list(world().defects)
        if served_s is None:
            states = {name: one.returncode for name, one in world().commands.items()}
            violations.append(f"{self.verdict()}, statuses of commands {states}")
        for one in [*world().commands.values(), *world().ranks.values()]:
            one.kill()
        world().run_for(1.0)  # their threads end
        return "; ".join(violations), LIMIT_S if served_s is None else served_s


def run_schedules(
    pairs: Sequence[tuple[str, ...]], num_gaps: int, seed: int
) -> Iterator[tuple[str, str, float]]:
    """Run schedules of each sequence of faults.

    Yields:
        name of the schedule, its violation or "", and the time to serve after the last cause.
    """
    hosts: dict[str, Any] = {"topology__nodes": 2, "topology__hosts": ["127.0.0.1", "127.0.0.2"]}
    with tempfile.TemporaryDirectory() as folder, simulated(world, Rank):
        found = deployment_in(Path(folder), controller__stage="all", **hosts)
        deployment = SimulatedDeployment(*(getattr(found, one.name) for one in fields(found)))
        for pair, number in itertools.product(pairs, range(num_gaps)):
            violation, served_s = Schedule(deployment, pair, f"{seed} {pair} {number}").run()
            yield f"{' + '.join(pair)}, schedule {number}", violation, served_s


def refusing() -> AbstractContextManager[None]:
    """Break the launchers on purpose: a start that lacks a peer is a refusal."""
    return replaced(local_ranks, "REFUSED", 1)


def main() -> int:
    """Run the schedules, and print which of them end badly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gaps", type=int, default=3, help="schedules of each pair")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="one fault, or a pair: A,B")
    parser.add_argument("--trace", action="store_true", help="print what was said")
    parser.add_argument("--mutant", action="store_true", help="break the launchers on purpose")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    pairs: list[tuple[str, ...]] = list(itertools.permutations(FAULTS, 2))
    pairs = [tuple(args.only.split(","))] if args.only else pairs
    times, num_bad, begun = list[float](), 0, time.monotonic()
    with refusing() if args.mutant else nullcontext():
        for name, violation, served_s in run_schedules(pairs, args.gaps, args.seed):
            times.append(served_s)
            num_bad += bool(violation)
            if args.trace:
                print("\n".join(world().trace))
            if violation:
                print(f"{name}: {violation}", flush=True)
    print(
        f"{len(pairs)} sequences of faults, {len(times)} schedules, {num_bad} end badly; serving "
        f"again p50 {np.median(times):.0f} s, p99 {np.percentile(times, 99):.0f} s after the last "
        f"cause; {time.monotonic() - begun:.0f} s"
    )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
