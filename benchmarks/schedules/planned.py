"""Schedules in which ranks join and leave as planned, with deaths and faults in between.

    python -m benchmarks.schedules --planned --first 0 --count 10000

As ``membership``, and an orchestrator retires ranks, scales and cancels. The controller drains
ranks that leave, and a launcher starts a process for each rank that should serve and has none.
Real are ``NextGroup``, the forming of groups, ``change_group``, ``be_admitted``, ``RankProcess``'s
choice between them and serving on, the operations and proposals of the store, and the choice of
ranks. The thread that forms a group is a coroutine too, so that a death, a cancelled operation, a
second process of a rank or a newer proposal may come at each of its waits.

Beside the claims of ``membership``: once all is quiet, the ranks that should serve do, and no
others; no operation stays open; the recorded group is the one that serves; and without a fault
nobody ends but the ranks that leave, and no group ever breaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import greenlet

from benchmarks.schedules.control import Doing, Program
from benchmarks.schedules.membership import (
    LEAST_STEPS,
    NUM_RANKS,
    Group,
    GroupOf,
    MembershipControl,
    MembershipSchedule,
    Sources,
    Voting,
    next_of,
    wait_until,
)
from benchmarks.schedules.mutants import replaced
from benchmarks.schedules.rank import Life, Rank
from benchmarks.schedules.simulated import LANES, Bank, Deployment, Stream, Violation
from benchmarks.schedules.world import Kind, Turn
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import EplbError, GroupChanges, MigrationError, PlacementError, RankError
from eplb.migration.membership import leavers, phase_of, shortage, wanted_for
from eplb.migration.serialisation import topology_from_dict
from eplb.migration.survivors import survive
from rebalance.assembly import next_group
from rebalance.assembly.meeting import Attendance
from rebalance.assembly.next_group import FORM_DEADLINE_S
from rebalance.assembly.process import RankProcess
from rebalance.assembly.survivors import Stages
from rebalance.rank.group import RUN_OF_WAITING
from rebalance.rank.group import Group as RankGroup
from rebalance.rank.rank import Rank as ServingRank
from rebalance.recovery import StoreRendezvous
from telemetry.state.membership import MEMBERS, MembershipRefused

OPERATIONS = (Doing.RETIRE, Doing.SCALE)
SERVED = (Life.SERVING, Life.RECOVERING)
ENDED = (Life.DEAD, Life.REFUSED, Life.LEFT)
QUIET = 0.3  # part of the programs that have operations and plans alone: then nothing may break
EACH = 0.15  # part of the other programs that have one given fault


def planned_program(rng: Random) -> Program:
    """Operations, plans, up to two losses, and what gets in their way."""
    doings = [rng.choice(OPERATIONS) for _ in range(rng.choice([1, 2, 2, 3]))]
    doings += [Doing.PUBLISH] * rng.choice([0, 1, 2])
    if rng.random() < QUIET:
        rng.shuffle(doings)
        return Program(tuple(doings))
    doings += [Doing.KILL] * rng.choice([0, 1, 1, 2])
    doings += [doing for doing in (Doing.CUT, Doing.CANCEL) if rng.random() < 2 * EACH]
    rng.shuffle(doings)
    for off, on in (
        (Doing.LOSE_STORE, Doing.FIND_STORE),
        (Doing.BREAK_LINKS, Doing.REPAIR_LINKS),
        (Doing.REFUSE, Doing.ALLOW),
        (Doing.SWITCH_OFF, Doing.SWITCH_ON),
    ):
        if rng.random() < EACH:
            first = rng.randint(0, len(doings) - 1)
            doings.insert(first, off)
            doings.insert(rng.randint(first + 1, min(len(doings), first + 3)), on)
    return Program(tuple(doings))


# -- what is simulated


class Process(RankProcess):
    """A rank's process, which nobody has started."""

    def __init__(self, rank: ServingRank) -> None:
        super().__init__(rank, None, None, {})  # type: ignore[arg-type]

    def attend(self, members: Sequence[int]) -> Attendance:
        """What it shows to others."""
        return Attendance(self.rank.number, members, "host", b"secret", {})


