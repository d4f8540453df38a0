"""Every interleaving of two and of three ranks over the real phase machine and the real votes.

An explicit-state search: ``rebalance/protocol/phases.py`` and ``rebalance/protocol/ballot.py`` run
as they are; what surrounds them (when a plan is seen, bytes arrive, votes are late, ranks wish to
abort or die, the store is written) happens in every possible order. Steps are counted from the
slowest rank's even boundary, so that the states are finite although serving goes on for ever.

A rank passes boundary n only once every rank has passed n - 1: the exchange of tokens in each step
is a barrier. Votes start at even boundaries and are read at the next odd one, or, when late and
nothing was prepared, before the next vote.

In flip mode there is one layer, which every transaction changes, and a rank's slots form a circle:

    slots  0 1 2   two serve and one is spare; transaction n of all writes slot n + 2 and
           L L S   frees slot n, which it reads at every peer; n counts on from plan to plan

The device is then a third clock: a swap is ordered at a boundary and complete some time after it.

In every state with a dead rank the survivors could stop where they are and recover: what
``eplb/migration/recovery.py`` decides then, and ``rebalance/recovery.py`` has each of
them do, is worked out there and then, and must bring all of them and the store to one placement.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import pytest

from eplb.errors import RankError
from eplb.migration.recovery import Recovery, SurvivorReport, WrittenEnd, decide
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN, Ballot, Verdict
from rebalance.protocol.phases import Phase, PlanRef, RankPhase, Swap, missed_verdicts

VOTE_EVERY = 2
NONE = -9  # no vote, no transaction, no step

NUM_SERVING = 2  # slots of a rank that serve at any time, in flip mode

# Per layer, the plan that wrote what it serves, 0 for the start. In flip mode, which has one layer,
# per transaction that was applied, the plan that it was of.
Layers = tuple[int, ...]
Missed = Callable[[RankPhase, Recovery], list[tuple[Ballot, Verdict]]]
ReadVerdict = Callable[[RankPhase, Ballot, Verdict], tuple[RankPhase, Swap | None]]


class Violation(AssertionError):
    """Something that must never happen, happened."""


class Numbers:
    """Numbers for values, so that a state is a tuple of integers and quick to look up."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._number_of: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        number = self._number_of.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def value(self, number: int) -> Any:
        return self._values[number]


NUMBERS = Numbers()


def number_of(state: RankPhase) -> int:
    # Reasons are for people: one stands for all, lest states differ in nothing else.
    return NUMBERS.of(replace(state, abort_reason="any") if state.abort_reason else state)


@cache
def transit(transition: Callable[..., RankPhase], phase: int, *news: object) -> int:
    return number_of(transition(NUMBERS.value(phase), *news))


class Write(NamedTuple):
    """What a rank has still to tell the store: what serves after a plan."""

    plan_id: int
    base: int
    generation: int
    serving: Layers


class Rank(NamedTuple):
    at: int  # the boundary that it passes next
    phase: int  # number of its RankPhase
    serving: Layers
    awaits: int = NONE  # the boundary whose vote it has still to read
    reading: int = NONE  # the transaction whose bytes it copies from its peers
    is_draining: bool = False  # the device is not done with the last swap; flip mode only
    to_write: tuple[Write, ...] = ()
    wants_halt: bool = False
    halt_at: int = NONE
    has_ended: bool = False  # halted, or found a vote broken: runs no further step
    is_dead: bool = False
    closed: tuple[int, int] = (NO_PLAN, 0)  # the plan that made its generation, how much of it

    @property
    def state(self) -> RankPhase:
        state: RankPhase = NUMBERS.value(self.phase)
        return state

    def after(self, transition: Callable[..., RankPhase], *news: object) -> Rank:
        """This rank once a transition of ``rebalance.protocol.phases`` was made."""
        return self._replace(phase=transit(transition, self.phase, *news))


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    votes: tuple[tuple[int, tuple[int, ...]], ...]  # (boundary, number of each rank's ballot)
    open_plan: PlanRef | None
    open_base: Layers  # what the open plan starts from
    committed: tuple[int, Layers]  # generation, and what serves
    num_published: int
    wishes: int  # to abort, that may still arise
    halts: int
    deaths: int


