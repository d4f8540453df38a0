"""Schedules in which survivors serve on: deaths one after another, cut links, plans in between.

    python -m benchmarks.schedules --membership --first 0 --count 10000

Four ranks. What a survivor does after ``BrokenGroup`` is the real
``rebalance.assembly.survivors.serve_on`` with all that it calls: recovery, and the steps of
``rebalance.assembly.change``. Each runs as a coroutine
(greenlet) that gives way wherever it would wait, so that the seed decides who gets on, and a
further rank may die or a store fail at each of these points. Simulated are the groups (addresses
are exchanged through the real rendezvous in the store), their collectives and votes, the bytes and
the clock.

Beside the claims of ``control``: a group serves nothing before the store has named its placement
and run; each expert has a slot on a live rank in each step; a recovery that nothing else disturbs
ends in serving, also where a rank lost its links to all others and the store is reached by both
sides; and survivors that cannot serve on end, so that a start of all ranks finds a placement with
every expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from greenlet import greenlet
from numpy.typing import NDArray

from benchmarks.schedules.control import Claims, Control, Doing, Program
from benchmarks.schedules.mutants import replaced
from benchmarks.schedules.rank import Life, Rank
from benchmarks.schedules.simulated import (
    LANES,
    Bank,
    Deployment,
    Faults,
    Host,
    Member,
    Pending,
    Row,
    Step,
    Store,
    Transport,
    Violation,
    Votes,
    record_words,
)
from benchmarks.schedules.world import Kind, Schedule
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import EplbError, PlacementError, RankError
from eplb.migration.recovery import Recovery, run_of
from eplb.migration.serialisation import topology_from_dict
from eplb.migration.survivors import survive
from rebalance import recovery
from rebalance.assembly import experts, survivors
from rebalance.assembly.change import Stages
from rebalance.assembly.group import StoreRendezvous
from rebalance.assembly.rank import record_start
from rebalance.rank import group as rank_group
from rebalance.rank.group import Group as RankGroup
from rebalance.rank.rank import Rank as ServingRank
from rebalance.recovery import Deadlines, recover
from rebalance.types import Digest, Outcome, Record
from rebalance.weights.sources import HOST
from runtime.memory import digest

NUM_RANKS, RUN = 4, "run"
LEAST_STEPS = 3  # that the last group makes before a schedule is settled
NOBODY = frozenset[int]()
EACH = 0.15  # of programs have this fault
REMAINING = (Life.SERVING, Life.RECOVERING, Life.JOINING)


def wait_until(is_over: Callable[[], bool]) -> None:
    """Let others get on until something holds."""
    while not is_over():
        greenlet.getcurrent().parent.switch(is_over)


# -- what is simulated


class WaitingStore(Store):
    """A store whose waits give way: to a change, to time, and to news of a death."""

    num_learned = 0

    def wait(self, version: int, timeout_s: float) -> int:
        """Return the version, of now or after others have got on."""
        if timeout_s > 0 and greenlet.getcurrent().parent:
            seen = version, self.backend.now(), self.num_learned
            wait_until(
                lambda: (self.peek(self.version), self.backend.now(), self.num_learned) != seen
            )
        return self.version()


class Group(Votes):
    """One membership's group: votes, and collectives of messages."""

    def __init__(self, members: tuple[int, ...], rng: Random, gone: set[int]) -> None:
        super().__init__(len(members), rng)
        self.members, self.dead = members, gone & set(members)
        self.cut: set[frozenset[int]] = set()  # pairs whose links broke
        self.num_steps = 0
        self.has_lost_patience: Callable[[], bool] = lambda: False  # of one that waits
        self._messages: list[dict[int, Any]] = []
        self._num_sent = dict.fromkeys(members, 0)

    @property
    def is_broken(self) -> bool:
        """Whether a member or a link is lost."""
        return bool(self.dead or self.cut)

    def has_waited(self) -> bool:
        """Say whether a rank that waits looks at what it waits for."""
        return self._rng.random() < 0.1

    def lost_to(self, rank: int) -> frozenset[int]:
        """Members that a rank can know to be lost."""
        if not self.is_broken:
            return NOBODY
        beyond = (pair - {rank} for pair in self.cut if rank in pair)
        return frozenset(self.dead - {rank}).union(*beyond)

    def can_end(self, number: int) -> bool:
        """Say whether every rank has voted, or one never will."""
        return len(self._ballots[number]) == self.num_ranks or self.is_broken

    def gathered(self, mine: Any, rank: int, check: Callable[[], None] = lambda: None) -> list[Any]:
        """As ``runtime.group.gathered``; after a loss it may have ended for some of them alone."""
        number = self._num_sent[rank]
        self._num_sent[rank] += 1
        if number == len(self._messages):
            self._messages.append({})
        messages = self._messages[number]
        messages[rank] = mine

        def is_over() -> bool:
            has_all = len(messages) == self.num_ranks
            if not has_all:
                check()
            return has_all or self.is_broken or self.has_lost_patience()

        wait_until(is_over)
        if len(messages) < self.num_ranks:
            raise RuntimeError("connection closed by peer, or timed out")
        if self.is_broken and self._rng.random() < 0.5:
            raise RuntimeError("connection closed by peer")
        # gloo would give the bytes of one exchange to another.
        if (
            len({tuple(one) if isinstance(one, dict) else type(one) for one in messages.values()})
            > 1
        ):
            raise Violation(f"ranks {self.members} are at different exchanges: {messages}")
        return [messages[one] for one in self.members]