class Forming:
    """Stands in for the thread that forms a group: a coroutine."""

    def __init__(
        self,
        schedule: PlannedSchedule,
        target: Callable[..., None] | None = None,
        args: tuple[Any, ...] = (),
        **_: Any,
    ) -> None:
        self._schedule, self._target, self._args = schedule, target, args
        self.ident: int | None = None
        self.is_over: Callable[[], bool] = lambda: True  # what it waits for
        self._fiber: greenlet | None = None

    def start(self) -> None:
        """Begin at the schedule's next turn for it."""
        assert self._target is not None, "one without a target is never started"
        self.ident = 1
        self._fiber = greenlet(partial(self._target, *self._args), self._schedule.main)
        self._schedule.forming[self._target.__self__._rank.number] = self  # type: ignore[attr-defined]

    def is_alive(self) -> bool:
        """Say whether it has not ended."""
        return self._fiber is not None and not self._fiber.dead

    def get_on(self) -> None:
        """Run to its next wait."""
        assert self._fiber is not None, "it was started"
        is_over = self._fiber.switch()
        self.is_over = is_over if callable(is_over) else lambda: True

    def join(self, timeout_s: float) -> None:
        """Wait for its end, or until the time has passed."""
        rng = self._schedule.rng
        wait_until(lambda: not self.is_alive() or rng.random() < 0.1)


# -- operations


class PlannedControl(MembershipControl):
    """Asks for other ranks, drains those that leave, and starts those that are missing."""

    _schedule: PlannedSchedule
    _num_asked = 0
    _undrained = (-1, -1)  # state of the store for which there was no plan

    @property
    def is_alone(self) -> bool:
        """Time always passes: proposals and offers have deadlines."""
        return False

    @property
    def is_quiet(self) -> bool:
        """Say whether the program has no fault."""
        return set(self.program.doings) <= {Doing.PUBLISH, *OPERATIONS}

    def _may(self, doing: Doing) -> bool:
        if doing in (*OPERATIONS, Doing.CANCEL):
            return not self._store.is_down and self._schedule.is_served
        if doing in (Doing.KILL, Doing.CUT):  # others come, unless one rank is to serve alone
            num_serving = sum(one.life is Life.SERVING for one in self._schedule.ranks)
            return num_serving > 1 or len(self._schedule.wanted()) == 1
        return super()._may(doing)

    def _do(self, doing: Doing) -> None:
        if doing not in (*OPERATIONS, Doing.CANCEL):
            super()._do(doing)
            return
        self._left.remove(doing)
        self._not_before = len(self._schedule.trace) + self._rng.choice(self._delays)
        self._schedule.trace.append((doing.value, -1))
        if doing is Doing.CANCEL:
            if (latest := self._store.membership_change()) and not latest.ended:
                self._end(latest.id, "cancelled")
        else:
            self._ask(doing)

    def _end(self, change_id: str, ended: Any) -> None:
        if self._store.end_membership_change(change_id, ended, why="a test"):
            self._schedule.counts[f"operations {ended}"] += 1

    def _ask(self, doing: Doing) -> None:
        store, rng, schedule = self._store, self._rng, self._schedule
        topology, placement = schedule.served_topology(), schedule.committed()
        spares, experts = schedule.deployment.pace.spare_slots, placement.num_experts
        found = store.wanted_ranks()
        before = range(topology.num_ranks) if found is None else found
        if doing is Doing.RETIRE:
            wanted = tuple(sorted({*before} - {rng.choice(before)}))
        else:
            count = rng.randint(2, topology.num_ranks)
            try:
                wanted = wanted_for(count, before, placement, topology, 1, spares)
            except PlacementError:
                return
        if not wanted or shortage(wanted, experts, topology, spares):
            return
        self._num_asked += 1
        try:
            store.change_membership(
                f"op-{self._num_asked}",
                wanted,
                asked=list(wanted),
                alive=topology.alive.tolist(),
                reason="a test",
                by="a test",
                within_s=None if self.is_quiet else rng.choice([None, 3.0, 30.0]),
            )
        except MembershipRefused:
            schedule.counts["operations refused"] += 1
        else:
            schedule.counts["operations"] += 1

    def _publish(self) -> None:
        self._publish_without(self._schedule.leaving())

    def _publish_without(self, leaving: Sequence[int]) -> bool:
        """Publish a plan that leaves nothing on ranks that are to leave; False: there is none."""
        schedule, placement = self._schedule, self._schedule.committed()
        left = schedule.drained(schedule.served_topology(), leaving)
        plan_id, version = self._store.next_plan_id(), self._served_version()
        numbers = list(range(len(left.targets)))
        self._rng.shuffle(numbers)
        for number in numbers:
            migration = left.migration(placement, number, plan_id, version)
            if migration is not None:
                self._publish_migration(migration)
                return True
        return False

    def is_overdue(self) -> bool:
        """Whether the open operation has reached its deadline."""
        store = self._schedule.store
        if store.is_down or (latest := store.peek(store.membership_change)) is None:
            return False
        return latest.left_s(self._schedule.now) == 0.0

    def end_overdue(self) -> None:
        """End it, as the controller."""
        latest = self._store.membership_change()
        assert latest is not None, "looked at"
        self._end(latest.id, "failed")

    def can_drain(self) -> bool:
        """Whether ranks that are to leave hold experts, and no plan is open."""
        schedule, store = self._schedule, self._schedule.store
        if store.is_down or not schedule.leaving() or store.peek(store.published) is not None:
            return False
        if self._undrained == store.failing.state:
            return False  # there was no plan, and nothing has changed
        phase, _ = phase_of(schedule.wanted(), schedule.committed(), schedule.served_topology())
        return phase == "draining" and store.peek(store.control).movement

    def drain(self) -> None:
        """Publish a plan that empties them; as the controller, end an operation without any."""
        schedule = self._schedule
        if self._publish_without(schedule.leaving()):
            return
        self._undrained = schedule.store.failing.state
        latest = self._store.membership_change()
        is_whole = schedule.served_topology().alive[list(schedule.wanted())].all()
        if latest is not None and not latest.ended and is_whole:
            self._end(latest.id, "failed")

    def is_settled(self) -> bool:
        """Say whether nothing is left to happen."""
        schedule, store = self._schedule, self._schedule.store
        ranks = schedule.remaining()
        if store.is_down or not ranks:
            return not ranks
        if self._left or not all(self._is_at_rest(rank) for rank in ranks):
            return False
        if any(rank.life is not Life.SERVING for rank in ranks) or schedule.has_forming():
            return False
        group, latest = schedule.groups[-1], store.peek(store.membership_change)
        if tuple(rank.number for rank in ranks) != group.members:
            return False
        if group.is_broken or group.num_steps < LEAST_STEPS or not (latest is None or latest.ended):
            return False
        return group.members == schedule.wanted() and store.peek(store.published) is None

    def check_end(self) -> None:
        """Judge a settled schedule."""
        schedule, store = self._schedule, self._store
        store.is_down = False
        super().check_end()
        record, serving = store.recovery(), schedule.remaining()
        if serving and record is not None and record.survivors != schedule.groups[-1].members:
            raise Violation(
                f"the store records a group of {record.survivors}, and "
                f"{schedule.groups[-1].members} serve"
            )
        if failed := [one.number for one in serving if "failed" in one.shared.state.frozen_reason]:
            raise Violation(f"ranks {failed}: a thread failed")
        changes = [event for event in store.events() if event.kind == MEMBERS]
        ends = Counter(event.detail["state"] for event in changes)
        schedule.counts["operations done"] += ends["done"]
        is_broken = any(group.is_broken for group in schedule.groups)
        if self.is_quiet and (not serving or schedule.counts["refusals"] or is_broken):
            why = [f"rank {one.number}: {one.why}" for one in schedule.ranks if one.why]
            raise Violation(f"something broke in a schedule without a fault: {why}")