@dataclass(frozen=True)
class Scenario:
    """What may happen, and how ranks behave."""

    plans: tuple[int, ...]  # transactions of each plan, each one layer; published in order
    wishes: int = 0
    halts: int = 0
    deaths: int = 0
    is_withdrawn: bool = False  # the controller may close a plan at any moment
    staging: int = 2  # transactions that fit the ring
    read_verdict: ReadVerdict = phases.read_verdict
    skips_when_prepared: bool = False  # a broken rank: never waits for a late vote
    stages_unadopted: bool = False  # a broken rank: does not wait until all work on the plan
    spares: int = 0  # of each rank; more than 0 is flip mode
    stages_at_once: bool = False  # a broken rank: waits for no earlier transaction
    completes_early: bool = False  # a broken rank: says applied when a swap is only ordered
    adopts_early: bool = False  # a broken rank: adopts a plan while a swap is not complete
    missed: Missed = missed_verdicts
    num_ranks: int = 2
    is_store_asked: bool = True  # broken survivors: do not look what the dead have written

    def reads_after(self, number: int) -> int:
        """Transaction.reads_after of a plan's transaction, counted from 0."""
        # It writes the slot that the transaction ``spares`` before it freed.
        return max(0, number + 1 - self.spares) if self.spares else 0

    def start(self) -> World:
        layers = () if self.spares else (0,) * max(self.plans, default=1)
        rank = Rank(0, NUMBERS.of(RankPhase(generation=0)), layers)
        store = (None, layers, (0, layers), 0)
        return World((rank,) * self.num_ranks, (), *store, self.wishes, self.halts, self.deaths)


# -- one rank


def with_rank(world: World, index: int, rank: Rank) -> World:
    ranks = world.ranks
    return world._replace(ranks=(*ranks[:index], rank, *ranks[index + 1 :]))


def hear(scenario: Scenario, world: World, rank: Rank) -> Rank:
    """Rank.on_store_update: adopt what is published, or wish for the end of what is not."""
    plan, published = rank.state.plan, world.open_plan
    if plan is not None:
        is_open = published is not None and published.plan_id == plan.plan_id
        has_been_committed = world.committed[0] > plan.base_generation
        if not is_open and not has_been_committed:
            return rank.after(phases.want_abort, plan.plan_id, "withdrawn")
    elif rank.is_draining and not scenario.adopts_early:
        return rank
    elif published is not None and world.open_base == rank.serving:
        return rank.after(phases.see_plan, published)
    return rank


def may_stage(scenario: Scenario, rank: Rank) -> bool:
    """Mover.bring: in order, when the phase machine allows it, and with room in the ring."""
    state = rank.state
    if state.plan is None or rank.reading != NONE or state.prepared == state.plan.num_transactions:
        return False
    if scenario.stages_unadopted and state.is_preloaded:
        state = replace(state, is_adopted=True)
    reads_after = 0 if scenario.stages_at_once else scenario.reads_after(state.prepared)
    has_room = scenario.spares > 0 or state.prepared - state.swapped < scenario.staging
    return has_room and phases.may_stage(state, reads_after)


def off_path(scenario: Scenario, world: World, index: int) -> Iterator[tuple[str, World]]:
    """What the threads of one rank may do next, whatever its steps do."""
    rank = world.ranks[index]
    state, plan = rank.state, rank.state.plan

    def becomes(what: str, after: Rank) -> tuple[str, World]:
        return f"rank {index} {what}", with_rank(world, index, after)

    if rank.to_write:
        yield f"rank {index} writes", written(world, index)
    elif (heard := hear(scenario, world, rank)) != rank:
        yield becomes("hears the store", heard)
    if rank.is_draining:
        drained = (
            rank if plan is None else rank.after(phases.completed, plan.plan_id, state.swapped)
        )
        yield becomes("has swapped on its device", drained._replace(is_draining=False))
    if plan is None:
        return
    if state.phase is not Phase.ABORTED and not state.is_preloaded and not state.abort_reason:
        yield becomes("preloads", rank.after(phases.preloaded, plan.plan_id))
    if may_stage(scenario, rank):
        check_slots(scenario, world, index) if scenario.spares else check_sources(world, index)
        reading = rank._replace(reading=state.prepared)
        yield becomes(f"reads transaction {state.prepared}", reading)
    if rank.reading != NONE:
        staged = rank.after(phases.staged, plan.plan_id, rank.reading + 1)
        yield becomes("has staged", staged._replace(reading=NONE))
    elif state.phase is Phase.ABORTED:
        yield becomes("has drained", rank.after(phases.aborted))
    if world.wishes and state.phase is not Phase.ABORTED and not state.abort_reason:
        label, wished = becomes("fails", rank.after(phases.want_abort, plan.plan_id, "failed"))
        yield label, wished._replace(wishes=world.wishes - 1)