@dataclass(frozen=True)
class GroupOf:
    """A group as one rank has it."""

    group: Group
    rank: int


class Voting(Member):
    """A member's votes, which tell of its failure."""

    votes: Group

    def can_learn(self) -> bool:
        """Whether a connection broke that the rank has not noticed."""
        return self.known_dead != self.votes.lost_to(self.rank)

    def learn(self) -> None:
        """Notice it."""
        self.known_dead = self.votes.lost_to(self.rank)

    def begin_beats(self) -> None:
        """Nobody is silent here."""

    def cast(self, ballot: Sequence[int]) -> Pending:
        """Start a vote; a coroutine waits for its end."""
        pending = super().cast(ballot)
        return AwaitedVote(self, self.number) if greenlet.getcurrent().parent else pending

    def close(self, *, is_failure: bool = False) -> None:
        """Leave; after a failure the others see a closed connection."""
        if is_failure:
            self.votes.dead.add(self.rank)


class AwaitedVote(Pending):
    """A vote in a group that is being formed."""

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Let others get on until it has ended, or for a while."""
        voting = self._member
        if voting.result is None:
            wait_until(lambda: voting.can_arrive or voting.votes.has_waited())
            if not voting.can_arrive:
                return Outcome.LATE, []
        return super().poll(timeout_s)


class RefillingHost(Host):
    """The memory of a rank's host, from which survivors also load into live slots."""

    bank: Bank
    faults: Faults
    rng: Random

    def load(self, records: Sequence[Record], *, deadline_s: float) -> tuple[list[Digest], int]:
        """Have records in memory; give their digests."""
        num_bytes = self.lease(records, deadline_s=deadline_s)
        words = record_words(self.version)
        return [digest(torch.from_numpy(words[record])) for record in records], num_bytes

    def read(self, record: Record, into: torch.Tensor) -> None:
        """Copy a whole record at once."""
        if record not in self.leased:
            raise Violation(f"{record} is refilled, which the host was not asked for")
        row, _ = self.bank.row_of(into)
        words = record_words(self.version)[record]
        is_wrong = (record, HOST) in self.faults.wrong_places
        is_wrong |= self.rng.random() < self.faults.wrong_bytes
        self.bank.words[row] = ~words if is_wrong else words