# -- a schedule


class PlannedSchedule(MembershipSchedule):
    """One seed's schedule."""

    in_fibers, kind = (Life.RECOVERING, Life.JOINING), "--planned "
    control: PlannedControl

    def __init__(self, seed: int) -> None:
        self.main, self.forming = greenlet.getcurrent(), dict[int, Forming]()
        self._next_votes: dict[int, Voting] = {}  # of groups in which nobody serves yet
        self._came: dict[str, dict[int, Process]] = {}  # to a group that is being formed
        self._killed: list[object] = []  # coroutines, which must not run to their ends
        self._topologies: dict[str, Topology] = {}  # by run
        super().__init__(seed)
        layers = tuple(range(self.deployment.start.num_layers))
        experts = self.deployment.start.num_experts
        self._model = ModelShape(layers, experts, top_k=1, hidden=LANES, intermediate=LANES)
        self.processes = {rank.number: Process(rank.agent) for rank in self.ranks}
        for process in self.processes.values():
            process.begin_group()

    def _control(self) -> PlannedControl:
        return PlannedControl(self, planned_program(self.rng))

    def run(self) -> None:
        """As ever, with what ``next_group`` waits for."""
        with ExitStack() as stack:
            for name, by in (
                ("rejoin", self._meet),
                ("gathered", self._gathered),
                ("await_exchange", lambda wait, check: wait(check)),
                ("map_peers", lambda rank, topology, *_: topology),
                ("MappedSlots", lambda rank, bank, topology: (rank, topology)),
                ("WeightSources", self._next_sources),
                ("prove_weights", self._prove),
                ("serving_ranks", lambda *_: [one for one in self.ranks if one.life in SERVED]),
                ("Thread", partial(Forming, self)),
                ("time", SimpleNamespace(monotonic=lambda: self.now)),
            ):
                stack.enter_context(replaced(next_group, name, by))
            super().run()

    # -- who is there

    @property
    def is_served(self) -> bool:
        """Say whether a rank serves."""
        return any(rank.life is Life.SERVING for rank in self.ranks)

    def has_forming(self) -> bool:
        """Say whether a group is being formed."""
        return any(forming.is_alive() for forming in self.forming.values())

    def wanted(self) -> tuple[int, ...]:
        """Ranks that should serve."""
        found = self.store.peek(self.store.wanted_ranks)
        return tuple(range(NUM_RANKS)) if found is None else found

    def served_topology(self) -> Topology:
        """Topology of the latest run."""
        info = self.store.peek(self.store.current_run)
        assert info is not None, "a schedule starts with a run"
        if info.run not in self._topologies:
            self._topologies[info.run] = topology_from_dict(dict(info.topology))
        return self._topologies[info.run]

    def leaving(self) -> tuple[int, ...]:
        """Members that should not serve any more."""
        return leavers(self.wanted(), self.served_topology())

    def committed(self) -> Placement:
        """The placement that the store names."""
        found = self.store.peek(self.store.committed)
        assert found is not None, "a schedule starts with a placement"
        return found.placement

    def drained(self, topology: Topology, leaving: Sequence[int]) -> Deployment:
        """The deployment with targets that leave nothing on some of its ranks."""
        without = [*np.flatnonzero(~topology.alive).tolist(), *leaving]
        targets = list[Placement]()
        for target in (*self.deployment.targets, self.committed()):
            with suppress(PlacementError):
                targets.append(survive(target, self.deployment.topology, without).target)
        return replace(self.deployment, topology=topology, targets=tuple(targets), known={})

    def kill(self, victim: Rank) -> None:
        """End a process at once, whatever it is at."""
        number = victim.number
        self._killed.append(self._fibers.pop(number, None))
        super().kill(victim)
        self._lose(number, self._formed.values())
        self._killed.append(self.forming.pop(number, None))

    def _lose(self, number: int, groups: Iterable[Group]) -> None:
        for group in groups:
            group.dead |= {number} & set(group.members)

    # -- turns

    def _turns(self) -> list[Turn]:
        control = self.control
        return [
            *super()._turns(),
            Turn(0.5, "drain", -1, control.can_drain, control.drain),
            Turn(0.5, "deadline", -1, control.is_overdue, control.end_overdue),
        ]

    def _turns_of_death(self, rank: Rank) -> list[Kind]:
        number = rank.number

        def can_learn() -> bool:
            votes = self._next_votes.get(number)
            return votes is not None and rank.life not in ENDED and votes.can_learn()

        def can_look() -> bool:
            # Others have something to do by a change of the store, or by a death.
            is_due = rank.life is Life.SERVING and self.now >= rank.polls_at
            return is_due and (number in self._next_votes or number == self._proposer())

        return [
            *super()._turns_of_death(rank),
            (0.3, "detect death in the next group", can_learn, lambda: self._learn_next(number)),
            (1.0, "look", can_look, rank.poll_store),
            (1.0, "form", lambda: self._can_form(number), lambda: self.forming[number].get_on()),
            (0.1, "start", lambda: self._can_start(rank), lambda: self._start(rank)),
        ]

    def _or_break(self, rank: Rank, act: Callable[[], None]) -> None:
        def or_change() -> None:
            try:
                act()
            except GroupChanges as exc:
                rank.breaks(str(exc))

        super()._or_break(rank, or_change)

    def _proposer(self) -> int:
        return self.groups[-1].members[0]

    def _learn_next(self, number: int) -> None:
        self._next_votes[number].learn()
        self.store.num_learned += 1

    def _can_form(self, number: int) -> bool:
        forming = self.forming.get(number)
        if forming is None or not forming.is_alive():
            return False
        try:
            return forming.is_over()
        except EplbError:
            return True  # it ends the wait too

    def _can_start(self, rank: Rank) -> bool:
        is_missing = rank.life in ENDED and rank.number in self.wanted()
        return is_missing and self.is_served and not self.store.is_down

    def _start(self, rank: Rank) -> None:
        """Start a process for a rank that should serve: it joins."""
        number, before = rank.number, rank.bank
        alone = replace(self.deployment.topology, alive=np.arange(NUM_RANKS) == number)
        banks, faults, rng = rank.transport.given  # type: ignore[attr-defined]
        banks[number] = Bank(
            before.num_layers, before.num_slots, before.num_staging, Stream(is_immediate=True)
        )
        group = Group((number,), rng, set())
        rank.begin(
            Voting(group, number),
            Sources(number, alone, banks, faults, rng),
            alone,
            self.committed(),
            RUN_OF_WAITING,
        )
        rank.life = Life.JOINING
        self._watch(rank)
        self._next_votes.pop(number, None)
        self.processes[number] = Process(rank.agent)
        self.counts["started"] += 1

    def _survive(self, rank: Rank) -> None:
        """What ``RankProcess.survive`` does, but for threads and reports."""
        process, was_joining = self.processes[rank.number], rank.life is Life.JOINING
        try:
            serves = process.enter_next(Stages(lambda: self.now), "")
        except EplbError as exc:
            rank.life, rank.why = Life.REFUSED, str(exc)
            self.counts["refusals"] += not was_joining
        else:
            if serves:
                rank.take_turns()
                rank.life = Life.SERVING
                if rank.member.votes not in self.groups:
                    self.groups.append(rank.member.votes)  # type: ignore[arg-type]
                    self.counts["planned groups"] += 1
                self.counts["joined"] += was_joining
                process.begin_group()
                self._watch(rank)
                self._next_votes.pop(rank.number, None)
                return
            rank.life = Life.LEFT
            self.counts["left"] += not was_joining
        rank.agent.leave()
        # It has left those before in order; nobody serves in them any more.
        left = [rank.member.votes, *self.groups[:-1]]
        self._lose(rank.number, (group for group in self._formed.values() if group not in left))
        self._killed.append(self.forming.pop(rank.number, None))

    # -- the next group

    def _meet(
        self,
        name: str,
        before: RankGroup,
        members: Sequence[int],
        rendezvous: StoreRendezvous,
        *,
        run: str,
        **_: Any,
    ) -> RankGroup:
        """Exchange addresses through the store, then form the group of a proposal."""
        came, rank = self._came.setdefault(name, {}), before.rank
        came[rank] = self.processes[rank]
        rendezvous.set(f"{name}: address of {rank}", b"")
        addresses = [f"{name}: address of {one}" for one in members]
        until = self.now + FORM_DEADLINE_S

        def have_met() -> bool:
            if self.store.peek(lambda: rendezvous.check(addresses)):
                return True
            rendezvous.look()
            if self.now >= until:
                raise RankError(f"rank {rank}: the ranks did not meet in time")
            return False

        try:
            wait_until(have_met)
        except EplbError:
            came.pop(rank)  # it closes its connections: the others wait for it in vain
            self._lose(rank, [self._formed[name]] if name in self._formed else [])
            raise
        if name not in self._formed:
            gone = {
                one
                for one in members
                if self.ranks[one].life in ENDED or self.processes[one] is not came.get(one)
            }
            self._formed[name] = Group(tuple(members), self.rng, gone)
        group = self._formed[name]
        self._next_votes[rank] = votes = Voting(group, rank)
        return next_of(before, members, rendezvous, votes, run)

    def _gathered(self, mine: Any, of: GroupOf, check: Callable[[], None]) -> list[Any]:
        try:
            return super()._gathered(mine, of, check)
        except RuntimeError:
            if of.rank in self._next_votes:
                self._next_votes[of.rank].learn()
            raise

    def _next_sources(self, mapped: tuple[int, Topology], _: object) -> Sources:
        rank, topology = mapped
        transport = self.ranks[rank].transport
        assert isinstance(transport, Sources), "made so"
        return transport.of_group(topology)

    def _prove(self, *_: object) -> None:
        if self.rng.random() < self.faults.wrong_bytes:
            raise MigrationError("the host of this rank has other weights")