# -- a rank's steps


def boundaries(scenario: Scenario, world: World, index: int) -> Iterator[tuple[str, World]]:
    """How one rank may pass its next boundary, as Rank.step does."""
    rank = world.ranks[index]
    if any(other.at < rank.at for other in world.ranks):
        return  # a slower rank has not begun the step before
    if rank.awaits == NONE:
        yield passed(world, index, rank, "passes")
        return
    ballots = dict(world.votes)[rank.awaits]
    is_due = rank.at % VOTE_EVERY == 0
    has_nothing_to_lose = NUMBERS.value(ballots[index]).prepared == rank.state.swapped
    if not is_due and (has_nothing_to_lose or scenario.skips_when_prepared):
        yield passed(world, index, rank, "finds the vote late and passes")
    if any(other.is_dead for other in world.ranks):
        broken = rank._replace(has_ended=True)
        yield f"rank {index} finds the vote broken", with_rank(world, index, broken)
    if NONE not in ballots:
        yield passed(world, index, obeyed(scenario, world, index, ballots), "reads and passes")


@cache
def verdict_of(ballots: tuple[int, ...]) -> Verdict:
    columns = zip(*(NUMBERS.value(ballot).encode() for ballot in ballots), strict=True)
    return Verdict.decode([min(column) for column in columns])


@cache
def read(
    read_verdict: ReadVerdict, phase: int, ballot: int, verdict: Verdict
) -> tuple[int, Swap | None]:
    state, order = read_verdict(NUMBERS.value(phase), NUMBERS.value(ballot), verdict)
    return number_of(state), order


@cache
def ballot_of(phase: int, wants_halt: bool) -> int:
    # The boundary's number is left out of the ballot: states would never repeat.
    state = NUMBERS.value(phase)
    return NUMBERS.of(phases.ballot(state, step=0, membership=0, halt=wants_halt))


def obeyed(scenario: Scenario, world: World, index: int, ballots: tuple[int, ...]) -> Rank:
    """Voting.apply_verdict, with a swap applied at once."""
    rank = world.ranks[index]
    verdict = verdict_of(ballots)
    halt_at, before = rank.halt_at, rank.state
    if verdict.halt and halt_at == NONE:
        halt_at = rank.awaits + VOTE_EVERY
    phase, order = read(scenario.read_verdict, rank.phase, ballots[index], verdict)
    rank = rank._replace(phase=phase, awaits=NONE, halt_at=halt_at)
    state = rank.state
    if state.frozen_reason:
        raise Violation(f"rank {index} is frozen: {state.frozen_reason}")
    if order is not None:
        return (flipped if scenario.spares else swapped)(scenario, world, index, rank, order)
    if state.phase is Phase.ABORTED and before.phase is not Phase.ABORTED:
        assert state.plan is not None, "an aborted plan drains first"
        base = state.plan.base_generation
        write = Write(state.plan.plan_id, base, state.generation, rank.serving)
        closed = (state.plan.plan_id, state.swapped) if state.swapped else rank.closed
        return rank._replace(to_write=(*rank.to_write, write), closed=closed)
    return rank