class Sources(Transport):
    """The sources of a rank, over all groups that it is in."""

    def __init__(
        self, rank: int, topology: Topology, banks: list[Bank], faults: Faults, rng: Random
    ) -> None:
        super().__init__(rank, topology, banks, faults, rng)
        self.given, self.slots = (banks, faults, rng), self  # type: ignore[assignment]
        host = RefillingHost(faults, rng)
        host.bank, host.faults, host.rng = banks[rank], faults, rng
        self.host = self._host = host  # type: ignore[assignment]

    def of_group(self, topology: Topology) -> Sources:
        """The sources that are left to survivors; on the same host."""
        after = Sources(self.rank, topology, *self.given)
        after.host = after._host = self._host  # type: ignore[assignment]
        after.watch = self.watch
        return after

    def end_copies(self) -> None:
        """Copies that are under way end before the rank leaves its group."""
        while self.in_flight:
            self.land(self.in_flight[0])


class SimulatedTime:
    """Stands in for the module ``time``: who would sleep gives way."""

    monotonic = staticmethod(lambda: 0.0)
    sleep = staticmethod(lambda seconds: greenlet.getcurrent().parent.switch(lambda: True))


class PassingTime(SimulatedTime):
    """The same, with the clock of the schedule: who waits for a host does not wait for ever."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.time = self.monotonic = clock  # type: ignore[method-assign]


# -- programs


def membership_program(rng: Random) -> Program:
    """Plans, one to three losses, and what gets in their way."""
    losses = [rng.choice([Doing.KILL, Doing.KILL, Doing.KILL, Doing.CUT])]
    losses += [Doing.KILL] * rng.choice([0, 0, 1, 1, 2])
    doings = losses + [Doing.PUBLISH] * rng.choice([0, 1, 2, 3])
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


class MembershipControl(Control):
    """Loses ranks, and publishes plans for those that are left."""

    _schedule: MembershipSchedule

    @property
    def is_alone(self) -> bool:
        """Say whether the program has one loss, and nothing that gets in its way."""
        others = set(self.program.doings) - {Doing.PUBLISH, Doing.KILL, Doing.CUT}
        losses = [doing for doing in self.program.doings if doing in (Doing.KILL, Doing.CUT)]
        return not others and len(losses) == 1

    def _may(self, doing: Doing) -> bool:
        if doing in (Doing.KILL, Doing.CUT):
            return len(self._schedule.remaining()) > 1
        return super()._may(doing)

    def _do(self, doing: Doing) -> None:
        if doing is Doing.CUT:
            self._left.remove(doing)
            self._schedule.trace.append((doing.value, -1))
            self._schedule.cut()
        else:
            super()._do(doing)

    def _kill(self) -> None:
        victim = self._rng.choice(self._schedule.remaining())
        self._schedule.kill(victim)

    def _publish(self) -> None:
        info = self._store.current_run()
        assert info is not None, "a schedule starts with a run"
        alive = topology_from_dict(dict(info.topology)).alive
        whole = self._schedule.deployment
        self._schedule.deployment = self._schedule.left_of(~alive)
        try:
            super()._publish()
        finally:
            self._schedule.deployment = whole

    def is_settled(self) -> bool:
        """Say whether nothing is left to happen."""
        ranks = self._schedule.remaining()
        is_over = not self._left or len(ranks) <= 1
        if not is_over or self._schedule.store.is_down:
            return False
        if any(rank.life is Life.RECOVERING or not self._is_at_rest(rank) for rank in ranks):
            return False
        group = self._schedule.groups[-1]
        is_whole = {rank.number for rank in ranks} == set(group.members) and not group.is_broken
        if ranks and not (is_whole and group.num_steps >= LEAST_STEPS):
            return False
        return not ranks or self._store.peek(self._store.published) is None

    def check_end(self) -> None:
        """Judge a settled schedule."""
        schedule = self._schedule
        serving = schedule.remaining()
        for rank in serving:
            self._check_rank(rank)
        committed = self._store.committed()
        assert committed is not None, "a schedule starts with a placement"
        schedule.check_covered(committed.placement.slot_to_expert, "the store's placement")
        schedule.check_promise()
        for name in ("committed", "dropped"):
            kinds = {"commit"} if name == "committed" else {"abort", "reject"}
            schedule.counts[name] += sum(
                event.kind in kinds and event.detail["plan_id"] > 0
                for event in self._store.events()
            )
        schedule.counts["served on"] += len(schedule.groups) - 1
        schedule.counts["started again"] += not serving


# -- a schedule


class MembershipClaims(Claims):
    """The claims, of the ranks that can still serve: what others read or write serves nobody."""

    def __init__(self, schedule: MembershipSchedule) -> None:
        super().__init__(schedule.ranks)
        self._schedule = schedule
        self._begun_in: dict[Group, dict[int, tuple[int, Step]]] = {}

    def begun(self, rank: int, step: Step) -> None:
        """A rank begins a step of its group; a pass that was broken off is run again."""
        group = self._schedule.ranks[rank].member.votes
        self._begun = self._begun_in.setdefault(group, {})
        super().begun(rank, step)

    def _is_current(self, rank: Rank) -> bool:
        return rank.life is Life.SERVING and rank.member.votes is self._schedule.groups[-1]

    def _check_stream(self, rank: Rank, target: Row, source: Row | None) -> None:
        if self._is_current(rank):
            super()._check_stream(rank, target, source)

    def _check_unread(self, row: Row) -> None:
        every, self._ranks = self._ranks, [r for r in self._ranks if self._is_current(r)]
        super()._check_unread(row)
        self._ranks = every


def next_of(
    before: RankGroup,
    members: Sequence[int],
    rendezvous: StoreRendezvous,
    votes: Voting,
    run: str,
) -> RankGroup:
    """The group that a rank has formed with others after one that it was in."""
    alive = np.isin(np.arange(before.topology.num_ranks), members)
    of_rank: Any = GroupOf(votes.votes, before.rank)
    return replace(
        before,
        run=run_of(run, rendezvous.membership),
        topology=replace(before.topology, alive=alive),
        votes=votes,
        tokens=of_rank,
        control=of_rank,
        membership=rendezvous.membership,
    )


class MembershipSchedule(Schedule):
    """One seed's schedule."""

    num_ranks, lags, kind = NUM_RANKS, (0,), "--membership "
    make_store, make_member, make_transport = WaitingStore, Voting, Sources
    in_fibers: tuple[Life, ...] = (Life.RECOVERING,)
    control: MembershipControl
    store: WaitingStore
    groups: list[Group]  # each membership's, the latest last

    def __init__(self, seed: int) -> None:
        self._fibers: dict[int, greenlet] = {}
        self._waits: dict[int, Callable[[], bool]] = {}  # of those: what each waits for
        self._left: dict[bytes, Deployment] = {}
        self._formed: dict[str, Group] = {}  # by the name of the membership
        self._left_groups: set[tuple[int, str]] = set()  # (rank, name) before it was formed
        super().__init__(seed)
        topology, start = self.deployment.topology, self.deployment.start
        layers = tuple(range(start.num_layers))
        model = ModelShape(layers, start.num_experts, top_k=1, hidden=LANES, intermediate=LANES)
        record_start(self.store, RUN, model, topology, (1000, 0.0))
        self.may_recover()

    def _votes(self) -> Votes:
        self.groups = [Group(tuple(range(NUM_RANKS)), self.rng, set())]
        return self.groups[0]

    def _claims(self) -> Claims:
        return MembershipClaims(self)

    def _control(self) -> Control:
        return MembershipControl(self, membership_program(self.rng))

    def run(self) -> None:
        """As ever, over simulated groups."""
        with ExitStack() as stack:
            for where, name, by in (
                (survivors, "rejoin", self._rejoin),
                (rank_group, "gathered", self._gathered),
                (rank_group, "set_deadline", lambda group, deadline_s: None),
                (survivors, "recover", self._recover),
                (recovery, "time", SimulatedTime),
                (experts, "time", PassingTime(lambda: self.now)),
            ):
                stack.enter_context(replaced(where, name, by))
            super().run()

    # -- who is there

    def remaining(self) -> list[Rank]:
        """Ranks whose processes have not ended."""
        return [one for one in self.ranks if one.life in REMAINING]

    def left_of(self, is_dead: NDArray[np.bool_]) -> Deployment:
        """The deployment as the controller of a smaller group has it."""
        key = is_dead.tobytes()
        if key not in self._left:
            whole, targets = self.deployment, list[Placement]()
            for target in whole.targets:
                with suppress(PlacementError):
                    targets.append(survive(target, whole.topology, np.flatnonzero(is_dead)).target)
            topology = replace(whole.topology, alive=~is_dead)
            targets = targets or [whole.start]  # too few slots: nothing can be built
            self._left[key] = replace(whole, topology=topology, targets=tuple(targets), known={})
        return self._left[key]

    def kill(self, victim: Rank) -> None:
        """End a process at once, whatever it is at."""
        victim.life = Life.DEAD
        self._fibers.pop(victim.number, None)
        for group in self.groups:
            group.dead |= {victim.number} & set(group.members)
        self.counts["deaths"] += 1

    def cut(self) -> None:
        """Break all links of a rank to the others; new ones can be made."""
        group = self.groups[-1]
        there = [one for one in self.remaining() if one.number in group.members]
        if not there:
            return
        victim = self.rng.choice(there)
        group.cut |= {frozenset({victim.number, one}) for one in group.members} - {
            frozenset({victim.number})
        }
        self.counts["cuts"] += 1

    # -- turns

    def _tick(self) -> None:
        """Time does not pass while survivors of a lone loss agree: none of them is late."""
        is_recovering = any(one.life is Life.RECOVERING for one in self.ranks)
        if not (self.control.is_alone and (is_recovering or self.groups[-1].is_broken)):
            super()._tick()

    def _turns_of_death(self, rank: Rank) -> list[Kind]:
        def is_serving() -> bool:
            return rank.life is Life.SERVING

        def can_learn() -> bool:
            return rank.life in REMAINING and rank.member.can_learn()

        def may_break() -> bool:
            return is_serving() and rank.member.votes.is_broken

        return [
            (0.3, "detect death", can_learn, lambda: self._learn(rank)),
            (0.1, "lose a token", may_break, lambda: rank.breaks("no token")),
            (1.0, "serve on", lambda: self._may_survive(rank), lambda: self._survive_on(rank)),
        ]

    def _may_step(self, rank: Rank) -> bool:
        if rank.life is not Life.SERVING or rank.stream.num_steps > self.lag:
            return False
        number, group = rank.steps.steps, rank.member.votes
        for other in (self.ranks[one] for one in group.members):
            # One that has left the group, or whose process is another, is not waited for.
            if other.steps.steps < number and other.member.votes is group:
                return False
        return not rank.would_wait()

    def _or_break(self, rank: Rank, act: Callable[[], None]) -> None:
        try:
            act()
        except RankError as exc:
            if not rank.member.votes.is_broken:
                raise Violation(f"rank {rank.number} gives up, and none is lost: {exc}") from exc
            rank.breaks(str(exc))

    def _step(self, rank: Rank) -> None:
        group, run = rank.member.votes, rank.agent.group.run
        if group is not self.groups[0] and not group.num_steps:
            committed = self.store.peek(self.store.committed)
            is_named = committed.placement.generation >= rank.table.generation
            if not is_named or run not in {one.run for one in self.store.peek(self.store.runs)}:
                raise Violation(f"rank {rank.number} serves before the store names its placement")
        super()._step(rank)

    def _can_exchange(self) -> bool:
        group = self.groups[-1]
        if group.is_broken:
            return False
        for number in group.members:
            member = self.ranks[number]
            if not member.stream.queue or member.member.votes is not group:
                return False
        return True

    def _exchange(self) -> None:
        """All devices of the group make one step."""
        group = self.groups[-1]
        steps = [self.ranks[one].stream.queue.popleft() for one in group.members]
        assert isinstance(steps[0], Step), "a CPU has copied at once"
        self.claims.made(steps[0])
        self.check_covered(steps[0].rows, f"step {steps[0].number}")
        group.num_steps += 1

    def check_covered(self, rows: NDArray[np.int32], when: str) -> None:
        """Every expert has a slot."""
        for layer, row in enumerate(rows):
            if len({*row.tolist()} - {EMPTY}) < self.deployment.start.num_experts:
                raise Violation(f"layer {layer} lacks an expert in {when}: {row.tolist()}")

    # -- a survivor

    def _learn(self, rank: Rank) -> None:
        rank.member.learn()
        self.store.num_learned += 1

    def _may_survive(self, rank: Rank) -> bool:
        if rank.life not in self.in_fibers:
            return False
        try:
            return rank.number not in self._fibers or self._waits[rank.number]()
        except EplbError:
            return True  # it ends the wait too

    def _survive_on(self, rank: Rank) -> None:
        """Let a survivor get on to where it waits next."""
        if rank.number not in self._fibers:
            rank.stream.queue.clear()  # a pass that was broken off
            self._fibers[rank.number] = greenlet(partial(self._survive, rank))
        self._waits[rank.number] = self._fibers[rank.number].switch()
        if rank.life not in self.in_fibers:
            self._fibers.pop(rank.number, None)

    def _survive(self, rank: Rank) -> None:
        try:
            survivors.serve_on(rank.agent, Stages(lambda: self.now))
        except EplbError as exc:
            rank.life, rank.why = Life.REFUSED, str(exc)
            rank.agent.leave()
            self.counts["refusals"] += 1
            return
        rank.take_turns()
        rank.life = Life.SERVING
        self._watch(rank)

    def _recover(self, agent: ServingRank, store: Store) -> Recovery:
        patient = Deadlines(reports_s=1e9 if self.control.is_alone else 5.0, store_s=1e9)
        return recover(agent, store, deadlines=patient, clock=lambda: self.now)

    def _rejoin(
        self,
        name: str,
        before: RankGroup,
        members: Sequence[int],
        rendezvous: StoreRendezvous,
        **given: Any,
    ) -> RankGroup:
        """Exchange addresses through the store, then form the group of this membership."""
        rank = before.rank
        rendezvous.set(f"{name}: address of {rank}", b"")
        addresses = [f"{name}: address of {other}" for other in members]

        def have_left() -> bool:
            """Whether a survivor gave the group up; the others notice it after a time."""
            return self.rng.random() < 0.1 and any(
                self.ranks[one].life is Life.REFUSED or (one, name) in self._left_groups
                for one in members
            )

        def have_met() -> bool:
            if self.store.peek(lambda: rendezvous.check(addresses)):
                return True
            rendezvous.look()
            if have_left():
                raise RankError(f"rank {rank}: the survivors did not meet in time")
            return False

        try:
            wait_until(have_met)
        except RankError:
            self.ranks[rank].member.learn()
            self._left_groups.add((rank, name))
            raise
        if name not in self._formed:
            gone = {one.number for one in self.ranks if one not in self.remaining()}
            group = Group(tuple(members), self.rng, gone)
            group.has_lost_patience = have_left
            self._formed[name] = group
            self.groups.append(group)
        group = self._formed[name]
        return next_of(before, members, rendezvous, Voting(group, rank), given["run"])

    def _gathered(self, mine: Any, of: GroupOf, check: Callable[[], None]) -> list[Any]:
        try:
            return of.group.gathered(mine, of.rank, check)
        except RuntimeError:
            self.ranks[of.rank].member.learn()  # its other connections broke with that one
            raise

    def check_promise(self) -> None:
        """One loss that nothing else disturbs leaves all others serving."""
        if self.control.is_alone and len(self.remaining()) < NUM_RANKS - 1:
            why = [f"rank {one.number}: {one.why}" for one in self.ranks if one.why]
            raise Violation(f"not all survivors of one loss serve on: {why}")
