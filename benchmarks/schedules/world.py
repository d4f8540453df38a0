"""One schedule: three ranks, a store and a program, one turn at a time, in an order of its seed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.schedules.control import Claims, Control, random_program
from benchmarks.schedules.rank import Life, Rank, World
from benchmarks.schedules.simulated import (
    NUM_DEPLOYMENTS,
    NUM_RANKS,
    Bank,
    Copy,
    Faults,
    Member,
    Step,
    Store,
    Stream,
    Transport,
    Violation,
    Votes,
    deployment,
)
from eplb.errors import RankError

MOST_TURNS = 30_000  # beyond any schedule that gets on
TURNS_AT_ONCE = 8  # from one look at whether all is settled to the next
AT_ONCE = 256
DRAWS = 12  # of all turns; where none of them can be taken, those that can are looked for
PACES = (0.1, 0.5, 1.0, 1.0)  # of a thread, for a whole schedule
SLOW_PACES = (0.02, 0.3, 1.0, 1.0)  # of what threads wait for
SLOW = frozenset({"land", "device", "arrive"})
Can = Callable[[], bool]
Act = Callable[[], object]
Kind = tuple[float, str, Can, Act]  # weight, what, whether, how


@dataclass(frozen=True)
class Turn:
    """Something that may happen."""

    weight: float
    what: str
    rank: int  # -1: to no rank
    can: Can
    act: Act


class Hang(Violation):
    """Nobody gets on."""


class Schedule:
    """One seed's schedule."""

    num_ranks, lags, kind = NUM_RANKS, (0, 0, 1, 2, 4), ""
    make_store, make_member, make_transport = Store, Member, Transport

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.deployment = deployment(rng.randrange(NUM_DEPLOYMENTS), self.num_ranks)
        self.now, self.trace, self.counts = 0.0, list[tuple[str, int]](), Counter[str]()
        self.store = self.make_store("schedules", clock=lambda: self.now)
        self.store.commit(self.deployment.start, expected=None, reason="start")
        self.lag = rng.choice(self.lags)  # steps that hosts may be ahead of their devices
        self.is_instant = rng.random() < 0.2  # chunks land when they are ordered
        self.votes, self.faults = self._votes(), Faults()
        self.ranks = self._ranks()
        self.claims = self._claims()
        for rank in self.ranks:
            self._watch(rank)
        self.control = self._control()
        self.turns, self._drawn = list[Turn](), list[Turn]()
        self._add(self._turns())

    def _votes(self) -> Votes:
        return Votes(self.num_ranks, self.rng)

    def _claims(self) -> Claims:
        return Claims(self.ranks)

    def _control(self) -> Control:
        return Control(self, random_program(self.rng))

    def _ranks(self) -> list[Rank]:
        topology, layers = self.deployment.topology, self.deployment.start.num_layers
        num_slots = int(topology.slots_of_rank[0])
        staging = self.deployment.pace.staging_experts
        numbers = range(self.num_ranks)
        banks = [Bank(layers, num_slots, staging, Stream(not self.lag)) for _ in numbers]
        world = World(self.deployment, self.store, lambda: self.now, self.rng)
        return [
            Rank(
                number,
                world,
                self.make_member(self.votes, number),
                self.make_transport(number, topology, banks, self.faults, self.rng),
            )
            for number in numbers
        ]

    def _watch(self, rank: Rank) -> None:
        rank.transport.dead = rank.member.votes.dead
        rank.transport.watch = self.claims.chunk_ordered
        rank.stream.watch = lambda copy: self.claims.copied(rank.number, copy)
        rank.watch_load = lambda row: self.claims.loaded(rank.number, row)  # type: ignore[method-assign]

    # -- what may happen

    def _turns(self) -> list[Turn]:
        """What could happen at any time; threads differ in speed, for a schedule."""
        control = self.control
        return [
            Turn(0.1, "tick", -1, lambda: True, self._tick),
            Turn(self.rng.choice([0.1, 0.3, 6.0]), "program", -1, control.may_go_on, control.go_on),
            Turn(3.0, "exchange", -1, self._can_exchange, self._exchange),
            *self._turns_of_all(self._turns_of),
        ]

    def _turns_of_all(self, turns_of: Callable[[Rank], list[Kind]]) -> Iterator[Turn]:
        for rank in self.ranks:
            for weight, what, can, act in turns_of(rank):
                pace = self.rng.choice(SLOW_PACES if what in SLOW else PACES)
                yield Turn(weight * pace, what, rank.number, can, act)

    def _turns_of(self, rank: Rank) -> list[Kind]:
        return [
            (0.3, "step", lambda: self._may_step(rank), lambda: self._step(rank)),
            (1.0, "poll store", rank.can_poll_store, rank.poll_store),
            (3.0, "move", rank.can_move, rank.move),
            (1.0, "write", lambda: rank.watcher.has_writing, lambda: rank.watcher.write()),
            (2.0, "arrive", lambda: rank.member.can_arrive, lambda: rank.member.arrive()),
            (3.0, "land", lambda: bool(rank.transport.in_flight), lambda: self._land(rank)),
            (3.0, "device", rank.device_is_free, lambda: self._get_on(rank)),
        ]

    def _turns_of_update(self, rank: Rank) -> list[Kind]:
        return [
            (1.0, "begin update", lambda: self._may_update(rank), lambda: self._update(rank)),
            (1.0, "update", rank.can_update, lambda: self._or_break(rank, rank.update)),
        ]

    def _turns_of_death(self, rank: Rank) -> list[Kind]:
        return [
            (0.3, "detect death", rank.can_detect_death, rank.detect_death),
            (0.1, "lose a token", lambda: self._may_break(rank), lambda: rank.breaks("no token")),
            (0.5, "recover", rank.can_recover, rank.recover),
        ]

    def may_update(self) -> None:
        """From now on weights may be replaced."""
        self._add(self._turns_of_all(self._turns_of_update))

    def may_recover(self) -> None:
        """From now on a rank is dead."""
        self._add(self._turns_of_all(self._turns_of_death))

    def _add(self, turns: Iterable[Turn]) -> None:
        self.turns.extend(turns)
        self.weights = list(itertools.accumulate(turn.weight for turn in self.turns))
        self._drawn.clear()

    def _may_step(self, rank: Rank) -> bool:
        """The exchange of tokens is a barrier; a device may be some steps behind its host."""
        if rank.life is not Life.SERVING or rank.stream.num_steps > self.lag:
            return False
        number = rank.steps.steps
        if any(other.steps.steps < number for other in self.ranks):
            return False
        return not self.control.wants_update(rank) and not rank.would_wait()

    def _may_break(self, rank: Rank) -> bool:
        return bool(self.votes.dead) and not rank.has_ended

    def _may_update(self, rank: Rank) -> bool:
        is_here = rank.life is Life.SERVING and self.control.wants_update(rank)
        return is_here and not rank.stream.num_steps

    # -- what happens

    def _step(self, rank: Rank) -> None:
        def step() -> None:
            self.claims.begun(rank.number, rank.step())
            if self.rng.random() < 0.05:
                rank.step_again()

        self._or_break(rank, step)

    def _or_break(self, rank: Rank, act: Callable[[], None]) -> None:
        try:
            act()
        except RankError as exc:
            if not self.votes.dead:
                raise Violation(f"rank {rank.number} gives up, and nobody died: {exc}") from exc
            rank.breaks(str(exc))

    def _can_exchange(self) -> bool:
        if self.votes.dead:
            return False
        queues = [rank.stream.queue for rank in self.ranks]
        return all(orders and isinstance(orders[0], Step) for orders in queues)

    def _exchange(self) -> None:
        """All devices make one step."""
        steps = [rank.stream.queue.popleft() for rank in self.ranks]
        first = steps[0]
        assert isinstance(first, Step), "the heads were looked at"
        self.claims.made(first)

    def _get_on(self, rank: Rank) -> None:
        copy = rank.get_on()
        if isinstance(copy, Copy):
            self.claims.copied(rank.number, copy)
            rank.bank.make(copy)

    def _land(self, rank: Rank) -> None:
        rank.transport.land(self.rng.choice(rank.transport.in_flight))

    def _update(self, rank: Rank) -> None:
        rank.begin_update(self.control.version)

    def _tick(self) -> None:
        self.now += 0.5

    # -- a whole schedule

    def run(self) -> None:
        """Take turns until all is settled.

        Raises:
            Violation: something happened that must never happen.
            Hang: it does not settle.
        """
        while not self.control.is_settled():
            if self.counts["turns"] >= MOST_TURNS:
                raise Hang(f"not settled after {MOST_TURNS} turns: {self.control.state_text()}")
            for _ in range(TURNS_AT_ONCE):
                self.take_turn()
            self.counts["turns"] += TURNS_AT_ONCE
        self.control.check_end()

    def _draw(self) -> Turn:
        if not self._drawn:  # many at once: a draw alone takes longer than a turn's own look
            self._drawn = self.rng.choices(self.turns, cum_weights=self.weights, k=AT_ONCE)
        return self._drawn.pop()

    def _any_turn(self) -> Turn:
        """Where little can happen: one of all that can."""
        turns = [turn for turn in self.turns if turn.can()]
        return self.rng.choices(turns, [turn.weight for turn in turns])[0]

    def take_turn(self) -> None:
        """Let one thing happen that can."""
        for _ in range(DRAWS):
            turn = self._draw()
            if turn.can():
                break
        else:
            turn = self._any_turn()
        self.trace.append((turn.what, turn.rank))
        turn.act()
        if self.is_instant:
            for rank in self.ranks:
                while rank.transport.in_flight:
                    self._land(rank)