def swapped(scenario: Scenario, world: World, index: int, rank: Rank, order: Swap) -> Rank:
    plan = rank.state.plan
    assert plan is not None, "only a plan is swapped"
    layers = range(order.first, order.last)
    for reader, other in enumerate(world.ranks):
        if other.reading in layers:
            raise Violation(f"rank {index} overwrites layer {other.reading} that {reader} reads")
    done = [layer for layer, writer in enumerate(rank.serving) if writer == plan.plan_id]
    if done != list(range(order.first)):
        raise Violation(f"rank {index} swaps {order} of plan {plan.plan_id} on {rank.serving}")
    serving = tuple(plan.plan_id if n in layers else w for n, w in enumerate(rank.serving))
    rank = rank.after(phases.completed, plan.plan_id, order.last).after(phases.finish_swap)
    return committed(rank._replace(serving=serving), plan)


def flipped(scenario: Scenario, world: World, index: int, rank: Rank, order: Swap) -> Rank:
    """Swapper.swap in flip mode: the table alone."""
    plan = rank.state.plan
    assert plan is not None, "only a plan is swapped"
    if rank.serving.count(plan.plan_id) != order.first:
        raise Violation(f"rank {index} swaps {order} of plan {plan.plan_id} on {rank.serving}")
    for owner, other in enumerate(world.ranks):
        # A peer that has finished the plan has swapped it too, and before that prepared it.
        is_behind = other.state.plan == plan and other.state.prepared < order.last
        if is_behind and not other.is_dead:
            raise Violation(f"rank {index} routes to a slot of rank {owner} that is not ready")
    applied = (plan.plan_id,) * (order.last - order.first)
    rank = rank._replace(serving=rank.serving + applied, is_draining=True)
    if scenario.completes_early:
        rank = rank.after(phases.completed, plan.plan_id, order.last)
    return committed(rank.after(phases.finish_swap), plan)


def committed(rank: Rank, plan: PlanRef) -> Rank:
    """The rank with the end of its plan to tell, if it was the end."""
    if rank.state.plan is None:
        serving = rank.serving
        write = Write(plan.plan_id, plan.base_generation, rank.state.generation, serving)
        closed = plan.plan_id, plan.num_transactions
        rank = rank._replace(to_write=(*rank.to_write, write), closed=closed)
    return rank


def passed(world: World, index: int, rank: Rank, how: str) -> tuple[str, World]:
    """The rank begins the step after its boundary, and votes before it when a vote is due."""
    label = f"rank {index} {how} boundary {rank.at}"
    if rank.at == rank.halt_at:
        return f"{label}: halts", with_rank(world, index, rank._replace(has_ended=True))
    votes = dict(world.votes)
    if rank.at % VOTE_EVERY == 0:
        cast = list(votes.get(rank.at, (NONE,) * len(world.ranks)))
        cast[index] = ballot_of(rank.phase, rank.wants_halt)
        votes[rank.at] = tuple(cast)
        rank = rank._replace(awaits=rank.at)
    after = with_rank(world, index, rank._replace(at=rank.at + 1))
    after = after._replace(votes=tuple(sorted(votes.items())))
    check_step(after, index)
    return label, after


# -- after a death


def words_of(rank: Rank, index: int) -> SurvivorReport:
    """RankRecovery.survivor_report."""
    state = rank.state
    plan = state.plan if state.phase is not Phase.ABORTED else None
    return SurvivorReport(
        run="run",
        rank=index,
        membership=0,
        generation=state.generation,
        weights_version=0,
        plan_id=plan.plan_id if plan else NO_PLAN,
        plan_hash=plan.plan_hash if plan else 0,
        swapped=state.swapped if plan else 0,
        prepared=state.prepared if plan else 0,
        closed_plan_id=rank.closed[0],
        closed_applied=rank.closed[1],
        dead=(),
        time=0.0,
    )


def written_end(world: World, rank: Rank, words: SurvivorReport) -> WrittenEnd | None:
    """What the store says of the plan that a survivor is at."""
    generation, serving = world.committed
    if words.plan_id == NO_PLAN or generation != words.generation + 1:
        return None
    applied = words.swapped if serving == rank.serving else words.prepared
    return WrittenEnd(words.plan_id, applied, generation)


def recovered(scenario: Scenario, rank: Rank, record: Recovery) -> tuple[int, Layers]:
    """RankRecovery.apply_recovery: the generation and what serves afterwards."""
    state, serving = phases.freeze(rank.state, "a rank died"), rank.serving
    for cast, verdict in scenario.missed(state, record):
        plan = state.plan
        state, order = phases.read_verdict(state, cast, verdict)
        if order is None or plan is None:
            continue
        state = phases.finish_swap(phases.completed(state, plan.plan_id, order.last))
        layers = range(order.first, order.last)
        if scenario.spares:
            serving += (plan.plan_id,) * len(layers)
        else:
            serving = tuple(plan.plan_id if n in layers else w for n, w in enumerate(serving))
    return state.generation, serving


def check_recovery(scenario: Scenario, world: World) -> None:
    """Survivors that stop where they are end with one placement, which the store can name."""
    alive = {n: rank for n, rank in enumerate(world.ranks) if not rank.is_dead}
    dead = set(range(len(world.ranks))) - alive.keys()
    if not dead or not alive:
        return
    words = {n: words_of(rank, n) for n, rank in alive.items()}
    for n, rank in alive.items():  # any of them may be the one that decides
        written = written_end(world, rank, words[n]) if scenario.is_store_asked else None
        try:
            record = decide(list(words.values()), dead, (), written)
        except RankError as exc:
            raise Violation(f"survivors cannot agree: {exc}") from exc
        ends = {recovered(scenario, one, record) for one in alive.values()}
        if len(ends) > 1:
            raise Violation(f"survivors end with {ends}")
        ((generation, serving),) = ends
        committed, stored = world.committed
        if generation < committed or (generation == committed and serving != stored):
            raise Violation(
                f"survivors end with generation {generation} {serving}, "
                f"the store has {committed} {stored}"
            )


# -- the store


def written(world: World, index: int) -> World:
    """Watcher._write over the store's rules: compare and set, the first writes."""
    rank = world.ranks[index]
    write, *rest = rank.to_write
    world = with_rank(world, index, rank._replace(to_write=tuple(rest)))
    generation, serving = world.committed
    if write.generation == write.base:  # nothing of the plan was swapped
        is_open = world.open_plan is not None and world.open_plan.plan_id == write.plan_id
        return world._replace(open_plan=None) if is_open else world
    if write.generation < generation:
        return world
    if write.generation == generation:
        if write.serving != serving:
            raise Violation(f"generation {generation} is {serving} and {write.serving}")
        return world
    if write.base != generation:
        raise Violation(f"generation {write.generation} follows {write.base}, not {generation}")
    return world._replace(committed=(write.generation, write.serving), open_plan=None)


def controlled(scenario: Scenario, world: World) -> Iterator[tuple[str, World]]:
    """What the controller may do."""
    if world.open_plan is not None:
        if scenario.is_withdrawn:
            yield "the plan is withdrawn", world._replace(open_plan=None)
        return
    if world.num_published < len(scenario.plans):
        plan_id = world.num_published + 1
        generation, serving = world.committed
        plan = PlanRef(plan_id, plan_id, generation, scenario.plans[plan_id - 1], 1)
        yield (
            f"plan {plan_id} is published",
            world._replace(open_plan=plan, open_base=serving, num_published=plan_id),
        )


# -- claims


def check_step(world: World, index: int) -> None:
    """No two ranks run one step with different maps, or one step that another halted before."""
    rank = world.ranks[index]
    for number, other in enumerate(world.ranks):
        if other.at == rank.at and other.serving != rank.serving:
            raise Violation(
                f"ranks {index} and {number} run one step with {rank.serving} and {other.serving}"
            )
        if other.has_ended and not other.is_dead and other.at == other.halt_at == rank.at - 1:
            raise Violation(f"rank {index} runs a step before which rank {number} halted")


class Slot(Enum):
    """What a slot of a rank is to one reader of the maps, and to its owner."""

    LIVE = "live"  # tokens are routed to it
    DRAINING = "draining"  # they were until the last swap, which the device is not done with
    SPARE = "spare"
    FILLING = "filling"
    READY = "ready"  # holds the bytes of a transaction that is not swapped yet


def slot_of(scenario: Scenario, rank: Rank, slot: int) -> Slot:
    """How one of a rank's slots stands, by the rank's own map, mover and device."""
    num_slots, applied = NUM_SERVING + scenario.spares, len(rank.serving)
    if slot in serving_slots(scenario, applied):
        return Slot.LIVE
    if rank.is_draining and slot in serving_slots(scenario, applied - 1):
        return Slot.DRAINING
    state = rank.state
    first = applied - state.swapped  # what was applied before its plan
    if rank.reading != NONE and slot == (first + rank.reading + NUM_SERVING) % num_slots:
        return Slot.FILLING
    if slot in {
        (first + n + NUM_SERVING) % num_slots for n in range(state.swapped, state.prepared)
    }:
        return Slot.READY
    return Slot.SPARE


def serving_slots(scenario: Scenario, applied: int) -> set[int]:
    return {(applied + n) % (NUM_SERVING + scenario.spares) for n in range(NUM_SERVING)}


def check_slots(scenario: Scenario, world: World, index: int) -> None:
    """What a rank begins to write is spare to all; what it begins to read serves, and is let be."""
    rank = world.ranks[index]
    num_slots = NUM_SERVING + scenario.spares
    number = len(rank.serving) - rank.state.swapped + rank.state.prepared  # of all transactions
    written, read_from = (number + NUM_SERVING) % num_slots, number % num_slots
    found = slot_of(scenario, rank, written)
    if found is not Slot.SPARE:
        raise Violation(f"rank {index} writes slot {written}, which is {found.value}")
    for peer, other in enumerate(world.ranks):
        if peer == index:
            continue
        if written in serving_slots(scenario, len(other.serving)):
            raise Violation(f"rank {index} writes slot {written}, to which rank {peer} routes")
        if written == being_read(scenario, other):
            raise Violation(f"rank {index} writes slot {written}, which rank {peer} reads")
        source = slot_of(scenario, other, read_from)
        if source is not Slot.LIVE:
            raise Violation(f"rank {index} reads a slot of rank {peer} that is {source.value}")


def being_read(scenario: Scenario, rank: Rank) -> int:
    """The slot that a rank's mover reads at every peer now."""
    if rank.reading == NONE:
        return NONE
    first = len(rank.serving) - rank.state.swapped
    return (first + rank.reading) % (NUM_SERVING + scenario.spares)


def check_sources(world: World, index: int) -> None:
    """What is read from a peer is what the reader's plan starts from."""
    rank = world.ranks[index]
    layer = rank.state.prepared
    for number, other in enumerate(world.ranks):
        if other.serving[layer] != rank.serving[layer]:
            raise Violation(f"rank {index} reads layer {layer} of rank {number}, which is another")


def is_settled(scenario: Scenario, world: World) -> bool:
    """Every plan is finished or dropped, on all ranks and in the store."""
    if scenario.halts and not world.halts:
        return all(rank.has_ended for rank in world.ranks)
    return (
        world.num_published == len(scenario.plans)
        and world.open_plan is None
        and all(rank.state.plan is None and not rank.to_write for rank in world.ranks)
    )


# -- the search


def successors(scenario: Scenario, world: World) -> Iterator[tuple[str, World]]:
    yield from controlled(scenario, world)
    for index, rank in enumerate(world.ranks):
        if rank.is_dead:
            continue
        yield from off_path(scenario, world, index)
        if not rank.has_ended:
            yield from boundaries(scenario, world, index)
        if world.halts and not rank.wants_halt:
            asks = with_rank(world, index, rank._replace(wants_halt=True))
            yield f"rank {index} asks for a halt", asks._replace(halts=world.halts - 1)
        if world.deaths:
            dies = with_rank(world, index, rank._replace(is_dead=True, has_ended=True))
            yield f"rank {index} dies", dies._replace(deaths=world.deaths - 1)


def canonical(world: World) -> World:
    """The same situation, with boundaries counted from the slowest rank's, and ranks in order."""
    base = min(rank.at for rank in world.ranks) // VOTE_EVERY * VOTE_EVERY
    needed = {
        number
        for rank in world.ranks
        if not rank.has_ended
        for number in (rank.awaits, rank.at - rank.at % VOTE_EVERY)
    }
    votes = [(n - base, ballots) for n, ballots in world.votes if n in needed]
    ranks = [shifted(rank, base) if base else rank for rank in world.ranks]
    # Ranks differ in nothing but their number: any order of them is one state.
    order = sorted(
        range(len(ranks)), key=lambda n: hash((ranks[n], *(ballots[n] for _, ballots in votes)))
    )
    return world._replace(
        ranks=tuple(ranks[n] for n in order),
        votes=tuple((number, tuple(cast[n] for n in order)) for number, cast in votes),
    )


def shifted(rank: Rank, base: int) -> Rank:
    awaits, halt_at = (n if n == NONE else n - base for n in (rank.awaits, rank.halt_at))
    return rank._replace(at=rank.at - base, awaits=awaits, halt_at=halt_at)


@dataclass
class Explored:
    """All states that can be reached, and how."""

    reached_by: dict[World, tuple[World | None, str]] = field(default_factory=dict)
    before: dict[World, list[World]] = field(default_factory=dict)

    def story(self, world: World | None) -> str:
        """One way to get there, event by event."""
        lines = []
        while world is not None:
            world, label = self.reached_by[world]
            lines.append(label)
        return "\n".join(reversed(lines))


def explore(scenario: Scenario) -> Explored:
    """Visit every state, breadth first, so that the story of a violation is a shortest one.

    Raises:
        Violation: with the events that lead to it.
    """
    start = canonical(scenario.start())
    explored = Explored({start: (None, "start")})
    front = [start]
    gc.disable()  # a million small tuples and no cycle: collecting would take a third of the time
    try:
        while front:
            front = visit(scenario, explored, front)
    finally:
        gc.enable()
    return explored


def visit(scenario: Scenario, explored: Explored, front: list[World]) -> list[World]:
    """Note what can follow the states of ``front``; return those that are new."""
    reached = []
    for world in front:
        try:
            check_recovery(scenario, world)
            following = [(what, canonical(w)) for what, w in successors(scenario, world)]
        except AssertionError as exc:  # of ours, or one that the phase machine states itself
            raise Violation(f"{exc}, after\n{explored.story(world)}") from exc
        for label, after in following:
            explored.before.setdefault(after, []).append(world)
            if after not in explored.reached_by:
                explored.reached_by[after] = (world, label)
                reached.append(after)
    return reached


def stuck(scenario: Scenario, explored: Explored) -> list[World]:
    """States from which no settled one can be reached."""
    good = {world for world in explored.reached_by if is_settled(scenario, world)}
    front = list(good)
    while front:
        earlier = {before for world in front for before in explored.before.get(world, [])} - good
        good |= earlier
        front = list(earlier)
    return [world for world in explored.reached_by if world not in good]


# -- what holds

# Of three ranks a few thousand states each, and for all others up to a million.
FEW_STATES = [
    Scenario((2,)),
    Scenario((1, 1)),
    Scenario((), halts=3),
    Scenario((1,), halts=1),
    Scenario((1,), deaths=1),
    Scenario((2,), spares=1),
]
MORE_STATES = [
    Scenario((1,), is_withdrawn=True),
    Scenario((2,), wishes=1),
    Scenario((2,), wishes=1, staging=1),
    Scenario((3,), spares=2),
    Scenario((2,), deaths=1),
    Scenario((2,), halts=2),
    Scenario((1, 1), spares=1),
    Scenario((2,), spares=1, wishes=1),
    Scenario((2,), spares=1, deaths=1),
]
MOST_STATES = [
    Scenario((1, 1), wishes=1),
    Scenario((2,), spares=1, is_withdrawn=True),
    Scenario((1, 1), spares=1, wishes=1),
    Scenario((1, 1), is_withdrawn=True),
    Scenario((2,), spares=2, wishes=1),
]


def marked(scenarios: list[Scenario], num_ranks: int, *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(replace(one, num_ranks=num_ranks), marks=marks) for one in scenarios]


def holds(scenario: Scenario) -> Explored:
    explored = explore(scenario)
    found = stuck(scenario, explored)
    num_states = len(explored.reached_by)
    print(f"{name_of(scenario)}: {num_states} states")

    # A death may leave nothing but recovery: then only what must never happen is claimed.
    if not scenario.deaths:
        assert not found, (
            f"{len(found)} of {num_states} states lead nowhere:\n{explored.story(found[0])}"
        )
    return explored


def name_of(scenario: Scenario) -> str:
    faults = [name for name in ("wishes", "halts", "deaths") if getattr(scenario, name)]
    if scenario.is_withdrawn:
        faults.append("withdrawals")
    room = f"spares {scenario.spares}" if scenario.spares else f"ring {scenario.staging}"
    return f"{scenario.num_ranks} ranks plans {scenario.plans} {room} {' '.join(faults)}".strip()


@pytest.mark.parametrize(
    "scenario",
    [
        *marked([*FEW_STATES, *MORE_STATES], 2),
        *marked(MOST_STATES, 2, pytest.mark.system),
        *marked(FEW_STATES, 3, pytest.mark.system),
        *marked([*MORE_STATES, *MOST_STATES], 3, pytest.mark.slow),
    ],
    ids=name_of,
)
def test_ranks_agree_in_every_step_and_every_story_can_end(scenario: Scenario) -> None:
    holds(scenario)


def test_plan_that_one_rank_fails_is_finished_on_all_or_dropped_on_all() -> None:
    scenario = Scenario((1,), wishes=1)

    ends = {
        (world.committed, *((rank.serving, rank.state.generation) for rank in world.ranks))
        for world in holds(scenario).reached_by
        if is_settled(scenario, world)
    }

    dropped, finished = ((0,), 0), ((1,), 1)
    assert ends == {((0, (0,)), *[dropped] * 2), ((1, (1,)), *[finished] * 2)}


# -- the search can fail


def on_its_own_flag(
    state: RankPhase, cast: Ballot, verdict: Verdict
) -> tuple[RankPhase, Swap | None]:
    """A broken rank: it swaps what it has itself prepared, not what all have."""
    return phases.read_verdict(state, cast, replace(verdict, prepared=cast.prepared))


def deaf_to_aborts(
    state: RankPhase, cast: Ballot, verdict: Verdict
) -> tuple[RankPhase, Swap | None]:
    """A broken rank: it drops a plan only when it wishes so itself."""
    own = cast.plan_id if cast.abort else NO_PLAN
    return phases.read_verdict(state, cast, replace(verdict, unwanted_up_to=own))


def never_forward(state: RankPhase, record: Recovery) -> list[tuple[Ballot, Verdict]]:
    """A broken survivor: it drops the plan where it stands itself."""
    return missed_verdicts(state, replace(record, applied=0))


BROKEN = {
    "not rolled forward": (
        Scenario((1,), deaths=1, missed=never_forward),
        "survivors end with",
    ),
    "store not asked": (Scenario((1,), deaths=1, is_store_asked=False), "the store has 1"),
    "own flag": (Scenario((1,), read_verdict=on_its_own_flag), "run one step with"),
    "skipped vote": (Scenario((1,), skips_when_prepared=True), "run one step with"),
    "deaf": (Scenario((1,), wishes=1, read_verdict=deaf_to_aborts), "run one step with"),
    "early stage": (Scenario((1,), stages_unadopted=True), "preload cannot become swap"),
    "no wait for spares": (Scenario((2,), spares=1, stages_at_once=True), "0, which is live"),
    "no wait for two spares": (Scenario((3,), spares=2, stages_at_once=True), "0, which is live"),
    "early applied": (Scenario((2,), spares=1, completes_early=True), "0, which is draining"),
    "early adoption": (Scenario((1, 1), spares=1, adopts_early=True), "0, which is draining"),
}


@pytest.mark.parametrize(("broken", "finding"), BROKEN.values(), ids=BROKEN)
def test_explorer_finds_each_broken_rule(broken: Scenario, finding: str) -> None:
    with pytest.raises(Violation, match=finding) as found:
        holds(broken)

    assert "plan 1 is published" in str(found.value)
